"""Second and third derivatives of sweeps inside loops, branches and other sweeps."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stacked_remat import (
    ScanCheckpointPolicy,
    Stacked,
    StackedPattern,
    checkpoint_name,
    fold,
    scan,
    streaming,
)

from .sweep_cases import assert_close, jit

Outer, Inner = hax.Axis("outer", 4), hax.Axis("inner", 3)
WIDTH = 5  # unlike any number of layers

OFFLOADED = ScanCheckpointPolicy(nested=2, save_carries="offload")
FIRST_LAYERS = ScanCheckpointPolicy(nested=True, first_layers=1)


def layer(carry, weight):
    return jnp.sin(carry * weight)


def arguments():
    weights = jnp.linspace(0.4, 0.9, Outer.size * WIDTH).reshape(Outer.size, WIDTH)
    return weights, jnp.linspace(-0.5, 0.8, WIDTH)


def test_third_derivatives_in_a_jitted_function():
    def third(remat, x):
        value = jax.jit(lambda x: fold(layer, Inner, remat=remat)(x, jnp.linspace(0.5, 1.0, Inner.size)))
        return jax.grad(jax.grad(jax.grad(value)))(x)

    expected, *found = jit(lambda x: [third(remat, x) for remat in (False, "nested", OFFLOADED)])(0.7)
    assert_close(found, [expected] * 2)


def with_rule(fn, backward):
    """A function whose derivative rule is not its derivative."""
    ruled = jax.custom_vjp(fn)
    ruled.defvjp(lambda x: (fn(x), x), backward)
    return ruled


straight_through = with_rule(lambda x: jnp.round(4 * x) / 4, lambda x, ct: (ct,))
scaled = with_rule(jnp.sin, lambda x, ct: (3 * ct * jnp.cos(x) ** 2,))
clipped = with_rule(lambda x: x**3, lambda x, ct: (jnp.clip(ct * 3 * x**2, -0.3, 0.3),))


def layer_by_rules(x, weight):
    hidden = checkpoint_name(scaled(x * weight), "hidden")
    x = x + clipped(hidden + weight) + straight_through(hidden) * weight
    return x, jnp.sum(x)


class RuledBlock(eqx.Module):
    weight: jax.Array  # a matrix, so that it is moved to the host

    def __call__(self, x):
        return layer_by_rules(x, self.weight[0])


def value(carry, outputs):
    return jnp.sum(carry**2) + jnp.sum(outputs**3)


def blocks(weights, remat):
    stack = jnp.stack([weights, weights], 1)
    return Stacked(RuledBlock(stack), Outer.resize(len(weights)), remat)


def of_kinds(remat, weights, x):
    stacks = {"a": blocks(weights[::2], True), "b": blocks(weights[1::2], True)}
    carry, found = StackedPattern(stacks, ("a", "b") * 2, Outer, remat).scan(x)
    return value(carry, jnp.stack([found["a"], found["b"]], 1).reshape(-1))


def on_host(remat, weights, x):
    return value(*streaming.to_host(blocks(weights, remat)).scan(x))


def by_scan(remat, weights, x):
    return value(*scan(layer_by_rules, Outer, remat=remat)(x, weights))


def plain(weights, x):
    return value(*lax.scan(layer_by_rules, x, weights))


def derivatives(fn, is_on_host):
    def of_gradient(*args):
        return sum(jnp.sum(jnp.sin(3 * leaf)) for leaf in jax.grad(fn, (0, 1))(*args))

    def run(weights, x):
        gradient = jax.grad(fn, (0, 1))
        tangents = jnp.sin(5 * weights), jnp.cos(3 * x)
        # JAX puts zero tangents of stacks on the host on the device.
        along = () if is_on_host else jax.jvp(gradient, (weights, x), tangents)[1]
        return gradient(weights, x), jax.grad(of_gradient, (0, 1))(weights, x), along

    return run


KEPT = ScanCheckpointPolicy(nested=True, save_block_internals=["hidden"])
OFTEN = [(by_scan, "nested"), (of_kinds, KEPT), (by_scan, FIRST_LAYERS)]
RARE = [False, "offload", ScanCheckpointPolicy(max_carries=2), OFFLOADED, "recompute"]
RARE = [(by_scan, remat) for remat in (*RARE, ScanCheckpointPolicy(offload_block_internals=["hidden"]))]
RARE += [(of_kinds, FIRST_LAYERS), (on_host, "nested")]


@pytest.mark.parametrize("cases", [OFTEN, pytest.param(RARE, marks=pytest.mark.deep)], ids=["few", "all"])
def test_second_derivatives_are_those_of_rules_that_are_not_the_derivative(cases):
    weights, x = arguments()
    cases = {(of.__name__, str(remat)): (of, remat) for of, remat in cases}

    @jit
    def run(weights, x):
        found = {
            case: derivatives(functools.partial(of, remat), of is on_host)(weights, x)
            for case, (of, remat) in cases.items()
        }
        return derivatives(plain, False)(weights, x), found

    expected, found = run(weights, x)
    for case, result in found.items():
        try:
            assert_close(result, expected if result[2] else (*expected[:2], ()))
        except AssertionError as error:
            raise AssertionError(f"under {case}") from error
