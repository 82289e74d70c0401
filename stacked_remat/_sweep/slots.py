"""Carries kept in numbered slots, and rolled loops whose trip counts come from a schedule's tables."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox.internal import unvmap_all
from jax import lax
from jaxtyping import Array

from .._static import PyTree
from .._trips import known_trips
from .store import Index, write, zeros_of

Arrays = list[Array]
Carry = Arrays
OfKinds = list[Arrays]  # a list for each kind of layers
Mask = tuple[bool, ...]
T = TypeVar("T")


class Checkpoints(NamedTuple):
    """What the forward sweep keeps: inputs of layers, and residuals of the first ones, of each kind.

    `origin` is the first input, if no other has it on the device; `ran` counts layers that may stop.
    """

    slots: Carry
    boundaries: Carry | None = None
    first_layers: Carry | None = None
    residuals: OfKinds | None = None
    origin: Carry | None = None
    ran: Any = None

    def source(self) -> Carry:
        """The arrays, on the device, that hold the input of the first layer."""
        kept = self.slots if self.first_layers is None else self.first_layers
        return kept if self.origin is None else self.origin

    def first(self) -> Carry:
        """The input of the first layer."""
        if self.origin is not None:
            return self.origin
        return [lax.index_in_dim(leaf, 0, keepdims=False) for leaf in self.source()]

    def from_first(self, first: Carry) -> "Checkpoints":
        """Arrays of these types, zeros but for those from which `first()` reads `first`."""
        zeros = jax.tree.map(zeros_of, self)
        if self.origin is None:
            first = [write(stack, 0, leaf) for stack, leaf in zip(zeros.source(), first, strict=True)]
        return eqx.tree_at(Checkpoints.source, zeros, [*map(jnp.asarray, first)])


class TripsOf(NamedTuple):
    """A trip count that depends on the trip of the loop around; `table` has all, if data do not decide."""

    table: np.ndarray | None
    number: Index


def repeat(trips: int | TripsOf, body: Callable[[Index, T], T], state: T, unroll: int | bool, most: int) -> T:
    """Run `for k in range(trips): state = body(k, state)`; `most` is a static bound of `trips`."""
    if unroll is True and isinstance(trips, int):
        for k in range(trips):
            state = body(k, state)
        return state

    def one(k: Index, state: T) -> T:
        return body(lax.convert_element_type(k, jnp.int32), state)

    if isinstance(trips, int):
        return lax.fori_loop(0, trips, one, state, unroll=max(1, min(int(unroll), trips)))
    step = most if unroll is True else max(1, min(int(unroll), most))

    table, number = trips

    def loop(first: Index, last: Index, counts: Any, body: Callable[[Index, T], T], state: T) -> T:
        total, entered = (None, 1) if counts is None else (int(counts.sum()), len(counts))
        with known_trips(total, entered):
            return lax.fori_loop(first, last, body, state)

    if step == 1:
        return loop(0, number, table, one, state)
    blocks, left = (None, None) if table is None else divmod(table, step)

    def several(block: Index, state: T) -> T:
        for k in range(step):
            state = one(block * step + k, state)
        return state

    state = loop(0, number // step, blocks, several, state)
    return loop(number // step * step, number, left, one, state)


def run_layers(
    length: int, layer: Callable[[Index, T], T], state: T, unroll: int | bool, stops: bool
) -> tuple[T, Index | None]:
    """`repeat` a layer, if it `stops` until all carries begin with True; how many ran, None for all."""
    if not stops:
        return repeat(length, layer, state, unroll, length), None

    def run(step: int, loop: tuple[Index, T]) -> tuple[Index, T]:
        def goes_on(loop: PyTree) -> Array:
            return (loop[0] + step <= length) & ~unvmap_all(loop[1][0][0])

        def several(loop: tuple[Index, T]) -> tuple[Index, T]:
            k, state = loop
            for i in range(step):
                state = layer(k + i, state)
            return k + step, state

        return lax.while_loop(goes_on, several, loop)

    step = length if unroll is True else max(1, min(int(unroll), length))
    ran, state = run(step, (jnp.int32(0), state))
    if step > 1:
        ran, state = run(1, (ran, state))
    return state, ran


def trip_count(table: Any, r: Index) -> int | TripsOf:
    """Look up a trip count, static if all entries agree or the index is."""
    if not isinstance(table, np.ndarray):
        return TripsOf(None, entry_at(table, r))
    if isinstance(r, int) or (table == table[0]).all():
        return int(table[r if isinstance(r, int) else 0])
    return TripsOf(table, entry_at(table, r))


def entry_at(table: Any, r: Index) -> Any:
    """Look up an entry of a table, static if the index is."""
    return int(table[r]) if isinstance(r, int) else jnp.asarray(table)[r]
