"""Mamba-2: linear attention whose decays and inputs follow from a step size."""

from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import DTypeLike, PRNGKeyArray

from models.parts.attention import named_heads
from models.parts.cache import Kept
from models.parts.config import DecoderConfig
from models.parts.convolution import ShortConvolution
from models.parts.delta_net import attend_linearly
from models.parts.linear import Float32Part, linear
from models.parts.stateful import StatefulMixer
from models.parts.tokens import Tokens
from stacked_remat.training.config_checks import Count, check_fields
from stacked_remat.training.config_sections import RecordsArguments

MAMBA_NAMES = ("query", "key", "value", "gate")
"""The names in a `Mamba2`."""


@dataclass(frozen=True)
class MambaConfig(RecordsArguments):
    """Sizes of layers with Mamba-2.

    Attributes:
        num_heads: heads, each with a state.
        num_groups: of heads that share queries and keys.
        head_dim: width of a head of values.
        state_dim: width of a head of queries and keys.
        conv_size: how many tokens the convolution of each channel reads, the newest
            included.
        conv_bias: whether convolutions have biases.
        bias: whether projections have.
    """

    num_heads: Count = 4
    num_groups: Count = 1
    head_dim: Count = 64
    state_dim: Count = 64
    conv_size: Count = 4
    conv_bias: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        check_fields("model.mamba.", self)
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"model.mamba.num_heads = {self.num_heads} must be a multiple of"
                f" model.mamba.num_groups = {self.num_groups}."
            )

    @property
    def Keys(self) -> tuple[Axis, Axis]:
        """Coordinates of the keys of all groups, and of the queries."""
        return Axis("key_heads", self.num_groups), Axis("key_dim", self.state_dim)

    @property
    def Heads(self) -> tuple[Axis, Axis]:
        """All heads, by their group."""
        each = self.num_heads // self.num_groups
        return self.Keys[0], Axis("values_per_key", each)

    @property
    def Values(self) -> tuple[Axis, ...]:
        """Coordinates of the values of all heads."""
        return *self.Heads, Axis("value_dim", self.head_dim)


class StepParameters(Float32Part):
    """What Mamba-2 has for each head besides projections.

    Attributes:
        a_log: the logarithm of the decay in a unit of time.
        dt_bias: added to the step before its softplus.
        d: the factor of the value that is added to the output.
    """

    a_log: NamedArray
    dt_bias: NamedArray
    d: NamedArray


class GatedGroupNorm(eqx.Module):
    """An RMS norm of `x * silu(gate)` in float32."""

    weight: NamedArray
    eps: float = eqx.field(static=True)

    def __call__(
        self, x: NamedArray, gate: NamedArray, Over: tuple[Axis, ...]
    ) -> NamedArray:
        """Normalises over these axes; `x` is float32, the result has the dtype of
        `gate`.
        """
        # The gate before the norm, in Mamba's code `norm_before_gate=False`
        gated = x * hnn.silu(gate.astype(jnp.float32))
        scale = hax.rsqrt(hax.mean(hax.square(gated), axis=Over) + self.eps)
        # The weight after the cast, as in transformers
        return (gated * scale).astype(gate.dtype) * self.weight


