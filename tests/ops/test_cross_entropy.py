"""Tests of `chunked_cross_entropy` against the loss with all logits."""

import dataclasses
import functools

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import memory
from stacked_remat.ops import chunked_cross_entropy

from ..blocks import quick_jit
from ..jaxprs import equations_of
from ..random_arrays import normal

Embed, Vocab = Axis("embed", 4), Axis("vocab", 11)


def with_all_logits(
    hidden,
    head,
    targets,
    Embed,
    Vocab,
    *,
    weights=None,
    z_loss=0.0,
    scale=1.0,
    softcap=None,
    chunk_size=None,
):
    logits = scale * hax.dot(hidden, head, axis=Embed).astype(jnp.float32)
    if softcap is not None:
        logits = softcap * hax.tanh(logits / softcap)
    lse = hax.nn.logsumexp(logits, axis=Vocab)
    losses = lse - hax.take(logits, Vocab, targets) + z_loss * lse * lse
    return losses if weights is None else losses * weights


def example(*sizes, seed=0):
    tokens = tuple(Axis(f"axis{i}", size) for i, size in enumerate(sizes))
    targets = (
        np.random.default_rng(seed).integers(0, Vocab.size, sizes).astype(np.int32)
    )
    return (
        normal(seed, *tokens, Embed),
        normal(seed + 1, Embed, Vocab),
        hax.named(jnp.asarray(targets), tokens),
        normal(seed + 2, *tokens),
    )


@pytest.mark.parametrize(
    ("sizes", "chunk", "z_loss", "weighted", "changes"),
    [
        ((4, 3), 5, 0.3, True, {}),
        ((5,), 2, 0.0, False, {}),
        ((3, 2), 30, 0.3, False, {}),
        ((5,), 2, 0.3, False, {"scale": 0.3, "softcap": 0.8}),
        ((3,), 2, 0.0, True, {"scale": 2.0}),
    ],
)
def test_values_and_gradients_are_those_with_all_logits(
    sizes, chunk, z_loss, weighted, changes
):
    """A token of weight zero may have any target, and one whose target is -100 has
    weight zero.
    """
    hidden, head, targets, cotangent = example(*sizes)
    real = hax.named(
        jnp.arange(targets.array.size).reshape(sizes) % 3 != 1, targets.axes
    )
    weights = (
        hax.where(cotangent > 0.5, 0.0, cotangent * cotangent) if weighted else None
    )
    given = hax.where(weights == 0, 1_000, targets) if weighted else targets
    of_real = real.astype(jnp.float32) * (weights if weighted else 1.0)
    cases = (
        (chunked_cross_entropy, hax.where(real, given, -100), weights),
        (with_all_logits, targets, of_real),
    )

    def loss(hidden, head, of, targets, weights):
        losses = of(
            hidden,
            head,
            targets,
            Embed,
            Vocab,
            weights=weights,
            z_loss=z_loss,
            chunk_size=chunk,
            **changes,
        )
        return hax.sum(losses * cotangent).scalar(), losses

    def both(hidden, head):
        return [
            jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head, *case)
            for case in cases
        ]

    found, expected = quick_jit(both)(hidden, head)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-4),
        found,
        expected,
    )
    assert not np.any(found[0][1].array[~real.array])


def linear_head(weight, bias=None):
    return hnn.Linear(weight, bias, Embed, Vocab)


class Tied(eqx.Module):
    """A head with a low-rank part besides, and a bias."""

    whole: hnn.Linear
    narrow: hax.NamedArray
    wide: hax.NamedArray

    def apply_maps(self, apply, x):
        return apply(self.whole, x) + apply(self.wide, apply(self.narrow, x))

    def merged(self):
        return self.whole.weight + hax.dot(self.narrow, self.wide, axis="rank")


