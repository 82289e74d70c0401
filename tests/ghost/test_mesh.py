"""Scores on several devices equal those on one."""

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest

from stacked_remat import ghost
from stacked_remat.training import MeshConfig, Partitioning

from .cases import SPARSE, decoder, random_like, token_means, tokens
from haliax import Axis


@pytest.mark.parametrize("fsdp", [False, True])
def test_scores_on_a_mesh_equal_those_on_one_device(fsdp):
    model, batch = decoder(SPARSE, "nested"), tokens(Axis("batch", 8))
    direction = random_like(model, 1)

    def step(model, batch, direction):
        return ghost.grad_dot(model, token_means, batch, direction=direction)

    _, alone = eqx.filter_jit(step)(model, batch, direction)
    config = MeshConfig(axes={"data": 4})
    partitioning = Partitioning.of(config, jax.devices()[:4])
    with partitioning.activations():
        _, found = eqx.filter_jit(step)(
            partitioning.shard_weights(model),
            partitioning.shard_batch(batch),
            partitioning.shard_weights(direction),
        )
    for path, score in found.scores.items():
        np.testing.assert_allclose(score.array, alone.scores[path].array, rtol=1e-4, atol=1e-5)
