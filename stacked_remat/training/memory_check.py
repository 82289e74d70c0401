"""A check that a run's arrays fit in memory, before any of them is made."""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from .._memory_spaces import is_on_host
from ..memory import readable_bytes
from .array_layout import arrays_by_name
from .errors import ConfigError

# Of a container, in bytes; of Linux, in kiB
_CGROUP = "/sys/fs/cgroup/memory"
_MEMORY = "/proc/meminfo"


def check_fits(parts: Mapping[str, Any], fix: str, *, limit: int | None = None) -> None:
    """Refuses arrays, or shapes, that need more memory than a device has (`limit`);
    allocates nothing.

    `parts` are trees that are held at the same time, by their names in the ConfigError,
    which ends with `fix`. Arrays in host memory count only on CPU devices, which share
    one memory.
    """
    device = jax.local_devices()[0]
    # Virtual devices of a CPU share one memory, so all their copies count.
    shared = limit is None and device.platform == "cpu"
    limit = memory_bytes(device) if limit is None else limit

    def counted(array: Any) -> int:
        return 0 if is_on_host(array) and not shared else _bytes(array, shared)

    _check(
        parts,
        counted,
        limit,
        "memory",
        "this machine has" if shared else "a device has",
        fix,
    )


def check_host_fits(
    parts: Mapping[str, Any], fix: str, *, available: int | None = None
) -> None:
    """`check_fits` for the arrays in host memory; `available` is by default what the
    machine has left.
    """
    available = available_host_bytes() if available is None else available
    counted = lambda array: _bytes(array, True) if is_on_host(array) else 0  # noqa: E731
    _check(parts, counted, available, "host memory", "this process can take", fix)


def _check(
    parts: Mapping[str, Any],
    count: Callable[[Any], int],
    limit: int | None,
    kind: str,
    has: str,
    fix: str,
) -> None:
    arrays = {name: arrays_by_name(tree) for name, tree in parts.items()}
    sizes = {part: sum(map(count, own.values())) for part, own in arrays.items()}
    total = sum(sizes.values())
    if limit is None or total <= limit:
        return
    listed = ", ".join(
        f"{name} {readable_bytes(size)}" for name, size in sizes.items() if size
    )
    named = [entry for own in arrays.values() for entry in own.items()]
    name, largest = max(named, key=lambda entry: count(entry[1]))
    raise ConfigError(
        f"This can't fit: it takes at least {readable_bytes(total)} of {kind}"
        f" ({listed}), and {has} {readable_bytes(limit)}. The largest array is {name},"
        f" {largest.dtype} of {' x '.join(f'{size:,}' for size in largest.shape)}."
        f" {fix}"
    )


def memory_bytes(device: Any) -> int | None:
    """Bytes of memory of a device; for a CPU, of the machine with its swap. None if not
    known.
    """
    statistics = device.memory_stats()
    if statistics and "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    if device.platform != "cpu":
        return None
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    swap = 1024 * (number_in(_MEMORY, "SwapTotal:") or 0)
    # A container may have less than its machine.
    return min(physical, number_in(f"{_CGROUP}.max") or physical) + swap


def available_host_bytes() -> int | None:
    """Bytes of host memory that a process can still take, without swap; None if not
    known.
    """
    free = number_in(_MEMORY, "MemAvailable:")
    most = number_in(f"{_CGROUP}.max")
    left = [] if free is None else [1024 * free]
    if most is not None:  # cached files give way
        files = number_in(f"{_CGROUP}.stat", "inactive_file") or 0
        left.append(most - (number_in(f"{_CGROUP}.current") or 0) + files)
    return max(min(left), 0) if left else None


def number_in(file: str, *name: str) -> int | None:
    """The number in a file, or behind a name at the beginning of one of its lines; None
    if there is none.
    """
    lines = (
        Path(file).read_text(errors="replace").splitlines()
        if Path(file).exists()
        else []
    )
    found = [
        words[len(name)]
        for words in map(str.split, lines)
        if tuple(words[: len(name)]) == name
    ]
    return int(found[0]) if found and found[0].isdigit() else None


def _bytes(array: Any, all_devices: bool) -> int:
    """The bytes of an array, or of its shape, on one device, or on all of this
    process.
    """
    shape = array.shape
    copies = 1
    sharding = getattr(array, "sharding", None)
    # A device has its shard; a CPU that plays several devices has all of them.
    if sharding is not None:
        shape = sharding.shard_shape(shape)
        copies = len(sharding.addressable_devices) if all_devices else 1
    return math.prod(shape) * array.dtype.itemsize * copies
