"""Attention of positions that are divided over devices is that of all positions on
one.
"""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import PartitionSpec

from stacked_remat.ops import attention, causal_attention
from stacked_remat.ops._attention_backends import BACKENDS
from stacked_remat.ops._attention_rule import attend_in_context
from stacked_remat.ops._attention_splash import splash_kernel
from stacked_remat.ops._backends import Backend
from tests.ops.test_per_device import mesh

from ..blocks import assert_close
from ..random_arrays import normal

Batch, KVHeads, Group, HeadDim = (
    Axis("batch", 2),
    Axis("kv", 2),
    Axis("group", 2),
    Axis("dim", 4),
)


def arguments(length):
    Pos = Axis("pos", length)
    query = normal(0, Batch, KVHeads, Pos, Group, HeadDim)
    key, value = (normal(seed, Pos, Batch, KVHeads, HeadDim) for seed in (1, 2))
    sinks = normal(3, KVHeads, Group)
    # Documents that begin at other places in each row, and padding.
    starts = jnp.stack(
        [jnp.arange(length) // 5, jnp.minimum(jnp.arange(length) // 3, 2)]
    )
    return Pos, (query, key, value, sinks), hax.named(starts, (Batch, Pos))


@pytest.mark.parametrize(
    ("options", "block", "length", "mapping"),
    [
        ({}, None, 16, {"pos": "data"}),
        # 3 positions a device, which are no equal strips for 4
        pytest.param({"window": 3}, None, 12, {"pos": "data"}, marks=pytest.mark.deep),
        pytest.param(
            {"window": 7},
            2,
            32,
            {"batch": "model", "pos": "data"},
            marks=pytest.mark.deep,
        ),
        pytest.param(
            {"backend": "exact"},
            None,
            16,
            {"pos": ["data", "model"]},
            marks=pytest.mark.deep,
        ),
        ({"window": 150}, 128, 512, {"batch": "data", "kv": "heads", "pos": "model"}),
        pytest.param({}, 128, 2048, {"pos": ["data", "model"]}, marks=pytest.mark.deep),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_one_device(
    options, block, length, mapping, monkeypatch
):
    """With blocks of 128 positions by the splash kernels."""
    if block is not None:
        monkeypatch.setattr(attention, "_BLOCKS", (block, block))
    if is_splash := block == 128:
        monkeypatch.setitem(
            BACKENDS, "blockwise", Backend(splash_kernel(interpret=True))
        )
    Pos, args, documents = arguments(length)

    @functools.partial(jax.jit, static_argnums=2)
    def found(args, documents, backend="auto"):
        def loss(args):
            query, key, value, sinks = args
            given = {
                "documents": documents,
                "sinks": sinks,
                "backend": backend,
            } | options
            attended = causal_attention(
                query, key, value, Pos, KVHeads, HeadDim, **given
            )
            return hax.sum(attended**2).scalar(), attended

        return jax.value_and_grad(loss, has_aux=True)(args)

    axes = {"data": 2, "model": 2, "heads": 2} if is_splash else {"data": 4, "model": 2}
    wanted = found(args, documents, "exact" if is_splash else "auto")
    with jax.set_mesh(mesh(**axes)), hax.axis_mapping(mapping):
        got = found(hax.shard(args), hax.shard(documents))
    assert_close(got, wanted, 1e-4, 1e-5)


def test_devices_have_as_many_keys_to_see():
    devices, positions = 8, jnp.arange(4096, dtype=jnp.int32)[None, :, None]

    def count(query, key, value, sight, strips):
        assert strips == devices
        own = jnp.all(query[0, :, 0] == sight.rows)
        return jnp.full_like(query, jnp.where(own, jnp.sum(sight.rows + 1), 0))

    def local(own):
        return attend_in_context(count, own, own, own, None, ("data",))

    divided = PartitionSpec(None, "data")
    with jax.set_mesh(mesh(data=devices)):
        run = jax.shard_map(local, in_specs=divided, out_specs=divided, check_vma=False)
        back = np.asarray(jax.jit(run)(positions)).reshape(devices, devices, -1)
    seen = back[0, :, 0]
    np.testing.assert_array_equal(back, np.broadcast_to(seen[:, None], back.shape))
    assert 0 < max(seen) < 1.11 * np.mean(seen)  # 1.88 times without an exchange
    assert sum(seen) == np.sum(positions + 1)
