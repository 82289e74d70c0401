"""The reverse sweep with a visitor: gradients, order, updates in place, states, and
what is refused.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import (
    LayerResult,
    LayerStack,
    ScanCheckpointPolicy,
    Stacked,
    checkpoint_name,
    memory,
    shared,
    unsliced,
)
from stacked_remat._memory_spaces import compiled_for

from .blocks import POLICIES, Tanh, assert_close as close, looped, policies, with_remat3
from .random_arrays import normal

N = 5
WITH_VISITORS = policies(
    "False",
    "offload",
    "nested",
    "max_carries",
    "names offloaded",
    "nested, offload, names",
    "first layers",
)
Layers, Batch, Expert, Embed = hax.make_axes(layers=N, batch=2, expert=3, embed=4)


class Block(eqx.Module):
    """Named and plain arrays, two of them not sliced, one shared by all, an integer, a
    function, a number.
    """

    weight: hax.NamedArray
    scale: jax.Array
    gain: hax.NamedArray
    number: jax.Array
    activation: Callable
    power: float
    experts: hax.NamedArray = unsliced()
    shift: Any = unsliced()

    def __call__(self, carry, offset, *, bias):
        x, count = carry
        h = checkpoint_name(
            hax.dot(x, self.weight, axis="embed").rename({"out": "embed"}), "hidden"
        )
        h = h * self.gain + self.row(self.number % 3) + LayerStack.of(self.shift).layer
        x = x + self.activation(h) * self.scale**self.power + offset + bias
        return (x, count + self.number), hax.sum(x * x, axis="embed")

    def row(self, choice):
        """One expert's, without a copy of the others."""
        if isinstance(self.experts, LayerStack):
            layer_index, stack = self.experts.layer_index, self.experts.stack
            assert stack.axes == (
                Layers,
                Expert,
                Embed,
            ) and self.experts.layer.axes == (Expert, Embed)
            return hax.named(stack.array[layer_index, choice], Embed)
        return hax.named(self.experts.array[choice], Embed)


def random(seed, *axes):
    return normal(seed, *axes) * 0.5


def example():
    block = Block(
        random(0, Layers, Embed, Embed.alias("out")),
        jnp.linspace(0.5, 1, N),
        random(1, Embed),
        jnp.arange(N),
        hax.tanh,
        1.0,
        random(7, Layers, Expert, Embed),
        jnp.linspace(0.5, 1, N),
    )
    carry = (random(2, Batch, Embed), jnp.int32(0))
    return Stacked(block, Layers), carry, random(3, Embed, Layers), random(4, Batch)


def leaves(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)]


def assert_close(found, expected):
    assert leaves(found)
    close(leaves(found), leaves(expected), 2e-5, 2e-6)


@functools.cache
def expected(reverse):
    """Gradients by JAX of the Python loop, and the input of every layer."""
    blocks, carry, offset, bias = example()

    def run_loop(blocks, x, offset, bias):
        carry_, outputs, means = (x, carry[1]), {}, {}
        for i in range(N)[:: -1 if reverse else 1]:
            means[i] = jnp.mean(carry_[0].array)
            carry_, outputs[i] = blocks[i](carry_, offset["layers", i], bias=bias)
        ys = hax.stack(Layers, [outputs[i] for i in range(N)])
        return (carry_[0], ys), jnp.stack([means[i] for i in range(N)])

    @eqx.filter_jit
    def run(*args):
        (x, ys), pullback, means = eqx.filter_vjp(run_loop, *args, has_aux=True)
        return (x, ys), pullback((random(5, *x.axes), random(6, *ys.axes))), means

    return run(blocks, carry[0], offset, bias)


def visitor(visit, seen):
    """Uses all that there is: it updates the layer, and returns both states and all
    cotangents.
    """
    carry, layer, args, kwargs = visit.vjp()
    where = lambda block: (block.weight, block.experts, block.shift)  # noqa: E731
    new = jax.tree.map(
        lambda leaf, of: leaf - 0.1 * of, where(visit.layer), where(layer)
    )
    order, count = seen
    return LayerResult(
        carry,
        eqx.tree_at(where, visit.layer, new),
        args,
        kwargs,
        (order.at[count].set(visit.layer_index), count + 1),
        {"mean": jnp.mean(visit.carry[0].array), "kept": visit.layer_state["kept"]},
    )


