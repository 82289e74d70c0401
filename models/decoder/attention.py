"""Grouped-query attention with rotary embedding, RMS norms of queries and keys; and
caches.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray

from models.decoder.config import DecoderConfig, LayerSpec
from models.decoder.layers import (
    Norm,
    linear,
    map_linears,
    of_part,
    rms_norm,
    without_bias,
)
from stacked_remat import checkpoint_name, tiled
from stacked_remat.ops import (
    RotaryTable,
    apply_rotary,
    causal_attention,
    decode_attention,
)
from stacked_remat.training import POSITION_AXIS

SLOT_AXIS = "slot"
"""The axis of a cache on which positions are: position p in slot p, with a window in
slot p modulo slots.
"""


class Cache(eqx.Module):
    """What the layers of a kind keep of earlier tokens, one sequence a row, in buffers
    written in place.

    The layer says what that is: keys and values, or a vector from which both are
    projected. With a window there are no more slots than positions that a query sees.
    Slots after a row's last token, until each has been written once, are never read;
    they hold zeros, or values of padding.

    Attributes:
        buffers: each `[Layers, Batch, ..., slot, width]`.
    """

    buffers: tuple[NamedArray, ...]

    @staticmethod
    def of_prompt(
        kept: Sequence[NamedArray], lengths: NamedArray, slots: int
    ) -> "Cache":
        """That of a layer with so many slots, for sequences of these lengths.

        `kept` are `[Batch, position, ..., width]` of their beginnings.
        """

        def buffer(tokens: NamedArray) -> NamedArray:
            Batch, Pos, *own = tokens.axes
            if Pos.size <= slots:
                filled = hax.pad(
                    tokens.rename({Pos.name: SLOT_AXIS}),
                    {SLOT_AXIS: (0, slots - Pos.size)},
                )
            else:
                Slot, last = Axis(SLOT_AXIS, slots), lengths - 1
                # The newest position of each slot; before the first one none, and what
                # is there is not read.
                newest = last - (last - hax.arange(Slot).broadcast_axis(Batch)) % slots
                at: dict[Any, Any] = {
                    Batch: hax.arange(Batch),
                    Pos: hax.maximum(newest, 0),
                }
                filled = tokens[at]
            # In this order the slots of a head are contiguous, and attention needs no
            # transposed copy.
            return filled.rearrange((Batch, *own[:-1], SLOT_AXIS, own[-1]))

        return Cache(tuple(map(buffer, kept)))

    def of_layer(self, layer_index: NamedArray) -> tuple[NamedArray, ...]:
        """The buffers of one layer, `[Batch, ..., slot, width]`."""
        return tuple(buffer[buffer.axes[0], layer_index] for buffer in self.buffers)

    def with_token(
        self, layer_index: NamedArray, slots: NamedArray, kept: Sequence[NamedArray]
    ) -> "Cache":
        """The cache with `[Batch, ..., width]` of a token of each row written to a
        layer's slots.

        Out-of-range writes are dropped.
        """
        (Batch,) = slots.axes

        def write(buffer: NamedArray, new: NamedArray) -> NamedArray:
            at = {
                buffer.axes[0]: layer_index,
                Batch: hax.arange(Batch),
                SLOT_AXIS: slots,
            }
            return buffer.at[at].set(new.astype(buffer.dtype), mode="drop")

        return Cache(tuple(map(write, self.buffers, kept)))


Caches: TypeAlias = dict[str, Cache]
"""That of the layers of each kind, by its name."""


class CausalAttention(eqx.Module):
    """Causal attention of projected queries, keys and values, without a cache, and with
    one.
    """

    o_proj: eqx.AbstractVar[hnn.Linear]
    sinks: eqx.AbstractVar[NamedArray | None]
    spec: eqx.AbstractVar[LayerSpec]
    config: eqx.AbstractVar[DecoderConfig]

    @abc.abstractmethod
    def heads(
        self, x: NamedArray, rotary: RotaryTable
    ) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Queries, keys and values `[..., KVHeads, HeadDim]`, the first two after norm
        and rotation.
        """

    def __call__(
        self, x: NamedArray, rotary: RotaryTable, *, documents: NamedArray | None = None
    ) -> NamedArray:
        """Maps `[..., position, Embed]` to itself; positions see their document up to
        themselves.
        """
        tiles = min(self.config.tiles, self.spec.KVHeads.size)
        if tiles == 1 or self.spec.qk_norm == "all_heads":
            return self._attend(
                x, *self.heads(x, rotary), self.config.attention.backend, documents
            )
        whole, bias = without_bias(self.o_proj)
        by_heads = tiled(_of_some_heads, self.spec.KVHeads, tiles=tiles, reduce="sum")
        attention = dataclasses.replace(self, o_proj=whole)
        output = by_heads(
            attention, hax.arange(self.spec.KVHeads), x, rotary, documents
        )
        return output if bias is None else (output + bias).rearrange(x.axes)

    @abc.abstractmethod
    def kept(
        self, x: NamedArray, rotary: RotaryTable, key: NamedArray, value: NamedArray
    ) -> tuple[NamedArray, ...]:
        """What the cache keeps of tokens, `[..., own axes, width]`; `key` and `value`
        are of `heads`.
        """

    @abc.abstractmethod
    def attend_to_cache(
        self, query: NamedArray, kept: tuple[NamedArray, ...], positions: NamedArray
    ) -> NamedArray:
        """Maps queries `[Batch, KVHeads, ..., HeadDim]` at `positions` to what `o_proj`
        takes.

        `kept` is what the cache has of this layer, these positions included.
        """

    def prefill(
        self, x: NamedArray, rotary: RotaryTable, lengths: NamedArray, slots: int
    ) -> tuple[NamedArray, Cache]:
        """Maps `[Batch, position, Embed]` to itself, with the cache of the layer.

        Uses the device's default kernel, whichever the model was trained with.
        """
        query, key, value = self.heads(x, rotary)
        cache = Cache.of_prompt(
            self.kept(x, rotary, key, value), lengths, self.spec.slots(slots)
        )
        return self._attend(x, query, key, value, "auto"), cache

    def decode(
        self,
        x: NamedArray,
        rotary: RotaryTable,
        positions: NamedArray,
        cache: Cache,
        layer_index: NamedArray,
    ) -> tuple[NamedArray, Cache]:
        """Maps one token a row, `[Batch, Embed]` at `positions`, to itself, and writes
        it into the cache.
        """
        query, key, value = self.heads(x, rotary)
        slots = positions
        if self.spec.window is not None:
            slots = positions % cache.buffers[0].resolve_axis(SLOT_AXIS).size
        cache = cache.with_token(layer_index, slots, self.kept(x, rotary, key, value))
        attended = self.attend_to_cache(query, cache.of_layer(layer_index), positions)
        return self.o_proj(attended).rearrange(x.axes), cache

    def _attend(
        self,
        x: NamedArray,
        query: NamedArray,
        key: NamedArray,
        value: NamedArray,
        backend: str,
        documents: NamedArray | None = None,
    ) -> NamedArray:
        axes = (POSITION_AXIS, self.spec.KVHeads.name, self.spec.HeadDim)
        options = {"documents": documents, "backend": backend, **self._options}
        attended = causal_attention(query, key, value, *axes, **options)
        return self.o_proj(attended).rearrange(x.axes)

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "window": self.spec.window,
            "sinks": self.sinks,
            "scale": self.spec.scale,
        }


