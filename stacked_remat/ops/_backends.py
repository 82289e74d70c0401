"""The choice among the backends of an operation: by name, or the first that supports
the call.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array

from .._memory_spaces import platform

K = TypeVar("K")
_DEVICES = {"cuda": "NVIDIA GPUs", "tpu": "TPUs"}
HALVES = (jnp.bfloat16, jnp.float16)


class UnsupportedCallError(ValueError):
    """An operation can't do what a call asks for on this device or mesh; the message
    names the fix.
    """


@dataclass(frozen=True, kw_only=True)
class Call:
    """What decides whether a backend supports a call."""

    dtype: Any
    # Of the device that the program is for: `"cuda"`, ...
    platform: str = field(default_factory=platform)
    # Over which the compiler partitions the program; 1 inside `jax.shard_map`
    devices: int = 1


@dataclass(frozen=True)
class Backend(Generic[K]):
    kernel: K
    platform: str | None = None  # None for all
    dtypes: tuple[Any, ...] = ()  # where it is for one platform
    # Besides these; None if it is supported
    why_not_call: Callable[[Any], str | None] = lambda call: None
    is_partitioned: bool = False  # whether the compiler divides it among devices

    def why_not(self, call: Call) -> str | None:
        if self.platform is None:
            return None
        if call.platform != self.platform:
            return (
                f"it runs on {_DEVICES[self.platform]}, and the program is for"
                f" {call.platform!r}"
            )
        if call.dtype not in self.dtypes:
            names = " and ".join(jnp.dtype(one).name for one in self.dtypes)
            return f"it takes {names}, not {call.dtype}"
        if reason := self.why_not_call(call):
            return reason
        if call.devices == 1 or self.is_partitioned:
            return None
        return (
            f"the compiler can't divide it among {call.devices} devices: call it inside"
            " jax.shard_map(..., check_vma=False)"
        )


_taken = ContextVar[dict[str, str] | None]("taken", default=None)


@contextlib.contextmanager
def backends_taken() -> Iterator[dict[str, str]]:
    """Collect which backends are taken by the operations that are traced within it.

    Yields:
        By operation and kind of call, such as `attention, window 128`, the backend, or
        several, and after it why not one of those before it on this platform. What JAX
        has traced before is missing.
    """
    found: dict[str, str] = {}
    token = _taken.set(found)
    try:
        yield found
    finally:
        _taken.reset(token)


def first_supported(
    backends: Mapping[str, Backend[Any]], call: Call
) -> tuple[str, list[str]]:
    """The name of what `"auto"` is for a call, and why not those before it that are for
    this platform.
    """
    reasons: list[str] = []
    for name, backend in backends.items():
        if (reason := backend.why_not(call)) is None:
            return name, reasons
        if backend.platform == call.platform:
            reasons.append(f"not {name}: {reason}")
    raise AssertionError("the last backend supports every call")


def choose_backend(
    of: str, backends: Mapping[str, Backend[K]], name: str, call: Call, kind: str = ""
) -> K:
    """The kernel of the backend of that name, or for `"auto"` of the first that
    supports the call.

    `of` is the operation, as in `"attention"`, and `kind` is that of the call, as in
    `"window 128"`, for `backends_taken`.
    """
    reasons: list[str] = []
    if name == "auto":
        name, reasons = first_supported(backends, call)
    elif name not in backends:
        raise ValueError(
            f"Unknown backend of {of} {name!r}. Use 'auto' or one of"
            f" {', '.join(backends)}."
        )
    elif reason := backends[name].why_not(call):
        raise UnsupportedCallError(
            f"The backend of {of} {name!r} does not support this call: {reason}. Use"
            " 'auto'."
        )
    if (taken := _taken.get()) is not None:
        text = f"{name} ({'; '.join(reasons)})" if reasons else name
        what = f"{of}, {kind}" if kind else of
        before = taken.setdefault(what, text)
        taken[what] = before if text in before else f"{before} | {text}"
    return backends[name].kernel


def devices_left_to_the_compiler(x: Array) -> int:
    """Devices of the mesh of `x`, without the axes that `jax.shard_map` has made
    manual.
    """
    mesh = jax.typeof(x).sharding.mesh
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in axes if kind != AxisType.Manual)
