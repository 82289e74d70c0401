"""One step of a loop: the user's function on one layer, with its results checked.

A *step* is a call of the user's function, or of a block, by a loop. `array_step` makes
of it a function of arrays alone, `(shared, carry, inputs) -> (carry, y)`, which
`_sweep/trace.py` traces: the traced step is a *layer*. A `FoldCall` has all that a user
said in a call of `fold`, `scan` or `map`, by whichever name; `api.py` and
`_block_foldable.py` make one, and `layers.py` runs it.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import numpy as np
from haliax import Axis, axis_name

from .._checkpoint import saving_internals
from .._messages import shortened
from .._policy import ScanCheckpointPolicy
from .._schedule import whole_number
from .._static import PyTree, Static
from .._sweep.kinds import Pattern
from .arguments import Caller, signature_error
from .checks import check_carry, describe
from .layer_state import carry_and_state
from .marks import IsScanned, is_named_or_shaped_array
from .until import ArrayStep, CountedCarry, Until, counted_step, until_step

Verb: TypeAlias = Literal["fold", "scan", "map"]
# The checkpoint names of internals that are kept; True for all internals
Names: TypeAlias = tuple[str, ...] | Literal[True]


@dataclasses.dataclass(frozen=True)
class FoldCall:
    """A call of `fold`, `scan` or `map`: what each step is, and how steps are run."""

    # The operation, for errors
    caller: Caller
    # Which of the three it is; says what the function takes and returns
    verb: Verb
    # What each step calls
    fn: Callable[..., Any]
    # The function whose name, signature and place errors show. It is not `fn` where
    # blocks are called: `fn` is `operator.call` then, and `owner` the `__call__` of
    # their class.
    owner: Any
    # Of the layers; its name if only the arguments tell the size
    axis: Axis | str
    # What the backward pass keeps, offloads and recomputes
    policy: ScanCheckpointPolicy
    # Whether the first argument is a block, in front of the carry
    takes_block: bool = False
    # Stops the loop at a carry for which it is True; None if all steps run
    until: Until | None = None
    # Which layer is of which kind; None for one kind
    pattern: Pattern | None = None
    # Whether the last layer runs first
    reverse: bool = False
    # How many layers one iteration of the loop runs; True for all
    unroll: int | bool = 1
    # Which arrays without a mark may be split over the layers
    is_scanned: IsScanned = is_named_or_shaped_array

    def __post_init__(self):
        if not isinstance(self.reverse, bool | np.bool_):
            raise TypeError(f"reverse is True or False; got {self.reverse!r}.")
        if not isinstance(self.unroll, bool):
            whole_number("unroll", self.unroll, "a bool or a number of layers")

    def unroll_of(self, length: int) -> int:
        """How many layers one iteration runs, of `length`."""
        return max(1, length if self.unroll is True else int(self.unroll))

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
        except (AttributeError, RuntimeError, TypeError) as error:
            first = ["block"] * self.takes_block + ["carry"] * (self.verb != "map")
            problem = signature_error(
                self.owner, self.caller.what, first, positional, kwargs
            )
            # The call fits the signature: the error is of the user's own code
            if problem is None:
                if isinstance(error, jax.errors.TracerBoolConversionError):
                    _note_flags(error, carry)
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


def array_step(
    call: FoldCall, static: PyTree, names: Names, unpack: Callable[..., Any]
) -> ArrayStep:
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
    if call.until is not None:
        not_stopping = dataclasses.replace(call, until=None)
        inner = array_step(not_stopping, static.carry, names, unpack)
        return until_step(inner, call.until, static)
    if isinstance(static, CountedCarry):
        return counted_step(array_step(call, static.carry, names, unpack))

    def step(
        shared: PyTree, arrays: PyTree, inputs: PyTree
    ) -> tuple[PyTree, tuple[PyTree, Static]]:
        with saving_internals(names):
            args, kwargs = unpack(inputs, shared)
            result = call.applied(eqx.combine(arrays, static), args, kwargs)
        new_carry, y = call.outputs(result, (args, kwargs))
        # Another carry: a state of Equinox that was updated can't be read
        carry = eqx.combine(arrays, static)
        try:
            check_carry(carry, new_carry, output=y if call.verb == "scan" else None)
        except ValueError as error:
            name = axis_name(call.axis)
            error.add_note(
                f"It is the carry of {_place_of(call.owner)}, in a loop over `{name}`."
            )
            raise
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
    # A `Dropout` whose rate was filtered does not see that the rate is zero
    if message.startswith("Dropout requires a key"):
        _note_absent_fields(error, block, ".p")
    # The lambda has its parameters the other way round, and calls the carry
    if message == f"'{type(carry).__name__}' object is not callable":
        error.add_note(
            "The block comes first, then the carry: lambda block, x: block(x)."
        )


def _note_flags(error: Exception, carry: PyTree) -> None:
    """Tell which bools of a carry are arrays, as Python's become."""
    flags = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
        if getattr(leaf, "shape", None) == () and leaf.dtype == bool:
            flags.append(f"carry{jax.tree_util.keystr(path)}")
    if flags:
        error.add_note(
            f"Within the loop these are arrays: {shortened(flags, most=5)}. If they are"
            " Python's before it, take them out, arrays, rest = eqx.partition(carry,"
            " eqx.is_array), and put them together in the step, eqx.combine(arrays,"
            " rest)."
        )


def _note_absent_fields(error: Exception, block: PyTree, field: str = "") -> None:
    """Tell which fields of a block, of this name if one is given, are None."""
    leaves = jax.tree_util.tree_leaves_with_path(
        block, is_leaf=lambda node: node is None
    )
    paths = [jax.tree_util.keystr(path) for path, leaf in leaves if leaf is None]
    if absent := [path for path in paths if path.endswith(field)]:
        error.add_note(
            f"These fields of the block are None: {shortened(absent, most=5)}. If the"
            " layers were filtered or partitioned, put the parts together first:"
            " eqx.combine(trained, frozen)."
        )
