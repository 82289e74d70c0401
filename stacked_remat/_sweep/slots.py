"""Carries in numbered slots, and rolled loops whose trip counts come from the tables of a schedule."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._placement import to_device

Carry = list[Array]
T = TypeVar("T")


class KeptHead(NamedTuple):
    """What is kept of the first layers, those before the schedule's; an entry a layer.

    Attributes:
        carries: their inputs, one buffer per carry leaf.
        saved: their residuals beside the inputs.
    """

    carries: Carry
    saved: list[Array]


class Kept(NamedTuple):
    """Layer inputs that the forward sweep hands to the reverse sweep.

    Attributes:
        slots: one buffer per carry leaf, `(schedule.slots, ...)`; boundaries and the segment being walked
            share it.
        boundaries: the first input of each segment, `(segments, ...)` on the host; `None` if they are in
            `slots`.
        head: of the layers before the schedule's, where there are such.
        origin: the input of the first layer, on the device, where it is in none of the others but
            `boundaries`. Only derivatives of the sweep read it, so no other compiled program keeps it.
    """

    slots: Carry
    boundaries: Carry | None
    head: KeptHead | None = None
    origin: Carry | None = None

    def first(self) -> Carry:
        """The input of the first layer, on the device."""
        if self.head is not None:
            return _first(self.head.carries)
        return self.first_scheduled() if self.origin is None else self.origin

    def first_scheduled(self) -> Carry:
        """Copies the input of the schedule's first layer to the device."""
        if self.boundaries is None:
            return _first(self.slots)
        return to_device(_first(self.boundaries))

    def with_constant_boundaries(self) -> "Kept":
        """Take what is on the host out of derivatives, which are those of `first()`.

        JAX loses the memory space of a cotangent where it transposes a program within a program (a branch, a
        loop, a jitted function), and then refuses it.
        """
        return self._replace(boundaries=lax.stop_gradient(self.boundaries))

    def cotangent_of_first(self, cotangent: Carry) -> "Kept":
        """Build the cotangent that this has, as a function of `first()` alone."""

        def place(stacked: Array, first: Array) -> Any:
            if first.dtype == jax.dtypes.float0:
                return None
            return jnp.zeros_like(stacked).at[0].set(first)

        def place_all(stacked: Carry) -> Carry:
            return [place(*pair) for pair in zip(stacked, cotangent, strict=True)]

        boundaries: Any = None if self.boundaries is None else [None] * len(self.boundaries)
        if self.head is not None:
            head = KeptHead(place_all(self.head.carries), _zero_cotangents(self.head.saved))
            return Kept(_zero_cotangents(self.slots), boundaries, head)
        if self.origin is not None:
            origin: Any = [None if leaf.dtype == jax.dtypes.float0 else leaf for leaf in cotangent]
            return Kept([], boundaries, None, origin)
        return Kept(place_all(self.slots), None)


def _first(stacked: Carry) -> Carry:
    # Slices, where an index would become a gather, which JAX has not for host memory, with symbolic shapes.
    return [lax.index_in_dim(leaf, 0, keepdims=False) for leaf in stacked]


def _zero_cotangents(leaves: list[Array]) -> list[Any]:
    inexact = (jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves)
    return [
        jnp.zeros(leaf.shape, leaf.dtype) if is_ else None for leaf, is_ in zip(leaves, inexact, strict=True)
    ]


def repeat(trips: Any, body: Callable[[Any, T], T], state: T, unroll: int | bool, most: int) -> T:
    """Run `for k in range(trips): state = body(k, state)`, rolled unless `unroll` is True.

    Args:
        trips: how often, static or traced.
        body: takes `k` and the state.
        state: arrays of fixed shapes.
        unroll: bodies per iteration of the rolled loop.
        most: a static bound of `trips`.
    """
    if unroll is True and not isinstance(trips, jax.Array):
        for k in range(trips):
            state = body(k, state)
        return state

    def one(k: Any, state: T) -> T:
        return body(lax.convert_element_type(k, jnp.int32), state)

    if isinstance(trips, int):
        return lax.fori_loop(0, trips, one, state, unroll=max(1, min(int(unroll), trips)))
    step = most if unroll is True else max(1, min(int(unroll), most))
    if step == 1:
        return lax.fori_loop(0, trips, one, state)

    def several(block: Any, state: T) -> T:
        for k in range(step):
            state = one(block * step + k, state)
        return state

    state = lax.fori_loop(0, trips // step, several, state)
    return lax.fori_loop(trips // step * step, trips, one, state)


def trip_count(table: np.ndarray, r: Any) -> Any:
    """Look up a trip count, static where all entries agree."""
    return int(table[0]) if (table == table[0]).all() else entry_at(table, r)


def entry_at(table: np.ndarray, r: Any) -> Any:
    """Look up an entry of a table, static where the index is."""
    return int(table[r]) if isinstance(r, int) else jnp.asarray(table)[r]


def room(entry: Any, size: int) -> Any:
    """Make stacks of zeros for `size` entries like the given one: arrays, or their `ShapeDtypeStruct`s."""

    def stack(leaf: Any) -> Array:
        return jnp.broadcast_to(jnp.zeros_like(leaf), (size, *leaf.shape))

    return jax.tree.map(stack, entry)


def read(stacked: Any, index: Any) -> Any:
    """Take the entry at `index` of every array of a tree."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), stacked)


def write(stacked: Any, index: Any, entry: Any) -> Any:
    """Replace the entry at `index` of every array of a tree; in place, in a compiled loop."""
    return jax.tree.map(
        lambda leaf, new: lax.dynamic_update_index_in_dim(leaf, new, index, 0), stacked, entry
    )
