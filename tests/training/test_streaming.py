"""Training states with arrays in host memory: their shardings, digests, and the memory
that they need.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import Stacked, streaming
from stacked_remat.training import ConfigError, MeshConfig, Partitioning
from stacked_remat.training.array_layout import digests
from stacked_remat.training.memory_check import check_fits, check_host_fits

Layers, Embed = Axis("layers", 4), Axis("embed", 16)


class Block(eqx.Module):
    weight: hax.NamedArray
    order: jax.Array
    activation: object

    @staticmethod
    def init(scale, *, key):
        weight = hax.random.normal(key, (Embed, Axis("mlp", 3))) * scale
        return Block(weight, jax.random.key_data(key).sum().astype(jnp.int32), jnp.tanh)


def make(init=streaming.init):
    return init(Layers, Block)(
        0.02, key=jax.random.split(jax.random.key(0), Layers.size)
    )


def kinds(tree):
    return [
        leaf.sharding.memory_kind
        for leaf in jax.tree.leaves(tree)
        if eqx.is_array(leaf)
    ]


@pytest.mark.parametrize("devices", [1, 8])
def test_a_partitioning_keeps_arrays_in_their_memory(devices):
    partitioning = Partitioning.of(MeshConfig({"data": devices}))
    shapes = partitioning.shapes_of(make)
    with partitioning.active():
        made = partitioning.init_sharded(make)
    assert kinds(made) == ["pinned_host", "device"]
    for shape, array in zip(
        jax.tree.leaves(shapes.stacked), jax.tree.leaves(made.stacked), strict=True
    ):
        if eqx.is_array(array):
            assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)
            assert (
                shape.sharding.memory_kind == array.sharding.memory_kind
                and array.committed
            )
    if devices == 1:
        assert digests(made) == digests(make(Stacked.init))  # made on the device
    weight = made.stacked.weight.array
    assert weight.addressable_shards[0].data.shape == (4, 16 // devices, 3)
    # On several devices it is one program, in which XLA reorders products.
    np.testing.assert_allclose(
        weight, make().stacked.weight.array, rtol=1e-6 if devices > 1 else 0
    )


def test_only_what_is_on_the_host_counts_there_and_only_what_is_on_a_device_there():
    partitioning = Partitioning.of(MeshConfig({"data": 8}))
    parts = {
        "layers": partitioning.shapes_of(make),
        "head": jax.ShapeDtypeStruct((1000,), jnp.int8),
    }
    on_host = Layers.size * 16 * 3 * 4
    check_host_fits(parts, "", available=on_host)
    check_fits(parts, "", limit=1016)  # with a number of each layer
    with pytest.raises(
        ConfigError,
        match=r"768 B.* of host memory \(layers .*process can take 767 B.* Less",
    ):
        check_host_fits(parts, "Less.", available=on_host - 1)
    with pytest.raises(
        ConfigError,
        match=r"1016 B.* of memory \(layers 16 B, head .*a device has 1015 B",
    ):
        check_fits(parts, "", limit=1015)
    huge = jax.ShapeDtypeStruct(
        (2**60,), jnp.int8, sharding=partitioning.weight_sharding(None, on_host=True)
    )
    with pytest.raises(ConfigError, match="this process can take"):
        check_host_fits({"layers": huge}, "")
