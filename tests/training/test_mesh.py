"""Meshes of devices, and the sharding of states, gradients, batches and activations."""

import functools
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from stacked_remat import Stacked
from stacked_remat.training import (
    ConfigError,
    MeshConfig,
    Partitioning,
    TokenBatch,
    gathered,
    mesh_sizes,
)
from tests.jaxprs import primitives

Embed, Mlp = Axis("embed", 8), Axis("mlp", 6)
TOKENS = np.arange(32, dtype=np.int32).reshape(8, 4)
BATCH = TokenBatch.of(TOKENS, TOKENS, np.ones((8, 4), np.float32))


def state():
    return {
        "weight": hax.ones((Mlp, Embed)),
        "bias": hax.ones(Mlp),
        "plain": jnp.ones((8, 8)),
        "step": jnp.zeros((), jnp.int32),
        "key": jax.random.key(0),
        "absent": None,
        # What Adafactor keeps of a weight: a tree like it, with an array that lacks an
        # axis.
        "rows": jax.tree.map(lambda _: jnp.ones(6), hax.ones((Mlp, Embed))),
    }


def specs(tree):
    found = {name: getattr(leaf, "array", leaf) for name, leaf in tree.items()}
    return {
        name: tuple(leaf.sharding.spec)
        for name, leaf in found.items()
        if leaf is not None
    }


FSDP = {
    "weight": (None, ("data",)),
    "bias": (None,),
    "plain": (),
    "step": (),
    "key": (),
    "rows": (),
}


def trimmed(specs):
    """Without differences that JAX ignores: `None`s at the end, and tuples around
    single names.
    """
    return {name: PartitionSpec(*spec) for name, spec in specs.items()}


@pytest.mark.parametrize(
    ("axes", "devices", "sizes"),
    [
        ({"data": -1}, 8, {"data": 8}),
        ({"data": -1, "model": 2}, 8, {"data": 4, "model": 2}),
        ({"data": 1}, 8, {"data": 1}),
    ],
    ids=str,
)
def test_sizes(axes, devices, sizes):
    assert mesh_sizes(MeshConfig(axes, {}, {}), devices) == sizes
    assert dict(Partitioning.of(MeshConfig(axes, {}, {})).mesh.shape) == sizes


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"data": 16},
            "takes 16 devices; there are 8. Change a size, or give one axis -1",
        ),
        (
            {"data": -1, "model": 3},
            "takes 3 devices or a multiple of that; there are 8. Change a size.$",
        ),
    ],
    ids=str,
)
def test_meshes_that_do_not_fit_the_devices(axes, message):
    with pytest.raises(ConfigError, match=message):
        Partitioning.of(MeshConfig(axes, {}, {}))


def test_a_state_and_its_gradients_are_sharded_by_its_mapping():
    partitioning = Partitioning.of(MeshConfig())
    placed = partitioning.shard_weights(state())
    assert trimmed(specs(placed)) == trimmed(FSDP)
    assert trimmed(specs(partitioning.weight_shapes(state()))) == trimmed(FSDP)
    assert placed["weight"].array.addressable_shards[0].data.shape == (6, 1)
    made = partitioning.init_sharded(lambda: {**state(), "absent": None})
    assert made["weight"].array.sharding.is_equivalent_to(
        placed["weight"].array.sharding, 2
    )
    np.testing.assert_array_equal(made["weight"].array, placed["weight"].array)

    def value(weight):
        return hax.sum(partitioning.shard_weights(weight) ** 2).scalar()

    gradient = jax.jit(jax.grad(value))(hax.ones((Mlp, Embed)))
    assert gradient.array.addressable_shards[0].data.shape == (6, 1)


def test_on_one_device_a_step_compiles_once_with_weights_that_were_read(caplog):
    partitioning = Partitioning.of(MeshConfig({"data": 1}))
    read = jax.device_put(hax.ones(Mlp), partitioning.weight_sharding(hax.ones(Mlp)))
    made = partitioning.init_sharded(lambda bias: {**state(), "bias": bias}, read)
    step = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
    made = step(made)
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        step(made)
    assert "Compiling" not in caplog.text


def test_several_mesh_axes_for_one_axis():
    config = MeshConfig(
        {"replica": 2, "data": 4}, {"batch": ["replica", "data"]}, {"embed": "data"}
    )
    partitioning = Partitioning.of(config)
    batch = partitioning.shard_batch(BATCH)
    assert (
        batch.tokens.array.addressable_shards[0].data.shape == (1, 4)
        and batch.documents is None
    )
    np.testing.assert_array_equal(batch.tokens.array, BATCH.tokens.array)
    shapes = partitioning.batch_shapes(BATCH).tokens.array
    assert shapes.sharding.is_equivalent_to(batch.tokens.array.sharding, 2)


def test_a_mesh_axis_divides_the_axis_that_is_written_first():
    weight = hax.ones((Mlp, Embed))
    mapping: Any = {"absent": "data", "mlp": "data", "embed": ["data", "more"]}
    for order, parts in ((mapping, (3, 2)), (dict(reversed(mapping.items())), (6, 1))):
        partitioning = Partitioning.of(MeshConfig({"data": 2, "more": 4}, {}, order))
        assert (
            partitioning.shard_weights(weight).array.addressable_shards[0].data.shape
            == parts
        )
        assert partitioning.shard_weights(hax.ones(Embed)).array.addressable_shards[
            0
        ].data.shape == (1,)


