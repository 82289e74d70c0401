"""Options of `grad_dot`: reductions, granularity, norms, tokens, documents, and
errors.
"""

import re

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis

from stacked_remat import BlockSeq, LayerStack, Stacked, StackedPattern, ghost, unsliced

from ..blocks import Tanh, assert_close
from .cases import (
    PlainModel,
    made,
    plain_batch,
    plain_losses,
    run,
)
from .test_grad_dot import Sine


@pytest.mark.parametrize("is_named", [False, True])
def test_every_token_has_the_score_of_its_own_loss(is_named):
    """Tokens of an example that attend to each other."""
    Batch, Position = Axis("batch", 3), Axis("position", 4)
    keys = jax.random.split(jax.random.key(0), 3)
    weight, direction = (jax.random.normal(key, (5, 5)) for key in keys[:2])
    batch = hax.named(jax.random.normal(keys[2], (3, 4, 5)), (Batch, Position, "in"))

    def of_tokens(weight, batch):
        x = jnp.tanh(batch.array @ weight)
        mixed = jax.nn.softmax(x @ jnp.swapaxes(x, 1, 2), -1) @ x
        return jnp.sum(jnp.sin(mixed), -1)

    def losses(weight, batch):
        found = of_tokens(weight, batch)
        return hax.named(found, batch.axes[:2]) if is_named else found

    def of_losses(weight):
        return of_tokens(weight, batch)

    # A gradient of each loss
    expected = jnp.einsum("btij,ij->bt", jax.jacrev(of_losses)(weight), direction)
    for tokens in ("sum", "mean"):
        options = {"direction": direction, "tokens": tokens, "granularity": "token"}
        gradient, found = jax.jit(
            lambda weight, options=options: ghost.grad_dot(
                weight, losses, batch, **options
            )
        )(weight)
        by_token = found.by_token.array if is_named else found.by_token
        np.testing.assert_allclose(by_token, expected, rtol=1e-4, atol=1e-5)
        reduced = getattr(np.asarray(expected), tokens)(axis=1)
        np.testing.assert_allclose(found.total.array, reduced, rtol=1e-4, atol=1e-5)
        loss = lambda weight, of=tokens: getattr(jnp, of)(of_losses(weight), 1).mean()  # noqa: E731
        np.testing.assert_allclose(
            gradient, jax.grad(loss)(weight), rtol=1e-4, atol=1e-5
        )
    assert not is_named or found.by_token.axes == (Batch, Position)


def test_tokens_are_scored_beside_frozen_named_arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    weight, direction = (jax.random.normal(key, (5, 5)) for key in keys[:2])
    x = jax.random.normal(keys[2], (3, 4, 5))
    scale = hax.named(jnp.arange(5.0), "in")

    def of_tokens(weight):
        return jnp.tanh(x @ weight) @ scale.array

    found = ghost.grad_dot(
        (weight, scale),
        lambda model, x: jnp.tanh(x @ model[0]) @ model[1].array,
        x,
        direction=(direction, None),
        trainable=(True, False),
        tokens="sum",
        granularity="token",
    )[1]
    expected = jnp.einsum("btij,ij->bt", jax.jacrev(of_tokens)(weight), direction)
    np.testing.assert_allclose(found.by_token, expected, rtol=1e-4, atol=1e-5)


