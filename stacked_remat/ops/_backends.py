"""The choice among the backends of an operation: by name, or the first that supports the call."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import jax
from jax.sharding import AxisType
from jaxtyping import Array


class UnsupportedCallError(ValueError):
    """An operation can't do what a call asks for on this device or mesh; the message names the fix."""


class Backend(Protocol):
    """An implementation of an operation."""

    @property
    def reason_against(self) -> Callable[[Any], str | None]:
        """Why a call is not supported; None if it is."""
        ...


B = TypeVar("B", bound=Backend)
ELSEWHERE = "it runs on "
"""How a reason begins that is the platform."""


_taken = ContextVar[dict[str, str] | None]("taken", default=None)


@contextlib.contextmanager
def backends_taken() -> Iterator[dict[str, str]]:
    """Collect which backends are taken by the operations that are traced within it.

    Yields:
        By operation and kind of call, such as `attention, window 128`, the backend, and after it in brackets
        why not one of those that are tried before it on this platform. What JAX has traced before is missing.
    """
    found: dict[str, str] = {}
    token = _taken.set(found)
    try:
        yield found
    finally:
        _taken.reset(token)


def first_supported(backends: Mapping[str, Backend], call: Any) -> tuple[str, list[str]]:
    """The name of what `"auto"` is for a call, and why not those before it that run on this platform.

    Args:
        backends: by name, in the order in which they are tried; the last supports every call.
        call: what their `reason_against` takes.
    """
    reasons: list[str] = []
    for name, backend in backends.items():
        if (reason := backend.reason_against(call)) is None:
            return name, reasons
        if not reason.startswith(ELSEWHERE):
            reasons.append(f"not {name}: {reason}")
    raise AssertionError("the last backend supports every call")


def choose_backend(of: str, backends: Mapping[str, B], name: str, call: Any, kind: str = "") -> B:
    """The backend of that name, or for `"auto"` the first that supports the call.

    Args:
        of: the operation, as in `"attention"`.
        backends: by name, in the order in which `"auto"` tries them.
        name: one of them, or `"auto"`.
        call: what their `reason_against` takes.
        kind: of the call, as in `"window 128"`, for `backends_taken`.

    Raises:
        ValueError: no backend has that name.
        UnsupportedCallError: it does not support the call; says why.
    """
    reasons: list[str] = []
    if name == "auto":
        name, reasons = first_supported(backends, call)
    elif name not in backends:
        raise ValueError(f"Unknown backend of {of} {name!r}. Use 'auto' or one of {', '.join(backends)}.")
    elif reason := backends[name].reason_against(call):
        raise UnsupportedCallError(
            f"The backend of {of} {name!r} does not support this call: {reason}. Use 'auto'."
        )
    if (taken := _taken.get()) is not None:
        why = f" ({'; '.join(reasons)})" if reasons else ""
        taken[f"{of}, {kind}" if kind else of] = name + why
    return backends[name]


def devices_left_to_the_compiler(x: Array) -> int:
    """Devices of the mesh of `x`, without the axes that `jax.shard_map` has made manual."""
    mesh = jax.typeof(x).sharding.mesh
    manual = AxisType.Manual
    return math.prod(
        size for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if kind != manual
    )
