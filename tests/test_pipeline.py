"""`pipeline`: the backward pass of a layer taken apart, and gradients with layers over
devices.
"""

import functools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from stacked_remat import (
    ScanCheckpointPolicy,
    Stacked,
    per_layer,
    pipeline,
    shared,
)
from stacked_remat._pipeline.two_cotangents import take_apart
from stacked_remat.memory import count_flops
from tests.blocks import Tanh, assert_close, quick_jit
from tests.jaxprs import equations
from tests.random_arrays import normal

NAMES = ["1f1b", "zero_bubble"]


# --- The two cotangents


def test_products_of_weights_run_apart():
    """W has the products of weights, and reads their operands; what one equation makes
    with the carry's cotangent is a result of B.
    """

    def layer(x, up, down, looped):
        def row(total, part):
            return total + part @ looped, part

        x = x + jax.lax.scan(row, jnp.zeros(4), x)[0][None]
        return x + jax.jit(lambda x: jnp.tanh(x @ up) @ down)(x)

    found = []

    @quick_jit
    def divided_and_whole(x, cotangent, *weights):
        def vjp():
            of_x, *of_weights = jax.vjp(layer, x, *weights)[1](cotangent)
            return [of_x], of_weights

        divided = take_apart(vjp, weights)
        found.append(divided)
        of_x, early, kept = divided.run_early()
        return [*of_x, *divided.late.run(weights, kept), *early], vjp()

    sizes = [(5, 4), (5, 4), (4, 6), (6, 4), (4, 4)]
    arrays = [normal(seed, *size) for seed, size in enumerate(sizes)]
    apart, (of_x, of_weights) = divided_and_whole(*arrays)
    assert_close(apart, [*of_x, *of_weights])
    (divided,) = found
    assert divided.late.is_late == [True, True, False]

    def products(jaxpr):
        return sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)

    assert (products(divided._early), products(divided.late._program)) == (3, 2)
    # The operands of both products: x, its cotangent, and those in between
    shapes = sorted(type_.shape for type_ in divided.late.kept)
    assert shapes == [(5, 4), (5, 4), (5, 6), (5, 6)]


def test_what_is_kept_for_products_is_made_small_first():
    """A sum of the cotangent that W alone reads is made in B, unless W reads the
    cotangent for another product too.
    """

    def kept(layer, *widths):
        found = []

        @jax.make_jaxpr
        def divided(x, cotangent, *weights):
            def vjp():
                of_x, *of_weights = jax.vjp(layer, x, *weights)[1](cotangent)
                return [of_x], of_weights

            found.append(take_apart(vjp, weights))

        weights = [jnp.ones((4, width)) for width in widths]
        divided(jnp.ones((5, 4)), jnp.ones((5, 4)), *weights)
        return sorted(type_.shape for type_ in found[0].late.kept)

    def of_sums(x, weight):
        return x + jnp.broadcast_to(jax.lax.stop_gradient(x) @ weight, x.shape)

    def of_both(x, weight, other):
        return of_sums(x, weight) + jax.lax.stop_gradient(x) @ other

    assert kept(of_sums, 1) in ([(5,), (5, 4)], [(5, 1), (5, 4)])
    assert kept(of_both, 1, 4) == [(5, 4), (5, 4)]


# --- Gradients

Layers = hax.Axis("layers", 8)
Embed, Hidden = hax.make_axes(Embed=6, Hidden=10)
STAGES, ROWS, MICROBATCHES = 4, 32, 8


def mesh_of(stages=STAGES, data=2):
    kinds = (AxisType.Auto,) * 2
    devices = jax.devices()[: stages * data]
    return jax.make_mesh((stages, data), ("stage", "data"), kinds, devices=devices)


