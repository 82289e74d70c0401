"""Arrays that fit in memory are accepted, and larger ones refused."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from stacked_remat.training import ConfigError
from stacked_remat.training.memory_check import check_fits, memory_bytes


def shape(*sizes, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def test_a_device_holds_its_share_and_the_machine_all_shares():
    machine = memory_bytes(jax.devices()[0])
    assert machine is not None
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices())
    rows = machine // 4 // 1024 // 8 * 8
    divided, copied = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ())
    )
    check_fits({"weights": shape(rows, 1024, sharding=divided)}, "", limit=machine // 7)
    check_fits({"weights": shape(rows, 1024, sharding=divided)}, "")
    with pytest.raises(ConfigError, match="this machine has"):
        check_fits({"weights": shape(rows, 1024, sharding=copied)}, "")


@pytest.mark.parametrize("size", [10**8, 10**11, 10**22])
def test_sizes_beyond_64_bits_are_counted(size):
    with pytest.raises(
        ConfigError, match=rf"w, float32 of {size:,} x 1,000,000. Lower vocab_size."
    ):
        check_fits({"weights": {"w": shape(size, 10**6)}}, "Lower vocab_size.")
