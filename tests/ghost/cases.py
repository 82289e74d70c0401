"""Models, losses and batches whose scores are compared with those of looped per-example
gradients.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from models.parts.decoder import Decoder
from models.parts.sections import FULL, SLIDING, AttentionConfig, ExpertsConfig
from models.qwen3_moe import Qwen3MoeConfig
from stacked_remat import ghost
from stacked_remat._scan.marks import is_named, raw_array
from stacked_remat.ghost._losses import leaves_with_paths, without_marks
from stacked_remat.ghost._passes import probed_leaves
from stacked_remat.lora import LoraConfig, apply_lora
from stacked_remat.training import TokenBatch

Vocab, Batch, Pos = Axis("vocab", 19), Axis("batch", 4), Axis("position", 6)
SIZES = {
    "hidden_dim": 16,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "initializer_range": 0.3,
}
SPARSE = Qwen3MoeConfig(**SIZES, experts=ExpertsConfig(3, 2, 6))


def run(model, losses, batch, direction, **options):
    return eqx.filter_jit(ghost.grad_dot)(
        model, losses, batch, direction=direction, **options
    )


def random_like(tree, seed):
    """Random numbers in the shapes of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), tree
    )


def made(init, *args, **kwargs):
    """A model with random numbers in place of its initial ones, which needs no
    compilation.
    """
    shapes = eqx.filter_eval_shape(init, *args, key=jax.random.key(0), **kwargs)
    return jax.tree.map(lambda leaf: 0.25 * leaf + 0.1, random_like(shapes, 5))


def decoder(config, remat=True):
    return made(Decoder.init, config, Vocab, remat=remat)


def tokens(batch=Batch, seed=1):
    ids = hax.random.randint(jax.random.key(seed), (batch, Pos), 0, Vocab.size)
    weights = hax.random.uniform(jax.random.key(seed + 1), (batch, Pos))
    return TokenBatch(ids, hax.roll(ids, -1, Pos), weights)


def token_losses(model, batch):
    hidden, _ = model.hidden_states(
        batch.tokens, documents=batch.documents, positions=batch.positions
    )
    return model.token_losses(hidden, batch.targets, weights=batch.weights)


def token_means(model, batch):
    return hax.mean(token_losses(model, batch), "position")


def adapted(config):
    def init(*, key):
        model = Decoder.init(config, Vocab, remat="nested", key=key)
        return apply_lora(
            model,
            LoraConfig(rank=2, targets=("layers.*proj", "layers.*router", "head")),
            key=key,
        )

    return made(init)


class PlainModel(eqx.Module):
    """Layers of Equinox under `jax.vmap`, on plain arrays; one is used three times,
    once in a loop.
    """

    embedding: eqx.nn.Embedding
    conv: eqx.nn.Conv1d
    norm: eqx.nn.LayerNorm
    hidden: eqx.nn.Linear
    gate: jax.Array
    out: eqx.nn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 4)
        return PlainModel(
            eqx.nn.Embedding(Vocab.size, 5, key=keys[0]),
            eqx.nn.Conv1d(5, 7, 3, padding=1, key=keys[1]),
            eqx.nn.LayerNorm(7),
            eqx.nn.Linear(7, 7, key=keys[2]),
            jnp.ones(()),
            eqx.nn.Linear(7, 3, use_bias=False, key=keys[3]),
        )

    def __call__(self, ids):
        x = self.conv(jax.vmap(self.embedding)(ids).T).T
        x = jax.nn.gelu(jax.vmap(self.hidden)(jax.vmap(self.norm)(x)))
        x = jax.checkpoint(jax.vmap(self.hidden))(x) * self.gate
        _, x = jax.lax.scan(
            lambda state, row: (jnp.tanh(self.hidden(state) + row),) * 2,
            jnp.zeros(7),
            x,
        )
        return jax.vmap(self.out)(x)


def plain_losses(model, batch):
    ids, targets = batch
    return jnp.mean(jnp.square(jax.vmap(model)(ids) - targets), (1, 2))


