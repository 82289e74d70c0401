"""Carries kept in numbered slots, and entries of a program's columns.

What `forward.py` and `reverse.py` have in common: the checkpoints that one leaves for
the other, and look-ups in columns of integers (`Program`), which are static wherever
they can be.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .store import Index, slice_of, write, zeros_of

# Leaves of trees: shared inputs of layers, a layer's own, outputs.
Arrays = list[Array]
# The leaves of a carry; where something holds only some of them
# (`SweepSpec.held_leaves`), those.
Carry = Arrays
# A list for each kind of layers.
OfKinds = list[Arrays]
# For each leaf whether something is true of it, which the mask's name says. Over all
# leaves of a carry, unless it went through `SweepSpec.of_held`.
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

    # Inputs of the schedule's layers, stacked over slots on the device; or, stacked on
    # the host in forward order, the first input of each segment; or the ticket of the
    # file that has these (`disk.py`). [] without a schedule.
    inputs: Carry
    # The inputs of the first layers, stacked; None if there are none.
    first_inputs: Carry | None = None
    # The saved residuals of the first layers, stacked for each kind; [] if there are no
    # such layers.
    residuals: OfKinds = []
    # The first carry, where no slot has it or none on the device, and where layers may
    # stop; else None. Read by second derivatives in reverse mode alone
    # (`_backward_reference` in `primitive.py`).
    origin: Carry | None = None
    # How many layers ran, a traced int32; None if none may stop.
    ran: Any = None

    def source(self) -> Carry:
        """The arrays, on the device, that hold the input of the first layer."""
        if self.origin is not None:
            return self.origin
        return self.inputs if self.first_inputs is None else self.first_inputs

    def first_carry(self) -> Carry:
        """The input of the first layer."""
        if self.origin is not None:
            return self.origin
        # The forward sweep leaves it in slot 0, or in that of the first layer.
        return [lax.index_in_dim(leaf, 0, keepdims=False) for leaf in self.source()]

    def from_first(self, first: Carry) -> "Checkpoints":
        """Arrays of these types, zeros but for those from which `first_carry()` reads
        `first`.
        """
        zeros = jax.tree.map(zeros_of, self)
        if self.origin is None:
            first = write(zeros.source(), 0, first)
        return eqx.tree_at(Checkpoints.source, zeros, [*map(jnp.asarray, first)])


# Integers of a program, one for each run or each layer.
Column: TypeAlias = Sequence[int]


def entry_at(column: Any, r: Index) -> Any:
    """Look up an entry of a column: an int where the index is one or all entries agree.

    Where layers may stop, columns of trip counts are arrays.
    """
    if isinstance(column, Array):
        return slice_of(column, r, 0)
    if isinstance(r, int):
        return column[r]
    if column.count(column[0]) == len(column):
        return column[0]
    if isinstance(column, range):
        return column.start + r if column.start else r
    return slice_of(jnp.asarray(np.asarray(column, np.int32)), r, 0)
