"""Checkpoint names of operations in a layer that its author gave no name.

A *place* is a name such as `"dot_general 2/7"`: the result of the second of the seven
`dot_general`s that a layer evaluates. Policies take places wherever they take names
(`save_block_internals=["dot_general 2/7"]`), and the layer is traced with these names.

Counted are operations whose results something reads, in the order of the program, with
those within functions that it calls (`jax.jit`). Not those within its loops,
conditionals, custom derivatives and checkpoints: each of these is one operation. One
with a custom derivative has the name of its function. `checkpoint_name` is none.

So a place is the same in every process, and stays what it was when other lines of the
block change. If the block has another number of such operations than the place says,
the place may be another value by now, and is refused.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.interpreters.partial_eval import dce_jaxpr

from ._activity import CALLS, name_of, program_of
from ._compat import without_constants
from ._messages import did_you_mean
from ._names import name_given_by, named, names_in
from ._place_names import is_place
from ._static import PyTree, with_leaves


class PlaceError(ValueError):
    """A policy keeps values by places of operations that the layer does not have."""


class Places:
    """The places among some names, and which of them the layers had that were
    traced.
    """

    def __init__(self, names: Iterable[str] | Literal[True]) -> None:
        names = () if names is True else names
        self.wanted = {*filter(is_place, names)}
        self._had: set[str] = set()
        # By operation, how many the layers had that were traced.
        self._counts: dict[str, set[int]] = {}

    def named_in(self, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """A function of trees of arrays, which is traced with these names; itself if
        there are none.
        """
        if not self.wanted:
            return fn

        @functools.wraps(fn)
        def with_names(*args: PyTree) -> PyTree:
            closed, results = jax.make_jaxpr(fn, return_shape=True)(*args)
            jaxpr, constants = without_constants(closed)
            # What nothing reads is no place, as `jax.grad` would not keep it either.
            jaxpr = without_dead_code(jaxpr)
            for operation, count in operation_counts(jaxpr).items():
                self._counts.setdefault(operation, set()).add(count)
            # An author may give a name of the form of a place.
            self._had |= self.wanted & names_in(jaxpr)
            leaves = [*constants, *jax.tree.leaves(args)]
            return with_leaves(results, evaluate_named(jaxpr, leaves, self._name))

        return with_names

    def _name(self, result: Any, place: str) -> Any:
        if place not in self.wanted:
            return result
        # Layers of several kinds are traced one after the other: see `check`.
        self._had.add(place)
        return named(result, place)

    def check(self) -> None:
        """Raise PlaceError for places that none of the traced layers had."""
        if not self._counts:
            return
        for place in sorted(self.wanted - self._had):
            operation, _ = place.split()
            if operation in self._counts:
                has = " or ".join(map(str, sorted(self._counts[operation])))
                hint = ""
            else:
                has = "no"
                hint = did_you_mean(operation, self._counts)
            raise PlaceError(
                f"The policy keeps {place!r}, but the layer has {has} {operation!r}"
                f" whose result is used.{hint} If it has changed since the policy was"
                " written, plan it again (memory.plan), or name values by"
                " checkpoint_name."
            )


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr with all inputs and no equation whose results nothing reads."""
    is_used = [True] * len(jaxpr.outvars)
    return dce_jaxpr(jaxpr, is_used, instantiate=True)[0]


def operation_counts(jaxpr: Jaxpr) -> Counter[str]:
    """How many operations of each name have a place."""
    counts: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        called = _called(equation)
        if called is not None:
            counts += operation_counts(called)
        elif not name_given_by(equation):
            counts[_operation(equation)] += 1
    return counts


def evaluate_named(
    jaxpr: Jaxpr, inputs: Sequence[Any], name: Callable[[Any, str], Any]
) -> list[Any]:
    """Evaluate a jaxpr without constants, with `name(result, place)` in place of the
    results of its operations.
    """
    totals = operation_counts(jaxpr)
    counts: Counter[str] = Counter()

    def evaluate(jaxpr: Jaxpr, inputs: Sequence[Any]) -> list[Any]:
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def value(atom: Any) -> Any:
            return known[atom] if isinstance(atom, Var) else atom.val

        for equation in jaxpr.eqns:
            called = _called(equation)
            if called is not None:
                results = evaluate(called, [*map(value, equation.invars)])
            else:
                # Each operand once: an equation may read a variable twice.
                operands = [*dict.fromkeys(filter(_is_var, equation.invars))]
                alone = jaxpr.replace(
                    invars=operands, eqns=[equation], outvars=equation.outvars
                )
                results = eval_jaxpr(alone, (), *map(value, operands))
                if not name_given_by(equation):
                    results = with_place(equation, results)
            known |= zip(equation.outvars, results, strict=True)
        return [*map(value, jaxpr.outvars)]

    def with_place(equation: JaxprEqn, results: Sequence[Any]) -> list[Any]:
        operation = _operation(equation)
        counts[operation] += 1
        place = f"{operation} {counts[operation]}/{totals[operation]}"
        return [name(x, place) if _can_be_kept(x) else x for x in results]

    return evaluate(jaxpr, inputs)


def _can_be_kept(value: Any) -> bool:
    """Whether it is an array of numbers, not of random keys."""
    if not isinstance(value, jax.Array):
        return False
    return not jnp.issubdtype(value.dtype, jax.dtypes.extended)


def _is_var(atom: Any) -> bool:
    return isinstance(atom, Var)


def _called(equation: JaxprEqn) -> Jaxpr | None:
    """The jaxpr of a function that is called without a rule of its own, and without
    shardings, which would be lost.
    """
    if equation.primitive.name not in CALLS or _has_shardings(equation):
        return None
    called = program_of(equation)
    # With constants it would be no function of its inputs alone.
    if getattr(called, "consts", ()):
        return None
    return getattr(called, "jaxpr", called)


def _has_shardings(equation: JaxprEqn) -> bool:
    params = equation.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return any(type(one).__name__ != "UnspecifiedValue" for one in shardings)


def _operation(equation: JaxprEqn) -> str:
    """The name of a primitive; of one with a custom derivative, of its function."""
    custom = equation.params.get("call_jaxpr")
    name = getattr(getattr(custom, "jaxpr", None), "debug_info", None)
    name = getattr(name, "func_name", None)
    return name_of(equation) if name is None else name.replace(" ", "_")
