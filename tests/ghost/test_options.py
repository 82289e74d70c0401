"""Options of `grad_dot`: reductions, granularity, norms, tokens, documents, coupled losses, and errors."""

import dataclasses
import re

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import BlockSeq, LayerStack, Stacked, StackedPattern, ghost, per_layer, shared, unsliced
from stacked_remat.ghost import _deposit

from .cases import (
    SPARSE,
    Batch,
    NamedModel,
    PlainModel,
    Pos,
    assert_equal,
    decoder,
    looped_scores,
    made,
    named_losses,
    plain_batch,
    plain_losses,
    random_like,
    take_example,
    token_losses,
    tokens,
)


def run(model, losses, batch, direction, **options):
    @eqx.filter_jit
    def step(model, batch, direction):
        return ghost.grad_dot(model, losses, batch, direction=direction, **options)

    return step(model, batch, direction)


@pytest.mark.deep
def test_blocks_totals_and_norms_are_exact():
    model, batch = made(NamedModel.init), tokens()
    direction = random_like(model, 1)
    gradients, found = run(model, named_losses, batch, direction, granularity="block", norms=True)
    dots, squares = looped_scores(model, named_losses, batch, direction)
    layers = {path for path in dots if path.startswith("blocks.*")}
    expected = {path: score for path, score in dots.items() if path not in layers}
    assert_equal(found.scores, expected | {"blocks.*": sum(dots[path] for path in layers)})
    norm = np.sqrt(sum(square if square.ndim == 1 else square.sum(0) for square in squares.values()))
    np.testing.assert_allclose(found.total_norm.array, norm, rtol=1e-5)
    cosines = found.total.array / norm / found.direction_norm
    np.testing.assert_allclose(found.cosines.array, cosines, rtol=1e-4)
    np.testing.assert_allclose(np.abs(found.shares().array).sum(), 1.0, rtol=1e-5)
    plain = eqx.filter_jit(ghost.val_direction)(model, named_losses, batch)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.deep
