"""Modules and parameters of a tree by the dotted path that leads to them, and patterns.

Users choose by such paths what is adapted, frozen, or has another learning rate. The
layers of a stack have one path, since they have one array.
"""

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import haliax.nn as hnn
import jax.tree_util as jtu

from ._block_seq import BlockSeq
from ._stacked import Stacked
from ._stacked_pattern import StackedPattern
from ._static import is_array, is_named, raw_array

T = TypeVar("T")

_STACKS = (Stacked, hnn.Stacked)
_LEFT_OUT = {"blocks": (BlockSeq, hnn.BlockSeq), "stacks": (StackedPattern,)}


def map_modules(
    tree: T, kinds: tuple[type, ...], function: Callable[[str, Any], Any]
) -> T:
    """Replace every outermost module of one of `kinds` by `function(path, module)`."""

    def replace(path: tuple[Any, ...], node: Any) -> Any:
        return function(dotted(tree, path), node) if isinstance(node, kinds) else node

    return jtu.tree_map_with_path(
        replace, tree, is_leaf=lambda node: isinstance(node, kinds)
    )


def find_modules(tree: Any, kinds: tuple[type, ...]) -> dict[str, Any]:
    """Every outermost module of one of `kinds` by its path, in the order of the
    tree.
    """
    nodes = jtu.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, kinds)
    )
    return {dotted(tree, path): node for path, node in nodes if isinstance(node, kinds)}


def map_parameters(tree: T, function: Callable[[str, Any], Any]) -> T:
    """Replace every array, named or plain, by `function(path, array)`; what a filter
    took out of the tree stays out.
    """

    def replace(path: tuple[Any, ...], leaf: Any) -> Any:
        if not is_array(raw_array(leaf)):
            return leaf
        return function(dotted(tree, path), leaf)

    return jtu.tree_map_with_path(replace, tree, is_leaf=is_named)


def find_parameters(tree: Any) -> dict[str, Any]:
    """Every array, named or plain, by its path, in the order of the tree."""
    found = {}
    for path, leaf in jtu.tree_leaves_with_path(tree, is_leaf=is_named):
        if is_array(raw_array(leaf)):
            found[dotted(tree, path)] = leaf
    return found


def first_match(path: str, patterns: Iterable[str]) -> str | None:
    """The first pattern that matches the whole path, as `fnmatch` does."""
    for pattern in patterns:
        if fnmatch.fnmatchcase(path, pattern):
            return pattern
    return None


def check_patterns(
    key: str, patterns: Iterable[str], paths: Sequence[str], kind: str
) -> None:
    """Refuse a pattern that matches no path.

    For the error: `key` is where the patterns were given, and `kind` what the paths
    lead to, such as `"linear"`.
    """
    for pattern in patterns:
        if any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            continue
        nearest = difflib.get_close_matches(pattern, paths, n=5, cutoff=0.0)
        raise ValueError(
            f"{key}: {pattern!r} matches no {kind}. Nearest of {len(paths)}:"
            f" {', '.join(nearest)}. A pattern has to match the whole path; `*` matches"
            " any characters."
        )


def dotted(node: Any, path: tuple[Any, ...]) -> str:
    """The path that patterns are matched with."""
    parts = []
    for entry in path:
        if isinstance(entry, jtu.GetAttrKey):
            if isinstance(node, _STACKS) and entry.name == "stacked":
                parts.append("*")
            elif not isinstance(node, _LEFT_OUT.get(entry.name, ())):
                parts.append(entry.name)
            node = getattr(node, entry.name)
        elif isinstance(entry, jtu.SequenceKey):
            parts.append(str(entry.idx))
            node = node[entry.idx]
        elif isinstance(entry, jtu.DictKey):
            parts.append(str(entry.key))
            node = node[entry.key]
        else:  # a custom node, whose children can't be found by key
            parts.append(str(entry).strip(".[]<>"))
            node = None
    return ".".join(parts)
