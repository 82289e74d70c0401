"""Stacks in host memory: the results of stacks on the device, and where everything
is.
"""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from stacked_remat import (
    LayerStack,
    ScanCheckpointPolicy,
    Stacked,
    fused_update,
    memory,
    shared,
    streaming,
    unsliced,
)

from .blocks import assert_close, assert_close_to_scale, derivatives, quick_jit

LAYERS, WIDTH = 12, 8
Layers = hax.Axis("layers", LAYERS)
Width, Out = hax.Axis("width", WIDTH), hax.Axis("out", WIDTH)


class Block(eqx.Module):
    """A named and a plain matrix, one that is unused, a shared array, one that is read
    where it is, a key.
    """

    weight: hax.NamedArray
    bias: jax.Array  # [2, 3]
    unused: jax.Array  # [3, 2]
    scale: hax.NamedArray
    table: jax.Array = unsliced()  # [2, 2]
    key: jax.Array | None = None

    def __call__(self, x, strength, offset):
        table = LayerStack.of(self.table)
        row = table.stack[table.layer_index][:, 0]
        h = hax.tanh(
            hax.dot(x, self.weight, axis="width").rename({"out": "width"}) * self.scale
        )
        new = x + (h + self.bias[0, 0] * row[1]) * strength + offset
        return new, jnp.sum(h.array)


def stack(remat=True, layers=LAYERS):
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(layers, WIDTH, WIDTH)) / 3, jnp.float32)
    block = Block(
        hax.NamedArray(weight, (Layers.resize(layers), Width, Out)),
        jnp.asarray(rng.normal(size=(layers, 2, 3)), jnp.float32),
        jnp.ones((layers, 3, 2)),
        hax.NamedArray(jnp.asarray(rng.normal(size=WIDTH), jnp.float32), (Width,)),
        jnp.asarray(rng.normal(size=(layers, 2, 2)), jnp.float32),
        jax.random.split(jax.random.key(0), layers),
    )
    return Stacked(block, Layers.resize(layers), remat=remat)


def is_streamed(leaf):
    """All but the field that layers read where it is."""
    return eqx.is_array(leaf) and leaf.shape[1:] != (2, 2)


def on_host(tree):
    return [
        jax.typeof(leaf).memory_space == jax.memory.Space.Host
        for leaf in jax.tree.leaves(tree)
    ]


CASES = {
    "False, reversed": (False, True),
    "nested": ("nested", False),
    "recompute": ("recompute", False),
    "first layers, offload": (
        ScanCheckpointPolicy(nested=True, first_layers=3, save_carries="offload"),
        True,
    ),
}


def inputs():
    x = hax.NamedArray(jnp.linspace(-1, 1, WIDTH), (Width,))
    return x, jnp.linspace(0.5, 1, LAYERS), jnp.float32(0.1)


def test_values_and_gradients_are_those_of_layers_on_the_device():
    def loss(arguments, reverse):
        stack, x, strengths, offset = arguments
        y, outputs = stack.scan(x, strengths, shared(offset), reverse=reverse)
        return (
            jnp.sum(jnp.square(y.array))
            + jnp.vdot(outputs, jnp.arange(LAYERS) / LAYERS),
            outputs,
        )

    gradient = eqx.filter_value_and_grad(loss, has_aux=True)

    @quick_jit
    def every(resident, streamed, inputs):
        expected, found = (
            [gradient((resident, *inputs), reverse) for reverse in (False, True)],
            {},
        )
        for name, (remat, reverse) in CASES.items():
            given = (streamed.with_remat(remat), *inputs)
            # What is not differentiated runs in another loop.
            found[name] = gradient(given, reverse), loss(given, reverse)
        return expected, found

    resident = stack()
    args = resident, streaming.to_host(resident, where=is_streamed), inputs()
    traced = every.trace(*args)
    assert memory.count_flops(traced.jaxpr).exact
    expected, found = traced.lower().compile()(*args)
    for name, (_, reverse) in CASES.items():
        wanted = expected[reverse], expected[reverse][0]
        # Beside other code XLA may fuse, and so round, otherwise: to the scale of the
        # array.
        assert_close_to_scale(found[name], wanted, 1e-6, name)
        of_block = found[name][0][1][0].stacked
        assert on_host((of_block.weight, of_block.bias, of_block.unused)) == [
            True,
            True,
            True,
        ]
        assert on_host((of_block.scale, of_block.table)) == [False, False]


class Model(eqx.Module):
    embedding: jax.Array
    blocks: Stacked

    def __call__(self, x):
        return self.blocks.fold(x * self.embedding[None])


class Plain(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x + jnp.tanh(x @ self.weight + self.bias[None])


def model(remat="nested"):
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 3, jnp.float32)
    return Model(
        jnp.ones(WIDTH),
        Stacked(Plain(weight, jnp.zeros((LAYERS, WIDTH))), Layers, remat),
    )


