"""JAX's own checkpoint policies as what is saved of a layer's internals."""

import contextlib

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import BlockSeq, ScanCheckpointPolicy, Stacked, fold, memory

from .blocks import PlainBlock

Layers = hax.Axis("layers", 7)
KEPT = jax.checkpoint_policies
DOTS = KEPT.dots_saveable
OFFLOADED_DOTS = KEPT.offload_dot_with_no_batch_dims("device", "pinned_host")
X, WEIGHTS = np.ones((3, 4), np.float32), np.linspace(0.1, 0.5, 7 * 16, dtype=np.float32).reshape(7, 4, 4)
PRODUCT = 2 * 3 * 4 * 4  # FLOPs of one product of a layer, which makes two

POLICIES = {  # and the matrix products of forward and backward, a layer: 2 and 4 where none is computed again
    "dots": (DOTS, 6),
    "no batch": (KEPT.dots_with_no_batch_dims_saveable, 6),
    "either": (KEPT.save_from_both_policies(DOTS, KEPT.save_only_these_names("a")), 6),
    "offloaded dots": (OFFLOADED_DOTS, 6),
    "everything": (KEPT.everything_saveable, 6),
    "nothing": (KEPT.nothing_saveable, 8),
    "names": (KEPT.save_only_these_names("a"), 8),
    "offloaded carries": (ScanCheckpointPolicy(save_carries="offload", save_block_internals=DOTS), 6),
    "nested": (ScanCheckpointPolicy(nested=True, save_block_internals=DOTS), 8),
    "nested and offloaded": (
        ScanCheckpointPolicy(nested=True, save_carries="offload", save_block_internals=DOTS),
        8,
    ),
}


def layer(x, weight):
    return jnp.sin(jnp.sin(x @ weight) @ weight)


def gradient(remat):
    return jax.jit(jax.grad(lambda weights: fold(layer, Layers, remat=remat)(X, weights).sum()))


@pytest.mark.parametrize("policy, products", POLICIES.values(), ids=POLICIES)
def test_are_obeyed(policy, products):
    np.testing.assert_allclose(gradient(policy)(WEIGHTS), gradient(False)(WEIGHTS), rtol=1e-5)
    flops = memory.report(gradient(policy), WEIGHTS).flops
    assert flops.matmul <= products * Layers.size * PRODUCT
    assert flops.matmul > (products - 2) * Layers.size * PRODUCT


def test_serve_stacks_of_both_kinds():
    keys = jax.random.split(jax.random.key(0), Layers.size)
    x = jnp.ones(4)
    for Stack in (Stacked, BlockSeq):
        stack = Stack.init(Layers, PlainBlock, remat=DOTS)(4, key=keys)
        assert stack.remat == ScanCheckpointPolicy(save_block_internals=DOTS) and hash(stack.remat)
        np.testing.assert_allclose(stack.fold(x), stack.fold(x, remat=False), rtol=1e-6)


def test_are_shown_by_their_names():
    assert "jax.checkpoint_policies.dots_saveable" in repr(ScanCheckpointPolicy(save_block_internals=DOTS))
    assert ScanCheckpointPolicy(save_block_internals=KEPT.everything_saveable) == ScanCheckpointPolicy(
        save_block_internals=True
    )


@pytest.mark.parametrize("wrong", [jax.checkpoint, lambda: 1, print, ScanCheckpointPolicy, PlainBlock])
def test_other_functions_are_refused(wrong):
    with pytest.raises(TypeError, match="not a checkpoint policy.*dots_saveable"):
        fold(layer, Layers, remat=wrong)


def test_one_that_offloads_is_refused_where_internals_live_shortly():
    policy = ScanCheckpointPolicy(nested=True, save_block_internals=OFFLOADED_DOTS)
    with pytest.raises(ValueError, match='save_carries="offload"'):
        jax.eval_shape(gradient(policy), WEIGHTS)


@contextlib.contextmanager
def remat3():
    before = jax.config.jax_remat3  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_remat3", True)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)


@pytest.mark.parametrize("policy", [DOTS, ScanCheckpointPolicy(nested=True, save_block_internals=DOTS)])
def test_what_remat3_cannot_obey_is_refused_under_it(policy):
    with remat3(), pytest.raises(ValueError, match="JAX_REMAT3=1 keeps values by name alone.*dots_saveable"):
        jax.eval_shape(gradient(policy), WEIGHTS)


def test_names_are_obeyed_under_remat3():
    with remat3():
        found = gradient(KEPT.save_only_these_names("a"))(WEIGHTS)
    np.testing.assert_allclose(found, gradient(False)(WEIGHTS), rtol=1e-5)
