"""`stacked_remat._compat`: what a version of JAX lacks is restored, and what it has is left alone."""

import jax
import jax.core
import pytest

from stacked_remat import _compat


def test_what_jax_has_is_left_alone(monkeypatch):
    marker = object()
    monkeypatch.setattr(jax.core, "is_constant_dim", marker, raising=False)
    _compat.restore_is_constant_dim()
    assert jax.core.is_constant_dim is marker  # pyright: ignore[reportAttributeAccessIssue]


def test_what_is_missing_is_restored(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(jax.core, "is_constant_dim", None, raising=False)
        patch.delattr(jax.core, "is_constant_dim")
        if hasattr(jax.core, "is_constant_dim"):
            pytest.skip("this JAX still has it, behind a deprecation")
        _compat.restore_is_constant_dim()
        (symbolic,) = jax.export.symbolic_shape("n")
        assert [*map(jax.core.is_constant_dim, (3, symbolic))] == [True, False]  # pyright: ignore[reportAttributeAccessIssue]
        del jax.core.is_constant_dim  # pyright: ignore[reportAttributeAccessIssue]
