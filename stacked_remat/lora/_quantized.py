"""Frozen weights in 8 or 4 bits: codes, and a scale for each block of a row.

A `QuantizedWeight` stands in the place of the weight of a named linear. Whoever casts a
layer to the dtype in which it computes gets its weights in that dtype (`cast_to`), so a
loop over layers has one layer's weights in 16 bits at a time, and its backward pass,
where it recomputes a layer, makes them again.

`"int8"` rounds to 255 equal steps. `"nf4"` rounds to 16 values that are the quantiles
of a normal distribution, since weights of networks are about normal (Dettmers et al.
2023, "QLoRA", arXiv:2305.14314, appendix E).
"""

import functools
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import equinox as eqx
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, DTypeLike, Float, Int8, UInt8

from .._paths import map_modules

T = TypeVar("T")

QuantizedForm: TypeAlias = Literal["int8", "nf4"]

_BLOCK = 64
"""Entries of a row that share a scale; the last block of a row may be shorter."""
_LARGEST = 127
"""Of the codes of `"int8"`, and minus that the smallest."""


def _normal_values() -> np.ndarray:
    """The 16 values of NF4, from -1 to 1 with a zero.

    Quantiles at equal steps of probability, of each sign: 8 above zero, 7 below. The
    outermost probability is the mean of those at half a step of either side.
    """
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    quantile = NormalDist().inv_cdf
    # Without the last step, whose quantile is zero
    steps_above = np.linspace(outermost, 0.5, 9)[:-1]
    steps_below = np.linspace(outermost, 0.5, 8)[:-1]
    above = [quantile(p) for p in steps_above]
    below = [-quantile(p) for p in steps_below]
    values = np.sort(np.array([*below, 0.0, *above]))
    relative = values / values.max()
    return relative.astype(np.float32)


NORMAL_VALUES = _normal_values()


