"""Every test runs on 8 virtual CPU devices, with strict dtype and rank promotion, and warnings are errors."""

import os
from collections.abc import Iterator

# An accelerator's plugin may be installed on a machine that has no such accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling takes longer than any deadline, and CI must not fail on an example that no one can repeat.
hypothesis.settings.register_profile("house", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("house")


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """JAX's own promotion rules, for a test that runs code written for them.

    Haliax is strict almost everywhere. Its `LayerNorm` and `RmsNorm` are not where the dtype of their weights
    differs from the input's, nor are some cases of its own test suite.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
