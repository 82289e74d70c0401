"""Every test runs on eight virtual CPU devices, with strict dtype and rank promotion and warnings as errors."""

import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # an accelerator's plugin may be installed without its accelerator
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

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
    """JAX's own promotion rules, for a test that compares with code written for them.

    Haliax is strict almost everywhere; its `LayerNorm` and `RmsNorm` with weights of another dtype than the input, and
    some of its own tests, are not.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
