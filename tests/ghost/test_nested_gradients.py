"""Losses with gradients of the model in them: inner steps, Hessians, tangents, over
stacks and without.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import Stacked, ghost

from ..blocks import Tanh
from ..random_arrays import normal

Layers = Axis("layers", 3)


class Model(eqx.Module):
    first: jax.Array
    blocks: Stacked | Tanh
    head: jax.Array

    @staticmethod
    def init(remat):
        """With one block where `remat` is None."""
        weight = normal(0, 3, 4, 4) / 2
        blocks = (
            Tanh(weight[0]) if remat is None else Stacked(Tanh(weight), Layers, remat)
        )
        return Model(normal(1, 4, 4) / 2, blocks, normal(2, 4))

    def __call__(self, x):
        run = self.blocks.fold if isinstance(self.blocks, Stacked) else self.blocks
        return run(jnp.tanh(x @ self.first)) @ self.head


def loss(model, x, y):
    return (model(x) - y) ** 2


def moved(model, gradients):
    return jax.tree.map(lambda w, g: w - 0.2 * g, model, gradients)


def stepped(model, *example, of=loss):
    return moved(model, jax.grad(of)(model, *example))


def inner_step(model, x, y):
    return loss(stepped(model, x, y), x + 1.0, y)


def same_step(model, x, y):
    """A step that is the same for all examples: each layer's new weights come from
    every layer.
    """
    return loss(stepped(model, jnp.full(4, 0.1), 0.2), x, y)


def hessian_step(model, x, y):
    gradient = lambda model: jax.grad(loss)(model, x, y)  # noqa: E731
    return loss(
        moved(model, jax.jvp(gradient, (model,), (jax.tree.map(jnp.sin, model),))[1]),
        x,
        y,
    )


FORMS = [inner_step, same_step, hessian_step]


@pytest.mark.parametrize(
    "remat", [pytest.param("nested", marks=pytest.mark.deep), None]
)
def test_every_layer_has_the_score_of_its_own_gradient(remat):
    model, batch = Model.init(remat), (normal(3, 5, 4), normal(4, 5))
    direction = jax.tree.map(jnp.cos, model)

    @jax.jit
    def both(model):
        found, products = {}, {}
        for form in FORMS:

            def losses(model, batch, form=form):
                return jax.vmap(form, (None, 0, 0))(model, *batch)

            found[form.__name__] = ghost.grad_dot(
                model, losses, batch, direction=direction
            )[1].scores
            own = lambda x, y, form=form: jax.grad(form)(model, x, y)  # noqa: E731
            products[form.__name__] = jax.vmap(
                lambda *example, own=own: jax.tree.map(
                    jnp.multiply, own(*example), direction
                )
            )(*batch)
        return found, products

    found, products = both(model)
    for name, product in products.items():
        layers = (
            product.blocks.weight if remat is None else product.blocks.stacked.weight
        )
        wanted = {"first": product.first.sum((1, 2)), "head": product.head.sum(1)}
        wanted["blocks.weight" if remat is None else "blocks.*.weight"] = layers.sum(
            (-2, -1)
        ).T
        for path, each in wanted.items():
            atol = 1e-5 * np.abs(each).max()
            np.testing.assert_allclose(
                found[name][path].array, each, 0, atol, err_msg=f"{name}, {path}"
            )
