"""Stacks of one and of two kinds on meshes, under every policy, beside the loop over
layers.
"""

import functools
import re

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import stacked_remat as sr
from stacked_remat import (
    ScanCheckpointPolicy,
    Stacked,
    StackedPattern,
    fold,
    fused_update,
    scan,
)

from .blocks import (
    Tanh,
    assert_close_to_scale as assert_close,
    deep_cases,
    quick_jit as jit,
)
from .random_arrays import normal
from .test_sweep_memory import WIDTH, mlp, nested

Layers = hax.Axis("layers", 3)
POLICIES = [
    False,
    True,
    "nested",
    "offload",
    ScanCheckpointPolicy(max_carries=2),
    ScanCheckpointPolicy(nested=True, first_layers=1),
    ScanCheckpointPolicy(save_carries="offload", save_block_internals=["kept"]),
]
WEIGHTS, X = (
    jnp.linspace(0.3, 0.9, 6).reshape(3, 2),
    jnp.linspace(-1, 1, 16).reshape(8, 2),
)


class Sine(eqx.Module):
    """A carry of which a sum begins the same on all devices, and a key that changes."""

    weight: jax.Array

    def __call__(self, carry):
        x, total, key = carry
        kept = sr.checkpoint_name(jnp.sin(x * self.weight), "kept")
        return (x + kept, total + jnp.sum(kept), jax.random.fold_in(key, 1)), jnp.sum(
            x, -1
        )


class Cosine(Sine):
    """Another kind."""


def run(kind, weights, x, remat, key, total=0.0):
    carry = x, jnp.asarray(total), key
    if kind == "loop":
        outputs = []
        for weight in weights:
            carry, output = Sine(weight)(carry)
            outputs.append(output)
        outputs = jnp.stack(outputs)
    elif kind == "one":
        carry, outputs = Stacked(Sine(weights), Layers, remat).scan(carry)
    else:
        kinds = {"sine": Sine(weights[::2]), "cosine": Cosine(weights[1:2])}
        stacks = {
            name: Stacked(kinds[name], Layers.resize(n))
            for name, n in (("sine", 2), ("cosine", 1))
        }
        carry, found = StackedPattern(
            stacks, ("sine", "cosine", "sine"), Layers, remat
        ).scan(carry)
        outputs = jnp.stack([found["sine"][0], found["cosine"][0], found["sine"][1]])
    return jnp.sum(carry[0] ** 2) + carry[1] + jnp.sum(jnp.sin(outputs))


def derivatives(value):
    """Gradients, and their derivatives along a direction."""

    def found(weights, x, *rest):
        gradient = jax.grad(lambda *args: value(*args, *rest), (0, 1))
        return jax.jvp(gradient, (weights, x), (jnp.cos(weights), jnp.sin(x)))

    return found


FEW = [("one", POLICIES[5]), ("two", "nested"), ("two", POLICIES[6])]
REST = [("two", False), ("one", True), ("two", "offload"), ("one", POLICIES[4])]


@pytest.mark.parametrize(
    ("check_vma", "cases"),
    [(True, FEW), *deep_cases([(True, REST), (False, FEW)])],
    ids=["few", "rest", "unchecked"],
)
def test_in_shard_map_the_carry_may_begin_the_same_on_all_devices(check_vma, cases):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 8)

    def of(kind, remat):
        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("d"), PartitionSpec("d")),
            out_specs=PartitionSpec("d"),
            check_vma=check_vma,
        )
        def on_device(weights, x, keys):
            return run(kind, weights, x[0], remat, keys[0])[None]

        return derivatives(lambda *args: jnp.sum(on_device(*args)))(WEIGHTS, X, keys)

    found = jit(lambda: {str(case): of(*case) for case in [("loop", None), *cases]})()
    expected = found.pop("('loop', None)")
    assert_close(found, dict.fromkeys(found, expected))


@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(REST, marks=pytest.mark.deep)], ids=["few", "rest"]
)
def test_a_batch_that_is_sharded_over_explicit_axes(cases):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    key = jax.random.key(0)

    def of(kind, remat, weights, x):
        def value(weights, x):
            return jnp.sum(
                jax.vmap(lambda row: run(kind, weights, row, remat, key, jnp.sum(row)))(
                    x
                )
            )

        return derivatives(value)(weights, x)

    def both(weights, x):
        return {
            str(case): of(case[0], case[1], weights, x)
            for case in [("loop", None), *cases]
        }

    with jax.set_mesh(mesh):
        found = jit(both)(
            WEIGHTS, jax.device_put(X, NamedSharding(mesh, PartitionSpec("d")))
        )
    expected = found.pop("('loop', None)")
    assert_close(found, dict.fromkeys(found, expected))


def test_each_example_has_gradients_where_a_part_of_the_carry_begins_as_a_constant():
    mesh, key = (
        jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,)),
        jax.random.key(0),
    )
    policies = (
        "offload",
        POLICIES[6],
        ScanCheckpointPolicy(offload_block_internals=["kept"]),
    )

    def gradients(kind, remat, x):
        value = functools.partial(run, kind, remat=remat, key=key)
        return jax.vmap(
            jax.grad(lambda weights, x: value(weights, x), (0, 1)), (None, 0)
        )(WEIGHTS, x)

    def both(x):
        return gradients("loop", None, x), [
            gradients("two", remat, x) for remat in policies
        ]

    with jax.set_mesh(mesh):
        expected, found = jit(both)(
            jax.device_put(X, NamedSharding(mesh, PartitionSpec("d")))
        )
    for case in found:
        assert_close(case, expected)


