"""Layers with `jax.custom_vjp`s whose forward rules give other values than their
functions.

Where something is differentiated the rules compute, as in `jax.lax.scan`, and elsewhere
the functions.
"""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import stacked_remat as sr
from stacked_remat import ScanCheckpointPolicy, Stacked, StackedPattern, shared

from .blocks import assert_close, policies, quick_jit

LENGTH = 4
Layers = hax.Axis("layers", LENGTH)
POLICIES = policies(
    "False",
    "True",
    "nested",
    "nested, offload",
    "first layers",
    "nested, internals",
    "recompute",
)
POLICIES["names"] = ScanCheckpointPolicy(nested=3, save_block_internals=["hidden"])
X, SHIFT = jnp.linspace(-1, 1, 2), jnp.linspace(0.2, 0.5, 2)
WEIGHTS = 0.5 * jax.random.normal(jax.random.key(0), (LENGTH, 2))


def ruled(factor, **options):
    """A function of `x` and `y` whose rule multiplies by `factor`."""

    @jax.custom_vjp
    def fn(x, y):
        return jnp.sin(x) + y

    def back(saved, ct):
        x, y = saved
        return 0.5 * ct * jnp.cos(x) * y, 0.3 * ct * x

    fn.defvjp(lambda x, y: (factor * (jnp.sin(x) + y), (x, y)), back, **options)
    return fn


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled(scale, x, y):
    return scale * jnp.sin(x) + y


scaled.defvjp(
    lambda scale, x, y: (2 * scale * jnp.sin(x) + y, x),
    lambda scale, x, ct: (scale * ct * x, ct),
)


@jax.custom_vjp
def by_what_is_differentiated(x, y):
    return jnp.sin(x) + y


def _with_flags(x, y):
    factor = 1 + 0.5 * x.perturbed + 0.25 * y.perturbed
    return factor * jnp.sin(x.value) + y.value, (x.value, jnp.float32(factor))


by_what_is_differentiated.defvjp(
    _with_flags, lambda saved, ct: (saved[1] * ct * saved[0], ct), symbolic_zeros=True
)


@jax.custom_jvp
def by_its_tangent(x, y):
    return jnp.sin(x) + y


by_its_tangent.defjvp(
    lambda primals, tangents: (
        0.8 * (jnp.sin(primals[0]) + primals[1]),
        0.5 * sum(tangents),
    )
)


def in_a_scan(fn):
    return lambda x, y: lax.scan(
        lambda x, y: (fn(x, y), x), x, jnp.stack([y, 0.5 * y])
    )[0]


def in_a_branch(fn):
    return lambda x, y: lax.cond(jnp.sum(x) > -9, fn, lambda x, y: x * y, x, y)


def in_a_while_loop(fn):
    """Its result is not differentiated, so that the function computes it."""

    def run(x, y):
        fixed = lax.stop_gradient((x, y))
        return (
            x * y
            + lax.while_loop(
                lambda state: state[0] < 2,
                lambda s: (s[0] + 1, fn(s[1], fixed[1])),
                (0, fixed[0]),
            )[1]
        )

    return run


def in_a_fold(fn):
    return lambda x, y: sr.fold(fn, 2, remat="nested")(x, jnp.stack([y, 0.5 * y]))


def in_tiles(fn):
    return sr.tiled(fn, 0, tiles=2)


FUNCTIONS = [
    ruled(0.7),
    ruled(0.9, optimize_remat=True),
    functools.partial(scaled, 0.6),
    by_what_is_differentiated,
    by_its_tangent,
    jax.jit(ruled(0.6)),
    in_a_scan(ruled(0.8)),
    in_a_branch(ruled(1.2)),
    in_a_while_loop(ruled(1.3)),
    sr.checkpoint(ruled(0.7)),
    in_a_fold(ruled(0.9)),
    in_tiles(ruled(1.4)),
]


def layer(carry, weight, shift):
    """A layer of whose carry the second leaf has no tangent: of it alone the functions
    compute.
    """
    x, fixed = carry
    hidden, outputs = x * weight, []
    for fn in FUNCTIONS:
        hidden = 0.7 * fn(hidden, shift)
        outputs.append(fn(fixed, fixed))
    hidden = sr.checkpoint_name(hidden, "hidden")
    return (0.5 * x + hidden, lax.stop_gradient(0.1 * fixed + x)), (
        jnp.cos(hidden),
        sum(outputs),
    )


def by_scan(x, weights, shift):
    return lax.scan(
        lambda carry, weight: layer(carry, weight, shift), (x, 0.1 * shift), weights
    )


def by_sweep(remat):
    return lambda x, weights, shift: sr.scan(layer, Layers, remat=remat)(
        (x, 0.1 * shift), weights, shared(shift)
    )


def derivatives_of(run):
    def value(x, weights, shift):
        results = run(x, weights, shift)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(results)), results

    def gradient(x, weights, shift):
        return jax.value_and_grad(value, has_aux=True)(x, weights, shift)

    args = X, WEIGHTS, SHIFT
    return {
        "none": run(*args),
        "all": jax.value_and_grad(value, (0, 1, 2), has_aux=True)(*args),
        "shared": jax.value_and_grad(value, 2, has_aux=True)(*args),
        "Hessian product": jax.jvp(
            lambda x: gradient(x, *args[1:])[1], args[:1], (jnp.cos(X),)
        ),
        "batch": jax.vmap(gradient, (0, None, None))(jnp.eye(2), *args[1:]),
    }


