"""What a loss may do with the model and with examples: scored exactly, or refused before there is a score."""

import functools
import itertools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import Stacked, ghost, shared
from stacked_remat.ghost._traced import rounding
from stacked_remat.ops import chunked_cross_entropy

from ..random_arrays import normal

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


def normalised(h, statistics=lambda array: array):
    return h - statistics(jnp.mean(h, 0, keepdims=True))


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
    "constant statistics": lambda m, b: errors(m, b, normalised(hidden(m, b), jax.lax.stop_gradient)),
    "weights of the batch": lambda m, b: errors(m, b) * b["y"] / jnp.sum(b["y"]),
    "rows of a table": lambda m, b: errors(m, b) * b["y"][jnp.argsort(b["x"][:, 0])],
    "one row of all": lambda m, b: errors(
        m, b, (b["x"] - b["x"][:1].mean(0, keepdims=True)) * m.layers_scale[None]
    ),
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
    model, batch = Model.init(), data()
    direction = jax.tree.map(jnp.cos, model)

    @jax.jit
    def both(model, batch):
        found, expected = {}, {}
        for name, losses in (SCORED | DERIVED).items():
            found[name] = ghost.grad_dot(model, losses, batch, direction=direction)[1].total.array
            expected[name] = jax.jvp(lambda m, fn=losses: fn(m, batch), (model,), (direction,))[1]
        return found, expected

    found, expected = both(model, batch)
    for name, wanted in expected.items():
        np.testing.assert_allclose(found[name], wanted, 1e-4, 1e-5 * np.abs(wanted).max(), err_msg=name)


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
    with_penalty = lambda model, batch: (errors(model, batch), jnp.sum(model.head**2))  # noqa: E731
    with pytest.raises(ghost.UnsupportedLeafError, match="^head goes into the scalar of coupled=True"):
        scores(with_penalty, model, coupled=True, check=True)


def contrastive(model, batch):
    h = hidden(model, batch)
    return -jnp.diagonal(jax.nn.log_softmax(h @ h.T))


def penalty(model, batch):
    return errors(model, batch) + sum(jnp.sum(w**2) for w in jax.tree.leaves(model))


def inner_step(model, batch):
    gradients = jax.grad(lambda model: jnp.sum(errors(model, {**batch, "x": 0.1 + 0 * batch["x"]})))(model)
    return errors(jax.tree.map(lambda w, g: w - 0.1 * g, model, gradients), batch)


@jax.custom_vjp
def centred_gradient(x):
    return x


centred_gradient.defvjp(lambda x: (x, None), lambda _, ct: (ct - jnp.mean(ct, 0, keepdims=True),))

MIXED = {
    "rule in layers": lambda m, b: folded_via(lambda block, x: centred_gradient(block(x)), m, b),
    "reversed": lambda m, b: errors(m, b)[::-1],
    "sorted": lambda m, b: jnp.sort(errors(m, b)),
    "rolled": lambda m, b: jnp.roll(errors(m, b), 1),
    "hidden reversed": lambda m, b: jnp.sum(hidden(m, b)[::-1], 1),
    "flattened in another order": lambda m, b: jnp.sum(flattened(m, b, (2, -1, 4)), 1),
    "contrastive": contrastive,
    "batch norm": lambda m, b: errors(m, b, normalised(hidden(m, b))),
    "batch norm in layers": lambda m, b: folded_via(lambda block, x: normalised(block(x)), m, b),
    "sum of layers": lambda m, b: errors(m, b) + with_total(m, b)[0][1],
    "outputs of layers": lambda m, b: errors(m, b) + with_total(m, b)[1][0],
    "reversed by map": lambda m, b: errors(m, b, by_row(lambda h, at: h[len(h) - 1 - at])(hidden(m, b))),
    "one-hot by map": lambda m, b: errors(
        m, b, by_row(lambda h, at: jax.nn.one_hot(len(h) - 1 - at, len(h)) @ h)(hidden(m, b))
    ),
    "attention by map": lambda m, b: errors(
        m, b, by_row(lambda h, at: jax.nn.softmax(h @ b["x"][at]) @ h)(hidden(m, b))
    ),
    "sums by scan": lambda m, b: jax.lax.scan(lambda s, e: (s + e, s + e), 0.0, errors(m, b))[1],
    "last of scan": lambda m, b: errors(m, b) + jax.lax.scan(lambda s, e: (s + e, e), 0.0, errors(m, b))[0],
    "apart and stacked": lambda m, b: jnp.stack(jnp.unstack(errors(m, b))[::-1]),
    "reshape": lambda m, b: jnp.sum(jax.lax.reshape(hidden(m, b), (len(b["y"]), 4), (1, 0)), 1),
}
"""Losses of examples that depend on others, or are in another order."""

