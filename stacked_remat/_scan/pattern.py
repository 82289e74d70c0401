"""Arguments of layers of several kinds: what the layers of each kind are given, and one tree again."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from haliax import Axis, NamedArray
from haliax.axis import AxisSelector

from .._static import PyTree
from .._sweep.kinds import Pattern
from .arguments import Caller, check_keys, check_sizes
from .layer_axis import TreeLayout, split_tree
from .marks import (
    IsScanned,
    Marked,
    PerKind,
    Rule,
    is_named,
    is_named_or_shaped_array,
    is_split_by,
    raw_array,
    take_marks_off,
)
from .stacking import take_rows


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

    def joined(self, of_kinds: Sequence[PyTree]) -> PyTree:
        """One tree from a tree for each kind, such as the cotangents of what each is given.

        What is split is put together in the order of the layers; what is shared is added up.
        """
        parts = zip(*(self.treedef.flatten_up_to(tree) for tree in of_kinds), strict=True)

        def join(rule: str, found: tuple[PyTree, ...]) -> Any:
            if rule == "per_kind":
                return PerKind(dict(zip(self.pattern.names, found, strict=True)))
            there = [part for part in found if raw_array(part) is not None]
            if rule == "split" and there:
                return in_order(found, self.axis, self.pattern.order)
            return jax.tree.map(lambda *parts: sum(parts), *there) if there else found[0]

        return jtu.tree_unflatten(self.treedef, map(join, self.rules, parts))


def divide(tree: PyTree, axis: Axis, pattern: NamedPattern, caller: Caller) -> tuple[list[PyTree], Division]:
    """Divide a tree among layers of several kinds: a tree for each, marked, and how.

    Raises:
        ValueError: sizes are not that of the axis, an unmarked random key is a single one, or `per_kind` has
            values for other kinds than there are.
    """
    entries, tree = take_marks_off(tree)
    are_split = [is_split_by(rule, leaf, axis, is_named_or_shaped_array) for _, leaf, rule in entries]
    check_keys(entries, axis, caller)
    check_sizes(axis, [entry for entry, is_ in zip(entries, are_split, strict=True) if is_], caller)
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
    """Arrays with entries for the layers of each kind as one, with an entry for every layer in order.

    Zeros for the layers of a kind that has None.
    """
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
