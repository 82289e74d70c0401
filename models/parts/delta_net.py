"""The gated delta net: linear attention whose state forgets, and overwrites what a key
stood for.
"""

import math
from collections.abc import Callable

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSpec, NamedArray
from jaxtyping import DTypeLike, PRNGKeyArray

from models.parts.attention import named_heads
from models.parts.cache import Kept
from models.parts.config import DecoderConfig
from models.parts.convolution import ShortConvolution
from models.parts.linear import Float32Part, linear
from models.parts.norms import rms_norm
from models.parts.sections import LinearAttentionConfig
from models.parts.stateful import StatefulMixer
from models.parts.tokens import Tokens, has_positions
from stacked_remat.ops import linear_attention, linear_attention_step
from stacked_remat.training import POSITION_AXIS

DELTA_NAMES = ("query", "key", "value", "decay", "gate")
"""The names in a `GatedDeltaNet`."""


class Decay(Float32Part):
    """By how much a token scales the state before it, `exp(-exp(a_log) * softplus(x +
    dt_bias))` (Gu and Dao 2023, arXiv:2312.00752).

    Attributes:
        a_log: `[heads...]`.
        dt_bias: with the axes of `x`, of which there may be more.
    """

    a_log: NamedArray
    dt_bias: NamedArray

    @staticmethod
    def init(
        Heads: tuple[Axis, ...], Channels: tuple[Axis, ...] = (), *, key: PRNGKeyArray
    ) -> "Decay":
        """Makes a decay of each head, or of `Channels` of each head, from `key`."""
        a_key, dt_key = jax.random.split(key)
        # Published models draw from 0 to 16; the logarithm of 0 would stay as it is.
        a = hax.random.uniform(a_key, Heads, minval=0.01, maxval=16.0)
        # The softplus of the bias is between 1e-3 and 0.1, as in Mamba-2.
        low = math.log(1e-3)
        high = math.log(0.1)
        dt = hax.exp(
            hax.random.uniform(dt_key, (*Heads, *Channels), minval=low, maxval=high)
        )
        # The second is the inverse of softplus: y + log(1 - exp(-y)).
        return Decay(hax.log(a), dt + hax.log(-hax.expm1(-dt)))

    def __call__(self, x: NamedArray) -> NamedArray:
        """The logarithm of the factor, in float32, of what is projected of a token."""
        step = hnn.softplus(x.astype(jnp.float32) + self.dt_bias)
        return -hax.exp(self.a_log) * step


