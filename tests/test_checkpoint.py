"""`checkpoint`, `BlockSeq.of` and `checkpoint_name`: what they compute, keep, accept
and refuse.
"""

import collections
import functools
import gc
import re
import weakref
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

from stacked_remat import (
    BlockSeq,
    ScanCheckpointPolicy,
    checkpoint,
    checkpoint_name,
    internals_are_saved,
)

from .blocks import Hidden, looped, quick_jit
from .jaxprs import equations_of
from .random_arrays import normal
from .test_checkpoint_composition import X, close, layer

W = normal(1, 4, 4) / 2


class Block(eqx.Module):
    weight: hax.NamedArray
    kind: str = eqx.field(static=True)
    act: Any

    def __call__(self, x: Any, *, times: int, power: Any = None, label: str) -> Any:
        assert isinstance(times, int) and isinstance(label, str)
        y = x["x"] + jnp.sum(jnp.float32(x["table"]))
        for _ in range(times):
            y = self.act(
                hax.dot(y, self.weight, axis="hidden").rename({"out": "hidden"})
            )
        scale = 1.0 if power is None else power
        return {
            "y": y * scale,
            "label": label,
            "act": self.act,
            "none": None,
            "count": times,
        }


def test_any_tree_goes_in_and_comes_out():
    block = Block(
        normal(2, Hidden, hax.Axis("out", 3)),
        "dense",
        hax.tanh,
    )
    x = {"x": normal(3, Hidden), "table": np.arange(3)}

    def loss(arrays, run):
        block, x, power = eqx.combine(arrays, static)
        found = run(block)(x, times=2, power=power, label="here")
        assert (
            found["label"] == "here"
            and found["act"] is hax.tanh
            and found["none"] is None
        )
        assert found["count"] == 2 and found["y"].axes == (Hidden,)
        return hax.sum(found["y"] ** 2).scalar()

    arrays, static = eqx.partition((block, x, jnp.float32(3)), eqx.is_inexact_array)
    gradients = (
        jax.grad(loss)(arrays, checkpoint),
        jax.grad(loss)(arrays, lambda fun: fun),
    )
    jax.tree.map(close, *gradients)
    assert len(jax.tree.leaves(gradients[0])) == 3


class WithMethod(eqx.Module):
    weight: jax.Array

    @functools.partial(checkpoint, save=["hidden"])
    def __call__(self, x):
        """Doc."""
        return layer(x, self.weight)


def test_it_decorates_a_method_and_keeps_the_name():
    assert (
        WithMethod.__call__.__doc__ == "Doc." and checkpoint(layer).__name__ == "layer"
    )
    gradient = eqx.filter_grad(lambda module: jnp.sum(module(X)))(WithMethod(W))
    close(gradient.weight, jax.grad(lambda w: jnp.sum(layer(X, w)))(W))


def compiled_text(compiled):
    return compiled.as_text() or ""


class TestOutsideOfDerivatives:
    def test_a_call_is_a_call_of_the_function(self):
        seen = []
        # Known values, as without it
        checkpoint(lambda x: seen.append(x) if x > 0 else None)(X[0, 0])
        assert seen[0] is not None and not isinstance(seen[0], Tracer)

    def test_the_compiled_program_is_that_of_the_function(self):
        def operations(fun):
            return re.findall(
                r" = \S+ ([a-z-]+)\(", compiled_text(jax.jit(fun).lower(X, W).compile())
            )

        assert operations(checkpoint(layer)) == operations(layer)
        assert "barrier" not in jax.jit(checkpoint(layer)).lower(X, W).as_text()


@pytest.mark.parametrize(
    "run",
    [
        lambda f, x: f(x),
        lambda f, x: jax.grad(f)(x),
        lambda f, x: jax.jit(jax.grad(f))(x),
    ],
)
def test_no_array_is_kept_alive(run):
    def call():
        x, closed_over, given = jnp.array(X), jnp.array(W), jnp.array(W)
        run(
            lambda x: jnp.sum(
                checkpoint(lambda x, w: layer(x, closed_over) @ w)(x, given)
            ),
            x,
        )
        return [weakref.ref(array) for array in (x, closed_over, given)]

    references = call()
    gc.collect()
    assert not any(reference() is not None for reference in references)