class Plain(eqx.Module):
    """Carries an array; all arrays are plain. Padding of zeros changes the carry."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x + jnp.tanh(0.1 + x @ self.weight + self.bias[None])


class Named(eqx.Module):
    """Carries named and plain arrays, floats and integers; takes arguments that layers
    share and that are split, and returns an output.
    """

    up: hax.NamedArray
    down: hax.NamedArray
    frozen: jax.Array

    def __call__(self, carry, mask, shift, rate, *, key):
        x, count = carry
        hidden = hax.tanh(x.dot(self.up, axis=Embed) * rate + shift)
        noise = jax.random.normal(key, hidden.array.shape)
        hidden = hidden + 0.1 * hax.named(noise, hidden.axes)
        update = hidden.dot(self.down, axis=Hidden) * jnp.sum(self.frozen)
        output = hax.mean(hidden).scalar(), count
        return (x + hax.where(mask, update, 0.0), count + 1), output


class Model(eqx.Module):
    table: jax.Array
    shift: jax.Array
    blocks: Stacked
    head: jax.Array
    unused: jax.Array
    name: str = eqx.field(static=True, default="model")


def plain_model(layers=8, width=6, remat: Any = "nested"):
    blocks = Stacked(
        Plain(normal(0, layers, width, width) / 2, normal(1, layers, width)),
        hax.Axis("layers", layers),
        remat,
    )
    head = normal(3, width, 3)
    return Model(normal(2, 10, width), jnp.zeros(1), blocks, head, jnp.ones(2))


def plain_loss(model, tokens, targets):
    x = model.blocks.fold(model.table[tokens])
    return jnp.mean((x @ model.head - targets) ** 2)


def named_model(remat: Any):
    up = normal(0, Layers, Embed, Hidden) / 2
    down = normal(1, Layers, Hidden, Embed) / 2
    block = Named(up, down, normal(2, 8, 2))
    blocks = Stacked(block, Layers, remat)
    head, shift = normal(3, 6, 3), normal(4, 10)
    return Model(normal(5, 10, 6), shift, blocks, head, jnp.ones(2))


def named_loss(model, tokens, targets, key):
    """Scans; the layers' arguments depend on the microbatch, and one on a weight."""
    (batch,) = tokens.axes
    x = hax.named(model.table[tokens.array], (batch, Embed))
    shift = hax.named(jnp.tanh(model.shift), (Hidden,))
    keys = jax.random.split(key, Layers.size)
    rates = jnp.linspace(0.5, 1.0, Layers.size)
    (x, count), (means, counts) = model.blocks.scan(
        (x, jnp.int32(0)), tokens > 2, shared(shift), per_layer(rates), key=keys
    )
    # The part after the fold reads values of the part before it
    errors = x.array @ model.head - targets + model.table[tokens.array][:, :3]
    value = jnp.mean(errors**2) + jnp.sum(means**2)
    return value, {"means": means, "counts": counts + count, "name": model.name}


def split_rows(array, count):
    """`[microbatch, row, ...]`."""
    rows = array.shape[0] // count
    return jnp.swapaxes(array.reshape(rows, count, *array.shape[1:]), 0, 1)


def on_one_device(loss, model, batch, microbatches, trainable=eqx.is_inexact_array):
    """The mean of the loss over the microbatches, and its gradients."""
    trained, frozen = eqx.partition(model, trainable)
    parts = [split_rows(array, microbatches) for array in batch]

    def mean(trained):
        losses = jax.vmap(lambda *part: loss(eqx.combine(trained, frozen), *part))
        return jnp.mean(losses(*parts))

    return eqx.filter_value_and_grad(mean)(trained)


def put(model, mesh):
    """The model on a mesh: layers by stages, their weights by data too."""

    def placed(leaf):
        spec = P("stage", *["data"] * (leaf.ndim > 2 and leaf.shape[1] % 2 == 0))
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    arrays, static = eqx.partition(model.blocks, eqx.is_array)
    blocks = eqx.combine(jax.tree.map(placed, arrays), static)
    return eqx.tree_at(lambda model: model.blocks, model, blocks)


def assert_within(found, expected, bound=1e-6):
    """Within so much of the largest entry, as sums have another order."""
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in leaves:
        assert one.dtype == other.dtype
        largest = np.abs(other).max()
        assert np.abs(np.subtract(one, other)).max() <= bound * max(largest, 1e-3)


