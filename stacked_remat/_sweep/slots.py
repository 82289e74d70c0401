"""Carries kept in numbered slots, and trip counts and other entries of a schedule's
tables.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .store import Index, empty_stack, slice_of, write, zeros_of

Arrays = list[Array]
Carry = Arrays
OfKinds = list[Arrays]  # a list for each kind of layers
Mask = tuple[bool, ...]


class Checkpoints(NamedTuple):
    """What the forward sweep keeps: inputs of layers, and residuals of the first ones,
    of each kind.

    `origin` is the first input, where others may lack it on the device; `ran` counts
    layers that may stop.
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
        if self.origin is not None:
            return self.origin
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
    """A trip count that depends on the trip of the loop around; `table` has all, if
    data do not decide.
    """

    table: np.ndarray | None
    number: Index


def trip_count(table: Any, r: Index) -> int | TripsOf:
    """Look up a trip count, static if all entries agree or the index is."""
    if not isinstance(table, np.ndarray):
        return TripsOf(None, entry_at(table, r))
    if isinstance(r, int) or (table == table[0]).all():
        return int(table[r if isinstance(r, int) else 0])
    return TripsOf(table, entry_at(table, r))


def entry_at(table: Any, r: Index) -> Any:
    """Look up an entry of a table, static if both are."""
    if isinstance(r, int):
        return int(table[r]) if isinstance(table, np.ndarray) else table[r]
    return slice_of(jnp.asarray(table), r, 0)
