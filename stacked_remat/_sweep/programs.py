"""Programs that are called outside of `jax.jit`: traced at each call, compiled once for
equal jaxprs.

Outside of `jax.jit`, a primitive of this library is evaluated by compiling its loops.
`jax.jit` would look for an earlier executable by the function, and so either compile at
each call, since each traces its layers anew, or keep a user's function, and what that
closes over, alive. Here the key is what was traced:

    run(jitted_fn, *args)
      trace          jitted_fn's jaxpr for these types; closed-over arrays become inputs
      structure      its key: equations, types, parameters, inner jaxprs
      _executables   a compiled program for the key, the placement of the inputs and the
                     settings of JAX; compiled if there is none

A key has values where values decide what a program computes, and weak references by
identity to arrays within it, which an inner `jax.jit` closes over. An object that may
change or that can't be compared (`Structure.is_closed` is then False) makes a program
like no other: `jax.jit` runs it. So nothing here knows a user's function, or keeps an
array: the only things kept are executables. `jax.clear_caches` forgets them.
"""

import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue, Tracer, eval_jaxpr
from jax.extend import core

from .._activity import expansion
from .._compat import (
    cleared_with_jax,
    is_eager,
    numbers_are_checked,
    trace_context,
    without_constants,
)
from .._static import PyTree

T = TypeVar("T")

# Of these primitives only one parameter says what they compute; the others are rules
# for transformations.
_COMPUTES = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}


# Types of parameters of primitives whose values are equal where they mean the same.
_VALUES = (
    AbstractValue,
    core.Primitive,
    core.Effect,
    jax.sharding.Sharding,
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
    jax.sharding.PartitionSpec,
    jax.ShapeDtypeStruct,
    jax.tree_util.SequenceKey,
    jax.tree_util.DictKey,
    jax.tree_util.GetAttrKey,
    jax.tree_util.FlattenedIndexKey,
    jax.tree_util.PyTreeDef,
)


class Structure(NamedTuple):
    """What a jaxpr computes, for comparison with others."""

    # Equal for jaxprs that compute the same.
    key: Hashable
    # The arrays in the key. Once one of them is gone no key equals this one, and the
    # executable is forgotten.
    arrays: tuple["_Identity", ...]
    # Whether all in it is compared by value, or is an array.
    is_closed: bool


class _Identity:
    """An object, compared by identity, not kept alive."""

    def __init__(self, value: Any):
        self._hash = id(value)
        try:
            self.value: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # it has no weak references, and so equals nothing
            self.value = lambda: None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        mine = self.value()
        return (
            isinstance(other, _Identity) and mine is not None and mine is other.value()
        )

    def __hash__(self) -> int:
        return self._hash


# Both live as long as the jaxprs that they are about.
_structures: weakref.WeakKeyDictionary[core.Jaxpr, Structure] = (
    weakref.WeakKeyDictionary()
)
_found: weakref.WeakKeyDictionary[core.Jaxpr, dict[Hashable, Any]] = (
    weakref.WeakKeyDictionary()
)


def found_in(jaxpr: core.Jaxpr, key: Hashable, find: Callable[[], T]) -> T:
    """What `find` finds of a jaxpr, found once while the jaxpr lives. It must not hold
    the jaxpr itself.

    What has traced values is found anew.
    """
    known = _found.setdefault(jaxpr, {})
    if key in known:
        return known[key]
    result = find()
    # A traced value is of no use once its trace has ended.
    if not _has_traced(result):
        known[key] = result
    return result


def _has_traced(tree: PyTree) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def structure(jaxpr: core.Jaxpr) -> Structure:
    """What a jaxpr computes, to compare it with others."""
    known = _structures.get(jaxpr)
    if known is None:
        description = _Description()
        key = description.of_jaxpr(jaxpr)
        known = Structure(key, tuple(description.arrays), description.is_closed)
        _structures[jaxpr] = known
    return known


def description(value: Any) -> Hashable:
    """A key of a value, equal for those that mean the same; what it can't look into is
    itself.
    """
    return _Description().of(value)


# Their functions and objects don't change once they are in a program.
_LIBRARIES = ("jax", "jaxlib", "equinox", "haliax", "stacked_remat")


