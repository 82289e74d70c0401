"""tokamax's kernels for Hopper GPUs: where they are taken, and what is asked of
them.
"""

import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import backend

from stacked_remat import memory
from stacked_remat._memory_spaces import compiled_for
from stacked_remat.ops import _tokamax
from stacked_remat.ops._backends import choose_backend
from stacked_remat.ops._grouped_linear import Product, grouped_product
from stacked_remat.ops.grouped_experts import EXPERT_BACKENDS, ExpertsFacts

from .test_grouped_linear import _outer, _product


class Hopper:
    platform, device_kind, compute_capability = "gpu", "NVIDIA H200", "9.0"


@pytest.fixture
def hopper():
    with compiled_for(device := Hopper()):
        yield device


@pytest.fixture
def h200():
    """A device that JAX knows, though it is not attached."""
    (device,) = memory.find_target("h200").devices()
    with compiled_for(device):
        yield device


@pytest.mark.parametrize(
    ("version", "capability", "change", "message"),
    [
        ("0.0.17", "9.0", {}, None),
        ("0.0.18", "9.0", {}, "tried with tokamax 0.0.17, not 0.0.18"),
        (
            None,
            "9.0",
            {},
            (
                r"needs Python 3.12 or later and tokamax: pip install"
                r" 'stacked_remat\[tokamax\]'"
            ),
        ),
        ("0.0.17", "10.0", {}, r"compute capability 9.0 \(Hopper\), not 10.0"),
        (
            "0.0.17",
            "9.0",
            dict(dtype=jnp.dtype("float32")),
            "takes bfloat16 and float16, not float32",
        ),
        (
            "0.0.17",
            "9.0",
            dict(platform="cpu"),
            "runs on NVIDIA GPUs, and the program is for 'cpu'",
        ),
    ],
)
def test_it_is_taken_on_hopper_gpus_in_the_versions_that_were_tried(
    version, capability, change, message, monkeypatch, hopper
):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    hopper.compute_capability = capability
    call = ExpertsFacts(**(dict(platform="cuda", dtype=jnp.dtype("bfloat16")) | change))
    expected = "block" if message else "tokamax"
    assert (
        choose_backend("backend", EXPERT_BACKENDS, "auto", call)
        is EXPERT_BACKENDS[expected].kernel
    )
    if message:
        with pytest.raises(ValueError, match=message):
            choose_backend("backend", EXPERT_BACKENDS, "tokamax", call)


@pytest.mark.target("cuda")
@pytest.mark.parametrize("widths", [(32, 10), (128, 64)])
def test_products_mean_what_kernels_say_whatever_rows_of_no_expert_hold(
    widths, monkeypatch, h200
):
    """By the kernels' own definitions: JAX has no interpreter for them (0.12)."""
    pytest.importorskip("tokamax")
    from jax.experimental.pallas.ops.gpu import (
        ragged_dot_mgpu,
        transposed_ragged_dot_mgpu as of_jax,
    )
    from tokamax._src.ops.ragged_dot import (  # pyright: ignore[reportMissingImports]
        base,
        pallas_mosaic_gpu,
    )

    def outer(x, y, *, group_sizes, block_m, block_n, block_k, **options):
        assert x.shape[1] % block_m == y.shape[1] % block_n == len(x) % block_k == 0
        return of_jax.ref_transposed_ragged_dot(x, y, group_sizes)

    taken = []

    def transposed_product(
        x, w, *, group_sizes, block_n, block_k, transpose_rhs, **options
    ):
        assert transpose_rhs and w.shape[1] % block_n == w.shape[2] % block_k == 0
        taken.append(w.shape)
        return jax.lax.ragged_dot(x, w.swapaxes(1, 2), group_sizes)

    monkeypatch.setattr(ragged_dot_mgpu, "ragged_dot", transposed_product)
    monkeypatch.setattr(pallas_mosaic_gpu, "PallasMosaicGpuRaggedDot", base.RaggedDot)
    monkeypatch.setattr(of_jax, "transposed_ragged_dot", outer)
    sizes = jnp.asarray([70, 0, 150, 20], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    x, y = (
        jax.random.normal(key, (256, size))
        for key, size in zip(keys[:2], widths, strict=True)
    )
    x, y = (one.at[240:].set(jnp.nan).astype(jnp.bfloat16) for one in (x, y))
    for transposed in (False, True):
        shape = (4, *(reversed(widths) if transposed else widths))
        w = jax.random.normal(keys[2], shape, jnp.bfloat16)
        found = jax.jit(_tokamax._product, static_argnums=3)(x, w, sizes, transposed)
        wanted = _product(x, w, sizes, transposed).astype(jnp.float32)
        np.testing.assert_allclose(
            found.astype(jnp.float32)[:240], wanted[:240], rtol=0.01, atol=0.05
        )
    assert taken == ([(4, 64, 128)] if widths == (128, 64) else [])
    found = jax.jit(_tokamax._outer)(x, y, sizes)
    wanted = _outer(x, y, sizes).astype(jnp.float32)
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=0.01, atol=0.05)


@pytest.mark.target("cuda")
@pytest.mark.parametrize("rank", [2, 64])
def test_products_compile_for_every_rank_and_their_arithmetic_is_counted(rank):
    pytest.importorskip("tokamax")
    kernels = _tokamax.PRODUCTS
    wide, narrow = (
        jax.ShapeDtypeStruct((256, width), jnp.bfloat16) for width in (128, rank)
    )
    down = jax.ShapeDtypeStruct((4, 128, rank), jnp.bfloat16)

    def products(x, low, w, sizes):
        cases = (
            ("plain", x, w),
            ("transposed", low, w),
            ("outer", x, low),
            ("outer", low, x),
        )
        return [
            grouped_product(Product(kernels, kind), (a, b), sizes)
            for kind, a, b in cases
        ]

    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    found = memory.report(products, wide, narrow, down, sizes, target="h200").flops
    assert found.exact and found.matmul == 4 * 2 * 256 * 128 * rank


def test_a_process_calls_the_kernels_for_one_kind_of_gpu(monkeypatch, hopper):
    monkeypatch.setattr(_tokamax, "_called_for", {})
    for _ in range(2):
        _tokamax.check_one_kind_of_gpu(hopper)
    hopper.compute_capability = "10.0"
    with pytest.raises(
        ValueError, match="one kind of GPU, here of compute capability 9.0, not 10.0"
    ):
        _tokamax.check_one_kind_of_gpu(hopper)


@pytest.mark.target("cuda")
def test_kernels_ask_for_the_device_of_the_program_and_jax_keeps_its_own():
    attached = jax.devices()
    (device,) = memory.find_target("h200").devices()

    def kernel(*, more=1):
        own = backend.get_default_device()
        return jax.devices()[0].core_count, own.core_count, jax.devices, more

    with compiled_for(device), _tokamax.calling_tokamax():
        cores, default, devices, more = _tokamax._asking_for_target(kernel)()
        assert jax.devices() == attached
    assert cores == default == device.core_count
    assert devices is not jax.devices and more == 1
