"""A check that a run's arrays fit in memory, before any of them is made."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from ..memory._table import readable_bytes
from .array_layout import arrays_by_name, is_key
from .config_error import ConfigError

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_fits(parts: Mapping[str, Any], fix: str, *, limit: int | None = None) -> None:
    """Refuses arrays that need more memory than there is; allocates nothing.

    Args:
        parts: trees that are held at the same time, by their names in the error: arrays, or shapes with or
            without a sharding.
        fix: the last sentence of the error: what to do.
        limit: bytes of one device; by default of the devices here. CPU devices share one memory.

    Raises:
        ConfigError: says what each part takes, and how much memory there is.
    """
    device = jax.local_devices()[0]
    shared = limit is None and device.platform == "cpu"
    limit = memory_bytes(device) if limit is None else limit
    arrays = [(part, *item) for part, tree in parts.items() for item in arrays_by_name(tree).items()]
    sizes = dict.fromkeys(parts, 0)
    for part, _, array in arrays:
        sizes[part] += _bytes(array, shared)
    if limit is None or sum(sizes.values()) <= limit:
        return
    shown = ", ".join(f"{name} {readable_bytes(size)}" for name, size in sizes.items() if size)
    _, name, largest = max(arrays, key=lambda item: _bytes(item[2], shared))
    where = "this machine" if shared else "a device"
    raise ConfigError(
        f"This can't fit: it takes at least {readable_bytes(sum(sizes.values()))} of memory ({shown}), and "
        f"{where} has {readable_bytes(limit)}. The largest array is {name}, {largest.dtype} of "
        f"{' x '.join(f'{size:,}' for size in largest.shape)}. {fix}"
    )


def memory_bytes(device: Any) -> int | None:
    """Bytes of memory of a device; for a CPU, of the machine with its swap. None if not known."""
    statistics = device.memory_stats()
    if statistics and "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    return _machine_bytes() if device.platform == "cpu" else None


def _machine_bytes() -> int | None:
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    for path in map(Path, _CGROUP_LIMITS):  # of a container
        if path.exists() and (text := path.read_text(encoding="ascii").strip()).isdigit():
            physical = min(physical, int(text))
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text(encoding="ascii").splitlines() if meminfo.exists() else []
    return physical + sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal:"))


def _bytes(array: Any, all_devices: bool) -> int:
    """The bytes of an array, or of its shape, on one device, or on all of this process."""
    if is_key(array):
        return 0
    shape, copies, sharding = array.shape, 1, getattr(array, "sharding", None)
    if sharding is not None:
        shape = sharding.shard_shape(shape)
        copies = len(sharding.addressable_devices) if all_devices else 1
    return math.prod(shape) * array.dtype.itemsize * copies
