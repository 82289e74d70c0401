"""Carries kept in numbered slots, and rolled loops whose trip counts come from a schedule's tables."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from equinox.internal import unvmap_all
from jax import lax
from jaxtyping import Array

from .._activity import is_differentiable
from .._placement import to_device
from .._static import PyTree
from .._trips import known_trips
from .store import Index, empty_stack, write

Arrays = list[Array]
Carry = Arrays
T = TypeVar("T")


class FirstLayersSaved(NamedTuple):
    """What is kept of the first layers, before the schedule's: their inputs, and residuals of each kind.

    `ran` says how many ran, if the layers may stop.
    """

    carries: Carry
    residuals: list[Arrays]
    ran: Index | None = None


class Checkpoints(NamedTuple):
    """Layer inputs that the forward sweep keeps for the reverse sweep.

    Attributes:
        slots: one buffer per carry leaf, `(schedule.slots, ...)`, shared by segment boundaries and the
            segment being reversed.
        boundaries: the first input of each segment, `(segments, ...)` on the host; `None` if they are in
            `slots`.
        first_layers: of the layers before the schedule's, if there are any.
        origin: the input of the first layer, on the device, if it is kept on the host alone or there are no
            layers. Only derivatives of the sweep read it, so other compiled programs do not keep it.
        ran: how many of the schedule's layers ran, if the layers may stop.
    """

    slots: Carry
    boundaries: Carry | None
    first_layers: FirstLayersSaved | None = None
    origin: Carry | None = None
    ran: Index | None = None

    def first(self) -> Carry:
        """The input of the first layer, on the device."""
        if self.origin is not None:
            return self.origin
        return self.first_scheduled() if self.first_layers is None else _first(self.first_layers.carries)

    def first_scheduled(self) -> Carry:
        """Copy the input of the schedule's first layer to the device."""
        if self.boundaries is None:
            return _first(self.slots)
        return to_device(_first(self.boundaries))

    def is_first(self) -> "Checkpoints":
        """Which of the arrays `first()` reads, if they are on the device."""
        nothing = jax.tree.map(lambda _: False, self)
        if self.origin is None and self.first_layers is not None:
            saved = nothing.first_layers
            return nothing._replace(first_layers=saved._replace(carries=[True] * len(saved.carries)))
        where = "slots" if self.origin is None else "origin"
        return nothing._replace(**{where: [True] * len(getattr(self, where))})

    def of_carry(self, mask: Sequence[bool]) -> list[bool]:
        """Which of the arrays hold the carry's leaves in the mask; residuals may be of any."""
        every = jax.tree.map(lambda _: True, self)
        carries = {name: [*mask] for name in ("slots", "boundaries", "origin") if getattr(self, name)}
        if self.first_layers is not None:
            carries["first_layers"] = every.first_layers._replace(carries=[*mask])
        return jax.tree.leaves(every._replace(**carries))

    def from_first(self, first: Carry) -> "Checkpoints":
        """Arrays like these from which `first()` reads `first`; placeholders for the others."""
        first = [*map(jnp.asarray, first)]  # some may be Python numbers

        def stacks(like: Carry) -> Carry:
            pairs = zip(like, first, strict=True)
            return [
                write(empty_stack(leaf, len(stack)), 0, leaf) if is_differentiable(leaf.dtype) else leaf
                for stack, leaf in pairs
            ]

        nothing = jax.tree.map(lambda _: jnp.zeros(()), self)
        if self.origin is not None:
            return nothing._replace(origin=first)
        if self.first_layers is not None:
            carries = stacks(self.first_layers.carries)
            return nothing._replace(first_layers=nothing.first_layers._replace(carries=carries))
        return nothing._replace(slots=stacks(self.slots))


def _first(stacked: Carry) -> Carry:
    # Slices: an index would become a gather, which JAX does not have for host memory with symbolic shapes.
    return [lax.index_in_dim(leaf, 0, keepdims=False) for leaf in stacked]


class TripsOf(NamedTuple):
    """A trip count that depends on the trip of the loop around; `table` has all, if data do not decide."""

    table: np.ndarray | None
    number: Index


def repeat(trips: int | TripsOf, body: Callable[[Index, T], T], state: T, unroll: int | bool, most: int) -> T:
    """Run `for k in range(trips): state = body(k, state)`, rolled unless `unroll` is True.

    `unroll` is the number of bodies in one iteration; `most` is a static upper bound of `trips`.
    """
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

    def loop(
        first: Index,
        last: Index,
        of: Callable[[np.ndarray], np.ndarray],
        body: Callable[[Index, T], T],
        state: T,
    ) -> T:
        total, entered = (None, 1) if table is None else (int(of(table).sum()), len(table))
        with known_trips(total, entered):
            return lax.fori_loop(first, last, body, state)

    if step == 1:
        return loop(0, number, lambda table: table, one, state)

    def several(block: Index, state: T) -> T:
        for k in range(step):
            state = one(block * step + k, state)
        return state

    state = loop(0, number // step, lambda table: table // step, several, state)
    return loop(number // step * step, number, lambda table: table % step, one, state)


def run_layers(
    length: int, layer: Callable[[Index, T], T], state: T, unroll: int | bool, stops: bool
) -> tuple[T, Index | None]:
    """`repeat` a layer. If it `stops`, only until the carry, `state[0]`, begins with True.

    In a `jax.vmap`, until the carries of all examples do. Also returns how many layers ran, or None for all.
    """
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
