"""The decoder: shapes, losses, policies and layers of several kinds."""

import collections
import dataclasses
import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from models.deepseek_v3 import DeepseekV3Config
from models.gemma3 import Gemma3Config
from models.glm4_moe import Glm4MoeConfig
from models.gpt_oss import GptOssConfig
from models.llama4 import Llama4Config
from models.lm import next_token_loss
from models.parts.decoder import Decoder
from models.parts.sections import (
    FULL,
    SLIDING,
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    TemperatureConfig,
)
from models.parts.tokens import Tokens
from models.qwen3 import Qwen3Config
from models.qwen3_moe import Qwen3MoeConfig
from models.run_config import LmRunConfig
from stacked_remat import ScanCheckpointPolicy, StackedPattern
from stacked_remat.lora import LoraConfig, apply_lora
from stacked_remat.ops import rotary_table
from stacked_remat.training import LossWithSums, TokenBatch

from ..blocks import assert_close
from ..jaxprs import equations_of
from .random_weights import random_weights

Vocab, Batch, Pos, Layers = (
    Axis("vocab", 19),
    Axis("batch", 2),
    Axis("position", 5),
    Axis("layers", 3),
)
TOKENS = hax.named(
    jnp.asarray(np.random.default_rng(1).integers(0, Vocab.size, (2, 5), np.int32)),
    (Batch, Pos),
)
CONFIG = Qwen3MoeConfig(
    hidden_dim=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    experts=ExpertsConfig(3, 2, 6),
)


@functools.cache
def make(config=CONFIG) -> Decoder:
    return random_weights(Decoder.init, config, Vocab)


def with_policy(model, policy):
    return dataclasses.replace(model, layers=model.layers.with_remat(policy))


@eqx.filter_jit
def layer_states(model, tokens):
    return model.layer_states(tokens)


@eqx.filter_jit
def python_loop(model, tokens):
    """The hidden states, and the loads of all routers."""
    x, loads = model.embedding(tokens), []
    rotary = rotary_table(
        hax.arange(Pos), model.config.HeadDim, theta=model.config.rotary.theta
    )
    for layer in model.layers:
        x, found = layer(x, Tokens(rotary))
        loads += [] if found is None else [found.load.array]
    return model.norm(x), loads


loss_of = eqx.filter_jit(next_token_loss)
loss_and_gradients = eqx.filter_jit(
    eqx.filter_value_and_grad(next_token_loss, has_aux=True)
)


def batch_of_tokens() -> TokenBatch:
    return TokenBatch(TOKENS, hax.roll(TOKENS, -1, Pos), hax.ones((Batch, Pos)))


