"""Grouped products on Hopper GPUs, by tokamax's kernels in Mosaic.

tokamax (Python 3.12 and later) has them in private modules, so the versions that were tried are listed, and
others are refused.
"""

import contextlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import layout
from jax.extend import backend
from jaxtyping import Array

from .._placement import target_device
from ._grouped_linear import Kernels

_VERSIONS = ("0.0.17",)


def against_tokamax() -> str | None:
    """Why there are no kernels for the device that the program is for; None if there are."""
    capability = getattr(target_device(), "compute_capability", "0")
    if float(capability) != 9.0:
        return f"all of its products are for GPUs of compute capability 9.0 (Hopper), not {capability}"
    try:
        version = importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:
        return "it needs Python 3.12 or later and tokamax: pip install 'stacked_remat[tokamax]'"
    if version not in _VERSIONS:
        return f"it was tried with tokamax {', '.join(_VERSIONS)}, not {version}"
    return None


def tokamax_kernels() -> Kernels:
    """The kernels, for bfloat16 and float16."""
    return Kernels(_product, _outer, 128)


def _product(x: Array, w: Array, sizes: Array, transposed: bool) -> Array:
    from tokamax._src.ops.ragged_dot import base  # pyright: ignore[reportMissingImports]

    # The kernel takes one order. Without a layout XLA transposes the stack that these are a slice of.
    w = layout.with_layout_constraint(w, layout.Layout((0, 1, 2)))
    names = base.TRANS_RHS_RAGGED_DOT_DIM_NUMS if transposed else base.DEFAULT_RAGGED_DOT_DIM_NUMS
    return _ragged_dot(x, w, sizes, names)


def _outer(x: Array, y: Array, sizes: Array) -> Array:
    from tokamax._src.ops.ragged_dot import base  # pyright: ignore[reportMissingImports]

    is_real = (jnp.arange(len(x)) < jnp.sum(sizes))[:, None]
    # Rows of other experts in a tile are multiplied by zero, and those of none may hold anything.
    x, y = (jnp.where(is_real, one, jnp.zeros((), one.dtype)) for one in (x, y))
    return _ragged_dot(x, y, sizes, base.RAGGED_CONTRACTING_DOT_DIM_NUMS)


def _ragged_dot(x: Array, w: Array, sizes: Array, names: Any) -> Array:
    from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu  # pyright: ignore[reportMissingImports]

    with _default_device(target_device()), jax.numpy_dtype_promotion("standard"):
        return pallas_mosaic_gpu.PallasMosaicGpuRaggedDot()(
            x, w, group_sizes=sizes, ragged_dot_dimension_numbers=names
        )


@contextlib.contextmanager
def _default_device(device: Any) -> Iterator[None]:
    """Make this the device that tokamax asks JAX for, which need not be attached."""
    own = backend.get_default_device
    backend.get_default_device = lambda: device
    try:
        yield
    finally:
        backend.get_default_device = own
