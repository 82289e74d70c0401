"""Losses whose folds a fused update follows, against the gradient and the update as two steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from haliax import Axis
from jax import lax

from stacked_remat import Stacked, fused_update

from .blocks import assert_close
from .test_fused_update import fused_steps, model, plain_steps

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax depends on it


def test_folds_inside_of_jit_and_beside_checkpoints_and_loops():
    @eqx.filter_jit
    def inner(model, tokens):
        return jax.checkpoint(lambda x: jnp.sin(x))(model(tokens)[0]), model.scale * 2

    def nested_loss(model, tokens):
        @jax.jit
        def outer(scale):
            logits, scales = inner(model, tokens)
            return logits * scale, scales

        logits, scales = outer(jax.jit(lambda model: model.scale[0])(model))
        total, _ = jax.lax.scan(lambda total, row: (total + jnp.mean(row**2), None), jnp.zeros(()), logits)
        return total + jnp.sum(scales), None

    optimizer = optax.adam(0.01, eps=1e-3)
    found = fused_steps(optimizer, model(), loss=nested_loss)
    assert_close(found, plain_steps(optimizer, model(), loss=nested_loss))


def test_stacks_on_which_the_loss_does_not_depend_are_updated_by_zeros():
    def independent(model, tokens):
        logits, outputs, count = model(tokens)
        return jnp.sum(model.scale**2) + lax.stop_gradient(jnp.sum(logits) + outputs), count

    optimizer = optax.adamw(0.1, weight_decay=0.1)
    for options in ({}, {"max_grad_norm": 100.0}):
        found = fused_steps(optimizer, model(), steps=1, loss=independent, **options)
        assert_close(found, plain_steps(optimizer, model(), steps=1, loss=independent))


class Mapped(eqx.Module):
    weight: jax.Array

    def __call__(self, x, fn=jnp.tanh):
        return x + fn(x @ self.weight)


@pytest.mark.parametrize(
    ("loss", "error", "match"),
    [
        (lambda model, x: model["a"][:2].fold(x), TypeError, "model.*a.* no layers by index"),
        (
            lambda model, x: [block(x) for block in model["a"]][0],
            TypeError,
            "model.*a.* no layers one by one",
        ),
        (
            lambda model, x: model["a"].fold(x, lambda h: h * model["e"]),
            ValueError,
            "a.*fold uses arrays of the",
        ),
    ],
)
def test_what_a_followed_stack_is_not(loss, error, match):
    model = {"e": jnp.ones(4), "a": Stacked(Mapped(jnp.ones((2, 4, 4))), Axis("layers", 2))}
    step = fused_update(lambda *args: jnp.sum(loss(*args)), optax.sgd(0.1))
    with pytest.raises(error, match=match):
        step(model, step.init(model), jnp.ones(4))
