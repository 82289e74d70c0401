"""A check that a run's arrays fit in memory, before any of them is made."""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from .._placement import is_on_host
from ..memory._table import readable_bytes
from .array_layout import arrays_by_name, is_key
from .errors import ConfigError

_CGROUP = "/sys/fs/cgroup/memory"  # of a container


def check_fits(parts: Mapping[str, Any], fix: str, *, limit: int | None = None) -> None:
    """Refuses arrays that need more memory than a device has; allocates nothing.

    Args:
        parts: trees that are held at the same time, by their names in the error: arrays, or shapes with or
            without a sharding. Those in host memory count only where devices share that memory.
        fix: the last sentence of the error: what to do.
        limit: bytes of one device; by default of the devices here. CPU devices share one memory.

    Raises:
        ConfigError: says what each part takes, and how much memory there is.
    """
    device = jax.local_devices()[0]
    shared = limit is None and device.platform == "cpu"
    limit = memory_bytes(device) if limit is None else limit
    found = _sizes(parts, lambda array: _bytes(array, shared) if shared or not is_on_host(array) else 0)
    _check(found, "memory", "this machine has" if shared else "a device has", limit, fix)


def check_host_fits(parts: Mapping[str, Any], fix: str, *, available: int | None = None) -> None:
    """Refuses arrays in host memory that need more of it than is available; allocates nothing.

    Args:
        parts: as in `check_fits`; those in device memory do not count.
        fix: the last sentence of the error: what to do.
        available: bytes for this process; by default what the machine and its container have left.

    Raises:
        ConfigError: says what each part takes, and how much memory is available.
    """
    found = _sizes(parts, lambda array: _bytes(array, True) if is_on_host(array) else 0)
    available = available_host_bytes() if available is None else available
    _check(found, "host memory", "this process can take", available, fix)


def _sizes(parts: Mapping[str, Any], count: Callable[[Any], int]) -> list[tuple[str, str, Any, int]]:
    """The part, name, array and bytes of each array."""
    named = ((part, *item) for part, tree in parts.items() for item in arrays_by_name(tree).items())
    return [(part, name, array, count(array)) for part, name, array in named]


def _check(found: list[tuple[str, str, Any, int]], kind: str, has: str, limit: int | None, fix: str) -> None:
    total = sum(size for *_, size in found)
    if limit is None or total <= limit:
        return
    sizes: dict[str, int] = {}
    for part, _, _, size in found:
        sizes[part] = sizes.get(part, 0) + size
    shown = ", ".join(f"{name} {readable_bytes(size)}" for name, size in sizes.items() if size)
    _, name, largest, _ = max(found, key=lambda entry: entry[-1])
    raise ConfigError(
        f"This can't fit: it takes at least {readable_bytes(total)} of {kind} ({shown}), and {has} "
        f"{readable_bytes(limit)}. The largest array is {name}, {largest.dtype} of "
        f"{' x '.join(f'{size:,}' for size in largest.shape)}. {fix}"
    )


def memory_bytes(device: Any) -> int | None:
    """Bytes of memory of a device; for a CPU, of the machine with its swap. None if not known."""
    statistics = device.memory_stats()
    if statistics and "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    return _machine_bytes() if device.platform == "cpu" else None


def available_host_bytes() -> int | None:
    """Bytes of host memory that a process can still take, without swap; None if not known."""
    left = [found for found in (_meminfo("MemAvailable"),) if found is not None]
    most, now = _number(f"{_CGROUP}.max"), _number(f"{_CGROUP}.current")
    if most is not None and now is not None:
        left.append(most - now + (_entry(f"{_CGROUP}.stat", "inactive_file") or 0))  # cached files give way
    return max(min(left), 0) if left else None


def _machine_bytes() -> int | None:
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    limit = _number(f"{_CGROUP}.max")
    return min(physical, physical if limit is None else limit) + (_meminfo("SwapTotal") or 0)


def _meminfo(name: str) -> int | None:
    kibibytes = _entry("/proc/meminfo", f"{name}:")
    return None if kibibytes is None else kibibytes * 1024


def _entry(file: str, name: str) -> int | None:
    """The number of a line that begins with a name."""
    path = Path(file)
    lines = map(str.split, path.read_text(encoding="ascii").splitlines() if path.exists() else [])
    return next((int(words[1]) for words in lines if words[:1] == [name]), None)


def _number(file: str) -> int | None:
    path = Path(file)
    text = path.read_text(encoding="ascii").strip() if path.exists() else ""
    return int(text) if text.isdigit() else None


def _bytes(array: Any, all_devices: bool) -> int:
    """The bytes of an array, or of its shape, on one device, or on all of this process."""
    if is_key(array):
        return 0
    shape, copies, sharding = array.shape, 1, getattr(array, "sharding", None)
    if sharding is not None:
        shape = sharding.shard_shape(shape)
        copies = len(sharding.addressable_devices) if all_devices else 1
    return math.prod(shape) * array.dtype.itemsize * copies
