"""The compilers for devices that are not attached, with which tests marked `target`
run.

`pytest.mark.target("cuda")` and `pytest.mark.target("tpu")` are for tests that compile
for a GPU or a TPU: `make memory` runs these alone. With `recorded=True` they expect
what `benchmarks/results` holds. Another version of XLA schedules programs in another
way, so they run with that of the results.
"""

import functools
import importlib.util
import json
from collections.abc import Collection, Iterable
from importlib.metadata import version
from typing import Any

import pytest

from benchmarks.record import RESULTS

PLUGINS = {"cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin"), "tpu": ("libtpu",)}
h200 = pytest.mark.target("cuda", recorded=True)
ON_H200 = pytest.param("h200", marks=h200)
ON_V5P = pytest.param("v5p", marks=pytest.mark.target("tpu", recorded=True))


def on_both(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Parameters of a target and a name, for an H200 and a TPU v5p.

    XLA takes ten times as long to compile for a TPU, so there the names that are not in
    `quick` are marked slow.
    """
    found = []
    for name in names:
        found.append(pytest.param("h200", name, marks=ON_H200.marks))
        marks = [*ON_V5P.marks]
        if name not in quick:
            marks.append(pytest.mark.slow)
        found.append(pytest.param("v5p", name, marks=marks))
    return found


@functools.cache
def recorded(result: str, *keys: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The rows of a file of results that were not refused, by their values of these
    keys.
    """
    rows = json.loads((RESULTS / f"{result}.json").read_text())["rows"]
    return {
        tuple(row[key] for key in keys): row for row in rows if "refused" not in row
    }


def why_not(
    plugins: tuple[str, ...], recorded: bool = False, installed: str = version("jaxlib")
) -> str:
    """Why nothing can be compiled by the plugins or compared with what was; empty if it
    can.
    """
    if not any(map(importlib.util.find_spec, plugins)):
        return f"{' or '.join(plugins)} is not installed"
    of_results = json.loads((RESULTS / "stack_memory_h200.json").read_text())[
        "versions"
    ]["jaxlib"]
    if not recorded or installed == of_results:
        return ""
    return f"the figures are of jaxlib {of_results}, not {installed}"
