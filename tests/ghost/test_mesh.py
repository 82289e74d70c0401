"""Scores on several devices equal those on one."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import AxisType, PartitionSpec

from stacked_remat import ghost
from stacked_remat.training import MeshConfig, Partitioning

from ..blocks import assert_close
from .cases import SPARSE, decoder, random_like, token_means, tokens

P = PartitionSpec


@pytest.mark.deep
def test_scores_on_a_mesh_equal_those_on_one_device():
    model, batch = decoder(SPARSE, "nested"), tokens(Axis("batch", 8))
    direction = random_like(model, 1)

    def step(model, batch, direction):
        return ghost.grad_dot(model, token_means, batch, direction=direction)

    gradients, alone = eqx.filter_jit(step)(model, batch, direction)
    hybrid = MeshConfig({"replica": 2, "data": 4}, {"batch": ["replica", "data"]})
    mesh = Partitioning.of(hybrid, jax.devices())
    with mesh.activations():
        shares = mesh.shard_weights(model), mesh.shard_batch(batch), mesh.shard_weights(direction)
        of_mesh, found = eqx.filter_jit(step)(*shares)
    for path, score in alone.scores.items():
        largest = np.abs(score.array).max()
        np.testing.assert_allclose(found.scores[path].array, score.array, rtol=0, atol=1e-5 * largest)
    assert_close(of_mesh, gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_weights_within_a_shard_map_over_positions_are_scored(check_vma):
    x, weight = jax.random.normal(jax.random.key(0), (4, 8, 3)), jnp.eye(3) + 0.1
    mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
    run = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    positions = P(None, "model")

    def losses(weight, x):
        product = run(lambda w, x: jnp.tanh(x @ w), in_specs=(P(), positions), out_specs=positions)
        reduced = run(
            lambda w, x: jax.lax.psum(jnp.tanh(x @ w) @ w.T, "model"),
            in_specs=(positions, P()),
            out_specs=P(),
        )
        parts = jnp.concatenate([weight, weight[:, :1]], 1)
        return jnp.sum(reduced(parts, product(weight, x) @ weight), (1, 2))

    direction = jax.random.normal(jax.random.key(1), (3, 3))
    _, found = eqx.filter_jit(ghost.grad_dot)(weight, losses, x, direction=direction)
    expected = jax.jit(lambda: jax.jvp(lambda weight: losses(weight, x), (weight,), (direction,))[1])()
    np.testing.assert_allclose(found.total.array, expected, rtol=1e-4, atol=1e-4)
