"""Scores equal looped per-example gradients, for every kind of layer, policy and precision."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import Stacked, ghost

from .cases import CASES, assert_equal, looped_scores, random_like


def run(model, losses, batch, direction, **options):
    @eqx.filter_jit
    def step(model, batch, direction):
        return ghost.grad_dot(model, losses, batch, direction=direction, **options)

    return step(model, batch, direction)


QUICK = ("merged",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.deep) for name in CASES]
)
def test_scores_are_those_of_looped_gradients(name):
    model, losses, batch = CASES[name]()
    direction = random_like(model, 1)
    gradients, found = run(model, losses, batch, direction, check=1e-4)
    expected, _ = looped_scores(model, losses, batch, direction)
    assert_equal(found.scores, expected)
    assert found.coverage() == 1.0
    total = sum(score if score.ndim == 1 else score.sum(0) for score in expected.values())
    np.testing.assert_allclose(found.total.array, total, rtol=1e-4, atol=1e-5 * np.abs(total).max())
    plain = eqx.filter_jit(ghost.val_direction)(model, losses, batch)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert jnp.isfinite(found.loss)


class Product(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return jnp.sum(x * self.weight[None, :], axis=1) + self.bias


def test_what_is_trained_is_a_predicate_or_a_tree_of_a_model_that_is_called():
    model, x = Product(jnp.arange(3.0), jnp.ones(())), jnp.arange(12.0).reshape(4, 3)
    trainable = Product(True, False)
    for given in (trainable, lambda leaf: getattr(leaf, "ndim", 0) == 1):
        direction = ghost.val_direction(model, lambda model, x: model(x), x, trainable=given)
        gradients, found = run(model, lambda model, x: model(x), x, direction, trainable=given)
        assert gradients.bias is None and set(found.scores) == {"weight"}
        np.testing.assert_allclose(found.total.array, x @ x.mean(0))


def test_small_entries_of_a_direction_count_in_float16():
    class Block(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return x + jnp.tanh(x @ self.weight.astype(x.dtype))

    keys = jax.random.split(jax.random.key(0), 3)
    stack = Stacked(Block(jax.random.normal(keys[0], (2, 8, 8)) / 4), Axis("layers", 2))
    model = {"stack": stack, "head": jax.random.normal(keys[1], (8,))}
    x, direction = jax.random.normal(keys[2], (4, 8)), jax.tree.map(lambda w: 1e-7 * jnp.cos(w), model)

    def losses(model, x, dtype):
        return (model["stack"].fold(x.astype(dtype)) @ model["head"].astype(dtype)).astype("float32")

    def exact(model):
        return jax.jvp(lambda model: losses(model, x, "float32"), (model,), (direction,))[1]

    def scores(model):
        half = lambda model, x: losses(model, x, "float16")  # noqa: E731
        return ghost.grad_dot(model, half, x, direction=direction)[1].total.array

    found, expected = jax.jit(lambda model: (scores(model), exact(model)))(model)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-3 * np.abs(expected).max())
