"""Modules, variables and arrays as trees of arrays, divided by what a scan does with
them, and back.

Each is an `nnx.NodeStates`, whose metadata is the axis of an array, or a tuple with one
for each state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from flax import nnx

from .._static import PyTree

TAG = "stacked_remat.nnx.remat_scan"


def is_node(x: PyTree) -> bool:
    """Whether a value is a module, another graph node or a variable."""
    return isinstance(x, nnx.Variable) or nnx.graphlib.is_graph_node(x)


def split(tree: PyTree, prefix: Any, what: str) -> PyTree:
    """The tree with its modules, variables and arrays divided; `what` it is, for
    errors.
    """

    def part(
        context: nnx.SplitContext, path: Any, axis: Any, leaf: Any
    ) -> nnx.NodeStates:
        takes = int | nnx.StateAxes if is_node(leaf) else int
        if not (axis is None or axis is nnx.Carry or isinstance(axis, takes)):
            raise TypeError(
                f"{axis!r} can't say how {what}{jtu.keystr(path)}, a"
                f" {type(leaf).__name__}, is split. Write an int, None or nnx.Carry;"
                " nnx.StateAxes is for modules."
            )
        if not is_node(leaf):
            return nnx.NodeStates.from_split(None, leaf, metadata=axis)
        by_state = (
            axis if isinstance(axis, nnx.StateAxes) else nnx.StateAxes({...: axis})
        )
        graphdef, *states = context.split(leaf, *by_state.filters)
        states = jax.tree.map(
            lambda value: value if hasattr(value, "shape") else jnp.asarray(value),
            states,
        )
        return nnx.NodeStates.from_split(
            graphdef, *states, metadata=tuple(by_state.axes)
        )

    return nnx.to_tree(
        tree, prefix=prefix, split_fn=part, map_non_graph_nodes=True, ctxtag=TAG
    )


def merged(tree: PyTree, *, is_inner: bool) -> PyTree:
    """The inverse of `split`; with `is_inner=False` it updates the caller's modules."""

    def merge(
        context: nnx.MergeContext, path: Any, prefix: Any, part: nnx.NodeStates
    ) -> PyTree:
        is_module = isinstance(part.metadata, tuple)
        return context.merge(part.graphdef, *part.states) if is_module else part.state

    return nnx.from_tree(tree, merge_fn=merge, is_inner=is_inner, ctxtag=TAG)


def _is_part(x: PyTree) -> bool:
    return isinstance(x, nnx.NodeStates)


def named_leaves(
    names: Sequence[str], tree: Sequence[PyTree]
) -> Iterator[tuple[str, Any, Any]]:
    """Name, array and axis of the leaves of split arguments, in order."""
    for name, argument in zip(names, tree, strict=True):
        for path, part in jtu.tree_leaves_with_path(argument, is_leaf=_is_part):
            axes = (
                part.metadata if isinstance(part.metadata, tuple) else (part.metadata,)
            )
            for state, axis in zip(part.states, axes, strict=True):
                for below, leaf in jtu.tree_leaves_with_path(state):
                    yield name + jtu.keystr((*path, *below)), leaf, axis


def change_metadata(
    tree: PyTree, change: Callable[..., Any], metadata: Mapping[str, Any]
) -> PyTree:
    """Put the layers' axis into the sharding metadata of split variables, or take it
    out.
    """
    if nnx.PARTITION_NAME not in metadata:
        return tree

    def changed(part: nnx.NodeStates) -> nnx.NodeStates:
        axes = part.metadata
        if not isinstance(axes, tuple):
            return part
        states = [
            change(state, axis, metadata) if isinstance(axis, int) else state
            for state, axis in zip(part.states, axes, strict=True)
        ]
        return part.replace(states=tuple(states))

    return jax.tree.map(changed, tree, is_leaf=_is_part)
