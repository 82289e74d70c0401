"""Stacks of arrays, one entry per layer, in device or host memory.

The memory of a stack is part of its type. Entries are read to the device and written back to the stack's
memory, so the loops of a sweep are the same for both.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._placement import is_on_host, to_device, to_host


def empty_stack(entry: Any, size: int) -> Any:
    """Stacks of zeros for `size` entries like the given one: arrays, or their `ShapeDtypeStruct`s."""

    def stack(leaf: Any) -> Array:
        return jnp.broadcast_to(jnp.zeros_like(leaf), (size, *leaf.shape))

    return jax.tree.map(stack, entry)


def zeros_like(stack: Array) -> Array:
    """Zeros of the shape of a stack, in the same memory."""
    if not is_on_host(stack):
        return jnp.zeros_like(stack)
    # A scan stacks on the host one entry at a time; zeros of the whole stack would be made on the device.
    entry = jnp.zeros(stack.shape[1:], stack.dtype)
    return lax.scan(lambda carry, _: (carry, to_host(entry)), None, None, length=stack.shape[0])[1]


def read(stacked: Any, index: Any) -> Any:
    """The entry at `index` of every array of a tree, on the device."""
    return on_device(
        jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, index, keepdims=False), stacked)
    )


def read_layer(stacks: list[Array], index: Any, unsliced: Sequence[bool]) -> list[Array]:
    """A layer's part of each stack: its entry, or the whole stack where it is unsliced."""
    return [stack if whole else read(stack, index) for stack, whole in zip(stacks, unsliced, strict=True)]


def at_least_one(stack: Array) -> Array:
    """The stack, or zeros of one layer if it has none: a layer is traced even if there are none to run."""
    return stack if len(stack) else jnp.zeros_like(stack, shape=(1, *stack.shape[1:]))


def check_unsliced(stacks: Sequence[Array], unsliced: Sequence[bool]) -> None:
    """Refuse unsliced stacks in host memory.

    Raises:
        ValueError: says what to do instead.
    """
    if any(whole and is_on_host(stack) for stack, whole in zip(stacks, unsliced, strict=True)):
        raise ValueError(
            "An unsliced field is not moved to the device, and this one is in host memory. Move it there "
            "(jax.device_put(field, jax.memory.Space.Device)), or do not declare it unsliced."
        )


def on_device(tree: Any) -> Any:
    """The arrays of a tree, those on the host moved to the device."""
    return jax.tree.map(lambda leaf: to_device(leaf) if is_on_host(leaf) else leaf, tree)


def write(stacked: Any, index: Any, entry: Any) -> Any:
    """Replace the entry at `index` of every array of a tree; in place, in a compiled loop."""

    def replaced(stack: Array, new: Array) -> Array:
        moved = to_host(new) if is_on_host(stack) else new
        return lax.dynamic_update_index_in_dim(stack, moved, index, 0)

    return jax.tree.map(replaced, stacked, entry)
