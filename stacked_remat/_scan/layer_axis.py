"""How a tree is split over an axis, for layers of one or several kinds, and joined.

A loop runs on lists of arrays, and a user's step takes trees. `split_tree` takes the
arguments apart into a *stack* for each leaf that is split, with the layers' axis in
front, and the arrays that all layers share. Its `TreeLayout` puts trees together again:
that of one layer, from its entries of the stacks (`layer`, `arguments`), or that of all
(`stacked`). `layers.py`, `sweep_back.py` and the classes of layers call it.

Layers of several kinds, a `StackedPattern`, have their stacks by kind. `divide` makes
of one tree a marked tree for each kind, with the rows of its layers; `split_kinds`
splits each of these; and a `Join` makes one tree of theirs. Which leaf is split, and
how a user says so, is in `marks.py`.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from haliax import Axis, NamedArray
from haliax.axis import AxisSelector
from jax import lax
from jax.tree_util import KeyPath

from .._memory_spaces import is_on_host, to_host
from .._static import PyTree, axis_first, from_axis_first, with_axes
from .._sweep.kinds import Pattern
from .._sweep.slots import Arrays, Mask
from .arguments import Caller, check_keys, check_no_lists, check_sizes, resolve_axis
from .marks import (
    Entry,
    IsScanned,
    LayerStack,
    Marked,
    PerKind,
    is_array,
    is_named,
    is_named_or_shaped_array,
    is_split,
    map_unsliced,
    raw_array,
    take_marks_off,
)
from .stacking import name_stacked, take_rows


class Leaf(NamedTuple):
    """How a leaf is put back into its tree."""

    # Whether the leaf is a stack, an array that all layers share, or no array
    role: Literal["split", "shared", "static"]
    # To the leaf, for errors
    path: KeyPath
    # Of a named array, the layers' axis among them if it is split; None for a plain
    # array
    axes: tuple[Axis, ...] | None = None
    # Whether a shared array came from host memory, and goes back there
    on_host: bool = False
    # What is no array
    value: PyTree = None


@dataclass(frozen=True)
class TreeLayout:
    """The structure of a split tree.

    Where fields are unsliced, one more stack follows the others: the indices of the
    layers. A layer reads its own entry of a stack that it takes whole by its index.
    """

    # That the tree is split over
    axis: Axis
    # Of the tree without marks, with named arrays as leaves
    treedef: Any
    # How each leaf is put back, in the order of the tree
    leaves: tuple[Leaf, ...]
    # For each stack whether a layer is given all of it
    unsliced: Mask

    def with_role(self, role: Literal["split", "shared"]) -> list[Leaf]:
        """The leaves for the stacks, or for the shared arrays, in their order."""
        return [leaf for leaf in self.leaves if leaf.role == role]

    def layer(
        self, parts: Arrays, shared: Arrays, *, cotangents: bool = False
    ) -> PyTree:
        """One layer's tree; in unsliced fields the layers' dimension has no name.

        With `cotangents` the arrays may be None, and so is what is no array.
        """
        named = []
        # Not strict: indices of layers may follow, which are for `arguments`.
        for leaf, part in zip(self.with_role("split"), parts, strict=False):
            axes = leaf.axes
            if axes is not None:
                axes = tuple(axis for axis in axes if axis.name != self.axis.name)
            named.append(with_axes(part, axes))
        return self._build(named, shared, cotangents)

    def arguments(self, parts: Arrays, shared: Arrays) -> PyTree:
        """One layer's arguments, with a `LayerStack` for each unsliced field; `parts`
        has its stack.
        """
        arguments = self.layer(parts, shared)
        if not any(self.unsliced):
            return arguments
        (first, *args), kwargs = arguments
        # Where there are no layers, one is traced with a stack of one
        Stack = self.axis.resize(max(self.axis.size, 1))
        is_whole = zip(parts, self.unsliced, strict=True)
        # Found by identity: an array of an unsliced field may still have been sliced
        whole = {id(part) for part, unsliced in is_whole if unsliced}

        def stack(field: PyTree) -> PyTree:
            arrays = [*filter(is_array, jtu.tree_leaves(field))]
            if arrays and not any(id(array) in whole for array in arrays):
                # declared as unsliced, but on the host or on several devices: it was
                # sliced
                return field
            named = name_stacked(field, Stack, "a stack")
            return LayerStack(named, parts[-1], Stack.name)

        return (map_unsliced(stack, first), *args), kwargs

    def stacked(
        self, arrays: Arrays, shared: Arrays, *, cotangents: bool = False
    ) -> PyTree:
        """The whole tree, each array in its memory; `cotangents` as in `layer`."""
        named = []
        for leaf, array in zip(self.with_role("split"), arrays, strict=False):
            named.append(from_axis_first(array, leaf.axes, self.axis))
        pairs = zip(self.with_role("shared"), shared, strict=True)
        kept = [to_host(array) if leaf.on_host else array for leaf, array in pairs]
        return self._build(named, kept, cotangents)

    def arrays(self, tree: PyTree) -> tuple[list[PyTree], list[PyTree]]:
        """The split and the shared arrays of a tree of this structure; None for missing
        ones and indices.
        """
        arrays: dict[str, list[PyTree]] = {"split": [], "shared": [], "static": []}
        for leaf, value in zip(
            self.leaves, self.treedef.flatten_up_to(tree), strict=True
        ):
            arrays[leaf.role].append(raw_array(value))
        split = arrays["split"]
        missing = len(self.unsliced) - len(split)  # the indices of the layers
        return split + [None] * missing, arrays["shared"]

    def _build(
        self, split: Iterable[PyTree], shared: Iterable[PyTree], cotangents: bool
    ) -> PyTree:
        """The tree with these leaves for those that are split, named already, and these
        arrays for those that are shared.
        """
        split = iter(split)
        shared = iter(shared)
        leaves = []
        for leaf in self.leaves:
            if leaf.role == "split":
                leaves.append(next(split))
            elif leaf.role == "shared":
                leaves.append(with_axes(next(shared), leaf.axes))
            else:
                leaves.append(None if cotangents else leaf.value)
        return jtu.tree_unflatten(self.treedef, leaves)


class Split(NamedTuple):
    """A tree that was split over the layers, of one kind where there are several."""

    # Puts trees together again
    layout: TreeLayout
    # The arrays that are split, with the layers' axis in front
    stacks: Arrays
    # The arrays that every layer is given whole
    shared: Arrays

    def in_jax(self) -> "Split":
        """The same with arrays of JAX, where a user gave NumPy's."""
        stacks, shared = jax.tree.map(jnp.asarray, self[1:])
        return Split(self.layout, stacks, shared)

    def layer(self, index: Any) -> PyTree:
        """The tree of one layer, with an index that is not checked."""
        entries = [stack[index] for stack in self.stacks]
        return self.layout.layer(entries, self.shared)


