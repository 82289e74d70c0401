"""The sweep under other transformations, on several devices, and with a visitor."""

import functools
import re
from typing import Any, Literal

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stacked_remat import fold
from stacked_remat._remat import NOTHING
from stacked_remat._schedule import bounded, equal, shrinking

from .sweep_cases import (
    ROWS,
    WIDTH,
    assert_close,
    expected,
    inputs,
    jit,
    loss,
    mlp,
    nested,
    sweep,
)


def test_gradient_of_gradient():
    parameters, frozen = inputs(5)

    def penalty(run, p):
        gradient = jax.grad(lambda p: loss(run, p, frozen, 5)[0])(p)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))

    on_host = functools.partial(sweep, length=5, schedule=equal(5, 3), carries="host")
    plain, device, host = (
        jit(jax.grad(functools.partial(penalty, run)))(parameters) for run in (lax.scan, nested(5), on_host)
    )
    assert_close(device, plain)
    assert_close(host, plain)


def test_gradient_of_gradient_of_gradient():
    def run(scan: Any, x):
        return scan(lambda c, w: (jnp.sin(c * w), None), x, jnp.linspace(0.5, 1.0, 4))[0]

    def third(scan: Any):
        return jit(jax.grad(jax.grad(jax.grad(functools.partial(run, scan)))))(0.7)

    assert_close(third(nested(4)), third(lax.scan))


def test_vmap():
    run, length = nested(5), 5
    (h, *rest), frozen = inputs(length)
    hs = jnp.stack([h, -h])

    def gradients(run, h, w_scale):
        return jax.grad(lambda p: loss(run, (p[0], p[1], p[2] * w_scale, p[3]), frozen, length)[0])(
            (h, *rest)
        )

    scales = jnp.array([1.0, 0.5])
    actual = jit(jax.vmap(functools.partial(gradients, run)))(hs, scales)
    assert_close(actual, jit(jax.vmap(functools.partial(gradients, lax.scan)))(hs, scales))


