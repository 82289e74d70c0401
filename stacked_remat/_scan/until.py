"""Loops that stop: at a carry for which `until` is True, or after the first layers.

All steps of the axis are in the program. Once a carry is reached at which `until` is
True, they change nothing. An `UntilCarry` goes from step to step, and
`until_step` makes a step for it of one for the user's carry. A step that is done is
given the first carry and inputs, with which it can run and has a derivative; with the
last carry, or with inputs for steps that are not taken, it may divide by zero, and the
zero cotangent of its result would become NaN.

Where the number of layers that run is known before the loop, though maybe traced, a
`CountedCarry` goes from layer to layer. No other layer is computed, so nothing is
chosen, and under `jax.vmap` the number is that of all examples.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._static import PyTree, Static
from .arguments import signature_of
from .checks import describe
from .marks import raw_array

Until: TypeAlias = Callable[[PyTree], Any]  # of a carry: whether to stop
# A step on arrays, `(shared, carry, inputs) -> (carry, y)`: see `array_step`
ArrayStep: TypeAlias = Callable[
    [PyTree, PyTree, PyTree], tuple[PyTree, tuple[PyTree, Static]]
]


def check_until(until: Any) -> None:
    """A `TypeError` for what is no function."""
    if not callable(until):
        raise TypeError(
            "until is a function of the carry that returns one bool; got"
            f" {describe(until)}."
        )
    try:
        signature_of(until).bind(None)
    except TypeError as error:
        raise TypeError(
            f"until takes the carry alone: until=lambda carry: ...; {error}."
        ) from None


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

    @classmethod
    def of(
        cls, until: Until, init: PyTree, inputs: Sequence[Array | None]
    ) -> "UntilCarry":
        """What goes into the first step, from the first carry and that step's
        inputs.
        """
        first = jax.tree.map(_without_derivative, (init, [*inputs]))
        return cls(_is_done(until, init), first, init)

    @property
    def surely_done(self) -> bool:
        """Whether it is known that no step is left."""
        try:
            return bool(self.done)
        except jax.errors.ConcretizationTypeError:
            return False


class CountedCarry(NamedTuple):
    """A first carry by which a fold or scan runs as many layers as it says, and what
    goes from layer to layer then.

    `left` is its first leaf, by which a sweep stops (`SweepSpec.run`).
    """

    # How many layers are still to run, an int32
    left: Array
    # The user's carry
    carry: PyTree


def counted_step(step: ArrayStep) -> ArrayStep:
    """`step` for a `CountedCarry`."""

    @functools.wraps(step)
    def run(
        shared: PyTree, state: CountedCarry, inputs: Sequence[Array]
    ) -> tuple[CountedCarry, tuple[PyTree, Static]]:
        carry, y = step(shared, state.carry, inputs)
        return CountedCarry(state.left - 1, carry), y

    return run


def until_step(step: ArrayStep, until: Until, static: UntilCarry) -> ArrayStep:
    """`step` for an `UntilCarry`; `static` has its leaves that are no arrays."""

    @functools.wraps(step)
    def run(
        shared: PyTree, state: UntilCarry, inputs: Sequence[Array]
    ) -> tuple[UntilCarry, tuple[PyTree, Static]]:
        done, first, carry = state
        choose = functools.partial(jnp.where, done)
        first_carry, first_inputs = first
        step_inputs = []
        for at_first, at_this in zip(first_inputs, inputs, strict=True):
            # None: a stack that every step takes whole
            is_whole = at_first is None
            step_inputs.append(at_this if is_whole else choose(at_first, at_this))
        new_carry, (y, rest) = step(
            shared, jax.tree.map(choose, first_carry, carry), step_inputs
        )
        # Both are computed and one is chosen: under `jax.vmap` other examples still
        # run. Once it is done, the carry stays as it is, and outputs are zeros.
        carry = jax.tree.map(choose, carry, new_carry)
        y = jax.tree.map(lambda leaf: choose(jnp.zeros_like(leaf), leaf), y)
        done |= _is_done(until, eqx.combine(carry, static.carry))
        return UntilCarry(done, first, carry), (y, rest)

    return run


def _without_derivative(leaf: Any) -> Any:
    return lax.stop_gradient(leaf) if eqx.is_array_like(leaf) else leaf


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