# Makes one tree of those of each kind
Join: TypeAlias = Callable[[Sequence[PyTree]], PyTree]


def split_tree(
    tree: PyTree,
    axis: AxisSelector,
    caller: Caller,
    is_scanned: IsScanned = is_named_or_shaped_array,
) -> Split:
    """Take a tree apart: its layout, the arrays that are split over `axis`, and those
    that are shared.
    """
    # The size of the axis is known from here on, and that of all stacks agrees
    entries, tree, are_split, axis = _entries(tree, axis, caller, is_scanned)
    leaves = []
    stacks = []
    unsliced = []
    shared = []
    for (path, leaf, rule), split in zip(entries, are_split, strict=True):
        array = raw_array(leaf)
        axes = leaf.axes if is_named(leaf) else None
        if split:
            stacks.append(axis_first(leaf, axis))
            unsliced.append(rule == "unsliced")
            leaves.append(Leaf("split", path, axes))
        elif is_named(leaf) or is_array(leaf):
            shared.append(array)
            leaves.append(Leaf("shared", path, axes, on_host=is_on_host(array)))
        else:
            leaves.append(Leaf("static", path, value=leaf))
    if any(unsliced):
        stacks.append(jnp.arange(axis.size))
        unsliced.append(False)
    treedef = jtu.tree_structure(tree, is_leaf=is_named)
    layout = TreeLayout(axis, treedef, tuple(leaves), tuple(unsliced))
    return Split(layout, stacks, shared)


