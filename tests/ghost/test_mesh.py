"""Scores on several devices equal those on one."""

import equinox as eqx
import jax
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import ghost
from stacked_remat.training import MeshConfig, Partitioning

from .cases import SPARSE, decoder, random_like, token_means, tokens

MESHES = {
    "data parallel": MeshConfig(param_mapping={}),
    "hybrid": MeshConfig({"replica": 2, "data": 4}, {"batch": ["replica", "data"]}),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", list(MESHES))
def test_scores_on_a_mesh_equal_those_on_one_device(name):
    model, batch = decoder(SPARSE, "nested"), tokens(Axis("batch", 8))
    direction = random_like(model, 1)

    def step(model, batch, direction):
        return ghost.grad_dot(model, token_means, batch, direction=direction)

    gradients, alone = eqx.filter_jit(step)(model, batch, direction)
    mesh = Partitioning.of(MESHES[name], jax.devices())
    with mesh.activations():
        shares = mesh.shard_weights(model), mesh.shard_batch(batch), mesh.shard_weights(direction)
        of_mesh, found = eqx.filter_jit(step)(*shares)
    for path, score in alone.scores.items():
        largest = np.abs(score.array).max()
        np.testing.assert_allclose(found.scores[path].array, score.array, rtol=0, atol=1e-5 * largest)
    for one, other in zip(jax.tree.leaves(of_mesh), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
