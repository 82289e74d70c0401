"""Writes the results of benchmarks, with the versions of what they ran with."""

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

from stacked_remat.memory import MemoryReport

RESULTS = Path(__file__).parent / "results"

_NAMES = ("jax", "jaxlib", "equinox", "haliax", "flax", "jax-cuda13-plugin", "libtpu")


def versions() -> dict[str, str]:
    """The installed versions of everything that is measured."""
    found = {}
    for name in _NAMES:
        try:
            # The version that is imported, if an environment also has remains of another.
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_results(path: Path, **fields: Any) -> None:
    """Write a JSON file of `fields` and versions, and its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"versions": versions(), **fields}, indent=1) + "\n")


def allocate_as_needed() -> None:
    """Let this process and its children allocate GPU memory as needed, not most of it at the start.

    Otherwise peaks of allocated memory mean nothing, and two processes do not fit on one GPU. Call it before
    JAX uses a device.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def memory_row(found: MemoryReport) -> dict[str, Any]:
    """A report as a row of results, in bytes, FLOPs and seconds."""
    return {
        "arguments": found.arguments,
        "outputs": found.outputs,
        "temporaries": found.temporaries,
        "host": found.host.total,
        "host_temporaries": found.host.temporaries,
        "total": found.total,
        "matmul_flops": found.flops.matmul,
        "flops_exact": found.flops.exact,
        "compile_seconds": round(found.compile_seconds, 1),
    }
