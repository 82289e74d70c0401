"""`stacked_remat._compat`: what a version of JAX lacks is there."""

import jax
import jax.core
import jax.numpy as jnp

from stacked_remat import fold


def test_haliax_finds_constant_dimensions():
    (symbolic,) = jax.export.symbolic_shape("n")
    assert [*map(jax.core.is_constant_dim, (3, symbolic))] == [True, False]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_sweep_lies_in_a_scan_of_a_checkpoint():
    run = fold(lambda carry, weight: carry * weight, 3, remat="nested")
    twice = jax.checkpoint(
        lambda x: jax.lax.scan(lambda carry, _: (run(carry, jnp.arange(2.0, 5)), None), x, None, 2)[0]
    )
    assert jax.jit(jax.grad(twice))(1.0) == 24.0**2
