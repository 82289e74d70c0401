"""Layers of NNX as one module: stacked, called one after the other, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stacked_remat import streaming
from stacked_remat.nnx import Stacked, remat_scan, stack, to_host


class Block(nnx.Module):
    def __init__(self, width=4, *, name="a", rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.int32(0))
        self.name = name

    def __call__(self, x, scale, *, offset):
        self.calls[...] += jnp.int32(1)
        return x + self.dropout(jnp.tanh(self.linear(x))) * scale + offset


def blocks():
    return [Block(rngs=nnx.Rngs(seed)) for seed in range(3)]


def test_stacked_layers_are_a_loop_over_them():
    layers, stacked, x = blocks(), Stacked(blocks(), remat=True), jnp.ones((2, 4))

    def loop(layers, x, scale):
        for layer in layers:
            x = layer(x, scale, offset=0.5)
        return jnp.sum(jnp.square(x))

    expected = nnx.jit(nnx.grad(loop, argnums=(0, 2)))(layers, x, jnp.float32(2))
    found = nnx.jit(
        nnx.grad(lambda *args: jnp.sum(jnp.square(args[0](*args[1:], offset=0.5))), argnums=(0, 2))
    )(stacked, x, jnp.float32(2))
    weights = jax.tree.map(lambda *parts: jnp.stack(parts), *expected[0])
    pairs = zip(*map(jax.tree.leaves, ((weights, expected[1]), (found[0]["layers"], found[1]))), strict=True)
    assert all(jnp.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
    assert jnp.array_equal(nnx.state(stacked.layers, nnx.BatchStat)["calls"][...], [1, 1, 1])
    assert Stacked(stacked.layers).layers is stacked.layers


class Shares(nnx.Module):
    """A layer that draws numbers and updates statistics of modules that it gets as arguments."""

    def __init__(self, seed=0):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(seed))

    def __call__(self, x, mask, rngs, *, shared):
        mask = nnx.Dropout(0.5)(mask, rngs=rngs)
        return x + mask * shared["norm"](jnp.tanh(self.linear(x))) * shared["scale"]


def test_state_of_arguments_goes_from_layer_to_layer():
    x = jax.random.normal(jax.random.key(3), (5, 4))

    def run(make, forward):
        layers = make([Shares(seed) for seed in range(3)])
        rngs, norm = nnx.Rngs(1), nnx.BatchNorm(4, rngs=nnx.Rngs(2))

        @nnx.jit
        @nnx.value_and_grad(argnums=(0, 1, 2))
        def gradient(x, layers, norm, rngs):
            shared = {"norm": norm, "scale": jnp.float32(0.5)}
            return jnp.sum(jnp.sin(forward(layers, x, jnp.ones_like(x), rngs, shared=shared)))

        found = [gradient(x, layers, norm, rngs) for _ in range(2)]
        return [(value, *map(nnx.to_pure_dict, grads[2:]), grads[0]) for value, grads in found], norm, rngs

    def loop(layers, x, *args, **kwargs):
        for layer in layers:
            x = layer(x, *args, **kwargs)
        return x

    expected, found = run(nnx.List, loop), run(lambda ms: Stacked(ms, remat="nested"), Stacked.__call__)
    assert found[2].default.count[...] == 6 and not jnp.array_equal(found[0][0][0], found[0][1][0])
    np.testing.assert_array_equal(found[2].default.count[...], expected[2].default.count[...])
    pairs = zip(
        *(jax.tree.leaves((run[0], nnx.to_pure_dict(nnx.state(run[1])))) for run in (expected, found)),
        strict=True,
    )
    for a, b in pairs:
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6)


class Call(nnx.Module):
    """Calls a function of the carry and further arguments."""

    def __init__(self, function=lambda x: x):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


def test_layers_without_arrays_and_without_modules():
    assert Stacked([Call(jnp.cos)] * 3)(jnp.float32(0)) == jnp.cos(jnp.cos(jnp.cos(jnp.float32(0))))

    def writes(x, shared):
        shared.kernel[...] = x
        return x

    with pytest.raises(ValueError, match=r"writes to args\.0\.kernel, a Param"):
        Stacked([Call(writes)] * 3)(jnp.ones((4, 4)), nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    for layers in (jnp.ones(3), [jnp.ones(3)], nnx.Rngs(0)):
        with pytest.raises(TypeError, match="modules with a __call__, and got a"):
            Stacked(layers)
    for make in (lambda remat: Stacked(blocks(), remat=remat), lambda remat: remat_scan(remat=remat)):
        with pytest.raises(ValueError, match="Unknown remat policy 'nests'"):
            make("nests")


class Split(nnx.Module):
    def __init__(self, seed=0):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.linear = nnx.Linear(4, 4, kernel_init=init, rngs=nnx.Rngs(seed))

    def __call__(self, x):
        assert self.linear.kernel.out_sharding == (None, "model")
        return x + self.linear(x)


def test_sharding_metadata_has_the_layers_axis():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    metadata = {nnx.PARTITION_NAME: "layers"}
    with jax.set_mesh(mesh):
        made: Any = nnx.vmap(Split, transform_metadata=metadata)(jax.random.split(jax.random.key(0), 3))
        layers = [Split(seed) for seed in range(3)]
        named = Stacked(made, transform_metadata=metadata)
        for name, stacked in {None: Stacked(layers), "layers": named}.items():
            kernel = nnx.state(stacked)["layers"]["linear"]["kernel"]
            stacked(jnp.ones((2, 4)))
            after = nnx.state(stacked)["layers"]["linear"]["kernel"]
            assert kernel.out_sharding == after.out_sharding == (name, None, "model")
        assert layers[0].linear.kernel.out_sharding == (None, "model")


def test_only_layers_of_stacks_move_to_the_host():
    model = nnx.List([nnx.Conv(3, 8, (3, 3), rngs=nnx.Rngs(0)), Stacked(blocks())])
    rest, stacked = (jax.tree.leaves(nnx.state(part)) for part in to_host(model))
    assert any(map(streaming.is_on_host, stacked)) and not any(map(streaming.is_on_host, rest))


def shared_rngs():
    rngs = nnx.Rngs(0)
    return [nnx.Dict(rngs=rngs, linear=nnx.Linear(2, 2, rngs=rngs)) for _ in range(3)]


REFUSED = {
    "none": (list, "no layers to stack"),
    "another shape": (
        lambda: [*blocks(), Block(5, rngs=nnx.Rngs(0))],
        r"linear.* is \(\(4,.*\(\(5,.* layer 3",
    ),
    "another attribute": (
        lambda: [*blocks(), Block(name="b", rngs=nnx.Rngs(0))],
        "^name is 'a' in layer 0 and 'b' in layer 3",
    ),
    "another module": (
        lambda: [*blocks(), nnx.Linear(4, 4, rngs=nnx.Rngs(0))],
        "calls.* is .* None in layer 3",
    ),
    "a shared variable": (shared_rngs, r"Layers 0 and 1 share rngs\..*rngs.fork\(\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_are_not_alike_are_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        stack(make())
