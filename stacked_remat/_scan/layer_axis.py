"""How a tree is split over an axis, for layers of one or several kinds, and put together again."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from .arguments import Caller, check_keys, check_sizes, resolve_axis
from .marks import (
    Entry,
    IsScanned,
    LayerStack,
    Marked,
    PerKind,
    Rule,
    is_array,
    is_named,
    is_named_or_shaped_array,
    is_split_by,
    map_unsliced,
    raw_array,
    take_marks_off,
)
from .stacking import take_rows

# Inside scan and vmap a NamedArray may have fewer dimensions than axes: JAX rebuilds trees without a check.


class Leaf(NamedTuple):
    """How a leaf is put back: `value` is the structure of a named array, or what is no array."""

    kind: Literal["split", "shared", "static"]
    path: KeyPath
    axes: tuple[Axis, ...] | None
    value: PyTree
    unsliced: bool
    on_host: bool


@dataclasses.dataclass(frozen=True, eq=False)
class TreeLayout:
    """The structure of a split tree. Where fields are unsliced, indices of layers follow the split arrays."""

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
        """One layer's tree; `Stack` is the axis of unsliced fields. Of `cotangents` some may be None."""

        def name(leaf: Leaf, part: PyTree) -> PyTree:
            if leaf.axes is None:
                return part
            axes = tuple(axis for axis in leaf.axes if axis.name != self.axis.name)
            return NamedArray(part, axes if Stack is None or not leaf.unsliced else (Stack, *axes))

        return self._build(map(name, self.of_kind("split"), parts), shared, cotangents)

    def arguments(self, parts: Sequence[PyTree], shared: Sequence[PyTree]) -> PyTree:
        """One layer's arguments, with a `LayerStack` for each unsliced field; `parts` has its stack."""
        if not any(self.unsliced):
            return self.layer(parts, shared)
        Stack = self.axis.resize(max(self.axis.size, 1))  # no layers are traced with a stack of one
        (first, *args), kwargs = self.layer(parts, shared, Stack=Stack)
        stack = functools.partial(LayerStack, layer_index=parts[-1], axis_name=self.axis.name)
        return (map_unsliced(stack, first), *args), kwargs

    def stacked(
        self, arrays: Sequence[PyTree], shared: Sequence[PyTree], *, cotangents: bool = False
    ) -> PyTree:
        """The whole tree, each array in its memory; `cotangents` as in `layer`."""

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
    """Take a tree apart: its layout, the arrays that are split over `axis`, and those that are shared."""
    entries, tree, are_split, axis = _entries(tree, axis, caller, is_scanned)
    for path, leaf, _ in entries:
        if isinstance(leaf, PerKind):
            raise TypeError(
                f"{caller.what} was given per_kind for {caller.name_of(path)}, which is for the arguments of "
                "a StackedPattern, and not within another per_kind. Pass the values themselves."
            )
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


def _entries(
    tree: PyTree, axis: AxisSelector, caller: Caller, is_scanned: IsScanned
) -> tuple[list[Entry], PyTree, list[bool], Axis]:
    """The leaves of a tree, the tree without marks, which leaves are split, and the axis; all checked."""
    entries, tree = take_marks_off(tree)
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
    return entries, tree, are_split, axis


def layer_getter(tree: PyTree, axis: Axis, caller: Caller) -> Callable[[Any], PyTree]:
    """A function of an index, which is not checked, to the tree of that layer. Errors as of `split_tree`."""
    layout, arrays, shared = split_tree(tree, axis, caller)
    return lambda index: layout.layer([array[index] for array in arrays], shared)


def _axis_first(leaf: Any, axis: Axis) -> Any:
    position = leaf.axis_indices(axis.name) if is_named(leaf) else 0
    return jnp.moveaxis(leaf.array, position, 0) if position else raw_array(leaf)


def per_kind(values: Mapping[str, Any]) -> PyTree:
    """Mark an argument of a `StackedPattern` that differs between the kinds of layers.

    ```python
    y = blocks.fold(x, per_kind({"local": local_caches, "global": global_caches}))
    ```

    Args:
        values: for the name of each kind, what its layers are given: arrays with an entry for each layer of
            this kind are split over these, as other arguments are over all; `shared` and `per_layer` choose.

    Returns:
        A PyTree node that the fold replaces, for each layer, by the layer's part of the value for its kind.

    Raises:
        TypeError: for anything but a dict with names as keys.
    """
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise TypeError(f'per_kind takes a dict, {{"name of the kind": value, ...}}; got {values!r}.')
    return PerKind(dict(values))


@dataclasses.dataclass(frozen=True)
class NamedPattern:
    """Which layer is of which kind: the names in alphabetical order, and each layer's number among them."""

    names: tuple[str, ...]
    order: Pattern

    @classmethod
    def of(cls, layers: Iterable[str], kinds: Iterable[str]) -> "NamedPattern":
        """The pattern of layers with these kinds, some of which may have no layers."""
        names = sorted(kinds)
        return cls(tuple(names), Pattern(tuple(map(names.index, layers)), len(names)))


