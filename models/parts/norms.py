"""Norms over named axes, which normalise in float32 in any model."""

from typing import TypeAlias

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax.numpy as jnp
from haliax import AxisSpec, NamedArray


class OffsetRmsNorm(eqx.Module):
    """An RMS norm whose factors are `weight + offset`.

    It multiplies by them before it casts to the dtype of what it is given;
    `haliax.nn.RmsNorm` casts first.
    """

    weight: NamedArray
    axis: AxisSpec = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Normalises `x`, and gives its dtype."""
        # A mean of squares in bfloat16 would lose most of its digits.
        wide = x.astype(jnp.float32)
        normalised = wide * hax.rsqrt(
            hax.mean(hax.square(wide), axis=self.axis) + self.eps
        )
        # In float32 too: weights near zero would be rounded away beside the offset.
        factors = self.weight.astype(jnp.float32) + self.offset
        return (normalised * factors).astype(x.dtype)


class LayerNorm(eqx.Module):
    """A layer norm (Ba et al. 2016) with a weight and no bias.

    Unlike `haliax.nn.LayerNorm` it computes in float32.
    """

    weight: NamedArray
    axis: AxisSpec = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Normalises `x`, and gives its dtype."""
        wide = x.astype(jnp.float32)
        centred = wide - hax.mean(wide, axis=self.axis)
        variance = hax.mean(hax.square(centred), axis=self.axis)
        normalised = centred * hax.rsqrt(variance + self.eps)
        return (normalised * self.weight.astype(jnp.float32)).astype(x.dtype)


Norm: TypeAlias = hnn.RmsNorm | OffsetRmsNorm | LayerNorm


def rms_norm(Over: AxisSpec, eps: float) -> hnn.RmsNorm:
    """An RMS norm with factors of 1 and no bias (Zhang and Sennrich 2019)."""
    # Float32 inside and the weight after the cast, as in most models of transformers
    return hnn.RmsNorm.init(Over, eps=eps, use_bias=False, dtype=jnp.float32)


def unweighted_rms_norm(Over: AxisSpec, eps: float) -> hnn.RmsNorm:
    """An RMS norm without factors."""
    return hnn.RmsNorm(Over, None, None, eps, jnp.float32)


def layer_norm(Over: AxisSpec, eps: float) -> LayerNorm:
    """A layer norm with factors of 1."""
    return LayerNorm(hax.ones(Over), Over, eps)


def offset_rms_norm(Over: AxisSpec, eps: float) -> OffsetRmsNorm:
    """An RMS norm whose factors are `weight + 1`, with weights of zero."""
    # Weight decay then pulls the factors to one, not to zero.
    return OffsetRmsNorm(hax.zeros(Over), Over, eps, offset=1.0)
