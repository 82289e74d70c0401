"""Batches divided into microbatches, equal in rows."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from haliax import Axis

from ._static import is_named

Batch = TypeVar("Batch")


def in_microbatches(batch: Batch, Rows: Axis, Microbatches: Axis) -> Batch:
    """The batch with an axis of microbatches in front: row `i * count + n` is row `i`
    of microbatch `n`, so that rows which are divided over devices stay there.

    Args:
        batch: named arrays, of which those without `Rows` stay as they are, and plain
            ones, whose first axis has the rows.
        Rows: the axis of the rows.
        Microbatches: the axis of the microbatches.

    Raises:
        ValueError: the rows don't divide evenly.
    """
    count = Microbatches.size
    size, rest = divmod(Rows.size, count)
    if rest:
        raise ValueError(
            f"A batch of {Rows.size} examples has no {count} equal microbatches. Choose"
            " a divisor of its size."
        )

    def split(leaf: Any) -> Any:
        if not is_named(leaf):
            rows = jnp.reshape(leaf, (size, count, *jnp.shape(leaf)[1:]))
            return jnp.moveaxis(rows, 1, 0)
        if Rows.name not in [axis.name for axis in leaf.axes]:
            return leaf
        divided = leaf.unflatten_axis(Rows.name, (Rows.resize(size), Microbatches))
        return divided.rearrange((Microbatches.name, ...))

    return jax.tree.map(split, batch, is_leaf=is_named)
