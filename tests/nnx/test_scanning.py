"""`remat_scan` beside `nnx.scan`: results, gradients, state, metadata, memory; and what
it refuses.
"""

import functools
import importlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stacked_remat import ScanCheckpointPolicy, streaming
from stacked_remat.nnx import remat_scan

LAYERS, WIDTH = 6, 8


class Block(nnx.Module):
    """Parameters, statistics, random streams and a counter of calls."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x, offset):
        self.calls[...] += jnp.int32(1)
        y = self.dropout(jnp.tanh(self.norm(self.linear(x)))) + offset
        self.sow(nnx.Intermediate, "mean", y.mean())
        return x + y, y.sum()


def vmapped(kind: Any = Block, layers=LAYERS, **options) -> Any:
    create = nnx.vmap(kind, in_axes=0, out_axes=0, **options)
    return nnx.split_rngs(splits=layers)(create)(nnx.Rngs(0, dropout=1))


def raw(tree):
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def trained(scan, **options):
    """Two calls of loss and gradient, one after the other, and the state after them."""
    blocks, x = vmapped(), jax.random.normal(jax.random.key(2), (4, WIDTH))

    def loss(blocks, x, offset):
        @functools.partial(scan, in_axes=(nnx.Carry, 0, None), **options)
        def forward(x, block, offset):
            return block(x, offset)

        y, sums = forward(x, blocks, offset)
        return jnp.sum(jnp.sin(y)) + jnp.sum(sums * jnp.arange(1.0, LAYERS + 1))

    both = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1, 2)))
    found = [
        nnx.capture(both, nnx.Intermediate)(blocks, x, jnp.float32(0.1))
        for _ in range(2)
    ]
    return raw((found, nnx.state(blocks)))


@pytest.mark.parametrize(
    "options",
    [
        {"remat": ScanCheckpointPolicy(nested=np.int64(2))},
        pytest.param(
            {"remat": "offload", "reverse": True, "unroll": 2}, marks=pytest.mark.deep
        ),
    ],
    ids=["nested", "offload, reversed"],
)
def test_values_gradients_and_state_are_those_of_nnx_scan(options):
    """Flax's own tests of `nnx.scan`, which `make flax` runs, have more of them."""
    found, expected = (
        trained(remat_scan, **options),
        trained(nnx.scan, reverse=options.get("reverse", False)),
    )
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_allclose(
            found[name], leaf, rtol=2e-5, atol=1e-5, err_msg=name
        )
        if leaf.dtype.kind in "iu":
            assert np.array_equal(found[name], leaf), name
    calls = [leaf for name, leaf in found.items() if "calls" in name]
    assert any(np.array_equal(leaf, [2] * LAYERS) for leaf in calls)


def test_a_layer_that_runs_again_draws_the_same_numbers():
    class Drop(nnx.Module):
        def __init__(self, rngs):
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    @remat_scan(remat=ScanCheckpointPolicy(nested=3))
    def forward(x, layer):
        mask = layer.dropout(jnp.ones(64))
        return x * (1 + mask), mask

    layers = vmapped(Drop)
    gradient = nnx.jit(nnx.grad(lambda x, layers: forward(x, layers)[0].sum()))(
        jnp.ones(64), layers
    )
    assert np.array_equal(layers.dropout.rngs.count[...], [1] * LAYERS)
    y, masks = forward(jnp.ones(64), vmapped(Drop))  # the product of 1 + mask
    assert len({tuple(mask) for mask in np.asarray(masks)}) == LAYERS
    assert jnp.array_equal(gradient, y)


STATE = nnx.StateAxes({nnx.Param: 1, nnx.BatchStat: nnx.Carry, ...: None})


class Cell(nnx.Module):
    """A matrix of each layer, a sum over the layers and a constant."""

    def __init__(self):
        self.weight = nnx.Param(
            jnp.arange(3 * LAYERS, dtype=jnp.float32).reshape(3, LAYERS)
        )
        self.total = nnx.BatchStat(jnp.zeros(3))
        self.constant = nnx.Variable(jnp.full(3, 2.0))

    def __call__(self, x, scales):
        self.total[...] += self.weight[...]
        self.weight[...] = self.weight[...] + scales["each"] * scales["all"]
        self.constant[...] = self.constant[...] + 1.0  # dropped
        return (
            {"mean": self.total[...].mean()},
            x + self.weight[...] * self.constant[...],
            self.total[...],
        )


@pytest.mark.parametrize("reverse", [False, True])
def test_axes_state_and_trees_are_treated_as_by_nnx_scan(reverse):
    def run(scan):
        cell = Cell()
        forward = scan(
            Cell.__call__,
            in_axes=(STATE, nnx.Carry, {"each": -1, "all": None}),
            out_axes=({"mean": 0}, nnx.Carry, 1),
            reverse=reverse,
        )
        scales = {
            "each": jnp.arange(3.0 * LAYERS).reshape(3, LAYERS),
            "all": jnp.float32(0.5),
        }
        return raw((forward(cell, x=jnp.zeros(3), scales=scales), nnx.state(cell)))

    found, expected = run(remat_scan), run(nnx.scan)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], leaf) for name, leaf in expected.items())