class LowRank(eqx.Module):
    """A linear map through a vector that is narrower than its inputs and outputs."""

    down: hnn.Linear
    up: hnn.Linear

    @staticmethod
    def init(
        config: DecoderConfig, Out: AxisSpec, rank: int, *, key: PRNGKeyArray
    ) -> "LowRank":
        """Makes the two maps, from `Embed` to `rank` coordinates and on to `Out`."""
        down_key, up_key = jax.random.split(key)
        Rank = Axis("rank", rank)
        return LowRank(
            down=linear(config, config.Embed, Rank, key=down_key),
            up=linear(config, Rank, Out, key=up_key),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `[..., Embed]` to `[..., Out]`."""
        return self.up(self.down(x))


class GatedDeltaNet(StatefulMixer):
    """The gated delta net (Yang et al. 2024, arXiv:2412.06464): of a head's state `S`,

        S <- decay * S;  S <- S + key (beta * (value - S^T key))^T;  output = S^T query

    Queries, keys and values pass a short convolution and a SiLU; queries and keys have
    unit length. The output is normalised, and multiplied by the activation of a gate.

    With a rank it is Kimi Delta Attention (Kimi team 2025, arXiv:2510.26692): each
    channel of the keys has a decay of its own, and decays and gates are projected by
    maps of this rank.

    Names for remat policies: `query`, `key`, `value` (before the convolution), `decay`
    and `gate`. The cache keeps the state, in float32, and the windows of the
    convolutions, whatever the number of tokens.

    Attributes:
        beta_scale: factor of beta, which is between 0 and 1; with 2 a state may have
            negative eigenvalues.
        activation: of the gate.
    """

    q_proj: hnn.Linear
    k_proj: hnn.Linear
    v_proj: hnn.Linear
    gate_proj: hnn.Linear | LowRank
    b_proj: hnn.Linear
    a_proj: hnn.Linear | LowRank
    q_conv: ShortConvolution
    k_conv: ShortConvolution
    v_conv: ShortConvolution
    decay: Decay
    norm: hnn.RmsNorm
    o_proj: hnn.Linear
    KeyDim: Axis = eqx.field(static=True)
    ValueHeads: tuple[Axis, ...] = eqx.field(static=True)
    ValueDim: Axis = eqx.field(static=True)
    beta_scale: float = eqx.field(static=True)
    activation: Callable[[NamedArray], NamedArray] = eqx.field(static=True)
    tiles: int = eqx.field(static=True)
    rotary: None = eqx.field(static=True, default=None)

    @staticmethod
    def init(
        config: DecoderConfig,
        sizes: LinearAttentionConfig,
        *,
        norm_eps: float,
        beta_scale: float = 1.0,
        activation: Callable[[NamedArray], NamedArray] = hnn.silu,
        rank: int | None = None,
        key: PRNGKeyArray,
    ) -> "GatedDeltaNet":
        """Makes the projections, convolutions and decays from `key`; arguments are as
        of the class.
        """
        keys = jax.random.split(key, 11)
        Embed = config.Embed
        KeyHeads = sizes.KeyHeads
        ValueHeads = (sizes.KeyHeads, sizes.ValuesPerKey)
        Keys = (KeyHeads, sizes.KeyDim)
        Values = (*ValueHeads, sizes.ValueDim)
        if rank is None:
            channels = ()
            gate_proj = linear(config, Embed, Values, key=keys[3])
            a_proj = linear(config, Embed, ValueHeads, key=keys[5])
        else:
            channels = (sizes.KeyDim,)
            gate_proj = LowRank.init(config, Values, rank, key=keys[3])
            a_proj = LowRank.init(config, (*ValueHeads, *channels), rank, key=keys[5])
        return GatedDeltaNet(
            q_proj=linear(config, Embed, Keys, key=keys[0]),
            k_proj=linear(config, Embed, Keys, key=keys[1]),
            v_proj=linear(config, Embed, Values, key=keys[2]),
            gate_proj=gate_proj,
            b_proj=linear(config, Embed, ValueHeads, key=keys[4]),
            a_proj=a_proj,
            q_conv=ShortConvolution.init(Keys, sizes.conv_size, key=keys[6]),
            k_conv=ShortConvolution.init(Keys, sizes.conv_size, key=keys[7]),
            v_conv=ShortConvolution.init(Values, sizes.conv_size, key=keys[8]),
            decay=Decay.init(ValueHeads, channels, key=keys[9]),
            norm=rms_norm(sizes.ValueDim, norm_eps),
            o_proj=linear(config, Values, Embed, key=keys[10]),
            KeyDim=sizes.KeyDim,
            ValueHeads=ValueHeads,
            ValueDim=sizes.ValueDim,
            beta_scale=beta_scale,
            activation=activation,
            tiles=config.tiles,
        )

    def mix(
        self, x: NamedArray, tokens: Tokens, kept: Kept | None
    ) -> tuple[NamedArray, Kept]:
        """The delta rule over the tokens, from the state and the windows kept."""
        # Queries and keys [..., key_heads, key_dim], values [..., key_heads,
        # values_per_key, value_dim]: transformers repeats the former for each head of
        # values, here they lack the axis.
        state, q_window, k_window, v_window = kept or (None, None, None, None)
        query = named_heads(self.q_proj(x), "query", x)
        key = named_heads(self.k_proj(x), "key", x)
        value = named_heads(self.v_proj(x), "value", x)
        query, q_window = self.q_conv(query, tokens, q_window)
        key, k_window = self.k_conv(key, tokens, k_window)
        value, v_window = self.v_conv(value, tokens, v_window)
        # With keys of length 1 the step of a state, I - beta key key^T, has the
        # eigenvalue 1 - beta along the key and 1 elsewhere: a state does not grow.
        query = unit_length(hnn.silu(query), self.KeyDim) * self.KeyDim.size**-0.5
        key = unit_length(hnn.silu(key), self.KeyDim)
        # 1 overwrites what the state has of a key, 0 leaves it.
        beta = hnn.sigmoid(self.b_proj(x).astype(jnp.float32)) * self.beta_scale
        decay = named_heads(self.a_proj(x), "decay", x)
        output, state = attend_linearly(
            query,
            key,
            hnn.silu(value),
            self.decay(decay),
            beta,
            self.KeyDim,
            self.ValueDim,
            tokens,
            state,
        )
        gate = named_heads(self.gate_proj(x), "gate", x)
        # The norm first, then the gate in float32; Mamba-2 has it the other way round.
        gated = self.norm(output) * self.activation(gate.astype(jnp.float32))
        output = self.o_proj(gated.astype(x.dtype)).rearrange(x.axes)
        return output, (state, q_window, k_window, v_window)

    def empty_cache(self, Batch: Axis, slots: int, dtype: DTypeLike) -> Kept:
        """A state of zeros for each head of values, and three windows."""
        state = hax.zeros(
            (Batch, *self.ValueHeads, self.KeyDim, self.ValueDim), jnp.float32
        )
        convolutions = (self.q_conv, self.k_conv, self.v_conv)
        return state, *(one.empty_window(Batch, dtype) for one in convolutions)


def attend_linearly(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    log_decay: NamedArray,
    beta: NamedArray | None,
    KeyDim: Axis,
    ValueDim: Axis,
    tokens: Tokens,
    state: NamedArray | None,
) -> tuple[NamedArray, NamedArray]:
    """`stacked_remat.ops.linear_attention` of sequences, or its step of one token of
    each.
    """
    given = query, key, value, log_decay, beta
    if not has_positions(value):
        assert state is not None
        return linear_attention_step(*given, KeyDim, ValueDim, state)
    return linear_attention(
        *given,
        POSITION_AXIS,
        KeyDim,
        ValueDim,
        documents=tokens.documents,
        lengths=tokens.lengths,
        state=state,
    )


def unit_length(x: NamedArray, Over: Axis) -> NamedArray:
    """Vectors over an axis, divided by their lengths in float32."""
    wide = x.astype(jnp.float32)
    # The epsilon of the published models, which is beside the sum of squares
    scale = hax.rsqrt(hax.sum(hax.square(wide), axis=Over) + 1e-6)
    return (wide * scale).astype(x.dtype)
