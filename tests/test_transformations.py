"""Folds under every policy within random orders of JAX's transformations, beside
`jax.lax.scan`.

A layer has a carry of which a part does not depend on the weights, a leaf that is
passed on unchanged, an A layer has a carry of which a part does not depend on the
weights, a leaf that is passed on unchanged, an integer, a leaf that derivatives do not
read and a buffer that it writes to; outputs of the carry, of the weights alone, and of
nothing but a shared argument; and, where no derivative is in forward mode alone, a rule
that gives another value and is not the derivative. Cases go through kinds of stacks and
of derivatives; what up to two `jax.vmap`s map of each input, and what is
differentiated, are drawn.
"""

import functools
import random
from collections.abc import Callable

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import stacked_remat as sr
from stacked_remat import (
    BlockSeq,
    LayerStack,
    Stacked,
    StackedPattern,
    scan,
    shared,
    unsliced,
)

from .blocks import Tanh as Block, assert_close_to_scale, policies, quick_jit

LENGTH, WIDTH, EXAMPLES = 4, 2, 3
Layers = hax.Axis("layers", LENGTH)
POLICIES = policies(
    *("False", "True", "nested", "offload", "nested, offload"),
    *("max_carries", "nested, names", "first layers", "segments", "nested, internals"),
)
_QUICK = ("nested, offload", "segments", "nested, internals")
INPUTS = {
    "x": jnp.linspace(-1, 1, WIDTH),
    "own": jnp.linspace(0.3, 0.8, WIDTH),
    "passed": jnp.linspace(0.6, 0.9, WIDTH),
    "w": 0.5 * jax.random.normal(jax.random.key(0), (LENGTH, WIDTH, WIDTH)),
    "scale": jnp.linspace(0.5, 1.5, LENGTH),
    "shift": jnp.linspace(0.1, 0.4, WIDTH),
    "apart": jnp.linspace(0.2, 0.7, WIDTH),
}


@jax.custom_vjp
def ruled(x):
    return jnp.sin(x)


ruled.defvjp(
    lambda x: (jnp.sin(1.2 * x), x),
    lambda x, ct: (3 * jnp.clip(ct, -0.3, 0.3) * jnp.cos(x) ** 2,),
)


