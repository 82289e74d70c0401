"""Tables of positions in a model, which have to be longer where a batch has more positions."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.tree_util as jtu
from haliax import Axis

from .._scan.marks import is_named
from ._losses import map_examples
from ._traced import is_traced, resized


def with_longer_tables(
    model: Any, Position: Axis, growth: int, is_in_stack: Callable[[int], bool]
) -> Iterator[Any]:
    """The model, then models with longer arrays, to be tried one after the other.

    First all named arrays with the axis are longer; then also one plain array, along its first dimension. Its
    other dimensions, and plain arrays in stacks, are left as they are: they may be as long by chance.

    Args:
        model: of arrays or their types.
        Position: the axis of the positions.
        growth: how many times longer they are.
        is_in_stack: of the number of a leaf, where named arrays are leaves.
    """

    def grow(array: Any, at: int) -> Any:
        return resized(array, at, array.shape[at] * growth)

    def longer(leaf: Any) -> Any:
        own = [axis.size for axis in leaf.axes if axis.name == Position.name] if is_named(leaf) else []
        return map_examples(leaf, Position, grow, own[0] * growth) if own else leaf

    yield model
    leaves, structure = jtu.tree_flatten(jax.tree.map(longer, model, is_leaf=is_named), is_leaf=is_named)
    yield jax.tree.unflatten(structure, leaves)
    for at, leaf in enumerate(leaves):
        may_be_table = is_traced(leaf) and leaf.ndim > 0 and leaf.shape[0] >= Position.size
        if may_be_table and not is_in_stack(at):
            yield jax.tree.unflatten(structure, [*leaves[:at], grow(leaf, 0), *leaves[at + 1 :]])
