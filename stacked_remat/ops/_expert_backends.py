"""Implementations of grouped experts, and which calls each supports."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._placement import compiled_for, platform
from ._backends import HALVES, Backend, Call, first_supported
from ._grouped_linear import Kernels
from ._tokamax import PRODUCTS, why_not_tokamax


@dataclass(frozen=True, kw_only=True)
class ExpertsFacts(Call):
    """See `Call`."""

    on_host: bool = False  # whether some weights are in host memory
    is_varying: bool = False  # whether types say over which devices values vary, as with `check_vma=True`
    takes_linear: bool = True  # whether the expert applies its maps by a function that it is given


def _why_not_products(call: ExpertsFacts) -> str | None:
    """Why no kernels of grouped products support a call."""
    if not call.takes_linear:
        return "its expert has no argument `linear`, by which it would map the rows of all experts at once"
    if call.on_host:
        return "weights are in host memory, from which the block walk alone reads the experts that are chosen"
    if call.is_varying:
        return (
            "its kernels do not say over which devices results vary: use jax.shard_map with check_vma=False"
        )
    return None


def _why_not_tokamax(call: ExpertsFacts) -> str | None:
    return _why_not_products(call) or why_not_tokamax("all of its products", {9.0: "Hopper"})


# The kernels mix dtypes, also where `jax_numpy_dtype_promotion` is `strict`.
_MIXED_DTYPES = functools.partial(jax.numpy_dtype_promotion, "standard")
_ROWS_OF_TILE = 128
_LANES = 128  # of a TPU's vectors. Kernels take row-major arrays, whose rows are padded to these in memory.


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
            w, transposed = w.swapaxes(1, 2), not transposed
        with _MIXED_DTYPES():
            return gmm(x, w, sizes, x.dtype, tiling, transpose_rhs=transposed, interpret=interpret)

    def outer(x: Array, y: Array, sizes: Array) -> Array:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

        if y.shape[1] < _LANES <= x.shape[1]:
            return outer(y, x, sizes).swapaxes(1, 2)
        tiling = _tiling(len(x), x.shape[1], y.shape[1], x.dtype.itemsize)
        with _MIXED_DTYPES():
            return tgmm(x.swapaxes(0, 1), y, sizes, x.dtype, tiling, interpret=interpret)

    return Kernels(product, outer, _ROWS_OF_TILE)


EXPERT_BACKENDS: dict[str, Backend[Kernels | None]] = {
    "megablox": Backend(megablox_kernels(), "tpu", (jnp.bfloat16, jnp.float32), _why_not_products),
    "tokamax": Backend(PRODUCTS, "cuda", HALVES, _why_not_tokamax),
    "block": Backend(None),  # the walk over blocks
}
"""By name, in the order in which `"auto"` tries them."""


def expert_backend(dtype: Any, device: Any) -> str:
    """The backend of `grouped_experts` that `"auto"` is on a device, attached or not.

    Args:
        dtype: of the tokens.
        device: as `stacked_remat.memory.find_target(...).devices()` has them.
    """
    with compiled_for(device):
        return first_supported(EXPERT_BACKENDS, ExpertsFacts(platform=platform(), dtype=jnp.dtype(dtype)))[0]
