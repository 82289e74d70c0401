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

from .cases import SPARSE, decoder, random_like, token_means, tokens

P = PartitionSpec
DATA = P("data")

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


def on_each_device(devices, *specs, **options):
    mesh = jax.make_mesh((devices, 8 // devices), ("data", "model"), (AxisType.Auto,) * 2)
    return functools.partial(jax.shard_map, mesh=mesh, in_specs=specs[:-1], out_specs=specs[-1], **options)


@pytest.mark.parametrize("check_vma", [True, False])
def test_weights_within_and_after_a_shard_map_are_scored(check_vma):
    """Examples over one axis of the mesh; positions, or the weight, over the other."""
    x, weight = jax.random.normal(jax.random.key(0), (4, 8, 3)), jnp.eye(3) + 0.1
    pair = functools.partial(on_each_device, 2, check_vma=check_vma)
    alone = functools.partial(on_each_device, 4, check_vma=check_vma)

    def gathered(weight, x):
        whole = jax.lax.all_gather(weight, "data", tiled=True)[:3]
        return jnp.tanh(x.reshape(-1, 3) @ whole).reshape(x.shape)

    def losses(weight, x):
        x = pair(P(), P("data", "model"), P("data", "model"))(lambda w, x: jnp.tanh(x @ w))(weight, x)
        x = pair(DATA, DATA)(jnp.sin)(x) @ weight
        parts = jnp.concatenate([weight, weight[:, :1]], 1)
        x = pair(P(None, "model"), DATA, DATA)(lambda w, x: jax.lax.psum(jnp.tanh(x @ w) @ w.T, "model"))(
            parts, x
        )
        x = alone(DATA, DATA, DATA)(gathered)(parts.T, x)
        return jnp.sum(x, (1, 2))

    direction = jax.random.normal(jax.random.key(1), (3, 3))
    _, found = eqx.filter_jit(ghost.grad_dot)(weight, losses, x, direction=direction)
    expected = jax.jit(lambda: jax.jvp(lambda weight: losses(weight, x), (weight,), (direction,))[1])()
    np.testing.assert_allclose(found.total.array, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("devices", [2, 4])
def test_rows_of_other_devices_are_refused(devices):
    x, weight = jnp.ones((4, 3)), jnp.eye(3)

    def exchanged(weight, x):  # as experts that are divided over the devices which also divide the examples
        every = jax.lax.all_gather(x, "data", tiled=True)
        return jax.lax.psum_scatter(jnp.tanh(every @ weight), "data", tiled=True)

    def permuted(weight, x):
        one = jax.lax.ppermute(x, "data", [(i, (i + 1) % devices) for i in range(devices)])
        return one @ weight

    for apply in (exchanged, permuted):
        run = on_each_device(devices, P(), DATA, DATA)(apply)
        with pytest.raises(ghost.UnsupportedLeafError, match="which rows of the result are of which example"):
            ghost.grad_dot(weight, lambda w, x, run=run: jnp.sum(run(w, x), 1), x, direction=weight)


def test_rows_that_devices_divide_in_other_ways_are_refused():
    """Each computes, and gives gradients; which rows are of which example depends on the axes of the mesh."""
    x, weight = jax.random.normal(jax.random.key(0), (8, 3)), jnp.eye(3)
    run = functools.partial(on_each_device, 2)
    both, turned = P(("data", "model")), P(("model", "data"))

    def product(weight, x):
        return jnp.tanh(x @ weight)

    def added(weight, x, y):
        return jnp.tanh(x @ weight) + y

    def normalised(h):
        return h - jax.lax.pmean(jnp.mean(h, 0, keepdims=True), "data")

    refused = [
        lambda w, x: jnp.sum(run(P(), both, turned, check_vma=False)(product)(w, x), 1),
        lambda w, x: jnp.sum(run(P(), both, turned, both, check_vma=False)(added)(w, x, x), 1),
        lambda w, x: jnp.sum(run(P(), turned, both, both, check_vma=False)(added)(w, x, x), 1),
        lambda w, x: jnp.sum(run(both, turned, check_vma=False)(jnp.sin)(product(w, x)), 1),
        lambda w, x: jnp.sum(run(DATA, DATA, check_vma=False)(normalised)(product(w, x)), 1),
    ]

    def score(losses):
        jax.eval_shape(lambda: ghost.grad_dot(weight, losses, x, direction=weight)[1])

    score(lambda w, x: jnp.sum(run(turned, turned)(jnp.sin)(run(P(), both, both)(product)(w, x)), 1))
    for losses in refused:
        with pytest.raises(ghost.UnsupportedLeafError, match=r"^(the model meets|The loss of an example)"):
            score(losses)
