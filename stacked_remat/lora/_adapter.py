"""Linears with low-rank adapters: adding, selecting and merging adapters in a model."""

import difflib
import fnmatch
import zlib
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.axis import axis_spec_to_tuple
from jax import lax
from jaxtyping import Array, DTypeLike, PRNGKeyArray

from .._sweep.store import read, write
from ._config import LoraConfig
from ._paths import find_modules, map_modules

T = TypeVar("T")

RANK_AXIS = "lora_rank"
"""The axis between A and B; a linear's own axes must have other names."""


class LoraLinear(eqx.Module):
    """A linear with a low-rank adapter: `wrapped(x) + (x · A) · B * scale`, never merged.

    A and B are cast to the dtype of `x`. In a stack they have the stack's axes, as the wrapped weight has.

    Attributes:
        wrapped: the linear, named or plain.
        a: `[..., In..., lora_rank]`.
        b: `[..., lora_rank, Out...]`.
        scale: factor of the adapter's output.

    Cost beside that of `wrapped`: `2 * rank * (In + Out)` FLOPs for every row of `x`, and twice that
    backward. If only A and B are trained, the gradient of the wrapped weight is not computed.
    """

    wrapped: hnn.Linear | eqx.nn.Linear
    a: NamedArray | Array
    b: NamedArray | Array
    scale: float = eqx.field(static=True)

    def __call__(self, x: Any, *, key: PRNGKeyArray | None = None) -> Any:
        """Apply the wrapped linear, to which `key` is passed, and the adapter."""
        whole: Any = self.wrapped(x, key=key)
        # The low-rank activations are the smallest array to scale.
        if isinstance(self.a, NamedArray) and isinstance(self.wrapped, hnn.Linear):
            low = x.dot(self.a.astype(x.dtype), axis=self.wrapped.In) * self.scale
            adapted = low.dot(self.b.astype(x.dtype), axis=RANK_AXIS)
            return whole + adapted.rearrange(whole.axes).astype(whole.dtype)
        low = (x @ self.a.astype(x.dtype)) * self.scale
        return whole + (low @ self.b.astype(x.dtype)).astype(whole.dtype)

    In = property(attrgetter("wrapped.In"), doc="The input axes of a named linear.")
    Out = property(attrgetter("wrapped.Out"), doc="The output axes of a named linear.")
    in_features = property(attrgetter("wrapped.in_features"), doc="The input width of a plain linear.")
    out_features = property(attrgetter("wrapped.out_features"), doc="The output width of a plain linear.")

    @property
    def weight(self) -> Any:
        """Raises an error, because the adapter is not part of the wrapped weight.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(
            "A LoraLinear has no single weight. Call it, use `wrapped.weight`, which lacks the adapter, or "
            "merge with `merge_lora`. A linear whose weight is used directly, such as a head in a chunked "
            "loss, can't be adapted: leave it out of LoraConfig.targets.",
            name="weight",
            obj=self,
        )


_LINEARS = (hnn.Linear, eqx.nn.Linear, LoraLinear)


def apply_lora(model: T, config: LoraConfig, *, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> T:
    """Add an adapter to every linear, of Haliax or Equinox, whose path matches one of the patterns.

    A is drawn from N(0, 1 / In) and B is zero, so the model's outputs do not change. The adapter of a path
    does not depend on the other targets.

    Args:
        model: any tree of modules, with or without stacks.
        config: which linears, and the rank and scale of adapters.
        key: for A.
        dtype: of A and B.

    Returns:
        The model with `LoraLinear`s in place of these linears; its arrays are not copied.

    Raises:
        ValueError: a pattern matches no linear (names the nearest paths), or a linear has an adapter already
            or maps scalars.
    """
    paths = list(find_modules(model, _LINEARS))
    for target in config.targets:
        if not any(fnmatch.fnmatchcase(path, target) for path in paths):
            raise ValueError(_no_match(target, paths))

    def adapt(path: str, linear: Any) -> Any:
        if not any(fnmatch.fnmatchcase(path, target) for target in config.targets):
            return linear
        if isinstance(linear, LoraLinear):
            raise ValueError(
                f"{path} has an adapter already. Merge it first, or leave it out of the targets."
            )
        own_key = jax.random.fold_in(key, zlib.crc32(path.encode()) & 0x7FFFFFFF)
        if isinstance(linear, hnn.Linear):
            return _adapted_named(linear, config, own_key, dtype)
        if "scalar" in (linear.in_features, linear.out_features):
            raise ValueError(f"{path} maps scalars and can't have an adapter. Leave it out of the targets.")
        return _adapted_plain(linear, config, own_key, dtype)

    return map_modules(model, _LINEARS, adapt)


def lora_filter(model: Any) -> Any:
    """A tree like the model, True for A and B of every adapter and False elsewhere.

    For `equinox.partition`, or as `trainable` of `stacked_remat.training.TrainState.init`.

    Raises:
        ValueError: the model has no adapters.
    """
    if not find_modules(model, (LoraLinear,)):
        raise ValueError("The model has no adapters: apply_lora makes them.")

    def mark(node: Any) -> Any:
        if not isinstance(node, LoraLinear):
            return False
        marks = jax.tree.map(lambda _: False, node)
        return eqx.tree_at(lambda of: (of.a, of.b), marks, jax.tree.map(lambda _: True, (node.a, node.b)))

    return jax.tree.map(mark, model, is_leaf=lambda node: isinstance(node, LoraLinear))


def merge_lora(model: T, *, donate: bool = False) -> T:
    """The model with plain linears of weights `W + scale * A · B`: for export, not for training.

    Args:
        model: a model with or without adapters.
        donate: whether to reuse the memory of W, after which `model` can't be used.

    Sums are computed in float32 and rounded to the dtype of W, a layer at a time. Memory: one layer of one
    linear in float32, and the new weights unless `donate`.
    """
    return map_modules(model, (LoraLinear,), lambda path, node: _merged(node, donate))


def lora_linears(model: Any) -> dict[str, hnn.Linear | eqx.nn.Linear | LoraLinear]:
    """Every linear, adapted or not, by the path that patterns of `LoraConfig` match."""
    return find_modules(model, _LINEARS)


def replace_linears(model: T, by_path: Mapping[str, LoraLinear]) -> T:
    """The model with some linears replaced, by the paths of `lora_linears`."""
    return map_modules(model, _LINEARS, lambda path, linear: by_path.get(path, linear))


def stack_axes(linear: hnn.Linear) -> tuple[Axis, ...]:
    """The axes of a linear's weight that are of the stacks around it."""
    In, Out = linear_axes(linear)
    own = {axis.name for axis in (*In, *Out)}
    return tuple(axis for axis in linear.weight.axes if axis.name not in own)