def residuals(fun, *args):
    """The shapes kept for the backward pass, with the arguments' own, and which are on
    the host.
    """
    kept = jax.make_jaxpr(lambda *args: jax.vjp(fun, *args)[1])(*args).out_avals
    return collections.Counter(
        (
            f"host {leaf.shape}"
            if leaf.memory_space == jax.memory.Space.Host
            else leaf.shape
        )
        for leaf in kept
    )


@pytest.mark.parametrize(
    "options, kept",
    [
        pytest.param({}, [], id="nothing"),
        pytest.param(
            {"save": ["hidden"]}, [(8, 5)], id="a name", marks=pytest.mark.remat3
        ),
        pytest.param({"save": ["hidden", "activation"]}, [(8, 5), (8, 6)], id="names"),
        pytest.param(
            {"save": jax.checkpoint_policies.dots_saveable},
            [(8, 5), (8, 6)],
            id="products",
        ),
        pytest.param({"offload": ["hidden"]}, ["host (8, 5)"], id="on the host"),
    ],
)
def test_what_is_kept(options, kept):
    def fun(x, up, down):
        return jnp.sum(
            jnp.sin(
                checkpoint_name(
                    jnp.sin(checkpoint_name(x @ up, "hidden")) @ down, "activation"
                )
            )
        )

    args = X, jnp.ones((4, 5)), jnp.ones((5, 6))
    arguments = collections.Counter(arg.shape for arg in args)
    assert residuals(
        checkpoint(fun, **options), *args
    ) == arguments + collections.Counter(kept)


def test_a_block_is_told_that_its_internals_are_not_saved():
    answers = []
    for options in ({}, {"save": ["hidden"]}, {"save": True}):
        fun = checkpoint(
            lambda x: (answers.append(internals_are_saved()), x)[1], **options
        )
        jax.eval_shape(fun, 1.0)
    assert answers == [False, False, True] and internals_are_saved()


def wide(x, w):
    return x + jnp.mean(jnp.tanh(jnp.sin(x[:, None] * w)), axis=1)


SIZE = 1 << 12


def chain(run, depth):
    """Temporaries of the gradient of a chain, in carries, and its number of
    operations.
    """

    def loss(x, ws):
        return jnp.sum(run([functools.partial(wide, w=w) for w in ws], x))

    ws = [jax.ShapeDtypeStruct((1, 8), jnp.float32)] * depth
    compiled = (
        jax.jit(jax.grad(loss, (0, 1)))
        .lower(jax.ShapeDtypeStruct((SIZE,), jnp.float32), ws)
        .compile()
    )
    tanh = len(re.findall(r" tanh\(", compiled_text(compiled)))
    return compiled.memory_analysis().temp_size_in_bytes / (4 * SIZE), tanh


def in_a_loop(around):
    return lambda layers, x: looped(map(around, layers), x)


@functools.cache
def costs(name, depth):
    return chain(
        {"none": in_a_loop(lambda f: f), "each": in_a_loop(checkpoint), **CUTS}[name],
        depth,
    )


def cut_by(remat):
    return lambda layers, x: BlockSeq.of(layers, remat=remat).fold(x)


CUTS = {
    "cut": cut_by("nested"),
    "nested=4": cut_by(ScanCheckpointPolicy(nested=4)),
    "max_carries=4": cut_by(ScanCheckpointPolicy(max_carries=4)),
}


# XLA for CPUs drops barriers, and merges what is computed again
MERGES = jax.__version_info__ < (
    0,
    12,
)


@pytest.mark.skipif(MERGES, reason="an older XLA for CPUs")
def test_recomputation_survives_compilation():
    """Outside of loops, where XLA would merge equal operations. The last region needs
    none.
    """
    assert (costs("none", 16)[1], costs("each", 16)[1]) == (16, 31)
    assert costs("none", 16)[0] > 16 * 24 and costs("each", 16)[0] < 16 + 24


@pytest.mark.skipif(MERGES, reason="an older XLA for CPUs")
@pytest.mark.parametrize(
    "name, replays, growth",
    [("nested=4", 9, 2), ("cut", 12, 2), ("max_carries=4", 18, 1)],
)
def test_a_cut_chain_costs_what_its_schedule_says(name, replays, growth):
    """Operations of 16 layers, and how many more inputs are kept than of 8."""
    assert costs(name, 16)[1] == 31 + replays
    assert costs(name, 16)[0] - costs(name, 8)[0] == pytest.approx(growth, abs=1)


