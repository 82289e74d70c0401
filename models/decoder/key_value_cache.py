"""The key-value cache: a new token computes only its own keys and values."""

import equinox as eqx
import haliax as hax
from haliax import Axis, NamedArray
from jaxtyping import DTypeLike

from stacked_remat.training import POSITION_AXIS

SLOT_AXIS = "slot"
"""The axis of a cache on which slot i holds position i of its sequence."""


class KeyValueCache(eqx.Module):
    """Keys and values of a stack of layers, one sequence a row, in buffers that are written in place.

    A row's slots after its last token are never read; they hold zeros, or values of padding.

    Attributes:
        key: `[Layers, Batch, KVHeads, slot, HeadDim]`, after norm and rotation.
        value: like `key`.
    """

    key: NamedArray
    value: NamedArray

    @staticmethod
    def empty(
        Layers: Axis, Batch: Axis, KVHeads: Axis, slots: int, HeadDim: Axis, dtype: DTypeLike
    ) -> "KeyValueCache":
        """A cache for sequences of up to `slots` tokens.

        Cost: `2 * layers * batch * kv_heads * slots * head_dim` numbers of `dtype`, in windowed layers too.
        """
        # In this order a head's slots are contiguous, and attention needs no transposed copy.
        axes = (Layers, Batch, KVHeads, Axis(SLOT_AXIS, slots), HeadDim)
        return KeyValueCache(hax.zeros(axes, dtype), hax.zeros(axes, dtype))

    def of_layer(self, layer_index: NamedArray) -> tuple[NamedArray, NamedArray]:
        """The keys and values of one layer, `[Batch, KVHeads, slot, HeadDim]`."""
        return self.key[self._layers, layer_index], self.value[self._layers, layer_index]

    def with_prompt(self, layer_index: NamedArray, key: NamedArray, value: NamedArray) -> "KeyValueCache":
        """The cache with `[Batch, position, KVHeads, HeadDim]` written to a layer's first slots."""

        def write(buffer: NamedArray, new: NamedArray) -> NamedArray:
            one = Axis(self._layers.name, 1)
            named = new.rename({POSITION_AXIS: SLOT_AXIS}).broadcast_axis(one).astype(buffer.dtype)
            return buffer.updated_slice({self._layers: layer_index}, named)

        return KeyValueCache(write(self.key, key), write(self.value, value))

    def with_token(
        self, layer_index: NamedArray, positions: NamedArray, key: NamedArray, value: NamedArray
    ) -> "KeyValueCache":
        """The cache with `[Batch, KVHeads, HeadDim]` written to a layer's slots `positions`.

        Out-of-range writes are dropped.
        """
        (Batch,) = positions.axes
        at = {self._layers: layer_index, Batch: hax.arange(Batch), SLOT_AXIS: positions}

        def write(buffer: NamedArray, new: NamedArray) -> NamedArray:
            return buffer.at[at].set(new.astype(buffer.dtype), mode="drop")

        return KeyValueCache(write(self.key, key), write(self.value, value))

    @property
    def _layers(self) -> Axis:
        return self.key.axes[0]
