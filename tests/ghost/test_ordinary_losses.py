"""What ordinary losses do: freeze, take layers, combine them, choose by index, compare pairs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import BlockSeq, Stacked, ghost, shared

from ..random_arrays import normal

Layers, BATCH, LENGTH = Axis("layers", 2), 4, 5


class Block(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __call__(self, x, bias=None):
        if bias is not None:  # attention over the second dimension
            x = x + jax.nn.softmax(x @ x.swapaxes(1, 2) + bias, -1) @ x
        return x + jnp.tanh(x @ self.up) @ self.down


class Model(eqx.Module):
    layers: Stacked | BlockSeq
    head: jax.Array
    table: jax.Array
    queries: jax.Array

    @staticmethod
    def init():
        up, down = (normal(seed, 2, 3, 3) / 2 for seed in (0, 1))
        return Model(Stacked(Block(up, down), Layers), normal(2, 3, 7), normal(3, 9), normal(4, 5, 3))


def data():
    keys = jax.random.split(jax.random.key(1), 6)
    return {
        "x": jax.random.normal(keys[0], (BATCH, LENGTH, 3)),
        "other": jax.random.normal(keys[1], (BATCH, LENGTH, 3)),
        "y": jax.random.randint(keys[2], (BATCH,), 0, 7),
        "tokens": jax.random.randint(keys[3], (BATCH, LENGTH), 0, 7),
        "lengths": jax.random.randint(keys[4], (BATCH,), 1, LENGTH),
        "reference": jnp.where(jax.random.bernoulli(keys[5], 0.5, (BATCH,)), 0.5, -0.5),  # of weak type
    }


def logits(model, x, fold=lambda layers, x: layers.fold(x)):
    return jax.nn.log_softmax(fold(model.layers, x) @ model.head)


def cross_entropy(model, batch, **options):
    found = logits(model, batch["x"], **options)
    return -jnp.mean(jnp.take_along_axis(found, batch["tokens"][..., None], -1)[..., 0], 1)


FROZEN = Model.init()


def frozen(model, batch, change=lambda layers: layers):
    """All but the layers are those of a model outside of the loss, as `equinox.partition` leaves them."""
    of_layers = eqx.tree_at(lambda model: model.layers, jax.tree.map(lambda _: False, model), replace=True)
    trained, _ = eqx.partition(model, of_layers)
    _, rest = eqx.partition(FROZEN, of_layers)
    return cross_entropy(eqx.combine(trained, rest), batch)


def looped(layers, x):
    for block in layers:
        x = eqx.filter_checkpoint(block)(x)
    return x


def by_index(layers, x):
    for at in range(2):
        x = jax.tree.map(lambda w, at=at: (0.5 * w)[at], layers.stacked)(x)
    return layers[-1](x)


def unrolled(layers, x):
    for up, down in zip(layers.stacked.up, layers.stacked.down, strict=True):
        x = Block(up, down)(x)
    return layers[1:].fold(x)


def scanned(layers, x):
    dynamic, static = eqx.partition(layers.stacked, eqx.is_array)
    step = jax.checkpoint(lambda x, block: (eqx.combine(block, static)(x), None))
    return jax.lax.scan(step, x, jax.tree.map(lambda w: 2 * w, dynamic), reverse=True)[0]


def summed_layers(layers, x):
    return x @ layers.stacked.up.sum(0)


def chosen_layers(layers, x):
    return x @ layers.stacked.up[jnp.argmax(x[:, 0], -1) % 2]


def layer_of_first(layers, x):
    return x @ layers.stacked.up[jnp.argmax(x[0, 0]) % 2]


def part_of_first(layers, x):
    return jnp.tanh(x) * layers.stacked.up[0:1, 0]


def label(model, batch, rows=lambda size: jnp.arange(size)):
    found = logits(model, batch["x"]).mean(1)
    return -found[rows(len(found)), batch["y"]]


def tokens(model, batch, rows=lambda size: jnp.arange(size)):
    found = logits(model, batch["x"])
    places = jnp.arange(found.shape[1])[None]
    return -jnp.mean(found[rows(len(found))[:, None], places, batch["tokens"]], 1)


def last(model, batch, rows=lambda size: jnp.arange(size)):
    hidden = model.layers.fold(batch["x"])
    return jnp.sum(jnp.tanh(hidden[rows(len(hidden)), batch["lengths"] - 1] @ model.head), 1)


def margin(model, batch, rows=lambda size: jnp.arange(size)):
    """Multiclass margin: the label's own logit is lowered before the largest is taken."""
    found = logits(model, batch["x"]).mean(1)
    lowered = found.at[rows(len(found)), batch["y"]].add(-0.5)
    return jax.nn.logsumexp(lowered, 1) - label(model, batch)


