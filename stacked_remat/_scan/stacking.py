"""Stacks trees along an axis: modules, and the outputs of layers."""

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import haliax as hax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from haliax import Axis, NamedArray
from jax.tree_util import KeyPath

from .._messages import axes_text, shown
from .._static import PyTree
from .checks import describe, structural_difference
from .marks import has_axis, is_array, is_named, is_split, raw_array

T = TypeVar("T")


def number_of_layers(tree: PyTree) -> int:
    """The size of the first dimension of the first array, 0 where there is none."""
    arrays = [raw_array(leaf) for leaf in jtu.tree_leaves(tree, is_leaf=is_named)]
    return next((array.shape[0] for array in arrays if is_array(array) and array.ndim), 0)


def with_axis(tree: T, axis: Axis) -> T:
    """A tree whose named arrays have a first dimension without a name, which is that of the axis."""

    def named(leaf: Any) -> Any:
        is_stacked = is_named(leaf) and leaf.array.ndim > len(leaf.axes)
        return NamedArray(leaf.array, (axis, *leaf.axes)) if is_stacked else leaf

    return jtu.tree_map(named, tree, is_leaf=is_named)


def take_layers(tree: T, axis: Axis, rows: Sequence[int]) -> tuple[T, Axis]:
    """Some of the layers of a stacked tree, and the axis that they have. What is shared stays as it is."""

    def take(leaf: Any) -> Any:
        return take_rows(leaf, axis, rows) if is_split(leaf, axis) else leaf

    return jtu.tree_map(take, tree, is_leaf=is_named), axis.resize(len(rows))


def take_rows(leaf: Any, axis: Axis, rows: Sequence[int]) -> Any:
    """An array that is split over `axis`, with these of its entries; a slice where they are evenly spaced."""
    steps = {after - before for before, after in itertools.pairwise(rows)}
    part: Any = np.asarray(rows, np.int32)
    if len(steps) <= 1 and min(steps, default=1) > 0:
        first, step = (rows[0] if len(rows) else 0), min(steps, default=1)
        part = slice(first, first + step * len(rows), step)
    if not is_named(leaf):
        return leaf[part]
    position = [other.name for other in leaf.axes].index(axis.name)
    array = leaf.array[(slice(None),) * position + (part,)]
    axes = [other.resize(len(rows)) if other.name == axis.name else other for other in leaf.axes]
    return NamedArray(array, tuple(axes))


def stack_trees(trees: Sequence[T], axis: Axis) -> T:
    """One tree with the arrays stacked along a new leading `axis`, and the first tree's other leaves."""

    def stack(*leaves: Any) -> PyTree:
        if is_named(leaves[0]):
            return hax.stack(axis, leaves)
        return jnp.stack(leaves) if is_array(leaves[0]) else leaves[0]

    return jtu.tree_map(stack, *trees, is_leaf=is_named)


def stack_layers(layers: Sequence[T], axis: Axis, what: str) -> T:
    """Stack layers; refuses what differs. Numbers that do become an array, weakly typed if they were."""
    first, *rest = layers

    def stack(path: KeyPath, *leaves: Any) -> PyTree:
        if all(isinstance(leaf, int | float | complex) and not isinstance(leaf, bool) for leaf in leaves):
            alike = all(type(leaf) is type(leaves[0]) and leaf == leaves[0] for leaf in leaves)
            return leaves[0] if alike else jnp.stack([jnp.asarray(leaf) for leaf in leaves])
        for number, leaf in enumerate(leaves):
            if not _may_stack(leaves[0], leaf):
                raise _unlike(jtu.keystr(path), number, leaves[0], leaf, what)
        _check_is_new(leaves[0], axis, path, what)
        return stack_trees(leaves, axis)

    for number, layer in enumerate(rest, 1):
        if found := structural_difference(first, layer):
            raise _unlike(found[0], number, *found[1:], what)
    return jtu.tree_map_with_path(stack, *layers, is_leaf=is_named)


def _may_stack(a: Any, b: Any) -> bool:
    if is_named(a) or is_array(a):
        alike = is_named(a) == is_named(b) and (is_named(b) or is_array(b))
        return alike and _form(a) == _form(b) and raw_array(a).dtype == raw_array(b).dtype
    return a is b or (type(a) is type(b) and bool(a == b))


def _unlike(path: str, number: int, first: Any, other: Any, what: str) -> ValueError:
    several = 'BlockSeq(layers, n) or StackedPattern({"a": Stacked.of(...), ...}, pattern, n)'

    def text(value: Any) -> str:
        is_node = value is None or is_named(value) or is_array(value) or jtu.tree_leaves(value) != [value]
        return describe(value) if is_node else shown(value)

    values = [text(first), text(other)]
    return ValueError(
        f"{what}: layers[0]{path} is {values[0]}, and layers[{number}]{path} is {values[1]}. Layers of one "
        f"kind differ in arrays and numbers alone: make these alike, or write {several}."
    )


def stack_outputs(outputs: Sequence[PyTree], axis: Axis, what: str) -> PyTree:
    """The outputs of layers that may differ, stacked along a new axis; None for no layers."""
    if not outputs:
        return None
    (first, treedef), *rest = (jtu.tree_flatten_with_path(output, is_leaf=is_named) for output in outputs)
    for i, (leaves, other) in enumerate(rest, start=1):
        if other != treedef:
            raise ValueError(
                f"The outputs of {what} over `{axis.name}` cannot be stacked: layer 0 returns {treedef}, "
                f"layer {i} {other}. Let all layers return the same structure."
            )
        for (path, a), (_, b) in zip(first, leaves, strict=True):
            if _form(a) != _form(b):
                raise ValueError(
                    f"The output{jtu.keystr(path)} of {what} over `{axis.name}` cannot be stacked: it has "
                    f"{_form(a)} in layer 0 and {_form(b)} in layer {i}. Let all layers return the same."
                )
    for path, leaf in first:
        _check_is_new(leaf, axis, path, what)
    return stack_trees([numbers_to_arrays(output) for output in outputs], axis)


def numbers_to_arrays(output: T) -> T:
    """The output of a layer, with an array for each Python number, so that it can be stacked."""
    return jtu.tree_map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, bool | int | float | complex) else leaf,
        output,
        is_leaf=is_named,
    )


def _form(leaf: Any) -> str:
    """The axes, in any order, or the shape of an output."""
    if is_named(leaf):
        return f"axes {axes_text(sorted(leaf.axes, key=lambda axis: axis.name))}"
    return f"shape {jnp.shape(leaf)}" if is_array(leaf) or isinstance(leaf, int | float | complex) else ""


def name_stacked(tree: T, axis: Axis, what: str) -> T:
    """Give `axis`, which must be new, to named arrays whose raw arrays have gained a leading dimension."""

    def prepend(path: KeyPath, leaf: Any) -> Any:
        _check_is_new(leaf, axis, path, what)
        return NamedArray(leaf.array, (axis, *leaf.axes)) if is_named(leaf) else leaf

    return jtu.tree_map_with_path(prepend, tree, is_leaf=is_named)


def _check_is_new(leaf: Any, axis: Axis, path: KeyPath, what: str) -> None:
    if is_named(leaf) and has_axis(leaf, axis):
        raise ValueError(
            f"The output{jtu.keystr(path)} of {what} over `{axis.name}` already has an axis of that "
            f"name: {axes_text(leaf.axes)}. Rename it: y.rename({{{axis.name!r}: ...}})."
        )
