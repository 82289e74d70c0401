"""A traced program differentiated by some of its inputs, by others, and by the first again."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr

from stacked_remat import ScanCheckpointPolicy, Stacked, StackedPattern, tiled
from stacked_remat.ops import chunked_cross_entropy, grouped_experts

LAYERS, EMBED, EXPERT, VOCAB = hax.make_axes(layers=4, embed=3, expert=2, vocab=5)
weights = jax.random.normal(jax.random.key(0), (LAYERS.size, EMBED.size))
x = jnp.array([0.1, 0.2, 0.3])


class Tanh(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return jnp.tanh(x * self.weight) + x


class Sin(Tanh):
    def __call__(self, x):
        return jnp.sin(x * self.weight) + x


def fold(remat):
    return lambda weights, x: jnp.sum(Stacked.init(LAYERS, Tanh, remat=remat)(weights).fold(x))


def pattern(weights, x):
    kinds = {"tanh": Tanh, "sin": Sin}
    blocks = StackedPattern.init(LAYERS, kinds, ("tanh", "sin"), remat="nested")(weights)
    return jnp.sum(blocks.fold(x))


def tiles(weights, x):
    of_tile = tiled(lambda x: jnp.sin(jnp.outer(x, jnp.ravel(weights))), 0, tiles=3)
    return jnp.sum(of_tile(x))


def experts(weights, x):
    choices = jnp.array([[0], [1], [1], [0]])
    rows = grouped_experts(
        lambda weight, rows, gates: jnp.sin(rows * weight[None, :]) * gates[:, None],
        weights[:2],
        EXPERT,
        jnp.outer(weights[:, 0], x),
        choices,
        jnp.ones((4, 1)),
    )
    return jnp.sum(jnp.cos(rows))


def cross_entropy(weights, x):
    head = hax.named(jnp.outer(x, jnp.arange(5.0)), (EMBED, VOCAB))
    hidden = hax.named(weights, (LAYERS, EMBED))
    targets = hax.arange(LAYERS)
    losses = chunked_cross_entropy(hidden, head, targets, EMBED, VOCAB)
    return hax.sum(losses).scalar()


FUNCTIONS = {
    "nested": fold("nested"),
    "first_layers": fold(ScanCheckpointPolicy(first_layers=2, max_carries=3)),
    "pattern": pattern,
    "tiles": tiles,
    "experts": experts,
    "cross_entropy": cross_entropy,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_a_jaxpr_do_not_depend_on_earlier_ones(name):
    traced = jax.make_jaxpr(FUNCTIONS[name])(weights, x)

    def evaluate(weights, x):
        return eval_jaxpr(traced.jaxpr, traced.consts, weights, x)[0]

    @jax.jit
    def every():
        by = [(0,), (0, 1), (1,), (0, 1), (0,)]
        return [jax.grad(evaluate, argnums)(weights, x) for argnums in by]

    first, both, second, again, last = every()
    for found in (again, [*first, *second], [*last, *second]):
        for one, other in zip(both, found, strict=True):
            assert np.any(one)
            np.testing.assert_allclose(one, other, rtol=1e-5)


def test_second_derivatives_after_a_gradient():
    """Outside of `jit`, where calls share compiled programs."""

    def second(function):
        def first(weights, x):
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.grad(function, (0, 1))(weights, x))

        return jax.grad(first, (0, 1))(weights, x)

    def loop(weights, x):
        for weight in weights:
            x = Tanh(weight)(x)
        return jnp.sum(x)

    jax.grad(FUNCTIONS["nested"])(weights, x)
    for found, expected in zip(second(FUNCTIONS["nested"]), second(loop), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
