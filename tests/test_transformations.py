"""Folds under every policy within random orders of JAX's transformations, beside `jax.lax.scan`.

A layer has a carry of which a part does not depend on the weights, a leaf that is passed on unchanged and
an integer; outputs of the carry, of the weights alone, and of nothing but a shared argument. The kind of
stack is drawn, and for each input what is mapped, by up to two `jax.vmap`s, and what is differentiated.
"""

import functools
import random
from collections.abc import Callable

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import stacked_remat as sr
from stacked_remat import BlockSeq, LayerStack, Stacked, StackedPattern, scan, shared, unsliced

from .blocks import policies, quick_jit

LENGTH, WIDTH, EXAMPLES = 4, 2, 3
Layers = hax.Axis("layers", LENGTH)
POLICIES = policies(
    *("False", "True", "nested", "offload", "nested, offload"),
    *("max_carries", "nested, names", "first layers", "segments"),
)
INPUTS = {
    "x": jnp.linspace(-1, 1, WIDTH),
    "own": jnp.linspace(0.3, 0.8, WIDTH),
    "passed": jnp.linspace(0.6, 0.9, WIDTH),
    "w": 0.5 * jax.random.normal(jax.random.key(0), (LENGTH, WIDTH, WIDTH)),
    "scale": jnp.linspace(0.5, 1.5, LENGTH),
    "shift": jnp.linspace(0.1, 0.4, WIDTH),
}


def layer(carry, w, scale, shift, wave=jnp.sin):
    x, own, passed, count = carry
    kept = checkpoint_name(wave(x @ w + shift), "hidden")
    new = (x * passed + kept * scale, jnp.cos(own * shift), passed, count + 1)
    return new, {
        "carry": jnp.sum(x**2),
        "weights": jnp.sum(w**2) * scale,
        "shared": jnp.sum(shift),
        "count": count,
    }


class Sine(eqx.Module):
    w: jax.Array

    def __call__(self, carry, scale, shift):
        return layer(carry, self.w, scale, shift)


class Tanh(Sine):
    def __call__(self, carry, scale, shift):
        return layer(carry, self.w, scale, shift, jnp.tanh)


def total(run: Callable, shift: str, inputs: dict) -> jax.Array:
    init = (inputs["x"], inputs["own"], inputs["passed"], jnp.int32(0))
    carry, outputs = run(init, inputs["w"], inputs["scale"], inputs[shift])
    weights = jnp.linspace(0.5, 2, LENGTH)
    outputs = sum(jnp.vdot(weights, outputs[name].astype(jnp.float32)) for name in sorted(outputs))
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in carry[:3]) + 0.1 * jnp.sin(outputs)


def by_scan(policy, init, w, scale, shift):
    return scan(layer, Layers, remat=policy)(init, w, scale, shared(shift))


def by_sequence(policy, init, w, scale, shift):
    blocks = BlockSeq([Sine(w[0]), Tanh(w[1]), Sine(w[2]), Tanh(w[3])], Layers, policy)
    return blocks.scan(init, scale, shared(shift))


class Unsliced(eqx.Module):
    w: jax.Array = unsliced()

    def __call__(self, carry, scale, shift):
        w = LayerStack.of(self.w)
        return layer(carry, w.stack[w.layer_index], scale, shift)


def by_stack(policy, init, w, scale, shift):
    return Stacked(Unsliced(w), Layers, policy).scan(init, scale, shared(shift))


def by_pattern(policy, init, w, scale, shift):
    pair = Layers.resize(2)
    kinds = {"sine": Stacked(Sine(w[::2]), pair), "tanh": Stacked(Tanh(w[1::2]), pair)}
    blocks = StackedPattern(kinds, ("sine", "tanh") * 2, Layers, policy)
    carry, found = blocks.scan(init, scale, shared(shift))
    return carry, jax.tree.map(lambda a, b: jnp.stack([a, b], 1).reshape(-1), found["sine"], found["tanh"])


def reference(wave, init, w, scale, shift):
    xs = w, scale, jnp.arange(LENGTH)
    return lax.scan(lambda carry, x: layer(carry, *x[:2], shift, wave(x[2])), init, xs)


def alternating(index):
    return lambda x: jnp.where(index % 2 == 0, jnp.sin(x), jnp.tanh(x))


