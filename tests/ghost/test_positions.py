"""Scores of tokens, and of examples packed into rows, with attention and tables of positions."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import Stacked, ghost
from stacked_remat.ops import causal_attention

pytestmark = pytest.mark.usefixtures("standard_promotion")

Pos, Layers, Vocab = Axis("position", 4), Axis("layers", 2), Axis("vocab", 7)
Heads, Size, Embed = Axis("heads", 2), Axis("size", 3), Axis("embed", 6)


def times(x, weight):
    """A product with one weight, or one for each token `[batch, position, in, out]`."""
    return x @ weight if weight.ndim == 2 else jnp.einsum("bti,btio->bto", x, weight)


class Block(eqx.Module):
    """Attention and a map, on plain arrays."""

    qkv: jax.Array
    out: jax.Array
    up: jax.Array

    def __call__(self, x, segments, attention):
        q, k, v = (a.reshape(*a.shape[:2], 2, 3) for a in jnp.split(times(x, self.qkv), 3, -1))
        x = x + times(attention(q, k, v, segments).reshape(x.shape), self.out)
        return x + jax.nn.gelu(times(x, self.up))


class Model(eqx.Module):
    embedding: jax.Array
    positions: jax.Array
    blocks: Stacked

    @staticmethod
    def init():
        keys = jax.random.split(jax.random.key(0), 5)
        qkv, out, up = (jax.random.normal(keys[at], (2, 6, size)) / 2 for at, size in enumerate((18, 6, 6)))
        embedding, positions = (
            jax.random.normal(keys[at], (size, 6)) for at, size in ((3, 7), (4, Pos.size))
        )
        return Model(embedding, positions, Stacked(Block(qkv, out, up), Layers))


def by_products(q, k, v, segments):
    """`softmax(q k^T + mask) v`, with the heads before the positions."""
    q, k, v = (jnp.swapaxes(array, 1, 2) for array in (q, k, v))
    mask = jnp.tril(jnp.ones((q.shape[2],) * 2, bool)) & (segments[:, None] == segments[:, :, None])
    weights = jax.nn.softmax(jnp.where(mask[:, None], q @ k.swapaxes(2, 3) / np.sqrt(3), -jnp.inf), -1)
    return jnp.swapaxes(weights @ v, 1, 2)


def by_sums(q, k, v, segments):
    """The same without a product over positions, and a bias as mask."""
    far = jnp.arange(q.shape[1])[:, None] < jnp.arange(q.shape[1])[None]
    apart = far[None] | (segments[:, None] != segments[:, :, None])
    scores = jnp.sum(q[:, :, None] * k[:, None], -1) / np.sqrt(3) + jnp.where(apart, -1e9, 0.0)[..., None]
    return jnp.sum(jax.nn.softmax(scores, 2)[..., None] * v[:, None], 2)


def by_library(q, k, v, segments):
    Batch = Axis("batch", len(q))
    Own = Pos.resize(q.shape[1])
    q, k, v = (hax.named(array, (Batch, Own, Heads, Size)) for array in (q, k, v))
    own = hax.named(segments, (Batch, Own))
    return causal_attention(q, k, v, Own, Heads, Size, documents=own).rearrange((Batch, Own, ...)).array


def by_haliax(q, k, v, segments):
    Batch, Own = Axis("batch", len(q)), Pos.resize(q.shape[1])
    Key = Own.alias("key_position")
    q, k, v = (hax.named(a, (Batch, axis, Heads, Size)) for a, axis in ((q, Own), (k, Key), (v, Key)))
    own, others = hax.named(segments, (Batch, Own)), hax.named(segments, (Batch, Key))
    mask = hnn.attention.causal_mask(Own, Key) & (own.broadcast_axis(Key) == others)
    return hnn.attention.dot_product_attention(Key, Size, q, k, v, mask).rearrange((Batch, Own, ...)).array


def losses_by(attention, table=lambda table, size: table[:size]):
    def losses(model, batch):
        ids, segments = batch["ids"].array, batch["segments"].array
        tokens = jax.nn.one_hot(ids, 7) if model.embedding.ndim > 2 else None
        x = model.embedding[ids] if tokens is None else times(tokens, model.embedding)
        positions = model.positions
        x = x + (table(positions, ids.shape[1]) if positions.ndim < 3 else positions)
        if isinstance(model.blocks, list):
            for block in model.blocks:
                x = block(x, segments, attention)
        else:
            x = model.blocks.fold_via(lambda block, x: block(x, segments, attention))(x)
        logits = times(x, jnp.swapaxes(model.embedding, -1, -2))
        return (
            jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, (ids + 1)[..., None] % 7, -1)[..., 0]
        )

    return losses


def packed(size):
    rng, axes = np.random.default_rng(1), (Axis("batch", size), Pos)
    segments = np.array([[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]])[:size]
    return {"ids": hax.named(rng.integers(0, 7, (size, 4)), axes), "segments": hax.named(segments, axes)}


CASES = {
    "products": losses_by(by_products),
    "sums": losses_by(by_sums),
    "library": losses_by(by_library),
    "haliax": losses_by(by_haliax),
    "table by index": losses_by(by_products, lambda table, size: table[jnp.arange(size)]),
    "whole table": losses_by(by_sums, lambda table, size: table),
    "checkpoint": jax.checkpoint(losses_by(by_products)),
}


@pytest.mark.parametrize(
    ("size", "names"),
    [
        pytest.param(3, CASES, marks=pytest.mark.deep, id="3"),
        pytest.param(1, CASES, marks=pytest.mark.deep, id="1"),
        pytest.param(2, ("products", "haliax", "whole table"), id="2"),
    ],
)
def test_attention_and_learned_positions_have_scores_of_tokens_and_of_packed_examples(size, names):
    model, batch, Document = Model.init(), packed(size), Axis("document", 2 * size)
    direction = jax.tree.map(jnp.cos, model)
    ids = batch["segments"] + 2 * hax.arange(Axis("batch", size))
    alike = {"direction": direction, "tokens": "sum"}

    def each(tree):
        """The model with weights for each token."""
        blocks = [jax.tree.map(lambda leaf, i=i: leaf[i], tree.blocks.stacked) for i in range(2)]
        table = jnp.broadcast_to(tree.positions, (size, 4, 6))
        weights = jax.tree.map(lambda w: jnp.broadcast_to(w, (size, 4, *w.shape)), (tree.embedding, blocks))
        return Model(weights[0], table, weights[1])

    @jax.jit
    def run(model):
        found = {}
        for name in names:
            losses = CASES[name]
            own = ghost.grad_dot(model, losses, batch, per_token="position", **alike)[1].scores
            of_documents = ghost.grad_dot(model, losses, batch, example_ids=ids, Examples=Document, **alike)[
                1
            ]
            found[name] = own, of_documents.total.array
        gradients = jax.grad(lambda model: jnp.sum(CASES["products"](model, batch)))(each(model))
        along = jax.jvp(lambda model: CASES["products"](model, batch), (model,), (direction,))[1]
        return found, gradients, along

    found, gradients, along = run(model)
    wanted = jax.tree.map(lambda g, v: jnp.sum((g * v).reshape(size, 4, -1), -1), gradients, each(direction))
    wanted_documents = np.array([np.sum(along[ids.array == at]) for at in range(2 * size)])
    for name, (own, of_documents) in found.items():
        expected = {"embedding": wanted.embedding, "positions": wanted.positions}
        for path in ("qkv", "out", "up"):
            expected[f"blocks.*.{path}"] = jnp.stack([getattr(block, path) for block in wanted.blocks])
        for path, score in expected.items():
            error = np.abs(own[path].array - score).max() / np.abs(score).max()
            assert error < 1e-5, (name, path, error)
        np.testing.assert_allclose(
            of_documents, wanted_documents, 0, 1e-5 * np.abs(along).max() * 4, err_msg=name
        )


def moved_by_order(x, order):
    """Rows in another order, by a product."""
    return jax.nn.one_hot(order, x.shape[1]) @ x


def moved_by_mask(x, order):
    """The same by a mask between two arrays of the batch."""
    mask = order[:, :, None] == jnp.sort(jnp.zeros_like(order), 1)[:, None] + jnp.arange(x.shape[1])
    return jnp.sum(jnp.where(mask[..., None], x[:, None], 0.0), 2)


def moved_by_masking(x, order):
    places = jnp.cumsum(jnp.ones_like(order), 1) - 1  # of data, as `order` is
    return (order[:, :, None] == places[:, None]).astype(x.dtype) @ x


MOVED = {
    "one-hot": moved_by_order,
    "mask": moved_by_mask,
    "mask of data": moved_by_masking,
    "slots": lambda x, order: jnp.einsum("btc,btd->bcd", jax.nn.one_hot(order, x.shape[1]), x),
    "identity": lambda x, order: jnp.eye(x.shape[1])[order] @ x,
    "gather": lambda x, order: jnp.take_along_axis(x, order[..., None], 1),
    "sort": lambda x, order: jnp.sort(x, 1),
    "roll": lambda x, order: jnp.roll(x, 1, 1),
    "mixing matrix": lambda x, order: jnp.cos(jnp.arange(x.shape[1] ** 2.0)).reshape(x.shape[1], -1) @ x,
    "moved to places of a loop": lambda x, order: jax.lax.scan(
        lambda before, row: (row, before), x[:, 0] * 0, x.swapaxes(0, 1)
    )[1].swapaxes(0, 1),
}


@pytest.mark.parametrize("size", [3, 1])
def test_rows_that_move_across_positions_are_refused(size):
    weight, batch = jnp.eye(6), packed(size)
    batch["x"] = hax.random.normal(jax.random.key(0), (*batch["ids"].axes, Embed))
    for name, move in MOVED.items():

        def losses(weight, batch, move=move):
            return jnp.sum(jnp.tanh(move(batch["x"].array, batch["segments"].array) @ weight), -1)

        with pytest.raises(ghost.UnsupportedLeafError, match="meets data in `dot_general`"):
            ghost.grad_dot(weight, losses, batch, direction=weight, tokens="sum", per_token="position")
            pytest.fail(name)
