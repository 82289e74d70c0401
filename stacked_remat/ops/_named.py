"""Checks of named arguments of operations."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray
from jaxtyping import Array

from .._messages import axes_text

FLOATS = (jnp.floating, "floating-point numbers")
INTEGERS = (jnp.integer, "integers")


def named_as(array: Array, axes: Sequence[Axis]) -> NamedArray:
    """The array with these axes, one after the other, whatever its own shape."""
    return NamedArray(array.reshape([axis.size for axis in axes]), tuple(axes))


def resolved_axis(selector: AxisSelector, what: str, x: NamedArray) -> Axis:
    """The axis, or that of the argument `what` with this name."""
    if isinstance(selector, Axis):
        return selector
    for axis in x.axes:
        if axis.name == selector:
            return axis
    raise ValueError(f"`{what}` has {axes_text(x.axes)}, and no axis {selector!r}.")


def wide_dtype(*arrays: NamedArray | None) -> Any:
    """The dtype of sums and states: float32, or float64 if an array has it."""
    is_double = any(x is not None and x.dtype == jnp.float64 for x in arrays)
    return jnp.float64 if is_double else jnp.float32


def check_named(
    what: str,
    x: Any,
    kind: tuple[Any, str],
    has: Iterable[Axis],
    may_have: Iterable[Axis] | None = None,
) -> None:
    """Check that an argument, `what`, is a named array of `FLOATS` or `INTEGERS` with
    some axes.

    It must have the axes `has`, and may have `may_have`; None for any.
    """
    dtype, numbers = kind
    if not isinstance(x, NamedArray):
        raise ValueError(
            f"`{what}` must be a named array of {numbers}; got {type(x).__name__}."
        )
    lacks = set(has) - set(x.axes)
    if lacks or (may_have is not None and set(x.axes) - {*has, *may_have}):
        more = f", and may have {axes_text(may_have)}" if may_have else ""
        raise ValueError(
            f"`{what}` has {axes_text(x.axes)}; it must have {axes_text(has)}{more}."
        )
    if not jnp.issubdtype(x.dtype, dtype):
        raise ValueError(f"`{what}` must be {numbers}; got {x.dtype}.")