def test_weights_that_were_made_before_the_mesh_are_updated():
    weights, optimizer = 0.5 * normal(0, 3, 2, 2), optax.sgd(0.1)
    blocks = Stacked(Tanh(weights), Layers, "nested")
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))

    def loss(blocks, x):
        return jnp.sum(blocks.fold(x) ** 2)

    step = fused_update(loss, optimizer)
    expected = weights - 0.1 * jax.grad(loss)(blocks, X).stacked.weight
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("d")))
        found = jax.jit(step)(blocks, step.init(blocks), x).model.stacked.weight
    assert_close(found, expected)


def test_layers_that_use_other_examples():
    """Of a neighbour, and means over two axes, beside a carry that all share; weights
    are shared or not.
    """

    def layer(carry, weight):
        x, count = carry
        sent = lax.ppermute(x, "inner", [(i, (i + 1) % 8) for i in range(8)])
        return (jnp.sin(sent * weight) - lax.pmean(x, ("outer", "inner")), count + 1), (
            x,
            count,
        )

    def value(apply, of_weights, weights, x):
        def one(x, scale, sign):
            (x, count), (xs, counts) = apply(
                layer, (x * sign, jnp.int32(0)), weights * scale
            )
            return x, xs, count, counts

        inner = jax.vmap(
            one, (0, of_weights, None), (0, 0, None, None), axis_name="inner"
        )
        outer = jax.vmap(inner, (None, None, 0), (0, 0, None, None), axis_name="outer")
        scale = 1.0 if of_weights is None else jnp.linspace(0.5, 1.0, 8)
        x, xs, count, counts = outer(x, scale, jnp.array([1.0, -0.5]))
        return jnp.sum(x**2) * count.astype(x.dtype) + jnp.sum(
            jnp.cos(xs) * jnp.cos(counts)[None, None, :, None]
        )

    def both(weights, x):
        ours = [
            lambda f, *args, remat=remat: scan(f, Layers, remat=remat)(*args)
            for remat in POLICIES
        ]
        cases = [(apply, None) for apply in (lax.scan, *ours)] + [
            (apply, 0) for apply in (lax.scan, ours[2])
        ]
        return [
            derivatives(functools.partial(value, *case))(weights, x) for case in cases
        ]

    plain, *found, plain_of_each, found_of_each = jit(both)(WEIGHTS, X)
    for case in found:
        assert_close(case, plain)
    assert_close(found_of_each, plain_of_each)


def test_tiles_of_an_empty_batch_and_on_some_axes_of_a_mesh():
    tiled = sr.tiled(lambda x: jnp.sin(x) * x, 0, tiles=2)
    assert jax.vmap(tiled)(jnp.zeros((0, 4))).shape == (0, 4)
    mesh = jax.make_mesh((4, 2), ("d", "e"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("d")
    on_axis = jax.shard_map(
        tiled, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"d"}
    )
    assert_close(jax.jit(on_axis)(X), jnp.sin(X) * X)


def test_sharded_stacks_are_not_gathered():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    length, width, hidden, rows = 12, 8, 16, 8

    def place(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    shardings = (
        place(None, None, "model"),
        place(None, "model", None),
        place("data", None),
    )
    shapes = ((length, width, hidden), (length, hidden, width), (rows, width))
    args = [
        jax.device_put(0.3 * normal(seed, *shape), sharding)
        for seed, (shape, sharding) in enumerate(zip(shapes, shardings, strict=True))
    ]

    def compiled(run):
        def value(up, down, x):
            return jnp.mean(run(mlp, x, (up, down))[0] ** 2)

        return jax.jit(jax.value_and_grad(value, (0, 1, 2))).lower(*args).compile()

    ours, plain = compiled(nested(length)), compiled(lax.scan)
    found, wanted = ours(*args), plain(*args)
    assert_close(found, wanted)
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), found, wanted
        )
    )
    program = ours.as_text() or ""
    gathers = [
        line
        for line in program.splitlines()
        if re.search(r"all-gather(-start)?\(", line)
    ]
    assert not [line for line in gathers if f"[{length}," in line]


def test_weights_that_types_divide_are_gathered_in_the_block():
    """As JAX asks: where both sides of a product are divided over one axis, programs
    say what results.
    """
    args = [
        0.3 * normal(k, *shape)
        for k, shape in enumerate([(3, WIDTH, 8), (3, 8, WIDTH), (8, WIDTH)])
    ]
    specs = [
        PartitionSpec(*axes)
        for axes in ((None, None, "data"), (None, "data", None), ("data", None))
    ]

    def value(whole, remat, up, down, x):
        def block(carry, *weights):
            return mlp(carry, [whole(weight) for weight in weights])[0]

        return jnp.sum(fold(block, Layers, remat=remat)(x, up, down) ** 2)

    def gradients(whole, *policies):
        of = [
            jax.grad(functools.partial(value, whole, remat), (0, 1, 2))
            for remat in policies
        ]
        return jit(lambda *args: [gradient(*args) for gradient in of])

    (wanted,) = gradients(lambda weight: weight, False)(*args)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        placed = [
            jax.device_put(arg, spec) for arg, spec in zip(args, specs, strict=True)
        ]
        gather = lambda weight: jax.sharding.reshard(weight, PartitionSpec())  # noqa: E731
        for found in gradients(gather, "nested", "offload")(*placed):
            assert [jax.typeof(leaf).sharding.spec for leaf in found] == specs
            assert_close(found, wanted)
