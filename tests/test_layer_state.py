"""`eqx.nn.State` through stacks equals the loop over their layers, each with its own
part of the state.
"""

import functools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox.nn import State, StateIndex

from stacked_remat import (
    BlockSeq,
    ScanCheckpointPolicy,
    Stacked,
    StackedPattern,
    shared,
)

from .blocks import assert_close, quick_jit

Layers, Width = hax.Axis("layers", 3), hax.Axis("width", 2)
POLICIES: dict[str, Any] = {
    "False": False,
    "recompute": "recompute",
    "offload": "offload",
    "max_carries": ScanCheckpointPolicy(max_carries=2),
    "first": ScanCheckpointPolicy(nested=True, first_layers=1),
}


class Own(eqx.Module):
    """A state of its own: Python numbers, arrays and named arrays."""

    count: StateIndex
    mean: StateIndex

    def __init__(self):
        self.count = StateIndex(0)
        self.mean = StateIndex({"mean": hax.zeros(Width), "scale": jnp.ones(())})

    def __call__(self, x, state):
        count, mean = state.get(self.count), state.get(self.mean)
        new = 0.5 * mean["mean"].array + 0.5 * jax.lax.pmean(x, "batch")
        state = state.set(self.count, count + 1)
        state = state.set(
            self.mean, {"mean": hax.named(new, Width), "scale": mean["scale"] * 1.5}
        )
        return x - new * mean["scale"] + 0.1 * count.astype(x.dtype), state


class Batch(eqx.Module):
    norm: eqx.nn.BatchNorm
    own: Own
    weight: jax.Array

    def __init__(self, key):
        self.norm, self.own = eqx.nn.BatchNorm(2, "batch", mode="ema"), Own()
        self.weight = jax.random.normal(key, (2,))

    def __call__(self, x, state, gain):
        y, state = self.norm(x * self.weight, state)
        y, state = self.own(y, state)
        return x + gain * jnp.tanh(y), state


class Spectral(eqx.Module):
    linear: eqx.nn.SpectralNorm

    def __init__(self, key):
        self.linear = eqx.nn.SpectralNorm(
            eqx.nn.Linear(2, 2, key=key), "weight", key=key
        )

    def __call__(self, x, state, gain):
        y, state = self.linear(x, state)
        return x + gain * jnp.tanh(y), state


class Model(eqx.Module):
    """A stack beside another module that keeps state."""

    other: Own
    blocks: Any

    def __init__(self, build):
        self.other = Own()
        self.blocks = build(key=jax.random.split(jax.random.key(0), Layers.size))

    def __call__(self, x, state, gains, run):
        x, state = run(self.blocks, x, state, gains)
        return self.other(x, state)


def part(state, i):
    def of_layer(leaf):
        return leaf["layers", i] if isinstance(leaf, hax.NamedArray) else leaf[i]

    return jax.tree.map(of_layer, state, is_leaf=hax.is_named_array)


def joined(states):
    def stack(*leaves):
        is_named = isinstance(leaves[0], hax.NamedArray)
        return (
            hax.stack(Layers.resize(len(leaves)), leaves)
            if is_named
            else jnp.stack(leaves)
        )

    return jax.tree.map(stack, *states, is_leaf=hax.is_named_array)


def looped(blocks, x, state, gains):
    """The loop over the layers, each with its own state; their entries are stacked
    again, if they were.
    """
    new = []
    for i, layer in enumerate(blocks):
        if isinstance(blocks, BlockSeq):
            x, own = layer(x, state.substate(layer), gains[i])
            state = state.update(own)
        else:
            row = sum(kind is type(layer) for kind, _ in new)
            x, own = layer(x, part(state.substate(layer), row), gains[i])
            new.append((type(layer), own))
    for kind in {kind for kind, _ in new}:
        state = state.update(joined([own for other, own in new if other is kind]))
    return x, state


def folded(blocks, x, state, gains, remat):
    return blocks.fold(x, state, gains, remat=remat)


def outcome(run, model, x, state, gains):
    """The result, the new state, and gradients by the model, the input, the old state
    and the gains.
    """
    batched = jax.vmap(
        lambda model, *given: model(*given, run),
        axis_name="batch",
        in_axes=(None, 0, None, None),
        out_axes=(0, None),
    )

    def loss(trained):
        x, state = batched(*trained)
        floats = jax.tree.leaves((x, eqx.filter(state, eqx.is_inexact_array)))
        return sum(
            jnp.sum(jnp.sin(jnp.arange(y.size, dtype=y.dtype) * y.ravel()))
            for y in floats
        ), (
            x,
            state,
        )

    return eqx.filter_value_and_grad(loss, has_aux=True)((model, x, state, gains))


