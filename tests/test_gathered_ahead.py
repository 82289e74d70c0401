"""Layers that gather their own weights, which loops gather a layer ahead."""

import functools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from stacked_remat import (
    Stacked,
    StackedPattern,
    checkpoint_name,
    fold,
    fused_update,
    lax_scan,
    scan,
)

from .blocks import (
    assert_close_to_scale as assert_close,
    policies,
    quick_jit as jit,
)
from .jaxprs import equations_of
from .random_arrays import normal

LAYERS, WIDTH, INNER, ROWS = 6, 8, 16, 8
Layers = hax.Axis("layers", LAYERS)
POLICIES = policies(
    "False",
    "True",
    "offload",
    "nested",
    "nested, offload",
    "max_carries",
    "nested, internals",
    "first layers",
    "names",
    "names offloaded",
)
# How weights are divided
UP, DOWN = P(None, None, "data"), P(None, "data", None)
ARGS = (
    0.3 * normal(0, LAYERS, WIDTH, INNER),
    0.3 * normal(1, LAYERS, INNER, WIDTH),
    normal(2, ROWS, WIDTH),
)
SPECS = UP, DOWN, P("data", None)


class Block(eqx.Module):
    up: jax.Array
    down: jax.Array
    gather: Any = eqx.field(static=True, default=lambda weight, axis: weight)

    def __call__(self, x):
        up, down = self.gather(self.up, 1), self.gather(self.down, 0)
        return x + checkpoint_name(jnp.tanh(x @ up), "hidden") @ down


class Scaled(Block):
    """Another kind."""

    def __call__(self, x):
        return super().__call__(0.9 * x)


def constrained(mesh, weight, axis):
    # The cast is before the gather, as in mixed precision.
    weight = weight.astype(jnp.float32)
    return lax.with_sharding_constraint(weight, NamedSharding(mesh, P()))


def resharded(weight, axis):
    return jax.sharding.reshard(weight, P())


def all_gathered(weight, axis):
    return lax.all_gather(weight, "data", axis=axis, tiled=True)


def loss(gather, apply, up, down, x):
    return jnp.sum(apply(Block(up, down, gather), x) ** 2)


def by_stack(remat, blocks, x):
    return Stacked(blocks, Layers, remat).fold(x)


def by_lax_scan(remat, blocks, x):
    def step(x, own):
        return Block(own[0], own[1], blocks.gather)(x), None

    return lax_scan(step, x, (blocks.up, blocks.down), remat=remat)[0]


def by_pattern(remat, blocks, x):
    def part(rows):
        return blocks.up[rows], blocks.down[rows]

    a = Stacked(Block(*part(slice(0, 4)), blocks.gather), Layers.resize(4))
    b = Stacked(Scaled(*part(slice(4, 6)), blocks.gather), Layers.resize(2))
    return StackedPattern({"a": a, "b": b}, "aabaab", Layers, remat).fold(x)


def unrolled(remat, blocks, x):
    def step(x, *own):
        return Block(own[0], own[1], blocks.gather)(x)

    return fold(step, Layers, remat=remat, unroll=True)(x, blocks.up, blocks.down)


def reversed_fold(remat, blocks, x):
    def step(x, *own):
        return Block(own[0], own[1], blocks.gather)(x)

    return fold(step, Layers, remat=remat, reverse=True)(x, blocks.up, blocks.down)


def by_scan(remat, blocks, x):
    def step(x, *own):
        x = Block(own[0], own[1], blocks.gather)(x)
        return x, jnp.mean(x, -1)

    x, means = scan(step, Layers, remat=remat)(x, blocks.up, blocks.down)
    return x + jnp.sum(means, 0)[:, None]


SCALES = normal(3, WIDTH)


def exchanged(x):
    """A device's rows, each number scaled on the device of its column."""
    columns = lax.all_to_all(x, "data", 1, 0, tiled=True)
    scaled = columns * SCALES[lax.axis_index("data")]
    return lax.all_to_all(scaled, "data", 0, 1, tiled=True)


class Exchanging(Block):
    """A block that ends with an exchange between devices."""

    def __call__(self, x):
        mesh = jax.sharding.get_abstract_mesh()
        x = super().__call__(x)
        if mesh.empty:
            return x + jnp.tanh(x * SCALES[None])
        exchange = exchanged
        if not mesh.manual_axes:
            rows = P("data")
            exchange = jax.shard_map(exchanged, in_specs=rows, out_specs=rows)
        return x + jnp.tanh(exchange(x))


