"""Tests of `grouped_experts` in a fold, where experts are read from the stack of all
layers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import LayerStack, Stacked, memory, per_layer, unsliced
from stacked_remat.ops import grouped_experts

from ..blocks import assert_close, assert_close_to_scale, quick_jit
from ..random_arrays import normal

Layers = Axis("layers", 3)


def swiglu(weights, rows, gates):
    hidden = jax.nn.silu(rows @ (1 * weights["gate"])) * (rows @ weights["up"])
    return (hidden * gates[:, None]) @ weights["down"]


def transposing(weights, rows, gates):
    return swiglu({**weights, "up": weights["up"].T.T}, rows, gates)


class Mixture(eqx.Module):
    """Each token's experts; in a fold they are in the stack of all layers."""

    Experts: Axis = eqx.field(static=True)
    expert: Callable = eqx.field(static=True)
    weights: dict = unsliced()

    def __call__(self, x, choices):
        weights: Any = self.weights
        if isinstance(weights, LayerStack):
            gate = weights.layer["gate"].astype(x.dtype)
            weights = dataclasses.replace(weights, own={**weights.layer, "gate": gate})
        gates = jnp.linspace(0.5, 1, choices.size, dtype=x.dtype).reshape(choices.shape)
        return x + grouped_experts(
            self.expert, weights, self.Experts, x, choices, gates, backend="block"
        )


def mixtures(*, expert=swiglu, make=normal, experts=4, width=4, inner=3):
    shapes = {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    weights = {
        name: make(i, 3, experts, *shape)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return Stacked(Mixture(Axis("experts", experts), expert, weights), Layers)


def one_by_one(choices, stack, x):
    for block, own in zip(stack, choices, strict=True):
        x = block(x, own)
    return x


@pytest.mark.parametrize("trained", ["up", "gate up down"])
def test_values_and_gradients_are_those_of_one_layer_after_the_other(trained):
    choices = np.argsort(np.random.default_rng(0).random((3, 6, 4)))[..., :2]
    choices[1, 2:, 0] = [9, -1, 4, 11]  # of no expert of this layer, but some of others
    choices, x, cotangent = jnp.asarray(choices), normal(7, 6, 4), normal(8, 6, 4)

    def gradients(run, stack):
        is_trained = jax.tree.map(lambda _: False, stack)
        of_weights = {name: name in trained.split() for name in stack.stacked.weights}
        is_trained = eqx.tree_at(
            lambda stack: stack.stacked.weights, is_trained, of_weights
        )
        part, rest = eqx.partition(stack, is_trained)
        return jax.value_and_grad(
            lambda part, x: jnp.vdot(run(eqx.combine(part, rest), x), cotangent), (0, 1)
        )(part, x)

    cases = [(True, swiglu), ("nested", transposing), (False, swiglu)]

    def found():
        return [
            gradients(
                lambda stack, x, r=remat: stack.fold(x, per_layer(choices), remat=r),
                mixtures(expert=expert),
            )
            for remat, expert in cases
        ]

    wanted = quick_jit(
        lambda: gradients(functools.partial(one_by_one, choices), mixtures())
    )()
    for case, results in zip(cases, quick_jit(found)(), strict=True):
        assert_close(results, wanted, 1e-4, 1e-4, case)


@pytest.mark.deep
def test_gradients_of_gradients():
    choices, x = jnp.asarray([[[0], [1], [3]]] * 3), normal(7, 3, 4)

    def penalty(run):
        def of_stack(stack):
            return jnp.sum(jax.grad(lambda x: jnp.sum(run(stack, x) ** 2))(x) ** 2)

        return jax.grad(of_stack)(mixtures())

    def folded(stack, x):
        return stack.fold(x, per_layer(choices), remat=True)

    looped = functools.partial(one_by_one, choices)
    found, wanted = quick_jit(lambda: (penalty(folded), penalty(looped)))()
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(wanted))
    assert_close_to_scale(found, wanted, 1e-4)


def test_the_layer_of_a_stack_has_what_all_layers_share():
    Width = Axis("width", 3)
    shared, own = (
        hax.named(jnp.arange(3.0), Width),
        hax.named(jnp.ones((3, 3)), (Layers, Width)),
    )
    found = LayerStack(
        {"shared": shared, "number": jnp.ones(()), "own": own}, 1, "layers"
    ).layer
    assert (
        found["shared"].axes == found["own"].axes == (Width,)
        and found["number"].shape == ()
    )


@pytest.mark.target("cuda")
def test_no_copy_of_a_layer_is_made_for_a_gpu():
    def shape(_, *sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    stack = mixtures(make=shape, experts=64, width=512, inner=512)
    x, choices = shape(0, 256, 512), jax.ShapeDtypeStruct((3, 256, 1), jnp.int32)

    def loss(x, stack, choices):
        return jnp.sum(
            stack.fold(x, per_layer(choices), remat=True).astype(jnp.float32)
        )

    report = memory.report(jax.grad(loss), x, stack, choices, target="h200")
    assert report.temporaries < 64 * 512 * 512 * 2  # one of the three arrays of a layer
