"""Scores do not depend on what the backward pass keeps, nor on where weights are."""

import dataclasses

import equinox as eqx
import jax
import numpy as np
import pytest

from stacked_remat import ScanCheckpointPolicy, ghost, memory, streaming
from stacked_remat.lora import lora_filter

from .cases import (
    SPARSE,
    NamedModel,
    adapted,
    assert_equal,
    decoder,
    looped_scores,
    made,
    named_losses,
    random_like,
    token_means,
    tokens,
)

POLICIES = [
    False,
    "offload",
    "nested",
    ScanCheckpointPolicy(max_carries=2),
    ScanCheckpointPolicy(nested=True, save_carries="offload"),
    ScanCheckpointPolicy(first_layers=1, nested=True),
]


@pytest.mark.deep
def test_every_policy_gives_the_same_scores():
    model, batch = made(NamedModel.init), tokens()
    direction = random_like(model, 1)

    def scores(blocks):
        own = dataclasses.replace(model, blocks=blocks)
        along = dataclasses.replace(
            direction, blocks=dataclasses.replace(direction.blocks, remat=blocks.remat)
        )
        return ghost.grad_dot(own, named_losses, batch, direction=along)[1].scores

    policies = [True, *POLICIES]
    found = jax.jit(lambda: [scores(model.blocks.with_remat(policy)) for policy in policies])()
    for other in found[1:]:
        for path, score in found[0].items():
            atol = 1e-5 * np.abs(score.array).max()
            np.testing.assert_allclose(other[path].array, score.array, rtol=0, atol=atol)


@pytest.mark.deep
@pytest.mark.parametrize("on_host", [False, True])
def test_adapters_are_scored_over_frozen_weights_here_and_on_the_host(on_host):
    model, batch = adapted(SPARSE), tokens()
    trainable = lora_filter(model)
    direction = eqx.filter(random_like(model, 1), trainable)
    expected, _ = looped_scores(model, token_means, batch, direction, trainable)
    if on_host:
        model = dataclasses.replace(model, layers=streaming.to_host(model.layers))

    @eqx.filter_jit
    def step(model, batch, direction):
        return ghost.grad_dot(model, token_means, batch, direction=direction, trainable=trainable)

    gradients, found = step(model, batch, direction)
    assert_equal(found.scores, expected)
    assert found.coverage() == 1.0 and not found.uncovered
    assert len(jax.tree.leaves(gradients)) == len(jax.tree.leaves(direction))
    part = eqx.filter(direction, jax.tree.map(lambda leaf: leaf.ndim != 3, direction))
    some = eqx.filter_eval_shape(
        lambda: ghost.grad_dot(model, token_means, batch, direction=part, trainable=trainable)[1]
    )
    assert 0 < some.coverage() < 1


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
