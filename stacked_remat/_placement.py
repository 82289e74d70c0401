"""Moving arrays between device and host memory from inside a compiled program.

The moves are annotations in the graph: XLA turns them into asynchronous copies on accelerators. On the CPU
both spaces are the same memory and the moves have no effect, so programs with offloading run everywhere.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax


def to_host(tree: Any) -> Any:
    """Move every array of `tree` to host memory, keeping its sharding."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: Any) -> Any:
    """Move every array of `tree` to device memory, keeping its sharding."""
    return jax.device_put(tree, jax.memory.Space.Device)


_compiled_for: contextvars.ContextVar[str | None] = contextvars.ContextVar("_compiled_for", default=None)


def platform() -> str:
    """The kind of device that the program being traced is for: `"cpu"`, `"cuda"`, `"tpu"`, ..."""
    name = _compiled_for.get() or jax.default_backend()
    return "cuda" if name == "gpu" else name


@contextlib.contextmanager
def compiled_for(name: str) -> Iterator[None]:
    """Trace for a platform other than the one that is attached."""
    token = _compiled_for.set(name)
    try:
        yield
    finally:
        _compiled_for.reset(token)