def _entries(
    tree: PyTree,
    axis: AxisSelector,
    caller: Caller,
    is_scanned: IsScanned,
    kinds: Sequence[str] = (),
) -> tuple[list[Entry], PyTree, list[bool], Axis]:
    """The leaves of a tree, the tree without marks, which leaves are split, and the
    axis; all checked.
    """
    entries, unmarked = take_marks_off(tree)
    are_split = [is_split(leaf, axis, is_scanned, rule) for _, leaf, rule in entries]
    split = [*itertools.compress(entries, are_split)]
    for path, leaf, _ in split:
        if raw_array(leaf) is None:  # a named array of a tree that was filtered
            raise ValueError(
                f"{caller.what}: {caller.name_of(path)} is None; did you forget"
                " eqx.combine(trained, frozen)?"
            )
    axis = resolve_axis(axis, entries, split, caller)
    if is_scanned is is_named_or_shaped_array:
        # A predicate of the caller's decides about these too.
        check_no_lists(tree, axis, caller)
        check_keys(entries, axis, caller)
    check_sizes(axis, split, caller)
    for path, leaf, rule in entries:
        if isinstance(leaf, PerKind):
            _check_per_kind(leaf, rule, kinds, caller, path)
    return entries, unmarked, are_split, axis


# Kinds without layers need values too: the types of their outputs are found by tracing.
def _check_per_kind(
    leaf: PerKind, rule: str, kinds: Sequence[str], caller: Caller, path: KeyPath
) -> None:
    what = caller.what
    name = caller.name_of(path)
    if not kinds or rule != "default":
        raise TypeError(
            f"{what}: per_kind for {name} is for an argument of a StackedPattern,"
            " unmarked, and not within another per_kind. Mark its values, or pass them"
            " themselves."
        )
    if not {*kinds} <= {*leaf.values}:
        raise ValueError(
            f"{what} has layers of the kinds {', '.join(map(repr, kinds))}, and"
            f" per_kind for {name} has values for"
            f" {', '.join(map(repr, leaf.values)) or 'none'}. Give one for each, with"
            " layers or not."
        )


def divide(
    tree: PyTree, axis: Axis, pattern: Pattern, caller: Caller
) -> tuple[list[PyTree], Join]:
    """A marked tree for the layers of each kind, and what joins such again, and sums
    what is shared.

    The marks say what was found for all layers, so that a split of a kind's tree, whose
    axis has another size, comes to the same.
    """
    entries, tree, are_split, _ = _entries(
        tree, axis, caller, is_named_or_shaped_array, pattern.names
    )
    treedef = jtu.tree_structure(
        tree, is_leaf=lambda node: isinstance(node, NamedArray | PerKind)
    )
    are_per_kind = tuple(isinstance(leaf, PerKind) for _, leaf, _ in entries)

    parts = []
    for number, name in enumerate(pattern.names):
        rows = pattern.layers_of(number)
        of_kind = []
        for (_, leaf, _), split in zip(entries, are_split, strict=True):
            if isinstance(leaf, PerKind):
                part = leaf.values[name]
            elif split:
                part = Marked(take_rows(leaf, axis, rows), "per_layer")
            else:
                part = Marked(leaf, "shared")
            of_kind.append(part)
        parts.append(jtu.tree_unflatten(treedef, of_kind))
    return parts, KindsJoin(treedef, are_per_kind, tuple(are_split), axis, pattern)


def part_of_layers(
    tree: PyTree, axis: Axis, first: Any, count: int, caller: Caller
) -> PyTree:
    """A marked tree for `count` of the layers, the first of which may be traced. Past
    the last layer there are any values.

    As in `divide`, the marks say what was found for all layers.
    """
    entries, tree, are_split, _ = _entries(tree, axis, caller, is_named_or_shaped_array)
    parts = []
    for (_, leaf, _), split in zip(entries, are_split, strict=True):
        if split:
            rows = _rows_from(axis_first(leaf, axis), first, count)
            part = axis_resized(leaf, axis, count, rows)
        else:
            part = leaf
        parts.append(Marked(part, "per_layer" if split else "shared"))
    treedef = jtu.tree_structure(tree, is_leaf=is_named)
    return jtu.tree_unflatten(treedef, parts)


