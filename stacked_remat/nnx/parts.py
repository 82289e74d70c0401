"""Modules, variables and arrays as trees of arrays, divided by what a scan does with
them, and back.

For `scanning.py`, on Flax's `nnx.to_tree` and `nnx.from_tree`. A tree that was split
has an `nnx.NodeStates`, a *part*, in the place of each module, variable or array. Its
metadata say what the scan does:

- for an array, its axis: an int, None or `nnx.Carry`;
- for a module or variable, a tuple with an axis for each of its states: those of the
  filters of an `nnx.StateAxes`, or one for everything.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from flax import nnx

from .._static import PyTree

# The name of the `nnx.update_context` in which arguments are split and results merged.
# By it Flax knows which modules of the caller the merged ones stand for.
TAG = "stacked_remat.nnx.remat_scan"


def is_node(x: PyTree) -> bool:
    """Whether a value is a module, another graph node or a variable."""
    return isinstance(x, nnx.Variable) or nnx.graphlib.is_graph_node(x)


def split(
    tree: PyTree, prefix: Any, what: str, metadata: Mapping[str, Any] | None = None
) -> PyTree:
    """A tree with parts in place of its modules, variables and arrays.

    Args:
        tree: the arguments, or the results.
        prefix: its axes, as `in_axes` and `out_axes` give them.
        what: name of the tree, for errors.
        metadata: `remat_scan`'s `transform_metadata`, if the arrays are of one layer;
            the sharding metadata of their variables get the layers' axis.

    Raises:
        TypeError: an axis is of another kind; names what it was given for.
    """

    def part(
        context: nnx.SplitContext, path: Any, axis: Any, leaf: Any
    ) -> nnx.NodeStates:
        takes = int | nnx.StateAxes if is_node(leaf) else int
        says_how = axis is None or axis is nnx.Carry or isinstance(axis, takes)
        if not says_how:
            raise TypeError(
                f"{axis!r} can't say how {what}{jtu.keystr(path)}, a"
                f" {type(leaf).__name__}, is split. Write an int, None or nnx.Carry;"
                " nnx.StateAxes is for modules."
            )
        if not is_node(leaf):
            return nnx.NodeStates.from_split(None, leaf, metadata=axis)
        axes: Any = axis
        if not isinstance(axis, nnx.StateAxes):
            axes = nnx.StateAxes({...: axis})
        graphdef, *states = context.split(leaf, *axes.filters)
        # A variable may hold a Python number, which has no shape to split or to carry.
        states = jax.tree.map(
            lambda value: value if hasattr(value, "shape") else jnp.asarray(value),
            states,
        )
        states = _changed(nnx.spmd.add_axis, states, axes.axes, metadata)
        return nnx.NodeStates.from_split(graphdef, *states, metadata=tuple(axes.axes))

    return nnx.to_tree(
        tree, prefix=prefix, split_fn=part, map_non_graph_nodes=True, ctxtag=TAG
    )


def merged(
    tree: PyTree, *, is_inner: bool, metadata: Mapping[str, Any] | None = None
) -> PyTree:
    """The inverse of `split`: new modules with `is_inner`, for a layer, whose sharding
    metadata lose the layers' axis; else the caller's own, updated.
    """

    def merge(
        context: nnx.MergeContext, path: Any, prefix: Any, part: nnx.NodeStates
    ) -> PyTree:
        axes = part.metadata
        if not isinstance(axes, tuple):
            return part.state
        states = _changed(nnx.spmd.remove_axis, part.states, axes, metadata)
        return context.merge(part.graphdef, *states)

    return nnx.from_tree(tree, merge_fn=merge, is_inner=is_inner, ctxtag=TAG)


def _changed(
    change: Callable[..., Any],
    states: Sequence[PyTree],
    axes: Sequence[Any],
    metadata: Mapping[str, Any] | None,
) -> Sequence[PyTree]:
    """States with other sharding metadata, if `metadata` name an axis."""
    if not metadata or nnx.PARTITION_NAME not in metadata:
        return states
    changed = []
    # Only where the layers are an axis of the array has a layer's array one less.
    for state, axis in zip(states, axes, strict=True):
        is_split = isinstance(axis, int)
        changed.append(change(state, axis, metadata) if is_split else state)
    return changed


def _is_part(x: PyTree) -> bool:
    return isinstance(x, nnx.NodeStates)


def named_leaves(
    names: Sequence[str], tree: Sequence[PyTree]
) -> Iterator[tuple[str, Any, Any]]:
    """Name, array and axis of each array in split trees, in the order in which JAX
    flattens them. Names are paths, starting with those of the trees.
    """
    for name, argument in zip(names, tree, strict=True):
        for path, part in jtu.tree_leaves_with_path(argument, is_leaf=_is_part):
            axes = part.metadata
            if not isinstance(axes, tuple):
                axes = (axes,)
            # An array is the one state of its part, at the path of the part.
            for state, axis in zip(part.states, axes, strict=True):
                for below, leaf in jtu.tree_leaves_with_path(state):
                    whole_path = *path, *below
                    yield name + jtu.keystr(whole_path), leaf, axis
