"""Linear maps of rows that are sorted by expert, of each row by the map of its
expert.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from equinox import tree_pformat
from haliax import NamedArray
from haliax.quantization import DefaultDotGeneralOp
from jaxtyping import Array, Bool, Float, Int

from .._static import is_array
from .._trips import known_products
from ._named import named_as
from ._perturbed_vjp import perturbed_vjp
from ._unrounded import is_half

# The kernels mix dtypes, also where `jax_numpy_dtype_promotion` is `strict`.
_MIXED_DTYPES = functools.partial(jax.numpy_dtype_promotion, "standard")
_ROWS_OF_TILE = 128
# of a TPU's vectors. Kernels take row-major arrays, whose rows are padded to these in
# memory.
_LANES = 128

Sizes: TypeAlias = Int[Array, " expert"]


class ExpertLinear(Protocol):
    """How an expert applies its linear maps: `(map, rows)` to rows."""

    def __call__(self, linear: Any, x: Any) -> Any: ...


@runtime_checkable
class ComposedLinear(Protocol):
    """A module of several linear maps; a `LoraLinear` has three.

    Grouped products map the rows of all experts at once, by arrays that have the
    experts' axis too. They can't call such a module, and call its `apply_maps` instead.
    """

    def apply_maps(self, apply: ExpertLinear, x: Any) -> Any:
        """Compute what the module's call does, by `apply(map, rows)` for each of its
        maps; a map is anything that `apply_linear` takes.
        """
        ...


def apply_linear(linear: Any, x: Any) -> Any:
    """A linear map of rows: how an expert that `grouped_experts` computes alone applies
    its maps.

    An expert with an argument `linear`, and this as its default, may be given another
    that maps the rows of all experts by all their maps.

    Args:
        linear: a module, such as `hnn.Linear` or `LoraLinear`; a named array, which is
            contracted over the axes that it shares with `x`; or a matrix `[in, out]`.
        x: rows, as the map takes them: named for the first two.
    """
    if isinstance(linear, NamedArray):
        shared = [axis for axis in x.axes if axis in linear.axes]
        return (
            hax.dot(x, linear, axis=shared)
            if shared
            else linear.broadcast_axis(x.axes) * x
        )
    return x @ linear if is_array(linear) else linear(x)


def is_plain(linear: Any) -> bool:
    """Whether a module is a linear map that multiplies by its weight, without
    quantization.
    """
    is_default = isinstance(getattr(linear, "dot_general", None), DefaultDotGeneralOp)
    return type(linear) is hnn.Linear and is_default


class Groups(NamedTuple):
    """The rows of some tokens, sorted by expert. Padding and choices out of range are
    not real.
    """

    pair: Int[Array, " row"]  # (token, choice)
    row: Int[Array, "token choice"]
    expert: Int[Array, " row"]  # a number beyond the last for rows that are not real
    sizes: Sizes  # without rows that are not real

    @property
    def real(self) -> Bool[Array, " row"]:
        return self.expert < len(self.sizes)


@dataclass(frozen=True)
class Kernels:
    """Products of rows: the first `sizes[0]` are of expert 0, and so on, and the last
    may be of none.

    Arrays and results of a call have one dtype; sums are in float32.
    """

    # (x [row, in], w [expert, in, out], sizes, transposed) to [row, out], each row
    # times the matrix of its expert, not defined for rows of no expert; with
    # `transposed` the matrices are [expert, out, in].
    product: Callable[[Array, Array, Sizes, bool], Array]
    # (x [row, in], y [row, out], sizes) to [expert, in, out], the sums of the outer
    # products of rows.
    outer: Callable[[Array, Array, Sizes], Array]
    rows_of: int = 1  # rows come in multiples of it


class Product(NamedTuple):
    """Rows times the matrices of their experts, as these are or transposed, or the
    outer product of rows.
    """

    kernels: Kernels
    kind: Literal["plain", "transposed", "outer"]


def _product(of: Product, operands: tuple[Array, Array], sizes: Sizes) -> Array:
    """The product, whose FLOPs are known; under `jax.vmap` of one example after the
    other.

    A batch is another axis of a kernel's grid: on GPUs there may be three, and JAX's
    kernel of outer products for TPUs then does not store those of its last expert
    (0.10.2, 0.12).
    """
    columns = operands[1].shape[2 if of.kind == "plain" else 1]

    def counted(x: Array, other: Array, sizes: Sizes) -> Array:
        with known_products(2 * x.size * columns):
            if of.kind == "outer":
                return of.kernels.outer(x, other, sizes)
            return of.kernels.product(x, other, sizes, of.kind == "transposed")

    return jax.custom_batching.sequential_vmap(counted)(*operands, sizes)


def _product_backward(
    of: Product, wanted: tuple[bool, ...], residuals: Any, ct: Array
) -> Any:
    (x, y), sizes = residuals
    found: Any = {
        "plain": [("transposed", ct, y), ("outer", x, ct)],
        "transposed": [("plain", ct, y), ("outer", ct, x)],
        "outer": [("transposed", y, ct), ("plain", x, ct)],
    }[of.kind]
    return tuple(
        grouped_product(Product(of.kernels, kind), (one, other), sizes) if is_ else None
        for is_, (kind, one, other) in zip(wanted, found, strict=True)
    )


grouped_product = perturbed_vjp(_product, _product_backward)


def _tiling(rows: int, inner: int, outer: int, itemsize: int) -> tuple[int, int, int]:
    """Tiles that fit 16 MiB of vector memory twice, with the sums in float32."""
    widest = 2048 // itemsize
    rows_of_tile = max(size for size in (128, 256, 512) if rows % size == 0)
    return rows_of_tile, min(inner, widest), min(outer, widest)


def megablox_kernels(interpret: bool = False) -> Kernels:
    """JAX's kernels for TPUs, or their interpretation, which runs anywhere."""

    def product(x: Array, w: Array, sizes: Array, transposed: bool) -> Array:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

        outer = w.shape[1 if transposed else 2]
        tiling = _tiling(len(x), x.shape[1], outer, x.dtype.itemsize)
        if w.shape[2] < _LANES <= w.shape[1]:
            w = w.swapaxes(1, 2)
            transposed = not transposed
        with _MIXED_DTYPES():
            return gmm(
                x,
                w,
                sizes,
                x.dtype,
                tiling,
                transpose_rhs=transposed,
                interpret=interpret,
            )

    def outer(x: Array, y: Array, sizes: Array) -> Array:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

        if y.shape[1] < _LANES <= x.shape[1]:
            return outer(y, x, sizes).swapaxes(1, 2)
        itemsize = x.dtype.itemsize
        tiling = _tiling(len(x), x.shape[1], y.shape[1], itemsize)
        with _MIXED_DTYPES():
            return tgmm(
                x.swapaxes(0, 1), y, sizes, x.dtype, tiling, interpret=interpret
            )

    return Kernels(product, outer, _ROWS_OF_TILE)


