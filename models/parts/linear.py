"""Linear maps of a decoder's parts, adapted or not, and the cast to the compute
dtype.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSpec, NamedArray
from haliax.axis import axis_spec_to_tuple
from jaxtyping import DTypeLike, PRNGKeyArray

from models.parts.config import DecoderConfig
from stacked_remat import LayerStack
from stacked_remat.lora import LoraLinear

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
    # Out before In, as PyTorch stores them: files are read without a transposition.
    weight = (
        hax.random.normal(key, hax.concat_axis_specs(Out, In))
        * config.initializer_range
    )
    return hnn.Linear(weight, hax.zeros(Out) if bias else None, In, Out)


class Float32Part(eqx.Module):
    """Parameters that are float32 where others are cast, and get no weight decay.

    Such are those of a state's decay: their rounding errors add up over a sequence, and
    zero is no state to be pulled to.
    """

    weight_decay: ClassVar[bool] = False  # see `OptimizerConfig.weight_decay`
    keeps_dtype: ClassVar[bool] = True  # see `PrecisionConfig.parameters`

    def cast_to(self, dtype: DTypeLike) -> Self:
        """In float32, whatever the dtype."""
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), self)


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
        # The adapter's arrays are cut with the rest; only the map says its axes.
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

    Of a `LayerStack` it casts the layer. A part that computes in another dtype says how
    it is cast, in a method `cast_to`.
    """

    def casts_itself(node: Any) -> bool:
        # Not `tree` itself: its own `cast_to` may call this.
        return node is not tree and hasattr(node, "cast_to")

    def cast(leaf: Any) -> Any:
        if casts_itself(leaf):
            return leaf.cast_to(dtype)
        if isinstance(leaf, LayerStack):
            return dataclasses.replace(leaf, own=cast_floating(leaf.layer, dtype))
        return leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf

    def is_leaf(node: Any) -> bool:
        return isinstance(node, LayerStack) or casts_itself(node)

    return jax.tree.map(cast, tree, is_leaf=is_leaf)