@pytest.mark.parametrize("remat", with_remat3(WITH_VISITORS))
def test_a_visitor_sees_the_gradients_of_the_loop_and_updates_it(remat):
    # The others show the other order
    reverse = remat in (
        False,
        "nested",
        POLICIES["first layers"],
    )
    blocks, carry, offset, bias = example()
    outputs, (of_blocks, of_x, of_offset, of_bias), means = expected(reverse)

    @eqx.filter_jit
    def forward(blocks, carry, offset, bias):
        return blocks.scan_vjp(carry, offset, bias=bias, remat=remat, reverse=reverse)

    (found, ys), sweep_back = forward(blocks, carry, offset, bias)
    assert_close((found[0], ys), outputs)
    assert int(found[1]) == sum(range(N))
    cotangent = ((random(5, *found[0].axes), None), random(6, *ys.axes))

    @eqx.filter_jit
    def backward(sweep_back, layer_state):
        seen = (jnp.zeros(N, jnp.int32), jnp.int32(0))
        return sweep_back(cotangent, visitor, seen, layer_state)

    layer_state = {"mean": jnp.zeros(N), "kept": jnp.ones((N, 3))}
    visited = backward(sweep_back, layer_state)
    assert_close(visited.carry[0], of_x)
    assert_close(visited.args, of_offset)
    assert_close(visited.kwargs["bias"], of_bias)
    for name in ("weight", "experts", "shift"):
        found, before, of = (
            getattr(it.stacked, name) for it in (visited.layers, blocks, of_blocks)
        )
        assert_close(found, before - 0.1 * of)
    assert_close(visited.layers.stacked.scale, blocks.stacked.scale)
    assert isinstance(visited.layers, Stacked)
    order, _ = visited.state
    assert order.tolist() == [*range(N)][:: 1 if reverse else -1]
    np.testing.assert_allclose(visited.layer_state["mean"], means, rtol=1e-5, atol=1e-6)
    assert visited.layer_state["kept"].tolist() == layer_state["kept"].tolist()


def test_zeros_are_like_what_a_visit_gives():
    blocks, carry, offset, bias = example()
    _, (of_blocks, _, of_offset, of_bias), _ = expected(False)

    def add(visit, total):
        found = visit.vjp()
        return LayerResult(found.carry, state=jax.tree.map(jnp.add, total, found))

    @eqx.filter_jit
    def sums(blocks, carry, offset, bias):
        (_, ys), sweep_back = blocks.scan_vjp(carry, offset, bias=bias)
        cotangent = ((random(5, *carry[0].axes), None), random(6, *ys.axes))
        return sweep_back(cotangent, add, sweep_back.zeros()).state

    found = sums(blocks, carry, offset, bias)
    for name in ("weight", "experts"):
        of_layers = getattr(of_blocks.stacked, name)
        assert_close(getattr(found.layer, name), hax.sum(of_layers, Layers))
    assert_close(found.layer.gain, of_blocks.stacked.gain)
    assert_close(found.args[0], hax.sum(of_offset, Layers))
    assert_close(found.kwargs["bias"], of_bias)
    assert found.carry[1] is found.layer.number is None


def test_arguments_that_are_no_arrays_have_no_cotangents():
    class Power(eqx.Module):
        weight: jax.Array

        def __call__(self, x, power, name):
            return x + jnp.tanh(self.weight * x) ** power

    def visit(visit, _):
        found = visit.vjp()
        return LayerResult(found.carry, args=found.args)

    blocks = Stacked(Power(normal(0, N, 3)), N)
    y, sweep_back = blocks.fold_vjp(jnp.ones(3), 2, "name")
    assert sweep_back(jnp.ones_like(y), visit).args == (None, None)


def matrices(seed=0, layers=N, size=4):
    return normal(seed, layers, size, size) / size


def sgd(visit, state):
    carry, gradient, *_ = visit.vjp()
    return LayerResult(
        carry, Tanh(visit.layer.weight - 0.1 * gradient.weight), state=state
    )