def test_a_sequential_with_state_and_keys():
    """Layers that change the shape, keep state and draw numbers."""
    keys = jax.random.split(jax.random.key(5), 3)
    model, state = eqx.nn.make_with_state(
        lambda: eqx.nn.Sequential(
            [
                eqx.nn.Linear(4, 7, key=keys[0]),
                eqx.nn.BatchNorm(7, "batch", mode="batch"),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Sequential(
                    [eqx.nn.Linear(7, 5, key=keys[1]), eqx.nn.Dropout(0.5)]
                ),
                eqx.nn.Linear(5, 2, key=keys[2]),
            ]
        )
    )()
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    keys = jax.random.split(jax.random.key(6), (len(X), len(model)))

    def gradient(run):
        def loss(arrays, x):
            applied = functools.partial(run, eqx.combine(arrays, static))
            batched = jax.vmap(
                applied, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None)
            )
            y, new_state = batched(x, state, keys)
            return jnp.sum(y * jnp.asarray([1.0, 2.0])[None]), new_state

        return jax.grad(loss, (0, 1), has_aux=True)(arrays, X)

    def cut(remat):
        return lambda layers, x, state, keys: BlockSeq.of(layers, remat=remat).fold(
            x, state, key=keys
        )

    def in_turn(layers, x, state, keys):
        for block, key in zip(BlockSeq.of(layers), keys, strict=True):
            x, state = block(x, state, key=key)
        return x, state

    policies = ScanCheckpointPolicy(nested=3), ScanCheckpointPolicy(max_carries=2)
    wanted, *found = quick_jit(
        lambda: [gradient(run) for run in (in_turn, *map(cut, policies))]
    )()
    for result in found:
        jax.tree.map(close, result, wanted)


def test_a_list_of_functions_of_trees():
    layers = [
        lambda x: (x, x["a"] @ W),
        lambda pair: pair[0]["a"] + pair[1],
        jnp.sin,
        lambda x: jnp.sum(x**2),
    ]
    x = {"a": X, "label": "here"}
    gradient = jax.grad(lambda a: cut_by("nested")(layers, {**x, "a": a}))(X)
    close(gradient, jax.grad(lambda a: jnp.sum(jnp.sin(a + a @ W) ** 2))(X))


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: checkpoint(layer, save="hidden"), TypeError, r"save=\['hidden'\]"),
        (
            lambda: checkpoint(layer, offload="hidden"),
            TypeError,
            r"offload=\['hidden'\]",
        ),
        (lambda: checkpoint(layer, save=jnp.sin), TypeError, "not a checkpoint policy"),
        (
            lambda: checkpoint(layer, save=["a"], offload=["a"]),
            ValueError,
            r"\['a'\] are in both save=\['a'\] and offload",
        ),
        (
            lambda: checkpoint(layer, save=True, offload=["a"]),
            ValueError,
            "both save=True and offload",
        ),
        (
            lambda: BlockSeq.of([layer], 2),
            ValueError,
            "`layers` has 2 layers, but BlockSeq.of was given 1",
        ),
    ],
)
def test_mistakes(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False), reason="JAX_REMAT3=1 refuses it otherwise"
)
def test_ordered_effects_cannot_be_offloaded():
    def fun(x):
        jax.debug.print("{}", x, ordered=True)
        return jnp.sum(checkpoint_name(jnp.sin(x), "hidden"))

    with pytest.raises(TypeError, match="ordered effects"):
        jax.grad(checkpoint(fun, offload=["hidden"]))(X)


def test_names_every_array_of_a_tree_and_nothing_else():
    Axis = hax.Axis("a", 2)
    tree = {
        "named": hax.ones(Axis),
        "plain": jnp.ones(3),
        "text": "x",
        "none": None,
        "act": jnp.tanh,
        "n": 1,
    }
    named = checkpoint_name(tree, "here")
    assert eqx.tree_equal(named, tree) and named["named"].axes == (Axis,)
    found = equations_of(
        lambda a, b: checkpoint_name((a, b), "here"), hax.ones(Axis), jnp.ones(3)
    )
    assert [equation.params["name"] for equation in found] == ["here", "here"]