@pytest.mark.deep
def test_weights_are_read_from_the_host():
    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

    @remat_scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return x + layer.down(nnx.silu(layer.up(x)))

    gradient = nnx.jit(
        nnx.value_and_grad(lambda layers, x: jnp.sum(forward(x, layers)))
    )

    def places(state):
        return {
            path[-1]: streaming.is_on_host(leaf[...])
            for path, leaf in nnx.to_flat_state(state)
        }

    layers, x = vmapped(Mlp), jnp.ones((2, WIDTH))
    expected = gradient(layers, x)
    nnx.update(
        layers,
        jax.tree.map(
            lambda leaf: (
                jax.device_put(leaf, jax.memory.Space.Host) if leaf.ndim > 2 else leaf
            ),
            nnx.state(layers),
        ),
    )
    found = gradient(layers, x)
    assert (
        places(nnx.state(layers)) == places(found[1]) == {"kernel": True, "bias": False}
    )
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert jnp.allclose(
            jax.device_put(a, jax.memory.Space.Device), b, rtol=1e-5, atol=1e-6
        )


def line(x, layer):
    return x, layer


X, L = jnp.ones(2), jnp.ones((3, 2))
REFUSED = {
    "a negative length": (
        dict(in_axes=(nnx.Carry, None), length=-1),
        "length=-1 is negative",
    ),
    "another length": (dict(length=5), r"\(size 5\).*layer.* has leading dimension 3"),
    "no length": (dict(in_axes=(nnx.Carry, None)), "nothing to split.*Pass length="),
    "axes of one": (
        dict(in_axes=(nnx.Carry,)),
        "must take exactly one argument; it was given x, layer",
    ),
    "a nested carry": (
        dict(in_axes=({"a": nnx.Carry}, 0)),
        "Carry must at the top-level",
    ),
    "one carry": (dict(out_axes=(0, 0)), "the other must also have Carry"),
    "a shared result": (
        dict(out_axes=(nnx.Carry, None)),
        r"out_axes=None at: out_axes\[1\]",
    ),
    "other results": (
        dict(out_axes=(nnx.Carry, 0, 0)),
        "out_axes has 3 entries.*2 results",
    ),
    "state of an array": (
        dict(in_axes=(nnx.Carry, STATE)),
        r"StateAxes.*args\[1\].*nnx.StateAxes is for modules",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_with_the_fix(name):
    options, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        remat_scan(line, **options)(X, L)


def test_functions_that_are_refused():
    with pytest.raises(ValueError, match="does not support bound methods"):
        remat_scan(nnx.Linear(2, 2, rngs=nnx.Rngs(0)).__call__)
    with pytest.raises(TypeError, match="\\[\\] is not a callable object"):
        remat_scan([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Unknown remat policy 'nests'"):
        remat_scan(remat="nests")
    with pytest.raises(
        ValueError, match=r"Expected an array.*layer\['a'\] is a int of 0 dimensions"
    ):
        remat_scan(line)(X, {"a": 3})
    with pytest.raises(ValueError, match=r"carry\['x'\].*float32\[2\].*\[1\]"):
        remat_scan(line, out_axes=(0, nnx.Carry))(X, L[:, :1])
    with pytest.raises(TypeError, match="can't pass flag by keyword"):
        remat_scan(lambda x, layer, *, flag: (x, layer))(X, L, flag=True)
    with pytest.raises(
        ValueError, match="must take exactly one argument; it was given x, layer"
    ):
        remat_scan(line, in_axes=nnx.Carry, out_axes=nnx.Carry, length=2)(X, L)
    with pytest.raises(
        ValueError,
        match="references must be the same between iterations: carry is another",
    ):
        remat_scan(lambda n, x: (nnx.Variable(n[...] + x), x))(
            nnx.Variable(jnp.float32(0)), jnp.ones(3)
        )

    def adds(x, layer):
        layer.new = nnx.Variable(x)
        return x

    axes = (nnx.Carry, nnx.StateAxes({nnx.Param: 0, ...: None}))
    with pytest.raises(
        ValueError, match="The function adds layer.*axis None is dropped"
    ):
        remat_scan(adds, in_axes=axes, out_axes=nnx.Carry)(X, vmapped(Block))


def test_without_flax_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("stacked_remat.nnx")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"stacked_remat.nnx needs flax.*'stacked_remat\[nnx\]'",
    ):
        importlib.import_module("stacked_remat.nnx")


@pytest.mark.deep
def test_sharding_and_its_metadata_are_kept():
    mesh = jax.make_mesh(
        (2, 2), ("layers", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    metadata = {nnx.PARTITION_NAME: "layers"}

    class Sharded(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(
                nnx.initializers.lecun_normal(), (None, "model")
            )
            self.linear = nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs)
            self.total = nnx.BatchStat(jnp.zeros(WIDTH), out_sharding=("model",))

    with jax.set_mesh(mesh):
        layers = vmapped(Sharded, transform_metadata=metadata)

        @remat_scan(
            in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=metadata
        )
        def forward(x, layer):
            assert layer.linear.kernel.out_sharding == (None, "model")
            y = jnp.tanh(layer.linear(x))
            layer.total[...] = y.sum(0)
            return x + y

        @nnx.jit
        @nnx.value_and_grad
        def gradient(layers, x):
            return jnp.sum(jnp.square(forward(x, layers)))

        x = jax.random.normal(jax.random.key(0), (4, WIDTH))
        value, found = gradient(layers, x)
        kernel = layers.linear.kernel.get_value()
        forward(x, layers)
    assert layers.linear.kernel.get_value() is kernel  # not copied
    for variable in (layers.linear.kernel, found["linear"]["kernel"]):
        assert variable.out_sharding == ("layers", None, "model")
    assert layers.total.out_sharding == ("layers", "model")
    assert not jnp.array_equal(layers.total[...][0], layers.total[...][1])
    assert found["linear"]["kernel"][...].sharding == kernel.sharding != x.sharding
    assert jnp.isfinite(value)
