"""Values and gradients of the sweep equal the Python loop's under every schedule."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stacked_remat._schedule import Schedule, bounded, equal, levels, shrinking

from .sweep_cases import (
    assert_close,
    check,
    derivatives,
    expected,
    jit,
    sweep,
)


@pytest.mark.parametrize("length", [1, 2, 12])
def test_every_length(length: int):
    check(shrinking(length))


@pytest.mark.parametrize(
    "schedule",
    [
        equal(12, 5),
        equal(12, 12),
        equal(12, 1),
        levels(12, (2, 2, 3)),
        bounded(12, max_carries=4),
    ],
    ids=str,
)
def test_every_schedule_in_reverse(schedule: Schedule):
    check(schedule, reverse=True)


@pytest.mark.parametrize("schedule, unroll", [(shrinking(7), 2), (equal(7, 3), True)], ids=str)
def test_unroll(schedule: Schedule, unroll: int | bool):
    check(schedule, unroll=unroll)


@pytest.mark.parametrize(
    "schedule, options",
    [
        (equal(7, 3), {}),
        (equal(7, 3), {"reverse": True}),
        (equal(7, 3), {"unroll": 2}),
        (equal(12, 4), {"reverse": True}),
        (equal(7, 7), {}),
        (shrinking(7), {"reverse": True}),
    ],
    ids=str,
)
def test_boundaries_on_the_host(schedule: Schedule, options: dict):
    check(schedule, carries="host", **options)


def test_bfloat16_accumulates_like_scan():
    def scan(body, init, xs):
        return lax.scan(jax.checkpoint(body), init, xs)

    run = functools.partial(sweep, length=7, schedule=shrinking(7))
    actual, wanted = (jit(lambda run=run: derivatives(run, 7, jnp.bfloat16))() for run in (run, scan))
    assert_close(actual, wanted, tolerance=2e-2)


def test_without_jit():
    run = functools.partial(sweep, length=2, schedule=shrinking(2))
    assert_close(derivatives(run, 2), expected(2))


def test_nothing_to_scan_over():
    def value(run, x, a):
        return run(lambda c, _: (jnp.sin(c) * a, None), x, None)[0]

    grad = jax.grad(
        functools.partial(value, functools.partial(sweep, length=5, schedule=shrinking(5))), (0, 1)
    )
    wanted = jax.grad(functools.partial(value, functools.partial(lax.scan, length=5)), (0, 1))
    assert_close(grad(0.3, 1.2), wanted(0.3, 1.2))


def test_weakly_typed_carry():
    def body(carry, x):
        return carry * x, jnp.float32(1.0) * carry

    xs = jnp.arange(1.0, 4.0)
    actual = sweep(body, 1.0, xs, length=3, schedule=shrinking(3))
    assert_close(actual, lax.scan(body, 1.0, xs))
    with pytest.raises(TypeError, match="carry"):
        sweep(lambda c, x: (jnp.stack([c, c]), None), 1.0, xs, length=3, schedule=shrinking(3))
