"""A training step whose layers are over devices: the step of one device."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
import pytest
from haliax import Axis

from stacked_remat import Stacked
from stacked_remat.training import (
    LossWithSums,
    MeshConfig,
    Partitioning,
    PipelineConfig,
    TokenBatch,
    TrainState,
    TrainStep,
    gathered,
)
from stacked_remat.training.stage_rows import add_stage_rows, remove_stage_rows
from tests.random_arrays import normal

Vocab, Embed, Hidden = hax.make_axes(vocab=12, embed=8, hidden=6)
SGD = optax.sgd(0.1, momentum=0.9)
MICROBATCHES = 4


class Layer(eqx.Module):
    up: hax.NamedArray
    down: hax.NamedArray

    def __call__(self, x):
        layer = gathered(self)
        hidden = hax.tanh(x.dot(layer.up, axis=Embed))
        return x + hidden.dot(layer.down, axis=Hidden)


class Model(eqx.Module):
    table: hax.NamedArray
    blocks: Stacked
    # Another stack, which is no part of the pipeline
    last: Stacked


def model(layers=4):
    Layers = Axis("layers", layers)
    layer = Layer(normal(0, Layers, Embed, Hidden), normal(1, Layers, Hidden, Embed))
    Last = Axis("last", 2)
    last = Layer(normal(2, Last, Embed, Hidden), normal(3, Last, Hidden, Embed))
    blocks = Stacked(layer, Layers, "nested")
    table = normal(4, Vocab, Embed)
    whole = Model(table, blocks, Stacked(last, Last))
    return jax.tree.map(lambda leaf: leaf * 0.3, whole)


def parts(model, batch, *keys):
    """The mean over the weights, of tokens with noise, and sums with a named axis."""
    x = model.table.take(Vocab, batch.tokens)
    for key in keys:
        x = x + 0.1 * hax.random.normal(key, x.axes)
    logits = model.last.fold(model.blocks.fold(x)).dot(model.table, axis=Embed)
    targets = hax.nn.one_hot(batch.targets, Vocab)
    losses = hax.nn.cross_entropy_loss(logits, Vocab, targets, reduction=None)
    loss = hax.sum(losses * batch.weights).scalar() / batch.total_weight
    chosen = hax.sum(hax.nn.softmax(logits, axis=Vocab), batch.tokens.axes)
    return (loss, (chosen, batch.tokens.size * 1.0)), {"loss": loss}


def term(model, sums):
    chosen, count = sums
    found = hax.sum((chosen / count) ** 2).scalar()
    return found, {"term": found}


LOSS = LossWithSums(parts, term)


def batch():
    """Eight rows of uneven weights, some of none."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, Vocab.size, (2, 8, 4)).astype(np.int32)
    weights = 0.02 * (rng.random((8, 4)) < 0.6).astype(np.float32)
    weights[1] = weights[5] = 0.0
    return TokenBatch.of(tokens, targets, weights)


def stages(axes, compute="data"):
    mesh = MeshConfig(axes, {"batch": compute}, {"embed": compute})
    return Partitioning.of(mesh, stages_of={"layers": "stage"})


def after_two_steps(partitioning, schedule, layers):
    """The state after two steps, their metrics, and the loss before them."""
    pipeline = PipelineConfig("stage", schedule)
    options = {"microbatches": MICROBATCHES, "pipeline": pipeline}
    step = TrainStep(LOSS, SGD, partitioning=partitioning, **options)
    with partitioning.active():
        state = partitioning.init_sharded(
            lambda: TrainState.init(model(layers), SGD, key=jax.random.key(1))
        )
        state = add_stage_rows(state, partitioning)
        data = partitioning.shard_batch(batch())
        evaluated = eqx.filter_jit(step.evaluated(LOSS))(state.model, data)[1]["loss"]
        compiled = eqx.filter_jit(step)
        found = []
        for _ in range(2):
            state, metrics = compiled(data, state)
            found.append(metrics)
    return state, found, evaluated


def assert_close(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("schedule", "layers"), [("1f1b", 4), ("1f1b", 3), ("zero_bubble", 4)]
)
def test_a_step_equals_that_of_one_device(schedule, layers):
    partitioning = stages({"stage": 2, "data": 2})
    state, *others = after_two_steps(partitioning, schedule, layers)
    found = remove_stage_rows(state, partitioning), *others
    # One device for the layers: no pipeline
    expected = after_two_steps(stages({"stage": 1}, "stage"), schedule, layers)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_close(found, expected)
    (metrics, _), _ = others
    assert metrics.keys() == {"loss", "term", "grad_norm"}
    # Of a state that is saved, layers that don't divide are divided by another axis
    saved = (2, 4, 6) if layers == 4 else (3, 2, 6)
    for after, shape in (state, (2, 4, 6)), (found[0], saved):
        momentum: Any = after.optimizer_state
        for tree in (after.trained, momentum[0].trace):
            (shard, *_) = tree.blocks.stacked.up.array.addressable_shards
            assert shard.data.shape == shape
            (shard, *_) = tree.last.stacked.up.array.addressable_shards
            assert shard.data.shape == (2, 4, 6)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["depth"], r"no Stacked of the model; it has: model\.blo"),
        (["layers", "last"], "one stack, and the model has 2 along"),
    ],
)
def test_a_model_without_one_stack_of_layers_is_refused(axes, message):
    partitioning = Partitioning.of(
        MeshConfig({"stage": 2}, {}, {}), stages_of=dict.fromkeys(axes, "stage")
    )
    step = TrainStep(
        LOSS, SGD, partitioning=partitioning, pipeline=PipelineConfig("stage")
    )
    state = TrainState.init(model(), SGD)
    with (
        partitioning.active(),
        pytest.raises(ValueError, match=message),
    ):
        eqx.filter_eval_shape(step, batch(), state)
