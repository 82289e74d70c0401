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
