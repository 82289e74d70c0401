"""Padding of one axis, so that blocks or a kernel's tiles divide it."""

import jax.numpy as jnp
from jaxtyping import Array


def pad_axis(
    x: Array, axis: int, size: int, fill: float = 0, *, repeat_last: bool = False
) -> Array:
    """The array with an axis extended to `size` by a number, or by its last entry."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    if repeat_last:
        return jnp.pad(x, widths, mode="edge")
    return jnp.pad(x, widths, constant_values=fill)


def multiple_above(size: int, of: int) -> int:
    """The least multiple of a number that is at least `size`."""
    return -(-size // of) * of