def layer(carry, w, scale, given, rule, wave=jnp.sin):
    (x, own, passed, count, drift, buffer), (shift, apart) = carry, given
    kept = checkpoint_name(wave(x @ w + shift), "hidden")
    new = (
        x * passed + rule(kept) * scale,
        jnp.cos(own * shift),
        passed,
        count + 1,
        drift - 0.5 * x,
    )
    # The last of three rows is left as it is
    buffer = buffer.at[count // 2].set(own * kept)
    return (*new, buffer), {
        "carry": jnp.sum(x**2),
        "weights": jnp.sum(w**2) * scale,
        "apart": jnp.sum(apart**3),
        "count": count,
    }


class Sine(eqx.Module):
    w: jax.Array

    def __call__(self, carry, scale, given, rule):
        return layer(carry, self.w, scale, given, rule)


class Tanh(Sine):
    def __call__(self, carry, scale, given, rule):
        return layer(carry, self.w, scale, given, rule, jnp.tanh)


def total(run: Callable, shift: str, rule: Callable, inputs: dict) -> jax.Array:
    x, own, passed = inputs["x"], inputs["own"], inputs["passed"]
    init = (
        x,
        own,
        passed,
        jnp.int32(0),
        jnp.cos(x),
        jnp.stack([passed, own, own * passed]),
    )
    carry, outputs = run(
        init, inputs["w"], inputs["scale"], (inputs[shift], inputs["apart"]), rule
    )
    weights = jnp.linspace(0.5, 2, LENGTH)
    outputs = sum(
        jnp.vdot(weights, outputs[name].astype(jnp.float32)) for name in sorted(outputs)
    )
    return sum(
        jnp.sum(jnp.sin(leaf)) for leaf in (*carry[:3], *carry[4:])
    ) + 0.1 * jnp.sin(outputs)


def by_scan(policy, init, w, scale, given, rule):
    return scan(layer, Layers, remat=policy)(init, w, scale, shared(given), rule)


def by_sequence(policy, init, w, scale, given, rule):
    blocks = BlockSeq([Sine(w[0]), Tanh(w[1]), Sine(w[2]), Tanh(w[3])], Layers, policy)
    return blocks.scan(init, scale, shared(given), rule)


class Unsliced(eqx.Module):
    w: jax.Array = unsliced()

    def __call__(self, carry, scale, given, rule):
        w = LayerStack.of(self.w)
        return layer(carry, w.stack[w.layer_index], scale, given, rule)


def by_stack(policy, init, w, scale, given, rule):
    return Stacked(Unsliced(w), Layers, policy).scan(init, scale, shared(given), rule)


def by_pattern(policy, init, w, scale, given, rule):
    pair = Layers.resize(2)
    kinds = {"sine": Stacked(Sine(w[::2]), pair), "tanh": Stacked(Tanh(w[1::2]), pair)}
    blocks = StackedPattern(kinds, ("sine", "tanh") * 2, Layers, policy)
    carry, found = blocks.scan(init, scale, shared(given), rule)
    return carry, jax.tree.map(
        lambda a, b: jnp.stack([a, b], 1).reshape(-1), found["sine"], found["tanh"]
    )


def reference(wave, init, w, scale, given, rule):
    xs = w, scale, jnp.arange(LENGTH)
    return lax.scan(
        lambda carry, x: layer(carry, *x[:2], given, rule, wave(x[2])), init, xs
    )


def alternating(index):
    return lambda x: jnp.where(index % 2 == 0, jnp.sin(x), jnp.tanh(x))


STACKS = {
    by_scan: lambda index: jnp.sin,
    by_sequence: alternating,
    by_pattern: alternating,
    by_stack: lambda index: jnp.sin,
}
MODES = (
    *("jvp of grad", "grad in vmap", "grad of grad", "jvp"),
    *("grad of grad of grad", "grad of jvp", "grad"),
)


class Case:
    """Which transformations, from the inside out, and which inputs they concern."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        around = [
            *(("vmap", self._some(draw)) for _ in range(draw.choice([1, 1, 2]))),
            *draw.sample(
                ["jit", "checkpoint", "ours", "cond", "loop"], draw.choice([0, 1, 2])
            ),
        ]
        draw.shuffle(around)
        self.around = around
        self.wanted = self._some(draw)
        self.stack = list(STACKS)[seed // 3 % len(STACKS)]
        self.mode = MODES[seed % len(MODES)]
        self.rule = jnp.sin if self.mode in ("jvp", "grad of jvp") else ruled
        self.shift = draw.choice(["shift", "shift", "x"])  # which may also be the carry

    @staticmethod
    def _some(draw: random.Random) -> tuple[str, ...]:
        return tuple(draw.sample(sorted(INPUTS), draw.randint(1, len(INPUTS))))

    def __repr__(self) -> str:
        return (
            f"{self.mode} by {self.wanted} of {self.around} {self.stack.__name__}"
            f" {self.shift}"
        )

    def inputs(self) -> dict:
        """Each input with an axis for each `vmap` that maps it, the outermost first."""
        found = dict(INPUTS)
        for step in self.around:
            if step[0] == "vmap":
                factors = jnp.linspace(0.7, 1.2, EXAMPLES)
                found |= {
                    name: jnp.stack([factor * found[name] for factor in factors])
                    for name in step[1]
                }
        return found

    def result(self, run: Callable):
        """The value, and derivatives as `mode` says."""
        value = functools.partial(total, run, self.shift, self.rule)
        if self.mode == "grad in vmap":
            inside = value

            def value(inputs):
                gradient = jax.grad(inside)(inputs)
                return sum(
                    jnp.sum(jnp.sin(gradient[name])) for name in self.wanted
                ) + inside(inputs)

        for step in self.around:
            value = wrapped(step, value)

        def found(wanted: dict) -> jax.Array:
            return jnp.mean(value({**self.inputs(), **wanted}))

        wanted = {name: self.inputs()[name] for name in self.wanted}
        for word in reversed(self.mode.removesuffix(" in vmap").split(" of ")):
            found = derivative(word, found)
        return found(wanted)


def derivative(word: str, fn: Callable) -> Callable:
    if word == "jvp":
        return lambda wanted: jax.jvp(fn, (wanted,), (jax.tree.map(direction, wanted),))
    leaves = lambda wanted: jax.tree.leaves(fn(wanted))  # noqa: E731
    return jax.value_and_grad(
        lambda wanted: sum(jnp.vdot(leaf, direction(leaf)) for leaf in leaves(wanted))
    )


def direction(leaf: jax.Array) -> jax.Array:
    return jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape)


def wrapped(step, value: Callable) -> Callable:
    match step:
        case ("vmap", names):
            return jax.vmap(
                value, ({name: 0 if name in names else None for name in INPUTS},)
            )
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
    return lambda inputs: lax.scan(
        lambda held, _: (held + value(inputs), None), 0 * value(inputs), length=2
    )[0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.deep] * (name not in _QUICK))
        for name in POLICIES
    ],
)
@pytest.mark.parametrize(
    "cases",
    [range(1), pytest.param(range(1, 3), marks=[pytest.mark.deep, pytest.mark.slow])],
    ids=str,
)
def test_every_order_of_transformations(name, cases):
    cases = [Case(list(POLICIES).index(name) + len(POLICIES) * k) for k in cases]

    def results():
        for case in cases:
            ours = functools.partial(case.stack, POLICIES[name])
            yield (
                case.result(ours),
                case.result(functools.partial(reference, STACKS[case.stack])),
            )

    for case, (found, expected) in zip(
        cases, quick_jit(lambda: list(results()))(), strict=True
    ):
        assert_close_to_scale(found, expected, name=case)


def test_hessian_products_where_internals_are_kept():
    """What is kept of a layer is the same for values and tangents, in which products
    have barriers.
    """
    x, w = jnp.linspace(-1, 1, WIDTH)[None], INPUTS["w"]
    order, pattern = [0, 2, 3, 1], tuple("abba")

    def of_pattern(w):
        kinds = {"a": Stacked(Block(w[:2]), 2), "b": Stacked(Block(w[2:]), 2)}
        return StackedPattern(kinds, pattern, LENGTH).fold(x, remat=False)

    def plain(order):
        return lambda w: functools.reduce(lambda x, i: Block(w[i])(x), order, x)

    folds = {
        name: lambda w, policy=policy: Stacked(Block(w), LENGTH).fold(x, remat=policy)
        for name, policy in POLICIES.items()
    }
    folds["until"] = lambda w: sr.fold(
        lambda x, w: Block(w)(x), LENGTH, until=lambda x: x.sum() > 99
    )(x, w)

    def product(fold):
        return jax.jvp(jax.grad(lambda w: jnp.sum(fold(w) ** 2)), (w,), (jnp.cos(w),))[
            1
        ]

    @quick_jit
    def found():
        own = {name: product(fold) for name, fold in folds.items()}
        return (
            own,
            product(of_pattern),
            product(plain(range(LENGTH))),
            product(plain(order)),
        )

    own, pattern_product, expected, in_order = found()
    for name, result in own.items():
        assert_close_to_scale(result, expected, name=name)
    assert_close_to_scale(pattern_product, in_order, name="pattern")
