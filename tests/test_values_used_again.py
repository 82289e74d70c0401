"""A program, an array or a weakly typed carry that is used again gives what it gives by
itself.
"""

import functools
import itertools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.core import eval_jaxpr

from stacked_remat import (
    ScanCheckpointPolicy,
    Stacked,
    StackedPattern,
    checkpoint_name,
    fold,
    fused_update,
    scan,
    shared,
    tiled,
)
from stacked_remat.ops import chunked_cross_entropy

from .blocks import assert_close, quick_jit

LAYERS, EMBED, VOCAB = hax.make_axes(layers=4, embed=3, vocab=5)
weights = jax.random.normal(jax.random.key(0), (LAYERS.size, EMBED.size))
x = jnp.array([0.1, 0.2, 0.3])


def tanh(x, weight):
    return jnp.tanh(x * weight) + x


def folded(remat):
    return lambda weights, x: jnp.sum(fold(tanh, LAYERS, remat=remat)(x, weights))


def of_two_kinds(weights):
    pair = LAYERS.resize(2)
    kinds = {
        "a": Stacked(Sine(weights[:2]), pair),
        "b": Stacked(Padded(weights[2:]), pair),
    }
    return StackedPattern(kinds, ("a", "b") * 2, LAYERS)


def pattern(weights, x):
    return jnp.sum(of_two_kinds(weights).fold(x, *[shared(x)] * 3, remat="nested"))


def tiles(weights, x):
    of_tile = tiled(lambda x: jnp.sin(jnp.outer(x, jnp.ravel(weights))), 0, tiles=3)
    return jnp.sum(of_tile(x))


def cross_entropy(weights, x):
    head = hax.named(jnp.outer(x, jnp.arange(5.0)), (EMBED, VOCAB))
    hidden = hax.named(weights, (LAYERS, EMBED))
    targets = hax.arange(LAYERS)
    losses = chunked_cross_entropy(hidden, head, targets, EMBED, VOCAB)
    return hax.sum(losses).scalar()


