"""One step of a loop: the user's function on one layer, with its results checked.

A *step* is a call of the user's function, or of a block, by a loop. `array_step` makes
of it a function of arrays alone, `(shared, carry, inputs) -> (carry, y)`, which
`_sweep/trace.py` traces: the traced step is a *layer*. `Call` says how the function is
called and what its result means for `fold`, `scan` and `map`.

With `until` all steps of the axis are in the program, and those after the last one
change nothing. Then an `UntilCarry` goes from step to step. A step that is done is
given the first carry and inputs, with which it can run and has a derivative; with the
last carry, or with inputs for steps that are not taken, it may divide by zero, and the
zero cotangent of its result would become NaN.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._checkpoint import saving_internals
from .._messages import shortened
from .._static import PyTree, Static
from .arguments import Caller, signature_error
from .checks import check_carry, describe
from .layer_state import carry_and_state
from .marks import raw_array

Verb: TypeAlias = Literal["fold", "scan", "map"]
# The checkpoint names of internals that are kept; True for all internals
Names: TypeAlias = tuple[str, ...] | Literal[True]
Until: TypeAlias = Callable[[PyTree], Any]  # of a carry: whether to stop


class UntilCarry(NamedTuple):
    """What goes from step to step with `until`.

    `done` is its first leaf, by which a sweep stops (`SweepSpec.run`).
    """

    # Whether a carry was reached at which `until` is True
    done: Array
    # The first carry, and the first step's inputs that are split, without derivatives;
    # None for an input that each step takes whole
    first: tuple[PyTree, list[Array | None]]
    # The user's carry
    carry: PyTree


@dataclasses.dataclass(frozen=True)
class Call:
    """How a loop calls the user's function."""

    # The operation, for errors
    caller: Caller
    # Which of the three a loop is; says what the function takes and returns
    verb: Verb
    # What is called
    fn: Callable[..., Any]
    # The function whose name, signature and place errors show. It is not `fn` where
    # blocks are called: `fn` is `operator.call` then, and `owner` the `__call__` of
    # their class.
    owner: Any
    # Whether the first argument is a block, in front of the carry
    takes_block: bool = False
    # Stops the loop at a carry for which it is True; None if all steps run
    until: Until | None = None

    def applied(
        self, carry: PyTree, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> PyTree:
        """What the function returns; a `TypeError` that shows its signature where that
        is another.
        """
        # `f(carry, *args)`, `f(block, carry, *args)`, and `f(*args)` for a map
        positional = [*args]
        if self.verb != "map":
            positional.insert(int(self.takes_block), carry)
        try:
            return self.fn(*positional, **kwargs)
        except (AttributeError, TypeError) as error:
            first = ["block"] * self.takes_block + ["carry"] * (self.verb != "map")
            problem = signature_error(
                self.owner, self.caller.what, first, positional, kwargs
            )
            # The call fits the signature: the error is of the user's own code
            if problem is None:
                if self.takes_block:
                    _add_notes(error, args[0], carry)
                raise
            raise TypeError(problem) from None

    def outputs(self, result: PyTree, arguments: PyTree) -> tuple[PyTree, PyTree]:
        """The carry and the output, either of which may be None, from what the function
        returned.
        """
        if self.verb == "map":
            return None, result
        if self.verb == "fold":
            if not self.takes_block:
                return result, None
            return carry_and_state(result, arguments, self.caller.what)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise ValueError(
                "scan and scan_vjp take a function (or a block) that returns a pair"
                f" (carry, output); it returned {describe(result)}. For one that"
                " returns only the carry use fold or fold_vjp."
            )
        return result[0], result[1]

    def result(self, carry: PyTree, outputs: PyTree) -> PyTree:
        """What a loop of such calls returns."""
        return {"fold": carry, "scan": (carry, outputs), "map": outputs}[self.verb]

    def first(self, init: PyTree, inputs: Sequence[Array | None]) -> PyTree:
        """What goes into the first step, from the first carry and that step's inputs
        that are split.
        """
        assert self.until is not None
        return UntilCarry(_is_done(self.until, init), _fixed((init, [*inputs])), init)

    def given(
        self, carry: PyTree, inputs: Sequence[Array]
    ) -> tuple[PyTree, Sequence[Array]]:
        """The carry and inputs that a step is given: once it is done the first ones."""
        if self.until is None:
            return carry, inputs
        done, (first, first_inputs), last = carry
        chosen = []
        for at_first, at_this in zip(first_inputs, inputs, strict=True):
            # None: a stack that every layer takes whole
            is_whole = at_first is None
            chosen.append(at_this if is_whole else _choose(done, at_first, at_this))
        return jax.tree.map(functools.partial(_choose, done), first, last), chosen

    def is_done(self, carry: PyTree) -> bool:
        """Whether it is known that no step is left."""
        if self.until is None:
            return False
        try:
            return bool(carry.done)
        except jax.errors.ConcretizationTypeError:
            return False

    def last(self, carry: PyTree) -> PyTree:
        """The user's carry, from what comes out of a step."""
        if self.until is None:
            return carry
        return carry.carry


def array_step(
    call: Call, static: PyTree, names: Names, unpack: Callable[..., Any]
) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, tuple[PyTree, Static]]]:
    """A step on arrays, `(shared, carry, inputs) -> (carry, y)`, with the name of the
    user's function.

    Args:
        call: how the user's function is called.
        static: what is no array in the carry, the same for all steps.
        names: of the internals that the program around the step keeps.
        unpack: `(inputs, shared) -> (args, kwargs)`.

    Returns:
        The step; its `y` is a pair, the arrays of the output and the rest of it.
    """

    def step(
        shared: PyTree, arrays: PyTree, inputs: PyTree
    ) -> tuple[PyTree, tuple[PyTree, Static]]:
        carry = eqx.combine(arrays, static)
        step_carry, inputs = call.given(carry, inputs)
        with saving_internals(names):
            args, kwargs = unpack(inputs, shared)
            result = call.applied(step_carry, args, kwargs)
        new_carry, y = call.outputs(result, (args, kwargs))
        # A state of Equinox that was updated can't be read
        carry = eqx.combine(arrays, static)
        try:
            check_carry(call.last(carry), new_carry, of_pair=call.verb == "scan")
        except ValueError as error:
            error.add_note(f"It is the carry of {_place_of(call.owner)}.")
            raise
        if call.until is not None:
            new_carry, y = _unless_done(call.until, carry, new_carry, y)
        # Numbers of an output become arrays, which a loop can stack
        y, rest = eqx.partition(y, eqx.is_array_like)
        return eqx.filter(new_carry, eqx.is_array_like), (y, Static(rest))

    # In errors, profiles and jaxprs of JAX a step has the name of the user's function.
    named = functools.update_wrapper(step, call.owner, updated=())
    # JAX takes names of arguments from the signature, for errors and debug information.
    # Those of the user's parameters are not those of these arguments.
    named.__signature__ = inspect.Signature()  # pyright: ignore[reportAttributeAccessIssue]
    return named


