"""Barriers that only some platforms need, chosen as a program is lowered.

A program may be lowered for another platform than the one that traces it, or for
several: `jax.export` does. So what only one platform needs is a primitive with a
lowering rule of that platform.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ._static import PyTree

_barrier_p = Primitive("barrier_on")
_barrier_p.multiple_results = True


def barrier_on(platforms: tuple[str, ...], tree: PyTree) -> PyTree:
    """`lax.optimization_barrier` in programs for these platforms (`"cuda"`, `"tpu"`),
    nothing in others. `"cuda"` stands for all GPUs, as in `_placement.platform`.
    """
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _barrier_p.bind(*leaves, platforms=platforms))


def _lowered_for(platform: str) -> Callable[..., Any]:
    def barrier(*arrays: Any, platforms: tuple[str, ...]) -> tuple[Any, ...]:
        return lax.optimization_barrier(arrays) if platform in platforms else arrays

    return mlir.lower_fun(barrier, multiple_results=True)


def _differentiated(
    primals: Any, tangents: Any, *, platforms: tuple[str, ...]
) -> tuple[Any, Any]:
    tangents = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return barrier_on(platforms, [*primals]), barrier_on(platforms, tangents)


def _transposed(cotangents: Any, *_: Any, platforms: tuple[str, ...]) -> Any:
    return barrier_on(
        platforms, [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    )


def _batched(arrays: Any, dims: Any, *, platforms: tuple[str, ...]) -> tuple[Any, Any]:
    return barrier_on(platforms, [*arrays]), dims


# One operation by itself has nothing to hold
_barrier_p.def_impl(lambda *arrays, platforms: [*arrays])
_barrier_p.def_abstract_eval(lambda *types, platforms: types)
ad.primitive_jvps[_barrier_p] = _differentiated
ad.primitive_transposes[_barrier_p] = _transposed
batching.primitive_batchers[_barrier_p] = _batched
mlir.register_lowering(_barrier_p, _lowered_for("any other"))
mlir.register_lowering(_barrier_p, _lowered_for("tpu"), platform="tpu")
# Of ROCm too, which JAX calls a GPU as well and compiles by the same XLA:GPU
mlir.register_lowering(_barrier_p, _lowered_for("cuda"), platform="gpu")