def test_microbatches_add_up_and_a_single_example_needs_no_second_trace():
    model, batch = made(NamedModel.init), tokens()
    direction = random_like(model, 1)
    gradients, found = run(model, named_losses, batch, direction, reduction="sum")
    step = eqx.filter_jit(
        lambda one: ghost.grad_dot(model, named_losses, one, direction=direction, reduction="sum")
    )
    parts = [step(take_example(batch, number)) for number in range(Batch.size)]
    for path, score in found.scores.items():
        joined = np.concatenate([part.scores[path].array for _, part in parts], -1)
        np.testing.assert_allclose(joined, score.array, rtol=0, atol=1e-5 * np.abs(joined).max())
    summed = jax.tree.map(lambda *some: sum(some), *(part for part, _ in parts))
    for one, other in zip(jax.tree.leaves(summed), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.deep
def test_tokens_add_up_to_examples_and_to_packed_documents():
    model, batch = decoder(SPARSE), tokens()
    Documents = Axis("document", 2 * Batch.size)
    first = hax.arange(Pos).broadcast_axis(Batch).rearrange((Batch, Pos)) < 2
    documents = hax.where(first, 1, 2)
    positions = hax.where(first, hax.arange(Pos), hax.arange(Pos) - 2)
    batch = dataclasses.replace(batch, documents=documents, positions=positions)
    ids = documents - 1 + 2 * hax.arange(Batch)
    direction = random_like(model, 1)
    own = {"example_ids": ids, "Examples": Documents}
    _, found = run(model, token_losses, batch, direction, tokens="sum", per_token="position")
    _, of_examples = run(model, token_losses, batch, direction, tokens="mean", **own)

    def of_document(model, number_and_batch):
        number, one = number_and_batch
        losses = token_losses(model, one)
        return hax.sum(hax.where(one.documents == number + 1, losses, 0.0), Pos)

    whole = {}
    for number in range(2):
        each, _ = looped_scores(
            model, lambda model, one, n=number: of_document(model, (n, one)), batch, direction
        )
        for path, score in each.items():
            whole.setdefault(path, [None, None])[number] = score
    expected = {path: np.stack(two, -1).reshape(*two[0].shape[:-1], -1) for path, two in whole.items()}
    assert_equal(found.per_document(ids, Documents).scores, expected, tolerance=2e-5)
    assert found.scores["embedding.weight"].axes == (Batch, Pos)
    lengths = np.tile([2, Pos.size - 2], Batch.size)
    expected = {path: score / lengths for path, score in expected.items()}
    assert_equal(of_examples.scores, expected, tolerance=2e-5)
    assert of_examples.total.axes == (Documents,)


def test_rows_in_any_order_are_scored_by_example():
    """A batch of tokens, sorted by expert, of examples that attend within themselves."""
    rng, Examples = np.random.default_rng(0), Axis("example", 3)
    ids, experts = rng.permutation(np.repeat([0, 1, 2, 3], 2)), np.sort(rng.integers(0, 2, 8))
    x, weights = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 3), (2, 3, 3)))
    direction = jnp.asarray(rng.normal(size=weights.shape), jnp.float32)

    def losses(weights, batch):
        x, experts, ids = batch
        x = jnp.einsum("nd,nde->ne", x, weights[experts])
        scores = jnp.where(ids[:, None] == ids[None], x @ x.T, -jnp.inf)
        mixed = jax.nn.softmax(scores, 1) @ (x @ weights[0])
        return jnp.sum(jnp.tanh(mixed), 1)

    def scored(ids):
        return ghost.grad_dot(
            weights, losses, (x, experts, ids), direction=direction, example_ids=ids, Examples=Examples
        )[1]

    found = jax.jit(scored)(jnp.asarray(ids))
    along = jax.jvp(lambda weights: losses(weights, (x, experts, ids)), (weights,), (direction,))[1]
    expected = np.array([along[ids == example].sum() for example in range(3)])  # the fourth is left out
    np.testing.assert_allclose(found.total.array, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.deep
def test_coupled_losses_and_aux_are_part_of_the_gradients():
    model, batch = decoder(SPARSE), tokens()

    def losses(model, batch):
        hidden, auxiliary = model.hidden_states(batch.tokens)
        return (hax.mean(hidden**2, (Pos, "embed")), 10.0 * auxiliary.loss), {"loss": auxiliary.loss}

    direction = random_like(model, 1)
    gradients, found = run(model, losses, batch, direction, coupled=True, has_aux=True, check=True)

    def whole(model):
        (each, coupled), _ = losses(model, batch)
        return hax.mean(each).scalar() + coupled

    plain = eqx.filter_jit(eqx.filter_grad(whole))(model)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert found.aux["loss"] > 0


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
            model, losses, val, direction=direction, gradients=gradients, learning_rate=rate
        )
    )(model)
    for found, first, second in zip(*map(jax.tree.leaves, (corrected, direction, product)), strict=True):
        np.testing.assert_allclose(found, first - rate / 2 * second, rtol=1e-4, atol=1e-6)
    # The values add up to the second-order reduction of the validation loss.
    _, scored = run(model, losses, batch, corrected)
    values = rate * scored.total.array / 4
    after = jax.tree.map(lambda weight, gradient: weight - rate * gradient, model, gradients)
    reduction = loss(model) - loss(after)
    first_order = rate * sum(
        jnp.sum(a * b) for a, b in zip(jax.tree.leaves(direction), jax.tree.leaves(gradients), strict=True)
    )
    assert abs(values.sum() - reduction) < 0.2 * abs(first_order - reduction)


