"""Modules of a tree by the dotted path that leads to them."""

from collections.abc import Callable
from typing import Any, TypeVar

import haliax.nn as hnn
import jax.tree_util as jtu

from .._block_seq import BlockSeq
from .._stacked import Stacked
from .._stacked_pattern import StackedPattern

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