class Mamba2(StatefulMixer):
    """Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): of a head's state `S`,

        S <- exp(-exp(a_log) * step) * S + step * key value^T
        output = S^T query + d * value

    Queries, keys and values pass a short convolution and a SiLU; the output is gated
    and normalised. Papers call queries C, keys B and values x.

    Names for remat policies: `query`, `key`, `value` (before the convolution) and
    `gate`. The cache keeps the state, in float32, and the windows of the convolutions,
    whatever the number of tokens.
    """

    # In this order files have them in one tensor, and the convolutions in another.
    gate_proj: hnn.Linear
    v_proj: hnn.Linear
    k_proj: hnn.Linear
    q_proj: hnn.Linear
    dt_proj: hnn.Linear
    v_conv: ShortConvolution
    k_conv: ShortConvolution
    q_conv: ShortConvolution
    step: StepParameters
    norm: GatedGroupNorm
    o_proj: hnn.Linear
    sizes: MambaConfig = eqx.field(static=True)
    tiles: int = eqx.field(static=True)
    rotary: None = eqx.field(static=True, default=None)

    @staticmethod
    def init(
        config: DecoderConfig, sizes: MambaConfig, *, key: PRNGKeyArray
    ) -> "Mamba2":
        """Makes projections and convolutions from `key`; decays begin as published."""
        keys = jax.random.split(key, 9)
        Embed = config.Embed
        Heads = sizes.Heads
        Keys = sizes.Keys
        Values = sizes.Values
        taps = sizes.conv_size
        bias = sizes.bias
        conv_bias = sizes.conv_bias
        # Head h, from 1 on, begins with the decay exp(-h * step).
        number = hax.arange(Axis("head", sizes.num_heads), start=1, dtype=jnp.float32)
        return Mamba2(
            gate_proj=linear(config, Embed, Values, bias=bias, key=keys[0]),
            v_proj=linear(config, Embed, Values, bias=bias, key=keys[1]),
            k_proj=linear(config, Embed, Keys, bias=bias, key=keys[2]),
            q_proj=linear(config, Embed, Keys, bias=bias, key=keys[3]),
            dt_proj=linear(config, Embed, Heads, bias=bias, key=keys[4]),
            v_conv=ShortConvolution.init(Values, taps, bias=conv_bias, key=keys[5]),
            k_conv=ShortConvolution.init(Keys, taps, bias=conv_bias, key=keys[6]),
            q_conv=ShortConvolution.init(Keys, taps, bias=conv_bias, key=keys[7]),
            step=StepParameters(
                a_log=hax.log(number).unflatten_axis("head", Heads),
                dt_bias=hax.ones(Heads),
                d=hax.ones(Heads),
            ),
            norm=GatedGroupNorm(hax.ones(Values), config.rms_norm_eps),
            o_proj=linear(config, Values, Embed, bias=bias, key=keys[8]),
            sizes=sizes,
            tiles=config.tiles,
        )

    def mix(
        self, x: NamedArray, tokens: Tokens, kept: Kept | None
    ) -> tuple[NamedArray, Kept]:
        """The state's outputs for the tokens, from the state and the windows kept."""
        state, v_window, k_window, q_window = kept or (None, None, None, None)
        value = named_heads(self.v_proj(x), "value", x)
        key = named_heads(self.k_proj(x), "key", x)
        query = named_heads(self.q_proj(x), "query", x)
        value, v_window = self.v_conv(value, tokens, v_window)
        key, k_window = self.k_conv(key, tokens, k_window)
        query, q_window = self.q_conv(query, tokens, q_window)
        # A step of size `step` of a continuous system: its decay exactly, and its input
        # by Euler's rule, which is a factor of the values.
        wide = hnn.silu(value).astype(jnp.float32)
        own = self.step
        # Published configs limit the step to [0, inf), which changes nothing.
        step = hnn.softplus(self.dt_proj(x).astype(jnp.float32) + own.dt_bias)
        _, KeyDim = self.sizes.Keys
        *_, ValueDim = self.sizes.Values
        # Queries and keys `[..., key_heads, key_dim]` are of groups, whose heads share
        # them: values, steps and decays have `values_per_key` besides.
        output, state = attend_linearly(
            hnn.silu(query),
            hnn.silu(key),
            (wide * step).astype(x.dtype),
            -hax.exp(own.a_log) * step,
            None,
            KeyDim,
            ValueDim,
            tokens,
            state,
        )
        # What a token adds to its own output, past the state
        output = output.astype(jnp.float32) + wide * own.d
        gate = named_heads(self.gate_proj(x), "gate", x)
        normalised = self.norm(output, gate, self.sizes.Values[1:])
        output = self.o_proj(normalised).rearrange(x.axes)
        return output, (state, v_window, k_window, q_window)

    def empty_cache(self, Batch: Axis, slots: int, dtype: DTypeLike) -> Kept:
        """A state of zeros for each head, and three windows."""
        _, KeyDim = self.sizes.Keys
        (*_, ValueDim) = self.sizes.Values
        state = hax.zeros((Batch, *self.sizes.Heads, KeyDim, ValueDim), jnp.float32)
        convolutions = (self.v_conv, self.k_conv, self.q_conv)
        windows = (one.empty_window(Batch, dtype) for one in convolutions)
        return state, *windows