STACKS = {
    by_scan: lambda index: jnp.sin,
    by_stack: lambda index: jnp.sin,
    by_sequence: alternating,
    by_pattern: alternating,
}


class Case:
    """Which transformations, from the inside out, and which inputs they concern."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        around = [
            *(("vmap", self._some(draw)) for _ in range(draw.choice([1, 1, 2]))),
            *draw.sample(["jit", "checkpoint", "ours", "cond", "loop"], draw.choice([0, 1, 2])),
        ]
        draw.shuffle(around)
        self.around = around
        self.wanted = self._some(draw)
        self.stack = draw.choice([by_scan, by_stack, by_sequence, by_pattern])
        self.mode = draw.choice(
            ["grad", "grad", "grad in vmap", "jvp", "jvp of grad", "grad of grad", "grad of jvp"]
        )
        self.shift = draw.choice(["shift", "shift", "x"])  # which may also be the carry

    @staticmethod
    def _some(draw: random.Random) -> tuple[str, ...]:
        return tuple(draw.sample(sorted(INPUTS), draw.randint(1, len(INPUTS))))

    def __repr__(self) -> str:
        return f"{self.mode} by {self.wanted} of {self.around} {self.stack.__name__} {self.shift}"

    def inputs(self) -> dict:
        """Each input with an axis for each `vmap` that maps it, the outermost first."""
        found = dict(INPUTS)
        for step in self.around:
            if step[0] == "vmap":
                factors = jnp.linspace(0.7, 1.2, EXAMPLES)
                found |= {name: jnp.stack([factor * found[name] for factor in factors]) for name in step[1]}
        return found

    def result(self, run: Callable):
        """The value, and derivatives as `mode` says."""
        value = functools.partial(total, run, self.shift)
        if self.mode == "grad in vmap":
            inside = value

            def value(inputs):
                gradient = jax.grad(inside)(inputs)
                return sum(jnp.sum(jnp.sin(gradient[name])) for name in self.wanted) + inside(inputs)

        for step in self.around:
            value = wrapped(step, value)

        def of_wanted(wanted: dict) -> jax.Array:
            return jnp.mean(value({**self.inputs(), **wanted}))

        wanted = {name: self.inputs()[name] for name in self.wanted}
        direction = jax.tree.map(
            lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape), wanted
        )
        gradient = jax.value_and_grad(of_wanted)
        along = lambda wanted: jax.jvp(of_wanted, (wanted,), (direction,))  # noqa: E731
        match self.mode:
            case "grad" | "grad in vmap":
                return gradient(wanted)
            case "jvp":
                return along(wanted)
            case "jvp of grad":
                return jax.jvp(gradient, (wanted,), (direction,))
            case "grad of grad":
                return jax.grad(lambda wanted: vdot(gradient(wanted)[1], direction))(wanted)
        return jax.grad(lambda wanted: along(wanted)[1])(wanted)


def vdot(a, b):
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def wrapped(step, value: Callable) -> Callable:
    match step:
        case ("vmap", names):
            return jax.vmap(value, ({name: 0 if name in names else None for name in INPUTS},))
        case "jit":
            return jax.jit(value)
        case "checkpoint":
            return jax.checkpoint(value)
        case "ours":
            return sr.checkpoint(value)
        case "cond":
            return lambda inputs: lax.cond(
                jnp.sum(inputs["shift"]) > -100, value, lambda i: 0 * value(i), inputs
            )
    return lambda inputs: lax.scan(lambda held, _: (held + value(inputs), None), 0 * value(inputs), length=2)[
        0
    ]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("cases", [range(1), pytest.param(range(1, 3), marks=pytest.mark.deep)], ids=str)
def test_every_order_of_transformations(name, cases):
    cases = [Case(100 * list(POLICIES).index(name) + k) for k in cases]

    def results():
        for case in cases:
            ours = functools.partial(case.stack, POLICIES[name])
            yield case.result(ours), case.result(functools.partial(reference, STACKS[case.stack]))

    for case, (found, expected) in zip(cases, quick_jit(lambda: list(results()))(), strict=True):
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape, case
            limit = 2e-5 * max(1.0, float(np.abs(other).max()))
            assert np.abs(np.asarray(one) - np.asarray(other)).max() <= limit, case
