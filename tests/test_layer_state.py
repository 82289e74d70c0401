"""`eqx.nn.State` through stacks equals the loop over their layers, each with its own part of the state."""

import functools
import operator
import random
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox.nn import State, StateIndex

from stacked_remat import BlockSeq, ScanCheckpointPolicy, Stacked, StackedPattern, shared

from .blocks import quick_jit

Layers, Width = hax.Axis("layers", 5), hax.Axis("width", 3)
POLICIES: dict[str, Any] = {
    "False": False,
    "True": True,
    "nested": "nested",
    "offload": "offload",
    "recompute": "recompute",
    "max_carries": ScanCheckpointPolicy(max_carries=2),
    "segments": ScanCheckpointPolicy(segment_length=2),
    "first": ScanCheckpointPolicy(nested=True, first_layers=2, first_policy=False),
    "inputs": ScanCheckpointPolicy(save_inputs="offload"),
}


class Own(eqx.Module):
    """A state of Python numbers, arrays and named arrays."""

    count: StateIndex
    mean: StateIndex

    def __init__(self):
        self.count = StateIndex(0)
        self.mean = StateIndex({"mean": hax.zeros(Width), "scale": jnp.ones(())})

    def __call__(self, x, state):
        count, mean = state.get(self.count), state.get(self.mean)
        new = 0.5 * mean["mean"].array + 0.5 * jax.lax.pmean(x, "batch")
        state = state.set(self.count, count + 1)
        state = state.set(self.mean, {"mean": hax.named(new, Width), "scale": mean["scale"] * 1.5})
        return x - new * mean["scale"] + 0.1 * count.astype(x.dtype), state


class Batch(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    own: Own

    def __init__(self, key):
        self.linear = eqx.nn.Linear(3, 3, key=key)
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="ema")
        self.own = Own()

    def __call__(self, x, state, gain):
        y, state = self.norm(self.linear(x), state)
        y, state = self.own(y, state)
        return x + gain * jnp.tanh(y), state


class Spectral(eqx.Module):
    linear: eqx.nn.SpectralNorm
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.SpectralNorm(eqx.nn.Linear(3, 3, key=key), "weight", key=key)
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")

    def __call__(self, x, state, gain):
        y, state = self.linear(x, state)
        y, state = self.norm(y, state)
        return x + gain * jnp.tanh(y), state


class Model(eqx.Module):
    first: Own
    blocks: Any
    last: eqx.nn.BatchNorm

    def __init__(self, build):
        self.first = Own()
        self.blocks = build(key=jax.random.split(jax.random.key(0), Layers.size))
        self.last = eqx.nn.BatchNorm(3, "batch", mode="ema")


BUILD = {
    "stack": Stacked.init(Layers, Batch),
    "pattern": StackedPattern.init(Layers, {"b": Batch, "s": Spectral}, ("b", "s", "s")),
    "sequence": BlockSeq.init(Layers, Batch),
}


def apply(model, x, state, gains, run):
    x, state = model.first(x, state)
    x, state = run(model.blocks, x, state, gains)
    return model.last(x, state)


def folded(blocks, x, state, gains, remat, verb="fold"):
    return getattr(blocks, verb)(x, state, gains, remat=remat)


def part(state, i):
    def of_layer(leaf):
        return leaf["layers", i] if isinstance(leaf, hax.NamedArray) else leaf[i]

    return jax.tree.map(of_layer, state, is_leaf=hax.is_named_array)


def joined(states):
    def stack(*leaves):
        is_named = isinstance(leaves[0], hax.NamedArray)
        return hax.stack(Layers.resize(len(leaves)), leaves) if is_named else jnp.stack(leaves)

    return jax.tree.map(stack, *states, is_leaf=hax.is_named_array)


def looped(blocks, x, state, gains):
    """The loop over the layers, each with its own state; their entries are stacked again, if they were."""
    layers, new = list(blocks), []
    for i, layer in enumerate(layers):
        if isinstance(blocks, BlockSeq):
            x, own = layer(x, state.substate(layer), gains[i])
            state = state.update(own)
            continue
        alike = [other for other in range(i) if type(layers[other]) is type(layer)]
        x, own = layer(x, part(state.substate(layer), len(alike)), gains[i])
        new.append((type(layer), own))
    for kind in {kind for kind, _ in new}:
        state = state.update(joined([own for other, own in new if other is kind]))
    return x, state


def outcomes(model, x, state, gains, run):
    """Values and gradients of two steps, of the model, the input, the gains and the state."""
    batched = jax.vmap(
        lambda model, x, state, gains: apply(model, x, state, gains, run),
        axis_name="batch",
        in_axes=(None, 0, None, None),
        out_axes=(0, None),
    )

    def loss(trained):
        model, x, state, gains = trained
        for _ in range(2):
            x, state = batched(model, x, state, gains)
        floats = jax.tree.leaves(eqx.filter(state, eqx.is_inexact_array))
        of_state = sum(jnp.sum(jnp.sin(jnp.arange(leaf.size, dtype=leaf.dtype)) * leaf.ravel()) for leaf in floats)
        return jnp.sum(x**2) + of_state, (x, state)

    return eqx.filter_value_and_grad(loss, has_aux=True)((model, x, state, gains))


@pytest.mark.parametrize("verb", ["fold", "scan"])
@pytest.mark.parametrize("kind", BUILD)
def test_a_stack_with_state_is_its_loop(kind, verb):
    model, state = eqx.nn.make_with_state(Model)(BUILD[kind])
    x, gains = jax.random.normal(jax.random.key(1), (4, 3)), jnp.linspace(0.5, 1.0, Layers.size)
    runs = {name: functools.partial(folded, remat=policy, verb=verb) for name, policy in POLICIES.items()}
    arrays, static = eqx.partition((model, x, state, gains), eqx.is_array)

    @quick_jit
    def both(arrays):
        given = eqx.combine(arrays, static)
        found = {name: outcomes(*given, run) for name, run in {"loop": looped, **runs}.items()}
        return eqx.filter(found, eqx.is_array)

    import time
    t=time.time(); c = both.lower(arrays); t1=time.time(); c=c.compile(); t2=time.time(); print("T", t1-t, t2-t1)
    found = both(arrays)
    for name in runs:
        for a, b in zip(jax.tree.leaves(found["loop"]), jax.tree.leaves(found[name]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)
