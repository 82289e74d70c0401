"""Grouped products on Hopper GPUs, by tokamax's kernels in Mosaic."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import layout
from jaxtyping import Array

from ._grouped_linear import Kernels
from ._tokamax import calling_tokamax, why_not_tokamax


def against_tokamax() -> str | None:
    """Why there are no kernels for the device that the program is for; None if there are."""
    return why_not_tokamax("all of its products", {9.0: "Hopper"})


def tokamax_kernels() -> Kernels:
    """The kernels, for bfloat16 and float16."""
    return Kernels(_product, _outer, 128)


def _product(x: Array, w: Array, sizes: Array, transposed: bool) -> Array:
    from tokamax._src.ops.ragged_dot import base  # pyright: ignore[reportMissingImports]

    # The kernel takes one order. Without a layout XLA transposes the stack that these are a slice of.
    w = layout.with_layout_constraint(w, layout.Layout((0, 1, 2)))
    names = base.TRANS_RHS_RAGGED_DOT_DIM_NUMS if transposed else base.DEFAULT_RAGGED_DOT_DIM_NUMS
    return _ragged_dot(_aligned(x, 1), _aligned(w, 2), sizes, names)[:, : w.shape[1 if transposed else 2]]


def _outer(x: Array, y: Array, sizes: Array) -> Array:
    from tokamax._src.ops.ragged_dot import base  # pyright: ignore[reportMissingImports]

    is_real = (jnp.arange(len(x)) < jnp.sum(sizes))[:, None]
    # Rows of other experts in a tile are multiplied by zero, and those of none may hold anything.
    x, y = (jnp.where(is_real, one, jnp.zeros((), one.dtype)) for one in (x, y))
    found = _ragged_dot(_aligned(x, 1), _aligned(y, 1), sizes, base.RAGGED_CONTRACTING_DOT_DIM_NUMS)
    return found[:, : x.shape[1], : y.shape[1]]


def _aligned(x: Array, axes: int) -> Array:
    """With zeros to multiples of 16 bytes, by which the kernels copy, in the last axes."""
    wanted = 16 // x.dtype.itemsize
    widths = [(0, -size % wanted if axis >= x.ndim - axes else 0) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths)


def _ragged_dot(x: Array, w: Array, sizes: Array, names: Any) -> Array:
    from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu  # pyright: ignore[reportMissingImports]

    with calling_tokamax():
        return pallas_mosaic_gpu.PallasMosaicGpuRaggedDot()(
            x, w, group_sizes=sizes, ragged_dot_dimension_numbers=names
        )
