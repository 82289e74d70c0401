"""`ArrayStacked` beside a loop over its layers, and beside Levanter's own class."""

import random
import sys
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from stacked_remat import ScanCheckpointPolicy, Stacked
from stacked_remat.levanter import ArrayStacked

from .blocks import assert_close
from .jaxprs import equations_of

# Its newest versions need Python 3.12, where `make test` installs it.
with_levanter = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="Levanter needs Python 3.12"
)
POLICIES = (False, True, "offload", "recompute", "save_all", "nested")


class Inner(eqx.Module):
    weights: list[jax.Array]
    pair: tuple[jax.Array, float]
    missing: None = None

    def _state_dict_key_map(self) -> dict[str, str | None]:
        return {"weights": None, "pair": "two"}


class Block(eqx.Module):
    inner: Inner
    scale: float
    offset: jax.Array
    number: jax.Array
    by_name: dict[str, jax.Array]
    has_output: bool = eqx.field(static=True)

    @staticmethod
    def init(width, depth, has_output, scale, *, key):
        keys = jax.random.split(key, depth + 2)
        weights = [jax.random.normal(one, (width, width)) / width for one in keys[2:]]
        return Block(
            Inner(weights, (jax.random.normal(keys[0], (width,)), 0.5)),
            scale,
            jax.random.normal(keys[1], ()),
            jnp.arange(3),
            {"a": jnp.full(width, 0.1), "b": jnp.ones(())},
            has_output,
        )

    def __call__(self, x, *args, **kwargs):
        for weight in self.inner.weights:
            x = x + self.scale * jnp.tanh(x @ weight + self.inner.pair[0] * self.offset)
        for value in (*args, *kwargs.values()):
            if isinstance(value, jax.Array):
                x = x * jnp.cos(jnp.sum(value)) + self.by_name["a"]
            elif value is not None:
                x = value(x)
        return (x, jnp.mean(x) + self.by_name["b"]) if self.has_output else x


class Case(NamedTuple):
    """A random stack, and a call of it."""

    layers: int
    policy: Any
    build: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    in_axes: Any
    unroll: int | bool | None
    has_output: bool

    def made(self, cls):
        *args, keys = self.build
        init = cls.init(self.layers, Block, gradient_checkpointing=self.policy)
        return init(*args, key=keys)

    def run(self, blocks, x):
        verb = blocks.scan if self.has_output else blocks.fold
        options = {"in_axes": self.in_axes, "unroll": self.unroll}
        return verb(x, *self.args, **self.kwargs, **options)

    def looped(self, blocks, x):
        """What a Python loop over the layers gives."""
        of_args, of_kwargs = self.in_axes, {}
        if self.kwargs:
            of_args, of_kwargs = of_args
        if not isinstance(of_args, tuple):
            of_args = (of_args,) * len(self.args)
        outputs = []
        for index, layer in enumerate(blocks.unstacked()):
            args = []
            for value, axis in zip(self.args, of_args, strict=True):
                args.append(value if axis is None else jnp.take(value, index, axis))
            kwargs = {}
            for name, value in self.kwargs.items():
                axis = of_kwargs.get(name)
                kwargs[name] = value if axis is None else jnp.take(value, index, axis)
            x = layer(x, *args, **kwargs)
            if self.has_output:
                x, output = x
                outputs.append(output)
        return (x, jnp.stack(outputs)) if self.has_output else x


def drawn(seed: int) -> Case:
    draw = random.Random(seed)
    # Primes, and a number that is a width too
    layers, width = draw.choice([1, 2, 4, 5, 6]), draw.choice([2, 4])
    has_output = draw.random() < 0.5
    keys = jax.random.split(jax.random.key(seed), layers)
    shapes = {None: (3,), 0: (layers, 2), 1: (2, layers), -1: (2, 3, layers)}

    def argument() -> tuple[Any, int | None]:
        axis = draw.choice([*shapes])
        value = jnp.asarray(np.random.default_rng(seed).normal(size=shapes[axis]))
        if axis is None:
            value = draw.choice([value, None, jnp.tanh])
        return value, axis

    positional = [argument() for _ in range(draw.randrange(3))]
    named = {name: argument() for name in ("mask", "rate")[: draw.randrange(3)]}
    args = tuple(value for value, _ in positional)
    in_axes: Any = tuple(axis for _, axis in positional)
    if named:
        in_axes = in_axes, {name: axis for name, (_, axis) in named.items()}
    kwargs = {name: value for name, (value, _) in named.items()}
    build = (width, draw.randrange(1, 3), has_output, draw.choice([0.25, 1.0]), keys)
    unroll = draw.choice([None, 1, 2, True])
    return Case(
        layers,
        draw.choice(POLICIES),
        build,
        args,
        kwargs,
        in_axes,
        unroll,
        has_output,
    )


