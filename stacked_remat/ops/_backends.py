"""The choice among the backends of an operation: by name, or the first that supports the call."""

import math
from collections.abc import Callable, Mapping
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


def choose_backend(of: str, backends: Mapping[str, B], name: str, call: Any) -> B:
    """The backend of that name, or for `"auto"` the first that supports the call.

    Args:
        of: what backends are called in errors, as in `"attention backend"`.
        backends: by name, in the order in which `"auto"` tries them.
        name: one of them, or `"auto"`.
        call: what their `reason_against` takes.

    Raises:
        ValueError: no backend has that name.
        UnsupportedCallError: it does not support the call; says why.
    """
    if name == "auto":
        return next(one for one in backends.values() if one.reason_against(call) is None)
    if name not in backends:
        raise ValueError(f"Unknown {of} {name!r}. Use 'auto' or one of {', '.join(backends)}.")
    reason = backends[name].reason_against(call)
    if reason is not None:
        raise UnsupportedCallError(f"The {of} {name!r} does not support this call: {reason}. Use 'auto'.")
    return backends[name]


def devices_left_to_the_compiler(x: Array) -> int:
    """Devices of the mesh of `x`, without the axes that `jax.shard_map` has made manual."""
    mesh = jax.typeof(x).sharding.mesh
    manual = AxisType.Manual
    return math.prod(
        size for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if kind != manual
    )
