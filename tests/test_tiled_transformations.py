"""Random functions applied tile by tile, under transformations in random order, against
the functions.
"""

import random

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax import lax

from stacked_remat import checkpoint, fold, lax_scan, tiled

from .blocks import assert_close_to_scale, quick_jit

Pos, Embed = Axis("position", 5), Axis("embed", 3)
FLOATS = 3  # of the arguments `x, y, w, ids`


def with_rule(fn, derivative):
    """`fn`, whose cotangent is a function of the cotangent and the input."""
    ruled = jax.custom_vjp(fn)
    ruled.defvjp(lambda x: (fn(x), x), lambda x, ct: (derivative(ct, x),))
    return ruled


straight_through = with_rule(lambda x: jnp.round(x), lambda ct, x: ct)
scaled = with_rule(lambda x: 2 * x, lambda ct, x: 3 * ct * jnp.cos(x))
clipped = with_rule(lambda x: x, lambda ct, x: jnp.clip(ct, -0.3, 0.3) * (1 + x**2))


@jax.custom_jvp
def leaky(x):
    return jnp.maximum(x, 0)


@leaky.defjvp
def _leaky_jvp(primals, tangents):
    return jnp.maximum(primals[0], 0), jnp.where(primals[0] > 0, 1.0, 0.2) * tangents[0]


def in_loop(x):
    return lax.scan(lambda carry, _: (jnp.sin(carry + x), None), x, length=2)[0]


def in_fold(x):
    return fold(
        lambda carry, scale: jnp.sin(carry * scale), Axis("layers", 3), remat="nested"
    )(x, jnp.array([0.5, 0.7, 0.9]))


SMOOTH = [jnp.sin, leaky, in_loop, in_fold, jax.checkpoint(jnp.cos), jax.jit(jnp.tanh)]
RULED = [straight_through, scaled, clipped]


def outputs_of(rng, ops):
    """A random function of named `x, y, w, ids`, each output of some; and whether it
    clips.
    """
    first, second = (rng.choice(ops) for _ in range(2))
    # Tiles clip their own parts of a sum
    third = rng.choice([op for op in ops if op is not clipped])

    def activated(op, array):
        return hax.named(op(array.array), array.axes)

    pool = {
        "product": lambda x, y, w, ids: activated(first, hax.dot(x, w, axis=Embed)) * y,
        "of x": lambda x, y, w, ids: activated(second, x) + ids.astype(jnp.float32),
        "of y": lambda x, y, w, ids: y**2,
        "of w": lambda x, y, w, ids: activated(third, w).broadcast_axis(ids.axes),
        "ids": lambda x, y, w, ids: ids + 1,
        "sum of x": lambda x, y, w, ids: hax.sum(activated(third, x), Pos.name),
        "sum of all": lambda x, y, w, ids: hax.sum(
            activated(first, hax.dot(x, w, axis=Embed) + y)
        ),
        "count": lambda x, y, w, ids: hax.sum(ids),
    }
    chosen = rng.sample(list(pool), rng.randint(1, 4))
    return lambda *args: [pool[name](*args) for name in chosen], clipped in (
        first,
        second,
    )


def on_arrays(fn, axes):
    """The same on raw arrays."""
    return lambda *args: [out.array for out in fn(*map(hax.named, args, axes))]


def loss(outputs):
    floats = [out for out in outputs if jnp.issubdtype(out.dtype, jnp.floating)]
    return sum(
        (jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in floats), jnp.float32(0)
    )


