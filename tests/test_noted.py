"""Tests of stacked_remat/_noted.py."""

import jax
import jax.numpy as jnp
import pytest

from stacked_remat._noted import DERIVATIVE_OF_RESULT, Notes, noted, noting


def calls_in(fn, notes):
    """The rules of the calls in the jaxpr of a function, None where there is none."""
    with noting(notes):
        jaxpr = jax.make_jaxpr(fn)(jnp.ones((2, 3)))
    return [
        notes.rule_of(equation)
        for equation in jaxpr.eqns
        if "stacked_remat_noted" in str(equation.params.get("name"))
    ]


@pytest.mark.parametrize(
    ("rule", "of_mapped"),
    [
        ("a rule", None),
        # Its cotangents and those of a batch are found by the same rule.
        (DERIVATIVE_OF_RESULT, DERIVATIVE_OF_RESULT),
    ],
)
def test_a_call_that_was_transformed_has_no_rule(rule, of_mapped):
    assert calls_in(lambda x: noted(rule, jnp.sin)(x), Notes()) == [rule]
    # In `jax.vmap` the function is called with an example, so the jaxpr has others.
    assert calls_in(lambda x: jax.vmap(noted(rule, jnp.sin))(x), Notes()) == [of_mapped]


def test_a_call_elsewhere_is_the_function():
    def other(x):
        return x

    assert noted("a rule", jnp.sin) is jnp.sin
    assert noted("a rule", jnp.sin, other) is other
    with noting(lambda fn: (fn, "made")):
        assert noted("a rule", jnp.sin, other) == (jnp.sin, "made")
