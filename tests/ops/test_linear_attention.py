"""Tests of linear attention against the recurrence, one position at a time."""

import importlib

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat.ops import linear_attention, linear_attention_step

from ..blocks import assert_close_to_scale, quick_jit
from ..random_arrays import normal

module = importlib.import_module("stacked_remat.ops.linear_attention")

Batch, Heads, Group = Axis("batch", 2), Axis("heads", 2), Axis("group", 3)
Key, Value = Axis("key", 4), Axis("value", 5)


def arguments(Pos, *, by_channel=False, dtype=jnp.float32, scale=1.0):
    """Query, key, value, log decays and strengths."""
    of_keys = (Batch, Pos, Heads, Key)
    query, key = (normal(seed, *of_keys, dtype=dtype) for seed in (0, 1))
    norm = hax.sqrt(hax.sum(key * key, Key))
    value = normal(2, Batch, Pos, Group, Heads, Value, dtype=dtype)
    decayed = (Key,) if by_channel else ()
    log_decay = normal(3, Batch, Pos, Heads, Group, *decayed, dtype=dtype)
    beta = hax.nn.sigmoid(normal(4, Batch, Pos, Heads, Group, dtype=dtype))
    return query, key / norm, value, -scale * hax.nn.softplus(log_decay), beta


def recurrence(
    query,
    key,
    value,
    log_decay,
    beta,
    Pos,
    Key=Key,
    Value=Value,
    *,
    documents=None,
    lengths=None,
    state=None,
):
    """The output and the last state, in float64, a position at a time."""
    if state is None:
        state = hax.zeros((Batch, Heads, Group, Key, Value), jnp.float64)
    query, key, value, log_decay, beta, state = jax.tree.map(
        lambda x: x.astype(jnp.float64), (query, key, value, log_decay, beta, state)
    )

    def step(before, i):
        at = lambda x, i=i: x[Pos.name, i]  # noqa: E731
        state = before
        if documents is not None:
            is_other = at(documents) != at(documents, jnp.maximum(i - 1, 0))
            state = hax.where(is_other, 0.0, state)
        state = state * hax.exp(at(log_decay))
        update = at(value)
        if beta is not None:
            update = at(beta) * (update - hax.dot(state, at(key), axis=Key))
        state = state + hax.dot(at(key), update, axis=())
        output = hax.dot(state, at(query), axis=Key)
        if lengths is not None:
            state = hax.where(i < lengths, state, before)
        order = [axis for axis in value.axes if axis.name != Pos.name]
        return state.rearrange(before.axes), output.rearrange(order)

    with jax.numpy_dtype_promotion("standard"):
        state, output = hax.scan(step, Pos)(state, jnp.arange(Pos.size))
    return output.rearrange(value.axes), state


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 8 positions in groups of 2."""
    monkeypatch.setattr(module, "_CHUNK", 8)
    monkeypatch.setattr(module, "_GROUP", 2)


def with_gradients(attend, Pos):
    """The results and the gradients of all arguments, of a sum over what is no
    padding.
    """

    @quick_jit
    def run(arrays, options):
        def loss(arrays, state):
            given = options if state is None else options | {"state": state}
            results = attend(*arrays, Pos, Key, Value, **given)
            output, last = jax.tree.map(jnp.sin, results)
            if "lengths" in options:
                position = hax.arange(Pos).broadcast_axis(Batch)
                output = hax.where(position < options["lengths"], output, 0.0)
            total = hax.sum(output.astype(last.dtype)) + hax.sum(last)
            return total.scalar(), (output, last)

        rest = dict(options)
        state = rest.pop("state", None)
        options = rest
        return jax.value_and_grad(loss, (0, 1), has_aux=True)(arrays, state)

    return run


DOCUMENTS = [[0] * 3 + [1] * 5 + [0] * 22 + [2], [4] * 17 + [5, 4, 5] + [6] * 11]


@pytest.mark.parametrize("has_beta", [True, False])
@pytest.mark.parametrize("by_channel", [False, True])
def test_values_and_gradients_are_those_of_the_recurrence(
    by_channel, has_beta, small_chunks
):
    Pos = Axis("position", 31)
    ours, by_position = (
        with_gradients(attend, Pos) for attend in (linear_attention, recurrence)
    )
    with jax.enable_x64(True):
        arrays = arguments(Pos, by_channel=by_channel, dtype=jnp.float64)
        arrays = arrays if has_beta else (*arrays[:-1], None)
        options = {
            "documents": hax.named(jnp.array(DOCUMENTS), (Batch, Pos)),
            "lengths": hax.named(jnp.array([31, 20]), Batch),
            "state": normal(5, Batch, Heads, Group, Key, Value, dtype=jnp.float64),
        }
        found, expected = ours(arrays, options), by_position(arrays, options)
        assert_close_to_scale(found, expected, 1e-11)
        with_float32 = ours(*jax.tree.map(as_float32, (arrays, options)))
        assert {x.dtype for x in jax.tree.leaves(with_float32)} == {
            jnp.dtype("float32")
        }
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), with_float32)
        assert_close_to_scale(wide, expected, 1e-5)


def as_float32(x):
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("scale", [1e4, 1e30, np.inf])
def test_extreme_decays_are_exact(scale, by_channel, small_chunks):
    """Weak decays that follow strong ones are not rounded away."""
    Pos = Axis("position", 24)
    query, key, value, log_decay, beta = arguments(Pos, by_channel=by_channel)
    strong = normal(6, *log_decay.axes) > 0.5
    log_decay = hax.where(strong, -scale, 0.01 * log_decay)
    arrays = query, key, value, log_decay, beta
    found = with_gradients(linear_attention, Pos)(arrays, {})
    with jax.enable_x64(True):
        expected = with_gradients(recurrence, Pos)(arrays, {})
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), found)
        expected = jax.tree.map(lambda x: x.astype(jnp.float64), expected)
    assert_close_to_scale(wide, expected, 1e-5)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("has_beta", [True, False])
def test_positions_one_by_one_or_in_parts_are_those_of_the_whole(
    has_beta, by_channel, small_chunks
):
    Pos = Axis("position", 12)
    arrays = arguments(Pos, by_channel=by_channel)
    arrays = arrays if has_beta else (*arrays[:-1], None)
    expected, last = quick_jit(linear_attention, static_argnums=(5, 6, 7))(
        *arrays, Pos, Key, Value
    )

    @quick_jit
    def in_parts(arrays):
        """The first seven by one call, then one by one."""
        first, state = linear_attention(
            *(part(x, slice(0, 7)) for x in arrays), Pos.resize(7), Key, Value
        )
        outputs = [first]
        for i in range(7, Pos.size):
            one = [part(x, i) for x in arrays]
            output, state = linear_attention_step(*one, Key, Value, state)
            outputs.append(output.broadcast_axis(Pos.resize(1)))
        return hax.concatenate(Pos.name, outputs).rearrange(value_axes), state

    def part(x, where):
        return None if x is None else x[Pos.name, where]

    value_axes = arrays[2].axes
    found, state = in_parts(arrays)
    assert state.axes == last.axes
    assert_close_to_scale((found, state), (expected, last), 1e-5)