def _is_of_library(value: Any) -> bool:
    """Whether a function or a class is one of JAX, of the libraries on it, or of this
    one.
    """
    return (getattr(value, "__module__", None) or "").partition(".")[0] in _LIBRARIES


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


class _Description:
    """Makes the key of one jaxpr, and notes what is no plain value in it.

    Attributes:
        arrays: as in `Structure`.
        is_closed: as in `Structure`.
    """

    def __init__(self) -> None:
        self.arrays: list[_Identity] = []
        self.is_closed = True
        # Those that are being described: one may refer to itself.
        self._functions: list[Any] = []

    def of_jaxpr(self, jaxpr: core.Jaxpr) -> Hashable:
        """A jaxpr with its variables numbered in the order in which they are bound, so
        that names and identities of variables don't matter.
        """
        numbers: dict[Any, int] = {}
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        for var in inputs:
            numbers[var] = len(numbers)
        equations = []
        for equation in jaxpr.eqns:
            operands = tuple(self._of_atom(atom, numbers) for atom in equation.invars)
            for var in equation.outvars:
                numbers[var] = len(numbers)
            equations.append(
                (
                    equation.primitive,
                    equation.ctx,
                    operands,
                    tuple(var.aval for var in equation.outvars),
                    self._of_parameters(equation),
                )
            )
        outputs = tuple(self._of_atom(atom, numbers) for atom in jaxpr.outvars)
        in_types = tuple(var.aval for var in inputs)
        return len(jaxpr.constvars), in_types, tuple(equations), outputs

    def _of_atom(self, atom: Any, numbers: dict[Any, int]) -> Hashable:
        if isinstance(atom, core.Literal):
            return atom.aval, self.of(atom.val)
        return numbers[atom]

    def _of_parameters(self, equation: core.JaxprEqn) -> Hashable:
        expanded = expansion(equation)
        if expanded is not None:
            return self.of(expanded)
        name = _COMPUTES.get(equation.primitive.name)
        if name is not None:
            return self.of(equation.params[name])
        return self._of_items(equation.params)

    def _of_inner(self, jaxpr: core.Jaxpr) -> Hashable:
        inner = structure(jaxpr)
        self.arrays += inner.arrays
        self.is_closed &= inner.is_closed
        return inner.key

    def of(self, value: Any) -> Hashable:
        """The key of a value among the parameters, or of a constant."""
        if value is None or isinstance(value, bool | str | bytes | int):
            return type(value), value
        if isinstance(value, float | complex):
            return type(value), repr(value)  # 0.0 equals -0.0, and nan not itself
        if isinstance(value, _VALUES) and _has_hash(value):
            return value
        if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            # From JAX 0.12 on these are one class, and any may hold constants.
            constants: Sequence[Any] = getattr(value, "consts", ())
            program: Any = getattr(value, "jaxpr", value)
            return self._of_inner(program), self._of_sequence(constants)
        if isinstance(value, jax.Array) and not isinstance(value, Tracer):
            identity = _Identity(value)
            self.arrays.append(identity)
            return identity
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return type(value), value.dtype, value.shape, value.tobytes()
        if isinstance(value, enum.Enum | np.dtype | type):
            return value
        return self._of_container(value)

    def _of_container(self, value: Any) -> Hashable:
        if isinstance(value, core.DebugInfo):  # names of arguments, for messages
            return None
        if isinstance(value, tuple | list):
            return type(value), self._of_sequence(value)
        if isinstance(value, Mapping):
            return type(value), self._of_items(value)
        if isinstance(value, set | frozenset):
            return type(value), frozenset(map(self.of, value))
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, functools.partial):
            return self._of_partial(value)
        of_library = _is_of_library(type(value))
        if dataclasses.is_dataclass(value) and (of_library or not callable(value)):
            fields = dataclasses.fields(value)
            compared = [getattr(value, field.name) for field in fields if field.compare]
            return type(value), self._of_sequence(compared)
        if of_library and hasattr(value, "__dict__") and not callable(value):
            return type(value), self._of_items(vars(value))
        return self._unknown(value)

    def _unknown(self, value: Any) -> Hashable:
        self.is_closed = False
        return _Identity(value)

    def _of_partial(self, value: functools.partial) -> Hashable:
        if not _is_of_library(value.func):
            return self._unknown(value)
        parts = value.func, value.args, value.keywords
        return type(value), *self._of_sequence(parts)

    def _of_function(self, function: types.FunctionType) -> Hashable:
        """A function by its code and what it closes over, since each trace may make
        another.

        What a user's callback closes over may change between calls, also where it is a
        number or an empty list now: such a callback is like no other.
        """
        has_state = (
            function.__closure__ or function.__defaults__ or function.__kwdefaults__
        )
        if has_state and not _is_of_library(function):
            return self._unknown(function)
        if function in self._functions:
            # How many functions further out it is, so that equal cycles are equal.
            return len(self._functions) - self._functions.index(function)
        self._functions.append(function)
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # one that is still empty
            return self._unknown(function)
        else:
            state = cells, function.__defaults__, function.__kwdefaults__
            # Executables keep their callbacks alive, and these their globals: the id
            # stays theirs.
            return function.__code__, id(function.__globals__), *map(self.of, state)
        finally:
            self._functions.pop()

    def _of_sequence(self, values: Sequence[Any]) -> tuple[Hashable, ...]:
        return tuple(map(self.of, values))

    def _of_items(self, values: Mapping[str, Any]) -> tuple[Hashable, ...]:
        items = []
        for name, value in values.items():
            items.append((name, self.of(value)))
        return tuple(items)