def _rows_from(array: Any, first: Any, count: int) -> Any:
    size = array.shape[0]
    if size % count == 0:
        return lax.dynamic_slice_in_dim(array, first, count)
    # A slice that ends after the array would be moved to the front.
    return array[jnp.minimum(first + np.arange(count), size - 1)]


def axis_resized(leaf: Any, axis: Axis, size: int, array: Any) -> Any:
    """An array that is split over `axis`, with another that has `size` of its entries,
    in front.
    """
    if not is_named(leaf):
        return array
    axes = []
    for other in leaf.axes:
        axes.append(other.resize(size) if other.name == axis.name else other)
    return from_axis_first(array, tuple(axes), axis)


@dataclass(frozen=True)
class KindsJoin:
    """Makes one tree of those of each kind, and sums what is shared.

    A record, so that the `SweepTypes` that holds it compares by value.
    """

    # Of the tree that was divided
    treedef: Any
    # For each of its leaves whether it is a `per_kind`
    are_per_kind: tuple[bool, ...]
    # For each whether the layers have their own parts of it
    are_split: tuple[bool, ...]
    # Of all layers
    axis: Axis
    # Which layer is of which kind
    pattern: Pattern

    def __call__(self, of_kinds: Sequence[PyTree]) -> PyTree:
        parts = zip(*map(self.treedef.flatten_up_to, of_kinds), strict=True)
        joined = map(self._joined, self.are_per_kind, self.are_split, parts)
        return jtu.tree_unflatten(self.treedef, joined)

    def _joined(
        self, is_per_kind: bool, is_split: bool, of_kinds: tuple[PyTree, ...]
    ) -> Any:
        if is_per_kind:
            return PerKind(dict(zip(self.pattern.names, of_kinds, strict=True)))
        # Some kinds may have None: a visitor returns cotangents for the others alone
        arrays = [part for part in of_kinds if is_array(raw_array(part))]
        if not arrays:
            return of_kinds[0]
        if is_split:
            return _in_order(of_kinds, self.axis, self.pattern)
        return jax.tree.map(lambda *parts: sum(parts), *arrays)


def _only(of_kinds: Sequence[PyTree]) -> PyTree:
    return of_kinds[0]


def split_kinds(
    tree: PyTree,
    axis: AxisSelector,
    pattern: Pattern | None,
    caller: Caller,
    is_scanned: IsScanned = is_named_or_shaped_array,
) -> tuple[list[Split], Join]:
    """As `split_tree`, for the layers of each kind; and what makes one tree of those
    for each kind.
    """
    # Layers of one kind are not divided, so their axis may still be a name
    if pattern is None:
        return [split_tree(tree, axis, caller, is_scanned)], _only
    assert isinstance(axis, Axis)
    parts, join = divide(tree, axis, pattern, caller)
    split = []
    for number, part in enumerate(parts):
        # Values of a `per_kind` are checked here, against the layers of their kind
        what = f"{caller.what} for kind {pattern.names[number]!r}"
        of_kind = axis.resize(len(pattern.layers_of(number)))
        split.append(split_tree(part, of_kind, caller._replace(what=what)))
    return split, join


def _in_order(of_kinds: Sequence[PyTree], axis: Axis, pattern: Pattern) -> PyTree:
    """One array with an entry for every layer, from one for each kind; zeros for a kind
    that has None.
    """
    first = next(part for part in of_kinds if raw_array(part) is not None)
    like = axis_first(first, axis)
    order = []
    arrays = []
    for kind, part in enumerate(of_kinds):
        rows = pattern.layers_of(kind)
        order += rows
        if raw_array(part) is None:
            shape = (len(rows), *like.shape[1:])
            arrays.append(jnp.zeros_like(like, shape=shape))
        else:
            arrays.append(axis_first(part, axis))
    # `order` has the layer of each entry; sorting it gives the entry of each layer
    array = jnp.concatenate(arrays)[np.argsort(order)]
    if not is_named(first):
        return array
    position = first.axis_indices(axis.name)
    axes = [*first.axes]
    axes[position] = axis
    return with_axes(jnp.moveaxis(array, 0, position), tuple(axes))
