"""Programs exported for other platforms than the one that traces them, and for symbolic
lengths.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("flatbuffers")  # in which exported programs are serialized
from jax import export, lax

import stacked_remat as sr
from stacked_remat import ScanCheckpointPolicy

from .blocks import POLICIES, assert_close

PLATFORMS = ("cpu", "cuda", "tpu")
INIT, WEIGHTS = (
    jnp.linspace(-1, 1, 6).reshape(2, 3),
    jnp.linspace(-0.4, 0.5, 54).reshape(6, 3, 3),
)


def step(carry, weight):
    hidden = sr.checkpoint_name(carry @ weight, "hidden")
    carry = carry + jnp.sin(hidden)
    return carry, jnp.sum(carry**2)


def derivatives(scan):
    """A value, its gradients and a Hessian-vector product."""

    def loss(init, weights):
        carry, ys = scan(step, init, weights)
        return jnp.sum(carry) + jnp.sum(ys)

    def of(init, weights):
        value, gradients = jax.value_and_grad(loss, (0, 1))(init, weights)
        _, product = jax.jvp(
            jax.grad(lambda weights: loss(init, weights)), (weights,), (weights,)
        )
        return value, gradients, product

    return of


def barriers(exported):
    return exported.mlir_module().count("optimization_barrier")


@pytest.mark.parametrize("remat", POLICIES.values(), ids=POLICIES)
def test_a_program_for_all_platforms_comes_back_with_the_numbers_of_jax(remat):
    run = jax.jit(derivatives(functools.partial(sr.lax_scan, remat=remat)))
    found = export.export(run, platforms=PLATFORMS)(INIT, WEIGHTS)
    called = export.deserialize(found.serialize()).call(INIT, WEIGHTS)
    assert_close(
        called, jax.jit(derivatives(lax.scan))(INIT, WEIGHTS), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("remat", "with_barriers"),
    [
        ("nested", {"tpu"}),  # on the gradients of a layer, before they are written
        ("nested, offload", {"cuda", "tpu"}),  # on carry and cotangent; on gradients
        ("first layers", {"tpu"}),
    ],
)
def test_barriers_are_those_of_the_platform_it_is_exported_for(remat, with_barriers):
    gradient = jax.jit(
        jax.grad(
            lambda weights: sr.lax_scan(step, INIT, weights, remat=POLICIES[remat])[
                0
            ].sum()
        )
    )
    count = {
        name: barriers(export.export(gradient, platforms=[name])(WEIGHTS))
        for name in (*PLATFORMS, "rocm")
    }
    assert {name for name in PLATFORMS if count[name] > count["cpu"]} == with_barriers
    assert count["rocm"] == count["cuda"]
    together = export.export(gradient, platforms=PLATFORMS)(WEIGHTS)
    assert barriers(together) >= max(count.values())


class Layer(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return step(x, self.weight)[0]


def test_a_visitor_of_layers_on_the_host_has_the_barriers_of_its_platform():
    def halved(visit, state):
        found = visit.vjp()
        return sr.LayerResult(
            found.carry, jax.tree.map(lambda gradient: 0.5 * gradient, found.layer)
        )

    def steps(weights):
        blocks = sr.Stacked(
            Layer(jax.device_put(weights, jax.memory.Space.Host)), len(weights)
        )
        y, sweep_back = blocks.fold_vjp(INIT, remat="nested")
        result = sweep_back(jnp.ones_like(y), halved)
        return result.carry, jax.device_put(
            result.layers.stacked.weight, jax.memory.Space.Device
        )

    count = {
        name: barriers(export.export(jax.jit(steps), platforms=[name])(WEIGHTS))
        for name in PLATFORMS
    }
    assert count["cuda"] > count["cpu"] and count["tpu"] > count["cpu"]
    found = export.export(jax.jit(steps), platforms=PLATFORMS)(WEIGHTS)

    def of_jax(weights):
        _, pullback = jax.vjp(
            lambda init, weights: lax.scan(step, init, weights)[0], INIT, weights
        )
        carry, gradient = pullback(jnp.ones_like(INIT))
        return carry, 0.5 * gradient

    assert_close(found.call(WEIGHTS), jax.jit(of_jax)(WEIGHTS))


def test_offloaded_carries_have_barriers_for_gpus():
    gradient = jax.jit(
        jax.grad(
            lambda weights: sr.lax_scan(step, INIT, weights, remat="offload")[0].sum()
        )
    )
    assert barriers(export.export(gradient, platforms=["cuda"])(WEIGHTS))


SYMBOLIC = [
    False,
    True,
    "recompute",
    "offload",
    ScanCheckpointPolicy(save_block_internals=["hidden"]),
]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("remat", SYMBOLIC, ids=str)
def test_a_symbolic_length_is_exported_as_by_jax(remat, reverse):
    (length,) = export.symbolic_shape("length")
    run = jax.jit(
        derivatives(functools.partial(sr.lax_scan, remat=remat, reverse=reverse))
    )
    found = export.export(run)(INIT, jax.ShapeDtypeStruct((length, 3, 3), jnp.float32))
    of_jax = jax.jit(derivatives(functools.partial(lax.scan, reverse=reverse)))
    for weights in (WEIGHTS, WEIGHTS[:1]):
        assert_close(
            found.call(INIT, weights), of_jax(INIT, weights), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("remat", ["nested", "max_carries", "first layers"])
def test_a_symbolic_length_is_not_cut(remat):
    (length,) = export.symbolic_shape("length")
    run = jax.jit(
        lambda weights: sr.lax_scan(step, INIT, weights, remat=POLICIES[remat])[0]
    )
    with pytest.raises(
        ValueError,
        match=r"cuts the layers into segments, and their number is symbolic \(length\)",
    ):
        export.export(run)(jax.ShapeDtypeStruct((length, 3, 3), jnp.float32))
