"""JAX's own checkpoint policies choose which internals of a layer are saved."""

import contextlib

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import (
    BlockSeq,
    ScanCheckpointPolicy,
    Stacked,
    checkpoint,
    fold,
    memory,
)

from .blocks import PlainBlock, looped, quick_jit

Layers = hax.Axis("layers", 7)
KEPT = jax.checkpoint_policies
DOTS = KEPT.dots_saveable
OFFLOADED_DOTS = KEPT.offload_dot_with_no_batch_dims("device", "pinned_host")
X, WEIGHTS = (
    np.ones((3, 4), np.float32),
    np.linspace(0.1, 0.5, 7 * 16, dtype=np.float32).reshape(7, 4, 4),
)
PRODUCT = 2 * 3 * 4 * 4  # FLOPs of one product of a layer, which makes two

# With the matrix products of a layer, forward and backward: 2 + 4 where none is
# computed again.
POLICIES = {
    "dots": (DOTS, 6),
    "no batch": (KEPT.dots_with_no_batch_dims_saveable, 6),
    "either": (KEPT.save_from_both_policies(DOTS, KEPT.save_only_these_names("a")), 6),
    "offloaded dots": (OFFLOADED_DOTS, 6),
    "everything": (KEPT.everything_saveable, 6),
    "nothing": (KEPT.nothing_saveable, 8),
    "names": (KEPT.save_only_these_names("a"), 8),
    "offloaded carries": (
        ScanCheckpointPolicy(save_carries="offload", save_block_internals=DOTS),
        6,
    ),
    "nested": (ScanCheckpointPolicy(nested=True, save_block_internals=DOTS), 8),
    "nested and offloaded": (
        ScanCheckpointPolicy(
            nested=True, save_carries="offload", save_block_internals=DOTS
        ),
        8,
    ),
}


def layer(x, weight):
    return jnp.sin(jnp.sin(x @ weight) @ weight)


def gradient(remat):
    return jax.grad(lambda weights: fold(layer, Layers, remat=remat)(X, weights).sum())


@pytest.fixture(scope="module")
def expected():
    return quick_jit(gradient(False))(WEIGHTS)


def test_are_respected(expected):
    run = quick_jit(
        lambda weights: [gradient(policy)(weights) for policy, _ in POLICIES.values()]
    )
    for found in run(WEIGHTS):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    for name, (policy, products) in POLICIES.items():
        flops = memory.count_flops(jax.make_jaxpr(gradient(policy))(WEIGHTS))
        most = products * Layers.size * PRODUCT
        assert most - 2 * Layers.size * PRODUCT < flops.matmul <= most, name


def test_serve_stacks_of_both_kinds():
    keys = jax.random.split(jax.random.key(0), Layers.size)
    x = jnp.ones(4)
    for Stack in (Stacked, BlockSeq):
        stack = Stack.init(Layers, PlainBlock, remat=DOTS)(4, key=keys)
        assert stack.remat == ScanCheckpointPolicy(save_block_internals=DOTS) and hash(
            stack.remat
        )
        np.testing.assert_allclose(stack.fold(x), looped(stack, x), rtol=1e-5)


def test_are_shown_by_their_names():
    assert "jax.checkpoint_policies.dots_saveable" in repr(
        ScanCheckpointPolicy(save_block_internals=DOTS)
    )
    assert ScanCheckpointPolicy(
        save_block_internals=KEPT.everything_saveable
    ) == ScanCheckpointPolicy(save_block_internals=True)


@pytest.mark.parametrize("wrong", [jax.checkpoint, lambda: 1, print])
def test_other_functions_are_refused(wrong):
    with pytest.raises(TypeError, match="not a checkpoint policy.*dots_saveable"):
        fold(layer, Layers, remat=wrong)
    with pytest.raises(TypeError, match="got <class .*PlainBlock"):
        fold(layer, Layers, remat=PlainBlock)


def test_one_that_offloads_is_refused_with_nested():
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


@pytest.mark.parametrize(
    "policy", [DOTS, ScanCheckpointPolicy(nested=True, save_block_internals=DOTS)]
)
def test_what_remat3_does_not_support_is_refused_under_it(policy):
    with (
        remat3(),
        pytest.raises(
            ValueError, match="JAX_REMAT3=1 keeps values by name alone.*dots_saveable"
        ),
    ):
        jax.eval_shape(gradient(policy), WEIGHTS)


def test_names_are_respected_under_remat3(expected):
    with remat3():
        found = quick_jit(gradient(KEPT.save_only_these_names("a")))(WEIGHTS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_complex_values_are_kept_as_real_ones_are():
    Turns = hax.Axis("turns", 4)
    angles = jnp.arange(16.0).reshape(4, 2, 2)
    weights = jax.lax.complex(0.5 * jnp.cos(angles), 0.5 * jnp.sin(angles))
    both = KEPT.save_from_both_policies(DOTS, KEPT.save_only_these_names("any"))
    by_operation = [DOTS, KEPT.everything_saveable, both]

    def step(x, weight):
        # Real products are kept beside complex ones
        size = jnp.real(x) @ jnp.imag(weight)
        return x + jnp.tanh(x @ weight) + jax.lax.complex(jnp.sin(size), jnp.cos(size))

    def value(y):
        return jnp.sum(jnp.real(y) ** 2) + jnp.sum(jnp.sin(jnp.imag(y)))

    def derivative(run):
        return jax.grad(
            lambda weights: value(run(jnp.ones((2, 2), jnp.complex64), weights))
        )

    def loop(x, weights, step=step):
        for weight in weights:
            x = step(x, weight)
        return x

    ours = [
        lambda x, w, p=p: loop(x, w, checkpoint(step, save=p)) for p in by_operation
    ]
    for policy, cut in zip(
        by_operation, ({}, {"nested": True}, {"nested": 2}), strict=True
    ):
        ours.append(
            fold(
                step,
                Turns,
                remat=ScanCheckpointPolicy(save_block_internals=policy, **cut),
            )
        )
    expected, *found = jax.jit(lambda w: [derivative(run)(w) for run in (loop, *ours)])(
        weights
    )
    for result in found:
        np.testing.assert_allclose(
            result, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max()
        )