def test_examples_that_share_weights():
    """`vmap` of `vmap` within `grad`, with keys, outputs and shared arrays of each example."""
    length = 5
    (h, *rest), frozen = inputs(length)
    hs, shifts = jnp.stack([h, h / 2, -h]), jnp.stack([rest[0], rest[0] / 2])
    keys = jax.random.split(jax.random.key(1), (length, 3))

    def total(run, weights):
        def of_one(h, shift, key):
            return loss(run, (h, weights[0] * shift, *weights[1:]), {**frozen, "key": key}, length)

        of_three = jax.vmap(of_one, (0, None, 1))
        values, rest = jax.vmap(of_three, (None, 0, None))(hs, shifts, keys)
        return jnp.sum(values), rest

    runs = [
        lax.scan,
        nested(length),
        functools.partial(sweep, length=length, schedule=bounded(length, max_carries=2), unroll=2),
        functools.partial(sweep, length=length, schedule=equal(length, -(-length // 2)), carries="host"),
        functools.partial(sweep, length=length, schedule=shrinking(3), first_layers=2, first_kept=NOTHING),
    ]
    weights = (jnp.ones(()), *rest[1:])
    plain, *found = jit(
        lambda: [jax.grad(functools.partial(total, run), has_aux=True)(weights) for run in runs]
    )()
    assert_close(found, [plain] * len(found))


def test_layers_that_use_means_over_examples():
    """Over two axes, with weights that examples share or have, and a carry that they share."""
    length = 5
    (h, *_), _ = inputs(length)
    weights, hs = 0.1 * jnp.ones((length, WIDTH, WIDTH)), jnp.stack([h, h / 2, -h])

    def layer(carry, w):
        h, count = carry
        return (h + jnp.tanh((h - lax.pmean(h, ("outer", "inner"))) @ w), count + 1), count

    def gradient(run, of_weights):
        def total(weights):
            def one(h, scale, sign):
                (h, count), counts = run(layer, (h * sign, jnp.int32(0)), weights * scale)
                return h, count, counts

            inner = jax.vmap(one, (0, of_weights, None), (0, None, None), axis_name="inner")
            outer = jax.vmap(inner, (None, None, 0), (0, None, None), axis_name="outer")
            results, *counts = outer(
                hs, jnp.arange(1.0, 4) if of_weights == 0 else 1.0, jnp.array([1.0, -0.5])
            )
            return jnp.sum(results**2), counts

        return jax.grad(total, has_aux=True)(weights)

    found, plain = jit(
        lambda: [
            [gradient(run, of_weights) for of_weights in (0, None)] for run in (nested(length), lax.scan)
        ]
    )()
    assert_close(found, plain)


def test_inside_checkpoint():
    parameters, frozen = inputs(7)
    value = jax.checkpoint(lambda p: loss(nested(7), p, frozen, 7)[0])
    assert_close(jit(jax.grad(value))(parameters), expected(7)[1])


def test_sweep_within_a_sweep():
    def outer(inner, outer):
        def value(w, v, x):
            def layer(carry, v):
                return inner(lambda c, u: (jnp.tanh(c @ u + v * jnp.mean(w)), None), carry, w)[0], None

            return jnp.sum(outer(layer, x, v)[0] ** 2)

        args = (0.3 * jnp.ones((3, WIDTH, WIDTH)), jnp.linspace(0.0, 1.0, 4), jnp.ones((ROWS, WIDTH)))
        return jit(jax.grad(value, (0, 1, 2)))(*args)

    with jax.numpy_rank_promotion("allow"):
        assert_close(outer(nested(3), nested(4)), outer(lax.scan, lax.scan))


def test_vjp_with_integer_outputs_and_unused_outputs():
    def value(run, w):
        (h, _), _ = run(lambda c, u: ((c[0] * u, c[1] + 1), c[1]), (jnp.float32(1.0), jnp.int32(0)), w)
        return h

    w = jnp.linspace(0.5, 1.5, 6)
    assert_close(
        jax.grad(functools.partial(value, nested(6)))(w), jax.grad(functools.partial(value, lax.scan))(w)
    )


def test_only_the_stacked_outputs_are_used():
    def value(run, w):
        return jnp.sum(run(lambda c, u: (jnp.sin(c) * u, c), jnp.float32(1.0), w)[1])

    w = jnp.linspace(0.5, 1.5, 6)
    assert_close(
        jax.grad(functools.partial(value, nested(6)))(w), jax.grad(functools.partial(value, lax.scan))(w)
    )


def test_sharded_stacks_are_not_gathered():
    devices = jax.devices()
    if len(devices) < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.sharding.Mesh(np.asarray(devices[:8]).reshape(4, 2), ("data", "model"))
    length, width, hidden, rows = 12, 8, 16, 8

    def place(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    shardings = (place(None, None, "model"), place(None, "model", None), place("data", None))
    shapes = ((length, width, hidden), (length, hidden, width), (rows, width))
    keys = jax.random.split(jax.random.key(0), 3)
    args = [
        jax.device_put(0.3 * jax.random.normal(key, shape), sharding)
        for key, shape, sharding in zip(keys, shapes, shardings, strict=True)
    ]

    def compiled(run):
        def value(up, down, x):
            return jnp.mean(run(mlp, x, (up, down))[0] ** 2)

        return jax.jit(jax.value_and_grad(value, (0, 1, 2))).lower(*args).compile()

    ours, plain = compiled(nested(length)), compiled(lax.scan)
    for a, b in zip(jax.tree.leaves(ours(*args)), jax.tree.leaves(plain(*args)), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
    program = ours.as_text() or ""
    gathers = [line for line in program.splitlines() if re.search(r"all-gather(-start)?\(", line)]
    assert not [line for line in gathers if f"[{length}," in line]


@pytest.mark.parametrize("carries", ["device", "host"])
def test_inside_shard_map_and_with_shardings_in_types(carries: Literal["device", "host"]):
    length = 4
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((length, WIDTH, 8), (length, 8, WIDTH), (8, WIDTH))
    args = [0.3 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    ours = functools.partial(sweep, length=length, schedule=equal(length, -(-length // 2)), carries=carries)

    def value(run, up, down, x):
        h, ys = run(lambda c, u: (mlp(c, u)[0], jnp.sum(c)), x, (up, down))
        return jnp.sum(h**2) + jnp.sum(ys)

    wanted = jit(jax.grad(functools.partial(value, lax.scan), (0, 1, 2)))(*args)
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def mesh(kind):
        return jax.make_mesh((8,), ("data",), axis_types=(kind,))

    def mapped(up, down, x):
        def part(*args):
            return lax.psum(value(ours, *args), "data")

        specs = {"in_specs": (whole, whole, rows), "out_specs": whole}
        return jax.shard_map(part, mesh=mesh(AxisType.Auto), **specs)(up, down, x)

    assert_close(jit(jax.grad(mapped, (0, 1, 2)))(*args), wanted)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        placed = [jax.device_put(arg, spec) for arg, spec in zip(args, (whole, whole, rows), strict=True)]
        assert_close(jit(jax.grad(functools.partial(value, ours), (0, 1, 2)))(*placed), wanted)


@pytest.mark.parametrize("remat", [True, "nested", "offload"])
def test_weights_that_types_divide_are_gathered_in_the_block(remat: Any):
    """As JAX asks: where both sides of a product are divided over one axis, programs say what results."""
    Layers = hax.Axis("layers", 4)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((4, WIDTH, 8), (4, 8, WIDTH), (8, WIDTH))
    args = [0.3 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    specs = [PartitionSpec(None, None, "data"), PartitionSpec(None, "data"), PartitionSpec("data")]

    def value(whole, remat, up, down, x):
        def block(carry, *weights):
            return mlp(carry, [whole(weight) for weight in weights])[0]

        return jnp.sum(fold(block, Layers, remat=remat)(x, up, down) ** 2)

    def gathered(weight):
        return jax.sharding.reshard(weight, PartitionSpec())

    wanted = jit(jax.grad(functools.partial(value, lambda weight: weight, False), (0, 1, 2)))(*args)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        placed = [jax.device_put(arg, spec) for arg, spec in zip(args, specs, strict=True)]
        found = jit(jax.grad(functools.partial(value, gathered, remat), (0, 1, 2)))(*placed)
        assert [jax.typeof(leaf).sharding.spec for leaf in found] == [
            jax.typeof(arg).sharding.spec for arg in placed
        ]
    assert_close(found, wanted)


@pytest.mark.parametrize("carries", ["device", "host"])
def test_keys_in_the_carry(carries: Literal["device", "host"]):
    def body(carry, w):
        h, key = carry
        key, own = jax.random.split(key)
        return (h * w + jax.random.uniform(own, h.shape), key), None

    def value(run, w):
        return jnp.sum(run(body, (jnp.ones(2), jax.random.key(1)), w)[0][0] ** 2)

    w = jnp.linspace(0.5, 1.5, 5)
    ours = functools.partial(sweep, length=5, schedule=equal(5, 3), carries=carries)
    assert_close(
        jit(jax.grad(functools.partial(value, ours)))(w), jit(jax.grad(functools.partial(value, lax.scan)))(w)
    )