@pytest.mark.parametrize("out_first", [False, True])
def test_a_head_of_several_maps_is_trained_as_its_sum_would_be(out_first):
    hidden, weight, targets, _ = example(5)
    Rank = Axis("rank", 2)
    bias = normal(7, Vocab)
    if out_first:
        weight = weight.rearrange((Vocab, Embed))
    low = normal(8, Embed, Rank), normal(9, Rank, Vocab)
    head = Tied(linear_head(weight, bias), *low)

    def loss(inputs, of):
        hidden, head = inputs
        return hax.sum(of(hidden, head, targets, Embed, Vocab, chunk_size=2)).scalar()

    def by_all_logits(hidden, head, targets, Embed, Vocab, chunk_size):
        logits = hax.dot(hidden, head.merged(), axis=Embed) + head.whole.bias
        return hnn.logsumexp(logits, Vocab) - hax.take(logits, Vocab, targets)

    found, expected = (
        quick_jit(jax.value_and_grad(functools.partial(loss, of=of)))((hidden, head))
        for of in (chunked_cross_entropy, by_all_logits)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-4),
        found,
        expected,
    )


def test_only_what_is_trained_of_a_head_has_a_gradient_buffer():
    hidden, weight, targets, _ = example(8)
    Rank = Axis("rank", 2)
    head = Tied(linear_head(weight), normal(8, Embed, Rank), normal(9, Rank, Vocab))

    def total(wide, hidden):
        own = dataclasses.replace(head, wide=wide)
        losses = chunked_cross_entropy(hidden, own, targets, Embed, Vocab, chunk_size=2)
        return hax.sum(losses).scalar()

    program = jax.make_jaxpr(jax.grad(total, (0, 1)))(head.wide, hidden)
    wide, narrow = 2 * 8 * Embed.size * Vocab.size, 2 * 8 * Rank.size * Vocab.size
    low = 2 * 8 * Embed.size * Rank.size
    assert memory.count_flops(program).matmul == 3 * wide + 4 * narrow + 2 * low


@pytest.mark.parametrize("target", [-1, -99, 11])
def test_the_loss_of_an_out_of_range_target_is_nan(target):
    hidden, head, targets, _ = example(3)
    targets = hax.named(targets.array.at[1].set(target), targets.axes)
    losses = chunked_cross_entropy(hidden, head, targets, Embed, Vocab)
    assert np.isnan(losses.array).tolist() == [False, True, False]


def test_a_frozen_head_has_no_gradient_buffer():
    hidden, head, targets, _ = example(8)

    def program(argnums):
        def total(hidden, head):
            return hax.sum(
                chunked_cross_entropy(hidden, head, targets, Embed, Vocab, chunk_size=2)
            ).scalar()

        return jax.make_jaxpr(jax.grad(total, argnums))(hidden, head)

    frozen, trained = (
        memory.count_flops(program(argnums)).matmul for argnums in (0, (0, 1))
    )
    product = 2 * 8 * Embed.size * Vocab.size
    assert frozen == 3 * product and trained == 4 * product


def test_logits_of_all_tokens_never_exist():
    hidden, head, targets, _ = example(64)

    def total(hidden, head):
        return hax.sum(
            chunked_cross_entropy(hidden, head, targets, Embed, Vocab, chunk_size=4)
        ).scalar()

    program = equations_of(jax.grad(total, (0, 1)), hidden, head)
    shapes = {out.aval.shape for one in program for out in one.outvars}
    assert (4, 11) in shapes and not shapes & {(64, 11), (16, 4, 11)}


def test_half_precision_has_wide_sums():
    hidden, head, targets, _ = example(300)
    half = hidden.astype(jnp.bfloat16)

    def total(of, hidden, head):
        return hax.sum(of(hidden, head, targets, Embed, Vocab, chunk_size=7)).scalar()

    found = jax.jit(jax.grad(functools.partial(total, chunked_cross_entropy), (0, 1)))(
        half, head
    )
    wide = half.astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32)
    expected = jax.jit(jax.grad(functools.partial(total, with_all_logits), (0, 1)))(
        *wide
    )
    assert found[0].dtype == jnp.bfloat16 and found[1].dtype == jnp.float32
    scale = float(jnp.max(jnp.abs(expected[1].array)))
    np.testing.assert_allclose(found[1].array, expected[1].array, atol=0.01 * scale)


