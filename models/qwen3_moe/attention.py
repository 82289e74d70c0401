"""Rotary position embedding, and grouped-query attention with normalised queries and keys."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray
from jaxtyping import PRNGKeyArray

from models.qwen3_moe.config import Qwen3MoeConfig
from models.qwen3_moe.layers import linear, rms_norm
from stacked_remat import checkpoint_name
from stacked_remat.ops import causal_attention


class RotaryTable(eqx.Module):
    """Cosines and sines of the rotary angles, `[..., Pos, HeadDim]` in float32.

    Made once per forward pass and shared by all layers, since no layer's angles differ from another's.
    """

    cos: NamedArray
    sin: NamedArray


def rotary_table(positions: NamedArray, HeadDim: Axis, *, theta: float) -> RotaryTable:
    """The angles of "RoFormer" (Su et al. 2021), in the layout of Hugging Face's checkpoints.

    Coordinate i is paired with i + HeadDim/2, and the pair turns by `position * theta**(-2i/HeadDim)`.

    Args:
        positions: integer positions `[..., Pos]`.
        HeadDim: the axis of one head's coordinates; its size must be even.
        theta: base of the wavelengths.
    """
    Half = HeadDim.resize(HeadDim.size // 2)
    frequencies = theta ** (hax.arange(Half, dtype=jnp.float32) * (-2.0 / HeadDim.size))
    angles = positions.astype(jnp.float32).broadcast_axis(Half) * frequencies
    angles = hax.concatenate(HeadDim, [angles, angles])
    return RotaryTable(hax.cos(angles), hax.sin(angles))


def apply_rotary(x: NamedArray, table: RotaryTable, HeadDim: Axis) -> NamedArray:
    """Turns the coordinate pairs of `x`, `[..., Pos, ..., HeadDim]`, by the table's angles.

    Computes in float32 and returns the dtype of `x`.
    """
    half = HeadDim.size // 2
    wide = x.astype(jnp.float32)
    first, second = wide[HeadDim, :half], wide[HeadDim, half:]
    turned = hax.concatenate(HeadDim, [-second, first])
    return (wide * table.cos + turned * table.sin).rearrange(x.axes).astype(x.dtype)


class Attention(eqx.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with RMS norms on queries and keys.

    Names for remat policies: `query`, `key`, `value` (after norm and rotation), `attention_output` (before
    the output projection) and `attention_lse`, the last two as `stacked_remat.ops.causal_attention` has them.
    """

    q_proj: hnn.Linear
    k_proj: hnn.Linear
    v_proj: hnn.Linear
    o_proj: hnn.Linear
    q_norm: hnn.RmsNorm
    k_norm: hnn.RmsNorm
    config: Qwen3MoeConfig = eqx.field(static=True)

    @staticmethod
    def init(config: Qwen3MoeConfig, *, key: PRNGKeyArray) -> "Attention":
        """Makes the four projections, without biases, from `key`."""
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        KeyHeads = (config.KVHeads, config.HeadDim)
        QueryHeads = (config.KVHeads, config.HeadsPerKV, config.HeadDim)
        return Attention(
            q_proj=linear(config, config.Embed, QueryHeads, key=q_key),
            k_proj=linear(config, config.Embed, KeyHeads, key=k_key),
            v_proj=linear(config, config.Embed, KeyHeads, key=v_key),
            o_proj=linear(config, QueryHeads, config.Embed, key=o_key),
            q_norm=rms_norm(config, config.HeadDim),
            k_norm=rms_norm(config, config.HeadDim),
            config=config,
        )

    def __call__(self, x: NamedArray, rotary: RotaryTable, Pos: AxisSelector) -> NamedArray:
        """Maps `[..., Pos, Embed]` to `[..., Pos, Embed]`; a position sees itself and what came before."""
        HeadDim = self.config.HeadDim
        query = apply_rotary(self.q_norm(self.q_proj(x)), rotary, HeadDim)
        key = apply_rotary(self.k_norm(self.k_proj(x)), rotary, HeadDim)
        query = checkpoint_name(query, "query")
        key = checkpoint_name(key, "key")
        value = checkpoint_name(self.v_proj(x), "value")
        attended = causal_attention(
            query, key, value, Pos, self.config.KVHeads, HeadDim, backend=self.config.attention_backend
        )
        return self.o_proj(attended).rearrange(x.axes)
