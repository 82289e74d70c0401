"""Causal attention: grouped queries with rotary embedding, and what all kinds of
attention share.
"""

import abc
import dataclasses
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import DTypeLike, PRNGKeyArray

from models.parts.cache import SLOT_AXIS, Kept, LayerCache, keep_tokens, num_slots
from models.parts.config import DecoderConfig
from models.parts.linear import linear, map_linears, of_part, without_bias
from models.parts.mixer import Mixer
from models.parts.norms import Norm
from models.parts.rotary import RotaryEmbedding
from models.parts.sections import RotaryConfig, TemperatureConfig
from models.parts.tokens import Tokens, has_positions
from stacked_remat import checkpoint_name, tiled
from stacked_remat.ops import causal_attention, decode_attention
from stacked_remat.training import POSITION_AXIS


class CausalAttention(Mixer):
    """Causal attention of queries, keys and values, which a subclass projects.

    Attributes:
        o_proj: the last projection.
        gate_proj: whose sigmoid what attention gives is multiplied by; None for none.
        sinks: a score that attends to nothing, of each query head; see
            `stacked_remat.ops.causal_attention`.
        rotary: the rotary embedding; None for none.
        window: how many positions a query sees, itself included; None for all up to
            itself.
        chunk: documents are cut into chunks of so many positions, which do not see
            each other; None for not. Not with a window.
        scale: factor of the scores; None for `HeadDim.size ** -0.5`.
        softcap: scaled scores become `softcap * tanh(scores / softcap)`; None for not.
        backend: the kernel.
        tiles: into how many tiles of key-value heads attention is cut.
    """

    # Of the projections only the last is common to all kinds of attention.
    o_proj: eqx.AbstractVar[hnn.Linear]
    gate_proj: eqx.AbstractVar[hnn.Linear | None]
    sinks: eqx.AbstractVar[NamedArray | None]
    KVHeads: eqx.AbstractVar[Axis]
    HeadDim: eqx.AbstractVar[Axis]
    rotary: eqx.AbstractVar[RotaryEmbedding | None]
    window: eqx.AbstractVar[int | None]
    chunk: eqx.AbstractVar[int | None]
    scale: eqx.AbstractVar[float | None]
    softcap: eqx.AbstractVar[float | None]
    backend: eqx.AbstractVar[str]
    tiles: eqx.AbstractVar[int]

    @abc.abstractmethod
    def heads(
        self, x: NamedArray, tokens: Tokens
    ) -> tuple[NamedArray, NamedArray, NamedArray, tuple[NamedArray, ...]]:
        """Queries, keys and values `[..., KVHeads, HeadDim]` after norm and rotation,
        and what the cache keeps of the tokens, `[..., own axes, width]`.
        """

    @abc.abstractmethod
    def attend_to_kept(
        self, query: NamedArray, kept: Kept, positions: NamedArray
    ) -> NamedArray:
        """Maps queries `[Batch, KVHeads, ..., HeadDim]` at `positions` to what `o_proj`
        takes.

        `kept` is what the cache has of this layer, these positions included.
        """

    def __call__(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> tuple[NamedArray, LayerCache | None]:
        """Maps `[..., Embed]` to itself; positions see their document up to themselves.

        With a cache, writes the tokens there. Sequences must be whole, from their first
        token on; a single token of each sees those in the cache.
        """
        # Tiles save memory of the backward pass, which there is without a cache alone.
        if cache is None and self.tiles > 1:
            return self._attend_by_heads(x, tokens), None
        query, key, value, kept = self.heads(x, tokens)
        # Before attention: a single token sees itself in the cache.
        if cache is not None:
            cache = keep_tokens(cache, kept, tokens, self.reach)
        if cache is None:
            attended = self._attend(query, key, value, tokens, self.backend)
        elif has_positions(x):
            # The device's default kernel, whichever the model was trained with
            attended = self._attend(query, key, value, tokens, "auto")
        else:
            last = tokens.positions
            assert last is not None
            if self.chunk is not None:
                # Position p is in slot p modulo `chunk`: the slots up to it are of its
                # chunk, and later ones of the chunk before.
                last = last % self.chunk
            attended = self.attend_to_kept(query, cache.read(), last)
        return self.output(attended, x), cache

    def output(self, attended: NamedArray, x: NamedArray) -> NamedArray:
        """The last projection of what attention gives of `x`, and of its gate."""
        # Of each coordinate (Qiu et al. 2025, arXiv:2505.06708): a head may give
        # nothing.
        if self.gate_proj is not None:
            gate = named_heads(self.gate_proj(x), "gate", x)
            attended = attended * hnn.sigmoid(gate)
        return self.o_proj(attended).rearrange(x.axes)

    @property
    def reach(self) -> int | None:
        """How many positions a query sees at most; None for all."""
        return self.window if self.chunk is None else self.chunk

    def _attend_by_heads(self, x: NamedArray, tokens: Tokens) -> NamedArray:
        """Attention of a few key-value heads at a time, with their queries."""
        # Each tile would add the bias again.
        whole, bias = without_bias(self.o_proj)
        # The tiles' outputs are summed: each has all of `Embed`, from a few heads.
        by_heads = tiled(_of_some_heads, self.KVHeads, tiles=self.tiles, reduce="sum")
        attention = dataclasses.replace(self, o_proj=whole)
        output = by_heads(attention, hax.arange(self.KVHeads), x, tokens)
        return output if bias is None else (output + bias).rearrange(x.axes)

    def _attend(
        self,
        query: NamedArray,
        key: NamedArray,
        value: NamedArray,
        tokens: Tokens,
        backend: str,
    ) -> NamedArray:
        documents = tokens.documents
        if self.chunk is not None:
            Pos = key.resolve_axis(POSITION_AXIS)
            documents = _numbered_chunks(tokens, self.chunk, Pos)
        return causal_attention(
            query,
            key,
            value,
            POSITION_AXIS,
            self.KVHeads.name,
            self.HeadDim,
            documents=documents,
            window=self.window,
            sinks=self.sinks,
            scale=self.scale,
            softcap=self.softcap,
            backend=backend,
        )


def _numbered_chunks(tokens: Tokens, chunk: int, Pos: Axis) -> NamedArray | None:
    """A number for each chunk of each document, as `causal_attention` takes
    documents.
    """
    # No position is that far into its document.
    if chunk >= Pos.size:
        return tokens.documents
    assert tokens.positions is not None
    begins: Any = hax.equal(hax.mod(tokens.positions, chunk), 0)
    if tokens.documents is not None:
        before = hax.roll(tokens.documents, 1, Pos)
        begins = hax.logical_or(begins, hax.not_equal(tokens.documents, before))
    return hax.cumsum(begins.astype(jnp.int32), Pos)


def _of_some_heads(
    attention: CausalAttention, numbers: NamedArray, x: NamedArray, tokens: Tokens
) -> NamedArray:
    """The part of the output that is of some key-value heads, those with these numbers,
    and their queries.
    """
    # The tile's axis; the static axes of linear maps are still those of all heads.
    (KVHeads,) = numbers.axes
    some = map_linears(lambda linear: of_part(linear, KVHeads), attention)
    query, key, value, _ = some.heads(x, tokens)
    attended = some._attend(query, key, value, tokens, some.backend)
    return some.output(attended, x)


class Attention(CausalAttention):
    """Causal grouped-query attention (Ainslie et al. 2023).

    Names for remat policies: `query`, `key`, `value` (before norm and rotation),
    `attention_output` (before the gate and the output projection) and `attention_lse`,
    the last two by `stacked_remat.ops.causal_attention`, and `gate` where it has one.
    """

    q_proj: hnn.Linear
    k_proj: hnn.Linear
    v_proj: hnn.Linear
    o_proj: hnn.Linear
    gate_proj: hnn.Linear | None
    q_norm: Norm | None
    k_norm: Norm | None
    sinks: NamedArray | None
    KVHeads: Axis = eqx.field(static=True)
    HeadDim: Axis = eqx.field(static=True)
    rotary: RotaryEmbedding | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    chunk: int | None = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)
    temperature: TemperatureConfig | None = eqx.field(static=True)
    softcap: float | None = eqx.field(static=True)
    backend: str = eqx.field(static=True)
    tiles: int = eqx.field(static=True)

    @staticmethod
    def init(
        config: DecoderConfig,
        *,
        rotary: RotaryConfig | None,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        window: int | None = None,
        chunk: int | None = None,
        scale: float | None = None,
        temperature: TemperatureConfig | None = None,
        softcap: float | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        output_bias: bool | None = None,
        gate: bool = False,
        sinks: bool = False,
        key: PRNGKeyArray,
    ) -> "Attention":
        """Makes the four projections from `key`; sinks begin as zeros.

        Args:
            rotary: base and scaling of the rotary embedding; None for none.
            rotary_dim: how many coordinates of a head it rotates; all if not given.
            interleaved: as in `RotaryEmbedding`.
            window, chunk, scale, softcap: as in `CausalAttention`.
            temperature: of queries, by their positions.
            q_norm, k_norm: of queries and keys: over each head, or over all heads.
            output_bias: whether the last projection has a bias; as the others, by
                `config.attention.bias`, if not given.
            gate: whether what attention gives is gated, coordinate by coordinate.
            sinks: whether query heads have sinks.
        """
        # In this order whatever the options: seeds give the same weights.
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        Embed = config.Embed
        bias = config.attention.bias
        QueryHeads = config.QueryHeads
        KeyHeads = config.KeyHeads
        # A norm over all heads needs all of them
        is_over_heads = q_norm is not None and q_norm.axis == QueryHeads
        width = config.head_dim if rotary_dim is None else rotary_dim
        Rotated = config.HeadDim.resize(width)
        o_bias = bias if output_bias is None else output_bias
        gate_proj = None
        if gate:
            gate_key = jax.random.fold_in(key, 4)
            gate_proj = linear(config, Embed, QueryHeads, bias=bias, key=gate_key)
        return Attention(
            q_proj=linear(config, Embed, QueryHeads, bias=bias, key=q_key),
            k_proj=linear(config, Embed, KeyHeads, bias=bias, key=k_key),
            v_proj=linear(config, Embed, KeyHeads, bias=bias, key=v_key),
            o_proj=linear(config, QueryHeads, Embed, bias=o_bias, key=o_key),
            gate_proj=gate_proj,
            q_norm=q_norm,
            k_norm=k_norm,
            sinks=hax.zeros(QueryHeads[:2]) if sinks else None,
            KVHeads=config.KVHeads,
            HeadDim=config.HeadDim,
            rotary=rotary and RotaryEmbedding(rotary, Rotated, interleaved),
            window=window,
            chunk=chunk,
            scale=scale,
            temperature=temperature,
            softcap=softcap,
            backend=config.attention.backend,
            tiles=1 if is_over_heads else min(config.tiles, config.num_kv_heads),
        )

    def heads(
        self, x: NamedArray, tokens: Tokens
    ) -> tuple[NamedArray, NamedArray, NamedArray, tuple[NamedArray, ...]]:
        """Queries, keys and values, of which the cache keeps the last two."""
        # The names are of the projections' outputs, which the norm's backward pass
        # reads.
        query = named_heads(self.q_proj(x), "query", x)
        key = named_heads(self.k_proj(x), "key", x)
        value = named_heads(self.v_proj(x), "value", x)
        query = self._rotated(self.q_norm, query, tokens)
        # Keys are kept rotated: a decoded token rotates its own alone.
        key = self._rotated(self.k_norm, key, tokens)
        if self.temperature is not None:
            query = _tempered(query, tokens, self.temperature)
        return query, key, value, (key, value)

    def _rotated(
        self, norm: Norm | None, heads: NamedArray, tokens: Tokens
    ) -> NamedArray:
        # The norm first, as published models have it: its weight differs between the
        # two coordinates of a pair, so the order matters.
        normalised = heads if norm is None else norm(heads)
        return normalised if self.rotary is None else self.rotary(normalised, tokens)

    def empty_cache(self, Batch: Axis, slots: int, dtype: DTypeLike) -> Kept:
        """Keys, after norm and rotation, and values."""
        Slot = Axis(SLOT_AXIS, num_slots(slots, self.reach))
        # In this order the slots of a head are contiguous, and attention needs no
        # transposed copy.
        empty = hax.zeros((Batch, self.KVHeads, Slot, self.HeadDim), dtype)
        return empty, empty

    def attend_to_kept(
        self, query: NamedArray, kept: Kept, positions: NamedArray
    ) -> NamedArray:
        """Attention to the slots up to `positions`, or to all slots where there are no
        more than a window.

        The order of slots does not matter: their keys are rotated.
        """
        key, value = kept
        return decode_attention(
            query,
            key,
            value,
            SLOT_AXIS,
            self.HeadDim,
            positions=positions,
            sinks=self.sinks,
            scale=self.scale,
            softcap=self.softcap,
        )


def _tempered(
    query: NamedArray, tokens: Tokens, temperature: TemperatureConfig
) -> NamedArray:
    """Queries times their factors, which are 1 at the first positions."""
    assert tokens.positions is not None
    steps = (tokens.positions + 1) // temperature.floor
    factors = hax.log1p(steps.astype(jnp.float32)) * temperature.scale + 1.0
    # In float32: near positions have factors that bfloat16 can't tell apart.
    wide = query.astype(jnp.float32) * factors
    return wide.rearrange(query.axes).astype(query.dtype)


def named_heads(heads: NamedArray, name: str, x: NamedArray) -> NamedArray:
    """`heads` under a name for remat policies, with all axes of heads, those that `x`
    lacks, as one.

    With several, XLA copies the stack of all layers into another layout, 20 GiB at
    65,536 tokens.
    """
    own = tuple(axis for axis in heads.axes if axis not in x.axes)
    flat = checkpoint_name(heads.flatten_axes(own, "heads"), name)
    return flat.unflatten_axis("heads", own)