def test_rows_in_any_order_are_scored_by_example():
    """A batch of tokens, sorted by expert, of examples that attend within
    themselves.
    """
    rng, Examples = np.random.default_rng(0), Axis("example", 3)
    ids, experts = (
        rng.permutation(np.repeat([0, 1, 2, 3], 2)),
        np.sort(rng.integers(0, 2, 8)),
    )
    x, weights = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((8, 3), (2, 3, 3))
    )
    direction = jnp.asarray(rng.normal(size=weights.shape), jnp.float32)

    def losses(weights, batch):
        x, experts, ids = batch
        x = jnp.einsum("nd,nde->ne", x, weights[experts])
        scores = jnp.where(ids[:, None] == ids[None], x @ x.T, -jnp.inf)
        mixed = jax.nn.softmax(scores, 1) @ (x @ weights[0])
        return jnp.sum(jnp.tanh(mixed), 1)

    def scored(ids):
        batch, options = (
            (x, experts, ids),
            {"granularity": "total", "direction": direction, "Examples": Examples},
        )
        of_tokens = lambda *some: losses(*some)[:, None]  # noqa: E731
        return [
            ghost.grad_dot(weights, fn, batch, tokens=of, example_ids=own, **options)[
                1
            ].total
            for fn, of, own in ((losses, None, ids), (of_tokens, "mean", ids[:, None]))
        ]

    along = jax.jvp(
        lambda weights: losses(weights, (x, experts, ids)), (weights,), (direction,)
    )[1]
    # The fourth is left out
    expected = np.array([along[ids == example].sum() for example in range(3)])
    total, mean = (found.array for found in jax.jit(lambda: scored(jnp.asarray(ids)))())
    np.testing.assert_allclose(
        total, expected, rtol=0, atol=1e-5 * np.abs(expected).max()
    )
    np.testing.assert_allclose(
        mean, expected / 2, rtol=0, atol=1e-5 * np.abs(expected).max()
    )


@pytest.mark.deep
def test_the_hessian_along_a_vector_gives_second_order_shapley_values():
    model, losses, batch = made(PlainModel.init), plain_losses, plain_batch()
    val, rate = plain_batch(3), 0.1
    direction = eqx.filter_jit(ghost.val_direction)(model, losses, val)
    gradients = eqx.filter_jit(ghost.val_direction)(model, losses, batch)

    def loss(model):
        return jnp.mean(losses(model, val))

    _, product = jax.jvp(jax.grad(loss), (model,), (gradients,))
    corrected = jax.jit(
        lambda model: ghost.shapley_direction(
            model,
            losses,
            val,
            direction=direction,
            gradients=gradients,
            learning_rate=rate,
        )
    )(model)
    expected = jax.tree.map(
        lambda first, second: first - rate / 2 * second, direction, product
    )
    assert_close(corrected, expected, 1e-4, 1e-6)
    # The values add up to the second-order reduction of the validation loss.
    _, scored = run(model, losses, batch, corrected)
    values = rate * scored.total.array / 4
    after = jax.tree.map(
        lambda weight, gradient: weight - rate * gradient, model, gradients
    )
    reduction = loss(model) - loss(after)
    first_order = rate * optax.tree.vdot(direction, gradients)
    assert abs(values.sum() - reduction) < 0.2 * abs(first_order - reduction)