def _rows_of_experts(
    x: Float[Array, "expert ..."], groups: Groups
) -> Float[Array, "row ..."]:
    """The expert of each row, zero for those that are not real; its derivative is
    summed in float32.
    """
    wide = x.astype(jnp.float32) if is_half(x.dtype) else x
    return jnp.take(wide, groups.expert, axis=0, mode="fill", fill_value=0).astype(
        x.dtype
    )


@dataclass(frozen=True)
class GroupedLinear:
    """`apply_linear` with the maps of all experts, whose arrays have the axis of the
    experts too.
    """

    kernels: Kernels
    groups: Groups
    experts: (
        str  # the name of their axis in named arrays; in plain ones it is the first
    )

    def __call__(self, linear: Any, x: Any) -> Any:
        """Rows `[row, ...]` to `[row, ...]`; see `apply_linear`."""
        if isinstance(linear, ComposedLinear):
            return linear.apply_maps(self, x)
        if is_plain(linear):
            mapped = self(linear.weight, x) * linear.reparam.active_scale
            return (
                mapped
                if linear.bias is None
                else mapped + self._own(linear.bias, *x.axes[:1])
            )
        if isinstance(linear, NamedArray):
            return self._named(linear, x)
        if isinstance(linear, hnn.Linear) or not is_array(linear) or linear.ndim != 3:
            raise ValueError(
                f"An expert maps rows by {tree_pformat(linear)}. Grouped products take"
                " hnn.Linear, LoraLinear, named arrays, matrices, and modules with a"
                " method `apply_maps`; take the backend 'block' for others."
            )
        return self._dot(x, linear, transposed=False)

    def _dot(self, x: Array, w: Array, *, transposed: bool) -> Array:
        if x.dtype != w.dtype:
            raise ValueError(
                f"An expert maps rows of {x.dtype} by weights of {w.dtype}: cast one to"
                " the dtype of the other."
            )
        product = Product(self.kernels, "transposed" if transposed else "plain")
        return grouped_product(product, (x, w), self.groups.sizes)

    def _named(self, w: NamedArray, x: NamedArray) -> NamedArray:
        Row, *In = x.axes
        if not In:
            return self._own(w, Row) * x
        Experts = w.resolve_axis(self.experts)
        Out = [axis for axis in w.axes if axis not in In and axis != Experts]
        # As it is stored, so that no kernel's operand is a transposed stack.
        transposed = list(w.axes[-len(In) :]) == In
        inner = math.prod(axis.size for axis in In)
        # As matrices of one dimension each for the inputs and the outputs
        if transposed:
            w = w.rearrange((Experts, *Out, *In))
            matrices = w.array.reshape(Experts.size, -1, inner)
        else:
            w = w.rearrange((Experts, *In, *Out))
            matrices = w.array.reshape(Experts.size, inner, -1)
        flat = x.array.reshape(Row.size, inner)
        rows = self._dot(flat, matrices, transposed=transposed)
        return named_as(rows, (Row, *Out))

    def _own(self, x: NamedArray, Row: hax.Axis) -> NamedArray:
        """What each row has of an array of the experts, such as a bias."""
        x = x.rearrange((self.experts, ...))
        rows = _rows_of_experts(x.array, self.groups)
        return hax.named(rows, (Row, *x.axes[1:]))