def linear_axes(linear: hnn.Linear) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """The input and output axes of a linear."""
    return axis_spec_to_tuple(linear.In), axis_spec_to_tuple(linear.Out)


def _adapted_named(linear: hnn.Linear, config: LoraConfig, key: PRNGKeyArray, dtype: DTypeLike) -> LoraLinear:
    In, Out = linear_axes(linear)
    Rank, Stack = Axis(RANK_AXIS, config.rank), stack_axes(linear)
    a = hax.random.normal(key, (*Stack, *In, Rank)) * hax.axis_size(In) ** -0.5
    return LoraLinear(linear, a.astype(dtype), hax.zeros((*Stack, Rank, *Out), dtype=dtype), config.scale)


def _adapted_plain(
    linear: eqx.nn.Linear, config: LoraConfig, key: PRNGKeyArray, dtype: DTypeLike
) -> LoraLinear:
    *stack, wide, narrow = linear.weight.shape
    a = jax.random.normal(key, (*stack, narrow, config.rank), dtype) * narrow**-0.5
    return LoraLinear(linear, a, jnp.zeros((*stack, config.rank, wide), dtype), config.scale)


def _merged(node: LoraLinear, donate: bool) -> Any:
    linear = node.wrapped
    merge_named, merge_plain = _DONATING if donate else _COPYING
    if isinstance(linear, hnn.Linear):
        # Haliax multiplies a reparametrised weight by this factor when it is applied.
        factor = node.scale / linear.reparam.active_scale
        weight = merge_named(linear.weight, node.a, node.b, factor, stack_axes(linear)[:1])
    else:
        weight = merge_plain(linear.weight, node.a, node.b, node.scale)
    return eqx.tree_at(lambda linear: linear.weight, linear, weight)


def _merge_named(weight: Any, a: Any, b: Any, factor: float, outermost: tuple[Axis, ...]) -> NamedArray:
    def merge(weight: NamedArray, a: NamedArray, b: NamedArray) -> NamedArray:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        product = hax.dot(a, b, axis=RANK_AXIS, precision=lax.Precision.HIGHEST)
        merged = weight.astype(jnp.float32) + product.rearrange(weight.axes) * factor
        return merged.astype(weight.dtype)

    if not outermost:
        return merge(weight, a, b)
    named = [array.rearrange((*outermost, ...)) for array in (weight, a, b)]

    def merge_layer(*arrays: Array) -> Array:
        return merge(*(NamedArray(x, of.axes[1:]) for x, of in zip(arrays, named, strict=True))).array

    layers = _in_place(merge_layer, *(array.array for array in named))
    return NamedArray(layers, named[0].axes).rearrange(weight.axes)


def _merge_plain(weight: Array, a: Any, b: Any, factor: float) -> Array:
    def merge(weight: Array, a: Any, b: Any) -> Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        product = jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
        return (weight.astype(jnp.float32) + factor * jnp.swapaxes(product, -1, -2)).astype(weight.dtype)

    return merge(weight, a, b) if weight.ndim == 2 else _in_place(merge, weight, a, b)


def _in_place(merge: Callable[..., Array], weight: Array, a: Array, b: Array) -> Array:
    """`merge` of every layer, written over that of `weight`."""

    def layer(i: Array, weight: Array) -> Array:
        return write(weight, i, merge(*read((weight, a, b), i)))

    return lax.fori_loop(0, weight.shape[0], layer, weight)


_STATIC: Any = {"static_argnames": ("factor", "outermost")}
_COPYING = jax.jit(_merge_named, **_STATIC), jax.jit(_merge_plain, static_argnames="factor")
_DONATING = (
    jax.jit(_merge_named, donate_argnames="weight", **_STATIC),
    jax.jit(_merge_plain, donate_argnames="weight", static_argnames="factor"),
)


def _no_match(target: str, paths: list[str]) -> str:
    if not paths:
        return f"lora.targets: {target!r} matches no linear: the model has no linear of Haliax or Equinox."
    nearest = difflib.get_close_matches(target, paths, n=5, cutoff=0.0)
    return (
        f"lora.targets: {target!r} matches no linear. Nearest of {len(paths)}: {', '.join(nearest)}. A "
        "pattern has to match the whole path; `*` matches any characters."
    )
