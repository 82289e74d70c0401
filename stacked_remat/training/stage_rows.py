"""States of a pipeline whose layers don't divide over its stages.

JAX takes and returns no array of a jitted program that is divided unevenly, and layers
that every step sent to their stages would be in memory twice. So between steps the
arrays of layers have *rows* for as many layers on each stage, zeros after the last
layer, and are divided by stages (`_pipeline/model_parts.py`). The named axes of such an
array still say how many layers there are, which is how it is recognised.

Models, optimizers and checkpoints know nothing of it: a training loop calls
`add_stage_rows` before the first step and `remove_stage_rows` for what it saves, and a
step takes the rows away before the optimizer, and adds them after it. Within a program
XLA divides arrays unevenly, so that sends nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from haliax.util import is_named_array
from jax.sharding import Sharding

from .._pipeline.model_parts import with_rows
from .._stacked import Stacked, StackedKinds
from .mesh import Partitioning

T = TypeVar("T")


def stack_over_stages(model: Any, partitioning: Partitioning) -> Stacked | None:
    """The stack whose layers a pipeline divides.

    Raises:
        ValueError: the model has several along its axis.
    """
    is_stack = lambda node: isinstance(node, StackedKinds)  # noqa: E731
    found = []
    for node in jax.tree.leaves(model, is_leaf=is_stack):
        names = partitioning.stages_of
        if isinstance(node, Stacked) and node.Layers.name in names:
            found.append(node)
    if len(found) > 1:
        raise ValueError(
            f"A pipeline divides one stack, and the model has {len(found)}"
            f" along {found[0].Layers}. Give the others another axis."
        )
    return found[0] if found else None


def add_stage_rows(state: T, partitioning: Partitioning | None) -> T:
    """A state with rows for stages, where the mesh is one of a pipeline whose layers
    don't divide over it. Deletes the arrays that it replaces.
    """

    def moved(leaf: Any) -> Any:
        rows = _rows_in_stages(leaf, partitioning)
        if rows is None:
            return leaf
        in_rows = _with_rows(leaf, rows, partitioning)
        leaf.array.delete()
        return in_rows

    return _map_named(moved, state)


def shapes_with_stage_rows(shapes: T, partitioning: Partitioning) -> T:
    """The shapes of `add_stage_rows`, with their shardings, of those of a state."""

    def moved(leaf: Any) -> Any:
        rows = _rows_in_stages(leaf, partitioning)
        if rows is None:
            return leaf
        return partitioning.weight_shapes(_shape_with_rows(leaf, rows))

    return _map_named(moved, shapes)


def remove_stage_rows(state: T, partitioning: Partitioning | None) -> T:
    """A state as it was before `add_stage_rows`; copies the arrays that have rows for
    stages.
    """

    def moved(leaf: Any) -> Any:
        if not _has_rows(leaf):
            return leaf
        return _with_rows(leaf, leaf.axes[0].size, partitioning)

    return _map_named(moved, state)


def slice_to_layers(tree: T) -> T:
    """A tree of traced arrays without rows for stages."""

    def sliced(leaf: Any) -> Any:
        if not _has_rows(leaf):
            return leaf
        return _replaced(leaf, leaf.array[: leaf.axes[0].size])

    return _map_named(sliced, tree)


def update_without_rows(
    update: Callable[[Any, T, Any], tuple[Any, T]],
    gradients: Any,
    metrics: T,
    state: Any,
) -> tuple[Any, T]:
    """What `update` returns for a traced state and gradients without rows for stages,
    the state with them.
    """
    # Frozen weights stay as they are: they would be copied.
    without_rows = dataclasses.replace(
        state,
        trained=slice_to_layers(state.trained),
        optimizer_state=slice_to_layers(state.optimizer_state),
    )
    after, metrics = update(slice_to_layers(gradients), metrics, without_rows)

    def as_before(array: Any, before: Any) -> Any:
        if array.shape == before.shape:
            return array
        return _resized(array, before.shape[0])

    return jax.tree.map(as_before, after, state), metrics


def _rows_in_stages(leaf: Any, partitioning: Partitioning | None) -> int | None:
    """How many rows a named array gets; None for one that is left as it is."""
    if partitioning is None or not leaf.axes or not hasattr(leaf.array, "shape"):
        return None
    axes = partitioning.axes_in_stages(leaf.axes)
    is_weight = leaf.array.shape == tuple(axis.size for axis in leaf.axes)
    return axes[0].size if is_weight and axes != leaf.axes else None


def _has_rows(leaf: Any) -> bool:
    """Whether a named array has more rows than its first axis, that of layers."""
    if not leaf.axes or not getattr(leaf.array, "shape", ()):
        return False
    rows, *shape = leaf.array.shape
    layers, *sizes = [axis.size for axis in leaf.axes]
    return shape == sizes and rows > layers


def _with_rows(leaf: Any, rows: int, partitioning: Any) -> Any:
    sharding = partitioning.weight_sharding(_shape_with_rows(leaf, rows))
    return _replaced(leaf, _resized_to(rows, sharding)(leaf.array))


@functools.cache
def _resized_to(rows: int, sharding: Sharding) -> Callable[[Any], Any]:
    # One function for each, as JAX's caches are keyed by it
    return jax.jit(functools.partial(_resized, rows=rows), out_shardings=sharding)


def _resized(array: Any, rows: int) -> Any:
    """An array with this number of rows: the first, or zeros after the last."""
    return with_rows(array[:rows], rows)


def _shape_with_rows(leaf: Any, rows: int) -> Any:
    shape = rows, *leaf.array.shape[1:]
    return _replaced(leaf, jax.ShapeDtypeStruct(shape, leaf.array.dtype))


def _replaced(leaf: Any, array: Any) -> Any:
    """A named array with another, whose shape may not be that of the axes."""
    return jax.tree.map(lambda _: array, leaf)


def _map_named(fn: Callable[[Any], Any], tree: T) -> T:
    def each(leaf: Any) -> Any:
        return fn(leaf) if is_named_array(leaf) else leaf

    return jax.tree.map(each, tree, is_leaf=is_named_array)
