"""Three trainings say whether a replay predicts: on runs that are smooth, and not."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis

from stacked_remat.ghost import metasmoothness, weighted_step

# Optax's Adam raises a float to an integer power
pytestmark = pytest.mark.usefixtures("standard_promotion")

Steps, Examples = Axis("steps", 24), Axis("batch", 4)
KEYS = jax.random.split(jax.random.key(0), 3)
START = {
    "into": 0.5 * jax.random.normal(KEYS[0], (3, 8)),
    "out": 0.5 * jax.random.normal(KEYS[1], (8,)),
}
X = jax.random.normal(KEYS[2], (Steps.size, Examples.size, 3))
BATCHES = {"x": X, "y": jnp.sin(3 * X[..., 0]) + 2 * X[..., 1]}
IDS = hax.named(jnp.arange(96).reshape(24, 4) % 12, (Steps, Examples))


def losses(model, batch):
    return (jnp.tanh(batch["x"] @ model["into"]) @ model["out"] - batch["y"]) ** 2


def smoothness(optimizer, **options):
    options = {"key": jax.random.key(1), **options}
    return float(
        jax.jit(
            lambda: metasmoothness(
                weighted_step(losses, optimizer),
                (START, optimizer.init(START)),
                BATCHES,
                lambda state: state[0],
                Steps,
                Examples,
                **options,
            )
        )()
    )


def test_it_is_high_for_small_steps_and_low_for_large_ones_and_for_signs():
    smooth = smoothness(optax.adam(1e-2, eps_root=1e-4))
    assert 0.95 < smooth <= 1.0
    assert smoothness(optax.adam(1.0, eps_root=1e-30)) < 0.7 * smooth
    assert smoothness(optax.sign_sgd(0.1)) < 0.7 * smooth
    assert smoothness(optax.sgd(0.0)) == 1.0


def test_it_is_that_of_three_runs_by_a_loop():
    """An example that comes again has the same weight."""
    rate, size, key = 0.1, 0.4, jax.random.key(3)
    drawn = [jax.random.normal(jax.random.fold_in(key, number)) for number in range(12)]
    direction = np.array(drawn)[np.asarray(IDS.array)]

    def loss(model, batch, weights):
        return jnp.mean(weights * losses(model, batch))

    @jax.jit
    def run(weights):
        model = START
        for step in range(Steps.size):
            batch = jax.tree.map(lambda array, at=step: array[at], BATCHES)
            gradients = jax.grad(loss)(model, batch, weights[step])
            model = jax.tree.map(lambda w, g: w - rate * g, model, gradients)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(model)])

    start, middle, end = (np.asarray(run(1 + k * size * direction)) for k in range(3))
    moved = np.abs(end - start)
    signs = np.sign(middle - start) * np.sign(end - middle)
    expected = np.sum(signs * moved) / np.sum(moved)
    assert expected < 0.999
    found = smoothness(optax.sgd(rate), size=size, key=key, example_ids=IDS)
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_numbers_of_examples_need_the_axes_of_the_run_and_a_key_is_one():
    with pytest.raises(TypeError, match=r"key; got 0\. Write key=jax.random.key\(0\)"):
        smoothness(optax.sgd(0.1), key=0)
    with pytest.raises(ValueError, match="example_ids has the axes .*it needs"):
        smoothness(optax.sgd(0.1), example_ids=IDS["steps", 0])
