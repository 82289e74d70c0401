"""Programs do not grow: how many loops, slices, barriers and choices they have.

What is added to a program of a sweep, such as a loop around one layer, a stack that is
read twice, a checkpoint that nothing needs or a barrier on a platform that is as fast
without, changes no value. A change that makes a program smaller lowers its numbers.
"""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from stacked_remat import ScanCheckpointPolicy, fold, scan, shared

from .jaxprs import equations
from .test_xla_hints import (
    WEIGHTS,
    X,
    gathered,
    of_two_kinds,
    product_with_hessian,
    visited,
)

GROUPS = {
    "while": "loops",
    "scan": "loops",
    "dynamic_slice": "slices",
    "dynamic_update_slice": "slices",
    "gather": "slices",
    "scatter-add": "slices",
    "optimization_barrier": "barriers",
    "select_n": "choices",
    "cond": "choices",
    "checkpoint": "checkpoints",
    "remat2": "checkpoints",
    "broadcast_in_dim": "zeros",
    "device_put": "moves",
    "tanh": "layers",
}


class Sizes(NamedTuple):
    """How many equations of each kind a program has."""

    layers: int = 0
    loops: int = 0
    slices: int = 0
    zeros: int = 0
    barriers: int = 0
    choices: int = 0
    checkpoints: int = 0
    moves: int = 0
    # Numbers in all results of loops
    results: int = 0


def sizes_of(program) -> Sizes:
    counts: collections.Counter[str] = collections.Counter()
    for equation in equations(jax.make_jaxpr(program)(WEIGHTS, X).jaxpr):
        group = GROUPS.get(equation.primitive.name)
        if group is not None:
            counts[group] += 1
        if group == "loops":
            counts["results"] += sum(var.aval.size for var in equation.outvars)
    return Sizes(**counts)


def layer(x, weight):
    return jnp.tanh(x @ weight)


def value(weights, x, remat, **options):
    return jnp.sum(fold(layer, len(weights), remat=remat, **options)(x, weights))


def gradient(remat=None, until=None, reverse=False, **settings):
    remat = ScanCheckpointPolicy(**settings) if remat is None else remat

    def run(weights, x):
        return jax.grad(value, (0, 1))(weights, x, remat, until=until, reverse=reverse)

    return run


def is_over(x):
    return jnp.max(x) > 3


def jvp_of(program):
    return lambda weights, x: jax.jvp(program, (weights, x), (weights, x))


def mapped(program):
    return lambda weights, x: jax.vmap(program, (None, 0))(weights, jnp.stack([x, x]))


def outputs(weights, x):
    def step(x, weight, scale):
        x = layer(x, weight) * scale
        return x, x

    def value(weights, x, scale):
        run = scan(step, len(WEIGHTS), remat="nested")
        return jnp.sum(run(x, weights, shared(scale))[1])

    return jax.grad(value, (0, 2))(weights, x, jnp.float32(2))


# Each program, and what it has at the most.
PROGRAMS = {
    "false": (
        gradient(remat=False),
        Sizes(layers=1, loops=2, zeros=1, results=256),
    ),
    "true": (gradient(), Sizes(layers=2, loops=2, zeros=1, checkpoints=1, results=160)),
    "recompute": (
        gradient(save_carries=False),
        Sizes(layers=3, loops=3, zeros=1, checkpoints=3, results=168),
    ),
    "nested": (
        gradient(nested=True),
        Sizes(layers=3, loops=5, slices=18, zeros=6, results=312),
    ),
    "nested reversed": (
        gradient(nested=True, reverse=True),
        Sizes(layers=3, loops=5, slices=18, zeros=6, results=312),
    ),
    "nested, saved": (
        gradient(nested=True, save_block_internals=True),
        Sizes(layers=2, loops=5, slices=24, zeros=10, results=408),
    ),
    "few carries": (
        gradient(max_carries=2),
        Sizes(layers=3, loops=5, slices=20, zeros=6, results=289),
    ),
    "first layers": (
        gradient(first_layers=1),
        Sizes(layers=3, loops=5, slices=15, zeros=12, results=397),
    ),
    "first layers, nested": (
        gradient(first_layers=1, nested=True),
        Sizes(layers=4, loops=7, slices=27, zeros=13, results=450),
    ),
    "offload": (
        gradient(save_carries="offload"),
        Sizes(layers=2, loops=2, zeros=1, checkpoints=1, moves=2, results=160),
    ),
    "offload, nested": (
        gradient(save_carries="offload", nested=2),
        Sizes(layers=3, loops=5, slices=12, zeros=6, moves=2, results=299),
    ),
    "disk": (
        gradient(save_carries="disk", nested=2, carries_folder="/tmp"),
        Sizes(layers=3, loops=5, slices=12, zeros=6, moves=1, results=284),
    ),
    "until": (
        gradient(until=is_over),
        Sizes(layers=2, loops=3, slices=13, zeros=15, choices=14, results=278),
    ),
    "until, nested": (
        gradient(nested=True, until=is_over),
        Sizes(layers=3, loops=5, slices=25, zeros=17, choices=17, results=328),
    ),
    "one layer": (
        lambda weights, x: gradient(nested=True)(weights[:1], x),
        Sizes(layers=2, loops=2, zeros=1, checkpoints=1, results=40),
    ),
    "outputs": (outputs, Sizes(layers=3, loops=5, slices=20, zeros=9, results=410)),
    "no gradient": (
        lambda weights, x: value(weights, x, "nested"),
        Sizes(layers=1, loops=1, results=8),
    ),
    "no gradient, until": (
        lambda weights, x: value(weights, x, True, until=is_over),
        Sizes(layers=1, loops=1, slices=2, choices=3, results=12),
    ),
    "forward": (
        jvp_of(lambda weights, x: value(weights, x, "nested")),
        Sizes(layers=2, loops=2, results=24),
    ),
    "batch": (
        mapped(gradient(nested=True)),
        Sizes(layers=3, loops=5, slices=15, zeros=24, results=616),
    ),
    "hessian": (
        product_with_hessian,
        Sizes(
            layers=6, loops=10, slices=44, zeros=17, barriers=9, choices=1, results=928
        ),
    ),
    "visited": (
        visited("nested"),
        Sizes(layers=3, loops=5, slices=18, zeros=4, moves=1, results=312),
    ),
    "visited on host": (
        visited("nested", on_host=True),
        Sizes(layers=3, loops=6, slices=22, zeros=9, choices=4, moves=9, results=418),
    ),
    "kinds": (
        jax.grad(of_two_kinds),
        Sizes(layers=6, loops=11, slices=28, zeros=8, results=804),
    ),
    "gathered": (
        gathered,
        Sizes(layers=3, loops=5, slices=23, zeros=9, choices=5, results=392),
    ),
}


@pytest.mark.parametrize(("program", "most"), PROGRAMS.values(), ids=PROGRAMS)
def test_programs_do_not_grow(program, most):
    found = sizes_of(program)
    for field, size, bound in zip(found._fields, found, most, strict=True):
        assert size <= bound, f"{size} {field}, at the most {bound}"
