"""What a loss may do with the model and with examples is scored exactly."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import Stacked, ghost, shared
from stacked_remat.ops import chunked_cross_entropy

from ..random_arrays import normal
from .cases import assert_exact

Batch, Layers = Axis("batch", 4), Axis("layers", 3)


class Block(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x + jnp.tanh(x @ self.weight)


class Model(eqx.Module):
    layers: Stacked
    layers_scale: jax.Array  # its path begins as that of the stack
    head: jax.Array

    @staticmethod
    def init(remat=True):
        stack = Stacked(Block(normal(0, 3, 4, 4) / 2), Layers, remat)
        return Model(stack, 1 + jnp.abs(normal(1, 4)), normal(2, 4))


def data(size=Batch.size):
    return {"x": normal(3, size, 4), "y": normal(4, size)}


def hidden(model, batch):
    return model.layers.fold(batch["x"]) * model.layers_scale[None]


def errors(model, batch, h=None):
    h = hidden(model, batch) if h is None else h
    return (h @ model.head - batch["y"]) ** 2


def of_changed(change):
    """The losses of a model whose arrays are changed in the loss function."""
    return lambda model, batch: errors(jax.tree.map(change, model), batch)


def of_changed_by_path(change):
    by_path = functools.partial(jtu.tree_map_with_path, lambda path, w: change(jtu.keystr(path), w))
    return lambda model, batch: errors(by_path(model), batch)


def folded_via(fn, model, batch):
    return errors(model, batch, model.layers.fold_via(fn)(batch["x"]))


def with_total(model, batch):
    """The hidden rows, and a sum over all examples that the layers carry."""

    def layer(block, carry):
        x = block(carry[0])
        return (x, carry[1] + jnp.sum(x**2)), jnp.mean(x)

    return model.layers.scan_via(layer)((batch["x"], jnp.zeros(())))


def by_row(fn):
    """A function of all rows, computed row by row."""
    return lambda h: jax.lax.map(lambda at: fn(h, at), jnp.arange(len(h)))


def looped(model, batch):
    h, _ = jax.lax.scan(lambda h, _: (model.layers.fold(h), None), batch["x"], None, length=4)
    return errors(model, batch, h)


def flattened(model, batch, shape=(-1, 2, 4)):
    """Two rows of each example, in one dimension with the examples."""
    x = jnp.stack([batch["x"], 2 * batch["x"]], 1)
    h = model.layers.fold(x.reshape(-1, 4)).reshape(shape)
    return jnp.sum(h, shape.index(2))


def inner_step(model, batch):
    constant = {"x": jnp.full((1, 4), 0.1), "y": jnp.zeros(1)}
    gradients = jax.grad(lambda model: jnp.sum(errors(model, constant)))(model)
    return errors(jax.tree.map(lambda w, g: w - 0.1 * g, model, gradients), batch)


def scanned(change):
    """The losses by layers that are changed together and scanned."""

    def losses(model, batch):
        weights = change(model.layers.stacked.weight)
        return errors(
            model, batch, jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], weights)[0]
        )

    return losses


OTHER = jax.tree.map(jnp.sin, Model.init())
SCORED = {
    "halved": of_changed(lambda w: 0.5 * w),
    "noise": of_changed(lambda w: w + 0.1 * jax.random.normal(jax.random.key(3), w.shape)),
    "clipped": of_changed(lambda w: jnp.clip(jax.nn.silu(w), -0.5, 0.5)),
    "rows of norm 1": of_changed(lambda w: w / jnp.linalg.norm(w, axis=-1, keepdims=True)),
    "frozen by path": of_changed_by_path(
        lambda path, w: jax.lax.stop_gradient(w) if path == ".layers.stacked.weight" else w
    ),
    "noise by path": of_changed_by_path(
        lambda path, w: w + 0.1 * jax.random.normal(jax.random.key(len(path)), w.shape)
    ),
    "by type": lambda m, b: errors(m, b) * (2.0 if isinstance(m.layers, Stacked) else 1.0),
    "by attribute": lambda m, b: errors(m, b) * (2.0 if hasattr(m.layers, "stacked") else 1.0),
    "combined": lambda m, b: errors(eqx.combine(*eqx.partition(m, jax.tree.map(lambda w: w.ndim > 1, m))), b),
    "of another tree": lambda m, b: errors(jax.tree.map(lambda w, v: w + 0.1 * v, m, OTHER), b),
    "constant twin": lambda m, b: errors(m, b) * jnp.cos(of_changed(jax.lax.stop_gradient)(m, b)),
    "twice, in jit and checkpoint": lambda m, b: eqx.filter_jit(errors)(m, b) + jax.checkpoint(errors)(m, b),
    "in a loop": looped,
    "flattened": lambda m, b: errors(m, b, flattened(m, b)),
    "data in layers": lambda m, b: folded_via(lambda block, x: block(x) * b["y"][:, None], m, b),
    "sum that is left out": lambda m, b: errors(m, b, with_total(m, b)[0][0]),
    "layers reversed": of_changed(lambda w: w[::-1]),
    "norm of all layers": of_changed(lambda w: w / jnp.linalg.norm(w)),
    "layers in another order, scanned": scanned(lambda w: w[np.array([2, 0, 1])]),
    "layers rolled, scanned": scanned(lambda w: jnp.roll(w, 1, 0)),
    "penalty": lambda m, b: errors(m, b) + sum(jnp.sum(w**2) for w in jax.tree.leaves(m)),
    "branch": lambda m, b: jax.vmap(
        lambda x, y: jax.lax.cond(x[0] > 0, lambda: m.layers.fold(x) @ m.head, lambda: y * m.head[0])
    )(b["x"], b["y"]),
    "inner step": inner_step,
    "map of rows": lambda m, b: jax.lax.map(lambda row: jnp.sin(row @ m.head), hidden(m, b)),
    "reshape": lambda m, b: errors(m, b, jax.lax.reshape(hidden(m, b), (4, len(b["y"])), (1, 0)).T),
}


def gradient_penalty(model, batch):
    of_input = jax.grad(lambda x: jnp.sum(errors(model, {**batch, "x": x})))
    return errors(model, batch) + jnp.sum(of_input(batch["x"]) ** 2, 1)


DERIVED = {
    "gradient penalty": gradient_penalty,
    "tangent": lambda m, b: jax.jvp(lambda x: errors(m, {**b, "x": x}), (b["x"],), (b["x"],))[1],
    "vmap": lambda m, b: jax.vmap(lambda x: jnp.sum(m.layers.fold(x)))(b["x"]),
}
"""Of a stack whose policy is True or False; refused of any other."""


@pytest.mark.deep
def test_what_a_loss_may_do_is_scored_exactly():
    assert_exact(SCORED | DERIVED, Model.init(), data(), check=False)


def test_a_stack_without_direction_is_an_ordinary_part_of_the_loss():
    model, batch = Model.init(), data()
    along = eqx.tree_at(lambda m: m.layers, jax.tree.map(jnp.cos, model), None)
    zeros = eqx.tree_at(lambda m: m.layers, along, jax.tree.map(jnp.zeros_like, model.layers))

    def of_input(m, b):
        return jax.grad(lambda x: jnp.sum(m.layers.fold(x) ** 2))(b["x"] * m.layers_scale[None])

    used = {
        "derivative": lambda m, b: errors(m, b, of_input(m, b)),
        "vmap": lambda m, b: errors(m, b, jax.vmap(lambda x: m.layers.fold(x * m.layers_scale))(b["x"])),
        "branch": lambda m, b: errors(m, b, jax.lax.cond(True, lambda x: m.layers.fold(x), jnp.sin, b["x"])),
        "penalty": lambda m, b: errors(m, b) + jnp.sum(m.layers.stacked.weight**2),
        "argument": lambda m, b: errors(
            m, b, m.layers.fold_via(lambda block, x, scale: block(x) * scale[None])(b["x"], shared(m.head))
        ),
    }

    @jax.jit
    def both(model, batch):
        scored = lambda fn: ghost.grad_dot(model, fn, batch, direction=along)[1].total.array  # noqa: E731
        exact = lambda fn: jax.jvp(lambda m: fn(m, batch), (model,), (zeros,))[1]  # noqa: E731
        return jax.tree.map(scored, used), jax.tree.map(exact, used)

    for name, found, expected in zip(used, *(d.values() for d in both(model, batch)), strict=True):
        np.testing.assert_allclose(found, expected, 1e-4, 1e-5 * np.abs(expected).max(), err_msg=name)


def test_errors_at_run_time_and_what_comes_beside_the_losses_change_no_score():
    model, batch = Model.init(), data()

    def checked(array):
        return eqx.error_if(array, jnp.any(jnp.isnan(array)), "not a number")

    def losses(model, batch):
        within = jax.tree.map(checked, model).layers.fold_via(lambda block, x: checked(block(x)))
        found = errors(model, batch, within(batch["x"]) * model.layers_scale[None])
        return checked(found), {"model": model, "name": "any"}

    def scores(losses, model, **options):
        _, found = ghost.grad_dot(model, losses, batch, direction=model, **options)
        return found.total.array, found.aux and found.aux["model"]

    found, aux = jax.jit(lambda model: scores(losses, model, has_aux=True))(model)
    expected = jax.jit(lambda model: scores(errors, model))(model)[0]
    np.testing.assert_allclose(
        found / jnp.abs(expected).max(), expected / jnp.abs(expected).max(), 1e-5, 1e-7
    )
    assert jax.tree.structure(aux) == jax.tree.structure(model)


def test_derivatives_of_a_cross_entropy_are_scored_or_refused_under_vmap():
    Embed, Vocab, Position = Axis("embed", 3), Axis("vocab", 5), Axis("position", 4)
    head = hax.random.normal(jax.random.key(0), (Embed, Vocab))
    x = hax.random.normal(jax.random.key(1), (Batch, Position, Embed))
    targets = hax.zeros((Batch, Position), dtype=int)

    def losses(head, x, targets):
        return chunked_cross_entropy(x, head, targets, Embed, Vocab)

    def plain(head, x, targets):
        logits = hax.dot(x, head, axis=Embed)
        return hax.nn.logsumexp(logits, Vocab) - hax.take(logits, Vocab, targets)

    def penalty(head, batch, losses=losses):
        x, targets = batch
        return hax.sum(jax.grad(lambda x: hax.sum(losses(head, x, targets)).scalar())(x) ** 2, Embed)

    def mapped(head, batch):
        axis = batch[0].resolve_axis("batch")
        return hax.vmap(lambda x, targets: losses(head, x, targets), axis)(*batch)

    def scores(fn):
        return ghost.grad_dot(head, fn, (x, targets), direction=head, tokens="sum")[1].total.array

    expected = jax.jvp(lambda head: penalty(head, (x, targets), plain), (head,), (head,))[1]
    np.testing.assert_allclose(scores(penalty), hax.sum(expected, Position).array, rtol=1e-4)
    with pytest.raises(ghost.UnsupportedLeafError, match="^the model "):
        scores(mapped)


def test_losses_with_time_first_are_refused_with_the_fix():
    model, batch = Model.init(), data()
    with pytest.raises(ValueError, match=r"of the shape \(4, 1\) for one example.*\[batch, time\]"):
        ghost.grad_dot(
            model, lambda m, b: jnp.ones((4, 1)) * errors(m, b)[None], batch, direction=model, tokens="mean"
        )
