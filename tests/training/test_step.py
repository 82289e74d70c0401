"""One training step: gradients, microbatches, skipped steps, and frozen weights."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stacked_remat.training import (
    LossWithSums,
    PrecisionConfig,
    TrainerConfig,
    TrainState,
    TrainStep,
    UpdateConfig,
)

from .next_byte import NextByte, next_byte, next_byte_loss, token_losses
from .token_batches import held_out_of

BATCHES = held_out_of(
    np.random.default_rng(0).integers(0, 5, 200).astype(np.uint16), 8, 4
)
SGD = optax.sgd(0.5)


@eqx.filter_jit
def compiled_step(batch, state, **options):
    return TrainStep(**options)(batch, state)


STEP = functools.partial(compiled_step, loss_function=next_byte_loss, optimizer=SGD)


def random_model():
    return NextByte(
        jnp.asarray(np.random.default_rng(0).normal(size=(5, 5)), jnp.float32)
    )


def uneven(batch, weight=1.0):
    """The batch with few weights in some rows and none in one."""
    weights = np.full((4, 8), weight, np.float32)
    weights[0, 3:] = weights[1] = weights[3, 1:5] = 0.0
    return eqx.tree_at(lambda batch: batch.weights.array, batch, jnp.asarray(weights))


def summed_loss(model, batch):
    """The mean of the weights, also of a batch without any, and an auxiliary loss that
    is a mean of rows.
    """
    loss = jnp.sum(token_losses(model, batch)) / batch.total_weight
    auxiliary = 0.3 * jnp.mean(
        jnp.sum(model.table[batch.tokens.array] ** 2, axis=(1, 2))
    )
    return loss + auxiliary, {
        "loss": loss,
        "auxiliary": auxiliary,
        "rows": jnp.ones(2) * auxiliary,
    }


def test_a_step_follows_the_negative_gradient():
    state, batch = TrainState.init(next_byte(5), SGD), BATCHES.batch(0)
    after, metrics = STEP(batch, state)
    gradient = jax.jit(jax.grad(lambda model: next_byte_loss(model, batch)[0]))(
        state.model
    ).table
    np.testing.assert_allclose(
        after.model.table, state.model.table - 0.5 * gradient, atol=1e-6
    )
    np.testing.assert_allclose(metrics["loss"], np.log(5), rtol=1e-6)
    np.testing.assert_allclose(
        metrics["grad_norm"], jnp.linalg.norm(gradient), rtol=1e-5
    )
    assert int(state.step) == 0 and int(after.step) == 1


@pytest.mark.parametrize(
    "options", [{}, {"microbatches": 2, "skip_nonfinite": True}], ids=str
)
def test_the_compiled_step_updates_the_state_in_place(options):
    step = TrainStep(next_byte_loss, SGD, **options)
    compiled = eqx.filter_jit(step, donate="all-except-first")
    state, batch = TrainState.init(next_byte(5), SGD), jax.device_put(BATCHES.batch(0))
    expected, _ = STEP(batch, state)
    after, _ = compiled(batch, state)
    np.testing.assert_allclose(after.model.table, expected.model.table, atol=1e-6)
    assert state.model.table.is_deleted() and not batch.tokens.array.is_deleted()


@pytest.mark.parametrize("weight", [1.0, 0.01])
def test_microbatches_give_the_update_of_the_whole_batch(weight):
    state = TrainState.init(random_model(), SGD)
    batch = uneven(BATCHES.batch(0), weight)
    step = functools.partial(compiled_step, loss_function=summed_loss, optimizer=SGD)
    whole, expected = step(batch, state)
    for count in (2, 4):
        parts, metrics = step(batch, state, microbatches=count)
        np.testing.assert_allclose(
            parts.model.table, whole.model.table, rtol=1e-5, atol=1e-6
        )
        for name in ("loss", "auxiliary", "rows", "grad_norm"):
            np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
    # a plain mean over microbatches would be another update
    gradient = jax.jit(jax.grad(lambda model, batch: summed_loss(model, batch)[0]))
    plain = (
        sum(gradient(state.model, _row(batch, index)).table for index in range(4)) / 4
    )
    assert not np.allclose(
        state.model.table - 0.5 * plain, whole.model.table, atol=1e-3
    )


class Balanced(eqx.Module):
    """A table, and numbers of the auxiliary term alone."""

    table: jax.Array
    bias: jax.Array


def balanced(term):
    """A loss with a term of the means over all tokens, padding left out, of what the
    model makes of them.
    """

    def parts(model, batch):
        loss = jnp.sum(token_losses(model, batch)) / jnp.maximum(
            jnp.sum(batch.weights.array), 1.0
        )
        probabilities = jax.nn.softmax(model.table[batch.tokens.array])
        chosen = jax.lax.stop_gradient(jax.nn.one_hot(jnp.argmax(probabilities, -1), 5))
        real = jnp.sign(batch.weights.array)[..., None]
        sums = {"chosen": chosen, "probabilities": probabilities}
        sums = {name: jnp.sum(one * real, (0, 1)) for name, one in sums.items()}
        return (loss, (sums, jnp.sum(real))), {"loss": loss}

    def of_sums(model, sums):
        totals, count = sums
        means = {name: one / count for name, one in totals.items()}
        found = term(model, means)
        return found, {"term": found, "per_token": means["chosen"]}

    return LossWithSums(parts, of_sums)


TERMS = {
    "load balance": lambda model, means: (
        5 * jnp.sum(means["chosen"] * means["probabilities"])
    ),
    "a bias by load": lambda model, means: jnp.sum(
        model.bias * jnp.round(16 * means["chosen"])
    ),
    "a square": lambda model, means: (
        jnp.sum(model.bias * means["probabilities"] ** 2) ** 2
    ),
}


@pytest.mark.parametrize("name", TERMS)
def test_a_term_of_sums_is_that_of_the_whole_batch_in_microbatches(name):
    bias = jnp.arange(5.0) - 1
    state, batch = (
        TrainState.init(Balanced(random_model().table, bias), SGD),
        uneven(BATCHES.batch(0)),
    )
    loss = balanced(TERMS[name])
    whole, expected = compiled_step(batch, state, loss_function=loss, optimizer=SGD)
    for count in (2, 4):
        parts, metrics = compiled_step(
            batch, state, loss_function=loss, optimizer=SGD, microbatches=count
        )
        for own, other in zip(
            jax.tree.leaves(parts.trained), jax.tree.leaves(whole.trained), strict=True
        ):
            np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)
        for key in ("loss", "term", "per_token", "grad_norm"):
            np.testing.assert_allclose(metrics[key], expected[key], rtol=1e-5)
    # the mean of the microbatches' terms is another update
    apart = lambda model, batch: loss(model, batch)  # noqa: E731
    mean, _ = compiled_step(
        batch, state, loss_function=apart, optimizer=SGD, microbatches=2
    )
    differences = jax.tree.map(
        lambda one, other: jnp.abs(one - other).max(), mean.trained, whole.trained
    )
    assert max(jax.tree.leaves(differences)) > 1e-3


def test_second_derivatives_of_microbatches_are_those_of_the_whole_batch():
    """A replay differentiates the step."""
    batch, loss = uneven(BATCHES.batch(0)), balanced(TERMS["a square"])

    @functools.partial(jax.jit, static_argnums=1)
    def slope(model, count):
        def after(model):
            step = TrainStep(loss, SGD, count)
            return jnp.sum(
                step(batch, TrainState.init(model, SGD))[0].trained.table ** 3
            )

        return jax.grad(after)(model)

    model = Balanced(random_model().table, jnp.arange(5.0) - 1)
    for own, whole in zip(
        jax.tree.leaves(slope(model, 4)), jax.tree.leaves(slope(model, 1)), strict=True
    ):
        np.testing.assert_allclose(own, whole, rtol=1e-4, atol=1e-5)


def _row(batch, index):
    return jax.tree.map(
        lambda leaf: leaf["batch", index : index + 1], batch, is_leaf=hax.is_named_array
    )


def diverging(model, batch):
    loss, _ = next_byte_loss(model, batch)
    loss = loss * jnp.where(batch.tokens.array[0, 0] == 0, jnp.nan, 1.0)
    return loss, {"loss": loss}


def with_first_token(token):
    batch = jax.device_put(BATCHES.batch(0))
    return eqx.tree_at(
        lambda batch: batch.tokens.array, batch, batch.tokens.array.at[0, 0].set(token)
    )


@pytest.mark.usefixtures("standard_promotion")
def test_a_step_that_is_not_finite_is_skipped_and_counted():
    optimizer = optax.adam(0.1)
    step = functools.partial(
        compiled_step, loss_function=diverging, optimizer=optimizer, skip_nonfinite=True
    )
    good, bad = with_first_token(1), with_first_token(0)
    first, metrics = step(good, TrainState.init(random_model(), optimizer))
    assert int(metrics["skips"]) == 0
    skipped, metrics = step(bad, first)
    assert not np.isfinite(metrics["loss"]) and int(metrics["skips"]) == 1
    assert eqx.tree_equal(
        (skipped.model, skipped.optimizer_state), (first.model, first.optimizer_state)
    )
    assert int(skipped.step) == 2
    again, _ = step(bad, skipped)
    assert int(again.skips) == 2
    after, metrics = step(good, again)
    assert int(after.skips) == int(metrics["skips"]) == 0 and jnp.any(
        after.model.table != first.model.table
    )
    # As if the bad steps had not been
    assert eqx.tree_equal(after.model, step(good, first)[0].model)


def test_random_numbers_differ_by_step_and_microbatch_and_repeat_with_the_key():
    def noisy(model, batch, key):
        loss, _ = next_byte_loss(model, batch)
        noise = jax.random.uniform(key)
        return loss, {"loss": loss, "noise": noise}

    step = functools.partial(compiled_step, loss_function=noisy, optimizer=SGD)
    state = TrainState.init(next_byte(5), SGD, key=jax.random.key(7))
    second, first = step(BATCHES.batch(0), state)
    _, other = step(BATCHES.batch(0), second)
    _, again = step(BATCHES.batch(0), state)
    _, halves = step(BATCHES.batch(0), state, microbatches=2)
    assert first["noise"] == again["noise"]
    assert len({float(m["noise"]) for m in (first, other, halves)}) == 3
    with_other_key = TrainState.init(next_byte(5), SGD, key=jax.random.key(8))
    assert step(BATCHES.batch(0), with_other_key)[1]["noise"] != first["noise"]


@pytest.mark.parametrize(
    ("dtype", "count"), [("float32", 1), ("bfloat16", 1), ("bfloat16", 2)]
)
def test_a_step_is_built_as_the_config_says(dtype, count):
    """Gradients are added up in its dtype, and microbatches are one loop."""
    config = TrainerConfig(
        update=UpdateConfig(microbatches=count, on_nonfinite="skip"),
        precision=PrecisionConfig(gradients=dtype),
    )
    seen = []

    def update(updates, state, parameters=None):
        seen.append(updates.table.dtype)
        return updates, state

    spy = optax.GradientTransformation(lambda _: None, update)
    step = TrainStep.of(config, loss_function=next_byte_loss, optimizer=spy)
    state = TrainState.init(random_model(), spy)
    program = eqx.filter_jit(step).lower(BATCHES.batch(0), state).as_text()
    assert seen == [jnp.dtype(dtype)] and program.count("stablehlo.exponential") == 1
    plain = TrainStep.of(TrainerConfig(), loss_function=next_byte_loss, optimizer=spy)
    assert "skips" in eqx.filter_eval_shape(step, BATCHES.batch(0), state)[1]
    assert "skips" not in eqx.filter_eval_shape(plain, BATCHES.batch(0), state)[1]


def test_what_is_trainable_may_be_a_predicate_and_integers_are_not():
    state = TrainState.init(
        (next_byte(5), next_byte(6)), SGD, lambda leaf: leaf.shape == (6, 6)
    )
    assert state.trained[0].table is None and state.trained[1].table.shape == (6, 6)
    model = (next_byte(5), jnp.arange(3))
    with pytest.raises(
        ValueError,
        match=r"model\[1\] can't be trained: .* is not a floating-point array",
    ):
        TrainState.init(model, SGD, jax.tree.map(lambda _: True, model))
    with pytest.raises(ValueError, match="Nothing of the model is trainable"):
        TrainState.init(model, SGD, lambda leaf: False)