def by_exchanging(remat, blocks, x):
    blocks = Exchanging(blocks.up, blocks.down, blocks.gather)
    return Stacked(blocks, Layers, remat).fold(x)


def mesh_and_gather(mesh_kind, devices=8):
    axis_type = AxisType.Auto if mesh_kind == "shard_map" else mesh_kind
    mesh = jax.make_mesh((devices,), ("data",), (axis_type,))
    gathers = {
        AxisType.Auto: functools.partial(constrained, mesh),
        AxisType.Explicit: resharded,
        "shard_map": all_gathered,
    }
    return mesh, gathers[mesh_kind]


def loss_on(mesh_kind, mesh, gather, apply):
    """The loss with layers that gather their weights, on a mesh of this kind."""
    value = functools.partial(loss, gather, apply)
    if mesh_kind != "shard_map":
        return value

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=SPECS, out_specs=P("data"))
    def on_device(*args):
        return value(*args)[None]

    return lambda *args: jnp.sum(on_device(*args))


def on_mesh(mesh_kind, cases):
    """What functions of a loss and its arguments return, with weights that are divided
    over 8 devices, and layers that gather theirs.

    `cases` has for each name such a function, and one that applies the blocks.
    """
    mesh, gather = mesh_and_gather(mesh_kind)

    def all_of(*args):
        found = {}
        for name, (derivative, apply) in cases.items():
            value = loss_on(mesh_kind, mesh, gather, apply)
            found[name] = derivative(value, *args)
        return found

    shardings = tuple(NamedSharding(mesh, spec) for spec in SPECS)
    with jax.set_mesh(mesh):
        return jax.device_get(jit(all_of)(*jax.device_put(ARGS, shardings)))


def gradient(value, *args):
    return jax.grad(value, (0, 1, 2))(*args)


def of_frozen_weights(value, *args):
    return jax.grad(value, (1, 2))(*args)


def product_with_hessian(value, *args):
    return jax.jvp(functools.partial(gradient, value), args, args)[1]


def second_gradient(value, *args):
    def norm(*args):
        return sum(jnp.sum(leaf**2) for leaf in gradient(value, *args))

    return jax.grad(norm)(*args)


def on_one_device(derivative, apply):
    value = functools.partial(loss, lambda weight, axis: weight, apply)
    return jax.device_get(jit(functools.partial(derivative, value))(*ARGS))


MESHES = [AxisType.Auto, AxisType.Explicit, "shard_map"]
FEW = ["True", "nested", "offload", "first layers"]


@pytest.mark.parametrize(
    "names",
    [FEW, pytest.param([*POLICIES.keys() - {*FEW}], marks=pytest.mark.deep)],
    ids=["few", "rest"],
)
@pytest.mark.parametrize("mesh_kind", MESHES, ids=str)
def test_gradients_are_those_of_one_device(mesh_kind, names):
    cases = {}
    for name in names:
        cases[name] = gradient, functools.partial(by_stack, POLICIES[name])
    wanted = on_one_device(gradient, functools.partial(by_stack, False))
    for name, found in on_mesh(mesh_kind, cases).items():
        assert_close(found, wanted, name=name)


@pytest.mark.parametrize(
    "derivative", [of_frozen_weights, product_with_hessian, second_gradient]
)
@pytest.mark.parametrize("mesh_kind", MESHES, ids=str)
def test_other_derivatives_are_those_of_one_device(mesh_kind, derivative):
    apply = functools.partial(by_stack, "nested")
    wanted = on_one_device(derivative, functools.partial(by_stack, False))
    found = on_mesh(mesh_kind, {"nested": (derivative, apply)})["nested"]
    assert_close(found, wanted)


@pytest.mark.parametrize("mesh_kind", MESHES, ids=str)
def test_layers_that_end_with_an_exchange(mesh_kind):
    cases = {"hessian": (product_with_hessian, functools.partial(by_exchanging, True))}
    for name in ("False", "nested", "nested, internals", "names"):
        cases[name] = gradient, functools.partial(by_exchanging, POLICIES[name])
    wanted = {}
    for derivative in (gradient, product_with_hessian):
        apply = functools.partial(by_exchanging, False)
        wanted[derivative] = on_one_device(derivative, apply)
    for name, found in on_mesh(mesh_kind, cases).items():
        assert_close(found, wanted[cases[name][0]], name=name)


