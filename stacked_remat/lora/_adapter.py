"""Low-rank adapters of linears: their config; adding, selecting and merging them in a
model.

An adapter (Hu et al. 2022, "LoRA") adds `(x A) B * scale` to a linear's output. It is a
module around the linear, so that models need not know of adapters: `apply_lora` puts it
in the linear's place. A and B have the axes of the stacks around the linear, as its
weight has, so that a loop over layers slices them as other weights. Names of axes are
kept, and mappings of axes to a mesh hold for A and B too.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
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

from .._in_files import in_memory
from .._paths import check_patterns, find_modules, first_match, map_modules
from .._sweep.store import read, write
from ._quantized import dequantize_linears

T = TypeVar("T")

RANK_AXIS = "lora_rank"
"""The axis between A and B; a linear's own axes must have other names."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021) on the linears whose path matches a pattern.

    A linear's path is the names of its attributes, with dots between them. The layers
    of a stack are `*`, those of a `BlockSeq` their numbers:
    `layers.*.attention.q_proj`, `layers.*.mlp.experts.*.up_proj`, `head`. In a pattern,
    `*` matches any characters, dots included, `?` one character and `[ab]` one of
    these; it has to match the whole path. `*.q_proj` is every linear of that name,
    `*experts*` every linear with that word in its path.

    Attributes:
        rank: columns of A and rows of B.
        alpha: the adapter's output is multiplied by `alpha / rank`.
        targets: patterns; a linear that matches one of them is adapted. The default is
            names that end in `_proj`: in models with Hugging Face's names, attention
            and experts, but not routers or the head.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("*_proj",)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(
                f"lora.rank must be a positive integer, got {self.rank!r}."
            )
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(
                f"lora.alpha must be positive and finite, got {self.alpha!r}."
            )
        if isinstance(self.targets, str) or not self.targets:
            raise ValueError(
                "lora.targets must be a list of patterns as '*.q_proj', got"
                f" {self.targets!r}."
            )
        object.__setattr__(self, "targets", tuple(self.targets))

    @property
    def scale(self) -> float:
        """Factor of the adapters' outputs."""
        return self.alpha / self.rank


class LoraLinear(eqx.Module):
    """A linear with a low-rank adapter: `wrapped(x) + (x · A) · B * scale`, never
    merged.

    A and B are cast to the dtype of `x`. In a stack they have the stack's axes, as the
    wrapped weight has.

    Attributes:
        wrapped: the linear, named or plain.
        a: `[..., In..., lora_rank]`.
        b: `[..., lora_rank, Out...]`.
        scale: factor of the adapter's output.

    Cost beside that of `wrapped`: `2 * rank * (In + Out)` FLOPs for every row of `x`,
    and twice that backward. If only A and B are trained, the gradient of the wrapped
    weight is not computed.
    """

    wrapped: hnn.Linear | eqx.nn.Linear
    a: NamedArray | Array
    b: NamedArray | Array
    scale: float = eqx.field(static=True)

    def __call__(self, x: Any, *, key: PRNGKeyArray | None = None) -> Any:
        """Apply the wrapped linear, to which `key` is passed, and the adapter."""
        whole: Any = self.wrapped(x, key=key)
        a: Any = self.a.astype(x.dtype)
        b: Any = self.b.astype(x.dtype)
        # The low-rank activations are the smallest array to scale.
        if isinstance(self.wrapped, hnn.Linear):
            low = x.dot(a, axis=self.wrapped.In)
            scaled = low * self.scale
            adapted = scaled.dot(b, axis=RANK_AXIS)
            adapted = adapted.rearrange(whole.axes)
        else:
            low = x @ a
            scaled = low * self.scale
            adapted = scaled @ b
        # With weights that are wider than x, so is `whole`.
        return whole + adapted.astype(whole.dtype)

    def apply_maps(self, apply: Callable[[Any, Any], Any], x: Any) -> Any:
        """See `stacked_remat.ops.ComposedLinear`; of named arrays."""
        a = self.a.astype(x.dtype)
        low = apply(a, x) * self.scale
        whole = apply(self.wrapped, x)
        b = self.b.astype(x.dtype)
        adapted = apply(b, low)
        return whole + adapted.rearrange(whole.axes)

    In = property(attrgetter("wrapped.In"), doc="The input axes of a named linear.")
    Out = property(attrgetter("wrapped.Out"), doc="The output axes of a named linear.")
    in_features = property(
        attrgetter("wrapped.in_features"), doc="The input width of a plain linear."
    )
    out_features = property(
        attrgetter("wrapped.out_features"), doc="The output width of a plain linear."
    )

    @property
    def weight(self) -> Any:
        """Raises AttributeError, because the adapter is not part of the wrapped
        weight.
        """
        raise AttributeError(
            "A LoraLinear has no single weight. Call it, use `wrapped.weight`, which"
            " lacks the adapter, or merge with `merge_lora`. A linear whose weight is"
            " used directly can't be adapted: leave it out of LoraConfig.targets.",
            name="weight",
            obj=self,
        )


