"""`shared`, also on the host, `per_layer`, single random keys, and errors that say how
to share or split.
"""

import functools
import warnings

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import (
    BlockSeq,
    LayerResult,
    Stacked,
    StackedPattern,
    fold,
    map,
    per_layer,
    scan,
    shared,
)
from stacked_remat._scan.arguments import is_unsplit_key

from .blocks import PlainBlock, assert_close

Layers = hax.Axis("layers", 4)


def message_of(call):
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def seen_by(apply):
    """The part of an argument that each layer gets; `apply` passes a function that
    records it to a fold.
    """
    seen = []

    def record(part):
        jax.debug.callback(
            lambda part: seen.append(np.asarray(part)), part, ordered=True
        )

    apply(record)
    jax.effects_barrier()
    return seen


class Recorder(eqx.Module):
    """A block that passes its argument `x` to a function."""

    weight: jax.Array

    def __call__(self, carry, x, record):
        record(x)
        return carry


STACKS = [
    Stacked.init(Layers, Recorder)(jnp.zeros(4)),
    BlockSeq([Recorder(jnp.zeros(())) for _ in range(4)], Layers),
]
FOLDS = [
    lambda x, record: STACKS[0].fold(0.0, x=x, record=record),
    lambda x, record: STACKS[1].fold(0.0, x, record),
    lambda x, record: STACKS[0].scan_via(lambda b, c, x: (b(c, x, record), None))(
        0.0, x
    ),
    lambda x, record: fold(lambda carry, x: record(x) or carry, Layers)(0.0, x),
    lambda x, record: scan(lambda carry, x: (carry, record(x)), Layers)(0.0, x=x),
    lambda x, record: map(record, Layers)(x),
]


class TestMarks:
    """A square array can be split or shared, and a mark says which."""

    square = jnp.arange(16.0).reshape(4, 4)

    @pytest.mark.parametrize("apply", FOLDS)
    def test_each_layer_gets_the_whole_or_its_part(self, apply):
        whole = seen_by(lambda record: apply(shared(self.square), record))
        np.testing.assert_array_equal(whole, [self.square] * 4)
        for x in (self.square, per_layer(self.square)):
            np.testing.assert_array_equal(
                seen_by(lambda record, x=x: apply(x, record)), self.square
            )

    @pytest.mark.parametrize("Stack", [Stacked, BlockSeq])
    def test_init_and_vmap(self, Stack):
        stack = Stack.init(Layers, Recorder)(shared(self.square))
        assert all(block.weight.shape == (4, 4) for block in stack)
        stack = Stack.init(Layers, Recorder)(per_layer(self.square))
        got = stack.vmap_via(lambda block, x: block.weight @ x)(shared(jnp.ones(4)))
        np.testing.assert_allclose(got, self.square.sum(1))

    def test_a_part_of_an_argument_and_the_innermost_mark(self):
        tree = {"whole": self.square, "parts": per_layer([self.square, None, "text"])}

        def step(carry, tree, named):
            assert tree["whole"].shape == (4, 4) and tree["parts"][0].shape == (4,)
            assert tree["parts"][1:] == [None, "text"] and named.axes == (Layers,)
            return carry

        fold(step, Layers)(0.0, shared(tree), named=shared(hax.arange(Layers)))
        fold(lambda carry, x, nothing: carry, "layers")(
            0.0, per_layer(self.square), nothing=per_layer(None)
        )
        refuse = lambda leaf: False  # noqa: E731
        rows = seen_by(
            lambda record: fold(lambda c, x: record(x) or c, Layers, is_scanned=refuse)(
                0.0, per_layer(self.square)
            )
        )
        np.testing.assert_array_equal(rows, self.square)

    @pytest.mark.parametrize("stack", STACKS, ids=["Stacked", "BlockSeq"])
    def test_marked_arguments_of_transformations(self, stack):
        """Marked trees are PyTrees, which `jit`, `grad` and `vmap` take as
        arguments.
        """

        def loss(weights, scales):
            step = lambda block, x, weight, scale: jnp.tanh(weight @ x) * scale  # noqa: E731
            return jnp.sum(
                stack.fold_via(step, remat="nested")(jnp.ones(4), weights, scales)
            )

        def derivatives(loss, weights, scales, batch):
            return jax.grad(loss, (0, 1))(weights, scales), jax.vmap(loss, (0, None))(
                batch, scales
            )

        square, scales = 0.03 * self.square, jnp.linspace(0.5, 1.0, 4)
        pairs, run = jnp.stack([square, -square]), functools.partial(derivatives, loss)
        found = jax.jit(run)(shared(square), per_layer(scales), shared(pairs))
        marked_inside = lambda weights, scales: loss(shared(weights), per_layer(scales))  # noqa: E731
        expected = jax.jit(functools.partial(derivatives, marked_inside))(
            square, scales, pairs
        )
        assert_close(found, expected)

    @pytest.mark.parametrize(
        "x, message",
        [
            (
                hax.ones(hax.Axis("width", 4)),
                r"x has no axis `layers` \(axes width=4\)",
            ),
            (jnp.ones(()), r"x has no dimension to split"),
            (jax.random.key(0), r"no dimension to split.*jax.random.split\(x, 4\)"),
        ],
    )
    def test_what_cannot_be_split(self, x, message):
        with pytest.raises(ValueError, match=message) as error:
            FOLDS[0](per_layer(x), None)
        assert "whole array" not in str(error.value)

    @pytest.mark.parametrize("stack", STACKS)
    def test_what_may_be_for_each_layer_or_for_each_feature(self, stack):
        def call(x, scale):
            return stack.fold_via(lambda block, x, scale: x * jnp.mean(scale))(x, scale)

        message = (
            r"splits scale over the 4 layers.*Write per_layer\(scale\).*or"
            r" shared\(scale\)"
        )
        scale, x = jnp.arange(4.0), jnp.ones((2, 4))
        with pytest.warns(UserWarning, match=message) as caught:
            call(x, scale)
        assert caught[0].filename == __file__
        with pytest.warns(UserWarning, match=message):
            call(hax.ones(hax.Axis("features", 4)), scale)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(x, per_layer(scale))
            call(x, shared(scale))
            call(jnp.ones(3), scale)

    @pytest.mark.parametrize("Stack", [Stacked, BlockSeq])
    def test_a_list_of_numbers(self, Stack):
        numbers = [0.1, 0.2, 0.3, 0.4]
        assert (
            Stack.init(Layers, Recorder)(shared(numbers)).get_layer(0).weight == numbers
        )
        split = Stack.init(Layers, Recorder)(per_layer(numbers))
        assert [float(layer.weight) for layer in split] == [
            float(jnp.float32(number)) for number in numbers
        ]
        assert (
            split.get_layer(1).weight * jnp.ones(2, jnp.bfloat16)
        ).dtype == jnp.bfloat16  # as of a number


