"""Routing and experts of the decoder."""

import dataclasses
from functools import partial

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from models.gpt_oss import GptOssConfig
from models.parts.experts import SparseExperts
from models.parts.linear import cast_floating
from models.parts.router_statistics import means
from models.parts.sections import ExpertsConfig
from models.qwen3_moe import Qwen3MoeConfig
from stacked_remat.lora import LoraConfig, apply_lora, merge_lora
from stacked_remat.ops._backends import Backend
from stacked_remat.ops._grouped_linear import megablox_kernels
from stacked_remat.ops.grouped_experts import EXPERT_BACKENDS

from ..lora.stacks import with_trained_adapters
from ..random_arrays import normal
from .random_weights import random_weights

Batch, Pos = Axis("batch", 2), Axis("position", 3)


def make(
    *,
    num_experts=4,
    experts_per_token=2,
    norm_topk_prob=True,
    architecture=Qwen3MoeConfig,
    spread=0.7,
):
    sizes = ExpertsConfig(num_experts, experts_per_token, 6, norm_topk_prob)
    config = architecture(hidden_dim=8, num_heads=2, num_kv_heads=1, experts=sizes)
    # A large spread, so that experts differ.
    layer = random_weights(
        lambda *, key: config.init_layer(config.kind_of(0), key=key).mlp, spread=spread
    )
    x = np.random.default_rng(1).normal(size=(Batch.size, Pos.size, 8))
    return layer, hax.named(jnp.asarray(x, jnp.float32), (Batch, Pos, config.Embed))


def with_biases(num_experts=3):
    """Experts that have biases, and values on both sides of the limit of their
    SwiGLU.
    """
    return make(num_experts=num_experts, architecture=GptOssConfig, spread=3)


apply = jax.jit(SparseExperts.apply)


@pytest.mark.parametrize("lora", [False, True])
def test_a_router_may_compute_in_float32(lora):
    sizes = ExpertsConfig(4, 2, 6, router_dtype="float32")
    config = Qwen3MoeConfig(8, 1, 2, 1, experts=sizes, compute_dtype="bfloat16")

    def init(*, key):
        layer = config.init_layer(config.kind_of(0), key=key)
        return (
            apply_lora(layer, LoraConfig(2, targets=("mlp.router",)), key=key)
            if lora
            else layer
        )

    layer = random_weights(init, spread=0.7)
    x = normal(0, Batch, Pos, config.Embed, dtype=jnp.bfloat16)
    cast = cast_floating(layer, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(cast)} == {
        jnp.dtype("bfloat16"),
        jnp.dtype("float32"),
    }
    found = cast.mlp._logits(x)
    expected = layer.mlp.router(x.astype(jnp.float32))
    np.testing.assert_array_equal(found.array, expected.array)
    narrow = dataclasses.replace(sizes, router_dtype="compute")
    rounded = cast_floating(
        dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, settings=narrow)),
        jnp.bfloat16,
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded)} == {jnp.dtype("bfloat16")}
    assert not np.array_equal(rounded.mlp._logits(x).array, expected.array)


@jax.jit
def route(layer, x, documents=None):
    choices, gates, sums = layer.route(x, documents)
    return choices, gates, means(sums, x, layer.Embed, documents)


def of_all_experts(choices, gates, layer):
    """Gates `[..., experts]`, zero for those that were not chosen."""
    return hax.sum(
        hax.nn.one_hot(choices, layer.Experts, dtype=jnp.float32) * gates,
        "choice",
    )


def on_every_token(layer, x):
    """Each expert applied to all tokens, times its gate or zero."""
    expert = layer.experts.stacked
    choices, gates, _ = layer.route(x)
    gate, up = expert.gate_proj(x), expert.up_proj(x)
    if layer.router.bias is not None:
        gate, up = hax.minimum(gate, 7.0), hax.clip(up, -7.0, 7.0)
        inner = gate * hax.nn.sigmoid(1.702 * gate) * (up + 1)
    else:
        inner = gate * hax.nn.sigmoid(gate) * up
    mixed = hax.sum(
        expert.down_proj(inner) * of_all_experts(choices, gates, layer), "experts"
    )
    return mixed.rearrange(x.axes)


