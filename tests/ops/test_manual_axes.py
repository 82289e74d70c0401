"""Operations on several devices: inside a user's `jax.shard_map`, and by axes that are
mapped.
"""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stacked_remat.ops import (
    causal_attention,
    chunked_cross_entropy,
    grouped_experts,
    linear_attention,
    short_convolution,
)

from ..blocks import assert_close
from ..random_arrays import normal
from .test_per_device import mesh

DEVICES = 4
Pos, Heads, HeadDim, Experts, Embed, Vocab = hax.make_axes(
    position=8, kv_heads=2, head_dim=4, experts=3, embed=4, vocab=5
)
DATA = PartitionSpec("data")


def attended(weights, x):
    Batch = hax.Axis("batch", x.shape[0])
    query = hax.named(
        x.reshape(-1, Pos.size, Heads.size, HeadDim.size), (Batch, Pos, Heads, HeadDim)
    )
    documents = hax.zeros((Batch, Pos), dtype=jnp.int32)
    sinks = hax.named(weights[0, : Heads.size], (Heads,))
    found = causal_attention(
        query,
        query,
        query,
        Pos,
        Heads,
        HeadDim,
        documents=documents,
        sinks=sinks,
        backend="blockwise",
    )
    return found.rearrange((Batch, ...)).array


def routed(weights, x):
    rows = x.reshape(-1, Embed.size)
    choices = jnp.argsort(rows[:, : Experts.size], axis=1)[:, :2]
    stacked = hax.named(
        weights.reshape(-1)[: Experts.size * 16].reshape(3, 4, 4),
        (Experts, "out", Embed),
    )

    def expert(own, rows, gates):
        return jnp.einsum("re,oe,r->ro", rows, own.array, gates)

    found = grouped_experts(expert, stacked, Experts, rows, choices, rows[:, 1:3])
    return found.reshape(x.shape[0], -1)


def losses(weights, x):
    Batch, Rows = (
        hax.Axis("batch", x.shape[0]),
        hax.Axis("row", x.shape[1] // Embed.size),
    )
    hidden = hax.named(
        x.reshape(Batch.size, Rows.size, Embed.size), (Batch, Rows, Embed)
    )
    head = hax.named(weights.reshape(-1)[:20].reshape(4, 5), (Embed, Vocab))
    targets = hax.zeros((Batch, Rows), dtype=jnp.int32)
    return chunked_cross_entropy(
        hidden, head, targets, Embed, Vocab, chunk_size=4
    ).array


def linearly_attended(weights, x):
    Batch, Value = hax.Axis("batch", x.shape[0]), HeadDim.alias("value")
    rows = x.reshape(-1, Pos.size, Heads.size, HeadDim.size)
    query = hax.named(0.5 * rows, (Batch, Pos, Heads, HeadDim))
    taps = hax.named(
        weights.reshape(Heads.size, HeadDim.size, 8), (Heads, HeadDim, "tap")
    )
    documents = hax.zeros((Batch, Pos), dtype=jnp.int32)
    key, _ = short_convolution(query, taps, Pos, "tap", documents=documents)
    found, _ = linear_attention(
        query,
        key,
        query.rename({"head_dim": "value"}),
        -hax.abs(query[HeadDim, 0]),
        hax.nn.sigmoid(query[HeadDim, 1]),
        Pos,
        HeadDim,
        Value,
        documents=documents,
    )
    return found.array


@functools.cache
def on_one_device(operation):
    return loss(operation)(*arguments())


def loss(operation):
    return jax.jit(
        jax.value_and_grad(lambda *args: jnp.sum(operation(*args) ** 2), argnums=(0, 1))
    )


def arguments():
    return normal(0, 8, 8), normal(1, DEVICES, 64)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("operation", [attended, linearly_attended, routed, losses])
def test_inside_shard_map_values_and_gradients_are_those_of_one_device(
    operation, tracked, kind
):
    weights, x = arguments()
    with jax.set_mesh(own := mesh(kind, data=DEVICES)):
        divided = jax.shard_map(
            operation,
            in_specs=(PartitionSpec(), DATA),
            out_specs=DATA,
            check_vma=tracked,
        )
        found = loss(divided)(weights, jax.device_put(x, NamedSharding(own, DATA)))
    assert_close(found, on_one_device(operation), atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("operation", [attended, linearly_attended, losses])
def test_axes_that_named_axes_are_mapped_to_divide_operations_without_gathering_tokens(
    operation, kind
):
    weights, x = arguments()
    with (
        jax.set_mesh(own := mesh(kind, data=DEVICES)),
        hax.axis_mapping({"batch": "data"}),
    ):
        args = jax.device_put(
            (weights, x),
            (NamedSharding(own, PartitionSpec()), NamedSharding(own, DATA)),
        )
        compiled = loss(operation).lower(*args).compile()
        assert_close(compiled(*args), on_one_device(operation), atol=1e-5)
    program = compiled.as_text() or ""
    assert "all-gather" not in program and "all-to-all" not in program


def test_axes_that_are_mapped_while_types_are_tracked_are_refused():
    weights, x = arguments()
    with jax.set_mesh(mesh(data=2, model=2)), hax.axis_mapping({"position": "model"}):
        divided = jax.shard_map(
            attended,
            in_specs=(PartitionSpec(), DATA),
            out_specs=DATA,
            axis_names={"data"},
        )
        with pytest.raises(ValueError, match="check_vma=True.*'position': .*'model'"):
            jax.jit(divided)(weights, x)


def test_experts_that_do_not_divide_are_refused():
    def run(x):
        expert = lambda own, rows, gates: rows * own.array * gates[:, None]  # noqa: E731
        choices, weights = jnp.zeros((len(x), 1), jnp.int32), hax.ones((Experts, Embed))
        return grouped_experts(
            expert, weights, Experts, x, choices, x[:, :1], over=("data",)
        )

    with jax.set_mesh(mesh(data=DEVICES)):
        with pytest.raises(
            ValueError,
            match="experts.* can't be divided evenly over .'data',., 4 devices",
        ):
            jax.eval_shape(
                jax.shard_map(run, in_specs=DATA, out_specs=DATA, check_vma=False),
                jnp.ones((8, 4)),
            )


@pytest.mark.parametrize(
    ("operation", "width"),
    [(attended, 64), (linearly_attended, 64), (routed, 4), (losses, 64)],
)
def test_explicit_axes_that_nothing_is_mapped_to_are_refused(operation, width):
    weights, x = arguments()
    x = x[:, :width]
    with jax.set_mesh(own := mesh(AxisType.Explicit, data=DEVICES)):
        with pytest.raises(
            ValueError, match="divided over 'data'.*AxisType.Explicit.*axis_mapping"
        ):
            operation(weights, jax.device_put(x, NamedSharding(own, DATA)))
