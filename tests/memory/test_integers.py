"""Tests of the evaluation of the integers that trip counts depend on, against JAX."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stacked_remat.memory._flops import _Counter
from stacked_remat.memory._integers import MAX_SIZE, as_known


def assert_followed(fn, *args):
    """All results of `fn` are known, and equal to those of the compiled function."""
    values = [np.asarray(arg, dtype=np.int32) for arg in args]
    _, found = _Counter().run(jax.make_jaxpr(fn)(*values), values)
    expected = jax.tree.leaves(jax.jit(fn)(*values))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours is not None and ours.dtype == theirs.dtype


def arithmetic(x, y):
    return x + y, x - y, x * y, -x, abs(x), jnp.sign(y), jax.lax.integer_pow(x, 2)


def division(x, y):
    return jax.lax.div(x, y), jax.lax.rem(x, y), x // y, x % y


def comparison_and_bits(x, y):
    return x < y, x <= y, x > y, x >= y, x == y, x != y, x & y, x | y, x ^ y, ~x, jnp.left_shift(x, 3)


def choice(x, y):
    return jnp.maximum(x, y), jnp.minimum(x, y), jnp.where(x > 0, x, y), jax.lax.clamp(-5, x, 7)


@pytest.mark.parametrize("fn", [arithmetic, division, comparison_and_bits, choice])
def test_large_values_wrap_and_divide_as_on_the_device(fn):
    corners = np.array([-(2**31), -(2**31) + 1, -7, -1, 0, 1, 3, 2**30, 2**31 - 1])
    x, y = np.meshgrid(corners, corners)
    assert_followed(fn, x, y)


def read(index, values):
    table = jnp.stack([values, values + 1])
    return (
        values[index],
        jax.lax.dynamic_slice(table, (index, index), (1, 2)),
        jax.lax.dynamic_update_index_in_dim(values, 9, index, 0),
        values.at[index].set(3, mode="drop"),
        jnp.cumsum(values),
        jnp.max(values),
        jnp.argmax(values),
        jnp.any(values > 3),
        jnp.pad(values[::-1].reshape(5, 1).T, 1),
        jnp.broadcast_to(index, (2, 3)) + jnp.arange(6, dtype=jnp.int32).reshape(2, 3),
    )


@pytest.mark.parametrize("index", [-9, 3, 9])
def test_tables_are_read_and_written_as_on_the_device(index):
    assert_followed(read, index, [4, -3, 0, 17, 2])


def test_loops_and_branches_on_integers_are_followed():
    def fn(n):
        doubled = jax.lax.while_loop(lambda i: i < 100, lambda i: 2 * i, n)
        sums, rows = jax.lax.scan(
            lambda c, k: (c + k, c * k), n, jnp.arange(5, dtype=jnp.int32), reverse=True
        )
        return doubled, sums, rows, jax.lax.cond(n > 2, lambda: n * n, lambda: n)

    for n in (1, 3):
        assert_followed(fn, n)


def test_tables_are_read_within_any_mesh():
    divided = PartitionSpec("data")
    automatic, explicit = (
        jax.make_mesh((8,), ("data",), axis_types=(kind,)) for kind in (AxisType.Auto, AxisType.Explicit)
    )

    def table(like):
        sharding = jax.typeof(like).sharding
        ones = jax.lax.broadcast_in_dim(jnp.int32(1), (8,), (), out_sharding=sharding)
        return ones + jax.lax.broadcasted_iota(jnp.int32, (8,), 0, out_sharding=sharding)

    def traced(fn, mesh):
        with jax.set_mesh(mesh):
            return jax.make_jaxpr(fn)(jax.device_put(np.zeros(8), NamedSharding(mesh, divided)))

    of_explicit = traced(table, explicit)
    of_all = traced(jax.shard_map(table, in_specs=divided, out_specs=divided), automatic)
    (of_devices,) = (eqn.params["jaxpr"] for eqn in of_all.eqns)
    for jaxpr in (of_explicit, of_devices):
        for mesh in (None, automatic, explicit):
            with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
                _, (found,) = _Counter().run(jaxpr, [None])
            np.testing.assert_array_equal(found, np.arange(8) + 1)


def test_an_unknown_input_makes_only_its_results_unknown():
    jaxpr = jax.make_jaxpr(lambda x, y: (x + y, y + 1))(jnp.int32(1), jnp.int32(2))
    _, (both, second) = _Counter().run(jaxpr, [None, np.asarray(2, np.int32)])
    assert both is None
    assert second == 3


def test_only_small_integers_are_followed():
    assert as_known(np.zeros(MAX_SIZE, np.int32)) is not None
    assert as_known(np.zeros(MAX_SIZE + 1, np.int32)) is None
    assert as_known(np.float32(1)) is None
    assert as_known(jax.random.key(0)) is None
    assert as_known("text") is None
