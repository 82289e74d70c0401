"""Losses of examples that depend on others are found by their numbers."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import ghost, per_layer, shared
from stacked_remat.ghost._traced import rounding

from ..random_arrays import normal
from .cases import run

MIXED = {
    "sorted": lambda x: x[jnp.argsort(x[:, 0])],
    "previous": lambda x: jax.lax.scan(lambda before, x: (x, before), x[0] * 0, x)[1],
    "batch norm": lambda x: x - jnp.mean(x, 0, keepdims=True),
    "the size": lambda x: x / len(x),
    "places": lambda x: x * (1 + 1e-4 * jnp.arange(1.0 * len(x)))[:, None],
    "a key": lambda x: x + 1e-4 * jax.random.normal(jax.random.key(0), x.shape),
}


@pytest.mark.parametrize("name", MIXED)
def test_losses_that_depend_on_other_examples_are_found_by_their_numbers(name):
    x, weight = normal(0, 4, 3), jnp.eye(3) + 0.1
    losses = lambda weight, x: jnp.sum(jnp.tanh(MIXED[name](x @ weight)), 1)  # noqa: E731
    with pytest.raises(
        ValueError, match=r"Example \d has the loss .* alone, and .* in the batch of 4"
    ):
        ghost.check_examples(weight, losses, x)
    ghost.check_examples(weight, lambda weight, x: jnp.sum(jnp.tanh(x @ weight), 1), x)
    with pytest.raises(Exception, match="other losses alone than in this batch"):
        jax.block_until_ready(run(weight, losses, x, weight, check=True)[1].total)
    _, found = run(weight, losses, x, weight, granularity="total")
    expected = jax.jvp(lambda weight: losses(weight, x), (weight,), (weight,))[1]
    np.testing.assert_allclose(found.total.array, expected, rtol=1e-4, atol=1e-5)


@jax.custom_vjp
def centred(x):
    return x


centred.defvjp(
    lambda x: (x, None), lambda _, ct: (ct - jnp.mean(ct, 0, keepdims=True),)
)


def test_a_rule_that_mixes_examples_is_that_of_each_example_alone():
    x, weight = normal(0, 4, 4), normal(1, 4, 4)
    losses = lambda weight, x: jnp.sum(jnp.sin(centred(x @ weight)), 1)  # noqa: E731
    gradients, found = ghost.grad_dot(weight, losses, x, direction=weight, check=True)
    np.testing.assert_allclose(found.total.array, 0.0, atol=1e-6)
    np.testing.assert_allclose(gradients, 0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("float32", 1e-6, 2e-5), ("bfloat16", 5e-3, 5e-2)]
)
def test_losses_are_compared_in_the_precision_of_the_program(dtype, least, most):
    def loss(x):
        return jnp.sum(
            jax.lax.map(lambda row: row.astype(dtype) @ row.astype(dtype), x).astype(
                "float32"
            )
        )

    assert least < rounding(jax.make_jaxpr(loss)(jnp.ones((2, 3))).jaxpr) < most


def test_arrays_that_all_examples_share_are_marked_or_found():
    x, weight = jax.random.normal(jax.random.key(0), (4, 4, 3)), jnp.eye(3) + 0.1
    table, direction = x[:, :, 0], jax.random.normal(jax.random.key(1), (3, 3))

    def losses(weight, batch):
        x, table = batch
        return jnp.sum(jnp.tanh(jnp.einsum("pq,bqd->bpd", table, x) @ weight), (1, 2))

    def dots(batch, losses=losses, **options):
        return ghost.grad_dot(weight, losses, batch, direction=direction, **options)[
            1
        ].total.array

    options = {}, {"granularity": "total"}, {"norms": True}
    found = jax.jit(lambda: [dots((x, shared(table)), **each) for each in options])()
    expected = jax.jvp(
        lambda weight: losses(weight, (x, table)), (weight,), (direction,)
    )[1]
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"it depends on other examples.*stacked_remat.shared"
    ):
        ghost.check_examples(weight, losses, (x, table))
    with pytest.raises(TypeError, match="A batch has no per_layer marks"):
        dots((x, per_layer(table)))
    named, Rows = hax.named(x[:, 0], ("batch", "in")), Axis("batch", 4)
    refused = [  # each works for a batch of 4
        (
            lambda weight, x: jnp.sum(x.reshape(4, 4, 3) @ weight, (1, 2)),
            x,
            "cannot reshape array",
        ),
        (
            lambda weight, x: jnp.sum(x[:, :1] @ weight, 2).repeat(4, 1)[0],
            x,
            r"of the shape \(4,\) for one",
        ),
        (
            lambda weight, x: hax.vmap(lambda one: jnp.sum(one.array @ weight), Rows)(
                x
            ),
            named,
            "same name but different size",
        ),
    ]
    for fn, batch, message in refused:
        for each in ({}, {"norms": True}):
            with pytest.raises(
                ValueError, match=f"{message}.*sizes from the arrays of the batch"
            ):
                dots(batch, fn, **each)
