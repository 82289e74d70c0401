"""Scores of decoders, whatever is trained, wherever weights are and on several devices;
and their cost.
"""

import dataclasses

import equinox as eqx
import jax
import numpy as np
import pytest
from haliax import Axis
from jax.ad_checkpoint import checkpoint_name

from stacked_remat import ghost, memory, streaming
from stacked_remat.lora import lora_filter
from stacked_remat.training import MeshConfig, Partitioning

from ..blocks import assert_close
from ..models.test_hybrid import OLMO
from ..models.test_mixers import CONFIGS
from .cases import (
    MIXED,
    SPARSE,
    Batch,
    adapted,
    assert_equal,
    decoder,
    looped_scores,
    random_like,
    run,
    token_means,
    tokens,
)

pytestmark = pytest.mark.deep

HYBRIDS = CONFIGS | {"delta net": OLMO}


def exact_scores(model, batch, direction):
    """The gradients and scores of a batch, and the dot products and squared norms of
    looped gradients, which the scores and norms equal.
    """
    gradients, found = run(model, token_means, batch, direction, norms=True)
    dots, squares = looped_scores(model, token_means, batch, direction)
    assert_equal(found.scores, dots)
    assert_equal(
        found.norms, {path: np.sqrt(square) for path, square in squares.items()}
    )
    return gradients, found, dots, squares


def test_totals_and_norms_are_exact():
    model, batch = decoder(MIXED, "nested"), tokens()
    direction = random_like(model, 1)
    gradients, found, dots, squares = exact_scores(model, batch, direction)
    norm = np.sqrt(
        sum(
            square if square.ndim == 1 else square.sum(0) for square in squares.values()
        )
    )
    np.testing.assert_allclose(found.total_norm.array, norm, rtol=1e-5)
    cosines = found.total.array / norm / found.direction_norm
    np.testing.assert_allclose(found.cosines.array, cosines, rtol=1e-4)
    plain = eqx.filter_jit(ghost.val_direction)(model, token_means, batch)

    def with_aux(m, b):
        return token_means(m, b), {"tokens": b.tokens, "embedding": m.embedding}

    for granularity, reduction, scale in (
        ("leaf", "sum", Batch.size),
        ("total", "mean", 1),
    ):
        options = {"granularity": granularity, "reduction": reduction}
        other, in_batch = run(
            model, with_aux, batch, direction, has_aux=True, **options
        )
        np.testing.assert_array_equal(in_batch.aux["tokens"].array, batch.tokens.array)
        if granularity == "leaf":
            assert in_batch.aux["embedding"].weight.axes == (
                Batch,
                *model.embedding.weight.axes,
            )
        assert set(in_batch.scores) == (set(dots) if granularity == "leaf" else set())
        np.testing.assert_allclose(in_batch.total.array, found.total.array, rtol=1e-4)
        for own, one, wanted in zip(
            *map(jax.tree.leaves, (other, gradients, plain)), strict=True
        ):
            np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(
                own, wanted * scale, rtol=1e-5, atol=1e-6 * scale
            )


@pytest.mark.parametrize("name", HYBRIDS)
def test_scores_and_norms_of_hybrids_are_exact(name):
    model = decoder(HYBRIDS[name], "nested")
    exact_scores(model, tokens(), random_like(model, 1))


def test_adapters_are_scored_over_frozen_weights_here_and_on_the_host():
    model, batch = adapted(SPARSE), tokens()
    trainable = lora_filter(model)
    direction = eqx.filter(random_like(model, 1), trainable)
    expected, _ = looped_scores(model, token_means, batch, direction, trainable)

    @eqx.filter_jit
    def step(model, batch, direction):
        return ghost.grad_dot(
            model, token_means, batch, direction=direction, trainable=trainable
        )

    for placed in (
        model,
        dataclasses.replace(model, layers=streaming.to_host(model.layers)),
    ):
        gradients, found = step(placed, batch, direction)
        assert_equal(found.scores, expected)
        assert len(jax.tree.leaves(gradients)) == len(jax.tree.leaves(direction))


def test_scores_take_one_product_more():
    """Products of a step that recomputes its layers: a quarter more, and hardly any
    with adapters alone.

    Norms take more where experts have few tokens of one example, and for what is
    outside of layers.
    """

    def named_losses(model, batch):
        return token_means(
            jax.tree.map(lambda weight: checkpoint_name(weight, "weight"), model), batch
        )

    def ratios(model, trained, losses=token_means):
        direction, batch = eqx.filter(model, trained), tokens()

        def flops(fn, **options):
            run = lambda model: fn(model, losses, batch, trainable=trained, **options)  # noqa: E731
            return memory.count_flops(jax.make_jaxpr(run)(model)).matmul

        step = flops(ghost.val_direction)
        found = (
            flops(ghost.grad_dot, direction=direction, norms=norms)
            for norms in (False, True)
        )
        return [each / step for each in found]

    model, adapters = decoder(SPARSE), adapted(SPARSE)
    for found, scores, norms in (
        (ratios(model, eqx.is_inexact_array), 1.30, 1.40),
        (ratios(model, eqx.is_inexact_array, named_losses), 1.30, 1.40),
        (ratios(adapters, lora_filter(adapters)), 1.15, 1.30),
    ):
        assert found[0] <= scores and found[1] <= norms, found


def test_scores_on_a_mesh_equal_those_on_one_device():
    model, batch = decoder(SPARSE, "nested"), tokens(Axis("batch", 8))
    direction = random_like(model, 1)

    def step(model, batch, direction):
        return ghost.grad_dot(model, token_means, batch, direction=direction)

    gradients, alone = eqx.filter_jit(step)(model, batch, direction)
    hybrid = MeshConfig({"replica": 2, "data": 4}, {"batch": ["replica", "data"]})
    mesh = Partitioning.of(hybrid, jax.devices())
    with mesh.activations():
        shares = (
            mesh.shard_weights(model),
            mesh.shard_batch(batch),
            mesh.shard_weights(direction),
        )
        of_mesh, found = eqx.filter_jit(step)(*shares)
    for path, score in alone.scores.items():
        largest = np.abs(score.array).max()
        np.testing.assert_allclose(
            found.scores[path].array, score.array, rtol=0, atol=1e-5 * largest
        )
    assert_close(of_mesh, gradients, rtol=1e-4, atol=1e-5)