def transformation(rng, forward_mode):
    """The name of a random function of functions from `x, y, w, ids` to a list, it, and
    what it maps.
    """
    some = tuple(sorted(rng.sample(range(FLOATS), rng.randint(1, FLOATS))))
    mapped = tuple(rng.choice((None, 0, -1)) for _ in range(FLOATS + 1))
    mapped = mapped if any(dim is not None for dim in mapped) else (None, None, 0, None)
    value, policy = rng.random() < 0.5, rng.choice((False, True, "nested", "offload"))

    def gradient(fn):
        def run(*args):
            def of_some(*args):
                outputs = fn(*args)
                return loss(outputs), outputs

            found, outputs = jax.grad(of_some, some, has_aux=True)(*args)
            return [*found, *(outputs if value else ())]

        return run

    def jvp(fn):
        def run(*args):
            def of_some(*part):
                return fn(
                    *(
                        part[some.index(i)] if i in some else arg
                        for i, arg in enumerate(args)
                    )
                )

            part = [args[i] for i in some]
            found, tangents = jax.jvp(of_some, part, [jnp.cos(arg) for arg in part])
            floats = [
                t
                for out, t in zip(found, tangents, strict=True)
                if t.dtype == out.dtype
            ]
            return [*floats, *(found if value else ())]

        return run

    def scanned(fn):
        def run(x, *rest):
            of_scale = lambda carry, scale: (carry, fn(x * scale, *rest))  # noqa: E731
            return lax_scan(of_scale, 0.0, jnp.array([0.5, 1.5]), remat=policy)[1]

        return run

    kinds = {
        "vmap": lambda fn: jax.vmap(fn, mapped),
        "gradient": gradient,
        "jit": jax.jit,
        "checkpoint": jax.checkpoint,
        "ours": lambda fn: checkpoint(fn),
        "scan": scanned,
        "branch": lambda fn: (
            lambda *args: lax.cond(jnp.sum(args[3]) > -1, fn, fn, *args)
        ),
    }
    weights = [4, 4, 1, 1, 1, 1, 1]
    if forward_mode:
        kinds["jvp"], weights = jvp, [*weights, 3]
    (kind,) = rng.choices(list(kinds), weights)
    return kind, kinds[kind], mapped if kind == "vmap" else (None,) * (FLOATS + 1)


def case(seed):
    """Results by tiles, those without, and what was done."""
    rng = random.Random(seed)
    forward_mode = rng.random() < 0.5
    fn, clips = outputs_of(rng, SMOOTH if forward_mode else [*SMOOTH, *RULED, *RULED])
    axes = [rng.sample(own, len(own)) for own in ([Pos, Embed], [Pos], [Embed], [Pos])]
    steps = [transformation(rng, forward_mode) for _ in range(rng.randint(2, 4))]
    shapes = [[axis.size for axis in own] for own in axes]
    for _, _, mapped in steps:
        for shape, dim in zip(shapes, mapped, strict=True):
            if dim is not None:
                shape.insert(len(shape) if dim else 0, 2)
    arrays = [
        np.sin(1 + seed + np.arange(np.prod(shape))).reshape(shape) for shape in shapes
    ]
    args = [jnp.asarray(array, jnp.float32) for array in arrays[:FLOATS]]
    args.append(jnp.asarray(10 * arrays[FLOATS], jnp.int32))
    by_tile = tiled(fn, Pos, tiles=rng.choice((1, 2, 3, 7)), reduce="sum")
    # What is computed again clips its own cotangent, not the sum.
    pair = [
        on_arrays(by_tile, axes),
        (jax.checkpoint if clips else lambda fn: fn)(on_arrays(fn, axes)),
    ]
    for _, step, _ in steps:
        pair = [step(one) for one in pair]
    return *(one(*args) for one in pair), [kind for kind, _, _ in steps]


@pytest.mark.parametrize("first", range(0, 24, 12))
def test_random_functions_under_random_transformations(first):
    steps = []

    @quick_jit
    def run():
        cases = [case(seed) for seed in range(first, first + 12)]
        steps[:] = [kinds for _, _, kinds in cases]
        return [(found, expected) for found, expected, _ in cases]

    for seed, (found, expected) in enumerate(run(), first):
        assert_close_to_scale(found, expected, 1e-4, f"{seed} {steps[seed - first]}")
