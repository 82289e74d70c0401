"""Scores equal looped per-example gradients, for every kind of layer, policy and precision."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import ghost

from .cases import CASES, assert_equal, looped_scores, random_like


def run(model, losses, batch, direction, **options):
    @eqx.filter_jit
    def step(model, batch, direction):
        return ghost.grad_dot(model, losses, batch, direction=direction, **options)

    return step(model, batch, direction)


QUICK = ("experts", "merged")


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
