"""tokamax's attention kernels: what is asked of them, by its own definition, and
compiled for a GPU.
"""

import functools
import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import ScanCheckpointPolicy, fold, memory
from stacked_remat._memory_spaces import compiled_for
from stacked_remat.ops import _tokamax, backends_taken, causal_attention
from stacked_remat.ops._attention_backends import (
    BACKENDS,
    AttentionCall,
    exact_attention,
)
from stacked_remat.ops._attention_rule import Blocks, attend_by

from .test_attention import SINKS, arrays, attended_with_gradients, random_documents
from .test_attention_splash import shapes


@pytest.fixture
def by_definition(monkeypatch):
    """JAX has no interpreter for these kernels (0.12)."""
    pytest.importorskip("tokamax")
    from tokamax._src.ops.attention import (  # pyright: ignore[reportMissingImports]
        base,
        pallas_mosaic_gpu,
        pallas_mosaic_gpu_vjp,
    )

    def gradients(residuals, output, cotangent, q, k, v, **options):
        mask = options["mask"].as_array(q.shape[-3], k.shape[-3])
        scale, softcap = options["logits_scale"], options["logits_soft_cap"]
        return _gradients(residuals, output, cotangent, q, k, v, mask, scale, softcap)

    def attention(use_stable_softmax=True):
        assert use_stable_softmax
        return base.DotProductAttention()

    monkeypatch.setattr(pallas_mosaic_gpu, "PallasMosaicGpuFlashAttention", attention)
    monkeypatch.setattr(
        pallas_mosaic_gpu_vjp, "PallasMosaicGpuFlashAttentionVjp", lambda: gradients
    )
    monkeypatch.setattr(_tokamax, "_CHUNK", 4)
    monkeypatch.setattr(_tokamax, "_PARTS_OF_LENGTH", (6, 3))


def _gradients(residuals, output, cotangent, q, k, v, mask, scale, softcap):
    """As the kernels compute them: from the highest score and the sum."""
    highest, total = residuals
    group = q.shape[-2] // k.shape[-2]
    keys, values = (jnp.repeat(x, group, axis=-2) for x in (k, v))
    scores = jnp.einsum("bqhd,bshd->bhqs", q, keys) * scale
    slope = 1.0
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
        slope = 1.0 - (scores / softcap) ** 2
    weights = jnp.where(
        mask, jnp.exp(scores - highest[..., None]) / total[..., None], 0.0
    )
    kept = jnp.einsum("bqhd,bqhd->bhq", output, cotangent)
    of_scores = (
        weights
        * (jnp.einsum("bqhd,bshd->bhqs", cotangent, values) - kept[..., None])
        * slope
        * scale
    )

    def by_key_head(x):
        return x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(axis=3)

    return {
        "q": jnp.einsum("bhqs,bshd->bqhd", of_scores, keys),
        "k": by_key_head(jnp.einsum("bhqs,bqhd->bshd", of_scores, q)),
        "v": by_key_head(jnp.einsum("bhqs,bqhd->bshd", weights, cotangent)),
    }


@pytest.mark.target("cuda")
@pytest.mark.parametrize(
    ("window", "has_documents", "rows", "softcap", "value_dim"),
    [
        (None, True, None, None, 6),
        (3, True, None, 0.7, 4),
        (3, False, None, None, 6),
        (5, False, None, None, 9),
        (3, True, (2, 3, 9, 12), None, 6),
        (None, True, (2, 3, 6, 7, 10, 11), 0.7, 4),
        (3, True, (2, 3, 6, 7, 10, 11), None, 6),
        (6, True, (2, 3, 6, 7, 10, 11), None, 6),
    ],
)
def test_queries_see_keys_from_a_first_to_a_last(
    window, has_documents, rows, softcap, value_dim, by_definition
):
    rows = None if rows is None else jnp.asarray(rows, jnp.int32)
    # The last chunk of 13 is mostly padding, that of 12 is whole.
    length, strips = 13 if has_documents else 12, 1
    if rows is not None and len(rows) == 6:
        length, strips = 12, 3
    given = [
        x if rows is None or i in (1, 2) else x[:, rows]
        for i, x in enumerate(arrays(length, value_dim=value_dim))
    ]
    blocks = Blocks(0.4, 4, window, strips=strips, softcap=softcap)

    rng = np.random.default_rng(0)
    (device,) = memory.find_target("h200").devices()
    with compiled_for(device):
        found, expected = (
            attended_with_gradients(of, blocks, rows)
            for of in (
                functools.partial(attend_by, _tokamax.ATTENTION),
                exact_attention,
            )
        )
        for _ in range(4):
            documents = random_documents(rng, length) if has_documents else None
            close = functools.partial(np.testing.assert_allclose, atol=3e-5, rtol=1e-4)
            jax.tree.map(
                close, *(of(*given, SINKS.array, documents) for of in (found, expected))
            )


