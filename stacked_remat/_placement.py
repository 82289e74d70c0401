"""Moving arrays between device and host memory from inside a compiled program.

The moves are annotations in the graph: XLA turns them into asynchronous copies on accelerators. On the CPU
both spaces are the same memory and the moves have no effect, so programs with offloading run everywhere.
"""

from typing import Any

import jax


def to_host(tree: Any) -> Any:
    """Move every array of `tree` to host memory, keeping its sharding."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: Any) -> Any:
    """Move every array of `tree` to device memory, keeping its sharding."""
    return jax.device_put(tree, jax.memory.Space.Device)
