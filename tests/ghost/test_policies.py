"""Scores do not depend on what the backward pass keeps, nor on where weights are."""

import dataclasses

import equinox as eqx
import jax
import pytest

from stacked_remat import ghost, memory, streaming
from stacked_remat.lora import lora_filter

from .cases import (
    SPARSE,
    adapted,
    assert_equal,
    decoder,
    looped_scores,
    random_like,
    token_means,
    tokens,
)


@pytest.mark.deep
def test_adapters_are_scored_over_frozen_weights_here_and_on_the_host():
    model, batch = adapted(SPARSE), tokens()
    trainable = lora_filter(model)
    direction = eqx.filter(random_like(model, 1), trainable)
    expected, _ = looped_scores(model, token_means, batch, direction, trainable)

    @eqx.filter_jit
    def step(model, batch, direction):
        return ghost.grad_dot(model, token_means, batch, direction=direction, trainable=trainable)

    for placed in (model, dataclasses.replace(model, layers=streaming.to_host(model.layers))):
        gradients, found = step(placed, batch, direction)
        assert_equal(found.scores, expected)
        assert len(jax.tree.leaves(gradients)) == len(jax.tree.leaves(direction))


@pytest.mark.deep
def test_scores_take_one_product_more():
    """Products of a step that recomputes its layers: a quarter more, and hardly any with adapters alone."""
    ratios = []
    for model, trainable in ((decoder(SPARSE), eqx.is_inexact_array), (adapted(SPARSE), lora_filter)):
        trained = trainable(model) if trainable is lora_filter else trainable
        direction, batch = eqx.filter(model, trained), tokens()

        def plain(model, batch, trained=trained):
            return ghost.val_direction(model, token_means, batch, trainable=trained)

        def scored(model, batch, direction, trained=trained):
            return ghost.grad_dot(model, token_means, batch, direction=direction, trainable=trained)

        flops = [
            memory.count_flops(jax.make_jaxpr(fn)(*args)).matmul
            for fn, args in ((plain, (model, batch)), (scored, (model, batch, direction)))
        ]
        ratios.append(flops[1] / flops[0])
    assert ratios[0] <= 1.30
    assert ratios[1] <= 1.15