@pytest.mark.parametrize("remat", [True, "nested", "offload"])
def test_gradients_equal_those_of_one_device(remat):
    model = plain_model(remat=remat)
    tokens = np.arange(ROWS) * 7 % 10
    targets = normal(6, ROWS, 3)
    mesh = mesh_of()

    def all_of(model, tokens, targets):
        found = {}
        for name in NAMES:
            run = pipeline(
                plain_loss, "stage", microbatches=MICROBATCHES, schedule=name
            )
            found[name] = run.value_and_grad(model, tokens, targets)
        return found, run.value(model, tokens, targets)

    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P("data"))
        batch = jax.device_put((tokens, targets), rows)
        found, value = quick_jit(all_of)(put(model, mesh), *batch)
    expected = quick_jit(functools.partial(on_one_device, plain_loss, microbatches=1))(
        model, (tokens, targets)
    )
    assert_within(value, expected[0])
    for name in NAMES:
        assert_within(found[name], expected)
        of_layers = found[name][1].blocks.stacked.weight
        assert of_layers.sharding.spec[0] == "stage"


@pytest.mark.parametrize("stages", [4, 3])
def test_scans_with_arguments_states_and_frozen_arrays(stages):
    model = named_model("nested")
    trainable = jax.tree.map(eqx.is_inexact_array, model)
    trainable = eqx.tree_at(
        lambda model: (model.blocks.stacked.frozen, model.unused),
        trainable,
        (False, False),
    )
    Batch = hax.Axis("batch", ROWS)
    tokens = np.arange(ROWS) * 7 % 10
    targets = normal(6, ROWS, 3)
    key = jax.random.key(0)

    def all_of(model, tokens, targets, key):
        found = {}
        for name in NAMES:
            run = pipeline(
                named_loss,
                "stage",
                microbatches=MICROBATCHES,
                schedule=name,
                trainable=trainable,
                has_aux=True,
                gradient_dtype=jnp.float32,
            )
            named = hax.named(tokens, Batch)
            (value, aux), gradients = run.value_and_grad(
                model, named, targets, shared(key)
            )
            found[name] = value, gradients, eqx.filter(aux, eqx.is_array)
            assert aux["name"] == "model"
            value, aux = run.value(model, named, targets, shared(key))
            found["value"] = value, None, eqx.filter(aux, eqx.is_array)
        return found

    def one(tokens, targets, model):
        Part = hax.Axis("batch", tokens.size)
        return named_loss(model, hax.named(tokens, Part), targets, key)

    def expected_of(model):
        value, gradients = on_one_device(
            lambda model, tokens, targets: one(tokens, targets, model)[0],
            model,
            (tokens, targets),
            MICROBATCHES,
            trainable,
        )
        parts = [split_rows(array, MICROBATCHES) for array in (tokens, targets)]

        def aux(tokens, targets):
            return eqx.filter(one(tokens, targets, model)[1], eqx.is_array)

        return value, gradients, jax.vmap(aux)(*parts)

    with jax.set_mesh(mesh_of(stages)):
        found = quick_jit(all_of)(model, tokens, targets, key)
    expected = quick_jit(expected_of)(model)
    value, _, aux = expected
    assert_within(found["value"], (value, None, aux))
    for name in NAMES:
        assert jax.tree.structure(found[name]) == jax.tree.structure(expected)
        assert_within(found[name], expected)


class Gathering(Plain):
    """Gathers its weight, which the loops do a layer ahead."""

    def __call__(self, x):
        mesh: Any = jax.sharding.get_abstract_mesh()
        weight = jax.lax.with_sharding_constraint(self.weight, NamedSharding(mesh, P()))
        return x + jnp.tanh(0.1 + x @ weight + self.bias[None])


POLICIES = [
    False,
    True,
    "nested",
    "offload",
    ScanCheckpointPolicy(max_carries=2),
    ScanCheckpointPolicy(max_carries=3),
    ScanCheckpointPolicy(nested=2, save_carries="offload"),
    ScanCheckpointPolicy(nested=True, first_layers=2),
    ScanCheckpointPolicy(nested=True, save_block_internals=True),
]