@pytest.mark.parametrize(
    ("experts_per_token", "norm_topk_prob"),
    [(1, False), (2, True), (2, False), (4, True)],
)
def test_each_token_gets_the_weighted_sum_of_its_experts(
    experts_per_token, norm_topk_prob
):
    layer, x = make(experts_per_token=experts_per_token, norm_topk_prob=norm_topk_prob)
    logits = (
        np.asarray(x.array, np.float64)
        @ np.asarray(layer.router.weight.array, np.float64).T
    )
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected *= expected >= np.sort(expected)[..., -experts_per_token, None]
    expected /= expected.sum(-1, keepdims=True) if norm_topk_prob else 1.0
    choices, gates, statistics = route(layer, x)
    found = of_all_experts(choices, gates, layer).rearrange((Batch, Pos, layer.Experts))
    np.testing.assert_allclose(found.array, expected, atol=1e-5)
    np.testing.assert_allclose(
        statistics.load.array, (expected > 0).mean(axis=(0, 1)), atol=1e-6
    )
    mixed, _ = apply(layer, x)
    assert mixed.axes == x.axes
    expected = jax.jit(on_every_token)(layer, x)
    np.testing.assert_allclose(mixed.array, expected.array, atol=1e-4)


@pytest.mark.parametrize("keep", [False, True])
def test_biases_and_the_clamp_have_the_values_and_gradients_of_plain_products(
    keep, monkeypatch
):
    monkeypatch.setattr("models.parts.experts.internals_are_saved", lambda name: keep)
    layer, x = with_biases()
    weights = normal(4, *x.axes)
    reaches = {
        name: getattr(layer.experts.stacked, name)(x).array
        for name in ("gate_proj", "up_proj")
    }
    assert all(
        (values.max() > 7, values.min() < -7) == (True, True)
        for values in reaches.values()
    )

    @jax.jit
    def both(layer, x):
        def loss(of, layer, x):
            mixed = of(layer, x)
            return hax.sum(mixed * weights).scalar(), mixed

        functions = (lambda layer, x: layer.apply(x)[0], on_every_token)
        return [
            jax.value_and_grad(partial(loss, of), (0, 1), has_aux=True)(layer, x)
            for of in functions
        ]

    found, expected = both(layer, x)
    for ours, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert jnp.abs(theirs).max() > 0
        np.testing.assert_allclose(
            ours, theirs, rtol=1e-4, atol=1e-4 * float(jnp.abs(theirs).max())
        )


def test_adapters_of_experts_with_biases_equal_merged_weights():
    layer, x = with_biases()
    adapted = with_trained_adapters(layer, LoraConfig(2, 2.0, ("experts.*", "router")))
    of_both = jax.jit(lambda *layers: [layer.apply(x)[0].array for layer in layers])(
        adapted, merge_lora(adapted)
    )
    np.testing.assert_allclose(of_both[0], of_both[1], rtol=1e-4, atol=1e-4)
    assert jnp.abs(of_both[0] - apply(layer, x)[0].array).max() > 1


def test_the_z_loss_is_the_mean_square_of_the_log_normaliser():
    layer, x = make()
    logits = layer.router(x).rearrange((Batch, Pos, layer.Experts)).array
    expected = np.mean(np.log(np.sum(np.exp(np.asarray(logits)), axis=-1)) ** 2)
    np.testing.assert_allclose(route(layer, x)[2].z_loss.scalar(), expected, rtol=1e-5)


def test_statistics_leave_padding_out():
    layer, x = make()
    documents = hax.named(jnp.array([1, 2, 0]), Pos)
    found = apply(layer, x, documents)
    alone = route(layer, x[Pos, :2])[2]
    padded = route(layer, x, documents)[2]
    for ours, theirs in zip(
        jax.tree.leaves(padded), jax.tree.leaves(alone), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_array_equal(found[0].array, apply(layer, x)[0].array)
    nothing = route(layer, x, documents * 0)[2]
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(nothing))


@pytest.mark.deep
def test_the_backend_of_the_config_applies_experts_with_biases_and_adapters(
    monkeypatch,
):
    monkeypatch.setattr("models.parts.experts.internals_are_saved", lambda name: True)
    layer, x = with_biases()
    layer = apply_lora(layer, LoraConfig(2, 2.0, ("experts.*",)), key=jax.random.key(3))
    layer = jax.tree.map(lambda leaf: leaf + 0.1, layer)  # the adapters start as zero

    def value_and_gradient(backend):
        settings = dataclasses.replace(layer.settings, backend=backend)

        def total(layer):
            chosen = dataclasses.replace(layer, settings=settings)
            return jnp.sum(chosen.apply(x)[0].array ** 2)

        return jax.jit(jax.value_and_grad(total))(layer)

    with pytest.raises(
        ValueError, match="'megablox' does not support this call: it runs on TPUs"
    ):
        value_and_gradient("megablox")
    interpreted = Backend(megablox_kernels(interpret=True))
    monkeypatch.setitem(EXPERT_BACKENDS, "megablox", interpreted)
    found, wanted = value_and_gradient("megablox"), value_and_gradient("block")
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3), found, wanted
    )