def test_it_is_the_python_loop_over_its_layers():
    model, batch = make(), batch_of_tokens()
    from_scan, _ = layer_states(model, batch.tokens)
    from_loop, _ = python_loop(model, batch.tokens)
    np.testing.assert_allclose(from_scan.array, from_loop.array, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_loss_counts_weighted_targets_alone_and_adds_the_load_balance_of_every_layer(
    packed,
):
    model, batch = make(), batch_of_tokens()
    weights = hax.named(
        jnp.array([[1.0, 0, 0, 2.0, 0], [0, 0, 1.0, 0, 0]]), (Batch, Pos)
    )
    documents, positions = (
        hax.named(jnp.array([row] * 2), (Batch, Pos))
        for row in ([1, 1, 2, 2, 2], [0, 1, 0, 1, 2])
    )
    own = {"documents": documents, "positions": positions} if packed else {}
    batch = TokenBatch(batch.tokens, batch.targets, weights, **own)
    loss, metrics = loss_of(model, batch)
    hidden, statistics = eqx.filter_jit(model.layer_states)(batch.tokens, **own)
    log_probs = jax.nn.log_softmax(model.logits(hidden).array)
    picked = -jnp.take_along_axis(log_probs, batch.targets.array[..., None], axis=-1)[
        ..., 0
    ]
    cross_entropy = jnp.sum(picked * weights.array) / 4
    per_layer = CONFIG.experts.num_experts * jnp.sum(
        statistics.load.array * statistics.importance.array, 1
    )
    np.testing.assert_allclose(metrics["loss"], cross_entropy, rtol=1e-5)
    np.testing.assert_allclose(metrics["load_balance_per_layer"], per_layer, rtol=1e-5)
    np.testing.assert_allclose(metrics["load_balance"], per_layer.mean(), rtol=1e-5)
    np.testing.assert_allclose(
        loss, cross_entropy + 0.001 * per_layer.mean(), rtol=1e-5
    )


def test_the_sums_of_two_halves_give_the_losses_of_the_routers_of_both():
    """Of rows of unlike padding, whose means are not the mean of their means."""
    experts = dataclasses.replace(CONFIG.experts, z_loss_weight=0.5)
    config = LmRunConfig(model=dataclasses.replace(CONFIG, experts=experts))
    model, loss = make(config.model), config.loss
    assert isinstance(loss, LossWithSums)
    documents = hax.named(jnp.array([[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]]), (Batch, Pos))
    tokens = batch_of_tokens()
    whole = TokenBatch(
        tokens.tokens, tokens.targets, hax.ones((Batch, Pos)), documents, documents
    )
    halves = [
        jax.tree.map(
            lambda x, at=at: x[Batch, at : at + 1], whole, is_leaf=hax.is_named_array
        )
        for at in (0, 1)
    ]

    @eqx.filter_jit
    def found(model):
        (first, _), (second, _) = (loss.parts(model, half) for half in halves)
        term, metrics = loss.term(model, jax.tree.map(jnp.add, first[1], second[1]))
        means = [loss.term(model, sums)[0] for _, sums in (first, second)]
        expected, whole_metrics = next_token_loss(model, whole)
        return (
            (term, metrics),
            (expected - whole_metrics.pop("loss"), whole_metrics),
            sum(means) / 2,
            loss(model, whole),
        )

    own, expected, mean, (total, _) = found(model)
    assert_close(own, expected, rtol=1e-4, atol=1e-6)
    assert abs(mean - expected[0]) > 1e-3 * abs(expected[0])
    np.testing.assert_allclose(total, next_token_loss(model, whole)[0], rtol=1e-5)


def test_a_batch_without_weight_has_no_loss():
    batch = batch_of_tokens()
    empty = TokenBatch(batch.tokens, batch.targets, hax.zeros((Batch, Pos)))
    assert loss_of(make(), empty)[1]["loss"] == 0


def test_a_loss_is_a_mean_over_weights_of_any_size():
    batch = batch_of_tokens()
    small = dataclasses.replace(batch, weights=0.001 * batch.weights)
    losses = [loss_of(make(), one)[1]["loss"] for one in (batch, small)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_the_z_loss_weight_takes_effect():
    weighted = dataclasses.replace(
        CONFIG, experts=dataclasses.replace(CONFIG.experts, z_loss_weight=0.5)
    )
    loss, metrics = loss_of(make(weighted), batch_of_tokens())
    assert metrics["router_z_loss"] > 0.1 and metrics[
        "router_z_loss_per_layer"
    ].shape == (3,)
    expected = (
        metrics["loss"]
        + 0.001 * metrics["load_balance"]
        + 0.5 * metrics["router_z_loss"]
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_a_z_loss_is_of_the_logits_and_in_the_loss_of_training_alone():
    model, batch = make(CONFIG), batch_of_tokens()
    logits = model.logits(model.hidden_states(batch.tokens)[0])
    squares = hax.nn.logsumexp(logits, model.Vocab) ** 2 * batch.weights
    expected = hax.sum(squares).scalar() / hax.sum(batch.weights).scalar()
    loss, metrics = LmRunConfig(model=CONFIG, z_loss=0.3).loss(model, batch)
    plain, plain_metrics = loss_of(model, batch)
    np.testing.assert_allclose(loss - plain, 0.3 * expected, rtol=1e-4)
    np.testing.assert_allclose(
        metrics["loss"] - plain_metrics["loss"], 0.3 * expected, rtol=1e-4
    )
    with pytest.raises(ValueError, match="z_loss must be at least 0, got -1"):
        LmRunConfig(z_loss=-1)


MIXED = Qwen3MoeConfig(
    hidden_dim=16,
    num_layers=4,
    attention=AttentionConfig(bias=True, window=3, layer_types=(FULL, SLIDING)),
    experts=ExpertsConfig(3, 2, 6, dense_layers=(0,)),
)


@pytest.mark.deep
def test_layers_of_several_kinds_are_the_python_loop_and_have_its_gradients():
    """The dense layer, and those with and without a window in turn, in one nested
    sweep.
    """
    model, tokens = with_policy(make(MIXED), "nested"), batch_of_tokens().tokens
    assert isinstance(model.layers, StackedPattern)
    assert model.layers.pattern == (
        "dense",
        "sliding_sparse",
        "sparse",
        "sliding_sparse",
    )

    def loss(run, model):
        hidden, found = run(model, tokens)
        return hax.sum(hax.sin(30 * hidden)).scalar(), found

    @eqx.filter_jit
    def both(model):
        runs = (Decoder.layer_states, python_loop)
        return [
            eqx.filter_value_and_grad(functools.partial(loss, run), has_aux=True)(model)
            for run in runs
        ]

    ((found, statistics), gradients), ((expected, loads), wanted) = both(model)
    assert statistics.load.axes == (Layers, MIXED.Experts)
    np.testing.assert_allclose(statistics.load.array, jnp.stack(loads), atol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(wanted.layers))
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(wanted.layers))
    assert_close(gradients, wanted, rtol=1e-4, atol=1e-6 * largest)


def test_a_dense_decoder_has_no_auxiliary_loss():
    loss, metrics = loss_of(
        make(Qwen3Config(hidden_dim=16, num_layers=2)), batch_of_tokens()
    )
    assert loss == metrics["loss"] and set(metrics) == {"loss"}


@pytest.mark.parametrize(
    "config",
    [
        MIXED,
        Llama4Config(
            hidden_dim=16,
            num_layers=4,
            attention=AttentionConfig(window=2, layer_types=(FULL, SLIDING)),
            temperature=TemperatureConfig(1, 1.0),
            experts=ExpertsConfig(3, 2, 6, dense_layers=(0,)),
        ),
    ],
    ids=["windows", "chunks and temperatures"],
)
def test_packed_documents_do_not_see_each_other(config):
    model, tokens = make(config), batch_of_tokens().tokens
    documents = hax.named(jnp.array([0, 0, 1, 1, 1]), Pos)
    positions = hax.named(jnp.array([0, 1, 0, 1, 2]), Pos)
    packed = eqx.filter_jit(model.layer_states)(
        tokens, documents=documents, positions=positions
    )[0]
    first, second = (
        layer_states(model, tokens[Pos, :2])[0],
        layer_states(model, tokens[Pos, 2:])[0],
    )
    np.testing.assert_allclose(packed.array[:, :2], first.array, atol=1e-5)
    np.testing.assert_allclose(packed.array[:, 2:], second.array, atol=1e-5)


@pytest.mark.deep
def test_a_preset_gives_the_same_finite_gradients():
    preset = CONFIG.remat_presets["nested_attention_saved"]
    found, expected = (
        loss_and_gradients(with_policy(make(), policy), batch_of_tokens())
        for policy in (preset, False)
    )
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1], rtol=1e-4)
    for leaf in jax.tree.leaves(found[1]):
        assert jnp.all(jnp.isfinite(leaf)) and jnp.any(leaf != 0)