def gradient_of(weights, x):
    return jax.jit(jax.grad(lambda weights: jnp.sum(looped(map(Tanh, weights), x))))(
        weights
    )


def fold_vjp(weights, x, remat):
    return Stacked(Tanh(weights), len(weights)).fold_vjp(x, remat=remat)


def test_models_side_by_side_and_eager_calls():
    models = jnp.stack([matrices(seed) for seed in range(3)])
    x = jnp.ones((2, 4))

    def step(weights):
        y, sweep_back = fold_vjp(weights, x, "nested")
        return sweep_back(jnp.ones_like(y), sgd).layers.stacked.weight

    want = models - 0.1 * jax.vmap(gradient_of, (0, None))(models, x)
    assert_close(jax.jit(jax.vmap(step))(models), want)
    assert_close(step(models[0]), want[0])


def test_only_what_is_used_is_computed():
    weights, x = matrices(layers=6), jnp.ones((2, 4))

    def carry_only(visit, state):
        return LayerResult(visit.vjp().carry)

    def twice(visit, state):
        assert visit.vjp() is visit.vjp()
        # In a trace of its own it computes anew, of this one it can't use anything
        jax.eval_shape(lambda: visit.vjp().carry)
        return sgd(visit, state)

    def products(visitor):
        def step(weights, x):
            y, sweep_back = fold_vjp(weights, x, True)
            return sweep_back(jnp.ones_like(y), visitor)

        return memory.count_flops(jax.make_jaxpr(step)(weights, x)).matmul

    product = 2 * 2 * 4 * 4
    # Forward, the layer again, its input's cotangent
    assert products(carry_only) == 6 * 3 * product
    assert products(sgd) == 6 * 4 * product  # and the weights'
    assert products(twice) == products(sgd)


@pytest.mark.parametrize(
    "remat", ["nested", "offload", ScanCheckpointPolicy(max_carries=3)]
)
def test_updates_are_written_in_place(remat):
    weights, x = matrices(layers=48, size=64), jnp.ones((2, 64))

    def step(weights, x):
        y, sweep_back = fold_vjp(weights, x, remat)
        return sweep_back(jnp.ones_like(y), sgd).layers.stacked.weight

    stats = (
        jax.jit(step, donate_argnums=0).lower(weights, x).compile().memory_analysis()
    )
    assert stats.alias_size_in_bytes == weights.nbytes
    assert stats.temp_size_in_bytes < 0.15 * weights.nbytes


def test_layers_on_the_host_are_read_and_written_there():
    weights, x = matrices(), jnp.ones((2, 4))
    host = jax.device_put(weights, weights.sharding.with_memory_kind("pinned_host"))
    want = gradient_of(weights, x)

    def steps(weights, x):
        found = []
        for remat in (True, "nested", POLICIES["first layers"]):
            y, sweep_back = fold_vjp(weights, x, remat)
            found.append(sweep_back(jnp.ones_like(y), sgd).layers.stacked.weight)
        return found

    with compiled_for("tpu"):  # for which layers are read ahead
        ahead = jax.jit(steps)(host, x)
    found = jax.jit(steps)(host, x)
    for new, same in zip(found, ahead, strict=True):
        assert new.sharding.memory_kind == same.sharding.memory_kind == "pinned_host"
        assert_close(
            jax.device_put(same, weights.sharding),
            jax.device_put(new, weights.sharding),
        )
        assert_close(jax.device_put(new, weights.sharding), weights - 0.1 * want)