@pytest.mark.parametrize("seed", range(6))
def test_random_sizes(seed):
    """Any number of layers: the last stages have fewer, or none."""
    rng = np.random.default_rng(seed)
    # Of each six seeds one has stages without layers
    stages, data = [(2, 4), (3, 2), (4, 2), (2, 2), (5, 1), (8, 1)][seed % 6]
    layers = 9 if stages == 8 else int(rng.integers(stages + 1, 4 * stages))
    microbatches = int(rng.integers(1, 10))
    rows = microbatches * data
    remat = POLICIES[(3 * seed + int(rng.integers(3))) % len(POLICIES)]
    model = plain_model(layers, 4, remat)
    stacked = model.blocks.stacked
    gathering = Gathering(stacked.weight, stacked.bias)
    blocks = Stacked(gathering, model.blocks.Layers, remat)
    in_stages = eqx.tree_at(lambda model: model.blocks, model, blocks)
    tokens, targets = rng.integers(0, 10, rows), normal(seed, rows, 3)
    run = pipeline(
        plain_loss,
        "stage",
        microbatches=microbatches,
        schedule=NAMES[rng.integers(2)],
        # Adapters alone: neither the embedding nor biases
        trainable=lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim == 3,
    )

    def all_of(model, tokens, targets):
        value = run.value(model, tokens, targets)
        return value, *run.value_and_grad(model, tokens, targets)

    with jax.set_mesh(mesh_of(stages, data)):
        found = quick_jit(all_of)(in_stages, tokens, targets)
    value, gradients = quick_jit(
        lambda model: on_one_device(
            plain_loss, model, (tokens, targets), 1, run.trainable
        )
    )(model)
    assert_within(found, (value, value, gradients))


def test_gradients_in_bfloat16_of_what_all_stages_have():
    """Whose sum over stages aborts XLA for CPUs where a mesh has two axes."""
    blocks = Stacked(Tanh(normal(0, 4, 4, 4)), hax.Axis("layers", 4))
    model = (blocks, jnp.ones((4, 2), jnp.bfloat16))

    def loss(model, x):
        blocks, head = model
        return jnp.mean((blocks.fold(x) @ head.astype(jnp.float32)) ** 2)

    x = normal(1, 4, 4)
    run = pipeline(loss, "stage", microbatches=2)
    with jax.set_mesh(mesh_of(2, 2)):
        _, (_, found) = quick_jit(run.value_and_grad)(model, x)
    _, expected = quick_jit(jax.grad(loss))(model, x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        found.astype(jnp.float32), expected.astype(jnp.float32), rtol=2e-2
    )


class Numbers(eqx.Module):
    """Carries Python's numbers beside an array. All layers share an array and a
    function.
    """

    weight: jax.Array
    changes: hax.NamedArray
    activation: Any

    def __call__(self, carry):
        x, scale, count, is_on = carry
        # W reads `hidden`, whose product policies may save or run again
        hidden = x + jax.lax.stop_gradient(x @ self.weight)
        update = jnp.where(is_on, self.activation(hidden @ self.weight), x)
        update = jnp.where(self.changes.array[None], update, 0.0)
        return x + scale * update, scale, count + 1, is_on


