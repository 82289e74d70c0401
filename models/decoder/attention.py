"""Grouped-query attention with rotary embedding, RMS norms of queries and keys, and the key-value cache."""

import abc
import dataclasses
from typing import Any, TypeAlias

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.decoder.config import DecoderConfig, LayerSpec
from models.decoder.layers import Norm, linear, map_linears, of_part, rms_norm, without_bias
from stacked_remat import checkpoint_name, tiled
from stacked_remat.ops import RotaryTable, apply_rotary, causal_attention, decode_attention
from stacked_remat.training import POSITION_AXIS

SLOT_AXIS = "slot"
"""The axis of a cache on which slot i holds position i of its sequence."""


class KeyValueCache(eqx.Module):
    """Keys and values of the layers of a kind, one sequence a row, in buffers that are written in place.

    A row's slots after its last token are never read; they hold zeros, or values of padding.

    Attributes:
        key: `[Layers, Batch, KVHeads, slot, HeadDim]`, after norm and rotation.
        value: like `key`.
    """

    key: NamedArray
    value: NamedArray

    @staticmethod
    def of_prompt(key: NamedArray, value: NamedArray, slots: int) -> "KeyValueCache":
        """That of a layer, for sequences of up to `slots` tokens, which begin `[Batch, position, ...]`."""

        def buffer(heads: NamedArray) -> NamedArray:
            Batch, Pos, *own = heads.axes
            padded = hax.pad(heads.rename({Pos.name: SLOT_AXIS}), {SLOT_AXIS: (0, slots - Pos.size)})
            # In this order a head's slots are contiguous, and attention needs no transposed copy.
            return padded.rearrange((Batch, own[0], SLOT_AXIS, own[1]))

        return KeyValueCache(buffer(key), buffer(value))

    def of_layer(self, layer_index: NamedArray) -> tuple[NamedArray, NamedArray]:
        """The keys and values of one layer, `[Batch, KVHeads, slot, HeadDim]`."""
        return self.key[self.key.axes[0], layer_index], self.value[self.key.axes[0], layer_index]

    def with_token(
        self, layer_index: NamedArray, positions: NamedArray, key: NamedArray, value: NamedArray
    ) -> "KeyValueCache":
        """The cache with `[Batch, KVHeads, HeadDim]` written to a layer's slots `positions`.

        Out-of-range writes are dropped.
        """
        (Batch,) = positions.axes
        at = {self.key.axes[0]: layer_index, Batch: hax.arange(Batch), SLOT_AXIS: positions}

        def write(buffer: NamedArray, new: NamedArray) -> NamedArray:
            return buffer.at[at].set(new.astype(buffer.dtype), mode="drop")

        return KeyValueCache(write(self.key, key), write(self.value, value))


Caches: TypeAlias = dict[str, KeyValueCache]
"""That of the layers of each kind, by its name."""