def _place_of(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__qualname__", type(fn).__name__)
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code:
        return f"{name}, {code.co_filename}:{code.co_firstlineno}"
    return name


def _add_notes(error: Exception, block: PyTree, carry: PyTree) -> None:
    """Tell what may be the cause of an error of a function that takes a block."""
    message = str(error)
    if "NoneType" in message:
        _note_absent_fields(error, block)
    # The lambda has its parameters the other way round, and calls the carry
    if message == f"'{type(carry).__name__}' object is not callable":
        error.add_note(
            "The block comes first, then the carry: lambda block, x: block(x)."
        )


def _note_absent_fields(error: Exception, block: PyTree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(
        block, is_leaf=lambda node: node is None
    )
    if absent := [jax.tree_util.keystr(path) for path, leaf in leaves if leaf is None]:
        error.add_note(
            f"These fields of the block are None: {shortened(absent, most=5)}. If the"
            " layers were filtered or partitioned, put the parts together first:"
            " eqx.combine(trained, frozen)."
        )


def _unless_done(
    until: Until, state: UntilCarry, new_carry: PyTree, y: PyTree
) -> tuple[UntilCarry, PyTree]:
    """Once it is done, the carry stays as it is, and outputs are zeros."""
    done, first, carry = state
    # Both are computed and one is chosen: under `jax.vmap` other examples still run.
    carry = jax.tree.map(functools.partial(_choose, done), carry, new_carry)
    y = jax.tree.map(lambda leaf: _choose(done, jnp.zeros_like(leaf), leaf), y)
    return UntilCarry(done | _is_done(until, carry), first, carry), y


def _fixed(tree: PyTree) -> PyTree:
    """The tree with arrays that have no derivatives."""
    return jax.tree.map(
        lambda leaf: lax.stop_gradient(leaf) if eqx.is_array_like(leaf) else leaf, tree
    )


def _choose(done: Array, at_end: PyTree, otherwise: PyTree) -> PyTree:
    """One of two arrays; leaves of other kinds are the same at all steps."""
    if not eqx.is_array_like(otherwise):
        return otherwise
    return jnp.where(done, at_end, otherwise)


def _is_done(until: Until, carry: PyTree) -> Array:
    """Whether to stop at this carry; a `TypeError` where `until` returns anything but
    one bool.
    """
    done = raw_array(until(carry))
    if (
        not eqx.is_array_like(done)
        or jnp.shape(done)
        or jnp.result_type(done) != "bool"
    ):
        returned = f"it returned {describe(done)}. Write jnp.all(x < tolerance)."
        raise TypeError(f"until returns one bool for the whole carry; {returned}")
    return jnp.asarray(done)
