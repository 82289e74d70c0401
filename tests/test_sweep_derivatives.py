"""Second and third derivatives of sweeps inside loops, branches and other sweeps."""

import functools
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stacked_remat import ScanCheckpointPolicy, fold

from .sweep_cases import assert_close, jit

Outer, Inner = hax.Axis("outer", 4), hax.Axis("inner", 3)
WIDTH = 5  # unlike any number of layers

OFFLOADED = ScanCheckpointPolicy(nested=2, save_carries="offload")
OFFLOADED_AFTER_FIRST = ScanCheckpointPolicy(nested=2, save_carries="offload", first_layers=1)
FIRST_LAYERS = ScanCheckpointPolicy(nested=True, first_layers=1)


def layer(carry, weight):
    return jnp.sin(carry * weight)


def arguments():
    weights = jnp.linspace(0.4, 0.9, Outer.size * WIDTH).reshape(Outer.size, WIDTH)
    return weights, jnp.linspace(-0.5, 0.8, WIDTH)


def penalty(value):
    """A function of the gradient, whose gradient is a second derivative."""

    def of_gradient(*args):
        return sum(jnp.sum(leaf**2) for leaf in jax.grad(value, (0, 1))(*args))

    return of_gradient


def inner_fold(remat, carry, weight):
    return fold(layer, Inner, remat=remat)(carry, jnp.stack([weight, weight**2, jnp.sin(weight)]))


def in_scan(remat, weights, x):
    carry, _ = lax.scan(lambda carry, weight: (inner_fold(remat, carry, weight), None), x, weights)
    return jnp.sum(carry**2)


def in_map(remat, weights, x):
    return jnp.sum(lax.map(lambda weight: inner_fold(remat, x, weight), weights) ** 2)


def in_fold(outer, inner, weights, x):
    return jnp.sum(fold(functools.partial(inner_fold, inner), Outer, remat=outer)(x, weights) ** 2)


@functools.cache
def plain_second(value: Any, *remats: Any):
    return jit(jax.grad(penalty(functools.partial(value, *remats)), (0, 1)))(*arguments())


def check_second(value: Any, *remats: Any):
    actual = jit(jax.grad(penalty(functools.partial(value, *remats)), (0, 1)))(*arguments())
    assert_close(actual, plain_second(value, *(False for _ in remats)))


@pytest.mark.parametrize("around, remat", [(in_scan, "nested"), (in_scan, OFFLOADED), (in_map, FIRST_LAYERS)])
def test_gradient_of_gradient_of_a_fold_in_a_loop(around, remat):
    check_second(around, remat)


@pytest.mark.parametrize("outer, inner", [(False, "nested"), (True, OFFLOADED), ("nested", FIRST_LAYERS)])
def test_gradient_of_gradient_of_a_stack_in_a_stack(outer, inner):
    check_second(in_fold, outer, inner)


def in_branch(remat, weights, x):
    def value():
        return jnp.sum(inner_fold(remat, x, weights[0]) ** 2)

    return lax.cond(x[0] < 0, value, lambda: jnp.float32(0))


@pytest.mark.parametrize("remat", [OFFLOADED, OFFLOADED_AFTER_FIRST])
def test_gradient_of_gradient_of_offloaded_boundaries_in_a_branch(remat):
    check_second(in_branch, remat)


def test_third_derivative_of_offloaded_boundaries_in_a_jitted_function():
    def third(remat, x):
        value = jax.jit(lambda x: fold(layer, Inner, remat=remat)(x, jnp.linspace(0.5, 1.0, Inner.size)))
        return jit(jax.grad(jax.grad(jax.grad(value))))(x)

    assert_close(third(OFFLOADED, 0.7), third(False, 0.7))
