"""Forward mode of sweeps that visitors may follow, and of layers on the host."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp

import stacked_remat as sr
from stacked_remat import Stacked, shared, streaming

from .blocks import assert_close, derivatives, quick_jit

X = jnp.linspace(-1, 1, 3)


class Dense(eqx.Module):
    w: jax.Array

    def __call__(self, x, scale):
        return x + jnp.tanh(x @ self.w) * scale


def loop(blocks, x, scale):
    for block in blocks.unstacked():
        x = block(x, scale)
    return jnp.sum(x**2)


def test_of_layers_on_the_host():
    """By what the layers take, by the layers themselves, and within JAX's loops and branches."""
    weights = 0.5 * jax.random.normal(jax.random.key(1), (4, 3, 3))
    stack, along = (
        Stacked(Dense(leaf), hax.Axis("layers", 4), "nested") for leaf in (weights, jnp.cos(weights))
    )
    args = X, jnp.full(3, 0.7)

    def fold(blocks, x, scale):
        return jnp.sum(blocks.fold(x, shared(scale)) ** 2)

    def every(value, blocks, direction):
        def of(blocks, x):
            return value(blocks, x, args[1])

        def looped(blocks, x):
            total = jax.lax.scan(lambda total, k: (total + of(blocks, k * x), None), 0.0, jnp.arange(2.0))[0]
            branch = jax.lax.cond(total > 0, lambda x: of(blocks, x), jnp.sum, x)
            return total + branch + jnp.sum(jax.lax.map(lambda k: of(blocks, k * x), jnp.arange(2.0)))

        def of_gradient(blocks, x):  # reads no gradient of the layers
            return jnp.sum(jnp.sin(jax.grad(of, (0, 1))(blocks, x)[1]))

        along = jax.jvp(lambda blocks: jax.value_and_grad(of)(blocks, X), (blocks,), (direction,))
        reverse = [jax.grad(value, (0, 1))(blocks, X) for value in (looped, of_gradient)]
        return derivatives(functools.partial(value, blocks), *args), jax.tree.leaves((along, reverse))

    found = jax.jit(functools.partial(every, fold))(streaming.to_host(stack), streaming.to_host(along))
    assert_close(found, jax.jit(functools.partial(every, loop))(stack, along), 2e-5, 2e-5)


def test_of_sweeps_that_a_visitor_may_follow():
    def value(w, x):
        y, sweep_back = sr.fold_vjp(lambda x, w: x + jnp.tanh(x @ w), hax.Axis("layers", 4), remat="offload")(
            x, w
        )
        return jnp.sum(y**2) + sum(map(jnp.sum, jax.tree.leaves(sweep_back(jnp.cos(y)))))

    def expected(w, x):
        def run(w, x):
            for i in range(4):
                x = x + jnp.tanh(x @ w[i])
            return x

        y, pullback = jax.vjp(run, w, x)
        return jnp.sum(y**2) + sum(map(jnp.sum, pullback(jnp.cos(y))))

    args = 0.4 * jax.random.normal(jax.random.key(2), (4, 3, 3)), X
    found, wanted = quick_jit(lambda *args: (derivatives(value, *args), derivatives(expected, *args)))(*args)
    assert_close(found, wanted, 2e-5, 2e-5)