@pytest.mark.usefixtures("standard_promotion")
def test_fused_updates_leave_weights_and_state_on_the_host():
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = fused_update(
        lambda model, x: jnp.mean(jnp.square(model(x))), optimizer, max_grad_norm=1.0
    )
    run = jax.jit(step, donate_argnums=(0, 1))
    x = jnp.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
    resident, streamed = model(), streaming.to_host(model())
    state, streamed_state = step.init(resident), step.init(streamed)
    for _ in range(3):
        resident, state, value, norm = run(resident, state, x)
        streamed, streamed_state, streamed_value, streamed_norm = run(
            streamed, streamed_state, x
        )
    np.testing.assert_allclose(
        (streamed_value, streamed_norm), (value, norm), rtol=1e-6
    )
    assert_close((streamed, streamed_state), (resident, state), rtol=1e-5, atol=1e-6)
    assert on_host(streamed) == [False, True, False]  # not the vectors
    assert on_host(streamed_state.stacks) == [
        leaf.ndim > 2 for leaf in jax.tree.leaves(state.stacks)
    ]
    assert not any(on_host(streamed_state.rest))
    # A state that was made before the layers moved, and then stays where it is.
    after = jax.eval_shape(step, streamed, state, x)
    assert jax.tree.structure(after.state) == jax.tree.structure(state)
    assert jax.tree.structure(after.model) == jax.tree.structure(streamed)


def test_derivatives_in_all_modes():
    """By what the layers take, by the layers themselves, and within JAX's loops and
    branches.
    """
    blocks = jax.tree.map(lambda leaf: leaf[:4], model().blocks.stacked)
    stack = Stacked(blocks, Layers.resize(4), "nested")
    along, args = (
        jax.tree.map(jnp.cos, stack),
        (jnp.linspace(-1, 1, WIDTH), jnp.full(WIDTH, 0.7)),
    )

    def layer(block, x, scale):
        return x + jnp.tanh(x @ block.weight + block.bias) * scale

    def fold(blocks, x, scale):
        return jnp.sum(blocks.fold_via(layer)(x, shared(scale)) ** 2)

    def loop(blocks, x, scale):
        return jnp.sum(
            functools.reduce(lambda x, block: layer(block, x, scale), blocks, x) ** 2
        )

    def every(value, blocks, direction):
        def of(blocks, x):
            return value(blocks, x, args[1])

        def looped(x):
            total = jax.lax.scan(
                lambda total, k: (total + of(blocks, k * x), None), 0.0, jnp.arange(2.0)
            )[0]
            branch = jax.lax.cond(total > 0, lambda x: of(blocks, x), jnp.sum, x)
            return (
                total
                + branch
                + jnp.sum(jax.lax.map(lambda k: of(blocks, k * x), jnp.arange(2.0)))
            )

        def gradient(k):
            return jax.grad(of, (0, 1))(blocks, k * args[0])

        in_loops = (
            jax.lax.map(gradient, jnp.arange(2.0)),
            jax.lax.cond(jnp.sum(args[0]) < 1, gradient, lambda k: gradient(-k), 0.5),
        )

        def of_gradient(blocks, x):  # reads no gradient of the layers
            return jnp.sum(jnp.sin(jax.grad(of, (0, 1))(blocks, x)[1]))

        along = jax.jvp(
            lambda blocks: jax.value_and_grad(of)(blocks, args[0]),
            (blocks,),
            (direction,),
        )
        reverse = (
            jax.grad(looped)(args[0]),
            jax.grad(of_gradient, (0, 1))(blocks, args[0]),
        )
        return derivatives(functools.partial(value, blocks), *args), jax.tree.leaves(
            (along, in_loops, reverse)
        )

    found = jax.jit(functools.partial(every, fold))(
        streaming.to_host(stack), streaming.to_host(along)
    )
    assert_close(
        found, jax.jit(functools.partial(every, loop))(stack, along), 2e-5, 2e-5
    )


@pytest.mark.parametrize("loop", ["closure", "carry"])
def test_a_loop_of_jax_is_not_differentiated_by_layers_on_the_host(loop):
    def value(blocks, x):
        def step(carry, k):
            total, carried = carry
            stack = blocks if loop == "closure" else carried
            return (total + jnp.sum(stack.fold(k * x)), carried), None

        init = jnp.float32(0), None if loop == "closure" else blocks
        return jax.lax.scan(step, init, jnp.arange(2.0))[0][0]

    blocks, x = streaming.to_host(model().blocks), jnp.ones((2, WIDTH))
    assert jnp.isfinite(jax.jit(jax.grad(value, 1))(blocks, x)).all()
    with pytest.raises(ValueError, match="Take the gradient within the loop"):
        jax.jit(jax.grad(value))(blocks, x)


