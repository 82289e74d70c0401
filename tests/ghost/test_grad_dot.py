"""Scores equal looped per-example gradients, for every kind of layer, policy and
precision.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

import stacked_remat
from stacked_remat import Stacked, fold, ghost

from ..blocks import Tanh, assert_close, assert_close_to_scale
from ..random_arrays import normal
from .cases import (
    PlainModel,
    assert_equal,
    assert_exact,
    looped_scores,
    made,
    merged_losses,
    plain_batch,
    plain_losses,
    random_like,
    run,
)


@pytest.mark.parametrize(
    "losses", [merged_losses, pytest.param(plain_losses, marks=pytest.mark.deep)]
)
def test_scores_are_those_of_looped_gradients(losses):
    model, batch = made(PlainModel.init), plain_batch()
    direction = random_like(model, 1)
    gradients, found = run(model, losses, batch, direction, check=True)
    expected, _ = looped_scores(model, losses, batch, direction)
    assert_equal(found.scores, expected)
    total = sum(
        score if score.ndim == 1 else score.sum(0) for score in expected.values()
    )
    np.testing.assert_allclose(
        found.total.array, total, rtol=1e-4, atol=1e-5 * np.abs(total).max()
    )
    plain = eqx.filter_jit(ghost.val_direction)(model, losses, batch)
    assert_close(gradients, plain, rtol=1e-5, atol=1e-6)
    assert jnp.isfinite(found.loss)


class Product(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return jnp.sum(x * self.weight[None, :], axis=1) + self.bias


def test_what_is_trained_is_a_predicate_or_a_tree_of_a_model_that_is_called():
    model, x = Product(jnp.arange(3.0), jnp.ones(())), jnp.arange(12.0).reshape(4, 3)
    trainable = Product(True, False)
    for given in (trainable, lambda leaf: getattr(leaf, "ndim", 0) == 1):
        direction = ghost.val_direction(
            model, lambda model, x: model(x), x, trainable=given
        )
        gradients, found = run(
            model, lambda model, x: model(x), x, direction, trainable=given
        )
        assert gradients.bias is None and set(found.scores) == {"weight"}
        np.testing.assert_allclose(found.total.array, x @ x.mean(0))


def test_small_entries_of_a_direction_count_in_float16():
    x, stack = normal(0, 4, 8), Stacked(Tanh(normal(1, 2, 8, 8) / 4), Axis("layers", 2))
    model = {"stack": stack, "head": normal(2, 8)}
    direction = jax.tree.map(lambda w: 1e-7 * jnp.cos(w), model)

    def losses(model, x, dtype="float16"):
        layer = lambda block, x: x + jnp.tanh(x @ block.weight.astype(dtype))  # noqa: E731
        x = model["stack"].fold_via(layer)(x.astype(dtype)) @ model["head"].astype(
            dtype
        )
        return x.astype("float32") ** 2

    def cast_before(model, x):
        return losses(
            jax.tree.map(lambda w: jax.device_put(w.astype("float16")), model), x
        )

    @jax.jit
    def both(model):
        single = lambda model, x: losses(model, x, "float32")  # noqa: E731
        forms = (losses, "leaf"), (cast_before, "leaf"), (losses, "total")
        options = {"direction": direction}
        scores = [
            ghost.grad_dot(model, fn, x, granularity=of, **options)[1].total.array
            for fn, of in forms
        ]
        options |= {"gradients": direction, "learning_rate": 1.0}
        curved = [
            ghost.shapley_direction(model, fn, x, **options) for fn in (losses, single)
        ]
        return (
            scores,
            jax.jvp(lambda model: single(model, x), (model,), (direction,))[1],
            curved,
        )

    scores, expected, (half, single) = both(model)
    for score in scores:
        assert score.dtype == jnp.float32
        np.testing.assert_allclose(
            score, expected, rtol=0, atol=5e-3 * np.abs(expected).max()
        )
    assert_close_to_scale(half, single, tolerance=1e-2)


def test_double_precision():
    with jax.enable_x64(True):
        model, x = (
            normal(0, 4, 4).astype("float64"),
            normal(1, 5, 3, 4).astype("float64"),
        )

        def losses(weight, x):
            step = lambda carry, row: (jnp.tanh(carry @ weight + row), None)  # noqa: E731
            return jnp.sum(
                jax.lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))[0], 1
            )

        gradients, found = run(model, losses, x, model)
        np.testing.assert_allclose(
            gradients, jax.grad(lambda w: jnp.mean(losses(w, x)))(model), rtol=1e-12
        )
        along = jax.jvp(lambda model: losses(model, x), (model,), (model,))[1]
        np.testing.assert_allclose(found.total.array, along, rtol=1e-5)


class Sines(eqx.Module):
    stack: Stacked
    plain: jax.Array
    head: jax.Array

    @staticmethod
    def init(remat):
        stack = Stacked(Sine(normal(0, 3, 4, 4) / 2), Axis("layers", 3), remat)
        return Sines(stack, normal(1, 4, 4) / 2, normal(2, 4))


class Sine(Tanh):
    def __call__(self, x):
        return super().__call__(x, jnp.sin)


def squares(model, x):
    return (model.stack.fold(x @ jnp.tanh(model.plain)) @ model.head) ** 2


def test_derivatives_of_scores_are_right_or_refused_and_those_of_gradients_are_right():
    model, x = Sines.init("nested"), normal(3, 5, 4)
    direction = random_like(model, 1)

    def of_scores(granularity):
        def value(model, direction):
            _, found = ghost.grad_dot(
                model, squares, x, direction=direction, granularity=granularity
            )
            return jnp.sum(jnp.sin(found.total.array))

        return value

    def exact(model, direction):
        return jnp.sum(
            jnp.sin(jax.jvp(lambda model: squares(model, x), (model,), (direction,))[1])
        )

    def of_gradients(find):
        return jax.grad(
            lambda model: sum(
                jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(find(model))
            )
        )

    @jax.jit
    def both(model, direction):
        ours = of_gradients(
            lambda model: ghost.grad_dot(model, squares, x, direction=direction)[0]
        )
        plain = of_gradients(jax.grad(lambda model: jnp.mean(squares(model, x))))
        by_example = jax.grad(of_scores("total"), (0, 1))(model, direction)
        return (by_example, ours(model)), (
            jax.grad(exact, (0, 1))(model, direction),
            plain(model),
        )

    assert_close_to_scale(*both(model, direction), tolerance=1e-4)
    for argument in (0, 1):
        with pytest.raises(
            TypeError, match='the scores of grad_dot have no derivatives.*"total"'
        ):
            jax.jit(jax.grad(of_scores("leaf"), argument))(model, direction)


def test_a_loss_may_have_folds_of_its_own():
    model, x, Turns = Sines.init(True), normal(3, 5, 4), Axis("turns", 4)
    direction, turns = random_like(model, 1), jnp.linspace(0.5, 1.5, 4)

    def losses_of(remat):
        def repeated(x, weight):
            return fold(
                lambda x, turn: x + jnp.sin(x @ weight) * turn, Turns, remat=remat
            )(x, turns)

        def of_derivative(model, x):
            return jnp.sum(
                jax.grad(lambda x: jnp.sum(repeated(x, jnp.eye(4)) ** 2))(
                    x @ model.plain
                ),
                axis=1,
            )

        def over_examples(model, x):
            of_one = lambda row: jnp.sum(jnp.sin(row @ model.plain))  # noqa: E731
            return stacked_remat.map(of_one, Axis("examples", len(x)), remat=remat)(x)

        return {
            "data": lambda model, x: (
                repeated(model.stack.fold(x, remat=remat), jnp.eye(4)) @ model.head
            ),
            "weights": lambda model, x: repeated(x, model.plain) @ model.head,
            "layers": lambda model, x: (
                model.stack.fold_via(lambda block, x: repeated(x, block.weight))(x)
                @ model.head
            ),
            "weights of layers": lambda model, x: (
                fold(
                    lambda x, weight: x + jnp.sin(x @ weight),
                    model.stack.Layers,
                    remat=remat,
                )(x, model.stack.stacked.weight)
                @ model.head
            ),
            "vmap": lambda model, x: jax.vmap(
                lambda x: repeated(x, model.plain) @ model.head
            )(x),
            "derivative": of_derivative,
            "examples": over_examples,
        }

    assert_exact(losses_of("nested"), model, x, direction, check=False)