class CausalAttention(eqx.Module):
    """Causal attention of projected queries, keys and values, without a cache, and with one."""

    o_proj: eqx.AbstractVar[hnn.Linear]
    sinks: eqx.AbstractVar[NamedArray | None]
    spec: eqx.AbstractVar[LayerSpec]
    config: eqx.AbstractVar[DecoderConfig]

    @abc.abstractmethod
    def heads(self, x: NamedArray, rotary: RotaryTable) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Queries, keys and values `[..., KVHeads, HeadDim]`, the first two after norm and rotation."""

    def __call__(
        self, x: NamedArray, rotary: RotaryTable, *, documents: NamedArray | None = None
    ) -> NamedArray:
        """Maps `[..., position, Embed]` to itself; positions see their document up to themselves."""
        tiles = min(self.config.tiles, self.spec.KVHeads.size)
        if tiles == 1 or self.spec.qk_norm == "all_heads":
            return self._attend(x, *self.heads(x, rotary), self.config.attention.backend, documents)
        whole, bias = without_bias(self.o_proj)
        by_heads = tiled(_of_some_heads, self.spec.KVHeads, tiles=tiles, reduce="sum")
        attention = dataclasses.replace(self, o_proj=whole)
        output = by_heads(attention, hax.arange(self.spec.KVHeads), x, rotary, documents)
        return output if bias is None else (output + bias).rearrange(x.axes)

    def prefill(self, x: NamedArray, rotary: RotaryTable, slots: int) -> tuple[NamedArray, KeyValueCache]:
        """Maps `[Batch, position, Embed]` to itself, with the keys and values of the layer.

        Uses the device's default kernel, whichever the model was trained with.
        """
        query, key, value = self.heads(x, rotary)
        return self._attend(x, query, key, value, "auto"), KeyValueCache.of_prompt(key, value, slots)

    def decode(
        self,
        x: NamedArray,
        rotary: RotaryTable,
        positions: NamedArray,
        cache: KeyValueCache,
        layer_index: NamedArray,
    ) -> tuple[NamedArray, KeyValueCache]:
        """Maps one token a row, `[Batch, Embed]` at `positions`, to itself, and writes it into the cache."""
        query, key, value = self.heads(x, rotary)
        cache = cache.with_token(layer_index, positions, key, value)
        axes, options = (SLOT_AXIS, self.spec.HeadDim), {"positions": positions, **self._options}
        attended = decode_attention(query, *cache.of_layer(layer_index), *axes, **options)
        return self._output(attended, x), cache

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
        return self._output(causal_attention(query, key, value, *axes, **options), x)

    def _output(self, attended: NamedArray, x: NamedArray) -> NamedArray:
        if self.spec.latent is not None:  # values are padded to the width of keys
            attended = attended[self.spec.HeadDim, : self.spec.latent.value_dim]
        return self.o_proj(attended).rearrange(x.axes)

    @property
    def _options(self) -> dict[str, Any]:
        return {"window": self.spec.window, "sinks": self.sinks, "scale": self.spec.scale}


class Attention(CausalAttention):
    """Causal grouped-query attention (Ainslie et al. 2023), maybe with RMS norms on queries and keys.

    Names for remat policies: `query`, `key`, `value` (after norm and rotation), `attention_output` (before
    the output projection) and `attention_lse`, the last two by `stacked_remat.ops.causal_attention`.
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
    def init(config: DecoderConfig, spec: LayerSpec, *, key: PRNGKeyArray) -> "Attention":
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
            q_proj=linear(config, config.Embed, QueryHeads, bias=spec.qkv_bias, key=q_key),
            k_proj=linear(config, config.Embed, KeyHeads, bias=spec.qkv_bias, key=k_key),
            v_proj=linear(config, config.Embed, KeyHeads, bias=spec.qkv_bias, key=v_key),
            o_proj=linear(config, QueryHeads, config.Embed, bias=spec.output_bias, key=o_key),
            q_norm=None if q_norm is None else rms_norm(config, q_norm),
            k_norm=None if k_norm is None else rms_norm(config, k_norm),
            sinks=hax.zeros((spec.KVHeads, spec.HeadsPerKV)) if spec.sinks else None,
            spec=spec,
            config=config,
        )

    def heads(self, x: NamedArray, rotary: RotaryTable) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Queries, keys and values, the first two after norm and rotation."""
        # The names are of the projections' outputs, which the norm's backward pass reads.
        query, key, value = (
            named_heads(linear(x), name, x)
            for linear, name in ((self.q_proj, "query"), (self.k_proj, "key"), (self.v_proj, "value"))
        )
        query, key = (
            apply_rotary(heads if norm is None else norm(heads), rotary, self.spec.HeadDim)
            for norm, heads in ((self.q_norm, query), (self.k_norm, key))
        )
        return query, key, value


def _of_some_heads(
    attention: CausalAttention,
    numbers: NamedArray,
    x: NamedArray,
    rotary: RotaryTable,
    documents: NamedArray | None,
) -> NamedArray:
    """The part of the output that is of some key-value heads, those with these numbers, and their queries."""
    (KVHeads,) = numbers.axes
    some = map_linears(lambda linear: of_part(linear, KVHeads), attention)
    return some._attend(x, *some.heads(x, rotary), some.config.attention.backend, documents)


def named_heads(heads: NamedArray, name: str, x: NamedArray) -> NamedArray:
    """`heads` under a name for remat policies, with all axes of heads, those that `x` lacks, as one.

    With several, XLA copies the stack of all layers into another layout, 20 GiB at 65,536 tokens.
    """
    own = tuple(axis for axis in heads.axes if axis not in x.axes)
    flat = checkpoint_name(heads.flatten_axes(own, "heads"), name)
    return flat.unflatten_axis("heads", own)