DENSE = Qwen3Config(
    hidden_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=24
)


def backward(policy, config=CONFIG) -> collections.Counter:
    """How often each name, primitive, and primitive with its types is in the program of
    the gradient.
    """
    batch = batch_of_tokens()
    gradient = jax.grad(lambda model: next_token_loss(model, batch)[0])
    found = equations_of(gradient, with_policy(make(config), policy))
    names = [
        equation.params["name"]
        for equation in found
        if equation.primitive.name == "name"
    ]
    kinds = [
        (equation.primitive.name, *(str(var.aval) for var in equation.outvars))
        for equation in found
    ]
    return collections.Counter([*names, *kinds, *(kind for kind, *_ in kinds)])


@pytest.fixture(scope="module")
def recomputed():
    return backward(ScanCheckpointPolicy())


@pytest.mark.parametrize(
    "name", [name for name in CONFIG.remat_names or () if name != "expert_output"]
)
def test_the_names_inside_a_layer_can_be_saved(name, recomputed):
    assert recomputed[name]
    assert backward(ScanCheckpointPolicy(save_block_internals=[name])) != recomputed


SHARED = Glm4MoeConfig(
    hidden_dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    experts=ExpertsConfig(3, 2, 6),
)


@pytest.mark.parametrize(
    "config", [CONFIG, DENSE, SHARED], ids=["experts", "dense", "a shared expert"]
)
def test_with_products_saved_none_is_computed_again(config):
    policies = (
        ScanCheckpointPolicy(save_block_internals=True),
        config.remat_presets["products_saved"],
        True,
    )
    kept, saved, recomputed = (
        backward(policy, config)["dot_general"] for policy in policies
    )
    assert kept == saved < recomputed


