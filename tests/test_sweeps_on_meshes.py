"""Stacks of one and of two kinds on meshes, under every policy, beside the loop over layers."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import stacked_remat as sr
from stacked_remat import ScanCheckpointPolicy, Stacked, StackedPattern, fused_update, scan

from .blocks import deep_cases
from .sweep_cases import assert_close, jit

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
WEIGHTS, X = jnp.linspace(0.3, 0.9, 6).reshape(3, 2), jnp.linspace(-1, 1, 16).reshape(8, 2)


class Sine(eqx.Module):
    """A carry of which a sum begins the same on all devices, and a key that changes."""

    weight: jax.Array

    def __call__(self, carry):
        x, total, key = carry
        kept = sr.checkpoint_name(jnp.sin(x * self.weight), "kept")
        return (x + kept, total + jnp.sum(kept), jax.random.fold_in(key, 1)), jnp.sum(x, -1)


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
        stacks = {name: Stacked(kinds[name], Layers.resize(n)) for name, n in (("sine", 2), ("cosine", 1))}
        carry, found = StackedPattern(stacks, ("sine", "cosine", "sine"), Layers, remat).scan(carry)
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
    for case in found.values():
        assert_close(case, expected)


@pytest.mark.parametrize("cases", [FEW, pytest.param(REST, marks=pytest.mark.deep)], ids=["few", "rest"])
def test_a_batch_that_is_sharded_over_explicit_axes(cases):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    key = jax.random.key(0)

    def of(kind, remat, weights, x):
        def value(weights, x):
            return jnp.sum(jax.vmap(lambda row: run(kind, weights, row, remat, key, jnp.sum(row)))(x))

        return derivatives(value)(weights, x)

    def both(weights, x):
        return {str(case): of(case[0], case[1], weights, x) for case in [("loop", None), *cases]}

    with jax.set_mesh(mesh):
        found = jit(both)(WEIGHTS, jax.device_put(X, NamedSharding(mesh, PartitionSpec("d"))))
    expected = found.pop("('loop', None)")
    for case in found.values():
        assert_close(case, expected)


def test_each_example_of_a_batch_has_gradients_from_carries_on_the_host_beside_saved_names():
    remat, key = POLICIES[6], jax.random.key(0)

    def gradients(kind):
        value = functools.partial(run, kind, remat=remat, key=key)
        return jax.vmap(jax.grad(lambda weights, x: value(weights, x), (0, 1)), (None, 0))(WEIGHTS, X)

    assert_close(*jit(lambda: (gradients("two"), gradients("loop")))())


class Counting(eqx.Module):
    weight: jax.Array

    def __call__(self, carry):
        x = sr.checkpoint_name(jnp.sin(carry["x"] * self.weight), "sine")
        return {"x": x, "count": carry["count"] + 1, "sum": carry["sum"] + jnp.sum(x)}


def test_a_part_of_the_carry_that_begins_as_a_constant_is_on_the_mesh_too():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    layers = [Counting(weight) for weight in WEIGHTS]

    def gradients(x, fold):
        def value(x):
            last = fold({"x": x, "count": jnp.int32(0), "sum": jnp.zeros(())})
            return jnp.sum(last["x"] ** 2) * last["count"].astype(x.dtype) + last["sum"]

        return jax.vmap(jax.grad(value))(x)

    def loop(carry):
        for layer in layers:
            carry = layer(carry)
        return carry

    def both(x):
        kinds = {"counting": Stacked(Counting(WEIGHTS), Layers)}
        pattern = StackedPattern(kinds, ("counting",) * 3, Layers)
        policies = ("offload", ScanCheckpointPolicy(offload_block_internals=["sine"]))
        folds = [functools.partial(pattern.fold, remat=remat) for remat in policies]
        return [gradients(x, fold) for fold in (loop, *folds)]

    with jax.set_mesh(mesh):
        expected, *found = jit(both)(jax.device_put(X, NamedSharding(mesh, PartitionSpec("d"))))
    for case in found:
        assert_close(case, expected)


class Tanh(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x + jnp.tanh(x * self.weight[None])


def test_weights_that_were_made_before_the_mesh_are_updated():
    blocks, optimizer = Stacked(Tanh(WEIGHTS), Layers, "nested"), optax.sgd(0.1)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))

    def loss(blocks, x):
        return jnp.sum(blocks.fold(x) ** 2)

    step = fused_update(loss, optimizer)
    expected = WEIGHTS - 0.1 * jax.grad(loss)(blocks, X).stacked.weight
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("d")))
        found = jax.jit(step)(blocks, step.init(blocks), x).model.stacked.weight
    assert_close(found, expected)


def test_layers_that_send_to_a_neighbour_of_the_batch():
    def layer(carry, weight):
        return jnp.sin(lax.ppermute(carry, "batch", [(i, (i + 1) % 8) for i in range(8)]) * weight), carry

    def value(apply, weights, x):
        carry, outputs = jax.vmap(lambda row: apply(row, weights), axis_name="batch")(x)
        return jnp.sum(carry**2) + jnp.sum(jnp.cos(outputs))

    def both(weights, x):
        ours = {str(remat): functools.partial(value, scan(layer, Layers, remat=remat)) for remat in POLICIES}
        plain = functools.partial(value, lambda x, weights: lax.scan(layer, x, weights))
        return {name: derivatives(fn)(weights, x) for name, fn in (ours | {"plain": plain}).items()}

    found = jit(both)(WEIGHTS, X)
    expected = found.pop("plain")
    for case in found.values():
        assert_close(case, expected)


def test_an_argument_that_reaches_no_rule_has_derivatives_of_the_gradient():
    @jax.custom_vjp
    def ruled(x, weight):
        return jnp.tanh(x * weight)

    ruled.defvjp(lambda x, weight: (ruled(x, weight), x), lambda x, ct: (2 * ct, ct * x))

    def value(apply, scale):
        return jnp.sum(apply(lambda carry, weight: (ruled(carry, weight), scale**3), X[0], WEIGHTS)[1])

    for remat in POLICIES:
        hessian = jax.hessian(
            functools.partial(value, lambda f, *args, remat=remat: scan(f, Layers, remat=remat)(*args))
        )
        assert_close(jit(hessian)(2.0), jnp.asarray(3 * 2 * 6 * 2.0 / 2))


def test_tiles_of_an_empty_batch_and_on_some_axes_of_a_mesh():
    tiled = sr.tiled(lambda x: jnp.sin(x) * x, 0, tiles=2)
    assert jax.vmap(tiled)(jnp.zeros((0, 4))).shape == (0, 4)
    mesh = jax.make_mesh((4, 2), ("d", "e"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("d")
    on_axis = jax.shard_map(tiled, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"d"})
    assert_close(jax.jit(on_axis)(X), jnp.sin(X) * X)