def routed(model, batch, rows=lambda size: jnp.arange(size)):
    """The gates of the two best experts, among zeros for the others."""
    found = logits(model, batch["x"]).mean(1)
    gates, chosen = jax.lax.top_k(found, 2)
    dense = jnp.zeros(found.shape).at[rows(len(found))[:, None], chosen].set(jax.nn.softmax(gates))
    return jnp.sum(dense * jnp.sin(found), 1)


def preferred(model, batch, split=lambda found: jnp.split(found, 2)):
    """DPO: the log-probabilities of chosen and rejected texts in one batch."""
    both = jnp.concatenate([batch["x"], batch["other"]])
    found = logits(model, both)
    labels = jnp.concatenate([batch["tokens"], batch["tokens"][:, ::-1]])
    each = jnp.sum(jnp.take_along_axis(found, labels[..., None], -1)[..., 0], 1)
    chosen, rejected = split(each)
    return -jax.nn.log_sigmoid(0.1 * (chosen - rejected - batch["reference"]))


def halves(found):
    size = len(found) // 2
    return found[:size], found[size:]


def biased(model, batch, fold=lambda layers, x, bias: layers.fold(x, bias), share=shared):
    """T5: one bias by distance for all layers."""
    places = jnp.arange(batch["x"].shape[1])
    bias = model.table[places[:, None] - places[None] + 4][None]
    return cross_entropy(model, batch, fold=lambda layers, x: fold(layers, x, share(bias)))


def closed_over(layers, x, bias):
    return layers.fold_via(lambda block, x: block(x, bias.value))(x)


def queried(model, batch, queries=lambda queries, size: jnp.broadcast_to(queries, (size, *queries.shape))):
    def layer(block, q, x):
        return block(q + jax.nn.softmax(q @ x.swapaxes(1, 2), -1) @ x)

    own = queries(model.queries, len(batch["x"]))
    return jnp.sum(model.layers.fold_via(layer)(own, shared(batch["x"])) @ model.head, (1, 2))


SCORED = {
    "partition and combine": frozen,
    "loop over layers": lambda m, b: cross_entropy(m, b, fold=looped),
    "layers by index": lambda m, b: cross_entropy(m, b, fold=by_index),
    "layers of an array": lambda m, b: cross_entropy(m, b, fold=unrolled),
    "scan over layers": lambda m, b: cross_entropy(m, b, fold=scanned),
    "layers summed": lambda m, b: cross_entropy(m, b, fold=summed_layers),
    "a layer by data": lambda m, b: cross_entropy(m, b, fold=chosen_layers),
    "a part of layers": lambda m, b: cross_entropy(m, b, fold=part_of_first),
    "label by index": label,
    "tokens by index": tokens,
    "last token": last,
    "label by a NumPy index": lambda m, b: label(m, b, np.arange),
    "tokens by a NumPy index": lambda m, b: tokens(m, b, np.arange),
    "label by a NumPy index, in jit": lambda m, b: jax.jit(lambda m, b: label(m, b, np.arange))(m, b),
    "margin": margin,
    "router": routed,
    "router by a NumPy index": lambda m, b: routed(m, b, np.arange),
    "pairs, split": preferred,
    "pairs, sliced": lambda m, b: preferred(m, b, halves),
    "pairs, reshaped": lambda m, b: preferred(m, b, lambda found: found.reshape(2, -1)),
    "bias for all layers": biased,
    "bias closed over": lambda m, b: biased(m, b, closed_over),
    "queries": queried,
}
ALIKE = {
    "label by a NumPy index": "label by index",
    "label by a NumPy index, in jit": "label by index",
    "tokens by a NumPy index": "tokens by index",
    "router by a NumPy index": "router",
    "pairs, sliced": "pairs, split",
    "pairs, reshaped": "pairs, split",
    "bias closed over": "bias for all layers",
}
"""Losses that are those of another, computed in another way."""


