"""`lax_scan` takes and refuses what `jax.lax.scan` does, and its results have the same
types.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import stacked_remat as sr

from .blocks import POLICIES, assert_close, policies, quick_jit

XS = jnp.linspace(0.1, 0.9, 5)


def step(carry, x):
    carry = jnp.sin(carry) * (1.0 if x is None else x)
    return carry, carry * 2


ARGUMENTS = [
    *(
        ((XS,), {"unroll": unroll})
        for unroll in (0, 1, 2, 9, True, False, np.int64(3), np.True_)
    ),
    *(((XS,), {"reverse": reverse}) for reverse in (1, 0, np.True_, "yes", None)),
    *(((XS, length), {}) for length in (5, 5.0, np.int32(5), np.float32(5), "5")),
    *(((None, length), {}) for length in (3, 3.0, 3.7, True, np.int64(3))),
    ((), {"length": 2}),
    ((XS, None, True, 2, True), {}),  # every argument by position
    (({"a": XS, "b": (np.asarray(XS), None)},), {"_split_transpose": True}),
]


def arguments_step(carry, x):
    leaves = jax.tree.leaves(x)
    return step(carry, sum(leaves) if leaves else None)


def test_it_takes_the_arguments_of_jax():
    assert [*inspect.signature(lax.scan).parameters] == [
        *inspect.signature(sr.lax_scan).parameters
    ][:-1]

    def every(scan, **options):
        return [
            scan(arguments_step, 1.0, *args, **kwargs, **options)
            for args, kwargs in ARGUMENTS
        ]

    of_jax = quick_jit(lambda: every(lax.scan))()
    for remat in (True, "nested"):
        assert_close(
            quick_jit(lambda remat=remat: every(sr.lax_scan, remat=remat))(), of_jax
        )


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((1.0, "text"), {}, "xs is 'text', and has no leading axis"),
        (
            (1.0, {"a": XS, "b": [2.0]}),
            {},
            r"xs\['b'\]\[0\] is 2.0, and has no leading axis",
        ),
        ((1.0, jnp.float32(1)), {}, r"xs is float32\[\], and has no leading axis"),
        ((1.0, 3), {"length": 3}, "xs is 3, and has no leading axis"),
        (("text", XS), {}, "The carry is 'text', which is no array"),
        ((1.0, XS), {"length": 4}, "given inputs of different lengths"),
        ((1.0, XS), {"length": "four"}, "length is the number of steps"),
        ((1.0, None), {"length": float("inf")}, "length is the number of steps"),
        ((1.0,), {}, "xs has no array to split. Pass length="),
        (
            (1.0, XS),
            {"unroll": -1},
            "unroll is a bool or a number of steps, 0 for all of them",
        ),
        (
            (1.0, XS),
            {"unroll": "all"},
            "unroll is a bool or a number of steps, 0 for all of them",
        ),
    ],
)
def test_it_refuses_what_jax_refuses(args, options, message):
    with pytest.raises(Exception):  # noqa: B017 (JAX has several)
        lax.scan(step, *args, **options)
    with pytest.raises((TypeError, ValueError), match=message):
        sr.lax_scan(step, *args, **options, remat="nested")


def test_it_refuses_outputs_that_are_no_arrays():
    for scan, message in (
        (lax.scan, "str"),
        (sr.lax_scan, r"The output\['a'\] is 'text'"),
    ):
        with pytest.raises(TypeError, match=message):
            scan(lambda carry, x: (carry, {"a": "text"}), 1.0, XS)
    with pytest.raises(TypeError, match="takes a function first"):
        sr.lax_scan(XS, 1.0, XS)


INIT = {
    "weak": 1.0,
    "strong": jnp.float32(2),
    "count": 3,
    "grows": jnp.asarray(2.0),
    "many": 2.0 * XS,
}
INIT["fixed"] = 0.5


def typed_step(carry, x):
    new = {
        "weak": jnp.sin(carry["weak"]) * 1.5,
        "strong": carry["strong"] * x + carry["weak"],
        "count": carry["count"] + 1,
        "grows": carry["grows"]
        * carry["strong"],  # its type is another after the first step
        "many": carry["many"] * 1.5,
        "fixed": carry["fixed"],
    }
    return new, (carry["weak"] * 2, 1.0, 3, True, carry["count"], carry["grows"], x * 2)


def typed_programs(scan):
    """Values, gradients, tangents and a batch, of functions of Python numbers and
    arrays.
    """

    def loss(weak, strong, xs):
        carry, ys = scan(typed_step, INIT | {"weak": weak, "strong": strong}, xs)
        return carry["weak"] + carry["strong"] + jnp.sum(ys[0])

    return {
        "eager": scan(typed_step, INIT, XS),
        "jit": jax.jit(lambda init, xs: scan(typed_step, init, xs))(INIT, XS),
        "gradient": jax.grad(loss, (0, 1, 2))(0.5, jnp.float32(2), XS),
        "jvp": jax.jvp(lambda weak: loss(weak, jnp.float32(2), XS), (0.5,), (1.0,)),
        "batch": jax.vmap(lambda weak: scan(typed_step, INIT | {"weak": weak}, XS))(
            jnp.arange(3.0)
        ),
    }


def types(tree):
    return jax.tree.map(
        lambda leaf: (jax.typeof(leaf).dtype, jax.typeof(leaf).weak_type), tree
    )


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("remat", POLICIES.values(), ids=POLICIES)
def test_dtypes_and_weak_types_are_those_of_jax(remat):
    def by_scan(f, init, xs):
        return sr.scan(f, "steps", remat=remat)(init, xs)

    def by_lax_scan(f, init, xs):
        return sr.lax_scan(f, init, xs, remat=remat)

    of_jax = types(typed_programs(lax.scan))
    assert types(typed_programs(by_lax_scan)) == of_jax
    carry = sr.fold(lambda carry, x: typed_step(carry, x)[0], "steps", remat=remat)(
        INIT, XS
    )
    assert types(carry) == of_jax["eager"][0]
    assert types(by_scan(typed_step, INIT, XS)) == of_jax["eager"]


@pytest.mark.usefixtures("standard_promotion")
def test_types_of_a_map_are_those_of_jax():
    def f(x):
        return x * 2.0, 1.0, 3, True

    of_jax = types(lax.map(f, XS))
    for remat in policies("False", "True", "nested", "offload").values():
        assert types(sr.map(f, "steps", remat=remat)(XS)) == of_jax


@pytest.mark.parametrize("remat", [False, True, "nested"])
def test_a_promoted_leaf_of_the_carry_does_not_make_others_strong(remat):
    def step(carry, x):
        return {"a": carry["b"], "b": carry["a"] * x}, None

    args = step, {"a": 1, "b": 2.0}, jnp.arange(4.0)
    found, wanted = (
        jax.tree.map(jax.typeof, scan(*args))
        for scan in (functools.partial(sr.lax_scan, remat=remat), lax.scan)
    )
    assert found == wanted and wanted[0]["a"].weak_type