LINEARS = (hnn.Linear, eqx.nn.Linear, LoraLinear)


def apply_lora(
    model: T, config: LoraConfig, *, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32
) -> T:
    """Add an adapter to every linear, of Haliax or Equinox, whose path matches one of
    the patterns.

    A is drawn from N(0, 1 / In) and B is zero, so the model's outputs do not change.
    The adapter of a path does not depend on the other targets.

    Args:
        model: any tree of modules, with or without stacks.
        config: which linears, and the rank and scale of adapters.
        key: for A.
        dtype: of A and B.

    Returns:
        The model with `LoraLinear`s in place of these linears; its arrays are not
        copied.

    Raises:
        ValueError: a pattern matches no linear (names the nearest paths), or a linear
            has an adapter already or maps scalars.

    Memory: `rank * (In + Out)` numbers of `dtype` for each linear and layer.
    """
    paths = list(find_modules(model, LINEARS))
    if not paths:
        raise ValueError(
            f"lora.targets: {config.targets[0]!r} matches no linear: the model has no"
            " linear of Haliax or Equinox."
        )
    check_patterns("lora.targets", config.targets, paths, "linear")

    def adapt(path: str, linear: Any) -> Any:
        if first_match(path, config.targets) is None:
            return linear
        if isinstance(linear, LoraLinear):
            raise ValueError(
                f"{path} has an adapter already. Merge it first, or leave it out of the"
                " targets."
            )
        # By the path, so that other targets don't change it; not by `hash`, which
        # differs between processes.
        number = zlib.crc32(path.encode()) & 0x7FFFFFFF
        own_key = jax.random.fold_in(key, number)
        if isinstance(linear, eqx.nn.Linear) and "scalar" in (
            linear.in_features,
            linear.out_features,
        ):
            raise ValueError(
                f"{path} maps scalars and can't have an adapter. Leave it out of the"
                " targets."
            )
        Stack, In, Out = axes_of(linear)
        Rank = Axis(RANK_AXIS, config.rank)
        axes = (*Stack, *In, Rank)
        shape = tuple(axis.size for axis in axes)
        a = hax.named(_normal(own_key, hax.axis_size(In) ** -0.5, shape, dtype), axes)
        # Zero, so that the adapted model computes what the model does.
        b = hax.zeros((*Stack, Rank, *Out), dtype=dtype)
        return lora_linear(linear, a, b, config.scale)

    return map_modules(model, LINEARS, adapt)


@jax.jit(static_argnames=("shape", "dtype"))
def _normal(
    key: PRNGKeyArray, deviation: float, shape: tuple[int, ...], dtype: DTypeLike
) -> Array:
    """Draws from N(0, deviation ** 2)."""
    # In one dimension, with the same numbers: XLA for CPUs (jaxlib 0.10 and 0.12) takes
    # seconds to compile a draw of five.
    numbers = jax.random.normal(key, (math.prod(shape),)) * deviation
    return numbers.reshape(shape).astype(dtype)


def lora_filter(model: Any) -> Any:
    """A tree like the model, True for A and B of every adapter and False elsewhere.

    For `equinox.partition`, or as `trainable` of
    `stacked_remat.training.TrainState.init`.

    Raises:
        ValueError: the model has no adapters.
    """
    if not find_modules(model, (LoraLinear,)):
        raise ValueError("The model has no adapters: apply_lora makes them.")

    def mark(node: Any) -> Any:
        if not isinstance(node, LoraLinear):
            return False
        frozen = jax.tree.map(lambda _: False, node)
        trained = jax.tree.map(lambda _: True, (node.a, node.b))
        return eqx.tree_at(lambda of: (of.a, of.b), frozen, trained)

    return jax.tree.map(mark, model, is_leaf=lambda node: isinstance(node, LoraLinear))


def merge_lora(model: T, *, donate: bool = False) -> T:
    """The model with plain linears of weights `W + scale * A · B`: for export, not for
    training.

    Args:
        model: a model with or without adapters.
        donate: whether to reuse the memory of W, after which `model` can't be used.

    Quantized weights get the dtype that they had before, and those in files are read.
    Sums are computed in float32 and rounded to the dtype of W, a layer at a time.
    Memory: one layer of one linear in float32, and the new weights unless `donate`.
    """
    model = dequantize_linears(model)
    model = in_memory(model)

    def merge(path: str, node: Any) -> Any:
        return _merged(node, donate)

    return map_modules(model, (LoraLinear,), merge)


def lora_linears(model: Any) -> dict[str, hnn.Linear | eqx.nn.Linear | LoraLinear]:
    """Every linear, adapted or not, by the path that patterns of `LoraConfig` match."""
    return find_modules(model, LINEARS)