FUNCTIONS = {
    "nested": folded("nested"),
    "first_layers": folded(ScanCheckpointPolicy(first_layers=2, max_carries=3)),
    "pattern": pattern,
    "tiles": tiles,
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
    assert all(map(np.any, both))
    for found in (again, (*first, *second), (*last, *second)):
        assert_close(found, both, atol=0)


def test_second_derivatives_after_a_gradient():
    """Outside of `jit`, where calls share compiled programs."""

    def second(function):
        def first(weights, x):
            return sum(
                jnp.sum(jnp.sin(leaf))
                for leaf in jax.grad(function, (0, 1))(weights, x)
            )

        return jax.grad(first, (0, 1))(weights, x)

    def loop(weights, x):
        return jnp.sum(functools.reduce(tanh, weights, x))

    jax.grad(FUNCTIONS["nested"])(weights, x)
    assert_close(second(FUNCTIONS["nested"]), second(loop), atol=0)


NAMES = ScanCheckpointPolicy(save_block_internals=["act"])
ONE, OTHER = jnp.full(3, 0.7), jnp.linspace(0.2, 0.9, 3)


class Sine(eqx.Module):
    w: jax.Array

    def __call__(self, x, a, b, c):
        return x * a + checkpoint_name(jnp.sin(x * self.w) * b, "act") ** 2 + 0.1 * c


class Padded(eqx.Module):
    """Its pullback has literals among its residuals."""

    w: jax.Array

    def __call__(self, x, a, b, c):
        summed = jax.lax.associative_scan(
            jnp.add, checkpoint_name(x * self.w * c, "act")
        )
        return a * jnp.cos(summed) + jax.lax.pad(b[:2] * x[:2], 0.5, [(0, 1, 0)])


def stacks():
    w = jnp.linspace(0.3, 0.9, 12).reshape(4, 3)
    yield from (Stacked(Padded(w), LAYERS), of_two_kinds(w))


def test_fused_updates_given_one_array_twice():
    def loss(blocks, x):
        return jnp.sum(
            blocks.fold(x, shared(x), shared(x), shared(ONE), remat=NAMES) ** 2
        )

    step = fused_update(loss, optax.sgd(0.1))
    for blocks in stacks():
        found = eqx.filter_jit(step)(blocks, step.init(blocks), ONE)
        expected = jax.tree.map(
            lambda w, g: w - 0.1 * g, blocks, jax.grad(loss)(blocks, ONE)
        )
        assert_close(found.model, expected, rtol=1e-5, atol=1e-6)


def test_outputs_are_of_the_same_types_under_every_policy():
    def value(x, policy):
        layer = lambda x, w: (jnp.sin(x * w), (jnp.asarray(2), jnp.asarray(1.5)))  # noqa: E731
        carry, ys = scan(layer, 3, remat=policy)(x, x)
        return jnp.sum(carry), ys

    for policy in (True, "nested", ScanCheckpointPolicy(first_layers=1), "offload"):
        gradient = jax.jit(
            jax.grad(functools.partial(value, policy=policy), has_aux=True)
        )
        assert [leaf.weak_type for leaf in gradient(jnp.ones(3))[1]] == [True, True]


def test_layers_that_keep_internals_beside_a_python_number_in_the_carry():
    """The forward and the reverse sweep are given it with and without a weak type."""

    def inner(x):
        return jax.lax.scan(
            lambda c, y: (jnp.sin(c) * y + 0.1, c), x, jnp.array([0.5, 1.5])
        )[0]

    def layer(carry, w):
        return inner((carry[0] @ w) * carry[1]), carry[1] * 1.1

    def value(weights, run):
        return jnp.sum(run((jnp.ones(2), 1.25), weights)[0])

    def loop(carry, weights):
        return functools.reduce(layer, weights, carry)

    weights, cut = 0.5 * jnp.ones((3, 2, 2)), ScanCheckpointPolicy(first_layers=1)
    gradient = jax.jit(jax.grad(value), static_argnums=1)
    for policy in (cut, False):
        found = gradient(weights, fold(layer, hax.Axis("l", 3), remat=policy))
        np.testing.assert_allclose(found, gradient(weights, loop), rtol=1e-5)


def test_outputs_that_the_loss_does_not_use_may_be_all_that_has_internals():
    """The forward sweep cannot know which are used, and without them a layer may have
    none that is kept.
    """
    x, start = jnp.linspace(0.5, 1.5, 18).reshape(9, 2), jnp.linspace(0.3, 1, 2)
    layers = {
        "product": lambda c, x: (c * x, jnp.sin(c)),
        "linear": lambda c, x: (0.9 * c + x, jnp.sin(checkpoint_name(2 * c, "h"))),
        "of several": lambda c, x: (c * x, (jnp.sin(c), c**2 * x)),
    }
    cuts = [
        {"nested": True},
        {"nested": 2},
        {"nested": 4},
        {"max_carries": 3},
        {"max_carries": 6},
    ]
    cuts += [{"nested": 3, "first_layers": 2}, {"nested": 3, "save_carries": "offload"}]
    pairs = zip(cuts, itertools.cycle((True, ["h"])), strict=False)
    kept = [ScanCheckpointPolicy(**cut, save_block_internals=own) for cut, own in pairs]
    runs = [(policy, until) for policy in kept for until in (None, lambda c: c[0] > 99)]
    runs = [
        (False, None),
        *((policy, until) for policy, until in runs if not (until and policy.offloads)),
    ]

    def gradient(layer, policy, until):
        run = scan(layer, 9, remat=policy, until=until)
        return jax.grad(lambda x, start: jnp.sum(run(start, x)[0] ** 2), (0, 1))(
            x, start
        )

    @quick_jit
    def gradients():
        return {
            name: [gradient(layer, *run) for run in runs]
            for name, layer in layers.items()
        }

    for name, (expected, *found) in gradients().items():
        for one, run in zip(found, runs[1:], strict=True):
            assert_close(one, expected, name=(name, *run))


def test_effects_of_layers_whose_internals_are_kept_see_the_carry():
    seen = []

    def step(carry, x):
        q, count = carry
        jax.debug.callback(lambda value: seen.append(int(value)), count)
        return (q + jnp.sin(q) * x, count + 1), None

    def loss(x, remat):
        return jnp.sum(
            scan(step, 9, remat=remat)((jnp.float32(1), jnp.float32(0)), x)[0][0]
        )

    policy = ScanCheckpointPolicy(nested=3, save_block_internals=True)
    jax.block_until_ready(
        jax.jit(jax.grad(loss), static_argnums=1)(jnp.ones(9), policy)
    )
    jax.effects_barrier()
    assert sorted({*seen}) == [*range(9)] and {*map(seen.count, range(9))} == {3}


class Counted(eqx.Module):
    weight: jax.Array

    def __call__(self, carry):
        return {"h": jnp.sin(carry["h"] @ self.weight), "k": carry["k"] + 1}


def test_cotangents_of_integers_within_a_loop_that_is_linearized():
    def gradient(h):
        carry = {"h": h, "k": jnp.asarray(1)}
        _, pullback = jax.vjp(
            Stacked(Counted(0.5 * jnp.ones((2, 3, 3))), 2).fold, carry
        )
        return pullback({"h": h, "k": np.zeros((), jax.dtypes.float0)})[0]["h"]

    total = jax.grad(lambda h: jnp.sum(jax.lax.map(lambda a: gradient(h * a), h)))
    tangent = jax.jit(lambda h: jax.linearize(total, h)[1](h))(ONE)
    compiled = jax.jit(total)
    steps = [compiled(ONE * (1 + sign * 1e-3)) for sign in (1, -1)]
    np.testing.assert_allclose(tangent, (steps[0] - steps[1]) / 2e-3, rtol=1e-2)