@functools.cache
def expected():
    return quick_jit(lambda: derivatives_of(by_scan))()


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param(remat, id=name, marks=[pytest.mark.deep] * (name != "nested"))
        for name, remat in POLICIES.items()
    ],
)
def test_rules_compute_what_is_differentiated(remat):
    found = quick_jit(lambda: derivatives_of(by_sweep(remat)))()
    for name, result in expected().items():
        assert_close(found[name], result, 1e-4, 1e-5, name)


@pytest.mark.parametrize(
    "cut",
    [{"nested": True}, pytest.param({"max_carries": 2}, marks=pytest.mark.deep)],
    ids=str,
)
def test_rules_of_outputs_do_not_run_again_where_internals_are_saved(cut):
    """With trip counts that are data JAX would not remove them from a derivative."""
    remat = ScanCheckpointPolicy(save_block_internals=["hidden"], **cut)
    found = quick_jit(lambda: derivatives_of(by_sweep(remat)))()
    for name, result in expected().items():
        assert_close(found[name], result, 1e-4, 1e-5, name)


def test_rules_compute_what_is_swept_with_a_visitor_and_layers_of_several_kinds():
    fn, wave = ruled(0.7), ruled(1.3)

    class Block(eqx.Module):
        weight: jax.Array
        name: str = eqx.field(static=True)

        def __call__(self, x):
            return 0.5 * x + (fn if self.name == "a" else wave)(x * self.weight, SHIFT)

    def stacks(weights):
        kinds = {
            "a": Stacked(Block(weights[:2], "a"), 2),
            "b": Stacked(Block(weights[2:], "b"), 2),
        }
        return StackedPattern(kinds, tuple("abba"), LENGTH)

    def value_of(fold):
        return lambda weights: (jnp.sum((y := fold(weights)) ** 2), y)

    def by_fold_vjp(weights):
        y, sweep_back = stacks(weights).fold_vjp(X, remat="nested")
        return y, sweep_back(
            2 * y, lambda visit, _: sr.LayerResult(visit.vjp().carry)
        ).carry

    def one_by_one(weights):
        x = X
        for name, row in zip("abba", (0, 2, 3, 1), strict=True):
            x = Block(weights[row], name)(x)
        return x

    @quick_jit
    def results():
        own = value_of(lambda weights: stacks(weights).fold(X, remat="nested"))
        gradients = [
            jax.value_and_grad(run, has_aux=True)(WEIGHTS)
            for run in (own, value_of(one_by_one))
        ]
        return gradients, by_fold_vjp(WEIGHTS)

    (found, wanted), (y, _) = results()
    assert_close(found, wanted)
    assert_close(y, wanted[0][1])


def in_every_way(scan):
    """Derivatives of a scan whose layers close over traced values: of a `jax.vmap`, a
    `jax.jit` or a `jax.grad` around the derivative, and of a scan's step.
    """

    def of(factor, x):
        fn = ruled(factor)

        def layer(x, weight):
            x_after, _ = lax.scan(lambda x, _: (fn(x, weight), None), x, None, 1)
            return x_after, jnp.sum(x)

        gradient = jax.value_and_grad(
            lambda x: jnp.sum(scan(layer)(x, WEIGHTS)[0] ** 2)
        )
        return gradient(x), jax.jvp(lambda x: gradient(x)[1], (x,), (jnp.cos(x),))

    factors = jnp.array([0.5, 1.5])
    return [
        jax.vmap(of, (0, None))(factors, X),
        jax.jit(of)(factors[0], X),
        jax.grad(lambda factor: of(factor, X)[0][0])(factors[0]),
        lax.scan(lambda x, factor: (x, of(factor, x)), X, factors)[1],
    ]


@functools.cache
def expected_in_every_way():
    return quick_jit(
        lambda: in_every_way(lambda layer: lambda *args: lax.scan(layer, *args))
    )()


@pytest.mark.parametrize(
    "remat",
    [
        "nested",
        *(
            pytest.param(remat, marks=pytest.mark.deep)
            for remat in (
                *(False, "recompute"),
                *(POLICIES["names"], POLICIES["first layers"]),
            )
        ),
    ],
    ids=str,
)
def test_a_rule_closes_over_traced_values(remat):
    found = in_every_way(lambda layer: sr.scan(layer, Layers, remat=remat))
    assert_close(found, expected_in_every_way(), 1e-4)


@pytest.mark.parametrize("remat", [True, "nested"])
def test_a_rule_of_a_user_for_a_function_of_jax(remat):
    fn = jax.custom_jvp(jax.nn.silu)
    fn.defjvp(lambda primals, tangents: (0.5 * primals[0], tangents[0]))

    def of(scan):
        return jax.value_and_grad(
            lambda x: scan(lambda x, w: (fn(x) * w, None), x, WEIGHTS)[0].sum()
        )(X)

    assert_close(of(lambda *args: sr.lax_scan(*args, remat=remat)), of(lax.scan))
