import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stacked_remat.training import TrainState, train_step

from .next_byte import next_byte, next_byte_loss
from .token_batches import held_out_of

TOKENS = np.random.default_rng(0).integers(0, 5, 200).astype(np.uint16)
BATCHES = held_out_of(TOKENS, 8, 4)
SGD = optax.sgd(0.5)
STEP = functools.partial(train_step, loss_function=next_byte_loss, optimizer=SGD)


def test_a_step_goes_down_the_gradient():
    state, batch = TrainState.init(next_byte(5), SGD), BATCHES.batch(0)
    after, metrics = STEP(batch, state)
    gradient = jax.grad(lambda model: next_byte_loss(model, batch)[0])(state.model).table
    np.testing.assert_allclose(after.model.table, state.model.table - 0.5 * gradient, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], np.log(5), rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], jnp.linalg.norm(gradient), rtol=1e-5)
    assert int(state.step) == 0 and int(after.step) == 1


def test_steps_lower_the_loss_of_the_batch():
    state, batch, losses = TrainState.init(next_byte(5), SGD), BATCHES.batch(0), []
    for _ in range(4):
        state, metrics = STEP(batch, state)
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


def test_the_compiled_step_updates_the_state_in_place():
    compiled = eqx.filter_jit(STEP, donate="all-except-first")
    state, batch = TrainState.init(next_byte(5), SGD), BATCHES.batch(0)
    expected, _ = STEP(batch, state)
    after, _ = compiled(batch, state)
    np.testing.assert_allclose(after.model.table, expected.model.table, atol=1e-6)
    assert state.model.table.is_deleted() and not batch.tokens.array.is_deleted()


def test_what_is_no_float_is_left_alone():
    model = (next_byte(5), jnp.arange(3), "name")

    def loss(model, batch):
        return next_byte_loss(model[0], batch)

    step = functools.partial(train_step, loss_function=loss, optimizer=SGD)
    after, _ = step(BATCHES.batch(0), TrainState.init(model, SGD))
    np.testing.assert_array_equal(after.model[1], jnp.arange(3))
    assert after.model[2] == "name"


def test_a_loss_without_metrics_is_an_error():
    state = TrainState.init(next_byte(5), SGD)
    with pytest.raises(TypeError):
        train_step(BATCHES.batch(0), state, loss_function=lambda m, b: m.table.sum(), optimizer=SGD)  # pyright: ignore[reportArgumentType]


def test_only_what_is_trainable_is_differentiated_and_has_optimizer_state():
    model = (next_byte(5), next_byte(5))

    def loss(model, batch):
        value, metrics = next_byte_loss(model[0], batch)
        return value + next_byte_loss(model[1], batch)[0], metrics

    adam = optax.sgd(0.5, momentum=0.9)
    second = jax.tree.map(lambda _: False, model[0]), jax.tree.map(lambda _: True, model[1])
    state = TrainState.init(model, adam, second)
    assert state.trained[0].table is None and state.frozen[1].table is None
    assert len([leaf for leaf in jax.tree.leaves(state.optimizer_state) if leaf.ndim]) == 1
    after, metrics = train_step(BATCHES.batch(0), state, loss_function=loss, optimizer=adam)
    assert after.model[0].table is model[0].table
    expected, _ = STEP(BATCHES.batch(0), TrainState.init(model[1], SGD))
    np.testing.assert_allclose(after.model[1].table, expected.model.table, atol=1e-6)
    alone = STEP(BATCHES.batch(0), TrainState.init(model[1], SGD))[1]["grad_norm"]
    np.testing.assert_allclose(metrics["grad_norm"], alone, rtol=1e-6)


def test_what_is_trainable_may_be_a_predicate():
    state = TrainState.init((next_byte(5), next_byte(6)), SGD, lambda leaf: leaf.shape == (6, 6))
    assert state.trained[0].table is None and state.trained[1].table.shape == (6, 6)


def test_what_has_no_gradient_is_not_trainable():
    model = (next_byte(5), jnp.arange(3))
    with pytest.raises(ValueError, match=r"model\[1\] can't be trained: .* no floating-point array"):
        TrainState.init(model, SGD, jax.tree.map(lambda _: True, model))
    with pytest.raises(ValueError, match="Nothing of the model is trainable"):
        TrainState.init(model, SGD, lambda leaf: False)