def merged_losses(model, batch):
    """Examples and positions in one dimension, positions first, then apart."""
    ids, targets = batch
    # [position, batch, embed]
    rows = jnp.swapaxes(jax.vmap(jax.vmap(model.embedding))(ids), 0, 1)
    flat = (
        rows.reshape(-1, rows.shape[-1]) @ model.hidden.weight[:, :5].T
        + model.hidden.bias[None]
    )
    found = (jnp.tanh(flat) @ model.out.weight.T).reshape(*rows.shape[:2], 3)
    return jnp.mean(jnp.square(jnp.swapaxes(found, 0, 1) - targets), (1, 2))


def plain_batch(batch=Batch.size):
    ids = jax.random.randint(jax.random.key(1), (batch, Pos.size), 0, Vocab.size)
    return ids, jax.random.normal(jax.random.key(2), (batch, Pos.size, 3))


def looped_scores(model, losses, batch, direction, trainable=eqx.is_inexact_array):
    """The dot product of every example's gradient with the direction, and its squared
    norm, by path.
    """
    trained, frozen = eqx.partition(model, trainable)

    @eqx.filter_jit
    def gradients(trained, frozen, batch):
        def of(trained):
            return raw_array(losses(eqx.combine(trained, frozen), batch))

        pullback = jax.vjp(of, trained)[1]
        return [pullback(one)[0] for one in jnp.eye(Batch.size)]

    dots, squares = {}, {}
    along = {path: leaf for path, leaf in leaves_with_paths(direction)}
    for gradient in gradients(trained, frozen, batch):
        for path, leaf in leaves_with_paths(gradient):
            if path in along:
                own = probed_leaves(model)[path]
                dots.setdefault(own.shown, []).append(
                    _sum(leaf, along[path], *own.layers)
                )
                squares.setdefault(own.shown, []).append(_sum(leaf, leaf, *own.layers))
    return tuple(
        {path: np.stack(rows, -1) for path, rows in found.items()}
        for found in (dots, squares)
    )


def _sum(leaf, other, Layers=None):
    if Layers is None:
        return np.sum(
            np.asarray(raw_array(leaf), np.float64)
            * np.asarray(raw_array(other), np.float64)
        )
    rows = []
    for one in (leaf, other):
        own = raw_array(one.rearrange((Layers, ...)) if is_named(one) else one)
        rows.append(np.asarray(own, np.float64).reshape(Layers.size, -1))
    return np.sum(rows[0] * rows[1], 1)


def assert_equal(scores, expected, tolerance=1e-5):
    """Equal, relative to the largest absolute score of each array."""
    assert set(scores) == set(expected)
    for path, score in scores.items():
        error = np.abs(np.asarray(raw_array(score), np.float64) - expected[path]).max()
        assert error <= tolerance * np.abs(expected[path]).max() + 1e-9, (
            path,
            score.array,
            expected[path],
        )


MIXED = Qwen3MoeConfig(
    **SIZES,
    experts=ExpertsConfig(3, 2, 6, dense_layers=(0,)),
    tie_word_embeddings=True,
    attention=AttentionConfig(bias=True, window=2, layer_types=(FULL, SLIDING)),
)


def assert_exact(losses_of, model, batch, direction=None, *, check=True):
    """Scores of several losses are the derivatives along a direction of the losses of
    each example.
    """
    direction = jax.tree.map(jnp.cos, model) if direction is None else direction

    @jax.jit
    def both(model, batch):
        found, expected = {}, {}
        for name, losses in losses_of.items():
            found[name] = ghost.grad_dot(
                model, losses, batch, direction=direction, check=check
            )[1].total.array
            own = without_marks(losses)
            expected[name] = jax.jvp(
                lambda m, own=own: own(m, batch), (model,), (direction,)
            )[1]
        return found, expected

    found, expected = both(model, batch)
    for name, wanted in expected.items():
        np.testing.assert_allclose(
            found[name], wanted, 1e-4, 1e-5 * np.abs(wanted).max(), err_msg=name
        )