class QuantizedWeight(eqx.Module):
    """A weight in 8 or 4 bits, which is constant: it has no gradient.

    Attributes:
        codes: integers with the axes of the weight; of `"nf4"` two in a byte, along the
            last axis, the first one in the lower bits.
        scales: float32, for each block of 64 entries of the last axis; on several
            devices each has those of whole rows.
        last: the last axis of the weight.
        form: how codes stand for numbers.
        dtype: that of the weight before.

    Memory: 8.5 bits a weight of `"int8"`, 4.5 of `"nf4"`.
    """

    keeps_dtype: ClassVar[bool] = True  # codes and scales are not cast with a model

    codes: NamedArray
    scales: NamedArray
    last: Axis = eqx.field(static=True)
    form: QuantizedForm = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the weight."""
        return (*self.codes.axes[:-1], self.last)

    def cast_to(self, dtype: DTypeLike) -> NamedArray:
        """The weight in this dtype; products with scales are in float32."""
        size = self.last.size
        codes = self.codes.array
        if self.form == "nf4":
            lower = codes & 15
            upper = codes >> 4
            pairs = jnp.stack([lower, upper], axis=-1)
            by_entry = pairs.reshape(*codes.shape[:-1], -1)
            # Of a row of odd size the last byte has one code
            by_entry = by_entry[..., :size]
            table = jnp.asarray(NORMAL_VALUES)
            # Four bits are below 16
            values = table.at[by_entry].get(mode="promise_in_bounds")
        else:
            values = codes.astype(jnp.float32) / _LARGEST
        scales = jnp.repeat(self.scales.array, _BLOCK, axis=-1)
        weight = values * scales[..., :size]
        # Of scales too, which are floats: a frozen weight has no gradient
        constant = lax.stop_gradient(weight.astype(dtype))
        return NamedArray(constant, self.axes)


def quantize_linears(
    model: T,
    form: QuantizedForm,
    *,
    where: Callable[[str], bool] = lambda path: True,
    donate: bool = False,
) -> T:
    """The model with the weights of its named linears in 8 or 4 bits.

    ```python
    model = quantize_linears(model, "nf4", where=lambda path: "router" not in path)
    model = apply_lora(model, LoraConfig(rank=8), key=key)
    ```

    Such a linear can't be applied as it is: a layer begins with
    `dequantize_linears(layer, x.dtype)`.

    Args:
        model: any tree of modules, with or without stacks.
        form: `"int8"` or `"nf4"`.
        where: whether to do so with a linear, by its path, as patterns of `LoraConfig`
            match it.
        donate: whether to free each weight when its codes are there, after which
            `model` can't be used.

    Raises:
        ValueError: for an unknown form.

    Memory: the codes, and a layer of one linear in float32; the weights too unless
    `donate`.
    """
    if form not in ("int8", "nf4"):
        raise ValueError(f"form must be 'int8' or 'nf4'; got {form!r}.")

    def quantize(path: str, node: Any) -> Any:
        path = path.removesuffix(".wrapped")  # in a `LoraLinear`
        if not where(path) or _is_quantized(node.weight):
            return node
        weight = _quantized(node.weight, form)
        if donate and not isinstance(node.weight.array, Tracer):
            jax.block_until_ready(weight)
            node.weight.array.delete()
        return eqx.tree_at(lambda node: node.weight, node, weight)

    return map_modules(model, (hnn.Linear,), quantize)


def dequantize_linears(model: T, dtype: DTypeLike | None = None) -> T:
    """The model with its quantized weights in this dtype, or in the one that each had
    before; the rest stays as it is.

    Memory: the weights in that dtype.
    """

    def dequantize(node: Any) -> Any:
        if not _is_quantized(node):
            return node
        return _weight_of(node, dtype or node.dtype)

    return jax.tree.map(dequantize, model, is_leaf=_is_quantized)


def has_quantized(model: Any) -> bool:
    """Whether a model, or a part of one, has weights in 8 or 4 bits."""
    leaves = jax.tree.leaves(model, is_leaf=_is_quantized)
    return any(_is_quantized(leaf) for leaf in leaves)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QuantizedWeight)


@functools.partial(jax.jit, static_argnames="dtype")
def _weight_of(quantized: QuantizedWeight, dtype: DTypeLike) -> NamedArray:
    return quantized.cast_to(dtype)


@functools.partial(jax.jit, static_argnames="form")
def _quantized(weight: NamedArray, form: QuantizedForm) -> QuantizedWeight:
    *outer, last = weight.axes
    # By another name, which no mesh divides: a row may have a single block.
    Block = Axis(f"{last.name} blocks", -(-last.size // _BLOCK))
    quantize = functools.partial(_codes_and_scales, form=form)
    # Layer by layer: in float32, all would take twice the memory of the weights.
    by_layer = functools.partial(lax.map, quantize) if len(outer) > 1 else quantize
    codes, scales = by_layer(weight.array)
    # Half as many as entries where two are in a byte
    Codes = last.resize(codes.shape[-1])
    return QuantizedWeight(
        codes=NamedArray(codes, (*outer, Codes)),
        scales=NamedArray(scales, (*outer, Block)),
        last=last,
        form=form,
        dtype=weight.dtype,
    )


def _codes_and_scales(
    weight: Float[Array, "*rows entry"], form: QuantizedForm
) -> tuple[Int8[Array, "*rows entry"] | UInt8[Array, "*rows pair"], Array]:
    """The nearest codes, and the largest magnitude of each block."""
    size = weight.shape[-1]
    blocks = _in_blocks(weight.astype(jnp.float32), _BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    # A block of zeros has codes of zero.
    divisors = jnp.where(scales == 0, 1.0, scales)
    relative = blocks / divisors[..., None]
    # Rows again, without the zeros after their last entries
    relative = relative.reshape(*weight.shape[:-1], -1)
    relative = relative[..., :size]
    if form == "int8":
        codes = jnp.round(relative * _LARGEST)
        return codes.astype(jnp.int8), scales
    # A code is how many of the bounds between values are below the number
    middles = (NORMAL_VALUES[1:] + NORMAL_VALUES[:-1]) / 2
    # One comparison a step, so that no array is larger than the weight
    codes = jnp.zeros(relative.shape, jnp.uint8)
    for middle in middles:
        is_above = relative > middle
        codes = codes + is_above.astype(jnp.uint8)
    pairs = _in_blocks(codes, 2)
    lower = pairs[..., 0]
    upper = pairs[..., 1]
    return lower | (upper << 4), scales


def _in_blocks(x: Array, size: int) -> Array:
    """The last axis cut into blocks `[..., block, size]`, with zeros at the end."""
    missing = -x.shape[-1] % size
    padding = [(0, 0)] * x.ndim
    padding[-1] = (0, missing)
    x = jnp.pad(x, padding)
    return x.reshape(*x.shape[:-1], -1, size)