LOOPS = [by_lax_scan, by_scan, by_pattern, reversed_fold, unrolled]


@pytest.mark.parametrize("apply", LOOPS)
@pytest.mark.parametrize("mesh_kind", MESHES, ids=str)
def test_every_loop_gathers_its_layers(mesh_kind, apply):
    wanted = on_one_device(gradient, functools.partial(apply, False))
    cases = {"nested": (gradient, functools.partial(apply, "nested"))}
    assert_close(on_mesh(mesh_kind, cases)["nested"], wanted)


PATTERNS = ["aabaab", "bcacaacb", "a", "cccabbb"]


@pytest.mark.parametrize(
    "patterns",
    [PATTERNS[:2], pytest.param(PATTERNS[2:], marks=pytest.mark.deep)],
    ids=["few", "rest"],
)
def test_kinds_of_other_shapes_gather_ahead_under_every_policy(patterns):
    """One kind may have no layers."""
    mesh, gather = mesh_and_gather(AxisType.Auto)
    inner = {"a": INNER, "b": 8, "c": 24}

    def weights_of(pattern):
        found = {}
        for seed, kind in enumerate(inner):
            count = pattern.count(kind)
            found[kind] = (
                0.3 * normal(seed, count, WIDTH, inner[kind]),
                0.3 * normal(seed + 3, count, inner[kind], WIDTH),
            )
        return found

    def value(gather, pattern, remat, reverse, weights, x):
        stacks = {}
        for kind, (up, down) in weights.items():
            block = (Scaled if kind == "b" else Block)(up, down, gather)
            stacks[kind] = Stacked(block, Layers.resize(pattern.count(kind)))
        axis = Layers.resize(len(pattern))
        blocks = StackedPattern(stacks, pattern, axis, remat)
        return jnp.sum(blocks.fold(x, reverse=reverse) ** 2)

    def gradients(gather, policies, weights, x):
        found = []
        for number, (name, remat) in enumerate(policies.items()):
            pattern = patterns[number % len(patterns)]
            reverse = number // len(patterns) % 2 == 1
            run = functools.partial(value, gather, pattern, remat, reverse)
            found.append((name, jax.grad(run, (0, 1))(weights[pattern], x)))
        return dict(found)

    args = {pattern: weights_of(pattern) for pattern in patterns}, ARGS[2]
    wanted = jit(
        functools.partial(
            gradients, lambda weight, axis: weight, dict.fromkeys(POLICIES, False)
        )
    )(*args)

    def placed(pair):
        specs = zip(pair, (UP, DOWN), strict=True)
        return tuple(
            jax.device_put(one, NamedSharding(mesh, spec)) for one, spec in specs
        )

    weights, x = args
    weights = {
        pattern: {kind: placed(pair) for kind, pair in kinds.items()}
        for pattern, kinds in weights.items()
    }
    with jax.set_mesh(mesh):
        found = jit(functools.partial(gradients, gather, POLICIES))(weights, x)
    for name in POLICIES:
        assert_close(
            jax.device_get(found[name]), jax.device_get(wanted[name]), name=name
        )


@pytest.mark.usefixtures("standard_promotion")  # optax depends on it
@pytest.mark.parametrize("mesh_kind", MESHES[:2], ids=str)
def test_layers_are_updated_where_they_are_divided(mesh_kind):
    mesh, gather = mesh_and_gather(mesh_kind)

    def blocks_of(up, down, gather):
        return Stacked(Block(up, down, gather), Layers, "nested")

    def value(blocks, x):
        return jnp.sum(blocks.fold(x) ** 2)

    update = fused_update(value, optax.sgd(0.1))

    def step(up, down, x, gather=gather):
        blocks = blocks_of(up, down, gather)
        new = update(blocks, update.init(blocks), x).model.stacked
        return new.up, new.down

    wanted = jit(functools.partial(step, gather=lambda weight, axis: weight))(*ARGS)
    shardings = tuple(NamedSharding(mesh, spec) for spec in SPECS)
    with jax.set_mesh(mesh):
        found = jit(step)(*jax.device_put(ARGS, shardings))
    assert_close(jax.device_get(found), jax.device_get(wanted))
    for leaf, sharding in zip(found, shardings[:2], strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, 3)


