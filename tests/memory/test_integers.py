"""Integers that steer loops are followed as JAX itself would compute them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from stacked_remat.memory._flops import _Walk
from stacked_remat.memory._integers import MAX_SIZE, as_known

I32 = st.integers(-(2**31), 2**31 - 1)
SMALL = st.integers(-20, 20)


def follow(fn, *args):
    values = [np.asarray(arg, dtype=np.int32) for arg in args]
    _, results = _Walk().run(jax.make_jaxpr(fn)(*values), values)
    return results, [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(fn)(*values))]


BINARY = {
    "arithmetic": lambda x, y: (x + y, x - y, x * y, -x, abs(x), jnp.sign(y)),
    "division": lambda x, y: (jax.lax.div(x, y), jax.lax.rem(x, y), jax.lax.integer_pow(x, 2)),
    "python division": lambda x, y: (x // y, x % y),
    "comparison": lambda x, y: (x < y, x <= y, x > y, x >= y, x == y, x != y),
    "bits": lambda x, y: (x & y, x | y, x ^ y, ~x, jnp.left_shift(x, 3)),
    "choice": lambda x, y: (
        jnp.maximum(x, y),
        jnp.minimum(x, y),
        jnp.where(x > 0, x, y),
        jax.lax.clamp(-5, x, 7),
    ),
    "shape": lambda x, y: (
        jnp.stack([x, y])[::-1].reshape(2, 1).T,
        jnp.broadcast_to(x, (2, 3)),
        jnp.arange(4, dtype=jnp.int32).reshape(2, 2)[1],
        jnp.pad(x[None], 1),
    ),
}


@pytest.mark.parametrize("name", BINARY)
@settings(max_examples=20)
@given(x=I32, y=I32)
def test_large_values_wrap_and_divide_as_on_the_device(name, x, y):
    found, expected = follow(BINARY[name], x, y)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours is not None and ours.dtype == theirs.dtype


def read(index, values):
    table = jnp.stack([values, values + 1])
    return (
        values[index],
        jax.lax.dynamic_slice(table, (index, index), (1, 2)),
        jax.lax.dynamic_update_index_in_dim(values, 9, index, 0),
        values.at[index].set(3, mode="drop"),
        table[:, index],
        jnp.cumsum(values),
        jax.lax.cumsum(values, reverse=True),
        jax.lax.cummax(values),
        jnp.sum(table, axis=0),
        jnp.max(values),
        jnp.argmax(values),
        jnp.any(values > 3),
        jnp.all(values > 3),
    )


@settings(max_examples=20)
@given(index=SMALL, values=st.lists(SMALL, min_size=5, max_size=5))
def test_tables_are_read_and_written_as_on_the_device(index, values):
    found, expected = follow(read, index, values)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_loops_and_branches_on_integers_are_followed():
    def fn(n):
        doubled = jax.lax.while_loop(lambda i: i < 100, lambda i: 2 * i, n)
        sums, rows = jax.lax.scan(
            lambda c, k: (c + k, c * k), n, jnp.arange(5, dtype=jnp.int32), reverse=True
        )
        return doubled, sums, rows, jax.lax.cond(n > 2, lambda: n * n, lambda: n)

    for n in (1, 3):
        found, expected = follow(fn, n)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_an_unknown_input_makes_only_its_results_unknown():
    jaxpr = jax.make_jaxpr(lambda x, y: (x + y, y + 1))(jnp.int32(1), jnp.int32(2))
    _, (both, second) = _Walk().run(jaxpr, [None, np.asarray(2, np.int32)])
    assert both is None
    assert second == 3


def test_only_small_integers_are_followed():
    assert as_known(np.zeros(MAX_SIZE, np.int32)) is not None
    assert as_known(np.zeros(MAX_SIZE + 1, np.int32)) is None
    assert as_known(np.float32(1)) is None
    assert as_known(jax.random.key(0)) is None
    assert as_known("text") is None
