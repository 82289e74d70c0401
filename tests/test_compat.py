"""`stacked_remat._compat` and `_hijax`: what a version of JAX lacks is there."""

import operator

import jax
import jax.core
import jax.numpy as jnp
import pytest

from stacked_remat import ScanCheckpointPolicy, checkpoint_name, fold, tiled

from .blocks import assert_close


def test_haliax_finds_constant_dimensions():
    (symbolic,) = jax.export.symbolic_shape("n")
    assert [*map(jax.core.is_constant_dim, (3, symbolic))] == [True, False]  # pyright: ignore[reportAttributeAccessIssue]


def _with_reference(carry, weight):
    reference = jax.new_ref(carry)
    reference[...] *= weight
    return reference[...]


def _with_callback(carry, weight):
    jax.debug.callback(lambda _: None, carry)
    return carry * weight


@pytest.mark.parametrize("layer", [operator.mul, _with_reference, _with_callback])
def test_a_sweep_lies_in_a_scan_of_a_checkpoint(layer):
    run = fold(layer, 3, remat="nested")
    twice = jax.checkpoint(
        lambda x: jax.lax.scan(
            lambda carry, _: (run(carry, jnp.arange(2.0, 5)), None), x, None, 2
        )[0]
    )
    assert jax.jit(jax.grad(twice))(1.0) == 24.0**2


def test_a_hessian_product_in_a_batch_of_a_checkpointed_scan_of_tiles():
    def value(x, weights, remat, total):
        def layer(x, weight):
            hidden = checkpoint_name(jnp.sin(x * weight), "hidden")
            return x + hidden * total(hidden)

        return jnp.sum(fold(layer, 3, remat=remat, unroll=2)(x, weights) ** 2)

    def total(hidden):
        return jnp.sum(jnp.cos(hidden) * hidden)

    def products(*how):
        gradient = jax.grad(
            lambda x: value(x, jnp.linspace(0.1, 1, 12).reshape(3, 4), *how)
        )
        return jax.jit(jax.vmap(lambda x: jax.jvp(gradient, (x,), (jnp.cos(x),))[1]))(
            jnp.eye(2, 4)
        )

    policy = ScanCheckpointPolicy(save_carries=False, save_block_internals=["hidden"])
    assert_close(
        products(policy, tiled(total, 0, tiles=2, reduce="sum")),
        products(False, total),
        1e-4,
    )
