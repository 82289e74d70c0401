"""How a tree is split over an axis, for layers of one or several kinds, and put
together again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from haliax import Axis, NamedArray
from haliax.axis import AxisSelector
from jax.tree_util import KeyPath

from .._placement import is_on_host, to_host
from .._static import PyTree
from .._sweep.kinds import Pattern
from .._sweep.slots import Arrays
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
    with_axes,
)
from .stacking import name_stacked, take_rows


class Leaf(NamedTuple):
    """How a leaf is put back: with the axes that a named array has, or as the value
    that is no array.
    """

    kind: Literal["split", "shared", "static"]
    path: KeyPath
    axes: tuple[Axis, ...] | None = None
    unsliced: bool = False
    on_host: bool = False
    value: PyTree = None


@dataclass(frozen=True)
class TreeLayout:
    """The structure of a split tree. Where fields are unsliced, indices of layers
    follow the split arrays.
    """

    axis: Axis
    treedef: Any
    leaves: tuple[Leaf, ...]

    def of_kind(self, kind: Literal["split", "shared"]) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.kind == kind]

    @property
    def unsliced(self) -> tuple[bool, ...]:
        """For which of the split arrays a layer is given the whole stack."""
        mask = tuple(leaf.unsliced for leaf in self.of_kind("split"))
        return (*mask, False) if any(mask) else mask

    def layer(
        self, parts: Arrays, shared: Arrays, *, cotangents: bool = False
    ) -> PyTree:
        """One layer's tree; in unsliced fields the layers' dimension has no name.
        Cotangents may be None.
        """

        def name(leaf: Leaf, part: PyTree) -> PyTree:
            axes = leaf.axes and tuple(
                axis for axis in leaf.axes if axis.name != self.axis.name
            )
            return with_axes(part, axes)

        return self._build(map(name, self.of_kind("split"), parts), shared, cotangents)

    def arguments(self, parts: Arrays, shared: Arrays) -> PyTree:
        """One layer's arguments, with a `LayerStack` for each unsliced field; `parts`
        has its stack.
        """
        arguments = self.layer(parts, shared)
        if not any(self.unsliced):
            return arguments
        (first, *args), kwargs = arguments
        # No layers are traced with a stack of one
        Stack = self.axis.resize(max(self.axis.size, 1))

        whole = {
            id(part)
            for part, is_whole in zip(parts, self.unsliced, strict=True)
            if is_whole
        }

        def stack(field: PyTree) -> PyTree:
            arrays = [*filter(is_array, jtu.tree_leaves(field))]
            if arrays and not any(id(array) in whole for array in arrays):
                # declared as unsliced, but on the host or on several devices: it was
                # sliced
                return field
            return LayerStack(
                name_stacked(field, Stack, "a stack"), parts[-1], Stack.name
            )

        return (map_unsliced(stack, first), *args), kwargs

    def stacked(
        self, arrays: Arrays, shared: Arrays, *, cotangents: bool = False
    ) -> PyTree:
        """The whole tree, each array in its memory; `cotangents` as in `layer`."""

        def name(leaf: Leaf, array: Any) -> Any:
            position = (
                0
                if leaf.axes is None
                else [axis.name for axis in leaf.axes].index(self.axis.name)
            )
            moved = (
                jnp.moveaxis(array, 0, position)
                if position and array is not None
                else array
            )
            return with_axes(moved, leaf.axes)

        pairs = zip(self.of_kind("shared"), shared, strict=True)
        kept = [to_host(array) if leaf.on_host else array for leaf, array in pairs]
        return self._build(map(name, self.of_kind("split"), arrays), kept, cotangents)

    def arrays(self, tree: PyTree) -> tuple[list[PyTree], list[PyTree]]:
        """The split and the shared arrays of a tree of this structure; None for missing
        ones and indices.
        """
        leaves = [*zip(self.leaves, self.treedef.flatten_up_to(tree), strict=True)]
        split, shared = (
            [raw_array(value) for leaf, value in leaves if leaf.kind == kind]
            for kind in ("split", "shared")
        )
        return split + [None] * (len(self.unsliced) - len(split)), shared

    def _build(
        self, split: Iterable[PyTree], shared: Iterable[PyTree], cotangents: bool
    ) -> PyTree:
        split, shared = iter(split), iter(shared)

        def fill(leaf: Leaf) -> PyTree:
            if leaf.kind == "static":
                return None if cotangents else leaf.value
            return (
                next(split)
                if leaf.kind == "split"
                else with_axes(next(shared), leaf.axes)
            )

        return jtu.tree_unflatten(self.treedef, map(fill, self.leaves))


Split: TypeAlias = tuple[TreeLayout, Arrays, Arrays]
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
    entries, tree, are_split, axis = _entries(tree, axis, caller, is_scanned)
    leaves, arrays, shared = [], [], []
    for (path, leaf, rule), is_ in zip(entries, are_split, strict=True):
        array, axes = raw_array(leaf), leaf.axes if is_named(leaf) else None
        if is_:
            arrays.append(_axis_first(leaf, axis))
            leaves.append(Leaf("split", path, axes, unsliced=rule == "unsliced"))
        elif is_named(leaf) or is_array(leaf):
            shared.append(array)
            leaves.append(Leaf("shared", path, axes, on_host=is_on_host(array)))
        else:
            leaves.append(Leaf("static", path, value=leaf))
    if any(leaf.unsliced for leaf in leaves):
        arrays.append(jnp.arange(axis.size))
    treedef = jtu.tree_structure(tree, is_leaf=is_named)
    return TreeLayout(axis, treedef, tuple(leaves)), arrays, shared


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
    split = [entry for entry, is_ in zip(entries, are_split, strict=True) if is_]
    if absent := [path for path, leaf, _ in split if raw_array(leaf) is None]:
        name = caller.name_of(absent[0])
        raise ValueError(
            f"{caller.what}: {name} is None; did you forget eqx.combine(trained,"
            " frozen)?"
        )
    axis = resolve_axis(axis, split, caller.what)
    if (
        is_scanned is is_named_or_shaped_array
    ):  # a predicate of the caller's decides about these too
        check_no_lists(tree, axis, caller)
        check_keys(entries, axis, caller)
    check_sizes(axis, split, caller)
    for path, leaf, rule in entries:
        if isinstance(leaf, PerKind):
            _check_per_kind(leaf, rule, kinds, caller, path)
    return entries, unmarked, are_split, axis


def _check_per_kind(
    leaf: PerKind, rule: str, kinds: Sequence[str], caller: Caller, path: KeyPath
) -> None:
    what, name = caller.what, caller.name_of(path)
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


def layer_getter(tree: PyTree, axis: Axis, caller: Caller) -> Callable[[Any], PyTree]:
    """A function of an index, which is not checked, to the tree of that layer. Errors
    as of `split_tree`.
    """
    layout, arrays, shared = split_tree(tree, axis, caller)
    return lambda index: layout.layer([array[index] for array in arrays], shared)


def _axis_first(leaf: Any, axis: Axis) -> Any:
    position = leaf.axis_indices(axis.name) if is_named(leaf) else 0
    return jnp.moveaxis(leaf.array, position, 0) if position else raw_array(leaf)


def divide(
    tree: PyTree, axis: Axis, pattern: Pattern, caller: Caller
) -> tuple[list[PyTree], Join]:
    """A marked tree for the layers of each kind, and what joins such again, and sums
    what is shared.
    """
    entries, tree, are_split, _ = _entries(
        tree, axis, caller, is_named_or_shaped_array, pattern.names
    )
    treedef = jtu.tree_structure(
        tree, is_leaf=lambda node: isinstance(node, NamedArray | PerKind)
    )
    are_per_kind = tuple(isinstance(leaf, PerKind) for _, leaf, _ in entries)

    def part(number: int, leaf: Any, is_: bool) -> Any:
        if isinstance(leaf, PerKind):
            return leaf.values[pattern.names[number]]
        rows = pattern.layers_of(number)
        return (
            Marked(take_rows(leaf, axis, rows), "per_layer")
            if is_
            else Marked(leaf, "shared")
        )

    pairs = [*zip((leaf for _, leaf, _ in entries), are_split, strict=True)]
    parts = (
        [part(number, *pair) for pair in pairs] for number in range(len(pattern.names))
    )
    join = KindsJoin(treedef, are_per_kind, tuple(are_split), axis, pattern)
    return [jtu.tree_unflatten(treedef, own) for own in parts], join


@dataclass(frozen=True)
class KindsJoin:
    """Makes one tree of those of each kind, and sums what is shared."""

    treedef: Any
    are_per_kind: tuple[bool, ...]
    are_split: tuple[bool, ...]
    axis: Axis
    pattern: Pattern

    def __call__(self, of_kinds: Sequence[PyTree]) -> PyTree:
        parts = zip(
            *(self.treedef.flatten_up_to(tree) for tree in of_kinds), strict=True
        )
        return jtu.tree_unflatten(
            self.treedef, map(self._joined, self.are_per_kind, self.are_split, parts)
        )

    def _joined(
        self, is_per_kind: bool, is_split: bool, found: tuple[PyTree, ...]
    ) -> Any:
        if is_per_kind:
            return PerKind(dict(zip(self.pattern.names, found, strict=True)))
        there = [part for part in found if is_array(raw_array(part))]
        if is_split and there:
            return _in_order(found, self.axis, self.pattern)
        return jax.tree.map(lambda *parts: sum(parts), *there) if there else found[0]


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
    if pattern is None:
        return [split_tree(tree, axis, caller, is_scanned)], _only
    assert isinstance(axis, Axis)
    parts, join = divide(tree, axis, pattern, caller)
    return [
        split_tree(
            part,
            axis.resize(len(pattern.layers_of(number))),
            caller._replace(what=f"{caller.what} for kind {name!r}"),
        )
        for number, (name, part) in enumerate(zip(pattern.names, parts, strict=True))
    ], join


def _in_order(of_kinds: Sequence[PyTree], axis: Axis, pattern: Pattern) -> PyTree:
    """One array with an entry for every layer, from one for each kind; zeros for a kind
    that has None.
    """
    first = next(part for part in of_kinds if raw_array(part) is not None)
    like, order, arrays = _axis_first(first, axis), [], []
    for kind, part in enumerate(of_kinds):
        rows = pattern.layers_of(kind)
        order += rows
        is_there = raw_array(part) is not None
        shape = (len(rows), *like.shape[1:])
        arrays.append(
            _axis_first(part, axis) if is_there else jnp.zeros_like(like, shape=shape)
        )
    array = jnp.concatenate(arrays)[np.argsort(order)]
    if not is_named(first):
        return array
    axes = tuple(axis if other.name == axis.name else other for other in first.axes)
    return with_axes(jnp.moveaxis(array, 0, axes.index(axis)), axes)
