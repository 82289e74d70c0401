"""Tests of the splash kernels: interpreted against exact attention, and compiled if
libtpu is installed.
"""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import NamedSharding, PartitionSpec

from stacked_remat import memory
from stacked_remat.ops import causal_attention
from stacked_remat.ops._attention_backends import (
    BACKENDS,
    AttentionCall,
    exact_attention,
)
from stacked_remat.ops._attention_rule import Blocks, Ranges, Sight, attend_by
from stacked_remat.ops._attention_splash import (
    most_seen,
    splash_block_size,
    splash_kernel,
    table,
)

from ..blocks import assert_close
from ..random_arrays import normal
from .test_attention import attended_with_gradients

DOCUMENTS = np.stack(
    [np.repeat([0, 1, 2], [100, 30, 126]), np.repeat([7, 3], [200, 56])]
)


@pytest.mark.parametrize(
    ("value_dim", "softcap"), [(128, None), (64, 0.7), (256, None)]
)
def test_values_and_gradients_are_those_of_exact_attention(value_dim, softcap):
    """With several rows and key heads, documents and a window they are in
    `test_context_parallel.py`.
    """
    query = normal(0, 1, 256, 1, 2, 128)
    cotangent = normal(1, 1, 256, 1, 2, value_dim)
    key = normal(2, 1, 256, 1, 128)
    value = normal(3, 1, 256, 1, value_dim)
    sinks = jnp.array([[-2.0, 3.0]])

    kernel = functools.partial(attend_by, splash_kernel(interpret=True))
    found, expected = (
        attended_with_gradients(of, Blocks(0.1, 128, softcap=softcap))(
            query, key, value, cotangent, sinks
        )
        for of in (kernel, exact_attention)
    )
    assert_close(found, expected, 1e-4, 3e-5)


@pytest.mark.parametrize("window", [None, 1, 129, 200])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("rows", [np.arange(256), np.r_[64:128, 192:256]])
def test_visible_blocks_are_computed_once(window, documents, rows):
    starts = None if documents is None else jnp.asarray(documents[:1])
    sight, size = Sight.of(starts, jnp.asarray(rows) if len(rows) < 256 else None), 64
    queries, slots = len(rows), np.arange(256)
    first = sight.first(queries, window)
    visible = slots <= rows[:, None]
    visible &= slots >= (0 if first is None else np.asarray(first)[0][:, None])
    wanted = visible.reshape(queries // size, size, 4, size).any((1, 3))
    np.testing.assert_array_equal(sight.blocks_seen(queries, 256, size, window), wanted)
    for seen in (wanted, wanted.T):
        read, computed = map(
            np.asarray, table(Ranges.of(seen), most_seen(seen.shape[1], size, window))
        )
        found = np.zeros_like(seen, int)
        np.add.at(found, (np.nonzero(computed)[0], read[computed == 1]), 1)
        np.testing.assert_array_equal(found, seen)


@pytest.mark.parametrize(
    ("positions", "window", "row_bytes", "size"),
    [
        ([128], None, 256, 128),
        ([384], None, 256, 384),
        ([640], None, 256, 128),
        ([262_144], None, 1024, 512),
        ([524_288], None, 256, 1024),
        ([2**20], 4096, 256, 512),
        (
            [384, 3072, 24_576],
            None,
            256,
            384,
        ),  # a strip, the queries of a device, all keys
        ([8192, 65_536, 2**20], None, 256, 512),
        ([8192, 65_536, 2**21], None, 256, 1024),
        ([100], None, 256, "a multiple of 128 consecutive positions, not 100"),
        (
            [524_288],
            None,
            1024,
            "1024 x 1024 blocks of 512 positions does not fit a TPU's scalar memory",
        ),
        ([2**20], None, 256, "1024 x 1024 blocks of 1024 positions does not fit"),
    ],
)
def test_blocks_divide_the_sequence_and_their_table_fits(
    positions, window, row_bytes, size
):
    strip, rows, columns = positions * 3 if len(positions) == 1 else positions
    found = splash_block_size(strip, rows, columns, window, row_bytes)
    assert found == size if isinstance(size, int) else size in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(platform="cuda"), "it runs on TPUs, and the program is for 'cuda'"),
        (dict(dtype=jnp.dtype("float16")), "takes bfloat16 and float32, not float16"),
        (dict(position=100), "a multiple of 128 consecutive positions, not 100"),
        (dict(head_dim=1024), "for heads up to 512 wide, not 1024"),
        (dict(value_dim=640), "for heads up to 512 wide, not 640"),
        (
            dict(position=2**20, blocks=Blocks(1.0, 8)),
            "1024 x 1024 blocks of 1024 positions",
        ),
        (dict(among=8), None),
        (dict(among=16), "a multiple of 128 consecutive positions, not 64"),
        (
            dict(devices=4),
            (
                "the compiler can't divide it among 4 devices: call it inside"
                " jax.shard_map"
            ),
        ),
        ({}, None),
    ],
)
def test_it_says_why_it_does_not_support_a_call(change, message):
    call = dict(
        platform="tpu", dtype=jnp.dtype("bfloat16"), position=1024, head_dim=128
    )
    call |= dict(value_dim=64, has_documents=True, blocks=Blocks(1.0, 8, window=4))
    reason = BACKENDS["splash"].why_not(AttentionCall(**(call | change)))
    assert reason is None if message is None else message in reason


