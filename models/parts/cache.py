"""What layers keep of the tokens that they have read.

Each mixer says what its layers keep, as a tree of named arrays: keys and values of
positions, a vector from which both are projected, or a state. The decoder makes the
arrays for all layers of a kind at once, `[Layers, ...]`, and hands each layer a
`LayerCache` of them, which the layer reads and writes. All layers' arrays are one carry
of the loop over layers, so they are written in place.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.util import is_named_array
from jax import lax

from models.parts.tokens import Tokens, has_positions
from stacked_remat.training import POSITION_AXIS

SLOT_AXIS = "slot"
"""The axis of a cache on which positions are: position p in slot p, with a window in
slot p modulo slots.
"""

Kept: TypeAlias = Any
"""What one layer keeps: a tree of named arrays with a batch axis, a sequence a row."""
Caches: TypeAlias = dict[str, Any]
"""What the layers of each kind keep, by its name: `Kept` with the axis of the layers in
front.
"""


class LayerCache(eqx.Module):
    """One layer's part of what all layers of its kind keep.

    Attributes:
        stacked: `Kept` of all layers, with their axis in front.
        layer_index: the row of this layer, a traced integer.
    """

    stacked: Kept
    layer_index: NamedArray

    def read(self) -> Kept:
        """What this layer keeps."""
        return jax.tree.map(
            lambda buffer: buffer[buffer.axes[0], self.layer_index],
            self.stacked,
            is_leaf=is_named_array,
        )

    def write(self, kept: Kept) -> "LayerCache":
        """With other values for this layer, of its first slots where they are fewer."""

        def put(buffer: NamedArray, new: NamedArray) -> NamedArray:
            new = new.astype(buffer.dtype).rearrange(
                [axis.name for axis in buffer.axes[1:]]
            )
            start = [self.layer_index.array, *[jnp.int32(0)] * new.array.ndim]
            # One contiguous block, which XLA writes in place
            array = lax.dynamic_update_slice(buffer.array, new.array[None], start)
            return NamedArray(array, buffer.axes)

        return self._updated(put, kept)

    def write_at(self, slots: NamedArray, kept: Kept) -> "LayerCache":
        """With other values in one slot of each sequence of this layer.

        Slots beyond the last are not written.
        """
        (Batch,) = slots.axes

        # Scattered over the rows, since sequences have read different numbers of tokens
        def put(buffer: NamedArray, new: NamedArray) -> NamedArray:
            at = {
                buffer.axes[0]: self.layer_index,
                Batch: hax.arange(Batch),
                SLOT_AXIS: slots,
            }
            return buffer.at[at].set(new.astype(buffer.dtype), mode="drop")

        return self._updated(put, kept)

    def _updated(
        self, put: Callable[[NamedArray, NamedArray], NamedArray], kept: Kept
    ) -> "LayerCache":
        stacked = jax.tree.map(put, self.stacked, kept, is_leaf=is_named_array)
        return LayerCache(stacked, self.layer_index)


def num_slots(tokens: int, window: int | None) -> int:
    """How many positions of so many tokens a layer keeps."""
    return tokens if window is None else min(tokens, window)


def keep_tokens(
    cache: LayerCache,
    kept: tuple[NamedArray, ...],
    tokens: Tokens,
    window: int | None,
) -> LayerCache:
    """The cache of a layer with what it keeps of tokens, `[Batch, ..., width]`, in the
    slots of their positions.

    Of more tokens than slots the last ones of each sequence are kept. Slots after a
    sequence's last token, until each has been written once, are never read; they hold
    zeros, or values of padding.
    """
    # All buffers of a layer have the same slots.
    slots = cache.stacked[0].resolve_axis(SLOT_AXIS).size
    # A single token of each sequence: with a window it overwrites the oldest.
    if not has_positions(kept[0]):
        assert tokens.positions is not None
        at = tokens.positions
        return cache.write_at(at if window is None else at % slots, kept)
    if kept[0].resolve_axis(POSITION_AXIS).size > slots:
        kept = tuple(_newest(one, tokens, slots) for one in kept)
    return cache.write(tuple(one.rename({POSITION_AXIS: SLOT_AXIS}) for one in kept))


def _newest(kept: NamedArray, tokens: Tokens, slots: int) -> NamedArray:
    """Of positions those that are the newest of each slot; before the first position
    none is, and what is there is not read.
    """
    assert tokens.lengths is not None
    (Batch,) = tokens.lengths.axes
    Slot = Axis(POSITION_AXIS, slots)
    # Sequences end at different positions, so slots hold different ones in each.
    last = tokens.lengths - 1
    # Slot s holds the last position p <= last with p % slots == s.
    newest = last - (last - hax.arange(Slot).broadcast_axis(Batch)) % slots
    at: dict[Any, Any] = {
        Batch: hax.arange(Batch),
        POSITION_AXIS: hax.maximum(newest, 0),
    }
    return kept[at]