def test_results_of_a_visitor_have_no_derivatives_and_eager_calls_on_the_host():
    weights, x = matrices(), jnp.ones((2, 4))

    def of_visitor(weights, remat):
        y, sweep_back = fold_vjp(weights, x, remat)
        new = sweep_back(jnp.ones_like(y), sgd).layers.stacked.weight
        return jnp.sum(y), jnp.sum(new)

    for remat in (True, "nested", False):
        run = functools.partial(of_visitor, remat=remat)
        with pytest.raises(
            TypeError, match="the results of a sweep with a visitor have no derivatives"
        ):
            jax.grad(lambda weights, run=run: run(weights)[1])(weights)
        gradient = jax.jit(jax.grad(run, has_aux=True))(weights)[0]
        assert_close(gradient, gradient_of(weights, x))
    host = jax.device_put(weights, weights.sharding.with_memory_kind("pinned_host"))
    y, sweep_back = fold_vjp(host, x, "nested")
    new = sweep_back(jnp.ones_like(y), sgd).layers.stacked.weight
    assert new.sharding.memory_kind == "pinned_host"
    assert_close(jax.device_put(new, weights.sharding), weights - 0.1 * gradient)


class Slice(eqx.Module):
    weight: jax.Array = unsliced()

    def __call__(self, x):
        weight = LayerStack.of(self.weight)
        halves = weight.stack[:, :, :2], weight.stack[:, :, 2:]
        return Tanh(jnp.concatenate(halves, -1)[weight.layer_index])(x)


class Inner(eqx.Module):
    layers: Stacked

    def __call__(self, x):
        return self.layers.fold(x, remat="nested")


class Row(eqx.Module):
    weight: hax.NamedArray = unsliced()
    gain: Any = unsliced()

    def __call__(self, x):
        weight, gain = LayerStack.of(self.weight, "blocks"), LayerStack.of(self.gain)
        return (
            x
            * weight.stack["blocks", weight.layer_index].array
            * gain.stack[gain.layer_index]
        )


@pytest.mark.parametrize("layers", [0, 2])
def test_no_layers_and_layers_under_another_name(layers):
    Blocks = hax.Axis("blocks", layers)
    blocks = Stacked(
        Row(random(0, Blocks, Embed), jnp.linspace(0.5, 1, layers)), Blocks
    )
    x = jnp.ones(4)
    want = looped(blocks, x)

    @functools.partial(jax.jit, static_argnums=1)
    def run(x, remat):
        found = jax.value_and_grad(lambda x: jnp.sum(blocks.fold(x, remat=remat)))(x)
        y, sweep_back = blocks.fold_vjp(x, remat=remat)
        of_y = jax.grad(lambda x: jnp.sum(blocks.fold_vjp(x, remat=remat)[0]))(x)
        return (
            found,
            y,
            of_y,
            sweep_back(x, lambda visit, _: LayerResult(visit.vjp().carry)),
        )

    for remat in (True, False, "nested", "offload"):
        (found, of_x), y, of_y, result = run(x, remat)
        assert_close((found, y, of_y), (jnp.sum(want), want, of_x))
        assert_close(result.carry, of_x)
        assert result.layers.stacked.weight.axes == (Blocks, Embed)


def test_unsliced_fields_anywhere():
    """Read through a static slice, in a stack within a stack, outside of folds, and
    from the host.
    """
    stacks = [
        Stacked(Slice(matrices(seed, 3)), hax.Axis("inner", 3)) for seed in range(2)
    ]
    outer = Stacked(
        Inner(jax.tree.map(lambda *leaves: jnp.stack(leaves), *stacks)),
        hax.Axis("layers", 2),
    )
    x = jnp.ones((2, 4))

    def of_loop(outer):
        return jnp.sum(
            functools.reduce(lambda y, inner: looped(inner.layers, y), outer, x)
        )

    found = jax.jit(jax.grad(lambda outer: jnp.sum(outer.fold(x, remat="nested"))))(
        outer
    )
    assert_close(found, jax.jit(jax.grad(of_loop))(outer))
    stack = Stacked(Slice(matrices()), Layers)
    host = jax.device_put(
        matrices(), matrices().sharding.with_memory_kind("pinned_host")
    )
    assert_close(
        jax.jit(lambda x: Stacked(Slice(host), Layers).fold(x))(x), stack.fold(x)
    )


def result(**fields):
    return lambda visit, state: LayerResult(visit.vjp().carry, **fields)


def layer_with(**fields):
    """A visitor that replaces fields of the layer."""

    def replace(visit, state):
        new = eqx.tree_at(
            lambda block: [getattr(block, name) for name in fields],
            visit.layer,
            [*fields.values()],
        )
        return result(layer=new)(visit, state)

    return replace


