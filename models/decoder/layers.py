"""The parts of a decoder layer: linear maps, RMS norms, the gated MLP, and the cast to
the compute dtype.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSpec, NamedArray
from haliax.axis import axis_spec_to_tuple
from jaxtyping import DTypeLike, PRNGKeyArray

from models.decoder.config import DecoderConfig, LayerSpec
from stacked_remat import LayerStack
from stacked_remat.lora import LoraLinear
from stacked_remat.ops import ExpertLinear, apply_linear

T = TypeVar("T")


def linear(
    config: DecoderConfig,
    In: AxisSpec,
    Out: AxisSpec,
    *,
    bias: bool = False,
    key: PRNGKeyArray,
) -> hnn.Linear:
    """A linear map, weights `[Out, In]` drawn from N(0, initializer_range^2) in
    float32, a bias from zero.
    """
    weight = (
        hax.random.normal(key, hax.concat_axis_specs(Out, In))
        * config.initializer_range
    )
    return hnn.Linear(weight, hax.zeros(Out) if bias else None, In, Out)


class OffsetRmsNorm(eqx.Module):
    """An RMS norm whose factors are `weight + offset`."""

    weight: NamedArray
    axis: AxisSpec = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Normalises `x` in float32, and gives its dtype."""
        wide = x.astype(jnp.float32)
        normalised = wide * hax.rsqrt(
            hax.mean(hax.square(wide), axis=self.axis) + self.eps
        )
        return (normalised * (self.weight.astype(jnp.float32) + self.offset)).astype(
            x.dtype
        )


Norm: TypeAlias = hnn.RmsNorm | OffsetRmsNorm


def rms_norm(config: DecoderConfig, Over: AxisSpec) -> Norm:
    """An RMS norm over `Over` with a weight and no bias, always computed in float32,
    with factors of 1.
    """
    if offset := config.norm_offset:
        return OffsetRmsNorm(
            hax.full(Over, 1 - offset), Over, config.rms_norm_eps, offset
        )
    return hnn.RmsNorm.init(
        Over, eps=config.rms_norm_eps, use_bias=False, dtype=jnp.float32
    )


_ACTIVATIONS = {
    "silu": hnn.silu,
    "gelu_tanh": functools.partial(hnn.gelu, approximate=True),
}
_CLAMPED_SLOPE = 1.702  # with it, x * sigmoid(slope * x) approximates GELU


class SwiGlu(eqx.Module):
    """A gated MLP, `down(silu(gate(x)) * up(x))` (Shazeer 2020), of a dense layer or of
    one expert.

    The activation may be another. With a limit it is `down(g * sigmoid(1.702 * g) * (u
    + 1))`, where g is `gate(x)` of at most the limit and u is `up(x)` between minus the
    limit and the limit.
    """

    gate_proj: hnn.Linear
    up_proj: hnn.Linear
    down_proj: hnn.Linear
    limit: float | None = eqx.field(static=True)
    activation: Literal["silu", "gelu_tanh"] = eqx.field(static=True, default="silu")

    @staticmethod
    def init(
        config: DecoderConfig, spec: LayerSpec, Inner: Axis, *, key: PRNGKeyArray
    ) -> "SwiGlu":
        """Makes the three projections, to and from `Inner`, from `key`."""
        gate_key, up_key, down_key = jax.random.split(key, 3)
        return SwiGlu(
            gate_proj=linear(
                config, config.Embed, Inner, bias=spec.mlp_bias, key=gate_key
            ),
            up_proj=linear(config, config.Embed, Inner, bias=spec.mlp_bias, key=up_key),
            down_proj=linear(
                config, Inner, config.Embed, bias=spec.mlp_bias, key=down_key
            ),
            limit=spec.swiglu_limit,
            activation=spec.activation,
        )

    def __call__(
        self,
        x: NamedArray,
        gate: NamedArray | None = None,
        products: tuple[NamedArray, NamedArray] | None = None,
        linear: ExpertLinear = apply_linear,
    ) -> NamedArray:
        """Maps `[..., Embed]` to `[..., Embed]`, times `gate` if given.

        `gate` is applied before the last map, so that its gradient does not need that
        map's output. `products` are those of `x`, if they are known. `linear` applies a
        linear map: of this expert, or of each row's
        (`stacked_remat.ops.grouped_experts`).
        """
        hidden = self._hidden(
            *(self.products(x, linear) if products is None else products)
        )
        if gate is None:
            return linear(self.down_proj, hidden)
        down, bias = without_bias(self.down_proj)
        mixed = linear(down, hidden * gate)
        return mixed if bias is None else mixed + linear(bias, gate)

    def products(
        self, x: NamedArray, linear: ExpertLinear = apply_linear
    ) -> tuple[NamedArray, NamedArray]:
        """What `gate_proj` and `up_proj` make of `x`."""
        return linear(self.gate_proj, x), linear(self.up_proj, x)

    def _hidden(self, gated: Any, up: Any) -> Any:
        if self.limit is None:
            return _ACTIVATIONS[self.activation](gated) * up
        gated, up = (
            hax.minimum(gated, self.limit),
            hax.clip(up, -self.limit, self.limit),
        )
        return gated * hnn.sigmoid(_CLAMPED_SLOPE * gated) * (up + 1)


def map_linears(fn: Callable[[Any], Any], tree: T) -> T:
    """`tree` with `fn` applied to its linear maps, those with an adapter among them."""

    def is_linear(node: Any) -> bool:
        return isinstance(node, hnn.Linear | LoraLinear)

    return jax.tree.map(
        lambda node: fn(node) if is_linear(node) else node, tree, is_leaf=is_linear
    )


def of_part(linear: Any, axis: Axis) -> Any:
    """The linear map, adapted or not, whose arrays have only this part of the axis of
    its name.
    """
    if isinstance(linear, LoraLinear):
        return dataclasses.replace(linear, wrapped=of_part(linear.wrapped, axis))

    def part(spec: AxisSpec) -> Any:
        return tuple(
            axis if own.name == axis.name else own for own in axis_spec_to_tuple(spec)
        )

    return dataclasses.replace(linear, In=part(linear.In), Out=part(linear.Out))


def without_bias(linear: Any) -> tuple[Any, NamedArray | None]:
    """The linear map, adapted or not, without its bias; and that."""
    if isinstance(linear, LoraLinear):
        wrapped, bias = without_bias(linear.wrapped)
        return dataclasses.replace(linear, wrapped=wrapped), bias
    return dataclasses.replace(linear, bias=None), linear.bias


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Casts the floating-point arrays of `tree` to `dtype` and leaves everything else
    unchanged.

    Of a `LayerStack` it casts the layer.
    """

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, LayerStack):
            return dataclasses.replace(leaf, own=cast_floating(leaf.layer, dtype))
        return leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf

    return jax.tree.map(cast, tree, is_leaf=lambda node: isinstance(node, LayerStack))
