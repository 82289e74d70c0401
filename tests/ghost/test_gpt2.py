"""Scores along a short training run of a model of GPT-2 small's shape, of fewer layers, on real text."""

from pathlib import Path

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import Stacked, ghost
from stacked_remat.ops import causal_attention

from .cases import assert_equal, looped_scores

Batch, Pos, Vocab = Axis("batch", 4), Axis("position", 32), Axis("vocab", 256)
Layers, Embed, Inner = Axis("layers", 3), Axis("embed", 768), Axis("inner", 3072)
Heads, HeadDim = Axis("heads", 12), Axis("head_dim", 64)


class Block(eqx.Module):
    attention_norm: hnn.LayerNorm
    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    output: hnn.Linear
    mlp_norm: hnn.LayerNorm
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        keys, head = jax.random.split(key, 6), (Heads, HeadDim)
        return Block(
            hnn.LayerNorm.init(Embed),
            hnn.Linear.init(Embed, head, key=keys[0]),
            hnn.Linear.init(Embed, head, key=keys[1]),
            hnn.Linear.init(Embed, head, key=keys[2]),
            hnn.Linear.init(head, Embed, key=keys[3]),
            hnn.LayerNorm.init(Embed),
            hnn.Linear.init(Embed, Inner, key=keys[4]),
            hnn.Linear.init(Inner, Embed, key=keys[5]),
        )

    def __call__(self, x):
        normalised = self.attention_norm(x)
        query, key, value = (linear(normalised) for linear in (self.query, self.key, self.value))
        attended = causal_attention(query, key, value, x.resolve_axis("position"), Heads, HeadDim)
        x = x + self.output(attended).rearrange(x.axes)
        return x + self.down(hnn.gelu(self.up(self.mlp_norm(x)))).rearrange(x.axes)


class Gpt2(eqx.Module):
    embedding: hnn.Embedding
    positions: hax.NamedArray
    blocks: Stacked
    norm: hnn.LayerNorm

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 3)
        return Gpt2(
            hnn.Embedding.init(Vocab, Embed, key=keys[0]),
            hax.random.normal(keys[1], (Pos, Embed)) * 0.02,
            Stacked.init(Layers, Block, remat="nested")(key=jax.random.split(keys[2], Layers.size)),
            hnn.LayerNorm.init(Embed),
        )

    def __call__(self, ids):
        hidden = self.norm(self.blocks.fold(self.embedding(ids) + self.positions))
        return hax.dot(hidden, self.embedding.weight, axis=Embed)


def losses(model, batch):
    logits, targets = model(batch["ids"]), batch["targets"]
    return hax.mean(hnn.logsumexp(logits, Vocab) - hax.take(logits, Vocab, targets), Pos)


def text(step):
    """Bytes of this project's own documentation."""
    page = (Path(__file__).parents[2] / "docs/policies.md").read_bytes()
    count = Batch.size * (Pos.size + 1)
    rows = np.frombuffer(page[step * count : (step + 1) * count], np.uint8).reshape(Batch.size, -1)
    named = (hax.named(part.astype(np.int32), (Batch, Pos)) for part in (rows[:, :-1], rows[:, 1:]))
    return dict(zip(("ids", "targets"), named, strict=True))


@pytest.mark.deep
@pytest.mark.usefixtures("standard_promotion")
def test_scores_are_exact_while_it_trains_on_text():
    model = Gpt2.init(key=jax.random.key(0))

    @eqx.filter_jit
    def step(model, batch, held_out):
        direction = ghost.val_direction(model, losses, held_out)
        gradients, found = ghost.grad_dot(model, losses, batch, direction=direction)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.02 * g, gradients)), found, direction

    seen = []
    for number in range(3):
        batch = text(number)
        updated, found, direction = step(model, batch, text(10))
        expected, _ = looped_scores(model, losses, batch, direction)
        assert_equal(found.scores, expected)
        assert found.coverage() == 1.0
        assert found.total.array[0] == pytest.approx(
            sum(score[..., 0].sum() for score in expected.values()), rel=1e-5
        )
        seen.append(float(found.loss))
        model = updated
    assert seen[-1] < seen[0]
