"""Where the benchmarks leave what they found, and what they ran with."""

import importlib.metadata
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

from stacked_remat.memory import MemoryReport

RESULTS = Path(__file__).parent / "results"

_NAMES = ("jax", "jaxlib", "equinox", "haliax", "flax", "jax-cuda13-plugin", "libtpu")


def versions() -> dict[str, str]:
    """The versions of everything that is measured, as far as it is installed."""
    found = {}
    for name in _NAMES:
        try:
            # The one that is imported, where an environment also has what is left of another.
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def allocate_as_needed() -> None:
    """Let this process and its children take a GPU's memory as they need it, not most of it at the start.

    Peaks of allocated memory say something only then, and two processes fit on one GPU. Call it before JAX
    uses a device.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def memory_row(found: MemoryReport) -> dict[str, Any]:
    """What a report says, in bytes, FLOPs and seconds, as rows of results hold it."""
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


def peak_resident_bytes() -> int:
    """The most memory that this process has had resident so far.

    Linux hands the peak in `ru_maxrss` down to child processes, so there it is the kernel's own figure.
    """
    if (status := Path("/proc/self/status")).exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
