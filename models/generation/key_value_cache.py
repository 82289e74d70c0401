"""Keys and values of the tokens that a model has read, so that a new token computes none but its own."""

import equinox as eqx
import haliax as hax
from haliax import Axis, NamedArray
from jaxtyping import DTypeLike

from stacked_remat.training import POSITION_AXIS

SLOT_AXIS = "slot"
"""The axis of a cache along which slot i holds what stands at position i of its sequence."""


class KeyValueCache(eqx.Module):
    """Keys and values of a stack of layers, one sequence a row, in buffers that are written in place.

    A row's slots after its last token hold what nothing reads: zeros, or what came of padding.

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

        Cost: `2 * layers * batch * kv_heads * slots * head_dim` numbers of `dtype`. Layers that see a window
        hold all slots too.
        """
        # In this order attention reads a head's slots one after the other, without a transposed copy.
        axes = (Layers, Batch, KVHeads, Axis(SLOT_AXIS, slots), HeadDim)
        return KeyValueCache(hax.zeros(axes, dtype), hax.zeros(axes, dtype))

    def of_layer(self, number: NamedArray) -> tuple[NamedArray, NamedArray]:
        """The keys and values of one layer, `[Batch, KVHeads, slot, HeadDim]`."""
        return self.key[self._layers, number], self.value[self._layers, number]

    def with_prompt(self, number: NamedArray, key: NamedArray, value: NamedArray) -> "KeyValueCache":
        """The cache with what `[Batch, position, KVHeads, HeadDim]` holds in a layer's first slots."""

        def write(buffer: NamedArray, new: NamedArray) -> NamedArray:
            one = Axis(self._layers.name, 1)
            named = new.rename({POSITION_AXIS: SLOT_AXIS}).broadcast_axis(one).astype(buffer.dtype)
            return buffer.updated_slice({self._layers: number}, named)

        return KeyValueCache(write(self.key, key), write(self.value, value))

    def with_token(
        self, number: NamedArray, positions: NamedArray, key: NamedArray, value: NamedArray
    ) -> "KeyValueCache":
        """The cache with a layer's keys and values `[Batch, KVHeads, HeadDim]` in the slots `positions`.

        Out-of-range writes are dropped.
        """
        (Batch,) = positions.axes
        at = {self._layers: number, Batch: hax.arange(Batch), SLOT_AXIS: positions}

        def write(buffer: NamedArray, new: NamedArray) -> NamedArray:
            return buffer.at[at].set(new.astype(buffer.dtype), mode="drop")

        return KeyValueCache(write(self.key, key), write(self.value, value))

    @property
    def _layers(self) -> Axis:
        return self.key.axes[0]
