"""Stacks trees along an axis: modules, and the outputs of layers.

A *stack* is one tree with the arrays of all layers, each with a new axis in front: a
named array has the layers' axis there, a plain one a first dimension. `Stacked.of`
makes one of modules (`stack_layers`), and loops in Python make one of their outputs
(`stack_outputs`). A loop of JAX stacks arrays itself, which leaves their axis without a
name (`name_stacked`).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import haliax as hax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from haliax import Axis, NamedArray
from jax.tree_util import KeyPath

from .._messages import axes_text
from .._static import PyTree, with_axes
from .checks import difference, form, text
from .marks import NUMBER, is_array, is_named, leaf_size, raw_array

T = TypeVar("T")


def name_stacked(tree: T, axis: Axis, what: str) -> T:
    """A tree whose named arrays have a first dimension without a name, which is that of
    the new axis.
    """

    def named(path: KeyPath, leaf: Any) -> Any:
        # With as many dimensions as axes it was not stacked
        if not is_named(leaf) or getattr(leaf.array, "ndim", None) == len(leaf.axes):
            return leaf
        _check_is_new(leaf, axis, path, what)
        return NamedArray(leaf.array, (axis, *leaf.axes))

    return jtu.tree_map_with_path(named, tree, is_leaf=is_named)


def take_rows(leaf: Any, axis: Axis, rows: Sequence[int]) -> Any:
    """An array that is split over `axis`, with these of its entries; a slice where they
    are evenly spaced.
    """
    # The distances between neighbours: one, if the rows are evenly spaced
    steps = {after - before for before, after in itertools.pairwise(rows)}
    part: Any = np.asarray(rows, np.int32)
    step = min(steps, default=1)
    if len(steps) <= 1 and step > 0:
        first = rows[0] if len(rows) else 0
        part = slice(first, first + step * len(rows), step)
    if not is_named(leaf):
        return leaf[part]
    position = leaf.axis_indices(axis.name)
    axes = [*leaf.axes]
    axes[position] = axis.resize(len(rows))
    return with_axes(leaf.array[(slice(None),) * position + (part,)], tuple(axes))


def stack_trees(trees: Sequence[T], axis: Axis) -> T:
    """One tree with the arrays stacked along a new leading `axis`, and the first tree's
    other leaves.
    """

    def stack(*leaves: Any) -> PyTree:
        if is_named(leaves[0]):
            return hax.stack(axis, leaves)
        if is_array(leaves[0]):
            return jnp.stack(leaves)
        return leaves[0]

    return jtu.tree_map(stack, *trees, is_leaf=is_named)


def stack_layers(layers: Sequence[T], axis: Axis, what: str) -> T:
    """Stack layers; refuses what differs. Numbers that do become an array, weakly typed
    if they were.
    """

    # What layers of one kind have in common at a leaf
    def of_layer(leaf: Any) -> Any:
        if is_named(leaf) or is_array(leaf):
            return form(leaf), getattr(raw_array(leaf), "dtype", None)
        is_number = isinstance(leaf, NUMBER) and not isinstance(leaf, bool)
        return "a number" if is_number else leaf

    def stack(path: KeyPath, *leaves: Any) -> PyTree:
        if of_layer(leaves[0]) == "a number":
            # With their types, since 1 equals 1.0
            if len({(type(leaf), leaf) for leaf in leaves}) > 1:
                return jnp.stack([*map(jnp.asarray, leaves)])
        # The first layer stands for all, which have the same axes
        _check_is_new(leaves[0], axis, path, what, other_fix)
        return stack_trees(leaves, axis)

    # One module with the axis has all layers, of a stack that exists
    other_fix = f", or write {what}(module, Layers)" if len(layers) == 1 else ""
    several = (
        'BlockSeq(layers, n) or StackedPattern({"a": Stacked.of(...), ...}, pattern, n)'
    )
    fix = (
        "Stacked layers may differ only in the values of arrays and numbers. Make them"
        f" alike, or write {several}."
    )
    _refuse_unlike(layers, of_layer, f"{what}: layers", fix)
    return jtu.tree_map_with_path(stack, *layers, is_leaf=is_named)


def _refuse_unlike(
    trees: Sequence[PyTree], form: Callable[[Any], Any], what: str, fix: str
) -> None:
    """Refuse trees where one has a leaf of another form than the first has."""
    for number, tree in enumerate(trees):
        if unlike := difference(trees[0], tree, lambda a, b: form(a) == form(b)):
            path, expected, value = unlike
            raise ValueError(
                f"{what}[0]{path} is {text(expected)}, and layers[{number}]{path} is"
                f" {text(value)}. {fix}"
            )


def stack_outputs(outputs: Sequence[PyTree], axis: Axis, what: str) -> PyTree:
    """The outputs of layers that may differ, stacked along a new axis; None for no
    layers.
    """
    # Outputs may differ in what is no array, of which a stack has that of the first
    # layer; so they are compared before they are stacked.
    where = f"The outputs of {what} over `{axis.name}` cannot be stacked: layers"
    _refuse_unlike(outputs, form, where, "Let all layers return the same.")
    for path, leaf in jtu.tree_leaves_with_path(outputs[:1], is_leaf=is_named):
        _check_is_new(leaf, axis, path[1:], what)
    if outputs:
        return stack_trees([*map(numbers_to_arrays, outputs)], axis)
    return None


def numbers_to_arrays(output: T) -> T:
    """The output of a layer, with an array for each Python number, so that it can be
    stacked.
    """
    return jtu.tree_map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, NUMBER) else leaf, output
    )


def _check_is_new(
    leaf: Any, axis: Axis, path: KeyPath, what: str, other_fix: str = ""
) -> None:
    """Refuse a leaf that already has an axis of this name."""
    if is_named(leaf) and leaf_size(leaf, axis) is not None:
        raise ValueError(
            f"The output{jtu.keystr(path)} of {what} over `{axis.name}` already has an"
            f" axis of that name: {axes_text(leaf.axes)}. Rename it:"
            f" y.rename({{{axis.name!r}: ...}}){other_fix}."
        )
