"""Implementations of grouped experts, and which calls each supports."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._placement import target_device
from ._expert_loop import Expert, Saved
from ._grouped_mosaic import against_mosaic, check_shapes, mosaic_kernels
from ._grouped_product import Groups, Kernels, kernels_of
from ._grouped_triton import against_pallas_triton, triton_kernels
from ._kernel_check import against_device
from ._program_of_row import RowProgram, UnsupportedExpertError


@dataclass(frozen=True)
class ExpertsFacts:
    """What decides whether a backend supports a call.

    Attributes:
        platform: of the device that the program is for: `"cpu"`, `"cuda"` or `"tpu"`.
        dtype: of the tokens.
        on_host: whether some weights are in host memory.
        devices: over how many the compiler partitions the program; 1 inside `jax.shard_map`.
        is_varying: whether types say over which devices values vary, as with `check_vma=True`.
        against_program: why the expert has no grouped form; None if it has one. It takes a function that
            checks a product, with the arguments of `kernels_of`'s.
    """

    platform: str
    dtype: Any
    on_host: bool = False
    devices: int = 1
    is_varying: bool = False
    against_program: Callable[[Callable[..., None]], str | None] = lambda check: None


@dataclass(frozen=True)
class ExpertsBackend:
    """An implementation of grouped experts.

    Attributes:
        kernels: its grouped products; None for the walk over blocks.
        reason_against: why a call is not supported; None if it is.
    """

    kernels: Kernels | None
    reason_against: Callable[[ExpertsFacts], str | None] = lambda call: None


def against_program(
    expert: Expert,
    saved: Saved | None,
    rebuild: Callable[[Any], Any],
    arrays: Sequence[Array],
    x: Array,
    gates: Any,
    check: Callable[..., None],
) -> str | None:
    """Why an expert, or its saved part, has no grouped form; None if it has one."""

    def product(x: Array, w: Array, sizes: Array, transposed: bool, dtype: Any) -> Array:
        check(x, w, sizes, transposed, dtype)
        return jnp.zeros((len(x), w.shape[1 if transposed else 2]), dtype)

    def outer(x: Array, y: Array, sizes: Array, dtype: Any) -> Array:
        return jnp.zeros((*sizes.shape, x.shape[1], y.shape[1]), dtype)

    def rows(arrays: Sequence[Array], x: Array, gates: Any, at: tuple[Array, ...]) -> Array:
        program = RowProgram(kernels_of(product, outer), Groups(*at))
        more = ()
        if (keep := saved) is not None:
            more = (program(lambda own, rows: keep(rebuild(own), rows), arrays, x),)
        return program(lambda own, *of_row: expert(rebuild(own), *of_row), arrays, x, (gates, *more))

    number = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    sizes = number((len(arrays[0]) if arrays else 1,))
    at = number((2,)), number((2, 1)), number((2,)), sizes, jax.ShapeDtypeStruct((2,), bool)
    try:
        jax.eval_shape(
            rows,
            [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
            jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype),
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2,), leaf.dtype), gates),
            at,
        )
    except UnsupportedExpertError as error:
        return str(error)
    return None


# The kernels mix dtypes, also where `jax_numpy_dtype_promotion` is `strict`.
_MIXED_DTYPES = functools.partial(jax.numpy_dtype_promotion, "standard")


def _against_triton(call: ExpertsFacts) -> str | None:
    is_attached = target_device() in jax.local_devices()
    reason = _against_gpu(call, 8.0, "8.0 (Ampere)") or against_pallas_triton(is_attached)
    return reason or _against_kernels(call, "triton", (jnp.bfloat16, jnp.float16, jnp.float32))


def _against_mosaic(call: ExpertsFacts) -> str | None:
    reason = _against_gpu(call, 9.0, "9.0 (Hopper)", below=10.0) or against_mosaic()
    return reason or _against_kernels(call, "mosaic", (jnp.bfloat16, jnp.float16), check_shapes)


def _against_gpu(call: ExpertsFacts, least: float, name: str, below: float = math.inf) -> str | None:
    if call.platform != "cuda":
        return f"it runs on NVIDIA GPUs, and the program is for {call.platform!r}"
    capability = float(getattr(target_device(), "compute_capability", "0"))
    if not least <= capability < below:
        return f"it needs a GPU of compute capability {name}, not {capability}"
    return None


def _against_kernels(
    call: ExpertsFacts, name: str, dtypes: Sequence[Any], check: Callable[..., None] = lambda *product: None
) -> str | None:
    if call.dtype not in dtypes:
        *some, last = (jnp.dtype(one).name for one in dtypes)
        return f"it takes {', '.join(some)} and {last}, not {call.dtype}"
    if call.on_host:
        return "weights are in host memory, from which the block walk alone reads the experts that are chosen"
    if call.devices > 1:
        return (
            f"the compiler can't divide it among {call.devices} devices: call it inside "
            "jax.shard_map(..., check_vma=False)"
        )
    if call.is_varying:
        return (
            "its kernels do not say over which devices results vary: use jax.shard_map with check_vma=False"
        )
    kernels = EXPERT_BACKENDS[name].kernels
    assert kernels is not None
    return call.against_program(check) or against_device(name, kernels, call.dtype, call.platform)


_ROWS_OF_TILE = 128
_LANES = 128  # of a TPU's vectors. Kernels take row-major arrays, whose rows are padded to these in memory.


def _tiling(rows: int, inner: int, outer: int, itemsize: int) -> tuple[int, int, int]:
    """Tiles that fit 16 MiB of vector memory twice, with the sums in float32."""
    widest = 2048 // itemsize
    rows_of_tile = max(size for size in (128, 256, 512) if rows % size == 0)
    return rows_of_tile, min(inner, widest), min(outer, widest)


def _megablox_product(
    x: Array, w: Array, sizes: Array, transposed: bool, dtype: Any, interpret: bool = False
) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    outer = w.shape[1 if transposed else 2]
    tiling = _tiling(len(x), x.shape[1], outer, x.dtype.itemsize)
    if w.shape[2] < _LANES <= w.shape[1]:
        w, transposed = w.swapaxes(1, 2), not transposed
    with _MIXED_DTYPES():
        return gmm(x, w, sizes, dtype, tiling, transpose_rhs=transposed, interpret=interpret)


def _megablox_outer(x: Array, y: Array, sizes: Array, dtype: Any, interpret: bool = False) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    if y.shape[1] < _LANES <= x.shape[1]:
        return _megablox_outer(y, x, sizes, dtype, interpret).swapaxes(1, 2)
    tiling = _tiling(len(x), x.shape[1], y.shape[1], x.dtype.itemsize)
    with _MIXED_DTYPES():
        return tgmm(x.swapaxes(0, 1), y, sizes, dtype, tiling, interpret=interpret)


def megablox_kernels(interpret: bool = False) -> Kernels:
    """JAX's kernels for TPUs, or their interpretation, which runs anywhere."""
    product = functools.partial(_megablox_product, interpret=interpret)
    return kernels_of(product, functools.partial(_megablox_outer, interpret=interpret), _ROWS_OF_TILE)


def _against_megablox(call: ExpertsFacts) -> str | None:
    if call.platform != "tpu":
        return f"it runs on TPUs, and the program is for {call.platform!r}"
    return _against_kernels(call, "megablox", (jnp.bfloat16, jnp.float32))


EXPERT_BACKENDS: dict[str, ExpertsBackend] = {
    "megablox": ExpertsBackend(megablox_kernels(), _against_megablox),  # JAX's kernels for TPUs
    "block": ExpertsBackend(None),  # supports every call
    "mosaic": ExpertsBackend(mosaic_kernels(), _against_mosaic),  # JAX's kernels for Hopper GPUs
    "triton": ExpertsBackend(triton_kernels(), _against_triton),  # our kernels for NVIDIA GPUs
}
"""By name, in the order in which `"auto"` tries them; those after `"block"` are taken by name alone."""
