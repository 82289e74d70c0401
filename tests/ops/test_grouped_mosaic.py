"""JAX's kernels for Hopper GPUs, interpreted, give the grouped products of their definition."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as _mosaic_gpu

from stacked_remat.ops import _grouped_mosaic
from stacked_remat.ops._expert_backends import against_program
from stacked_remat.ops._grouped_mosaic import check_shapes, mosaic_kernels
from stacked_remat.ops._kernel_check import _difference

from .test_grouped_products import _outer, _product

mosaic_gpu: Any = _mosaic_gpu
interpreted = pytest.mark.skipif(
    not hasattr(mosaic_gpu, "force_gpu_interpret_mode"), reason="this JAX has no public interpreter of Mosaic"
)


@pytest.mark.parametrize(
    ("inner", "dtype", "message"),
    [
        (40, jnp.bfloat16, r"matrices \(64, 40\), and the kernels take multiples of 16"),
        (64, jnp.float32, "multiplies rows of bfloat16 for a result in float32"),
    ],
)
def test_mosaic_refuses_an_expert_of_odd_sizes_and_other_dtypes(inner, dtype, message):
    def expert(weights, rows, gates):
        return jnp.dot(rows, weights, preferred_element_type=dtype)

    weights, x = jnp.zeros((3, 64, inner), jnp.bfloat16), jnp.zeros((8, 64), jnp.bfloat16)
    gates = jnp.zeros((8, 2), jnp.bfloat16)
    reason = against_program(expert, None, lambda leaves: leaves[0], [weights], x, gates, check_shapes)
    assert re.search(message, reason or "")


@interpreted
@pytest.mark.parametrize("shape", [pytest.param((128, 64), marks=pytest.mark.deep), (16, 64), (192, 80)])
def test_products_of_mosaic_whatever_rows_of_no_expert_hold(shape):
    inner, outer = shape
    sizes = jnp.asarray([70, 0, 150, 20], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 4)
    x, y = (jax.random.normal(key, (256, size)) for key, size in zip(keys[:2], shape, strict=True))
    x, y = (one.at[240:].set(jnp.nan).astype(jnp.bfloat16) for one in (x, y))
    params = mosaic_gpu.InterpretGPUParams(detect_races=True)
    for transposed in (False, True):
        w = jax.random.normal(keys[2], (4, outer, inner) if transposed else (4, inner, outer), jnp.bfloat16)
        with mosaic_gpu.force_gpu_interpret_mode(params):
            found = _grouped_mosaic._product(x, w, sizes, transposed, x.dtype)
        wanted = _product(x, w, sizes, transposed, jnp.float32)
        np.testing.assert_allclose(found.astype(jnp.float32)[:240], wanted[:240], rtol=0.01, atol=0.05)
    with mosaic_gpu.force_gpu_interpret_mode(params):
        found = _grouped_mosaic._outer(x, y, sizes, x.dtype)
    wanted = _outer(x[:240], y[:240], sizes, jnp.float32)
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=0.01, atol=0.05)


@interpreted
def test_experts_by_mosaic_in_chunks():
    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()):
        assert _difference(mosaic_kernels(), jnp.dtype("bfloat16"), jax.devices()[0]) is None
