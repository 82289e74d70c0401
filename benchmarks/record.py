"""Times programs, and writes the results of benchmarks with the versions of what they ran with."""

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from stacked_remat.memory import MemoryReport

K = TypeVar("K")
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


def timed_in_turn(runs: Mapping[K, Callable[[], Any]], rounds: int) -> dict[K, list[float]]:
    """Seconds of programs that have run before, each once per round, so that a slow machine slows all."""
    seconds: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - began)
    return seconds


def print_allocated() -> None:
    """Print the peak of bytes that this process allocated on its device, for `allocated_alone`."""
    print(json.dumps((jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")))


def allocated_alone(module: str, arguments: Sequence[str]) -> int | None:
    """What a benchmark prints last in a process of its own; None if it fails."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