FIXES = {
    "rule in layers": "after grad_dot",
    "reversed": "in the order of the batch",
    "sorted": "rank them after grad_dot",
    "rolled": "before, in the batch",
    "contrastive": "stacked_remat.shared",
    "batch norm": "jax.lax.stop_gradient",
    "sums by scan": "jax.vmap",
}
"""What the error says to do."""


def scanned(change):
    """The losses by layers that are changed together and scanned."""

    def losses(model, batch):
        weights = change(model.layers.stacked.weight)
        return errors(
            model, batch, jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], weights)[0]
        )

    return losses


APART = "is used apart from fold and scan of its stack"
COMBINED = "is combined across the layers of a stack"
UNSUPPORTED = {
    "layers reversed": (of_changed(lambda w: w[::-1]), f"{COMBINED}.*`rev`.*reverse=True"),
    "layers reversed, scanned": (scanned(lambda w: w[::-1]), f"{APART}.*`rev`.*reverse=True"),
    "layers in another order": (scanned(lambda w: w[np.array([2, 0, 1])]), f"{APART}.*`gather`.*one by one"),
    "layers rolled": (scanned(lambda w: jnp.roll(w, 1, 0)), f"{APART}.*one by one"),
    "norm of all layers": (of_changed(lambda w: w / jnp.linalg.norm(w)), f"{COMBINED} .*`reduce_sum`"),
    "penalty": (penalty, f"{APART}.*Leave a penalty"),
    "branch": (
        lambda m, b: jax.lax.cond(b["x"][0, 0] > 0, errors, lambda m, b: b["y"] * m.head[0], m, b),
        "is folded within `cond`",
    ),
}
"""Uses of a stack that are refused, and the reason."""


@pytest.mark.parametrize("remat", [pytest.param(True, marks=pytest.mark.deep), "nested"])
def test_losses_that_mix_examples_are_refused(remat):
    model, batch = Model.init(remat), data()

    def refused(losses, message, name):
        with pytest.raises(ghost.UnsupportedLeafError, match=message) as info:
            jax.eval_shape(lambda m: ghost.grad_dot(m, losses, batch, direction=m)[1], model)
        assert "layers.*.weight" in str(info.value), name

    for name, losses in MIXED.items():
        fix = FIXES.get(name, "")
        refused(losses, f"The loss of an example may depend on others: after layers.*{fix}", name)
    for name, (losses, message) in UNSUPPORTED.items():
        refused(losses, rf"^layers\.\*\.weight.*{message}", name)
    refused(inner_step, f"{APART}|The loss of an example may depend on others", "inner step")
    for name, losses in DERIVED.items() if remat == "nested" else ():
        refused(losses, rf"^layers\.\*\.weight.*{APART}.*remat=True", name)


def test_examples_that_are_computed_alone_have_the_losses_that_they_have_in_the_batch():
    """Blocks and norms: of any model whose examples do not depend on each other, and of no other."""
    weight, batch = jnp.eye(4) + 0.1, data()

    def sort_and_back(weight, batch):  # can't be followed
        order = jnp.argsort(batch["x"][:, 0])
        return jnp.sum(jnp.tanh(batch["x"][order] @ weight), 1)[jnp.argsort(order)]

    other = {
        "a sum": lambda w, b: sort_and_back(w, b) * b["y"] / jnp.sum(b["y"]),
        "the size": lambda w, b: sort_and_back(w, b) / len(b["y"]),
        "places": lambda w, b: errors_of(w, b) * (1 + 1e-4 * jnp.arange(1.0 * len(b["y"]))),
        "a key": lambda w, b: errors_of(w, b) + 1e-4 * jax.random.normal(jax.random.key(0), b["y"].shape),
        "a small mean": lambda w, b: errors_of(w, b) + 1e-4 * jnp.mean(errors_of(w, b)),
    }

    def errors_of(weight, batch):
        return jnp.sum(jnp.tanh(batch["x"] @ weight), 1)

    run = eqx.filter_jit(
        lambda losses, **options: ghost.grad_dot(weight, losses, batch, direction=weight, **options)[1].total
    )
    expected = jax.jvp(lambda weight: sort_and_back(weight, batch), (weight,), (weight,))[1]
    np.testing.assert_allclose(run(sort_and_back, granularity="total").array, expected, atol=1e-6)
    options = itertools.cycle(({"granularity": "total"}, {"granularity": "block"}, {"norms": True}))
    for (name, losses), some in zip(other.items(), options, strict=False):
        where = {"a small mean": ": see `reduce_sum` at"}.get(name, "")
        with pytest.raises(Exception, match=f"other losses alone than in this batch{where}"):
            jax.block_until_ready(run(losses, **some))