class TestKeys:
    @pytest.mark.parametrize("Stack", [Stacked, BlockSeq])
    @pytest.mark.parametrize(
        "key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"]
    )
    def test_a_wrong_number_of_keys_is_told_to_split(self, Stack, key):
        for count in (1, 5):
            keys = jax.random.split(key, count)
            message = message_of(
                lambda keys=keys: Stack.init(Layers, PlainBlock)(3, key=keys)
            )
            assert f"key has leading dimension {count}" in message
            assert (
                "jax.random.split(key, 4)" in message and "whole array" not in message
            )
        for depth in (
            2,
            4,
        ):  # a raw key is two integers, which could be split over two layers
            message = message_of(
                lambda depth=depth: Stack.init(depth, PlainBlock)(3, key=key)
            )
            assert (
                f"key=jax.random.split(key, {depth})" in message
                and "every layer of `layers`" in message
            )

    def test_a_raw_key_for_two_layers_is_recognized_by_its_name(self):
        raw, key = jax.random.PRNGKey(0), jax.random.key(0)
        for name in ("key", "rng", "seed", "init_key", "seeds", "dropoutKey", "key2"):
            assert is_unsplit_key(name, raw)
        for name in ("monkeys", "keyboard", "seeded", "ids", "args[0]"):
            assert not is_unsplit_key(name, raw) and is_unsplit_key(name, key)
        split = (jax.random.split(key, 2) for key in (raw, key))
        assert not any(
            is_unsplit_key("key", value)
            for value in (*split, jnp.zeros(2, jnp.int32), 3)
        )

    @pytest.mark.parametrize("apply", FOLDS)
    @pytest.mark.parametrize(
        "key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"]
    )
    def test_a_call_refuses_a_single_key(self, apply, key):
        """It would give every layer the same dropout mask."""
        for argument, name in (
            (key, "x"),
            ({"rng": key}, r"x\['rng'\]"),
            ([None, {"key": key}], r"x\[1\]\['key'\]"),
        ):
            if name == "x" and key.ndim == 1:
                continue  # two integers are recognized as a key by their name
            with pytest.raises(
                ValueError,
                match=(
                    rf"{name} is a single random key.*every"
                    rf" (layer|step).*split\({name}, 4\)"
                ),
            ):
                apply(argument, lambda x: None)
            apply(shared(argument), lambda x: None)
            apply(
                jax.tree.map(lambda key: jax.random.split(key, 4), argument),
                lambda x: None,
            )
        keys = [key] * 4
        with pytest.raises(ValueError, match=r"x is a list of 4 .*jnp.stack\(x\)"):
            apply(keys, lambda x: None)
        apply(jnp.stack(keys), lambda x: None)

    @pytest.mark.parametrize("Stack", [Stacked, BlockSeq])
    def test_a_raw_key_of_two_layers_in_a_call(self, Stack):
        stack = Stack.init(Layers.resize(2), Recorder)(jnp.zeros(2))
        call = stack.fold_via(lambda block, x, *, key: x)
        with pytest.raises(
            ValueError,
            match=r"key=jax.random.split\(key, 2\).*key=stacked_remat.shared\(key\)",
        ):
            call(0.0, key=jax.random.PRNGKey(0))
        # The mark says that there is a number for each layer
        call(0.0, key=per_layer(jnp.zeros(2, jnp.uint32)))
        vmapped = jax.vmap(
            lambda key: stack.vmap_via(lambda block, *, key: block.weight)(
                key=shared(key)
            )
        )
        assert vmapped(jax.random.split(jax.random.key(0), 3)).shape == (3, 2)

    @pytest.mark.parametrize("Stack", [Stacked, BlockSeq])
    def test_init_may_share_a_key(self, Stack):
        first, *others = Stack.init(Layers, PlainBlock)(
            3, key=shared(jax.random.key(0))
        )
        assert all(eqx.tree_equal(first, other) for other in others)

    def test_is_scanned_may_share_a_key(self):
        named_only = lambda leaf: isinstance(leaf, hax.NamedArray)  # noqa: E731
        fold(lambda carry, key: carry, Layers, is_scanned=named_only)(
            0.0, jax.random.key(0)
        )

    def test_numbers_that_a_stack_holds_are_not_keys(self):
        class Seeded(eqx.Module):
            seed: jax.Array

            def __call__(self, x):
                return x

        stack = Stacked.init(Layers.resize(2), Seeded)(
            per_layer(jnp.zeros(2, jnp.uint32))
        )
        assert (
            stack.fold(0.0) == 0.0
            and stack.vmap(0.0).shape == (2,)
            and stack[0].seed.shape == ()
        )