def attention_and_gradients(backend="auto", **options):
    def run(query, key, value, cotangent):
        Pos, KVHeads, HeadDim = key.axes[-3:]
        attend = functools.partial(
            causal_attention,
            Pos=Pos,
            KVHeads=KVHeads,
            HeadDim=HeadDim,
            backend=backend,
            **options,
        )
        output, pullback = jax.vjp(attend, query, key, value)
        return output, pullback(cotangent)

    return run


def shapes(
    length,
    kv_heads,
    group,
    head_dim,
    dtype=jnp.bfloat16,
    batch=(),
    sharding=None,
    value_dim=None,
):
    """Query, key, value and a cotangent of the result."""

    def named(*axes):
        shape = tuple(axis.size for axis in axes)
        return hax.NamedArray(
            jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), axes
        )

    Batch = tuple(Axis("batch", size) for size in batch)
    Pos, KVHeads, HeadDim = (
        Axis("position", length),
        Axis("kv_heads", kv_heads),
        Axis("head_dim", head_dim),
    )
    ValueDim = HeadDim.resize(value_dim or head_dim)
    Group = Axis("heads_per_kv", group)
    return (
        named(*Batch, Pos, KVHeads, Group, HeadDim),
        named(*Batch, Pos, KVHeads, HeadDim),
        named(*Batch, Pos, KVHeads, ValueDim),
        named(*Batch, Pos, KVHeads, Group, ValueDim),
    )


@pytest.mark.target("tpu")
@pytest.mark.parametrize(
    ("backend", "most", "products"),
    [("auto", 1.9, 9), pytest.param("blockwise", 2.2, 7, marks=pytest.mark.slow)],
)
def test_65536_positions_on_a_tpu(backend, most, products):
    """32 heads of 128 on 4 key heads in bfloat16, forward and backward: queries alone
    are 0.5 GiB.
    """
    found = memory.report(
        attention_and_gradients(backend=backend),
        *shapes(65_536, 4, 8, 128),
        target="v5p",
    )
    assert found.temporaries < most * 2**30
    visible = 512**2 * 128 * 129 // 2
    outputs_times_cotangents = 32 * 2 * 65_536 * 128 if backend == "auto" else 0
    assert (
        found.flops.matmul
        == products * 2 * 32 * visible * 128 + outputs_times_cotangents
    )
    assert not found.flops.too_low


@pytest.mark.target("tpu")
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype", "softcap"),
    [
        (64, 64, jnp.bfloat16, None),
        (200, 200, jnp.bfloat16, 50.0),
        (512, 512, jnp.float32, None),
        (192, 128, jnp.bfloat16, None),
        (72, 200, jnp.float32, 50.0),
    ],
)
def test_a_tpu_takes_any_width_with_documents_and_sinks(
    head_dim, value_dim, dtype, softcap
):
    documents = hax.arange(Axis("position", 1024)) // 100
    sinks = hax.ones((Axis("kv_heads", 1), Axis("heads_per_kv", 2)))
    call = attention_and_gradients(
        "splash", documents=documents, window=600, sinks=sinks, softcap=softcap
    )
    inputs = shapes(1024, 1, 2, head_dim, dtype, value_dim=value_dim)
    found = memory.report(call, *inputs, target="v5p")
    assert found.temporaries > 0 and found.flops.matmul > 0


@pytest.mark.target("tpu")
def test_on_several_devices_it_works_only_where_axes_are_mapped():
    mesh = jax.sharding.Mesh(memory.find_target("v5p").devices(4), ("data",))
    spec = PartitionSpec("data")
    inputs = shapes(1024, 1, 2, 128, batch=(4,), sharding=NamedSharding(mesh, spec))

    def flops(call):
        return memory.report(call, *inputs, target="v5p").flops

    with pytest.raises(ValueError, match="can't divide it among 4 devices"):
        flops(attention_and_gradients(backend="splash"))
    with jax.set_mesh(mesh), hax.axis_mapping({"batch": "data"}):
        splash = flops(attention_and_gradients()).matmul
    # The kernels compute scores twice in the backward pass: 9 products per block, not
    # 7, and one of vectors.
    assert 9 / 7 < splash / flops(attention_and_gradients()).matmul < 9.1 / 7