def test_numbers_in_the_carry_and_effects_of_the_loss():
    """Numbers become arrays, as in a fold. What the loss prints, before the fold or
    after it, is printed once for each microbatch. Another stack has zeros.
    """
    weights = normal(0, 4, 6, 6) / 2
    changes = hax.named(np.arange(6) % 3 < 2, "embed")
    layer = Numbers(weights, changes, jnp.tanh)
    blocks = Stacked(layer, hax.Axis("layers", 4), remat=False)
    others = Stacked(Tanh(normal(1, 4, 4, 4)), hax.Axis("layers", 4))
    model = {"blocks": blocks, "others": others, "table": normal(2, 10, 6)}
    tokens = np.arange(4)

    def loss_with(report, model, tokens, power):
        report("before", tokens[0])
        first = model["table"][tokens], 0.5, 0, True
        x, scale, count, is_on = model["blocks"].fold(first)
        report("after", count)
        value = jnp.mean((x * scale + count) ** power)
        # Neither depends on an array
        return value, (is_on, jnp.asarray(2.0))

    printed = []

    def report(when, number):
        jax.debug.callback(lambda number: printed.append((when, int(number))), number)

    # Functions among the leaves are no arguments of `jax.jit`
    def all_of(tokens):
        loss = functools.partial(loss_with, report)
        found = {}
        for name in NAMES:
            run = pipeline(
                loss,
                "stage",
                microbatches=2,
                schedule=name,
                stack=lambda model: model["blocks"],
                has_aux=True,
            )
            found[name] = run.value_and_grad(model, tokens, 2)
        return found

    def silent(model, tokens):
        return loss_with(lambda when, number: None, model, tokens, 2)[0]

    with jax.set_mesh(mesh_of(2, 1)):
        found = quick_jit(all_of)(tokens)
        jax.block_until_ready(found)
        jax.effects_barrier()
    expected = quick_jit(lambda tokens: on_one_device(silent, model, (tokens,), 2))(
        tokens
    )
    for name in NAMES:
        (value, (is_on, twos)), gradients = found[name]
        assert_within((value, gradients), expected)
        assert is_on.tolist() == [True, True] and twos.tolist() == [2.0, 2.0]
    # Rows 0 and 1 are the first of the microbatches; both schedules
    once = [("after", 4), ("after", 4), ("before", 0), ("before", 1)]
    assert sorted(printed) == sorted(once * 2)


def test_how_often_stages_run_what():
    """Their layers once for each microbatch, of which each tick begins another one. For
    a gradient all but the last one run them again, since they keep the input alone.
    What comes before and after the layers runs on one stage.
    """
    model, x = plain_model(remat=False), normal(2, ROWS, 10)
    weights = model.table, model.blocks.stacked.weight, model.head
    before, layers, after = (2 * ROWS * weight.size for weight in weights)

    def loss(model, x):
        return jnp.mean((model.blocks.fold(x @ model.table) @ model.head) ** 2)

    for name in NAMES:
        run = pipeline(loss, "stage", microbatches=MICROBATCHES, schedule=name)
        with jax.set_mesh(mesh_of(data=1)):
            value, gradient = (
                jax.make_jaxpr(fn)(model, x) for fn in (run.value, run.value_and_grad)
            )
        flops = count_flops(value)
        assert flops.exact and flops.matmul == before + layers + after
        flops = count_flops(gradient)
        again = layers * (STAGES - 1) // STAGES
        # x has no gradient
        assert flops.exact
        assert flops.matmul == 2 * before + 3 * layers + again + 3 * after
        ticks = {eqn.params.get("length") for eqn in equations(value)}
        assert max(ticks - {None}) == MICROBATCHES + STAGES - 1


def test_memory_grows_with_microbatches_in_flight():
    """Each of min(P, M) microbatches takes its input, and others nothing. A stage has
    less than the weights of all layers and the sums of their gradients.
    """
    rows, width = 64, 128
    mesh = mesh_of(data=1)

    def temporaries(microbatches):
        def loss(model, x):
            return jnp.mean(model.blocks.fold(x) ** 2)

        run = pipeline(loss, "stage", microbatches=microbatches)
        model = put(plain_model(STAGES, width), mesh)
        x = jax.ShapeDtypeStruct((microbatches * rows, width), jnp.float32)
        with jax.set_mesh(mesh):
            compiled = quick_jit(run.value_and_grad).lower(model, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    two, eight, sixteen = map(temporaries, (2, 8, 16))
    bytes_of_input = rows * width * 4
    assert eight - two == (STAGES - 2) * bytes_of_input
    assert sixteen == eight
    assert two < 2 * STAGES * 4 * width * (width + 1)