class Scaled(eqx.Module):
    value: jax.Array
    gain: hax.NamedArray

    def __call__(self, x, bias):
        return jnp.tanh(x @ self.value) * self.gain.array[None] + bias[None]


@pytest.mark.parametrize("stack", [Stacked, StackedPattern, BlockSeq])
def test_layers_are_given_arrays_on_the_device_whatever_is_shared(stack):
    """Arrays of NumPy have no `.at`, and none on the host can be added to one on the
    device.
    """

    class Layer(eqx.Module):
        weight: jax.Array

        def __call__(self, x, y):
            return jnp.sin(x * self.weight) + y.at[0].set(0.0)

    def build(weight):
        return Layer(weight)

    axis, given = (
        hax.Axis("layers", 3),
        np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
    )
    kinds = (
        ({"a": build, "b": build}, ("a", "b")) if stack is StackedPattern else (build,)
    )
    blocks = stack.init(axis, *kinds)(jnp.ones((3, 4)))
    on_host = jax.device_put(jnp.asarray(given[0]), jax.memory.Space.Host)

    def looped(rows):
        x = jnp.ones(4)
        for y in rows:
            x = jnp.sin(x) + jnp.asarray(y).at[0].set(0.0)
        return x

    def mapped():
        found = blocks.vmap(shared(jnp.ones(4)), shared(given[0]))
        return found if isinstance(found, dict) else {"all": found}

    for rows in jax.jit(mapped)().values():
        np.testing.assert_allclose(rows, [looped([given[0]])] * len(rows), rtol=1e-6)

    def folds(on_host):
        policies = (True, "nested", "recompute", "save_all")
        arguments = (shared(given[0]), per_layer(given), shared(on_host))
        return [
            [blocks.fold(jnp.ones(4), y, remat=remat) for y in arguments]
            for remat in policies
        ]

    expected = [looped(rows) for rows in ([given[0]] * 3, given, [given[0]] * 3)]
    for found in jax.jit(folds)(on_host):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_arrays_on_the_host_that_all_layers_share():
    weights = jax.random.normal(jax.random.key(0), (Layers.size, 4, 4)) / 2
    blocks = Stacked(Scaled(weights, hax.arange(hax.Axis("embed", 4)) / 4), Layers)
    x, bias = jnp.ones((2, 4)), jnp.linspace(0, 1, 4)

    def visitor(visit, state):
        carry, gradient, args, _ = visit.vjp()
        new = eqx.tree_at(
            lambda block: block.value, visit.layer, visit.layer.value - gradient.value
        )
        return LayerResult(carry, new, args)

    def steps(blocks, bias):
        found = []
        for remat in (True, "nested"):
            y, sweep_back = blocks.fold_vjp(x, shared(bias), remat=remat)
            visited = sweep_back(jnp.ones_like(y), visitor)
            found.append((visited.layers, *visited.args))
        for remat in (True, "recompute", "nested"):

            def loss(blocks, bias, remat=remat):
                return jnp.sum(blocks.fold(x, shared(bias), remat=remat))

            found.append(jax.grad(loss, (0, 1))(blocks, bias))
        return found

    def on_host(tree):
        return jax.device_put(tree, bias.sharding.with_memory_kind("pinned_host"))

    want, found = (
        jax.jit(steps)(blocks, bias),
        jax.jit(steps)(on_host(blocks), on_host(bias)),
    )
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(found)} == {
        "pinned_host"
    }
    moved = jax.device_put(found, bias.sharding)
    assert_close(moved, want, rtol=2e-5, atol=2e-6)
