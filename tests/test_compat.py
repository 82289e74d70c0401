"""`stacked_remat._compat`: what a version of JAX lacks is there."""

import jax
import jax.core

import stacked_remat as stacked_remat


def test_haliax_finds_constant_dimensions():
    (symbolic,) = jax.export.symbolic_shape("n")
    assert [*map(jax.core.is_constant_dim, (3, symbolic))] == [True, False]  # pyright: ignore[reportAttributeAccessIssue]
