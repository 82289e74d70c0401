"""Every test runs on 8 virtual CPU devices, with strict dtype and rank promotion, and warnings are errors."""

import os
from collections.abc import Iterator

# An accelerator's plugin may be installed where the accelerator is missing.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation exceeds any deadline, and a failure in CI must be reproducible.
hypothesis.settings.register_profile("stacked_remat", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("stacked_remat")


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """JAX's standard promotion, for code that depends on it.

    Haliax's `LayerNorm` and `RmsNorm` do where the dtypes of weights and input differ.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
