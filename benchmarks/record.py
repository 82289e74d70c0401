"""Times, memory and comparisons of programs, and results with the versions of what they
were made with.
"""

import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from stacked_remat.memory import DoesNotFit, MemoryReport
from stacked_remat.memory._call import trace_call

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
RESULTS = Path(__file__).parent / "results"

_NAMES = ("jax", "jaxlib", "equinox", "haliax", "flax", "jax-cuda13-plugin", "libtpu")
_NAMES += ("torch", "transformers", "marin-levanter")


def versions() -> dict[str, str]:
    """The installed versions of everything that is measured."""
    found = {}
    for name in _NAMES:
        # The version that is imported, if an environment also has remains of another.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def cpu_name() -> str:
    """The name of this machine's processor, as Linux has it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    return found[1] if found else platform.machine()


def write_results(path: Path, **fields: Any) -> None:
    """Write a JSON file of `fields` and versions, and its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    set_here = {
        key: value
        for key, value in os.environ.items()
        if key.startswith(("MALLOC_", "XLA_FLAGS"))
    }
    found = {
        "versions": versions(),
        **({"environment": set_here} if set_here else {}),
        **fields,
    }
    path.write_text(json.dumps(found, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Path) else vars(value)


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


def compiled_row(
    fn: Callable[..., Any], args: Sequence[Any], target: str
) -> dict[str, Any]:
    """The memory of a call as a row of results; the FLOPs and the reason alone, where
    the compiler refuses it.
    """
    traced = trace_call((fn, args, {}), target, ())
    try:
        return memory_row(traced.report())
    except (DoesNotFit, jax.errors.JaxRuntimeError) as error:
        reason = str(error).splitlines()[0]
        return {"matmul_flops": traced.flops.matmul, "refused": reason}


def allocate_as_needed() -> None:
    """Let this process and its children allocate GPU memory as needed, not most of it
    at the start.

    Otherwise peaks of allocated memory mean nothing, and two processes do not fit on
    one GPU. Call it before JAX uses a device.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def in_a_process(fn: Callable[..., T], *args: Any) -> T:
    """The result of a call in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(fn, *args).result()


def timed(
    run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of a call, whose result is waited for."""
    began = clock()
    jax.block_until_ready(run())
    return clock() - began


def profiled(run: Callable[[], Any]) -> Counter[str]:
    """Seconds by the names of a GPU's kernels, or of a CPU's operations, as JAX's
    profiler has them.
    """
    took: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events if re.search("XLA|^Stream", line.name) else ():
                    took[event.name] += event.duration_ns / 1e9
    return took


def matmul_peak(size: int = 8_192) -> float:
    """Measured FLOP/s of square bf16 matrix products, ten at a time to hide the cost of
    launches.
    """
    # Random, because the rate depends on the values, and zeros are faster.
    a, b = (
        jax.random.normal(key, (size, size), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0))
    )
    product = jax.jit(lambda a, b: a @ b)
    product(a, b).block_until_ready()
    return (
        20
        * size**3
        / min(timed(lambda: [product(a, b) for _ in range(10)]) for _ in range(3))
    )


def timed_in_turn(
    runs: Mapping[K, Callable[[], Any]], rounds: int
) -> dict[K, list[float]]:
    """Seconds of programs that have run before, each once per round, so that a slow
    machine slows all.
    """
    seconds: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(timed(run))
    return seconds


def median_ratio(seconds: Sequence[float], to: Sequence[float]) -> float:
    """The median of each round's ratio."""
    return statistics.median(np.divide(seconds, to).tolist())


def check_close(name: str, found: Any, expected: Any, tolerance: float) -> None:
    """Compare each array of a tree with the one that is expected, by the norm of their
    difference.

    Raises:
        ArithmeticError: they differ by more than `tolerance` times the norm of the
            expected one.
    """
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(found),
        jax.tree.leaves(expected),
        strict=True,
    )
    for (path, leaf), wanted in pairs:
        leaf, wanted = (np.asarray(each, np.float32) for each in (leaf, wanted))
        off = float(np.linalg.norm(leaf - wanted) / max(np.linalg.norm(wanted), 1e-30))
        if not off <= tolerance:
            raise ArithmeticError(
                f"{name}{jax.tree_util.keystr(path)}: off by {off:.2g} of its norm"
            )
