"""Dtypes of weights and optimizer state."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

from stacked_remat.training import (
    AdafactorConfig,
    AdamWConfig,
    MuonConfig,
    build_optimizer,
    cast_parameters,
)
from stacked_remat.training.precision import in_float32

# optax's Adam raises a float to an integer power.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def dtypes(tree):
    return {
        (leaf.shape, str(leaf.dtype))
        for leaf in jax.tree.leaves(tree)
        if eqx.is_inexact_array(leaf)
    }


def test_only_floats_are_cast_and_none_is_widened():
    model = {
        "w": jnp.ones(2),
        "n": jnp.arange(2),
        "small": jnp.ones(2, jnp.bfloat16),
        "name": "x",
    }
    cast = cast_parameters(model, "bfloat16")
    assert (
        cast["w"].dtype == jnp.bfloat16
        and cast["n"].dtype == jnp.int32
        and cast["name"] == "x"
    )
    kept = cast_parameters(model, "float32")
    assert kept["w"].dtype == jnp.float32 and kept["small"].dtype == jnp.bfloat16


def test_the_optimizer_computes_in_float32():
    seen = []

    def update(updates, state, parameters=None):
        seen.append(
            {str(leaf.dtype) for leaf in jax.tree.leaves((updates, state, parameters))}
        )
        return updates, state

    spy = optax.GradientTransformation(
        lambda parameters: jax.tree.map(jnp.zeros_like, parameters), update
    )
    parameters = {"w": jnp.ones(3, jnp.bfloat16)}
    optimizer = in_float32(spy, "bfloat16")
    state = optimizer.init(parameters)
    assert dtypes(state) == {((3,), "bfloat16")}
    updates, state = optimizer.update(parameters, state, parameters)
    assert seen == [{"float32"}] and dtypes(updates) == {((3,), "float32")}
    assert dtypes(state) == {((3,), "bfloat16")}
    assert dtypes(in_float32(spy).init(parameters)) == {((3,), "float32")}


@pytest.mark.parametrize(
    ("config", "wide"),
    [
        (AdamWConfig(), set()),
        (MuonConfig(), {((3,), "float32")}),  # coefficients of the orthogonalisation
        (
            AdafactorConfig(min_factored_dim=4),
            {((6,), "float32"), ((4,), "float32"), ((1,), "float32")},
        ),
    ],
)
def test_state_of_a_parameters_shape_is_stored_in_the_dtype_of_the_config(config, wide):
    parameters = {
        "matrix": jnp.ones((6, 4)),
        "vector": jnp.ones(5),
        "norms": [jnp.ones(6), jnp.ones(4)],
    }
    optimizer = build_optimizer(config, 50, state_dtype="bfloat16")
    state = optimizer.init(parameters)
    assert {shape for shape, dtype in dtypes(state) if dtype == "bfloat16"} <= {
        (6, 4),
        (5,),
        (6,),
        (4,),
    }
    assert {entry for entry in dtypes(state) if entry[1] == "float32"} == wide
    _, after = jax.jit(optimizer.update)(parameters, state, parameters)
    assert dtypes(after) == dtypes(state)