class Kernel(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return _kernel(x, self.weight)


class Table(eqx.Module):
    weight: jax.Array = unsliced()

    def __call__(self, x):
        table = LayerStack.of(self.weight)
        return x * table.stack[table.layer_index][None]


@jax.custom_vjp
def _kernel(x, weight):
    return x * weight


_kernel.defvjp(
    lambda x, w: (x * w, (x, w)),
    lambda kept, ct: (ct * kept[1], (ct * kept[0]).sum(0, keepdims=True)),
)


def test_what_can_not_be_scored_is_refused_by_its_path():
    x, model = jnp.ones((4, 3)), {"kernel": Kernel(jnp.ones((1, 3)))}

    def losses(model, x):
        return jnp.sum(model["kernel"](x), 1)

    def refused(
        losses, message, error=ghost.UnsupportedLeafError, model=model, **options
    ):
        with pytest.raises(error, match=re.escape(message)):
            ghost.grad_dot(model, losses, x, **{"direction": model, **options})

    ids, Row, total = jnp.arange(4), Axis("row", 4), {"granularity": "total"}
    by_token = {"granularity": "token"}
    refused(losses, 'granularity is "leaf"', ValueError, granularity="layer")
    refused(losses, 'granularity="token" scores losses of t', ValueError, **by_token)
    normed = {"norms": True, "tokens": "sum"} | by_token
    refused(lambda model, x: x, "leave out norms", ValueError, **normed)
    refused(losses, "kernel.weight goes into `custom_vjp_call`")
    refused(
        losses, "example_ids gives totals", ValueError, example_ids=ids, Examples=Row
    )
    refused(
        losses,
        "example_ids gives totals",
        ValueError,
        norms=True,
        example_ids=ids,
        Examples=Row,
        **total,
    )
    refused(losses, "example_ids and Examples", ValueError, example_ids=ids, **total)
    product = lambda model, x: jnp.sum(x * model["kernel"].weight, 1)  # noqa: E731
    for strange in (x[:, 0], jnp.arange(5)):
        refused(product, "got ", ValueError, example_ids=strange, Examples=Row, **total)
    refused(losses, "direction has no array", ValueError, direction={"kernel": None})
    refused(
        losses,
        "['kernel'].weight has the shape (3,)",
        ValueError,
        direction={"kernel": Kernel(x[0])},
    )
    refused(lambda model, x: x, 'tokens="mean"', ValueError)
    refused(lambda model, x: x[0, 0], "returned a scalar", ValueError)
    counted = lambda model, x: jnp.sum(model["kernel"](x) > 0, 1)  # noqa: E731
    refused(counted, "losses of dtype int32", TypeError)
    with pytest.raises(ValueError, match="the batch has no examples"):
        ghost.val_direction(model, losses, x[:0])
    differing = r"batch differ: \['x'\] has 4, \['y'\] has 3\. .* one entry for every"
    with pytest.raises((TypeError, ValueError), match=differing):
        fewer = {"x": x, "y": x[:3, 0]}
        ghost.val_direction(model, lambda _, batch: batch["x"].T * batch["y"], fewer)
    spectrum = {"kernel": Kernel(jnp.ones((1, 3), complex))}
    of_spectrum = lambda model, x: jnp.sum(jnp.abs(model["kernel"].weight) * x, 1)  # noqa: E731
    refused(
        of_spectrum, "complex numbers", ValueError, model=spectrum, direction=spectrum
    )
    refused(losses, "trains none there", ValueError, trainable=lambda leaf: False)
    stack = {"kernel": Stacked(Table(jnp.ones((2, 3))), Axis("layers", 2))}
    folded = lambda model, x: jnp.sum(model["kernel"].fold(x), 1)  # noqa: E731
    # Of layers that read their stack in a fold
    _, found = ghost.grad_dot(stack, folded, x, direction=stack)
    np.testing.assert_allclose(found.total.array, [6.0] * 4)
    _, found = ghost.grad_dot(model, losses, x, direction=model, norms=True)
    np.testing.assert_allclose(found.scores["kernel.weight"].array, [3.0] * 4)


@pytest.mark.parametrize("form", [StackedPattern, BlockSeq])
def test_layers_of_several_classes_are_scored_by_their_own_calls(form):
    Layers, keys = Axis("layers", 5), jax.random.split(jax.random.key(0), 5)
    kinds = {
        "tanh": lambda key: Tanh(jax.random.normal(key, (4, 4)) * 0.3),
        "sine": lambda key: Sine(jax.random.normal(key, (4, 4)) * 0.3),
    }
    layers = StackedPattern.init(Layers, kinds, ("tanh", "sine"), remat="nested")(keys)
    if form is BlockSeq:
        # Inlined between the equations around them
        layers = BlockSeq(list(layers), Layers, remat=False)

    def losses(layers, batch):
        return jnp.sum(layers.fold(batch), -1) ** 2

    batch = jax.random.normal(jax.random.key(1), (6, 4))
    direction = jax.tree.map(jnp.cos, layers)
    _, scores = jax.jit(
        lambda layers: ghost.grad_dot(layers, losses, batch, direction=direction)
    )(layers)
    own = jax.vmap(
        lambda one: jax.grad(lambda layers: losses(layers, one[None])[0])(layers)
    )(batch)
    pairs = zip(jax.tree.leaves(own), jax.tree.leaves(direction), strict=True)
    expected = sum(
        jnp.sum((each * part[None]).reshape(6, -1), 1) for each, part in pairs
    )
    np.testing.assert_allclose(scores.total.array, expected, rtol=1e-5, atol=1e-4)
