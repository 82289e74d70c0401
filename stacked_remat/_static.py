"""Trees, kinds of leaves, their axes, and a static value among the leaves of one.

Functions that JAX transforms return arrays alone. What else a layer or a user's
function returns (strings, functions, Python numbers) comes out of them in a `Static`,
which has no leaves: it is part of the structure of the result.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

PyTree: TypeAlias = Any  # that of jaxtyping is unknown to pyright


def with_leaves(tree: PyTree, leaves: Iterable[PyTree]) -> PyTree:
    """The tree with other leaves, in order."""
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def is_named(leaf: Any) -> bool:
    return isinstance(leaf, NamedArray)


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array of any library, a tracer or a `ShapeDtypeStruct`, and
    not a `NamedArray`.
    """
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not is_named(leaf)


def raw_array(leaf: Any) -> Any:
    """The array of a named array; any other leaf as it is."""
    return leaf.array if is_named(leaf) else leaf


def with_axes(array: Any, axes: tuple[Axis, ...] | None) -> Any:
    """The array with these axes, if any. Sizes are not checked: inside scan and vmap
    they may differ.
    """
    if axes is None:
        return array
    # Haliax's constructor checks sizes; unflattening a PyTree does not
    return NamedArray.tree_unflatten(axes, [array])


def axis_first(leaf: Any, axis: Axis) -> Any:
    """The array of a leaf with an axis in front, where a plain array has it already."""
    position = leaf.axis_indices(axis.name) if is_named(leaf) else 0
    if position:
        return jnp.moveaxis(leaf.array, position, 0)
    return raw_array(leaf)


def from_axis_first(array: Any, axes: tuple[Axis, ...] | None, axis: Axis) -> Any:
    """The inverse of `axis_first`, for a leaf of these axes, None for a plain array.
    The array may be None.
    """
    names = [one.name for one in axes or ()]
    position = names.index(axis.name) if names else 0
    # An array that stays as it is is not copied, nor moved from the host.
    if position and array is not None:
        array = jnp.moveaxis(array, 0, position)
    return with_axes(array, axes)


@jax.tree_util.register_static
class Static:
    """Carries a value through transformations, as part of the structure of a tree.

    Two are equal if their values are; values that cannot be hashed, if they are the
    same object.
    """

    def __init__(self, value: Any):
        self.value = value

    def _key(self) -> Any:
        """What is compared and hashed: JAX hashes structures, as keys of caches."""
        try:
            hash(self.value)
        except TypeError:
            return id(self.value)
        return self.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())