@cleared_with_jax
@functools.lru_cache(maxsize=512)
def _executables(_: Hashable) -> list[Any]:
    """The place of the executable with this key: empty, or with one entry."""
    return []


# Functions that are traced now. Their programs live as long as a primitive that runs
# one.
_jitted: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()


def jitted(fn: Callable) -> Any:
    """`jax.jit(fn)`, the same for equal functions while someone holds it, so that each
    is traced once.
    """
    known = _jitted.get(fn)
    if known is None:
        known = _jitted[fn] = jax.jit(fn)
    return known


def traced_program(jitted_fn: Any, *args: PyTree) -> Any:
    """A jitted function, traced for arguments or their types.

    With a mesh, if an empty one: JAX sets one wherever it evaluates or lowers an
    equation, and its caches would not find there what was traced without.
    """
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        return jitted_fn.trace(*args)


def are_known(arrays: PyTree) -> bool:
    """Whether nothing is traced, differentiated or mapped: neither the caller nor an
    array.
    """
    return is_eager() and not _has_traced(arrays)


def run(jitted_fn: Any, *args: PyTree) -> PyTree:
    """Call a jitted function of arrays; outside of any trace by an executable that an
    equal one left.
    """
    # Where JAX looks for NaN, what an executable computes raises an internal error.
    if not are_known(args) or numbers_are_checked():
        return jitted_fn(*args)
    program = traced_program(jitted_fn, *args)
    # What it closes over are arguments of the executable, which so holds none of it.
    jaxpr, constants = without_constants(program.jaxpr)
    inputs = [*constants, *jax.tree.leaves(args)]
    described = structure(jaxpr)
    # Of traced values that it closes over JAX 0.12 makes further inputs.
    is_whole = len(inputs) == len(jaxpr.invars)
    if not is_whole or not described.is_closed or not all(map(_is_value, inputs)):
        return jitted_fn(*args)
    arrays: list[Any] = [*map(jnp.asarray, inputs)]
    places = tuple(map(_place, arrays))
    key = program.fun_name, described.key, places, trace_context()
    executable = _executables(key)
    if not executable:
        executable.append(_compiled(program.fun_name, jaxpr, arrays))
        for array in described.arrays:
            weakref.finalize(array.value(), executable.clear).atexit = False
    return jax.tree.unflatten(program.out_tree, executable[0](*arrays))


def _place(array: Any) -> Hashable:
    """Where an array is and how it is laid out, which an executable is compiled for."""
    # Keys have no format
    return (
        array.committed,
        array.sharding,
        getattr(array, "format", None),
    )


def _is_value(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
    return is_array and not isinstance(leaf, Tracer)


def _compiled(name: str, jaxpr: core.Jaxpr, inputs: Sequence[Any]) -> Any:
    def evaluate(*inputs: Any) -> list[Any]:
        return eval_jaxpr(jaxpr, (), *inputs)

    evaluate.__name__ = name
    return jax.jit(evaluate).lower(*inputs).compile()