@pytest.mark.deep
def test_bfloat16_scores_are_reduced_in_float32():
    config = dataclasses.replace(SPARSE, compute_dtype="bfloat16")
    model, batch = decoder(config), tokens()
    direction = random_like(model, 1)
    losses = lambda model, batch: hax.mean(token_losses(model, batch), Pos)  # noqa: E731
    _, found = run(model, losses, batch, direction, check=0.1)
    exact, _ = looped_scores(decoder(SPARSE), losses, batch, direction)
    assert all(score.dtype == jnp.float32 for score in found.scores.values())
    assert_equal(found.scores, exact, tolerance=0.1)


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
    lambda x, w: (x * w, (x, w)), lambda kept, ct: (ct * kept[1], (ct * kept[0]).sum(0, keepdims=True))
)


def test_what_can_not_be_scored_is_refused_by_its_path():
    x, model = jnp.ones((4, 3)), {"kernel": Kernel(jnp.ones((1, 3)))}

    def losses(model, x):
        return jnp.sum(model["kernel"](x), 1)

    def refused(losses, message, error=ghost.UnsupportedLeafError, model=model, **options):
        with pytest.raises(error, match=re.escape(message)):
            ghost.grad_dot(model, losses, x, **{"direction": model, **options})

    ids, Row = jnp.arange(4), Axis("row", 4)
    refused(losses, "kernel.weight goes into `custom_vjp_call`")
    sorted_losses = lambda model, x: jnp.sum(jnp.sort(x, 0) * model["kernel"].weight, 1)  # noqa: E731
    refused(sorted_losses, "kernel.weight meets data in `mul`")
    refused(losses, "reduction is", ValueError, reduction="max")
    refused(losses, "check is True, False or", ValueError, check=0.0)
    refused(losses, "granularity is", ValueError, granularity="layer")
    refused(losses, "per_token needs", ValueError, norms=True, per_token="x")
    refused(losses, "example_ids needs", ValueError, norms=True, example_ids=ids, Examples=Row)
    refused(losses, "example_ids and Examples", ValueError, example_ids=ids)
    refused(losses, "leave one out", ValueError, per_token="x", example_ids=ids, Examples=Row)
    refused(losses, "got float32 with batch=4", ValueError, example_ids=x[:, 0], Examples=Row)
    refused(losses, "example_ids has batch=5, and", ValueError, example_ids=jnp.arange(5), Examples=Row)
    refused(losses, "direction has no array", ValueError, direction={"kernel": None})
    refused(losses, "['kernel'].weight has the shape (3,)", ValueError, direction={"kernel": Kernel(x[0])})
    refused(lambda model, x: x, 'tokens="mean"', ValueError)
    refused(lambda model, x: x[0, 0], "returned a scalar", ValueError)
    spectrum = {"kernel": Kernel(jnp.ones((1, 3), complex))}
    of_spectrum = lambda model, x: jnp.sum(jnp.abs(model["kernel"].weight) * x, 1)  # noqa: E731
    refused(of_spectrum, "complex numbers", ValueError, model=spectrum, direction=spectrum)
    refused(losses, "trains none there", ValueError, trainable=lambda leaf: False)
    stack = {"kernel": Stacked(Table(jnp.ones((2, 3))), Axis("layers", 2))}
    folded = lambda model, x: jnp.sum(model["kernel"].fold(x), 1)  # noqa: E731
    _, found = ghost.grad_dot(stack, folded, x, direction=stack)  # of layers that read their stack in a fold
    np.testing.assert_allclose(found.total.array, [6.0] * 4)
    _, found = ghost.grad_dot(model, losses, x, direction=model, granularity="total")
    np.testing.assert_allclose(found.total.array, [3.0] * 4)
    assert not found.scores


