"""Grouped-query attention with rotary embedding, and RMS norms, of queries and keys."""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import AxisSelector, NamedArray
from jaxtyping import PRNGKeyArray

from models.transformer.config import DecoderConfig
from models.transformer.key_value_cache import SLOT_AXIS, KeyValueCache
from models.transformer.layers import linear, map_linears, of_part, rms_norm, without_bias
from stacked_remat import checkpoint_name, tiled
from stacked_remat.ops import RotaryTable, apply_rotary, causal_attention, decode_attention
from stacked_remat.training import POSITION_AXIS


class Attention(eqx.Module):
    """Causal grouped-query attention (Ainslie et al. 2023), maybe with RMS norms on queries and keys.

    Names for remat policies: `query`, `key`, `value` (after norm and rotation), `attention_output` (before
    the output projection) and `attention_lse`, the last two by `stacked_remat.ops.causal_attention`.
    """

    q_proj: hnn.Linear
    k_proj: hnn.Linear
    v_proj: hnn.Linear
    o_proj: hnn.Linear
    q_norm: hnn.RmsNorm | None
    k_norm: hnn.RmsNorm | None
    sinks: NamedArray | None
    window: int | None = eqx.field(static=True)
    config: DecoderConfig = eqx.field(static=True)

    @staticmethod
    def init(config: DecoderConfig, window: int | None, *, key: PRNGKeyArray) -> "Attention":
        """Makes the four projections from `key`; a query sees `window` positions, or with None all.

        Sinks begin as zeros.
        """
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        KeyHeads = (config.KVHeads, config.HeadDim)
        QueryHeads = (config.KVHeads, config.HeadsPerKV, config.HeadDim)
        bias = config.attention.bias
        return Attention(
            q_proj=linear(config, config.Embed, QueryHeads, bias=bias, key=q_key),
            k_proj=linear(config, config.Embed, KeyHeads, bias=bias, key=k_key),
            v_proj=linear(config, config.Embed, KeyHeads, bias=bias, key=v_key),
            o_proj=linear(config, QueryHeads, config.Embed, bias=bias, key=o_key),
            q_norm=rms_norm(config, config.HeadDim) if config.qk_norm else None,
            k_norm=rms_norm(config, config.HeadDim) if config.qk_norm else None,
            sinks=hax.zeros((config.KVHeads, config.HeadsPerKV)) if config.sinks else None,
            window=window,
            config=config,
        )

    def __call__(
        self, x: NamedArray, rotary: RotaryTable, Pos: AxisSelector, *, documents: NamedArray | None = None
    ) -> NamedArray:
        """Maps `[..., Pos, Embed]` to itself; a position sees its document up to itself within its window."""
        tiles = min(self.config.tiles, self.config.KVHeads.size)
        if tiles == 1:
            return self._of_heads(x, rotary, Pos, documents)
        whole, bias = without_bias(self.o_proj)
        by_heads = tiled(_of_some_heads, self.config.KVHeads, tiles=tiles, reduce="sum")
        attention = dataclasses.replace(self, o_proj=whole)
        output = by_heads(attention, hax.arange(self.config.KVHeads), x, rotary, Pos, documents)
        return output if bias is None else (output + bias).rearrange(x.axes)

    def _of_heads(
        self, x: NamedArray, rotary: RotaryTable, Pos: AxisSelector, documents: NamedArray | None
    ) -> NamedArray:
        return self._attend(x, *self._heads(x, rotary), Pos, self.config.attention.backend, documents)

    def prefill(
        self, x: NamedArray, rotary: RotaryTable, cache: KeyValueCache, layer_index: NamedArray
    ) -> tuple[NamedArray, KeyValueCache]:
        """Maps `[Batch, position, Embed]` to itself, and writes keys and values into the layer's first slots.

        Uses the device's default kernel, whichever the model was trained with.
        """
        query, key, value = self._heads(x, rotary)
        output = self._attend(x, query, key, value, POSITION_AXIS, "auto")
        return output, cache.with_prompt(layer_index, key, value)

    def decode(
        self,
        x: NamedArray,
        rotary: RotaryTable,
        positions: NamedArray,
        cache: KeyValueCache,
        layer_index: NamedArray,
    ) -> tuple[NamedArray, KeyValueCache]:
        """Maps one token a row, `[Batch, Embed]` at `positions`, to itself, and writes it into the cache."""
        query, key, value = self._heads(x, rotary)
        cache = cache.with_token(layer_index, positions, key, value)
        attended = decode_attention(
            query,
            *cache.of_layer(layer_index),
            SLOT_AXIS,
            self.config.HeadDim,
            positions=positions,
            window=self.window,
            sinks=self.sinks,
        )
        return self.o_proj(attended).rearrange(x.axes), cache

    def _heads(self, x: NamedArray, rotary: RotaryTable) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Queries, keys and values, the first two after norm and rotation.

        The names are of the projections' outputs, which the norm's backward pass reads; the rest is cheap to
        compute from them.
        """
        HeadDim = self.config.HeadDim
        query, key, value = (
            _named(linear(x), name, x)
            for linear, name in ((self.q_proj, "query"), (self.k_proj, "key"), (self.v_proj, "value"))
        )
        query, key = (
            apply_rotary(heads if norm is None else norm(heads), rotary, HeadDim)
            for norm, heads in ((self.q_norm, query), (self.k_norm, key))
        )
        return query, key, value

    def _attend(
        self,
        x: NamedArray,
        query: NamedArray,
        key: NamedArray,
        value: NamedArray,
        Pos: AxisSelector,
        backend: str,
        documents: NamedArray | None = None,
    ) -> NamedArray:
        """The output, with the axes of `x`."""
        axes = (Pos, self.config.KVHeads.name, self.config.HeadDim)
        options = {"documents": documents, "window": self.window, "sinks": self.sinks, "backend": backend}
        return self.o_proj(causal_attention(query, key, value, *axes, **options)).rearrange(x.axes)


def _of_some_heads(
    attention: Attention,
    numbers: NamedArray,
    x: NamedArray,
    rotary: RotaryTable,
    Pos: AxisSelector,
    documents: NamedArray | None,
) -> NamedArray:
    """The part of the output that is of some key-value heads, those with these numbers, and their queries."""
    (KVHeads,) = numbers.axes
    some = map_linears(lambda linear: of_part(linear, KVHeads), attention)
    return some._of_heads(x, rotary, Pos, documents)


def _named(heads: NamedArray, name: str, x: NamedArray) -> NamedArray:
    """`heads` under a name for remat policies, with all axes of heads, those that `x` lacks, as one.

    With several, XLA copies the stack of all layers into another layout, 20 GiB at 65,536 tokens.
    """
    own = tuple(axis for axis in heads.axes if axis not in x.axes)
    flat = checkpoint_name(heads.flatten_axes(own, "heads"), name)
    return flat.unflatten_axis("heads", own)