def test_what_moves_and_comes_back():
    blocks = stack("nested")
    moved = streaming.to_host((blocks, jnp.ones(3)), where=is_streamed)
    of_block = moved[0].stacked
    assert on_host((of_block.weight, of_block.bias)) == [True, True]
    assert not any(on_host((of_block.scale, of_block.table, of_block.key, moved[1])))
    assert moved[0].remat == ScanCheckpointPolicy(nested=True)
    only = streaming.to_host(
        blocks,
        where=lambda leaf: eqx.is_array(leaf) and leaf.shape[1:] == (WIDTH, WIDTH),
    )
    assert on_host((only.stacked.weight, only.stacked.bias)) == [True, False]
    part = streaming.to_host(
        eqx.filter(blocks, lambda leaf: eqx.is_array(leaf) and leaf.ndim == 3)
    )
    assert on_host(part.stacked.weight) and part.stacked.scale.array is None
    back = streaming.to_device(moved)
    assert not any(on_host(back)) and back[0].remat == blocks.remat
    assert eqx.tree_equal(back[0], blocks)
    traced = eqx.filter_jit(
        lambda blocks: streaming.to_host(blocks, where=is_streamed)
    )(blocks)
    assert on_host((traced.stacked.weight, traced.stacked.scale)) == [True, False]


def test_shapes_on_the_host_stay_divided_over_their_devices():
    layers = [
        eqx.nn.Linear(8, 8, key=key) for key in jax.random.split(jax.random.key(0), 3)
    ]
    stack = Stacked.of(layers)
    for count in (1, 4):
        mesh = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])

        def divided(leaf, mesh=mesh):
            spec = PartitionSpec(*[None] * (leaf.ndim - 1), "data")
            sharding = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        shapes = jax.tree.map(divided, stack)
        sharding = streaming.to_host(shapes).stacked.weight.sharding
        assert sharding.memory_kind == "pinned_host"
        assert len(sharding.device_set) == count


def test_layers_made_on_the_host_are_those_made_on_the_device():
    def build(scale, *, key):
        return Plain(jax.random.normal(key, (WIDTH, WIDTH)) * scale, jnp.zeros(WIDTH))

    keys = jax.random.split(jax.random.key(0), LAYERS)
    expected = Stacked.init(Layers, build)(shared(0.5), key=keys)
    for make in (streaming.init(Layers, build), jax.jit(streaming.init(Layers, build))):
        made = make(shared(jnp.float32(0.5)), key=keys)
        assert on_host(made) == [True, False]
        np.testing.assert_array_equal(made.stacked.weight, expected.stacked.weight)

    def with_constant(weight):
        return Plain(weight, np.ones(WIDTH, np.float32))

    weights = jnp.ones((3, WIDTH, WIDTH))
    made, expected = (
        init(3, with_constant)(weights) for init in (streaming.init, Stacked.init)
    )
    assert on_host(made) == [True, False]
    jax.tree.map(np.testing.assert_array_equal, made, expected)
    nothing = streaming.init(Layers.resize(0), build)(shared(0.5), key=keys[:0])
    assert nothing.stacked.weight.shape == (0, WIDTH, WIDTH)


def test_layers_that_are_not_in_front_are_refused():
    blocks = stack()
    weight = blocks.stacked.weight.rearrange(("width", "layers", "out"))
    with pytest.raises(ValueError, match=r"stacked\.weight .*layers not in front"):
        streaming.to_host(
            eqx.tree_at(lambda blocks: blocks.stacked.weight, blocks, weight)
        )


class TwoUnsliced(eqx.Module):
    weight: jax.Array  # [3, 3]
    matrix: jax.Array = unsliced()  # [3, 3]
    other: jax.Array = unsliced()  # [3, 3]

    def __call__(self, x):
        matrix, other = (
            LayerStack.of(field).layer for field in (self.matrix, self.other)
        )
        return jnp.tanh(x @ self.weight + 0.1 * matrix) + other.sum()


@pytest.mark.parametrize("hosted", ["matrix", "other"])
@pytest.mark.parametrize("remat", [True, "nested"])
def test_one_of_two_unsliced_fields_on_the_host(hosted, remat):
    keys = jax.random.split(jax.random.key(1), 3)
    blocks = Stacked(
        TwoUnsliced(*(0.3 * jax.random.normal(key, (4, 3, 3)) for key in keys)),
        4,
        remat=remat,
    )
    moved = streaming.to_host(
        blocks, where=lambda leaf: leaf is getattr(blocks.stacked, hosted)
    )
    assert streaming.is_on_host(getattr(moved.stacked, hosted))
    x = jnp.ones((3, 3))
    np.testing.assert_allclose(moved.fold(x), blocks.fold(x), rtol=1e-5)
