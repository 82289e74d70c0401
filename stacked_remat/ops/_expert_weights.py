"""The tree of all experts' weights as arrays with the experts first, and back.

Loops over blocks of rows slice such arrays, and give each expert a tree of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from haliax import Axis
from jaxtyping import Array

from .._messages import axes_text
from .._static import (
    axis_first,
    from_axis_first,
    is_array,
    is_named,
    raw_array,
    with_axes,
)


@dataclass(frozen=True, eq=False)
class WeightsLayout:
    """How the weights are put together from their arrays."""

    Experts: Axis
    treedef: Any
    # For each leaf, what it is if it is no array
    others: tuple[Any, ...]
    # For each array its axes; None for a plain one
    axes: tuple[tuple[Axis, ...] | None, ...]

    @staticmethod
    def of(weights: Any, Experts: Axis) -> tuple["WeightsLayout", list[Array]]:
        """The layout of the weights, and their arrays `[expert, ...]`.

        Raises:
            ValueError: an array lacks the experts' axis; names its path.
        """
        paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(
            weights, is_leaf=is_named
        )
        others = []
        axes = []
        arrays = []
        for path, leaf in paths_and_leaves:
            if not (is_named(leaf) or is_array(leaf)):
                others.append(leaf)
                continue
            _check_experts(f"weights{jax.tree_util.keystr(path)}", leaf, Experts)
            others.append(None)
            axes.append(leaf.axes if is_named(leaf) else None)
            arrays.append(axis_first(leaf, Experts))
        layout = WeightsLayout(Experts, treedef, tuple(others), tuple(axes))
        return layout, arrays

    def of_one(self, arrays: Sequence[Any]) -> Any:
        """The weights of one expert, by its entry of each array."""
        leaves = []
        for array, axes in zip(arrays, self.axes, strict=True):
            own = axes
            if axes is not None:
                own = tuple(axis for axis in axes if axis.name != self.Experts.name)
            leaves.append(with_axes(array, own))
        return self._tree(leaves)

    def of_all(self, arrays: Sequence[Any]) -> Any:
        """The weights of all experts."""
        leaves = []
        for array, axes in zip(arrays, self.axes, strict=True):
            leaves.append(from_axis_first(array, axes, self.Experts))
        return self._tree(leaves)

    def _tree(self, arrays: list[Any]) -> Any:
        remaining = iter(arrays)
        leaves = [next(remaining) if one is None else one for one in self.others]
        return jax.tree.unflatten(self.treedef, leaves)


def _check_experts(what: str, leaf: Any, Experts: Axis) -> None:
    if raw_array(leaf) is None:  # a named array of a tree that was filtered
        raise ValueError(
            f"{what} is None; did you forget eqx.combine(trained, frozen)?"
        )
    if not is_named(leaf):
        if leaf.shape[:1] != (Experts.size,):
            raise ValueError(
                f"{what} has the shape {leaf.shape}; the first axis of a plain array"
                f" must be the {Experts.size} experts."
            )
        return
    sizes = {axis.name: axis.size for axis in leaf.axes}
    if Experts.name not in sizes:
        raise ValueError(
            f"{what} has no axis `{Experts.name}`, which every array of the weights"
            " must have. Broadcast it, or close over it as a Python value."
        )
    if sizes[Experts.name] != Experts.size:
        raise ValueError(
            f"{what} has {axes_text(leaf.axes)}; it must have {axes_text([Experts])}."
        )