Part: TypeAlias = Literal["per_kind", "split", "shared"]


@dataclasses.dataclass(frozen=True)
class Division:
    """How a tree was divided among layers of several kinds; `rules` are those of its leaves."""

    axis: Axis
    pattern: NamedPattern
    rules: tuple[Part, ...]
    treedef: Any


def joined(division: Division | None, of_kinds: Sequence[PyTree]) -> PyTree:
    """One tree from one for each kind: layers in order, and the sum of what they share."""
    if division is None:
        return of_kinds[0]
    parts = zip(*(division.treedef.flatten_up_to(tree) for tree in of_kinds), strict=True)

    def join(rule: str, found: tuple[PyTree, ...]) -> Any:
        if rule == "per_kind":
            return PerKind(dict(zip(division.pattern.names, found, strict=True)))
        there = [part for part in found if raw_array(part) is not None]
        if rule == "split" and there:
            return in_order(found, division.axis, division.pattern.order)
        return jax.tree.map(lambda *parts: sum(parts), *there) if there else found[0]

    return jtu.tree_unflatten(division.treedef, map(join, division.rules, parts))


def divide(tree: PyTree, axis: Axis, pattern: NamedPattern, caller: Caller) -> tuple[list[PyTree], Division]:
    """A marked tree for the layers of each kind, and how they were divided."""
    entries, tree, are_split, _ = _entries(tree, axis, caller, is_named_or_shaped_array)
    for path, leaf, rule in entries:
        if isinstance(leaf, PerKind):
            _check_per_kind(caller.name_of(path), leaf.values, rule, pattern.names, caller.what)
    leaves, treedef = jtu.tree_flatten(tree, is_leaf=lambda node: isinstance(node, NamedArray | PerKind))
    rules: list[Part] = [
        "per_kind" if isinstance(leaf, PerKind) else "split" if is_ else "shared"
        for leaf, is_ in zip(leaves, are_split, strict=True)
    ]

    def part(number: int, leaf: Any, rule: str) -> Any:
        if rule == "per_kind":
            return leaf.values[pattern.names[number]]
        if rule == "shared":
            return Marked(leaf, "shared")
        return Marked(take_rows(leaf, axis, pattern.order.layers_of(number)), "per_layer")

    parts = [
        jtu.tree_unflatten(treedef, [part(number, *each) for each in zip(leaves, rules, strict=True)])
        for number in range(len(pattern.names))
    ]
    return parts, Division(axis, pattern, tuple(rules), treedef)


Split: TypeAlias = tuple[TreeLayout, list[PyTree], list[PyTree]]


def split_kinds(
    tree: PyTree,
    axis: AxisSelector,
    pattern: NamedPattern | None,
    caller: Caller,
    is_scanned: IsScanned = is_named_or_shaped_array,
) -> tuple[list[Split], Division | None]:
    """As `split_tree`, for the layers of each kind; and how the tree was divided, if there are several."""
    if pattern is None:
        return [split_tree(tree, axis, caller, is_scanned=is_scanned)], None
    assert isinstance(axis, Axis)
    parts, division = divide(tree, axis, pattern, caller)
    sizes = [len(pattern.order.layers_of(number)) for number in range(len(parts))]
    callers = [caller._replace(what=f"{caller.what} for kind {name!r}") for name in pattern.names]
    entries = zip(parts, map(axis.resize, sizes), callers, strict=True)
    return [split_tree(*entry) for entry in entries], division


def _check_per_kind(name: str, given: dict[str, PyTree], rule: Rule, names: Sequence[str], what: str) -> None:
    if rule != "default":
        raise TypeError(
            f"{what}: {name} is {rule}(per_kind(...)), and the mark would have no effect. "
            f"Mark the values: per_kind({{name: stacked_remat.{rule}(value), ...}})."
        )
    if not set(names) <= set(given):
        raise ValueError(
            f"{what} has layers of the kinds {', '.join(map(repr, names))}, and per_kind for {name} "
            f"has values for {', '.join(map(repr, given)) or 'none'}. Give one for each, with layers or not."
        )


def in_order(of_kinds: Sequence[PyTree], axis: Axis, pattern: Pattern) -> PyTree:
    """One array with an entry for every layer, from one for each kind; zeros for a kind that has None."""
    first = next(part for part in of_kinds if raw_array(part) is not None)
    position = [other.name for other in first.axes].index(axis.name) if is_named(first) else 0
    order, arrays = [], []
    for kind, part in enumerate(of_kinds):
        rows, array = pattern.layers_of(kind), raw_array(part)
        if array is None:
            like = raw_array(first)
            shape = (*like.shape[:position], len(rows), *like.shape[position + 1 :])
            array = jnp.zeros_like(like, shape=shape)
        order += rows
        arrays.append(array)
    array = jnp.take(jnp.concatenate(arrays, position), np.argsort(order), position)
    if not is_named(first):
        return array
    return NamedArray(array, tuple(axis if other.name == axis.name else other for other in first.axes))