class Mapped(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        padded = jnp.pad(x, ((0, -len(x) % 12), (0, 0))) if x.ndim > 1 else x
        return jnp.tanh(padded @ self.weight)[: len(x)]


def test_weights_that_never_meet_data_of_known_examples_are_refused():
    x = jnp.arange(1.0, 13.0).reshape(4, 3)
    model = {"blocks": Stacked(Mapped(jnp.ones((2, 3, 3))), Axis("layers", 2))}

    def folded(model, one):
        return jnp.sum(model["blocks"].fold(one))

    def carried(model, x):
        add = model["blocks"].fold_via(
            lambda block, carry: (jnp.tanh(carry[0] @ block.weight), carry[1] + jnp.sum(block.weight))
        )
        rows, penalty = add((x, jnp.zeros(())))
        return jnp.sum(rows + penalty, 1)

    for losses in (
        lambda model, x: jax.lax.map(lambda one: folded(model, one), x),
        lambda model, x: jnp.stack([folded(model, one) for one in x]),
        lambda model, x: jnp.sum(model["blocks"].fold(x), 1),  # padded to 12 rows, as the second trace has
        lambda model, x: x[:, 0] * folded(model, jnp.ones(3)),
        carried,
    ):
        with pytest.raises(ghost.UnsupportedLeafError, match=r"^blocks\.\*\.weight .*axis of examples"):
            ghost.grad_dot(model, losses, x, direction=model)
    for losses in (
        lambda weight, x: jnp.broadcast_to(jnp.sum(weight**2), len(x)),
        lambda weight, x: jnp.stack([jnp.sum(one * weight) for one in x]),
    ):
        with pytest.raises(ghost.UnsupportedLeafError, match="^the model .*axis of examples"):
            ghost.grad_dot(x[0], losses, x, direction=x[0])


def test_rows_that_move_across_examples_are_refused():
    x, weight = jnp.arange(12.0).reshape(4, 3) % 5, jnp.ones((3, 3))

    @jax.custom_jvp
    def reversed_rows(x):
        return x[::-1]

    reversed_rows.defjvps(lambda tangent, _, x: tangent[::-1])

    def sort(x):
        return x[jnp.argsort(x[:, 0])]

    def dispatch(x):  # to an expert with as many places as there are examples
        places = jax.nn.one_hot(jnp.argsort(x[:, 0]), len(x))
        return jnp.einsum("nec,nd->ecd", places[:, None], x)[0]

    def masked(x, order, axis):
        chosen = (jnp.arange(len(x))[:, None] == order[None])[..., None]
        return jnp.sum(jnp.where(chosen, jnp.expand_dims(x, 1 - axis), 0.0), axis)

    moved = {
        "one-hot": dispatch,
        "mask": lambda x: masked(x, jnp.arange(len(x))[::-1], 1),
        "mask of data": lambda x: masked(x, jnp.argsort(x[:, 0]), 0),
        "previous": lambda x: jax.lax.scan(lambda before, x: (x, before), x[0] * 0, x)[1],
        "cumsum": lambda x: jnp.cumsum(x, 0),
        "scatter": lambda x: jnp.zeros_like(x).at[jnp.argsort(x[:, 0])].set(x),
        "split": lambda x: jnp.concatenate(jnp.split(x, 2)[::-1]),
        "checkpoint": jax.checkpoint(sort),
        "scan": lambda x: jax.lax.scan(lambda none, x: (none, sort(x)), None, x[None])[1][0],
        "cond": lambda x: jax.lax.cond(True, lambda x: x[::-1], lambda x: x, x),
        "loop": lambda x: jax.lax.fori_loop(0, 1, lambda _, x: x[::-1], x),
        "custom_jvp": reversed_rows,
        "jit": jax.jit(sort),
        "top_k": lambda x: jax.lax.top_k(x.T, len(x))[0].T,
        "pad": lambda x: jnp.pad(x, ((0, -len(x) % 12), (0, 0))),
    }
    for move in moved.values():
        losses = lambda weight, x, move=move: jnp.sum(jnp.tanh(move(x) @ weight), 1)[: len(x)]  # noqa: E731
        with pytest.raises(ghost.UnsupportedLeafError, match="the model meets data in `dot_general`"):
            ghost.grad_dot(weight, losses, x, direction=weight)
    stack = Stacked(Mapped(jnp.ones((2, 3, 3))), Axis("layers", 2))

    def fold(model, x, step=1):
        return model.fold_via(lambda block, x: jnp.tanh(x @ block.weight)[::step])(x)

    for losses, message in (
        (lambda model, x: fold(model, x, -1), r"^The layer of \*\.weight"),
        (
            lambda model, x: fold(model, sort(x)),
            r"^The stack of \*.weight is given an array, and it can't be told",
        ),
        (jax.checkpoint(lambda model, x: fold(model, fold(model, x)[::-1])), "^The stack of"),
    ):
        with pytest.raises(ghost.UnsupportedLeafError, match=message):
            ghost.grad_dot(stack, lambda m, x, fn=losses: jnp.sum(fn(m, x), 1), x, direction=stack)


def test_rows_that_stay_are_scored():
    x, weight = jax.random.normal(jax.random.key(0), (4, 6, 3)), jnp.eye(3)
    kept = [
        jax.checkpoint(lambda x: jnp.sort(x, 1)),
        jax.vmap(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: jnp.roll(x, 1, 0), x)),
        lambda x: jax.lax.map(lambda one: one[::-1], x),
        lambda x: jax.lax.cond(True, jnp.sin, jnp.cos, x),
        lambda x: jnp.concatenate(jnp.split(x, 2, 1)[::-1], 1),
        lambda x: jnp.stack(jnp.unstack(x, axis=1), 2).swapaxes(1, 2),
        lambda x: jnp.linalg.cholesky(x @ x.swapaxes(1, 2) + jnp.eye(6)[None]) @ x,
        lambda x: jnp.linalg.solve(x @ x.swapaxes(1, 2) + jnp.eye(6)[None], x),
        lambda x: x * jax.random.uniform(jax.random.key(1), x.shape),
        lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
        lambda x: x.at[:, 1:3].max(0.1),
        jax.vmap(lambda x: jax.ops.segment_sum(x, jnp.argsort(x[:, 0]) // 2, 6)),
        lambda x: jax.lax.top_k(x, 3)[0],
        lambda x: jnp.fft.fft(x, axis=1).real,
        lambda x: jnp.tanh(x.swapaxes(0, 1).reshape(-1, 3)).reshape(6, -1, 3).swapaxes(0, 1),
    ]

    def losses(weight, x):
        for keep in kept:
            x = keep(x @ weight)
        filtered = jnp.fft.rfft(x, axis=1) @ jax.lax.complex(weight, weight.T)
        return jnp.sum(jnp.fft.irfft(filtered, n=6, axis=1) ** 2, (1, 2))

    direction = jax.random.normal(jax.random.key(1), (3, 3))
    _, found = run(weight, losses, x, direction)
    expected = jax.jit(lambda: jax.jvp(lambda weight: losses(weight, x), (weight,), (direction,))[1])()
    np.testing.assert_allclose(found.total.array, expected, rtol=1e-4, atol=1e-4)


def test_arrays_after_layers_that_are_kept_are_scored():
    """Layers that are not recomputed are inlined, with their deposits, between the equations around them."""
    x, weights = (jax.random.normal(jax.random.key(seed), (4, 3, 3)) for seed in range(2))
    layers = BlockSeq([Mapped(one) for one in weights[:2]], Axis("layers", 2), remat=False)
    model = {"layers": layers, "out": weights[2]}
    direction = jax.tree.map(jnp.cos, model)

    def losses(model, x):
        apply = model["layers"].fold_via(lambda block, x: jnp.tanh(x @ block.weight))
        return jnp.sum(apply(apply(x) @ model["out"]), (1, 2))

    _, found = run(model, losses, x, direction)
    expected = jax.jit(lambda: jax.jvp(lambda model: losses(model, x), (model,), (direction,))[1])()
    np.testing.assert_allclose(found.total.array, expected, rtol=1e-4, atol=1e-5)


def test_arrays_that_all_examples_share_are_marked_or_refused():
    x, weight = jax.random.normal(jax.random.key(0), (4, 4, 3)), jnp.eye(3) + 0.1
    table, direction = x[:, :, 0], jax.random.normal(jax.random.key(1), (3, 3))

    def losses(weight, batch):
        x, table = batch
        return jnp.sum(jnp.tanh(jnp.einsum("pq,bqd->bpd", table, x) @ weight), (1, 2))

    def dots(batch, **options):
        return ghost.grad_dot(weight, losses, batch, direction=direction, **options)[1].total.array

    options = {}, {"granularity": "total"}, {"norms": True}
    found = jax.jit(lambda: [dots((x, shared(table)), **each) for each in options])()
    expected = jax.jvp(lambda weight: losses(weight, (x, table)), (weight,), (direction,))[1]
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-5)
    for each in options[1:]:
        with pytest.raises(ValueError, match=r"^batch\[1\] has 4 rows.*stacked_remat.shared"):
            dots((x, table), **each)
    with pytest.raises(TypeError, match="A batch has no per_layer marks"):
        dots((x, per_layer(table)))
    named, Rows = hax.named(x[:, 0], ("batch", "in")), Axis("batch", 4)
    refused = [  # each works for a batch of 4
        (lambda weight, x: jnp.sum(x, (0, 2)) + 0 * weight[0, 0], x, "4 losses for (12|5) examples"),
        (lambda weight, x: jnp.sum((x + jnp.ones((4, 1, 1))) @ weight, (1, 2)), x, "incompatible shapes"),
        (
            lambda weight, x: hax.vmap(lambda one: jnp.sum(one.array @ weight), Rows)(x),
            named,
            "same name but different size",
        ),
    ]
    for fn, batch, message in refused:
        for each in options:
            with pytest.raises(ValueError, match=f"{message}.*sizes from the arrays of the batch"):
                ghost.grad_dot(weight, fn, batch, direction=direction, **each)


def test_scores_that_do_not_add_up_are_an_error(monkeypatch):
    exact = _deposit.sum_per_unit
    monkeypatch.setattr(_deposit, "sum_per_unit", lambda *args: 1.1 * exact(*args))
    model = made(PlainModel.init)
    with pytest.raises(Exception, match="do not add up"):
        jax.block_until_ready(run(model, plain_losses, plain_batch(), model, check=True))


class _Tanh(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x + jnp.tanh(x @ self.weight)


class _Sine(_Tanh):
    def __call__(self, x):
        return x + jnp.sin(x @ self.weight)


@pytest.mark.parametrize("form", [StackedPattern, BlockSeq])
def test_layers_of_several_classes_are_scored_by_their_own_calls(form):
    Layers, keys = Axis("layers", 5), jax.random.split(jax.random.key(0), 5)
    kinds = {
        "tanh": lambda key: _Tanh(jax.random.normal(key, (4, 4)) * 0.3),
        "sine": lambda key: _Sine(jax.random.normal(key, (4, 4)) * 0.3),
    }
    layers = StackedPattern.init(Layers, kinds, ("tanh", "sine"), remat="nested")(keys)
    if form is BlockSeq:
        layers = BlockSeq(list(layers), Layers)

    def losses(layers, batch):
        return jnp.sum(layers.fold(batch), -1) ** 2

    batch = jax.random.normal(jax.random.key(1), (6, 4))
    direction = jax.tree.map(jnp.cos, layers)
    _, scores = jax.jit(lambda layers: ghost.grad_dot(layers, losses, batch, direction=direction))(layers)
    own = jax.vmap(lambda one: jax.grad(lambda layers: losses(layers, one[None])[0])(layers))(batch)
    pairs = zip(jax.tree.leaves(own), jax.tree.leaves(direction), strict=True)
    expected = sum(jnp.sum((each * part[None]).reshape(6, -1), 1) for each, part in pairs)
    np.testing.assert_allclose(scores.total.array, expected, rtol=1e-5, atol=1e-4)