def loss_and_gradients(run, blocks, x):
    def loss(arguments):
        return sum(map(jnp.sum, jax.tree.leaves(run(*arguments))))

    return eqx.filter_jit(eqx.filter_value_and_grad(loss))((blocks, x))


@pytest.mark.parametrize("seed", range(12))
def test_values_and_gradients_are_those_of_a_loop(seed):
    case = drawn(seed)
    blocks = case.made(ArrayStacked)
    x = jnp.linspace(-1.0, 1.0, case.build[0])
    assert_close(case.run(blocks, x), case.looped(blocks, x))
    assert_close(
        loss_and_gradients(case.run, blocks, x),
        loss_and_gradients(case.looped, blocks, x),
        rtol=1e-4,
        atol=1e-5,
    )


@with_levanter
@pytest.mark.parametrize("seed", range(24, 36))  # all policies are among them
def test_everything_is_as_of_levanters_class(seed):
    from levanter.layers.stacked import (  # pyright: ignore[reportMissingImports]
        ArrayStacked as Levanters,
    )

    case = drawn(seed)
    ours, theirs = case.made(ArrayStacked), case.made(Levanters)
    x = jnp.linspace(-1.0, 1.0, case.build[0])
    pairs = zip(
        jtu.tree_leaves_with_path(ours), jtu.tree_leaves_with_path(theirs), strict=True
    )
    for (path, leaf), (their_path, their_leaf) in pairs:
        assert path == their_path
        np.testing.assert_array_equal(leaf, their_leaf)
    assert_close(case.run(ours, x), case.run(theirs, x))
    values = loss_and_gradients(case.run, ours, x)
    others = loss_and_gradients(case.run, theirs, x)
    assert_close(jax.tree.leaves(values), jax.tree.leaves(others), rtol=1e-4, atol=1e-5)
    written, expected = ours.to_state_dict("m"), theirs.to_state_dict("m")
    assert [*written] == [*expected]
    for key, value in written.items():
        np.testing.assert_array_equal(value, expected[key])
    zeros = jax.tree.map(jnp.zeros_like, eqx.filter(ours, eqx.is_array))
    blank = eqx.combine(zeros, ours)
    assert eqx.tree_equal(blank.from_state_dict(expected, "m"), ours)
    for one, other in zip(
        jax.tree.leaves(ours.unstacked()),
        jax.tree.leaves(theirs.unstacked()),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


@with_levanter
def test_policies_of_levanter_become_policies_of_this_library():
    from levanter.layers.scan_checkpoint import (  # pyright: ignore[reportMissingImports]
        ScanCheckpointPolicy as Levanters,
    )

    def policy(spec):
        block = {"a": jnp.ones((2, 3))}
        return ArrayStacked(Held(block), 2, spec).gradient_checkpointing

    assert policy(Levanters(simple=True)) == ScanCheckpointPolicy()
    assert policy(Levanters(nested=3)) == ScanCheckpointPolicy(nested=3)
    assert policy(Levanters(disable=True)).saves_everything


class Held(eqx.Module):
    arrays: dict[str, jax.Array]


def stack(layers: int = 3) -> ArrayStacked[Block]:
    keys = jax.random.split(jax.random.key(0), layers)
    return ArrayStacked.init(layers, Block)(2, 1, False, 1.0, key=keys)


def test_arrays_without_the_layers_in_front_are_shared():
    blocks = ArrayStacked(Held({"own": jnp.ones((3, 2)), "all": jnp.ones(5)}), 3)

    def add(layer, x):
        return x + layer.arrays["own"].sum() + layer.arrays["all"].sum()

    assert blocks.fold_via(add)(jnp.zeros(())) == 3 * (2 + 5)


def test_layers_are_mapped_over_and_taken_out():
    blocks = stack()
    means = blocks.vmap_via(lambda layer, scale: layer.offset * scale)(2.0)
    assert_close(means, 2.0 * blocks.stacked.offset)
    outer = blocks.vmap_via(
        lambda layer, row: layer.by_name["a"] * row, in_axes=1, out_axes=1
    )(jnp.ones((2, 3)))
    assert outer.shape == (2, 3)
    last = blocks.get_layer(-1)
    assert eqx.tree_equal(last, blocks.unstacked()[2])
    traced = eqx.filter_jit(lambda index: blocks.get_layer(index))(jnp.array(2))
    assert eqx.tree_equal(traced, last)
    with pytest.raises(IndexError):
        blocks.get_layer(3)


class Counted(eqx.Module):
    """Writes its part of a state dict itself."""

    count: jax.Array

    def to_state_dict(self, prefix):
        return {f"{prefix}.n": self.count}

    def from_state_dict(self, state_dict, prefix):
        return Counted(jnp.asarray(state_dict[f"{prefix}.n"]))


def test_a_state_dict_has_what_layers_hold_by_name():
    class Layer(eqx.Module):
        inner: Inner
        by_name: dict[str, jax.Array]
        counted: Counted
        scale: float

    numbers = jnp.arange(3.0)
    inner = Inner([numbers, numbers + 1], (numbers + 2, 0.5))
    layer = Layer(inner, {"a": numbers + 3}, Counted(numbers + 4), 2.0)
    blocks = ArrayStacked(layer, 3)
    expected = {"m.inner.two.1": 0.5, "m.scale": 2.0}
    for index in range(3):
        # The key map gives the list no name of its own
        names = ["inner.0", "inner.1", "inner.two.0", "by_name.a", "counted.n"]
        for offset, name in enumerate(names):
            expected[f"m.{index}.{name}"] = float(index + offset)
    found = blocks.to_state_dict("m")
    assert {key: float(value) for key, value in found.items()} == expected
    without_number = {**found}
    del without_number["m.scale"]
    empty = jax.tree.map(jnp.zeros_like, eqx.filter(blocks, eqx.is_array))
    empty = eqx.combine(empty, blocks)
    assert eqx.tree_equal(empty.from_state_dict(without_number, "m"), blocks)
    # Without a prefix layers have their numbers alone
    plain = blocks.to_state_dict()
    assert [*plain][0] == "0.inner.0" and plain["scale"] == 2.0
    assert eqx.tree_equal(empty.from_state_dict(plain), blocks)


def test_it_becomes_a_stack():
    x = jnp.ones((2, 2))
    blocks = ArrayStacked.init(3, eqx.nn.LayerNorm)(2)
    stacked = blocks.as_stacked()
    assert isinstance(stacked, Stacked) and len(stacked) == 3
    run = jax.vmap
    assert_close(
        stacked.fold_via(lambda layer, x: run(layer)(x))(x),
        blocks.fold_via(lambda layer, x: run(layer)(x))(x),
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stack(0), "num_layers is at least 1"),
        (lambda: stack().fold(jnp.ones(2), in_axes=(0,)), "1 axes for 0 positional"),
        (
            lambda: stack().fold(jnp.ones(2), jnp.ones((2, 4)), in_axes=0),
            r"splits args\[0\] over 3 layers",
        ),
        (lambda: stack().fold(jnp.ones(2), 1.0, in_axes=0), "got float"),
        (
            lambda: stack().fold(jnp.ones(2), mask=None, in_axes=(None, {"rate": 0})),
            r"\['rate'\], and the call has \['mask'\]",
        ),
        (lambda: stack().fold(jnp.ones(2), unroll=0), "unroll is at least 1"),
        (lambda: stack().vmap_via(jnp.ones, out_axes=0.5), "an integer or None; got"),
        (
            lambda: ArrayStacked(jnp.ones((3, 2)), 3).to_state_dict(),
            "takes a prefix",
        ),
        (
            lambda: stack().from_state_dict(
                {"m.0.offset": jnp.ones(()), "m.2.offset": jnp.ones(())}, "m"
            ),
            "none of layer 1",
        ),
    ],
)
def test_errors_say_what_to_write(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize(("unroll", "at_once"), [(None, 1), (False, 1), (2, 2)])
def test_how_many_layers_an_iteration_runs(unroll, at_once):
    program = equations_of(lambda x: stack().fold(x, unroll=unroll), jnp.ones(2))
    loops = [equation for equation in program if equation.primitive.name == "scan"]
    assert [loop.params["unroll"] for loop in loops] == [at_once]