WITH_SINKS = GptOssConfig(
    hidden_dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    experts=ExpertsConfig(3, 2, 6),
)


LATENT = DeepseekV3Config(
    hidden_dim=16,
    num_layers=2,
    latent=LatentConfig(
        query_rank=5, key_value_rank=4, plain_dim=4, rotary_dim=2, value_dim=3
    ),
    experts=ExpertsConfig(3, 2, 6),
)


@pytest.mark.deep
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        WITH_SINKS,
        Gemma3Config(hidden_dim=16, num_layers=2, mlp_dim=24),
        LATENT,
    ],
    ids=["norms", "sinks", "four norms", "latent"],
)
def test_tiles_give_the_same_loss_gradients_and_statistics(config):
    """With biases, adapters, documents, more tiles than key-value heads, and a ragged
    last tile.
    """
    attention = AttentionConfig(bias=True, backend="blockwise")
    documents = hax.named(jnp.array([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]]), (Batch, Pos))

    def loss(model):
        hidden, auxiliary = model.hidden_states(TOKENS, documents=documents)
        return hax.sum(hax.sin(hidden)).scalar() + auxiliary.loss, auxiliary.metrics

    def adapted(config, tiles):
        model = make(dataclasses.replace(config, attention=attention, tiles=tiles))
        lora = LoraConfig(targets=("*.attention.*_proj", "*gate_proj"), rank=2)
        model = apply_lora(model, lora, key=jax.random.key(2))
        return jax.tree.map(
            lambda leaf: leaf + 0.01 if eqx.is_inexact_array(leaf) else leaf, model
        )

    @eqx.filter_jit
    def run(models):
        return [
            eqx.filter_value_and_grad(loss, has_aux=True)(model) for model in models
        ]

    expected, found = run([adapted(config, tiles) for tiles in (1, 4)])
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected[1]))
    assert_close(found, expected, rtol=1e-5, atol=1e-6 * largest)


def test_a_tied_head_is_the_embedding():
    tied = make(dataclasses.replace(CONFIG, tie_word_embeddings=True))
    assert tied.head is None
    count = sum(leaf.size for leaf in jax.tree.leaves(tied))
    assert (
        sum(leaf.size for leaf in jax.tree.leaves(make()))
        == count + Vocab.size * CONFIG.hidden_dim
    )
    hidden = hax.random.normal(jax.random.key(3), CONFIG.Embed)
    np.testing.assert_allclose(
        tied.logits(hidden).array, tied.embedding.weight.array @ hidden.array, rtol=1e-5
    )
    _, gradients = loss_and_gradients(tied, batch_of_tokens())
    # The head reaches every row
    assert jnp.all(jnp.any(gradients.embedding.weight.array != 0, axis=1))


def test_bfloat16_computes_in_bfloat16_and_trains_float32():
    low = make(dataclasses.replace(CONFIG, compute_dtype="bfloat16"))
    batch = batch_of_tokens()
    hidden, _ = layer_states(low, batch.tokens)
    assert hidden.dtype == jnp.bfloat16
    (loss, _), gradients = eqx.filter_eval_shape(loss_and_gradients, low, batch)
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    exact, _ = layer_states(make(), batch.tokens)
    np.testing.assert_allclose(hidden.array.astype(jnp.float32), exact.array, atol=0.1)


def test_saving_attention_leaves_it_out_of_the_backward_pass(recomputed):
    """The blockwise kernel runs in two loops forward and backward, and in a third where
    it is recomputed.
    """
    assert (
        backward(CONFIG.remat_presets["attention_saved"])["while"] < recomputed["while"]
    )
