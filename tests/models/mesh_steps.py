"""A training step on a mesh of devices, the text of its program, and the same step on one device."""

import functools

import equinox as eqx
import jax
import numpy as np
import optax
from haliax import Axis

from models.decoder.decoder import Decoder
from models.lm import next_token_loss
from models.run_state import with_adapters
from stacked_remat.training import Partitioning, TokenBatch, TrainState, TrainStep

from .random_weights import random_weights

ROWS, VOCAB = 8, 24


def batch(positions):
    """Eight rows of two documents each, of uneven weights."""
    draws = np.random.default_rng(0).integers(0, VOCAB, (2, ROWS, positions)).astype(np.int32)
    first = positions * 5 // 13
    documents = np.array([[1] * first + [2] * (positions - first)], np.int32).repeat(ROWS, axis=0)
    numbers = np.concatenate([np.arange(first), np.arange(positions - first)]).astype(np.int32)
    weights = (np.arange(ROWS * positions).reshape(ROWS, positions) % 7 > 1).astype(np.float32)
    return TokenBatch.of(draws[0], draws[1], weights, documents, numbers[None].repeat(ROWS, axis=0))


def first_state(config, remat, lora=None):
    model = random_weights(Decoder.init, config, Axis("vocab", VOCAB), remat=remat)
    model, trainable = with_adapters(model, lora, key=jax.random.key(0))
    state = TrainState.init(model, optax.sgd(-1.0), trainable)
    if lora is None:
        return state
    # One matrix of each adapter starts at zero, and the other's gradient with it.
    trained = jax.tree.map(
        lambda leaf: 0.1 * np.sin(leaf.size + np.arange(leaf.size, dtype=np.float32)).reshape(leaf.shape),
        state.trained,
    )
    return eqx.tree_at(lambda state: state.trained, state, trained)


def gradient_step(partitioning, microbatches=1):
    """A step whose change of the weights is the gradient."""
    return TrainStep(
        loss_function=next_token_loss,
        optimizer=optax.sgd(-1.0),
        microbatches=microbatches,
        partitioning=partitioning,
    )


def assert_same(found, wanted):
    (after, metrics), (expected, expected_metrics) = found, wanted
    for a, b in zip(jax.tree.leaves(after.trained), jax.tree.leaves(expected.trained), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)
    assert metrics.keys() == expected_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, expected_metrics[name], rtol=2e-5, err_msg=name)


@functools.cache
def on_one_device(config, positions, lora=None):
    return eqx.filter_jit(gradient_step(None))(batch(positions), first_state(config, True, lora))


def compiled_on(mesh, config, remat, positions, microbatches=1, lora=None):
    """The text of the program, and its results."""
    partitioning = Partitioning.of(mesh)
    state = first_state(config, remat, lora)
    with partitioning.active():
        state = partitioning.shard_weights(state)
        args = (partitioning.shard_batch(batch(positions)), state)
        compiled = eqx.filter_jit(gradient_step(partitioning, microbatches)).lower(*args).compile()
        return compiled.compiled.as_text(), compiled(*args)