class Attention(CausalAttention):
    """Causal grouped-query attention (Ainslie et al. 2023), maybe with RMS norms on
    queries and keys.

    Names for remat policies: `query`, `key`, `value` (after norm and rotation),
    `attention_output` (before the output projection) and `attention_lse`, the last two
    by `stacked_remat.ops.causal_attention`.
    """

    q_proj: hnn.Linear
    k_proj: hnn.Linear
    v_proj: hnn.Linear
    o_proj: hnn.Linear
    q_norm: Norm | None
    k_norm: Norm | None
    sinks: NamedArray | None
    spec: LayerSpec = eqx.field(static=True)
    config: DecoderConfig = eqx.field(static=True)

    @staticmethod
    def init(
        config: DecoderConfig, spec: LayerSpec, *, key: PRNGKeyArray
    ) -> "Attention":
        """Makes the four projections from `key`; sinks begin as zeros."""
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        KeyHeads = (spec.KVHeads, spec.HeadDim)
        QueryHeads = (spec.KVHeads, spec.HeadsPerKV, spec.HeadDim)
        q_norm, k_norm = {
            "none": (None, None),
            "per_head": (spec.HeadDim, spec.HeadDim),
            "all_heads": (QueryHeads, KeyHeads),
        }[spec.qk_norm]
        return Attention(
            q_proj=linear(
                config, config.Embed, QueryHeads, bias=spec.qkv_bias, key=q_key
            ),
            k_proj=linear(
                config, config.Embed, KeyHeads, bias=spec.qkv_bias, key=k_key
            ),
            v_proj=linear(
                config, config.Embed, KeyHeads, bias=spec.qkv_bias, key=v_key
            ),
            o_proj=linear(
                config, QueryHeads, config.Embed, bias=spec.output_bias, key=o_key
            ),
            q_norm=None if q_norm is None else rms_norm(config, q_norm),
            k_norm=None if k_norm is None else rms_norm(config, k_norm),
            sinks=hax.zeros((spec.KVHeads, spec.HeadsPerKV)) if spec.sinks else None,
            spec=spec,
            config=config,
        )

    def heads(
        self, x: NamedArray, rotary: RotaryTable
    ) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Queries, keys and values, the first two after norm and rotation."""
        # The names are of the projections' outputs, which the norm's backward pass
        # reads.
        query, key, value = (
            named_heads(linear(x), name, x)
            for linear, name in (
                (self.q_proj, "query"),
                (self.k_proj, "key"),
                (self.v_proj, "value"),
            )
        )
        query, key = (
            apply_rotary(
                heads if norm is None else norm(heads), rotary, self.spec.HeadDim
            )
            for norm, heads in ((self.q_norm, query), (self.k_norm, key))
        )
        return query, key, value

    def kept(
        self, x: NamedArray, rotary: RotaryTable, key: NamedArray, value: NamedArray
    ) -> tuple[NamedArray, ...]:
        """Keys and values, the keys after norm and rotation."""
        return key, value

    def attend_to_cache(
        self, query: NamedArray, kept: tuple[NamedArray, ...], positions: NamedArray
    ) -> NamedArray:
        """Attention to the slots up to `positions`, or to all slots where there are no
        more than a window.

        The order of slots does not matter: their keys are rotated.
        """
        key, value = kept
        options = {
            "positions": positions,
            "sinks": self.sinks,
            "scale": self.spec.scale,
        }
        return decode_attention(
            query, key, value, SLOT_AXIS, self.spec.HeadDim, **options
        )


def _of_some_heads(
    attention: CausalAttention,
    numbers: NamedArray,
    x: NamedArray,
    rotary: RotaryTable,
    documents: NamedArray | None,
) -> NamedArray:
    """The part of the output that is of some key-value heads, those with these numbers,
    and their queries.
    """
    (KVHeads,) = numbers.axes
    some = map_linears(lambda linear: of_part(linear, KVHeads), attention)
    return some._attend(
        x, *some.heads(x, rotary), some.config.attention.backend, documents
    )


def named_heads(heads: NamedArray, name: str, x: NamedArray) -> NamedArray:
    """`heads` under a name for remat policies, with all axes of heads, those that `x`
    lacks, as one.

    With several, XLA copies the stack of all layers into another layout, 20 GiB at
    65,536 tokens.
    """
    own = tuple(axis for axis in heads.axes if axis not in x.axes)
    flat = checkpoint_name(heads.flatten_axes(own, "heads"), name)
    return flat.unflatten_axis("heads", own)