def layers(names):
    """The gradient of attention in layers with documents, windows and sinks, with these
    names kept.
    """

    def layer(x, scale):
        query, key, value = (
            x.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16) for x in inputs(x)
        )
        Pos, KVHeads, HeadDim = key.axes
        documents, sinks = (
            hax.arange(Pos) // 100,
            hax.ones((KVHeads, Axis("heads_per_kv", 2))),
        )
        axes = Pos, KVHeads, HeadDim
        attended = causal_attention(
            query, key, value, *axes, documents=documents, window=128, sinks=sinks
        )
        return x + attended.astype(jnp.float32)

    def inputs(x):
        return x, *[x["heads_per_kv", 0]] * 2

    def loss(scales, x):
        policy = ScanCheckpointPolicy(save_block_internals=names)
        return hax.sum(
            fold(layer, Axis("layers", 3), remat=policy)(x, scales) ** 2
        ).scalar()

    return jax.grad(loss)


@pytest.mark.target("cuda")
def test_on_a_gpu_attention_is_kernels_and_saved_it_is_not_recomputed():
    pytest.importorskip("tokamax")
    (device,) = memory.find_target("h200").devices()
    sharding = jax.sharding.SingleDeviceSharding(device)
    x = shapes(2048, 2, 2, 64, jnp.float32, sharding=sharding)[0]
    scales = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=sharding)

    def kernels(names):
        with compiled_for(device):
            text = str(jax.jit(layers(names)).lower(scales, x).compile().as_text())
        assert text.count(" while(") <= 2  # over layers, forward and backward
        return len(re.findall(r'custom_call_target="mosaic_gpu', text))

    assert kernels(["attention_output", "attention_lse"]) == 3
    assert kernels(["attention_output"]) == 4


@pytest.mark.target("cuda")
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype", "softcap"),
    [
        (80, 80, jnp.float16, None),
        (256, 256, jnp.bfloat16, None),
        (192, 128, jnp.bfloat16, None),
        (64, 104, jnp.float16, 30.0),
    ],
)
def test_a_gpu_takes_any_width_and_divided_positions(
    head_dim, value_dim, dtype, softcap
):
    pytest.importorskip("tokamax")
    mesh = jax.sharding.Mesh(memory.find_target("h200").devices(2), ("context",))
    spec = jax.sharding.PartitionSpec("context")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    inputs = shapes(1024, 1, 2, head_dim, dtype, sharding=sharding, value_dim=value_dim)

    def gradients(query, key, value, cotangent):
        attend = functools.partial(causal_attention, backend="tokamax", softcap=softcap)
        _, pullback = jax.vjp(
            lambda *arrays: attend(*arrays, *key.axes), query, key, value
        )
        return pullback(cotangent)

    with jax.set_mesh(mesh), hax.axis_mapping({"position": "context"}):
        assert memory.report(gradients, *inputs, target="h200").flops.exact


@pytest.mark.target("cuda")
def test_examples_of_short_documents_are_mapped_after_they_are_traced():
    pytest.importorskip("tokamax")
    query, key, *_ = shapes(17, 2, 2, 64)

    def loss(query, key, numbers):
        documents = hax.named(numbers, key.axes[0])
        return hax.sum(
            causal_attention(query, key, key, *key.axes, documents=documents)
        ).scalar()

    def gradients(query, key, numbers):
        return jax.vmap(jax.grad(jax.checkpoint(loss)), (None, None, 0))(
            query, key, numbers
        )

    numbers = jax.ShapeDtypeStruct((3, 17), jnp.int32)
    with backends_taken() as taken:
        assert (
            memory.report(gradients, query, key, numbers, target="h200").temporaries > 0
        )
    assert taken["attention"].startswith("tokamax")


def test_in_float16_it_takes_whole_blocks_of_queries():
    """On an H200 the gradients of values at 1,000 positions were NaN in float16, and
    right in bfloat16.
    """

    def reason(dtype, position, among=1):
        call = AttentionCall(
            platform="cuda",
            dtype=jnp.dtype(dtype),
            position=position,
            head_dim=64,
            value_dim=64,
            has_documents=False,
            blocks=Blocks(1.0, 8),
            among=among,
        )
        return BACKENDS["tokamax"].why_not(call) or ""

    assert "must be a multiple of 64 positions, of 1000 here" in reason("float16", 1000)
    assert "must be a multiple of 64" in reason("float16", 256, among=8)
    for others in (("bfloat16", 1000), ("float16", 1024), ("float16", 512, 8)):
        assert "multiple" not in reason(*others)  # but the device
