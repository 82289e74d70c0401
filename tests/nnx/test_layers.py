"""Layers of NNX as one module: stacked, called one after the other, and what is refused."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from stacked_remat.nnx import Stacked, stack


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
    layers, stacked, x = blocks(), Stacked(blocks(), policy=True), jnp.ones((2, 4))

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


def shared_rngs():
    rngs = nnx.Rngs(0)
    return [nnx.Dict(rngs=rngs, linear=nnx.Linear(2, 2, rngs=rngs)) for _ in range(3)]


REFUSED = {
    "none": (list, "no layers to stack"),
    "another shape": (
        lambda: [*blocks(), Block(5, rngs=nnx.Rngs(0))],
        r"linear.* is \(\(4,.*\(\(5,.* layer 3",
    ),
    "another attribute": (lambda: [*blocks(), Block(name="b", rngs=nnx.Rngs(0))], "Layer 3 has other static"),
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