@pytest.mark.parametrize(
    ("dtype", "target"), [(jnp.uint8, 156), (jnp.int8, -5), (jnp.uint16, 65_436)]
)
def test_narrow_integer_targets(dtype, target):
    """-100 as a byte is 156, and 200 words do not fit an int8."""
    Wide, Pos = Axis("vocab", 200), Axis("position", 3)
    hidden, head = (normal(0, *axes) for axes in ((Pos, Embed), (Embed, Wide)))
    narrow = hax.named(jnp.full(3, target, dtype), Pos)
    found, wide = (
        chunked_cross_entropy(hidden, head, targets, Embed, Wide).array
        for targets in (narrow, narrow.astype(jnp.int32))
    )
    np.testing.assert_array_equal(found, wide)
    assert np.all(np.isfinite(found)) == (0 <= target < Wide.size)


def test_the_gradient_of_a_weight_is_the_loss_of_its_token():
    hidden, head, targets, weights = example(5)
    weights = hax.where(weights > 0, weights, 0.0)
    assert not np.all(weights.array)
    targets = hax.where(hax.arange(targets.axes[0]) == 2, Vocab.size, targets)  # no row
    weights = hax.where(hax.arange(targets.axes[0]) == 2, 0.0, weights)

    def total(weights):
        return hax.sum(
            chunked_cross_entropy(hidden, head, targets, Embed, Vocab, weights=weights)
        ).scalar()

    losses = chunked_cross_entropy(hidden, head, targets, Embed, Vocab).array
    gradient = quick_jit(jax.grad(total))(weights)
    np.testing.assert_allclose(gradient.array, losses.at[2].set(0.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(Vocab=Axis("words", 11)),
            "`head` has embed=4, vocab=11; it must have embed=4, words=11",
        ),
        (
            dict(Embed=Axis("width", 4)),
            "`hidden` has axis0=3, embed=4; it must have axis0=3, width=4",
        ),
        (
            dict(weights=hax.ones(Axis("other", 3))),
            "`weights` has other=3; it must have axis0=3",
        ),
        (
            dict(targets=hax.ones(Axis("axis0", 3))),
            "`targets` must be integers; got float32",
        ),
        (dict(softcap=0.0), "softcap must be a positive number, or None for no cap of"),
        (dict(softcap=float("inf")), "of the logits; got inf"),
        (
            dict(head=hnn.Linear.init(Vocab, Embed, key=jax.random.key(0))),
            "`head` maps vocab=11 to embed=4; it must map embed=4 to vocab=11",
        ),
        (
            dict(head=eqx.nn.Linear(4, 11, key=jax.random.key(0))),
            "It must be a named array, hnn.Linear, LoraLinear, or a module of such",
        ),
        (
            dict(chunk_size=0),
            "chunk_size must be a number of tokens, at least 1; got 0",
        ),
    ],
)
def test_arguments_are_checked(change, message):
    hidden, head, targets, _ = example(3)
    arguments = (
        dict(hidden=hidden, head=head, targets=targets, Embed=Embed, Vocab=Vocab)
        | change
    )
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**arguments)


@pytest.mark.target("cuda")
def test_a_vocabulary_of_150000_at_65536_tokens():
    Pos, Embed, Vocab = (
        Axis("position", 65_536),
        Axis("embed", 2_048),
        Axis("vocab", 151_936),
    )

    def total(hidden, head, targets):
        return hax.sum(
            chunked_cross_entropy(hidden, head, targets, Embed, Vocab)
        ).scalar()

    def example():
        half = functools.partial(hax.zeros, dtype=jnp.bfloat16)
        return half((Pos, Embed)), half((Embed, Vocab)), hax.zeros(Pos, dtype=jnp.int32)

    arguments = eqx.filter_eval_shape(example)
    frozen = memory.report(jax.grad(total), *arguments, target="h200")
    assert frozen.temporaries < 1.5 * 2**30