@pytest.mark.parametrize(
    "build, policies",
    [
        (Stacked.init(Layers, Batch), POLICIES),
        (
            StackedPattern.init(Layers, {"b": Batch, "s": Spectral}, ("s", "b", "s")),
            {"nested": "nested", "recompute": "recompute"},
        ),
        (BlockSeq.init(Layers, Batch), {"True": True}),
    ],
    ids=["stack", "pattern", "sequence"],
)
def test_a_stack_with_state_is_its_loop(build, policies):
    model, state = eqx.nn.make_with_state(Model)(build)
    x, gains = (
        jax.random.normal(jax.random.key(1), (4, 2)),
        jnp.linspace(0.5, 1.0, Layers.size),
    )
    runs = {
        name: functools.partial(folded, remat=policy)
        for name, policy in policies.items()
    }
    arrays, static = eqx.partition((model, x, state, gains), eqx.is_array)

    @quick_jit
    def outcomes(arrays):
        given: Any = eqx.combine(arrays, static)
        found = {
            name: outcome(run, *given) for name, run in {"loop": looped, **runs}.items()
        }
        return eqx.filter(found, eqx.is_array)

    found = outcomes(arrays)
    expected = found.pop("loop")
    for name, own in found.items():
        assert jax.tree.structure(own) == jax.tree.structure(expected)
        assert_close(own, expected, 1e-4, 1e-5, name)


class Counter(eqx.Module):
    """Counts its calls, and adds the count to the carry."""

    count: StateIndex
    step: float

    def __init__(self, step):
        self.count, self.step = StateIndex(0), step

    def __call__(self, x, state):
        count = state.get(self.count) + 1
        return x + self.step * count.astype(x.dtype), state.set(self.count, count)


class WithOutput(Counter):
    def __call__(self, x, state, note=1.0):
        x, state = super().__call__(x, state)
        return x, {"note": note * x, "state": state}


class Beside(eqx.Module):
    other: Counter
    blocks: Any


def counters(Stack: Any = Stacked, kind: Any = Counter):
    steps = jnp.arange(1.0, 4.0)

    def build():
        if Stack is StackedPattern:
            blocks = Stack.init(3, {"a": kind, "b": kind}, ("a", "b", "a"))(steps)
        else:
            blocks = Stack.init(3, kind)(steps)
        return Beside(Counter(1.0), blocks)

    return eqx.nn.make_with_state(build)()


def counts(model, state):
    """The count of each layer, in their order, and that of the module beside them."""
    own = state.substate(model.blocks)
    found = [
        layer_count
        for count in jax.tree.leaves(own)
        for layer_count in np.ravel(count).tolist()
    ]
    return sorted(found), int(state.get(model.other.count))


stacks = pytest.mark.parametrize("Stack", [Stacked, StackedPattern, BlockSeq])


@stacks
def test_every_layer_counts_its_own_calls(Stack):
    model, state = counters(Stack)
    for calls in (1, 2):
        x, state = model.blocks.fold(jnp.zeros(()), state=state, reverse=calls == 2)
        assert counts(model, state) == ([calls] * 3, 0) and x == 6.0 * calls
    x, state = model.other(x, state)  # a state that is not old, and is whole
    part = model.blocks.fold(x, state.substate(model.blocks))[1]
    assert counts(model, state.update(part)) == ([3] * 3, 1)


@stacks
def test_a_state_among_outputs_is_whole(Stack):
    model, state = counters(Stack, WithOutput)
    x, outputs = model.blocks.scan(jnp.zeros(()), state, note=jnp.arange(3.0))
    found = outputs if Stack is not StackedPattern else outputs["a"]
    assert counts(model, found["state"]) == ([1] * 3, 0)
    np.testing.assert_allclose(
        found["note"], [0.0, 3.0, 12.0] if Stack is not StackedPattern else [0.0, 12.0]
    )
    outputs = model.blocks.vmap(jnp.zeros(()), state, note=jnp.arange(3.0))
    found = outputs if Stack is not StackedPattern else outputs["a"]
    assert counts(model, found[1]["state"]) == ([1] * 3, 0)


