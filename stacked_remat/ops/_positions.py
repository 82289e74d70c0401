"""Positions before those at hand: of the document, and of another device's part.

The axes `context` of the mesh divide positions (context parallelism); none where a
device has all of them.
"""

from collections.abc import Sequence

import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import lax


def with_positions_before(
    x: NamedArray, first: NamedArray, Pos: Axis, context: Sequence[str]
) -> NamedArray:
    """An array with as many positions in front as `first` has: of the device before,
    and on the first device `first`.
    """
    before = first.axis_size(Pos.name)
    first = first.rearrange([axis.name for axis in x.axes])
    if context:
        devices = lax.axis_size(context)
        to_next = [(device, device + 1) for device in range(devices - 1)]
        last = x[Pos.name, Pos.size - before :].array
        received = lax.ppermute(last, context, to_next)
        is_first = lax.axis_index(context) == 0
        first = NamedArray(jnp.where(is_first, first.array, received), first.axes)
    return hax.concatenate(Pos.resize(before + Pos.size), [first, x])


def document_runs(
    documents: NamedArray, Pos: Axis, before: int, context: Sequence[str]
) -> NamedArray:
    """A number for each document, equal for its positions alone, with as many positions
    in front as `before`.

    What is before the first position of all belongs to the first document.
    """
    first = documents[Pos.name, 0].broadcast_axis(Pos.resize(before))
    documents = with_positions_before(documents, first, Pos, context)
    place = documents.axes.index(Pos.resize(before + Pos.size))
    changes = jnp.diff(documents.array, axis=place) != 0
    first_run = [(0, 0)] * changes.ndim
    first_run[place] = (1, 0)
    runs = jnp.cumsum(jnp.pad(changes, first_run), place, dtype=jnp.int32)
    return NamedArray(runs, documents.axes)
