"""Marks of tests that compile for devices that are not attached and expect what `benchmarks/results` holds.

Another version of XLA schedules programs in another way, so they run with that of the results.
"""

import importlib.util
import json
from importlib.metadata import version
from typing import Any

import pytest

from benchmarks.record import RESULTS


def why_not(plugins: tuple[str, ...], installed: str) -> str:
    """Why figures can't be compared with a version of jaxlib; empty if they can."""
    if not any(map(importlib.util.find_spec, plugins)):
        return f"{' or '.join(plugins)} is not installed"
    recorded = json.loads((RESULTS / "stack_memory_h200.json").read_text())["versions"]["jaxlib"]
    return "" if installed == recorded else f"the figures are of jaxlib {recorded}, not {installed}"


def _mark(*plugins: str) -> Any:
    reason = why_not(plugins, version("jaxlib"))
    return pytest.mark.skipif(bool(reason), reason=reason)


h200 = _mark("jax_cuda13_plugin", "jax_cuda12_plugin")
ON_H200, ON_V5P = pytest.param("h200", marks=h200), pytest.param("v5p", marks=_mark("libtpu"))