@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 1e-6, 2e-5), ("bfloat16", 5e-3, 5e-2)])
def test_losses_are_compared_in_the_precision_of_the_program(dtype, least, most):
    def loss(x):
        return jnp.sum(jax.lax.map(lambda row: row.astype(dtype) @ row.astype(dtype), x).astype("float32"))

    assert least < rounding(jax.make_jaxpr(loss)(jnp.ones((2, 3))).jaxpr) < most


def test_packed_examples_have_losses_of_their_tokens():
    Row, Position, In, Document = Axis("row", 2), Axis("position", 4), Axis("in", 3), Axis("document", 3)
    weight = hax.named(jnp.arange(3.0), In)
    x = hax.random.normal(jax.random.key(0), (Row, Position, In))
    ids = hax.named(np.array([[0, 0, 1, 1], [2, 2, 2, -1]]), (Row, Position))

    def tokens(weight, x):
        return hax.dot(x, weight, axis=In) ** 2

    def without_last(weight, x):
        return tokens(weight, x)["position", :-1]

    def scores(losses, **options):
        given = {"direction": weight, "example_ids": ids, "Examples": Document, **options}
        return ghost.grad_dot(weight, losses, x, **given)[1].total.array

    along = jax.jvp(lambda weight: tokens(weight, x), (weight,), (weight,))[1].array
    each = [np.where(ids.array == at, along, 0) for at in range(3)]
    np.testing.assert_allclose(scores(tokens, tokens="mean"), [e.sum() / (e != 0).sum() for e in each], 1e-5)
    shorter = scores(without_last, tokens="sum")
    np.testing.assert_allclose(shorter, [e[:, :-1].sum() for e in each], 1e-5)
    for losses, options, error, message in (
        (
            without_last,
            {"tokens": "mean"},
            ValueError,
            "ids of 4 tokens along 'position'.*the shape \\(3,\\)",
        ),
        (lambda w, x: hax.mean(tokens(w, x), "position"), {}, ValueError, "losses of the shape \\(\\)"),
        (
            lambda w, x: hax.roll(tokens(w, x), 1, "position"),
            {"tokens": "sum"},
            ghost.UnsupportedLeafError,
            "change their order along 'position'",
        ),
    ):
        with pytest.raises(error, match=message):
            scores(losses, **options)
    x, ids = x["row", :1], ids["row", :1]
    with pytest.raises(ghost.UnsupportedLeafError, match="change their order"):
        scores(lambda w, x: hax.roll(tokens(w, x), 1, "position"), tokens="sum")


def test_what_derivatives_and_vmap_make_of_a_cross_entropy_is_not_taken_for_one():
    Embed, Vocab, Position = Axis("embed", 3), Axis("vocab", 5), Axis("position", 4)
    head = hax.random.normal(jax.random.key(0), (Embed, Vocab))
    x = hax.random.normal(jax.random.key(1), (Batch, Position, Embed))
    targets = hax.zeros((Batch, Position), dtype=int)

    def losses(head, x, targets):
        return chunked_cross_entropy(x, head, targets, Embed, Vocab)

    def penalty(head, batch):
        x, targets = batch
        return hax.sum(jax.grad(lambda x: hax.sum(losses(head, x, targets)).scalar())(x) ** 2, Embed)

    def mapped(head, batch):
        axis = batch[0].resolve_axis("batch")
        return hax.vmap(lambda x, targets: losses(head, x, targets), axis)(*batch)

    for fn in (penalty, mapped):
        with pytest.raises(ghost.UnsupportedLeafError, match="^the model "):
            ghost.grad_dot(head, fn, (x, targets), direction=head, tokens="sum")


def test_losses_with_time_first_are_refused_with_the_fix():
    model, batch = Model.init(), data()
    with pytest.raises(ValueError, match=r"of the shape \(4, 12\) for 12 examples.*transposed"):
        ghost.grad_dot(
            model, lambda m, b: jnp.ones((4, 1)) * errors(m, b)[None], batch, direction=model, tokens="mean"
        )
