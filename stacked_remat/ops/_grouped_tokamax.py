"""Grouped products on Hopper GPUs, by kernels in Mosaic of tokamax and of JAX."""

import jax.numpy as jnp
from jax.experimental import layout
from jaxtyping import Array

from ._grouped_linear import Kernels
from ._tokamax import calling_tokamax, why_not_kernels

_COPIED, _TILE = 8, 64  # elements of 16 bits: the least that a kernel copies, and a tile


def why_not_tokamax() -> str | None:
    """Why there are no kernels for the device that the program is for; None if there are."""
    return why_not_kernels("all of its products", {9.0: "Hopper"})


def tokamax_kernels() -> Kernels:
    """The kernels, for bfloat16 and float16."""
    return Kernels(_product, _outer, 128)


def _product(x: Array, w: Array, sizes: Array, transposed: bool) -> Array:
    # Kernels take one order. Without a layout XLA transposes the stack that these are a slice of.
    w = layout.with_layout_constraint(w, layout.Layout((0, 1, 2)))
    if transposed and not any(size % _TILE for size in w.shape[1:]):
        return _transposed_product(x, w, sizes)
    found = _ragged_dot(_aligned(x, 1, _COPIED), _aligned(w, 2, _COPIED), sizes, transposed)
    return found[:, : w.shape[1 if transposed else 2]]


def _transposed_product(x: Array, w: Array, sizes: Array) -> Array:
    """By JAX's kernel: for tokamax's, XLA makes a transposed copy of all matrices."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    with calling_tokamax():
        return ragged_dot_mgpu.ragged_dot(
            x,
            w,
            group_sizes=sizes,
            block_m=2 * _TILE,
            block_n=_width(w.shape[1]),
            block_k=_TILE,
            max_concurrent_steps=4,
            grid_block_n=4,
            transpose_rhs=True,
        )


def _outer(x: Array, y: Array, sizes: Array) -> Array:
    """By JAX's kernel: tokamax's (0.0.17) overwrites what it reads, and gave wrong sums on an H200."""
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    is_real = (jnp.arange(len(x)) < jnp.sum(sizes))[:, None]
    # Rows of other experts in a tile are multiplied by zero, and those of none may hold anything.
    wide = [_aligned(jnp.where(is_real, one, jnp.zeros((), one.dtype)), 1, _TILE) for one in (x, y)]
    tiles = [_width(one.shape[1]) for one in wide]
    with calling_tokamax():
        found = transposed_ragged_dot_mgpu.transposed_ragged_dot(
            *wide,
            group_sizes=sizes,
            block_m=tiles[0],
            block_n=tiles[1],
            block_k=_TILE,
            max_concurrent_steps=4,
            grid_block_n=4,
        )
    return found[:, : x.shape[1], : y.shape[1]]


def _width(size: int) -> int:
    return 2 * _TILE if size % (2 * _TILE) == 0 else _TILE


def _aligned(x: Array, axes: int, multiple: int) -> Array:
    """With zeros to multiples of a number in the last axes."""
    widths = [(0, -size % multiple if axis >= x.ndim - axes else 0) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths)


def _ragged_dot(x: Array, w: Array, sizes: Array, transposed: bool) -> Array:
    from tokamax._src.ops.ragged_dot import base, pallas_mosaic_gpu  # pyright: ignore[reportMissingImports]

    names = base.TRANS_RHS_RAGGED_DOT_DIM_NUMS if transposed else base.DEFAULT_RAGGED_DOT_DIM_NUMS
    # On an H200 about twice as fast as the kernel's own guess.
    config = pallas_mosaic_gpu.Config(
        block_m=128, block_n=128, block_k=_TILE, num_stages=4, split_k=1, persistent=False, grid_minor_dim=0
    )
    with calling_tokamax():
        return pallas_mosaic_gpu.PallasMosaicGpuRaggedDot(config=config)(
            x, w, group_sizes=sizes, ragged_dot_dimension_numbers=names
        )
