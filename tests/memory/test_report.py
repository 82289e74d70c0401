"""Tests of `report` on programs small enough to count every byte."""

import sys
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from stacked_remat import memory
from stacked_remat.memory import TargetError, report

KIB = jax.ShapeDtypeStruct((256,), jnp.float32)  # 1,024 bytes


class Scale(eqx.Module):
    weight: jax.Array
    power: int = eqx.field(static=True)
    name: str = "scale"

    def __call__(self, x):
        return x * self.weight**self.power


def scale(weight: Any = KIB):
    return Scale(weight, 2)


def test_bytes_of_arguments_and_outputs():
    found = report(lambda x, y: (x + y, x.sum()), KIB, KIB)
    table = 2 * 8  # of pointers, where there are several results
    assert (found.arguments, found.outputs, found.aliased) == (
        2048,
        1024 + 4 + table,
        0,
    )
    assert found.total == found.arguments + found.outputs + found.temporaries
    assert found.target == "local"
    assert found.devices == 1
    assert found.host.total == 0
    assert found.compile_seconds > 0


def test_nothing_is_executed():
    ran = []

    def fn(x):
        jax.debug.callback(lambda: ran.append(True))
        return x + 1

    report(fn, jnp.ones(3))
    jax.effects_barrier()
    assert not ran


def test_static_leaves_modules_and_named_arrays_are_taken_as_filter_jit_takes_them():
    assert report(lambda module, x: module(x), scale(), KIB).arguments == 2048
    assert (
        report(
            lambda module, x: module(x), scale(jnp.ones(256)), np.ones(256, np.float32)
        ).arguments
        == 2048
    )
    assert report(scale(), KIB).arguments == 2048
    assert report(lambda x, double: (x, x) if double else x, KIB, True).outputs > 2048
    Width = hax.Axis("width", 256)
    found = report(lambda named: named.rename({"width": "other"}) + 1, hax.ones(Width))
    assert (found.arguments, found.outputs) == (1024, 1024)
    shaped = eqx.filter_eval_shape(hax.ones, Width)
    assert report(lambda *, named: named + 1, named=shaped).arguments == 1024


def test_results_that_are_not_arrays_are_left_out():
    assert report(lambda x: (x, "text", None, scale()), KIB).outputs == 1024


def test_random_keys_are_arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    assert (
        report(lambda keys: jax.vmap(jax.random.normal)(keys), keys).arguments == 4 * 8
    )


def test_donated_arguments_are_aliased():
    def step(module, x):
        return eqx.tree_at(lambda m: m.weight, module, module.weight + x)

    plain = report(step, scale(), KIB)
    donated = report(step, scale(), KIB, donate="module")
    assert (plain.aliased, donated.aliased) == (0, 1024)
    assert donated.total == plain.total - 1024
    assert report(step, scale(), KIB, donate="all").aliased == 1024
    assert report(step, scale(), x=KIB, donate=["x"]).aliased == 1024
    assert report(lambda *xs: xs[0] + 1, KIB, KIB, donate="xs").aliased == 1024


def test_functions_that_are_jitted_already_are_refused():
    for jitted in (jax.jit(jnp.add), eqx.filter_jit(jnp.add)):
        with pytest.raises(TypeError, match="Give it the function itself"):
            report(jitted, KIB, KIB)


MESH = Mesh(np.array(jax.devices()[4:]).reshape(2, 2), ("data", "model"))


def on(mesh, *spec):
    return jax.ShapeDtypeStruct(
        (8, 32), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )


@pytest.mark.parametrize(
    "mesh", [MESH, AbstractMesh((2, 2), ("data", "model"))], ids=["local", "abstract"]
)
def test_shardings_are_moved_to_the_target(mesh):
    found = report(
        lambda x, y, z: x.sum() + y.sum() + z,
        on(mesh, "data", "model"),
        on(mesh, "model"),
        KIB,
    )
    assert found.devices == 4
    # An array without a sharding is on every device
    assert found.arguments == 1024 // 4 + 1024 // 2 + 1024


def test_shardings_that_cannot_be_moved():
    with pytest.raises(ValueError, match="different meshes"):
        report(
            lambda x, y: (x, y),
            on(MESH),
            on(Mesh(np.array(jax.devices()), ("data",)), "data"),
        )

    class Elsewhere(Sharding):
        num_devices = 8  # pyright: ignore[reportAssignmentType]

        def check_compatible_aval(self, aval_shape):
            pass

    with pytest.raises(ValueError, match="NamedSharding"):
        report(
            lambda x: x,
            jax.ShapeDtypeStruct((8, 32), jnp.float32, sharding=Elsewhere()),
        )


def test_arguments_on_the_host_are_made_by_the_program_where_they_would_be_miscounted(
    monkeypatch,
):
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    pinned = {"weights": jax.ShapeDtypeStruct((8, 256), jnp.float32, sharding=host)}
    local, cuda = memory.TARGETS["local"], memory.TARGETS["h200"]
    monkeypatch.setattr(
        type(cuda), "devices", lambda self, count=1: local.devices(count)
    )

    def doubled(x, weights):
        on_device = jax.device_put(weights["weights"], jax.memory.Space.Device)
        return x, jax.device_put(2 * on_device, jax.memory.Space.Host)

    found = report(doubled, KIB, pinned, target=cuda, donate="weights")
    assert found.arguments + found.host.arguments == 1024
    assert (found.flops.bytes_from_host, found.flops.bytes_to_host) == (
        8 * 1024,
        8 * 1024,
    )
    as_arguments = report(doubled, KIB, pinned, donate="weights")
    assert as_arguments.arguments + as_arguments.host.arguments == 9 * 1024
    assert as_arguments.aliased + as_arguments.host.aliased == 8 * 1024
    assert as_arguments.flops == found.flops

    def products(pair, x):
        def layer(x, weights):
            first, second = jax.device_put(weights, jax.memory.Space.Device)
            return (x[0] @ first, x[1] @ second), None

        return jax.lax.scan(layer, (x, x), pair)[0]

    pair = [jax.ShapeDtypeStruct((4, 16, 16), jnp.float32, sharding=host)] * 2
    both = report(
        products, pair, jax.ShapeDtypeStruct((16, 16), jnp.float32), target=cuda
    )
    # As equal ones they would be one
    assert both.temporaries + both.host.temporaries >= 2 * 4 * 1024

    with pytest.raises(TargetError, match=r"'h200' cannot size.*\['weights'\]"):
        report(doubled, on(MESH), pinned, target=cuda)


def test_the_table_in_text_needs_no_optional_dependency(monkeypatch):
    for name in ("rich", "rich.table", "rich.text", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    text = str(report(lambda x: x @ x, jax.ShapeDtypeStruct((512, 512), jnp.float32)))
    for part in (
        "memory on local",
        "total",
        "1.00 MiB",
        "268 M FLOP in matrix products",
    ):
        assert part in text
