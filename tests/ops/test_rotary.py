"""Rotary embedding by its definition, a pair of coordinates and a position at a time."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from stacked_remat.ops import apply_rotary, rotary_table

Batch, Pos, HeadDim = Axis("batch", 2), Axis("position", 5), Axis("head_dim", 6)
KVHeads = Axis("kv_heads", 2)
THETA = 100.0


def normal(seed, *axes):
    return hax.random.normal(jax.random.key(seed), axes)


def test_rotation_turns_each_pair_by_its_angle():
    x = normal(0, Pos, HeadDim)
    turned = apply_rotary(x, rotary_table(hax.arange(Pos), HeadDim, theta=THETA), HeadDim).array
    for position in range(Pos.size):
        for pair in range(3):
            angle = position * THETA ** (-2 * pair / HeadDim.size)
            a, b = float(x.array[position, pair]), float(x.array[position, pair + 3])
            expected = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
            np.testing.assert_allclose(turned[position, pair::3], expected, atol=1e-5)


def test_rotation_keeps_lengths_dtype_and_the_first_position():
    x = normal(1, Batch, KVHeads, Pos, HeadDim)
    table = rotary_table(hax.arange(Pos), HeadDim, theta=THETA)
    turned = apply_rotary(x, table, HeadDim)
    assert turned.axes == x.axes
    np.testing.assert_allclose(
        hax.sum(turned * turned, HeadDim).array, hax.sum(x * x, HeadDim).array, rtol=1e-5
    )
    np.testing.assert_allclose(turned[Pos, 0].array, x[Pos, 0].array, atol=1e-6)
    assert apply_rotary(x.astype(jnp.bfloat16), table, HeadDim).dtype == jnp.bfloat16


def test_scores_depend_on_the_distance_alone():
    query, key = normal(2, HeadDim), normal(3, HeadDim)

    def scores(first):
        table = rotary_table(hax.arange(Pos) + first, HeadDim, theta=THETA)
        turned = apply_rotary(query.broadcast_axis(Pos), table, HeadDim)
        keys = apply_rotary(key.broadcast_axis(Pos), table, HeadDim).rename({Pos: "key_position"})
        return hax.dot(turned, keys, axis=HeadDim).array

    np.testing.assert_allclose(scores(0), scores(1000), atol=1e-4)
