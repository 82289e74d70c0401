"""Parameters by patterns of their paths: what is frozen, and factors of the learning
rate.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis

from stacked_remat import Stacked, streaming
from stacked_remat.lora import LoraConfig, apply_lora, lora_filter
from stacked_remat.training import (
    AdamWConfig,
    FusedOptimizer,
    SgdConfig,
    TokenBatch,
    TrainState,
    TrainStep,
    build_optimizer,
    check_learning_rates,
    parameter_paths,
    trainable_except,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")

Embed, Vocab = Axis("embed", 4), Axis("vocab", 6)
PATHS = [
    "embedding",
    "blocks.*.router.weight",
    "blocks.*.router.bias",
    "blocks.*.scale",
]


class Block(eqx.Module):
    router: hax.nn.Linear
    scale: jax.Array

    @staticmethod
    def init(*, key):
        linear = hax.nn.Linear.init(Embed, Embed.alias("out"), key=key)
        return Block(linear, jnp.ones(()))

    def __call__(self, x):
        return x + hax.tanh(self.router(x)).rename({"out": "embed"}) * self.scale


class Model(eqx.Module):
    embedding: hax.NamedArray
    blocks: Stacked[Block]


def model():
    blocks = Stacked.init(3, Block)(key=jax.random.split(jax.random.key(0), 3))
    return Model(hax.random.normal(jax.random.key(1), (Vocab, Embed)), blocks)


def loss(model, batch):
    x = model.blocks.fold(model.embedding.take(Vocab, batch.tokens))
    logits = hax.dot(x, model.embedding, axis=Embed)
    losses = hax.nn.cross_entropy_loss(
        logits, Vocab, hax.nn.one_hot(batch.targets, Vocab), reduction=None
    )
    mean = (hax.sum(losses * batch.weights) / hax.sum(batch.weights)).scalar()
    return mean, {"loss": mean}


def batch():
    tokens = np.arange(2 * 5).reshape(2, 5) % Vocab.size
    return TokenBatch.of(tokens[:, :-1], tokens[:, 1:], np.ones((2, 4), np.float32))


def trained_for(steps, optimizer, trainable, begin=None, **options):
    """The model after some steps, and its optimizer state."""
    state = TrainState.init(begin or model(), optimizer, trainable)
    step = eqx.filter_jit(TrainStep(loss, optimizer, **options))
    for _ in range(steps):
        state, _ = step(batch(), state)
    return state


def test_paths_are_those_of_modules_and_the_name_there():
    assert parameter_paths(model()) == PATHS
    adapted = apply_lora(
        model(), LoraConfig(rank=1, targets=("*router",)), key=jax.random.key(2)
    )
    assert "blocks.*.router.wrapped.weight" in parameter_paths(adapted)
    trained = eqx.filter(adapted, lora_filter(adapted))
    assert parameter_paths(trained) == ["blocks.*.router.a", "blocks.*.router.b"]


@pytest.mark.parametrize(
    ("fused", "options"), [(False, {}), (False, {"microbatches": 2}), (True, {})]
)
def test_frozen_parameters_stay_and_have_no_optimizer_state(fused, options):
    config = AdamWConfig(warmup=0, max_grad_norm=None)
    optimizer = build_optimizer(config, 10)
    if fused:
        optimizer = FusedOptimizer(optimizer, max_grad_norm=1.0)
    before = model()
    frozen = trainable_except(before, ["*router*", "embedding"])
    after = trained_for(2, optimizer, frozen, **options)
    assert parameter_paths(after.trained) == ["blocks.*.scale"]
    jax.tree.map(
        np.testing.assert_array_equal,
        (after.model.embedding, after.model.blocks.stacked.router),
        (before.embedding, before.blocks.stacked.router),
    )
    assert np.all(after.model.blocks.stacked.scale != before.blocks.stacked.scale)
    arrays = jax.tree.leaves(after.optimizer_state)
    assert all(array.size <= 3 for array in arrays)  # three layers' scales


def test_frozen_layers_may_be_streamed():
    before = model()
    before = eqx.tree_at(
        lambda model: model.blocks, before, streaming.to_host(before.blocks)
    )
    trainable = trainable_except(before, ["blocks.*"])
    after = trained_for(1, optax.sgd(0.1), trainable, begin=before)
    assert parameter_paths(after.trained) == ["embedding"]
    jax.tree.map(np.testing.assert_array_equal, after.model.blocks, before.blocks)


def test_of_adapters_one_side_may_be_frozen():
    adapted = apply_lora(
        model(), LoraConfig(rank=1, targets=("*router",)), key=jax.random.key(2)
    )
    trainable = trainable_except(adapted, ["*.a"], lora_filter(adapted))
    state = TrainState.init(adapted, optax.adam(0.1), trainable)
    assert parameter_paths(state.trained) == ["blocks.*.router.b"]
    with pytest.raises(ValueError, match=r"freeze: '\*.weight' matches no parameter"):
        trainable_except(adapted, ["*.weight"], lora_filter(adapted))


@pytest.mark.parametrize("fused", [False, True])
def test_learning_rates_are_multiplied_by_the_first_factor_that_matches(fused):
    def updated(factors):
        config = SgdConfig(
            learning_rate=0.1,
            learning_rates=factors,
            warmup=0,
            weight_decay=0.5,
            max_grad_norm=None,
        )
        optimizer = build_optimizer(config, 10)
        if fused:
            optimizer = FusedOptimizer(optimizer)
        before = model()
        after = trained_for(1, optimizer, eqx.is_inexact_array).model
        return jax.tree.map(lambda new, old: new - old, after, before)

    factors = {"*bias": 2.0, "*router*": 0.5, "embedding": 0.25}
    found, whole = updated(factors), updated({})
    expected = {"bias": 2.0, "weight": 0.5}
    for name, factor in expected.items():
        own, other = (
            getattr(one.blocks.stacked.router, name).array for one in (found, whole)
        )
        np.testing.assert_allclose(own, factor * other, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(
        found.embedding.array, 0.25 * whole.embedding.array, rtol=1e-4, atol=1e-7
    )
    np.testing.assert_allclose(
        found.blocks.stacked.scale, whole.blocks.stacked.scale, rtol=1e-4
    )


def test_a_pattern_that_matches_nothing_is_an_error_with_near_paths():
    message = (
        r"freeze: 'blocks.\*.routr.weight' matches no parameter that is trained."
        r" Nearest of 4: blocks.\*.router.weight, .*A pattern has to match the whole"
    )
    with pytest.raises(ValueError, match=message):
        trainable_except(model(), ["blocks.*.routr.weight"])
    with pytest.raises(ValueError, match="optimizer.learning_rates: 'embed' matches"):
        check_learning_rates({"*bias": 0.1, "embed": 1.0}, model())
    trained = eqx.filter(model(), trainable_except(model(), ["*router*"]))
    with pytest.raises(ValueError, match=r"'\*\.bias' matches no parameter"):
        check_learning_rates({"*.bias": 0.1}, trained)
    with pytest.raises(ValueError, match=r"'\*bias' has no effect, since earlier"):
        check_learning_rates({"*": 0.5, "*bias": 0.1}, model())


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf")])
def test_a_factor_is_positive(factor):
    with pytest.raises(ValueError, match="is a factor of .*To train none of it, name"):
        AdamWConfig(learning_rates={"*": factor})
