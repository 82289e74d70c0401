"""Every test runs on 8 virtual CPU devices, with strict dtype and rank promotion, and
warnings are errors.
"""

import functools
import gc
import os
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Imports and tracing make many objects, among which Python would look for cycles after
# every 700.
gc.set_threshold(50_000, 20, 20)

# An accelerator's plugin may be installed where the accelerator is missing.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# The flags of `make test` also leave out emitters that take half of XLA's time; jaxlib
# 0.12 always has them.
_QUICK = "--xla_backend_optimization_level=0" in os.environ["XLA_FLAGS"]
if _QUICK and version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402

from stacked_remat.memory._call import TracedCall  # noqa: E402
from tests.recorded_on import PLUGINS, why_not  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation exceeds any deadline, and a failure in CI must be reproducible.
hypothesis.settings.register_profile(
    "stacked_remat", deadline=None, derandomize=bool(os.environ.get("CI"))
)
hypothesis.settings.load_profile("stacked_remat")

_make_ir_context = mlir.make_ir_context


@functools.cache
def _ir_context(thread: int) -> Any:
    return _make_ir_context()


# For each program that JAX compiles it makes a context of MLIR with all dialects, which
# takes a third of the time of a small program. The tests of a module share theirs.
if _QUICK:
    mlir.make_ir_context = lambda: _ir_context(threading.get_ident())


_MOST_MAPS = 40_000  # what one module adds is less than half of that


def _memory_maps() -> int:
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


@pytest.fixture(autouse=True, scope="module")
def earlier_objects_are_not_collected() -> None:
    """Python's garbage collector looks only at what the tests of one module make.

    JAX keeps what it traces, so late in a run each `gc.collect()` of a command, or of
    JAX's search for leaked tracers, would take more than a second. It also keeps what
    it compiles: every program takes some memory maps, of which Linux allows a process
    65,530 by default, and XLA crashes where there are no more.
    """
    _ir_context.cache_clear()
    if _memory_maps() > _MOST_MAPS:
        gc.unfreeze()
        jax.clear_caches()
    gc.collect()
    gc.freeze()


# Files of which a test starts processes, or runs a whole page.
_LONGEST = {
    "test_launchers.py",
    "test_processes.py",
    "test_readme.py",
    "test_run_in_stages.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest tests come first: at the end one leaves the other cores idle."""
    items.sort(key=lambda item: item.path.name not in _LONGEST)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that compile for devices whose compiler is not installed."""
    for mark in item.iter_markers("target"):
        (plugin,) = mark.args
        if reason := why_not(PLUGINS[plugin], **mark.kwargs):
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def reports_are_kept(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `KEPT_REPORTS` a program that was compiled for a GPU or a TPU is not
    compiled again.
    """
    folder = os.environ.get("KEPT_REPORTS")
    if folder and request.node.get_closest_marker("target"):
        report = TracedCall.report
        monkeypatch.setattr(
            TracedCall, "report", lambda call, cache=None: report(call, cache or folder)
        )


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """JAX's standard promotion, for code that depends on it.

    Haliax's `LayerNorm` and `RmsNorm` do where the dtypes of weights and input differ.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
