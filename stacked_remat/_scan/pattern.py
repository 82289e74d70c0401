"""Arguments of layers of several kinds: what the layers of each kind are given, and one tree again."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from haliax import Axis, NamedArray

from .._static import PyTree
from .._sweep.kinds import Pattern
from .arguments import Caller, check_keys, check_sizes
from .marks import (
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


@dataclasses.dataclass(frozen=True)
class DividedArguments:
    """Arguments of layers of several kinds, divided among these; what `per_kind` gives is a leaf."""

    axis: Axis
    pattern: NamedPattern
    leaves: tuple[PyTree, ...]
    are_split: tuple[bool, ...]
    treedef: Any

    def of(self, kind: int) -> PyTree:
        """What the layers of a kind are given, marked."""
        rows = self.pattern.order.layers_of(kind)

        def part(leaf: Any, is_split: bool) -> Any:
            if isinstance(leaf, PerKind):
                return leaf.values[self.pattern.names[kind]]
            return (
                Marked(take_rows(leaf, self.axis, rows), "per_layer") if is_split else Marked(leaf, "shared")
            )

        return jtu.tree_unflatten(self.treedef, map(part, self.leaves, self.are_split))

    def without_arrays(self) -> "DividedArguments":
        """The same for `joined` alone, which reads no arrays."""
        leaves = (PerKind({}) if isinstance(leaf, PerKind) else None for leaf in self.leaves)
        return dataclasses.replace(self, leaves=tuple(leaves))

    def joined(self, of_kinds: Sequence[PyTree]) -> PyTree:
        """One tree from a tree for each kind, such as the cotangents of what each is given.

        What is split is put together in the order of the layers; what is shared is added up.
        """
        parts = zip(*(self.treedef.flatten_up_to(tree) for tree in of_kinds), strict=True)

        def join(leaf: Any, is_split: bool, found: tuple[PyTree, ...]) -> Any:
            if isinstance(leaf, PerKind):
                return PerKind(dict(zip(self.pattern.names, found, strict=True)))
            there = [part for part in found if raw_array(part) is not None]
            if is_split and there:
                return in_order(found, self.axis, self.pattern.order)
            return jax.tree.map(lambda *parts: sum(parts), *there) if there else found[0]

        return jtu.tree_unflatten(self.treedef, map(join, self.leaves, self.are_split, parts))


def divide(arguments: PyTree, axis: Axis, pattern: NamedPattern, caller: Caller) -> DividedArguments:
    """Divide the arguments of layers of several kinds among these.

    Raises:
        ValueError: sizes are not that of the axis, an unmarked random key is a single one, or `per_kind` has
            values for other kinds than there are.
    """
    entries, tree = take_marks_off(arguments)
    leaves = [leaf for _, leaf, _ in entries]
    are_split = [is_split_by(rule, leaf, axis, is_named_or_shaped_array) for _, leaf, rule in entries]
    check_keys(entries, axis, caller)
    check_sizes(axis, [entry for entry, is_ in zip(entries, are_split, strict=True) if is_], caller)
    for path, leaf, rule in entries:
        if isinstance(leaf, PerKind):
            _check_per_kind(caller.name_of(path), leaf.values, rule, pattern.names, caller.what)
    treedef = jtu.tree_structure(tree, is_leaf=lambda node: isinstance(node, NamedArray | PerKind))
    return DividedArguments(axis, pattern, tuple(leaves), tuple(are_split), treedef)


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
