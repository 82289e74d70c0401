"""Fields that are not sliced: read from the stack of all layers, with gradients summed there."""

import functools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest

from stacked_remat import LayerResult, LayerStack, Stacked, checkpoint_name, unsliced

from .blocks import policies, with_remat3
from .test_visitor import Embed, Layers, N, assert_close, layer_fn, matrices, random

Expert = hax.Axis("expert", 3)


class Experts(eqx.Module):
    """Each row reads the weights of one expert: from the stack, or from its layer's."""

    weight: hax.NamedArray = unsliced()
    gain: Any = unsliced()

    def __call__(self, x, choice):
        if isinstance(self.weight, LayerStack):
            layer_index, stack = self.weight.layer_index, self.weight.stack
            assert stack.axes == (Layers.resize(stack.axes[0].size), Expert, Embed, Embed.alias("out"))
            assert self.weight.layer.axes == stack.axes[1:]
            return jnp.einsum("bd,bde->be", x, stack.array[layer_index, choice]) * self.gain.layer
        return jnp.einsum("bd,bde->be", x, self.weight.array[choice]) * self.gain


class Mixture(eqx.Module):
    experts: Experts
    scale: jax.Array

    def __call__(self, x, choice):
        return x + jnp.tanh(checkpoint_name(self.experts(x, choice), "hidden")) * self.scale


@functools.cache
def mixtures():
    """Layers, their input and their choices; and the gradients of the loop."""
    weight = random(0, Layers, Expert, Embed, Embed.alias("out"))
    blocks = Stacked(Mixture(Experts(weight, jnp.linspace(0.5, 1, N)), jnp.linspace(1, 2, N)), Layers)
    x = jax.random.normal(jax.random.key(1), (2, 4))
    choice = jax.random.randint(jax.random.key(2), (N, 2), 0, Expert.size)

    def loop(blocks, x):
        for i in range(N):
            x = blocks[i](x, choice[i])
        return jnp.sum(x**2)

    return (blocks, x, choice), jax.jit(jax.grad(loop, (0, 1)))(blocks, x)


@pytest.mark.parametrize(
    "remat",
    with_remat3(policies("True", "nested, offload", "first layers", "recompute")),
)
def test_fields_that_are_not_sliced_are_read_from_the_stack_and_their_gradients_summed_there(remat):
    (blocks, x, choice), want = mixtures()

    def loss(blocks, x):
        return jnp.sum(blocks.fold(x, choice, remat=remat) ** 2)

    def of_tree(visit, state):
        carry, gradient = visit.vjp("carry", "layer")
        new = jax.tree.map(lambda leaf, of: leaf - 0.1 * of, visit.layer, gradient)
        return LayerResult(carry, new)

    def both(blocks, x):
        y, sweep_back = blocks.fold_vjp(x, choice, remat=remat)
        result = sweep_back(2 * y)
        of_x = sweep_back(2 * y, lambda visit, state: LayerResult(*visit.vjp("carry"))).carry
        return (result.layers, result.carry), sweep_back(2 * y, of_tree).layers, of_x

    assert_close(jax.jit(jax.grad(loss, (0, 1)))(blocks, x), want)
    if remat != "recompute":
        gradients, new, of_x = jax.jit(both)(blocks, x)
        assert_close(gradients, want)
        assert_close(new, jax.tree.map(lambda leaf, of: leaf - 0.1 * of, blocks, want[0]))
        assert_close(of_x, want[1])


class Slice(eqx.Module):
    weight: jax.Array = unsliced()

    def __call__(self, x):
        weight = LayerStack.of(self.weight)
        return layer_fn(x, weight.stack[:, :, :4][weight.layer_index])


class Inner(eqx.Module):
    layers: Stacked

    def __call__(self, x):
        return self.layers.fold(x, remat="nested")


class Row(eqx.Module):
    weight: hax.NamedArray = unsliced()
    gain: Any = unsliced()

    def __call__(self, x):
        weight, gain = LayerStack.of(self.weight, "blocks"), LayerStack.of(self.gain)
        return x * weight.stack["blocks", weight.layer_index].array * gain.stack[gain.layer_index]


@pytest.mark.parametrize("layers", [0, 2])
def test_no_layers_and_layers_under_another_name(layers):
    Blocks = hax.Axis("blocks", layers)
    blocks = Stacked(Row(random(0, Blocks, Embed), jnp.linspace(0.5, 1, layers)), Blocks)
    x = want = jnp.ones(4)
    for block in blocks:
        want = block(want)
    for remat in (True, False, "nested"):
        found, of_x = jax.value_and_grad(lambda x, remat=remat: jnp.sum(blocks.fold(x, remat=remat)))(x)
        assert_close(found, jnp.sum(want))
        y, sweep_back = blocks.fold_vjp(x, remat=remat)
        assert_close(y, want)
        of_y = jax.grad(lambda x, remat=remat: jnp.sum(blocks.fold_vjp(x, remat=remat)[0]))(x)
        assert_close(of_y, of_x)
        for result in (sweep_back(x), sweep_back(x, lambda visit, _: LayerResult(*visit.vjp("carry")))):
            assert_close(result.carry, of_x)
            assert result.layers.stacked.weight.axes == (Blocks, Embed)


def test_unsliced_fields_anywhere():
    """Read through a static slice, in a stack within a stack, outside of folds, and from the host."""
    stacks = [Stacked(Slice(matrices(seed, 3)), hax.Axis("inner", 3)) for seed in range(2)]
    outer = Stacked(Inner(jax.tree.map(lambda *leaves: jnp.stack(leaves), *stacks)), hax.Axis("layers", 2))
    x = jnp.ones((2, 4))

    def loop(outer):
        y = x
        for stack in outer:
            for layer in stack.layers:
                y = layer(y)
        return jnp.sum(y)

    found = jax.jit(jax.grad(lambda outer: jnp.sum(outer.fold(x, remat="nested"))))(outer)
    assert_close(found, jax.jit(jax.grad(loop))(outer))
    stack = Stacked(Slice(matrices()), Layers)
    host = jax.device_put(matrices(), matrices().sharding.with_memory_kind("pinned_host"))
    assert_close(jax.jit(lambda x: Stacked(Slice(host), Layers).fold(x))(x), stack.fold(x))