def test_a_mapping_that_does_not_fit_the_weights():
    partitioning = Partitioning.of(MeshConfig({"data": 8}, {}, {"mlp": "data"}))
    with pytest.raises(
        ConfigError,
        match=r"`mlp` over 8 devices, but an array .mlp=6, embed=8. has 6 of it",
    ):
        partitioning.weight_shapes({"weight": hax.ones((Mlp, Embed))})


def test_weights_are_not_divided_by_layers():
    make = Stacked.init(Axis("depth", 8), hax.nn.Linear.init)
    stack = make(Embed, Mlp, key=jax.random.split(jax.random.key(0), 8))
    for table in ("compute_mapping", "param_mapping"):
        of = functools.partial(
            MeshConfig,
            **{"compute_mapping": {}, "param_mapping": {}, "axes": {"data": 8}},
        )
        with pytest.raises(
            ConfigError, match=rf"{table}\.depth: .* another axis, such as `embed`"
        ):
            Partitioning.of(of(**{table: {"depth": "data"}})).check_names(
                {"layers": stack}
            )
        with pytest.raises(
            ConfigError, match=r"an axis `dpth`\. Valid: batch, embed, mlp, position"
        ):
            Partitioning.of(of(**{table: {"dpth": "data"}})).check_names(
                {"layers": stack}
            )


def test_layers_are_divided_over_the_stages_of_a_pipeline():
    make = Stacked.init(Axis("depth", 8), hax.nn.Linear.init)
    stack = make(Embed, Mlp, key=jax.random.split(jax.random.key(0), 8))
    config = MeshConfig({"stage": 4, "data": 2})
    partitioning = Partitioning.of(config, stages_of={"depth": "stage"})
    partitioning.check_names(stack)
    weight = partitioning.shard_weights(stack).stacked.weight.array
    assert weight.addressable_shards[0].data.shape == (2, 6, 4)
    other = MeshConfig({"stage": 4, "data": 2}, {}, {"depth": "data"})
    with pytest.raises(ConfigError, match=r"in trainer\.pipeline\.axis"):
        Partitioning.of(other).check_names(stack)


def test_batches_that_do_not_divide():
    partitioning = Partitioning.of(
        MeshConfig({"data": 2, "e": 4}, {"batch": ["data", "e"]}, {})
    )
    partitioning.check_batch(16, 7, 2)
    for rows, microbatches, multiple in ((12, 1, 8), (8, 2, 16)):
        with pytest.raises(
            ConfigError,
            match=f"batch_size = {rows}.*8 devices.*multiple of {multiple}, or",
        ):
            partitioning.check_batch(rows, 7, microbatches)
    partitioning = Partitioning.of(
        MeshConfig({"context": 8}, {"position": "context"}, {})
    )
    partitioning.check_batch(1, 16)
    with pytest.raises(
        ConfigError, match="seq_len = 12.*over the 8 devices.*multiple of 8"
    ):
        partitioning.check_batch(1, 12)


def test_initial_weights_are_divided_by_their_own_mapping_alone():
    mapping = {"embed": "data", "mlp": "data"}  # for activations that have one of them
    partitioning = Partitioning.of(MeshConfig({"data": 2}, mapping, {"embed": "data"}))

    def make():
        return hax.random.normal(jax.random.key(0), (Mlp, Embed))

    with partitioning.active():
        made = partitioning.init_sharded(make)
        found = primitives(lambda: partitioning.init_sharded(make))
    assert found["sharding_constraint"] == 1
    assert made.array.addressable_shards[0].data.shape == (6, 4)
    np.testing.assert_array_equal(made.array, make().array)


def test_one_device_needs_no_sharding():
    partitioning = Partitioning.of(MeshConfig({"data": 1}))
    tree = state()
    assert partitioning.shard_weights(tree) is tree
    assert isinstance(partitioning.shard_batch(BATCH).tokens.array, jax.Array)
    assert isinstance(
        partitioning.weight_sharding(tree["weight"]), SingleDeviceSharding
    )
    with partitioning.active():
        assert jax.sharding.get_abstract_mesh().empty


def test_activations_are_sharded_while_it_is_active():
    partitioning = Partitioning.of(MeshConfig())
    x = hax.ones((Axis("batch", 8), Embed))
    with partitioning.active():
        product = jax.jit(lambda x, w: hax.dot(x, w, axis=Embed))(
            x, hax.ones((Mlp, Embed))
        )
    assert product.array.addressable_shards[0].data.shape == (1, 6)
    assert jax.sharding.get_abstract_mesh().empty


def test_a_layer_gathers_what_weights_alone_are_divided_over():
    layer = {"weight": hax.ones((Mlp, Embed)), "bias": hax.ones(Mlp), "absent": None}
    assert gathered(layer) is layer
    both = MeshConfig(
        {"data": 4, "model": 2},
        compute_mapping={"batch": "data", "mlp": "model"},
        param_mapping={"embed": "data", "mlp": "model"},
    )
    for config, spec in ((MeshConfig(), ()), (both, ("model", None))):
        partitioning = Partitioning.of(config)
        with partitioning.active():
            found = primitives(lambda: gathered(layer))
            whole = jax.jit(gathered)(partitioning.shard_weights(layer))
            left = primitives(lambda: gathered(layer, leave=["embed"]))
            undivided = jax.jit(lambda layer: gathered(layer, whole=["mlp"]))(layer)
        assert found["sharding_constraint"] == 1
        assert not left["sharding_constraint"]
        assert undivided["weight"].array.sharding.is_fully_replicated
        expected = NamedSharding(partitioning.mesh, PartitionSpec(*spec))
        assert whole["weight"].array.sharding.is_equivalent_to(expected, 2)
    with Partitioning.one_device().active():
        assert gathered(layer) is layer