@stacks
def test_what_a_layer_does_with_states_of_others(Stack):
    model, state = counters(Stack)
    blocks, x, name = model.blocks, jnp.zeros(()), Stack.__name__
    with pytest.raises(
        ValueError,
        match=f"layer of {name}.fold uses the state .*other.count.*not its own",
    ):
        blocks.fold_via(lambda block, x, state: model.other(x, state))(x, state)
    with pytest.raises(KeyError, match="no name of a state"):
        blocks.fold_via(lambda block, x, state: {}["no name of a state"])(x, state)
    _, foreign = counters()
    with pytest.raises(
        ValueError, match=f"layer of {name}.scan returns the state .*not its own"
    ):
        blocks.scan_via(lambda block, x, state: (x, foreign))(x, state.substate(blocks))
    shared_by_all = state.substate(model.other)  # updated in turn, in the carry
    (_, new), state = blocks.fold_via(
        lambda block, carry, state: (model.other(*carry), block(x, state)[1])
    )((x, shared_by_all), state)
    assert counts(model, state) == ([1] * 3, 0) and int(new.get(model.other.count)) == 3


def test_what_is_no_call_with_a_state():
    model, state = counters()
    blocks, x = model.blocks, jnp.zeros(())
    with pytest.raises(
        ValueError,
        match=r"its layers return \(carry, state\); one returned float32\[\]",
    ):
        blocks.fold_via(lambda block, x, state: x)(x, state)
    with pytest.raises(
        ValueError, match=r"State without that of layer\.count.*make_with_state"
    ):
        blocks.fold(x, state.substate(model.other))
    with pytest.raises(TypeError, match="whatever its mark. Pass it without shared"):
        blocks.fold(x, shared(state))
    with pytest.raises(
        ValueError,
        match="The carry of Stacked.fold has the state .*Pass the state as an arg",
    ):
        blocks.fold((x, state))
    with pytest.raises(ValueError, match=r"scan_vjp\(x, state.substate\(blocks\)\)"):
        blocks.fold_vjp(x, state)
    with pytest.raises(
        ValueError, match=r"state.* has leading dimension 3 \(shape \(3,\)\)"
    ):
        blocks[1:].fold(x, state)
    (_, new), sweep_back = blocks.scan_vjp(x, state.substate(blocks))
    assert isinstance(new, State) and counts(model, state.update(new)) == ([1] * 3, 0)


def test_a_layer_of_a_sequence_returns_one_state():
    model, state = counters(BlockSeq)

    def twice(block, x, state):
        _, new = block(x, state)
        return x, (new, new)

    with pytest.raises(ValueError, match="returned 2 States in one output"):
        model.blocks.scan_via(twice)(jnp.zeros(()), state.substate(model.blocks))


def test_layers_without_a_state_of_their_own_pass_it_on():
    model, state = counters()
    plain = Stacked.init(3, eqx.nn.Linear)(
        2, 2, key=jax.random.split(jax.random.key(0), 3)
    )
    y, new = plain.fold_via(lambda block, x, state: (block(x), state))(
        jnp.ones(2), state
    )
    assert y.shape == (2,) and eqx.tree_equal(new, state)


@pytest.mark.parametrize("of", ["list", "filter_vmap", "built with state"])
def test_a_stack_of_layers_that_keep_state(of):
    steps = jnp.arange(1.0, 4.0)
    if of == "built with state":
        layers, states = zip(*map(eqx.nn.make_with_state(Counter), steps), strict=True)
        blocks, state = (
            Stacked.of(layers),
            jax.tree.map(lambda *counts: jnp.stack(counts), *states),
        )
    else:
        layers = (
            [Counter(step) for step in steps]
            if of == "list"
            else eqx.filter_vmap(Counter)(steps)
        )
        blocks, state = eqx.nn.make_with_state(Stacked.of)(layers, 3)
    x, new = blocks.fold(jnp.zeros(()), state)
    assert x == 6.0 and jax.tree.leaves(new)[0].tolist() == [1, 1, 1]
    assert jax.tree.structure(Stacked.of(blocks.unstacked())) == jax.tree.structure(
        blocks
    )
    x, new = BlockSeq(blocks.unstacked(), blocks.Layers).fold(jnp.zeros(()), state)
    assert x == 6.0 and jax.tree.leaves(new)[0].tolist() == [1, 1, 1]
