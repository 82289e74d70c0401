"""What a loss may do with the model and with examples is scored exactly."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import AxisType, PartitionSpec

from stacked_remat import Stacked, ghost, shared
from stacked_remat.ops import chunked_cross_entropy

from ..blocks import Tanh, assert_close_to_scale as assert_close
from ..random_arrays import normal
from .cases import assert_exact

Layers, BATCH, LENGTH = Axis("layers", 2), 4, 5


class Block(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __call__(self, x, bias=None):
        if bias is not None:  # attention over the second dimension
            x = x + jax.nn.softmax(x @ x.swapaxes(1, 2) + bias, -1) @ x
        return x + jnp.tanh(x @ self.up) @ self.down


class Model(eqx.Module):
    layers: Stacked
    head: jax.Array
    table: jax.Array
    queries: jax.Array

    @staticmethod
    def init():
        up, down = (normal(seed, 2, 3, 3) / 2 for seed in (0, 1))
        return Model(
            Stacked(Block(up, down), Layers),
            normal(2, 3, 7),
            normal(3, 9),
            normal(4, 5, 3),
        )


def data():
    rng = np.random.default_rng(1)
    return {
        "x": normal(5, BATCH, LENGTH, 3),
        "tokens": jnp.asarray(rng.integers(0, 7, (BATCH, LENGTH))),
    }


def logits(model, x, fold=lambda layers, x: layers.fold(x)):
    return jax.nn.log_softmax(fold(model.layers, x) @ model.head)


def cross_entropy(model, batch, **options):
    found = logits(model, batch["x"], **options)
    return -jnp.mean(
        jnp.take_along_axis(found, batch["tokens"][..., None], -1)[..., 0], 1
    )


FROZEN = Model.init()


def frozen(model, batch):
    """All but the layers are those of a model outside of the loss, as
    `equinox.partition` leaves them.
    """
    of_layers = eqx.tree_at(
        lambda model: model.layers, jax.tree.map(lambda _: False, model), replace=True
    )
    trained, _ = eqx.partition(model, of_layers)
    _, rest = eqx.partition(FROZEN, of_layers)
    return cross_entropy(eqx.combine(trained, rest), batch)


def looped(layers, x):
    for block in layers:
        x = eqx.filter_checkpoint(block)(x)
    return x


def scanned(change, **options):
    def run(layers, x):
        dynamic, static = eqx.partition(layers.stacked, eqx.is_array)
        step = jax.checkpoint(lambda x, block: (eqx.combine(block, static)(x), None))
        return jax.lax.scan(step, x, jax.tree.map(change, dynamic), **options)[0]

    return run


def repeated(layers, x):
    return jax.lax.scan(lambda x, _: (layers.fold(x), None), x, None, length=3)[0]


def branched(layers, x):
    return jax.vmap(
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: layers.fold(x), jnp.sin, x)
    )(x)


def biased(model, batch, fold=lambda layers, x, bias: layers.fold(x, bias)):
    """T5: one bias by distance for all layers."""
    places = jnp.arange(batch["x"].shape[1])
    bias = model.table[places[:, None] - places[None] + 4][None]
    return cross_entropy(
        model, batch, fold=lambda layers, x: fold(layers, x, shared(bias))
    )


def closed_over(layers, x, bias):
    return layers.fold_via(lambda block, x: block(x, bias.value))(x)


def queried(model, batch):
    def layer(block, q, x):
        return block(q + jax.nn.softmax(q @ x.swapaxes(1, 2), -1) @ x)

    own = jnp.broadcast_to(model.queries, (len(batch["x"]), *model.queries.shape))
    return jnp.sum(
        model.layers.fold_via(layer)(own, shared(batch["x"])) @ model.head, (1, 2)
    )


def by_layers(fold):
    return lambda model, batch: cross_entropy(model, batch, fold=fold)


@jax.custom_vjp
def rounded(x):
    return jnp.round(4 * x) / 4


rounded.defvjp(lambda x: (rounded(x), x), lambda x, ct: (-0.3 * ct * jnp.cos(x),))


def of_input(model, batch):
    return jax.grad(lambda x: jnp.sum(cross_entropy(model, {**batch, "x": x})))(
        batch["x"]
    )


def fourier(model, batch):
    filtered = jnp.fft.rfft(batch["x"], axis=1) @ jax.lax.complex(
        model.queries[:3], model.queries[2:]
    )
    return jnp.sum(jnp.fft.irfft(filtered, n=LENGTH, axis=1) ** 2, (1, 2))


SCORED = {
    "partition and combine": frozen,
    "loop over layers": by_layers(looped),
    "scan over layers": by_layers(scanned(lambda w: 2 * w, reverse=True)),
    "a layer by data": by_layers(
        lambda layers, x: x @ layers.stacked.up[jnp.argmax(x[:, 0], -1) % 2]
    ),
    "repeated": by_layers(repeated),
    "branch": by_layers(branched),
    "a rule that is not the derivative": by_layers(
        lambda layers, x: rounded(layers.fold(rounded(x)))
    ),
    "bias for all layers": biased,
    "queries": queried,
    "complex numbers": fourier,
    "penalty": lambda m, b: (
        cross_entropy(m, b) + sum(jnp.sum(w**2) for w in jax.tree.leaves(m))
    ),
}
RARE = {
    "bias closed over": lambda m, b: biased(m, b, closed_over),
    "twice, in jit and checkpoint": lambda m, b: (
        eqx.filter_jit(cross_entropy)(m, b) + jax.checkpoint(cross_entropy)(m, b)
    ),
    "gradient penalty": lambda m, b: (
        cross_entropy(m, b) + jnp.sum(of_input(m, b) ** 2, (1, 2))
    ),
}


CASES = [
    pytest.param(SCORED, False, id="often"),
    pytest.param(RARE, False, id="rare", marks=pytest.mark.deep),
    pytest.param(SCORED | RARE, True, id="norms", marks=pytest.mark.deep),
]


@pytest.mark.parametrize(("cases", "norms"), CASES)
@pytest.mark.usefixtures("standard_promotion")
def test_what_a_loss_may_do_is_scored_exactly(cases, norms):
    model, batch = Model.init(), data()
    direction = jax.tree.map(jnp.cos, model)

    @jax.jit
    def both(model, batch):
        scores, products = {}, {}
        for name, losses in cases.items():
            _, found = ghost.grad_dot(
                model, losses, batch, direction=direction, check=True, norms=norms
            )
            gradients = jax.jacrev(lambda model, fn=losses: fn(model, batch))(model)
            scores[name] = found.scores
            products[name] = jax.tree.map(lambda g, v: g * v, gradients, direction)
            if norms:
                scores[f"{name}, squares"] = jax.tree.map(jnp.square, found.norms)
                products[f"{name}, squares"] = jax.tree.map(jnp.square, gradients)
        return scores, products

    scores, products = both(model, batch)
    for name, found in scores.items():
        for key in ("up", "down"):
            wanted = (
                getattr(products[name].layers.stacked, key)
                .reshape(BATCH, 2, -1)
                .sum(-1)
                .T
            )
            assert_close(
                found[f"layers.*.{key}"].array, wanted, 1e-5, f"{name}, {key}", 1e-3
            )
        for key in ("head", "table", "queries"):
            wanted = getattr(products[name], key).reshape(BATCH, -1).sum(-1)
            assert_close(found[key].array, wanted, 1e-5, f"{name}, {key}", 1e-3)


def test_what_is_the_same_for_all_examples_has_scores_of_each():
    """Weights that meet what all examples share: its cotangent is a sum over them."""
    x = normal(0, 4, 3)
    blocks = Stacked(Tanh(normal(1, 2, 3, 3)), Layers)
    model = {"blocks": blocks, "plain": normal(2, 3, 3)}

    def carried(model, batch):
        def layer(block, carry):
            return jnp.tanh(carry[0] @ block.weight), carry[1] + jnp.sum(block.weight)

        rows, penalty = model["blocks"].fold_via(layer)((batch[0], jnp.zeros(())))
        return jnp.sum(rows + penalty, 1)

    same = {
        "shared data": lambda m, b: b[0][:, 0] * jnp.sum(jnp.tanh(b[1] @ m["plain"])),
        "constants": lambda m, b: (
            b[0][:, 0] * jnp.sum(jnp.tanh(jnp.eye(3) @ m["plain"] @ m["plain"]))
        ),
        "shared data, folded": lambda m, b: (
            b[0][:, 0] * jnp.sum(m["blocks"].fold(b[1]))
        ),
        "constants, folded": lambda m, b: (
            b[0][:, 0] * jnp.sum(m["blocks"].fold(jnp.ones(3)))
        ),
        "a loss of weights": lambda m, b: jnp.broadcast_to(
            jnp.sum(m["plain"] ** 2), len(b[0])
        ),
        "a penalty on layers": lambda m, b: (
            jnp.sum(b[0], 1) + jnp.sum(m["blocks"].stacked.weight ** 2)
        ),
        "weights in the carry": carried,
        "weights as the first carry": lambda m, b: (
            b[0][:, 0] * jnp.sum(m["blocks"].fold(m["plain"]))
        ),
        "map": lambda m, b: jax.lax.map(
            lambda one: jnp.sum(m["blocks"].fold(one)), b[0]
        ),
        "checkpoint": lambda m, b: (
            b[0][:, 0]
            * jnp.sum(jax.checkpoint(lambda w, y: jnp.tanh(y @ w))(m["plain"], b[1]))
        ),
    }
    assert_exact(same, model, (x, shared(normal(3, 4, 3))))


def test_a_stack_without_direction_is_an_ordinary_part_of_the_loss():
    model, batch = (
        {"blocks": Stacked(Tanh(normal(1, 2, 3, 3)), Layers), "plain": normal(2, 3, 3)},
        normal(0, 4, 3),
    )
    along = {"blocks": None, "plain": jnp.cos(model["plain"])}
    zeros = {**along, "blocks": jax.tree.map(jnp.zeros_like, model["blocks"])}

    def derivative(m, b):
        return jnp.sum(
            jax.grad(lambda x: jnp.sum(m["blocks"].fold(x) ** 2))(b @ m["plain"]) ** 2,
            1,
        )

    def argument(m, b):
        layer = lambda block, x, scale: block(x) * scale  # noqa: E731
        return jnp.sum(m["blocks"].fold_via(layer)(b, shared(m["plain"][:1])), 1)

    @jax.jit
    def both(model, batch):
        def scored(fn):
            _, found = ghost.grad_dot(model, fn, batch, direction=along)
            return found.total.array

        exact = lambda fn: jax.jvp(lambda m: fn(m, batch), (model,), (zeros,))[1]  # noqa: E731
        return [(scored(fn), exact(fn)) for fn in (derivative, argument)]

    for found, expected in both(model, batch):
        np.testing.assert_allclose(found, expected, 1e-4, 1e-5 * np.abs(expected).max())


def test_errors_at_run_time_and_what_comes_beside_the_losses_change_no_score():
    model, batch = Model.init(), data()

    def checked(array):
        return eqx.error_if(array, jnp.any(jnp.isnan(array)), "not a number")

    def losses(model, batch):
        def fold(layers, x):
            return checked(
                jax.tree.map(checked, layers).fold_via(
                    lambda block, x: checked(block(x))
                )(x)
            )

        return cross_entropy(model, batch, fold=fold), {"model": model, "name": "any"}

    def scores(model, losses, **options):
        _, found = ghost.grad_dot(model, losses, batch, direction=model, **options)
        return found.total.array, found.aux and found.aux["model"]

    found, aux = jax.jit(lambda model: scores(model, losses, has_aux=True))(model)
    expected, _ = jax.jit(lambda model: scores(model, cross_entropy))(model)
    np.testing.assert_allclose(found, expected, 1e-5, 1e-6 * np.abs(expected).max())
    assert jax.tree.structure(aux) == jax.tree.structure(model)


@pytest.mark.deep
def test_derivatives_of_a_cross_entropy_are_scored_or_refused_under_vmap():
    Batch, Embed, Vocab, Position = hax.make_axes(batch=4, embed=3, vocab=5, position=4)
    head, x = normal(0, Embed, Vocab), normal(1, Batch, Position, Embed)
    targets = hax.zeros((Batch, Position), dtype=int)

    def losses(head, x, targets):
        return chunked_cross_entropy(x, head, targets, Embed, Vocab)

    def plain(head, x, targets):
        logits = hax.dot(x, head, axis=Embed)
        return hax.nn.logsumexp(logits, Vocab) - hax.take(logits, Vocab, targets)

    def penalty(head, batch, losses=losses):
        x, targets = batch
        return hax.sum(
            jax.grad(lambda x: hax.sum(losses(head, x, targets)).scalar())(x) ** 2,
            Embed,
        )

    def mapped(head, batch):
        axis = batch[0].resolve_axis("batch")
        return hax.vmap(lambda x, targets: losses(head, x, targets), axis)(*batch)

    def scores(fn, tokens="sum"):
        return ghost.grad_dot(head, fn, (x, targets), direction=head, tokens=tokens)[
            1
        ].total.array

    expected = jax.jvp(
        lambda head: penalty(head, (x, targets), plain), (head,), (head,)
    )[1]
    np.testing.assert_allclose(
        scores(penalty), hax.sum(expected, Position).array, rtol=1e-4
    )
    np.testing.assert_allclose(
        scores(penalty, "mean"), hax.mean(expected, Position).array, rtol=1e-4
    )
    with pytest.raises(ghost.UnsupportedLeafError, match="^the model "):
        scores(mapped)


def test_losses_with_time_first_are_refused_with_the_fix():
    x, weight = normal(0, 4, 3), jnp.ones(3)
    with pytest.raises(
        ValueError, match=r"of the shape \(4, 1\) for one example.*\[batch, time\]"
    ):
        ghost.grad_dot(
            weight,
            lambda w, x: jnp.ones((4, 1)) * (x @ w)[None],
            x,
            direction=weight,
            tokens="mean",
        )


@pytest.mark.parametrize("check_vma", [True, False])
def test_weights_within_a_shard_map_over_positions_are_scored(check_vma):
    x, weight = jax.random.normal(jax.random.key(0), (4, 8, 3)), jnp.eye(3) + 0.1
    mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
    run = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    positions = PartitionSpec(None, "model")

    def losses(weight, x):
        product = run(
            lambda w, x: jnp.tanh(x @ w),
            in_specs=(PartitionSpec(), positions),
            out_specs=positions,
        )
        reduced = run(
            lambda w, x: jax.lax.psum(jnp.tanh(x @ w) @ w.T, "model"),
            in_specs=(positions, PartitionSpec()),
            out_specs=PartitionSpec(),
        )
        parts = jnp.concatenate([weight, weight[:, :1]], 1)
        return jnp.sum(reduced(parts, product(weight, x) @ weight), (1, 2))

    direction = jax.random.normal(jax.random.key(1), (3, 3))
    _, found = eqx.filter_jit(ghost.grad_dot)(weight, losses, x, direction=direction)
    expected = jax.jit(
        lambda: jax.jvp(lambda weight: losses(weight, x), (weight,), (direction,))[1]
    )()
    np.testing.assert_allclose(found.total.array, expected, rtol=1e-4, atol=1e-4)