@pytest.fixture(scope="module")
def sweep_back():
    blocks, carry, offset, bias = example()
    _, sweep_back = blocks.scan_vjp(carry, offset, bias=shared(bias))
    return functools.partial(sweep_back, ((hax.ones((Batch, Embed)), None), None))


def test_layers_with_functions_and_numbers_are_frozen_in_a_branch(sweep_back):
    def some(visit, state):
        def arrays(change):
            new = eqx.tree_at(
                lambda block: block.scale, visit.layer, visit.layer.scale + change
            )
            return eqx.filter(
                eqx.tree_at(lambda block: block.gain, new, None), eqx.is_array
            )

        layer = jax.lax.cond(
            visit.layer_index < 2, lambda: arrays(0.0), lambda: arrays(1.0)
        )
        return LayerResult(visit.vjp().carry, layer)

    blocks, new = example()[0].stacked, sweep_back(some).layers.stacked
    assert_close(new.scale - blocks.scale, jnp.array([0.0, 0, 1, 1, 1]))
    assert (new.activation, new.power) == (blocks.activation, blocks.power)
    assert new.gain.array.tolist() == blocks.gain.array.tolist()


class TestRefused:
    @pytest.mark.parametrize(
        ("visitor", "message"),
        [
            (
                lambda visit, state: LayerResult(()),
                "of the carry returned by the visitor has another structure",
            ),
            (
                result(layer_state=jnp.int32(0)),
                "The layer_state goes in as float32.* and comes out as int32",
            ),
            (
                layer_with(number=jnp.float32(1)),
                (
                    "The layer.number goes in as int32.*"
                    " y.astype\\(layer.number.dtype\\), or the initial layer"
                ),
            ),
            (
                result(args=jnp.zeros(3)),
                "args of a LayerResult is a tuple of 1 cotangents",
            ),
            (
                result(kwargs={"k": 1.0}),
                "keys among \\['bias'\\]; got .* \\['bias', 'k'\\]",
            ),
            (
                result(args=(jnp.zeros(3),)),
                "of args\\[0\\] returned by the visitor is float32\\[3\\], and",
            ),
            (layer_with(scale=1), "The layer.scale goes in as float32"),
            (
                layer_with(gain=hax.ones(Embed)),
                "The layer.gain.* is shared by all layers",
            ),
            (layer_with(power=2.0), "The layer.power is 1.0, the same for all layers"),
            (lambda visit: None, r"signature is \(visit\): too many"),
            (lambda visit, state: visit + 1, "unsupported operand"),
            (result(layer={"scale": jnp.zeros(())}), "The layer goes in as .* a dict"),
        ],
    )
    def test_what_a_visitor_returns(self, sweep_back, visitor, message):
        with pytest.raises((TypeError, ValueError), match=message):
            sweep_back(visitor, jnp.zeros(()), jnp.zeros(N))

    def test_what_sweep_back_is_given(self, sweep_back):
        with pytest.raises(
            ValueError, match="The layer_state is 0.0, the same for all layers"
        ):
            sweep_back(result(layer_state=1.0), layer_state=0.0)
        states = {"sum": shared(jnp.zeros(3)), "own": jnp.zeros(N)}
        with pytest.raises(
            ValueError, match="The layer_state\\['sum'\\] is shared by all layers"
        ):
            sweep_back(
                lambda visit, state: result(
                    layer_state=jax.tree.map(lambda x: x + 1, visit.layer_state)
                )(visit, state),
                layer_state=states,
            )
        with pytest.raises(ValueError, match="zeros takes no name, .*; got 'tanh'"):
            sweep_back.func.zeros("tanh")
        with pytest.raises(ValueError, match="a pair of cotangents"):
            sweep_back.func(jnp.zeros(()), sgd)
        with pytest.raises(
            ValueError,
            match=(
                "axes \\(batch=3\\) of float32, and the carry\\[0\\] is .* \\(batch=2,"
                " embed=4\\)"
            ),
        ):
            sweep_back.func(((hax.ones(hax.Axis("batch", 3)), None), None), sgd)