FEW = (
    "loop over layers",
    "layers by index",
    "layers of an array",
    "layers summed",
    "tokens by index",
    "tokens by a NumPy index",
    "router",
    "pairs, split",
    "bias for all layers",
)  # one of each kind: the others take most of half a minute to compile


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("names", "size"),
    [
        pytest.param(FEW, BATCH, id="few"),
        pytest.param(tuple(SCORED), BATCH, id="all", marks=pytest.mark.deep),
        pytest.param(tuple(SCORED), 1, id="all, alone", marks=pytest.mark.deep),
    ],
)
def test_ordinary_losses_are_scored_exactly(names, size):
    model, batch = Model.init(), jax.tree.map(lambda array: array[:size], data())
    direction = jax.tree.map(jnp.cos, model)

    @jax.jit
    def both(model, batch):
        found, expected = {}, {}
        for name in names:
            losses = SCORED[name]
            found[name] = ghost.grad_dot(model, losses, batch, direction=direction, check=True)[1].scores
            if name not in ALIKE:
                gradients = jax.jacrev(lambda model, fn=losses: fn(model, batch))(model)
                expected[name] = jax.tree.map(lambda g, v: g * v, gradients, direction)
        return found, expected

    scores, derivatives = both(model, batch)
    for name, found in scores.items():
        expected = derivatives[ALIKE.get(name, name)]
        of_stack = {f"layers.*.{key}": getattr(expected.layers.stacked, key) for key in ("up", "down")}
        others = {key: getattr(expected, key) for key in ("head", "table", "queries")}
        for path, each in (of_stack | others).items():
            wanted = (
                each.reshape(size, 2, -1).sum(-1).T if path in of_stack else each.reshape(size, -1).sum(-1)
            )
            error = np.abs(found[path].array - wanted).max()
            assert error <= 1e-5 * np.abs(wanted).max() + 1e-8, (name, path)


def shifted(size):
    return (jnp.arange(size) + 1) % size


def mixed_up(model, batch):
    order = jnp.argsort(batch["y"])
    return cross_entropy(model, {**batch, "x": 0.7 * batch["x"] + 0.3 * batch["x"][order]})


def reversed_halves(found):
    chosen, rejected = halves(found)
    return chosen, rejected[::-1]


MIXED = {
    "label of another": lambda m, b: label(m, b, shifted),
    "label by order": lambda m, b: label(m, b, lambda size: jnp.argsort(b["y"])),
    "label from the end": lambda m, b: label(m, b, lambda size: size - 1 - jnp.arange(size)),
    "tokens of another": lambda m, b: tokens(m, b, shifted),
    "last token of another": lambda m, b: last(m, b, shifted),
    "label of one": lambda m, b: label(m, b, lambda size: np.zeros(size, int)),
    "margin of another by a NumPy index": lambda m, b: margin(m, b, lambda size: np.arange(size)[::-1]),
    "router by order": lambda m, b: routed(m, b, lambda size: jnp.argsort(b["y"])),
    "mixup": mixed_up,
    "pairs with others": lambda m, b: preferred(m, b, reversed_halves),
    "a layer by the first example": lambda m, b: cross_entropy(m, b, fold=layer_of_first),
}


@pytest.mark.usefixtures("standard_promotion")
def test_losses_like_these_that_mix_examples_are_found():
    model, batch = Model.init(), data()
    for name, losses in MIXED.items():
        with pytest.raises(ValueError, match="depends on other examples"):
            ghost.check_examples(model, losses, batch)
            pytest.fail(name)
    ghost.check_examples(model, preferred, batch)
