"""Modules, variables and arrays as trees of arrays, divided by what a scan does with them, and back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from flax import nnx

TAG = "stacked_remat.nnx.remat_scan"


@jtu.register_pytree_node_class
class Part:
    """A module, a variable or an array of the arguments: its state, divided by what becomes of it."""

    def __init__(self, states: Sequence[Any], axes: tuple[Any, ...], graphdef: Any):
        self.states, self.axes, self.graphdef = tuple(states), axes, graphdef

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """For JAX."""
        return self.states, (self.axes, self.graphdef)

    @classmethod
    def tree_unflatten(cls, static: Any, states: Any) -> "Part":
        """For JAX."""
        return cls(states, *static)

    def merge(self, context: nnx.MergeContext) -> Any:
        """The module, variable or array."""
        return self.states[0] if self.graphdef is None else context.merge(self.graphdef, *self.states)


def is_part(x: Any) -> bool:
    """Whether a node of a tree is a `Part`."""
    return isinstance(x, Part)


def is_node(x: Any) -> bool:
    """Whether a value is a module, another graph node or a variable, and not an array."""
    return isinstance(x, nnx.Variable) or nnx.graphlib.is_graph_node(x)


def split(tree: Any, prefix: Any, what: str) -> Any:
    """The tree with a `Part` for each module, variable and array; `what` it is, for errors."""

    def part(context: nnx.SplitContext, path: Any, axis: Any, leaf: Any) -> Part:
        if not (axis is None or axis is nnx.Carry or isinstance(axis, int | nnx.StateAxes)):
            raise TypeError(
                f"A {type(axis).__name__} can't say how {what}{jtu.keystr(path)} is split. Write an int, "
                "None, nnx.Carry or nnx.StateAxes; what nnx.prefix makes is for graph_updates=False."
            )
        if not is_node(leaf):
            if isinstance(axis, nnx.StateAxes):
                raise ValueError(
                    f"Cannot use StateAxes on non-graph nodes: {what}{jtu.keystr(path)} is a "
                    f"{type(leaf).__name__}. Give it an axis, None or nnx.Carry."
                )
            return Part((leaf,), (axis,), None)
        filters, axes = ((...,), (axis,))
        if isinstance(axis, nnx.StateAxes):
            filters, axes = axis.filters, axis.axes
        graphdef, *states = context.split(leaf, *filters)
        states = jax.tree.map(lambda value: value if hasattr(value, "shape") else jnp.asarray(value), states)
        return Part(states, tuple(axes), graphdef)

    return nnx.to_tree(tree, prefix=prefix, split_fn=part, map_non_graph_nodes=True, ctxtag=TAG)


def merged(tree: Any, *, is_inner: bool) -> Any:
    """The inverse of `split`; with `is_inner=False` it updates the caller's modules."""
    return nnx.from_tree(
        tree,
        merge_fn=lambda context, path, prefix, part: part.merge(context),
        is_node_leaf=is_part,
        is_leaf=is_part,
        is_inner=is_inner,
        ctxtag=TAG,
    )


def named_leaves(names: Sequence[str], tree: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, array and axis of the leaves of split arguments, in order."""
    for name, argument in zip(names, tree, strict=True):
        for path, part in jtu.tree_leaves_with_path(argument, is_leaf=is_part):
            for state, axis in zip(part.states, part.axes, strict=True):
                for below, leaf in jtu.tree_leaves_with_path(state):
                    yield name + jtu.keystr((*path, *below)), leaf, axis


def change_metadata(tree: Any, change: Callable[..., Any], metadata: Mapping[str, Any]) -> Any:
    """Put the layers' axis into the sharding metadata of split variables, or take it out."""
    if nnx.PARTITION_NAME not in metadata:
        return tree

    def changed(part: Part) -> Part:
        if part.graphdef is None:
            return part
        states = [
            change(state, axis, metadata) if isinstance(axis, int) else state
            for state, axis in zip(part.states, part.axes, strict=True)
        ]
        return Part(states, part.axes, part.graphdef)

    return jax.tree.map(changed, tree, is_leaf=is_part)