def whole_weights_in_loops(mesh_kind, remat, apply=by_stack, devices=2):
    """How many whole weights of each shape a loop of a gradient carries, for loops that
    carry some.
    """
    mesh, gather = mesh_and_gather(mesh_kind, devices)
    value = functools.partial(loss, gather, functools.partial(apply, remat))
    every = []

    # Primitives are expanded on the mesh, and in the shard_map, that they are called on
    def look(*args):
        every.extend(equations_of(functools.partial(gradient, value), *args))
        return args

    if mesh_kind == "shard_map":
        look = jax.shard_map(look, mesh=mesh, in_specs=SPECS, out_specs=SPECS)
    shardings = tuple(NamedSharding(mesh, spec) for spec in SPECS)
    with jax.set_mesh(mesh):
        jax.eval_shape(look, *jax.device_put(ARGS, shardings))
    found = []
    for equation in every:
        if equation.primitive.name in ("scan", "while"):
            shapes = [getattr(var.aval, "shape", ()) for var in equation.outvars]
            found.append([shapes.count((WIDTH, INNER)), shapes.count((INNER, WIDTH))])
    return [counts for counts in found if any(counts)]


@pytest.mark.parametrize(
    "apply", [by_stack, by_lax_scan, by_scan, reversed_fold, by_exchanging]
)
@pytest.mark.parametrize("mesh_kind", MESHES, ids=str)
def test_loops_carry_one_gathered_layer(mesh_kind, apply):
    # Under "nested" forward loops are one within another too, and there are replays
    for remat, loops in ((True, 3), ("nested", 5), ("recompute", 0)):
        assert whole_weights_in_loops(mesh_kind, remat, apply) == [[1, 1]] * loops


@pytest.mark.parametrize("mesh_kind", MESHES, ids=str)
def test_loops_carry_one_gathered_layer_of_each_kind(mesh_kind):
    counts = whole_weights_in_loops(mesh_kind, "nested", by_pattern)
    # What runs a layer of one kind may carry that of the kind alone
    assert max(counts) == [2, 2]
    assert all(both in ([2, 2], [1, 1]) for both in counts)


@pytest.mark.parametrize("mesh_kind", MESHES, ids=str)
def test_on_one_device_no_byte_is_held_for_it(mesh_kind):
    mesh, gather = mesh_and_gather(mesh_kind, devices=1)
    shardings = tuple(NamedSharding(mesh, spec) for spec in SPECS)

    def temporaries(gather, remat):
        apply = functools.partial(by_stack, remat)
        value = loss_on(mesh_kind, mesh, gather, apply)
        with jax.set_mesh(mesh):
            args = jax.device_put(ARGS, shardings)
            lowered = jit(functools.partial(gradient, value)).lower(*args)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    # In a `jax.jit` of its own a gather is not seen
    unseen = jax.jit(gather, static_argnums=1)
    for remat in (True, "nested"):
        assert whole_weights_in_loops(mesh_kind, remat, devices=1) == []
        assert temporaries(gather, remat) == temporaries(unseen, remat)


def test_which_constraints_gather():
    mesh = jax.make_mesh((8, 1), ("data", "one"), (AxisType.Auto,) * 2)

    def is_swept(sharding):
        def layer(x, weight):
            return x + jnp.tanh(x @ lax.with_sharding_constraint(weight, sharding))

        # In a loop of JAX layers would wait for what they gather
        found = equations_of(fold(layer, Layers), ARGS[2], weights)
        return any(equation.primitive.name == "barrier_on" for equation in found)

    weights = normal(3, LAYERS, WIDTH, WIDTH)
    assert is_swept(NamedSharding(mesh, P()))
    assert is_swept(NamedSharding(mesh, P("one")))
    # All axes of the mesh may divide the result
    for spec in (P(None, "data"), P("data"), P(("one", "data")), P(P.UNCONSTRAINED)):
        assert not is_swept(NamedSharding(mesh, spec))
    assert not is_swept(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    alone = jax.make_mesh((1,), ("data",), (AxisType.Auto,))
    assert not is_swept(NamedSharding(alone, P()))
