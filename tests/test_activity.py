"""What is read off the jaxpr of a layer before it is differentiated."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import stacked_remat as sr
from stacked_remat._activity import (
    active_outputs,
    forwarded_inputs,
    has_rules,
    surely_read,
)

X = jnp.ones(3)
BYTES = 3 * 4


def jaxpr_of(fn, *args):
    return jax.make_jaxpr(fn)(*args).jaxpr


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvps(lambda tangent, answer, x: 2 * tangent)


@jax.custom_jvp
def with_own_jvp(x):
    return jnp.sin(x)


with_own_jvp.defjvp(lambda primals, tangents: (*primals, *tangents))


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (2 * x, None), lambda residuals, ct: (ct,))


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (jnp.sin, False),
        (jax.jit(jnp.cumsum), False),
        # JAX's own, and those that it makes, return what the functions return
        (jax.nn.softmax, False),
        (jax.nn.relu, False),
        (with_jvp, False),
        (with_own_jvp, True),
        (with_vjp, True),
        (jax.jit(with_vjp), True),
        (lambda x: lax.cond(x[0] > 0, with_vjp, jnp.sin, x), True),
        (sr.fold(lambda x: 2 * x, 4, remat="nested"), True),
    ],
)
def test_custom_rules(fn, expected):
    assert has_rules(jaxpr_of(fn, X)) == expected


def swapped(x, y):
    return y, x


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y: (x, y), [0, 1]),
        (swapped, [1, 0]),
        (jax.jit(swapped), [1, 0]),
        (jax.checkpoint(swapped), [1, 0]),
        (lambda x, y: swapped(*jax.jit(swapped)(x, y)), [0, 1]),
        (lambda x, y: (sr.checkpoint_name(y, "name"), x + y), [1, None]),
        (lambda x, y: jax.jit(lambda x: (x, 2 * x))(y), [1, None]),
        # Numbers are no inputs, nor what a call makes of them
        (lambda x, y: (1.0, jax.jit(lambda x: x)(2.0), x), [None, None, 0]),
        (lambda x, y: (x * 1, -y), [None, None]),
    ],
)
def test_outputs_that_are_inputs(fn, expected):
    assert forwarded_inputs(jaxpr_of(fn, X, X)) == expected


@pytest.mark.parametrize(
    ("fn", "read", "size"),
    [
        (lambda x, y: x + 2 * y, "", 0),
        (lambda x, y: jnp.sin(x) + y, "x", BYTES),
        (lambda x, y: jnp.sin(x) * jnp.exp(x) + y, "x", BYTES),
        (lambda x, y: jnp.sin(x + y), "xy", BYTES),
        (lambda x, y: x + jnp.tanh(jnp.exp(y)), "y", 2 * BYTES),
        (lambda x, y: jnp.dot(x, y), "xy", 2 * BYTES),
        # The other factor may have no derivative
        (lambda x, y: x * y, "", 0),
        (lambda x, y: x * x + y, "x", BYTES),
        (lambda x, y: jnp.maximum(x, x) + (y - y), "", 0),
        (jax.jit(lambda x, y: x + jnp.sin(y)), "y", BYTES),
        (lambda x, y: jax.checkpoint(jnp.sin)(2 * y) + x, "y", BYTES),
        (lambda x, y: x + y + jnp.sin(X), "", 0),
    ],
)
def test_what_derivatives_surely_read(fn, read, size):
    jaxpr = jaxpr_of(fn, X, X)
    of_both = surely_read(jaxpr, [True, True])
    assert of_both == (["x" in read, "y" in read], size)
    of_one, _ = surely_read(jaxpr, [True, False])
    assert of_one == ["x" in read, False]


@pytest.mark.parametrize(
    ("fn", "of_x"),
    [
        (lambda x, y: (x + y, y), [True, False]),
        # Through an integer there is no derivative
        (lambda x, y: (jnp.float32(jnp.int32(x)), y * x), [False, True]),
        (jax.jit(lambda x, y: (y, x)), [False, True]),
        (
            lambda x, y: lax.cond(y[0] > 0, lambda: (x, y), lambda: (y, y)),
            [True, False],
        ),
        (
            lambda x, y: lax.cond(x[0] > 0, lambda: (y, y), lambda: (y, x)),
            [False, True],
        ),
        (lambda x, y: lax.scan(lambda c, y: (c + y, c), x[0], y), [True, True]),
        (lambda x, y: (x.shape[0], y), [False, False]),
    ],
)
def test_outputs_that_depend_on_an_input(fn, of_x):
    jaxpr = jaxpr_of(fn, X, X)
    assert active_outputs(jaxpr, [True, False]) == of_x
    assert active_outputs(jaxpr, [False, False]) == [False, False]
