"""The leaves of a Qwen3 layer: linear maps, RMS norms, and the cast to the compute dtype."""

from typing import TypeVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import AxisSpec
from jaxtyping import DTypeLike, PRNGKeyArray

from models.qwen3_moe.config import Qwen3MoeConfig

T = TypeVar("T")


def linear(config: Qwen3MoeConfig, In: AxisSpec, Out: AxisSpec, *, key: PRNGKeyArray) -> hnn.Linear:
    """A linear map without bias, weights `[Out, In]` drawn from N(0, initializer_range^2) in float32."""
    weight = hax.random.normal(key, hax.concat_axis_specs(Out, In)) * config.initializer_range
    return hnn.Linear(weight, None, In, Out)


def rms_norm(config: Qwen3MoeConfig, Over: AxisSpec) -> hnn.RmsNorm:
    """An RMS norm over `Over` with a weight and no bias, computed in float32 whatever comes in."""
    return hnn.RmsNorm.init(Over, eps=config.rms_norm_eps, use_bias=False, dtype=jnp.float32)


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Casts the floating-point arrays of `tree` to `dtype` and leaves everything else as it is."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, tree)