def axes_of(linear: Any) -> tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...]]:
    """The axes of the stacks around a linear, of its input and of its output; a plain
    one gets names.
    """
    if isinstance(linear, LoraLinear):
        linear = linear.wrapped
    if not isinstance(linear, hnn.Linear):
        # Equinox's weights are [out, in], behind the dimensions of stacks.
        *sizes, wide, narrow = linear.weight.shape
        stack_axes = []
        for number, size in enumerate(sizes):
            stack_axes.append(Axis(f"stack_{number}", size))
        In = (Axis("in", narrow),)
        Out = (Axis("out", wide),)
        return tuple(stack_axes), In, Out
    In = axis_spec_to_tuple(linear.In)
    Out = axis_spec_to_tuple(linear.Out)
    own = {axis.name for axis in (*In, *Out)}
    # Other axes of the weight are of the stacks around the linear.
    Stack = tuple(axis for axis in linear.weight.axes if axis.name not in own)
    return Stack, In, Out


def arranged(array: NamedArray | Array, *axes: Axis) -> NamedArray:
    """An array of a linear with its axes in this order, which a plain one has."""
    if isinstance(array, NamedArray):
        return array.rearrange(axes)
    return NamedArray(array, axes)


def named_adapter(node: LoraLinear) -> tuple[NamedArray, NamedArray]:
    """A `[Stack, In, lora_rank]` and B `[Stack, lora_rank, Out]`."""
    if isinstance(node.a, NamedArray):
        rank = node.a.axis_size(RANK_AXIS)
    else:
        rank = node.a.shape[-1]
    Stack, In, Out = axes_of(node)
    Rank = Axis(RANK_AXIS, rank)
    a = arranged(node.a, *Stack, *In, Rank)
    b = arranged(node.b, *Stack, Rank, *Out)
    return a, b


def lora_linear(linear: Any, a: NamedArray, b: NamedArray, scale: float) -> LoraLinear:
    """The linear with this adapter in place of its own, of plain arrays if it is plain
    itself.
    """
    if isinstance(linear, LoraLinear):
        linear = linear.wrapped
    if isinstance(linear, hnn.Linear):
        return LoraLinear(linear, a, b, scale)
    return LoraLinear(linear, a.array, b.array, scale)


def _merged(node: LoraLinear, donate: bool) -> Any:
    linear = node.wrapped
    Stack, In, Out = axes_of(linear)
    a, b = named_adapter(node)
    merge = _DONATING if donate else _COPYING
    outermost = Stack[:1]
    if isinstance(linear, hnn.Linear):
        # Haliax multiplies a reparametrised weight by this factor when it is applied.
        factor = node.scale / linear.reparam.active_scale
        weight = merge(linear.weight, a, b, factor, outermost)
    else:
        named = arranged(linear.weight, *Stack, *Out, *In)
        merged = merge(named, a, b, node.scale, outermost)
        weight = merged.array
    return eqx.tree_at(lambda linear: linear.weight, linear, weight)


def _merge(
    weight: NamedArray,
    a: NamedArray,
    b: NamedArray,
    factor: float,
    outermost: tuple[Axis, ...],
) -> NamedArray:
    """The weight with the adapter, layer by layer where there is a stack: all layers in
    float32 at once would take twice the memory of the stack.
    """

    def merge(weight: NamedArray, a: NamedArray, b: NamedArray) -> NamedArray:
        a = a.astype(jnp.float32)
        b = b.astype(jnp.float32)
        # On TPUs and GPUs the default rounds products of float32.
        product = hax.dot(a, b, axis=RANK_AXIS, precision=lax.Precision.HIGHEST)
        adapter = product.rearrange(weight.axes) * factor
        merged = weight.astype(jnp.float32) + adapter
        return merged.astype(weight.dtype)

    if not outermost:
        return merge(weight, a, b)
    weights = weight.rearrange((*outermost, ...))
    a = a.rearrange((*outermost, ...))
    b = b.rearrange((*outermost, ...))

    def layer(i: Array, merged: Array) -> Array:
        """The layer, written over that of `merged`: one buffer, in place."""
        stacks = merged, a.array, b.array
        of_layer = read(stacks, i)
        own_weight, own_a, own_b = of_layer
        found = merge(
            NamedArray(own_weight, weights.axes[1:]),
            NamedArray(own_a, a.axes[1:]),
            NamedArray(own_b, b.axes[1:]),
        )
        return write(merged, i, found.array)

    (Layers,) = outermost
    layers = lax.fori_loop(0, Layers.size, layer, weights.array)
    named = NamedArray(layers, weights.axes)
    return named.rearrange(weight.axes)


_COPYING = jax.jit(_merge, static_argnames=("factor", "outermost"))
_DONATING = jax.jit(
    _merge, static_argnames=("factor", "outermost"), donate_argnames="weight"
)
