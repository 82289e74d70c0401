"""Carries kept in numbered slots, and trip counts and other entries of a schedule's
tables.

What `forward.py` and `reverse.py` have in common: the checkpoints that one leaves for
the other, and look-ups in tables of integers (`plan.py`), which are static wherever
they can be: of a loop with a static trip count JAX makes a scan, whose trips XLA knows.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .store import Index, empty_stack, slice_of, write, zeros_of

# Leaves of trees: shared inputs of layers, a layer's own, outputs.
Arrays = list[Array]
# The leaves of a carry; where something holds only some of them (`SweepSpec.held`),
# those.
Carry = Arrays
# A list for each kind of layers.
OfKinds = list[Arrays]
# For each leaf whether something is true of it, which the mask's name says.
Mask = tuple[bool, ...]


def types_of(variables: Iterable[Any]) -> list[Any]:
    """The types of variables of a jaxpr."""
    return [var.aval for var in variables]


def inverted(mask: Sequence[bool]) -> list[bool]:
    """The mask of the other leaves."""
    return [not is_chosen for is_chosen in mask]


class Checkpoints(NamedTuple):
    """What the forward sweep keeps for the reverse sweep. All carries in it have only
    leaves that are held.
    """

    # Inputs of the schedule's layers, stacked over slots; [] without a schedule, or
    # where boundaries are on the host.
    slots: Carry
    # The first input of each segment, stacked on the host in the order of the forward
    # sweep; None where they are in slots.
    boundaries: Carry | None = None
    # The inputs of the first layers, stacked; None if there are none.
    first_layers: Carry | None = None
    # The saved residuals of the first layers, stacked for each kind; None if there are
    # no such layers.
    residuals: OfKinds | None = None
    # The first carry, where no slot has it or none on the device, and where layers may
    # stop; else None.
    origin: Carry | None = None
    # How many layers ran, a traced int32; None if none may stop.
    ran: Any = None

    def source(self) -> Carry:
        """The arrays, on the device, that hold the input of the first layer."""
        if self.origin is not None:
            return self.origin
        return self.slots if self.first_layers is None else self.first_layers

    def first(self) -> Carry:
        """The input of the first layer."""
        if self.origin is not None:
            return self.origin
        # The forward sweep leaves it in slot 0, or in that of the first layer.
        return [lax.index_in_dim(leaf, 0, keepdims=False) for leaf in self.source()]

    def from_first(self, first: Carry) -> "Checkpoints":
        """Arrays of these types, zeros but for those from which `first()` reads
        `first`.
        """
        zeros = jax.tree.map(zeros_of, self)
        if self.origin is None:
            first = [
                write(stack, 0, leaf)
                for stack, leaf in zip(zeros.source(), first, strict=True)
            ]
        return eqx.tree_at(Checkpoints.source, zeros, [*map(jnp.asarray, first)])


def slots_for(
    carry: Sequence[Any], size: int, is_read: Sequence[bool], sources: int
) -> Carry:
    """Slots for `size` carries; only `sources` of them for leaves that are not read
    within a segment.
    """
    return [
        empty_stack(leaf, size if is_ else sources)
        for leaf, is_ in zip(carry, is_read, strict=True)
    ]


class TripsOf(NamedTuple):
    """A trip count that depends on the trip of the loop around."""

    # The counts for all trips of the loop around; None if data decide.
    table: np.ndarray | None
    # The count for this trip.
    number: Index


def trip_count(table: Any, r: Index) -> int | TripsOf:
    """Look up a trip count, static if all entries agree or the index is."""
    if not isinstance(table, np.ndarray):
        return TripsOf(None, entry_at(table, r))
    if isinstance(r, int):
        return int(table[r])
    if (table == table[0]).all():
        return int(table[0])
    return TripsOf(table, entry_at(table, r))


def entry_at(table: Any, r: Index) -> Any:
    """Look up an entry of a table, static if both are."""
    if isinstance(r, int):
        return int(table[r]) if isinstance(table, np.ndarray) else table[r]
    return slice_of(jnp.asarray(table), r, 0)
