"""Grouped products on NVIDIA Hopper GPUs, by the kernels that JAX has in Pallas' Mosaic GPU.

JAX ships them among its operations and tests them there, but in modules that need `absl-py`, which JAX itself
does not: it is an optional dependency.
"""

import functools
import importlib.util
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._grouped_product import Kernels, kernels_of
from ._program_of_row import UnsupportedExpertError

_MODULES = "jax.experimental.pallas.ops.gpu"
_MULTIPROCESSORS = 132  # of an H100 or H200; another number gives the same results
_ROWS_OF_TILE = 128
_STEPS_AHEAD = 4  # tiles in shared memory at once: 128 KiB of its 227


def against_mosaic() -> str | None:
    """Why the kernels can't be imported; None if they can."""
    if importlib.util.find_spec("absl") is None:
        return "its kernels need absl-py: pip install 'stacked_remat[mosaic]'"
    names = ("ragged_dot_mgpu", "transposed_ragged_dot_mgpu")
    if any(importlib.util.find_spec(f"{_MODULES}.{name}") is None for name in names):
        return f"JAX {jax.__version__} does not have its kernels"
    return None


def mosaic_kernels() -> Kernels:
    """The kernels, for bfloat16 and float16."""
    return kernels_of(_product, _outer, _ROWS_OF_TILE)


def check_shapes(x: Array, w: Array, sizes: Array, transposed: bool, dtype: Any) -> None:
    """Check that the kernels take a product of rows and matrices, and its derivatives.

    Raises:
        UnsupportedExpertError: a matrix is too small or of odd sizes, or the product is asked for in another
            dtype than that of the rows.
    """
    del sizes, transposed
    if any(size % 16 for size in w.shape[1:]) or all(size % 64 for size in w.shape[1:]):
        raise UnsupportedExpertError(
            f"its expert has matrices {w.shape[1:]}, and the kernels take multiples of 16, of which one is a "
            "multiple of 64"
        )
    if dtype != x.dtype:
        raise UnsupportedExpertError(f"its expert multiplies rows of {x.dtype} for a result in {dtype}")


def _product(x: Array, w: Array, sizes: Array, transposed: bool, dtype: Any) -> Array:
    check_shapes(x, w, sizes, transposed, dtype)
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    tile = _largest(w.shape[1 if transposed else 2], 128)
    with jax.numpy_dtype_promotion("standard"):
        return ragged_dot(
            x,
            w,
            group_sizes=sizes,
            block_m=_ROWS_OF_TILE,
            block_n=tile,
            block_k=_largest(x.shape[1], 64),
            max_concurrent_steps=_STEPS_AHEAD,
            grid_block_n=_largest(w.shape[1 if transposed else 2] // tile, 8),
            transpose_rhs=transposed,
        )


def _outer(x: Array, y: Array, sizes: Array, dtype: Any) -> Array:
    if x.shape[1] % 64:
        return _outer(y, x, sizes, dtype).swapaxes(1, 2)
    is_real = (jnp.arange(len(x)) < jnp.sum(sizes))[:, None]
    # The kernel multiplies rows of other experts in a tile by zero, and those of none may hold anything.
    x, y = (jnp.where(is_real, one, jnp.zeros((), one.dtype)) for one in (x, y))
    width = y.shape[1]
    y = jnp.pad(y, ((0, 0), (0, -width % 64)))  # the kernel's layouts have no narrower tiles
    tiles = _largest(x.shape[1], 128), _largest(y.shape[1], 128)
    with jax.numpy_dtype_promotion("standard"):
        found = _transposed_ragged_dot()(
            x,
            y,
            group_sizes=sizes,
            block_m=tiles[0],
            block_n=tiles[1],
            block_k=64,
            max_concurrent_steps=_STEPS_AHEAD,
            grid_block_n=_largest(y.shape[1] // tiles[1], 8),
        )
    return found[:, :, :width].astype(dtype)


def _largest(size: int, most: int) -> int:
    """The largest power of two that divides the size, up to `most`."""
    return math.gcd(size, most)


@functools.cache
def _transposed_ragged_dot() -> Any:
    """JAX's kernel, which asks the first attached device for its multiprocessors, and fails without a GPU."""
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as module

    if not hasattr(jax.devices()[0], "core_count"):
        named: Any = dict(vars(jax), devices=lambda: [SimpleNamespace(core_count=_MULTIPROCESSORS)])
        module.jax = SimpleNamespace(**named)  # pyright: ignore[reportPrivateImportUsage]
    return module.transposed_ragged_dot
