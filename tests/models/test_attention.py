"""Attention of the decoder is causal."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from models.decoder.attention import Attention
from models.qwen3 import Qwen3MoeConfig
from stacked_remat.ops import rotary_table

from ..random_arrays import normal

Batch, Pos = Axis("batch", 2), Axis("position", 5)
THETA = 100.0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_position_does_not_see_later_ones(dtype):
    config = Qwen3MoeConfig(hidden_dim=16, num_heads=4, num_kv_heads=2)
    attention = Attention.init(config, config.layer(0), key=jax.random.key(0))
    attention = jax.tree.map(lambda leaf: leaf.astype(dtype), attention)
    rotary = rotary_table(hax.arange(Pos), config.HeadDim, theta=THETA)
    x = normal(7, Batch, Pos, config.Embed).astype(dtype)
    changed = hax.where(hax.arange(Pos) < 3, x, -x)
    run = jax.jit(lambda x: attention(x, rotary, Pos))
    before, after = run(x), run(changed)
    assert before.dtype == dtype and before.axes == x.axes
    np.testing.assert_array_equal(before.array[:, :3], after.array[:, :3])
    assert jnp.any(before.array[:, 3:] != after.array[:, 3:])
