"""The sweep where cotangents are zero, with means over examples, and on several devices."""

import functools
import re
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stacked_remat import fold

from .random_arrays import normal
from .sweep_cases import ROWS, WIDTH, assert_close, jit, mlp, nested


def test_layers_that_use_means_over_examples():
    """Over two axes, with weights that examples share or have, and a carry that they share."""
    length, h = 5, normal(0, ROWS, WIDTH)
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


def test_sharded_stacks_are_not_gathered():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    length, width, hidden, rows = 12, 8, 16, 8

    def place(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    shardings = (place(None, None, "model"), place(None, "model", None), place("data", None))
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
    for a, b in zip(jax.tree.leaves(ours(*args)), jax.tree.leaves(plain(*args)), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
    program = ours.as_text() or ""
    gathers = [line for line in program.splitlines() if re.search(r"all-gather(-start)?\(", line)]
    assert not [line for line in gathers if f"[{length}," in line]


@pytest.mark.parametrize("remat", ["nested", "offload"])
def test_weights_that_types_divide_are_gathered_in_the_block(remat: Any):
    """As JAX asks: where both sides of a product are divided over one axis, programs say what results."""
    Layers = hax.Axis("layers", 4)
    args = [0.3 * normal(k, *shape) for k, shape in enumerate([(4, WIDTH, 8), (4, 8, WIDTH), (8, WIDTH)])]
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
