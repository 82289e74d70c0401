"""A sweep whose first layers keep their inputs and residuals: values, composition and cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from stacked_remat._remat import EVERYTHING, NOTHING, Kept
from stacked_remat._schedule import Schedule, bounded, equal, shrinking

from .jaxprs import count
from .random_arrays import normal
from .sweep_cases import assert_close, check, inputs, jit, loss, mlp_gradients, sweep

KEPT = {"carries": NOTHING, "everything": EVERYTHING, "a name": Kept(("h",))}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize(
    "schedule, reverse",
    [(shrinking(4), False), (bounded(4, max_carries=2), True)],
    ids=str,
)
def test_values_and_gradients(schedule: Schedule, kept, reverse: bool):
    check(schedule, first_layers=3, first_kept=kept, reverse=reverse)


@pytest.mark.parametrize("schedule, reverse", [(equal(4, 2), False), (equal(4, 4), True)], ids=str)
def test_boundaries_on_the_host(schedule: Schedule, reverse: bool):
    check(schedule, first_layers=3, reverse=reverse, carries="host")


@pytest.mark.parametrize("unroll", [2, True])
def test_unroll(unroll):
    check(shrinking(4), first_layers=3, unroll=unroll)


def seven(**kwargs):
    return functools.partial(sweep, length=7, schedule=shrinking(4), first_layers=3, **kwargs)


@pytest.mark.deep
def test_gradient_of_gradient():
    parameters, frozen = inputs(7)

    def penalty(run, p):
        gradient = jax.grad(lambda p: loss(run, p, frozen, 7)[0])(p)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))

    plain, device, host = (
        jit(jax.grad(functools.partial(penalty, run)))(parameters)
        for run in (lax.scan, seven(), sweep_on_host())
    )
    assert_close(device, plain)
    assert_close(host, plain)


def sweep_on_host():
    return functools.partial(
        sweep, length=7, schedule=equal(4, 2), first_layers=3, first_kept=NOTHING, carries="host"
    )


def test_vmap_and_checkpoint():
    (h, *rest), frozen = inputs(7)

    def gradients(run, h):
        return jax.grad(jax.checkpoint(lambda p: loss(run, p, frozen, 7)[0]))((h, *rest))

    hs = jnp.stack([h, -h])
    actual = jit(jax.vmap(functools.partial(gradients, seven())))(hs)
    assert_close(actual, jit(jax.vmap(functools.partial(gradients, lax.scan)))(hs))


@pytest.mark.parametrize("run", [seven(), sweep_on_host()], ids=["device", "host"])
def test_keys_in_the_carry_and_outputs_that_are_not_used(run):
    def body(carry, w):
        h, key = carry
        key, own = jax.random.split(key)
        return (h * w + jax.random.uniform(own, h.shape), key), (jnp.sin(h * w), jnp.int32(3))

    def value(run, w):
        return jnp.sum(run(body, (jnp.ones(2), jax.random.key(1)), w)[0][0] ** 2)

    w = jnp.linspace(0.5, 1.5, 7)
    assert_close(
        jit(jax.grad(functools.partial(value, run)))(w), jit(jax.grad(functools.partial(value, lax.scan)))(w)
    )


def test_the_first_layers_are_evaluated_once_and_the_rest_by_the_schedule():
    def tanhs(first_layers: int, schedule: Schedule) -> int:
        calls = []

        def body(c, w):
            def count(value):
                calls.append(value)
                return value

            counted = jax.pure_callback(
                count, jax.ShapeDtypeStruct((), jnp.float32), lax.stop_gradient(c * w)
            )
            return jnp.tanh(c * w + 0.0 * counted), None

        def value(w):
            return sweep(body, 0.5, w, length=7, schedule=schedule, first_layers=first_layers)[0]

        np.asarray(jax.jit(jax.grad(value))(jnp.ones(7)))
        return len(calls)

    # Forward 7; then each of the last 4 once more at its visit, and what the schedule replays.
    assert tanhs(3, equal(4, 4)) == 7 + 4
    assert tanhs(3, shrinking(4)) == 7 + 4 + shrinking(4).replays
    assert tanhs(0, equal(7, 7)) == 7 + 7


def test_frozen_weights_cost_nothing():
    run = functools.partial(sweep, length=12, schedule=shrinking(7), first_layers=5)
    frozen, trained = (count(mlp_gradients(run, 12, which)[0], "dot_general") for which in ((2,), (0, 1, 2)))
    weight_gradients = trained - frozen
    assert weight_gradients == 4  # two products in the body of each of the two loops that visit
    assert_close(
        jax.grad(mlp_gradients(run, 12)[1], 2)(*arguments()),
        jax.grad(mlp_gradients(lax.scan, 12)[1], 2)(*arguments()),
    )


def arguments():
    return [0.3 * normal(seed, *shape) for seed, shape in enumerate([(12, 4, 6), (12, 6, 4), (3, 4)])]
