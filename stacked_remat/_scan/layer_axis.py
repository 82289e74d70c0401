"""How a tree of named and plain arrays is split over an axis, one layer at a time, and put together again."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis, NamedArray
from haliax.axis import AxisSelector
from jax.tree_util import KeyPath

from .._placement import is_on_host, to_host
from .._static import PyTree
from .arguments import Caller, check_keys, check_sizes, resolve_axis
from .marks import (
    IsScanned,
    LayerStack,
    PerKind,
    is_array,
    is_named,
    is_named_or_shaped_array,
    is_split_by,
    map_unsliced,
    raw_array,
    take_marks_off,
)

# Inside scan and vmap a NamedArray may have fewer dimensions than axes: JAX rebuilds trees without a check.


class Leaf(NamedTuple):
    """How a leaf of a split tree is put together again.

    `value` is the leaf without its array: the structure of a named array, or what is no array. `on_host` is a
    shared array there, which layers take from the device.
    """

    kind: Literal["split", "shared", "static"]
    path: KeyPath
    axes: tuple[Axis, ...] | None
    value: PyTree
    unsliced: bool
    on_host: bool


@dataclasses.dataclass(frozen=True, eq=False)
class TreeLayout:
    """The structure of a tree that is split over `axis`, without its arrays.

    These are in two lists, raw: those that are split, with the axis first, and those that all layers share.
    Where fields are unsliced, the layers' indices follow the split arrays.
    """

    axis: Axis
    treedef: Any
    leaves: tuple[Leaf, ...]

    @property
    def key(self) -> PyTree:
        """What two layouts agree in if they are alike; without a hash where what is not an array has none."""
        return self.axis, self.treedef, self.leaves

    def of_kind(self, kind: Literal["split", "shared"]) -> list[Leaf]:
        """The leaves that are split, or shared."""
        return [leaf for leaf in self.leaves if leaf.kind == kind]

    @property
    def unsliced(self) -> tuple[bool, ...]:
        """For which of the split arrays a layer is given the whole stack."""
        mask = tuple(leaf.unsliced for leaf in self.of_kind("split"))
        return (*mask, False) if any(mask) else mask

    def layer(
        self,
        parts: Sequence[PyTree],
        shared: Sequence[PyTree],
        *,
        Stack: Axis | None = None,
        cotangents: bool = False,
    ) -> PyTree:
        """The tree of one layer, from its slice of each split array and the shared arrays.

        `Stack` is the first axis of unsliced fields, if `parts` has stacks for them. Of `cotangents` arrays
        may be None; what is not an array then is.
        """

        def name(leaf: Leaf, part: PyTree) -> PyTree:
            if leaf.axes is None:
                return part
            axes = tuple(axis for axis in leaf.axes if axis.name != self.axis.name)
            return NamedArray(part, axes if Stack is None or not leaf.unsliced else (Stack, *axes))

        return self._build(map(name, self.of_kind("split"), parts), shared, cotangents)

    def arguments(self, parts: Sequence[PyTree], shared: Sequence[PyTree]) -> PyTree:
        """The arguments of a layer: as `layer`, with a `LayerStack` for each field that is unsliced.

        `parts` has the whole stack for those.
        """
        if not any(self.unsliced):
            return self.layer(parts, shared)
        Stack = self.axis.resize(max(self.axis.size, 1))  # no layers are traced with a stack of one
        (first, *args), kwargs = self.layer(parts, shared, Stack=Stack)
        stack = functools.partial(LayerStack, layer_index=parts[-1], axis_name=self.axis.name)
        return (map_unsliced(stack, first), *args), kwargs

    def stacked(
        self, arrays: Sequence[PyTree], shared: Sequence[PyTree], *, cotangents: bool = False
    ) -> PyTree:
        """The whole tree, each array in its memory, from its split and its shared arrays.

        `cotangents` as in `layer`.
        """

        def name(leaf: Leaf, array: Any) -> Any:
            if leaf.axes is None:
                return array
            position = [axis.name for axis in leaf.axes].index(self.axis.name)
            moved = jnp.moveaxis(array, 0, position) if position and array is not None else array
            return jtu.tree_unflatten(leaf.value, [moved])

        kept = [
            to_host(array) if leaf.on_host else array
            for leaf, array in zip(self.of_kind("shared"), shared, strict=True)
        ]
        return self._build(map(name, self.of_kind("split"), arrays), kept, cotangents)

    def arrays(self, tree: PyTree) -> tuple[list[PyTree], list[PyTree]]:
        """The split and the shared arrays of a tree of this structure; None for missing ones and indices."""
        leaves = [*zip(self.leaves, self.treedef.flatten_up_to(tree), strict=True)]
        split, shared = (
            [raw_array(value) for leaf, value in leaves if leaf.kind == kind] for kind in ("split", "shared")
        )
        return split + [None] * (len(self.unsliced) - len(split)), shared

    def _build(self, split: Iterable[PyTree], shared: Iterable[PyTree], cotangents: bool) -> PyTree:
        split, shared = iter(split), iter(shared)

        def fill(leaf: Leaf) -> PyTree:
            if leaf.kind == "static":
                return None if cotangents else leaf.value
            if leaf.kind == "split":
                return next(split)
            return next(shared) if leaf.axes is None else jtu.tree_unflatten(leaf.value, [next(shared)])

        return jtu.tree_unflatten(self.treedef, map(fill, self.leaves))


def split_tree(
    tree: PyTree,
    axis: AxisSelector,
    caller: Caller,
    *,
    is_scanned: IsScanned = is_named_or_shaped_array,
) -> tuple[TreeLayout, list[PyTree], list[PyTree]]:
    """Take a tree apart: its layout, the arrays that are split over `axis`, and those that are shared.

    Where the axis is a name, the size is read off the arrays.

    Raises:
        ValueError: where sizes differ, naming each path and size, where nothing tells the size of a named
            axis, and for a single random key that is not marked.
    """
    entries, tree = take_marks_off(tree)
    for path, leaf, _ in entries:
        if isinstance(leaf, PerKind):
            raise TypeError(
                f"{caller.what} was given per_kind for {caller.name_of(path)}, which is for the arguments of "
                "a StackedPattern, and not within another per_kind. Pass the values themselves."
            )
    are_split = [is_split_by(rule, leaf, axis, is_scanned) for _, leaf, rule in entries]
    split = [entry for entry, is_ in zip(entries, are_split, strict=True) if is_]
    if absent := [path for path, leaf, _ in split if raw_array(leaf) is None]:
        raise ValueError(
            f"{caller.what}: {caller.name_of(absent[0])} has no array, as of a tree that was filtered or "
            "partitioned. Put the parts together first: eqx.combine(trained, frozen)."
        )
    axis = resolve_axis(axis, split, caller.what)
    if is_scanned is is_named_or_shaped_array:  # a predicate of the caller's decides about keys too
        check_keys(entries, axis, caller)
    check_sizes(axis, split, caller)
    leaves, arrays, shared = [], [], []
    for (path, leaf, rule), is_ in zip(entries, are_split, strict=True):
        kind = "split" if is_ else "shared" if is_named(leaf) or is_array(leaf) else "static"
        axes, value = None, None if is_array(leaf) else leaf
        if is_named(leaf):
            axes, value = leaf.axes, jtu.tree_structure(leaf)
        on_host = kind == "shared" and is_on_host(raw_array(leaf))
        leaves.append(Leaf(kind, path, axes, value, is_ and rule == "unsliced", on_host))
        if kind != "static":
            (arrays if is_ else shared).append(_axis_first(leaf, axis) if is_ else raw_array(leaf))
    if any(leaf.unsliced for leaf in leaves):
        arrays.append(jnp.arange(axis.size))
    treedef = jtu.tree_structure(tree, is_leaf=is_named)
    return TreeLayout(axis, treedef, tuple(leaves)), arrays, shared


def layer_getter(tree: PyTree, axis: Axis, caller: Caller) -> Callable[[Any], PyTree]:
    """A function of an index, which is not checked, to the tree of that layer. Errors as of `split_tree`."""
    layout, arrays, shared = split_tree(tree, axis, caller)
    return lambda index: layout.layer([array[index] for array in arrays], shared)


def _axis_first(leaf: Any, axis: Axis) -> Any:
    position = leaf.axis_indices(axis.name) if is_named(leaf) else 0
    return jnp.moveaxis(leaf.array, position, 0) if position else raw_array(leaf)
