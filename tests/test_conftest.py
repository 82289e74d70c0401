"""The settings of conftest.py hold in every test."""

import os
import warnings

import hypothesis
import jax
import jax.numpy as jnp
import pytest


def test_there_are_eight_devices():
    assert len(jax.devices("cpu")) == 8


def test_mixing_dtypes_or_ranks_is_an_error():
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.add(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32))
    with pytest.raises(ValueError, match="numpy_rank_promotion"):
        jnp.add(jnp.ones((2, 3)), jnp.ones(3))


def test_a_warning_is_an_error():
    with pytest.raises(UserWarning, match="an unexpected warning"):
        warnings.warn("an unexpected warning", stacklevel=1)


def test_standard_promotion_is_available(standard_promotion):
    assert (jnp.ones((2, 3), jnp.bfloat16) + jnp.ones(3, jnp.float32)).dtype == jnp.float32


def test_hypothesis_has_no_deadline_and_is_deterministic_in_ci():
    settings = hypothesis.settings.get_profile("stacked_remat")
    assert settings.deadline is None
    assert settings.derandomize == bool(os.environ.get("CI"))
