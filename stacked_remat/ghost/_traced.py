"""Functions of trees as programs on arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax


def trace(fn: Callable[..., Any], *args: Any) -> tuple[Any, list[Any], Callable[[list[Any]], Any]]:
    """A function of trees as a closed jaxpr, the arrays to give it, and what its results are as a tree."""
    inputs = arrays_of(args)
    kept: list[Any] = []

    def of_arrays(*inputs: Any) -> Any:
        found = fn(*with_arrays(args, inputs))
        arrays, rest = eqx.partition(found, eqx.is_array)
        kept[:] = [rest]
        return arrays

    closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*inputs)

    def rebuild(results: list[Any]) -> Any:
        return eqx.combine(jax.tree.unflatten(jax.tree.structure(shapes), results), kept[0])

    return closed, inputs, rebuild


def is_traced(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def arrays_of(tree: Any) -> list[Any]:
    """The arrays of a tree, or their types."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_traced(leaf)]


def with_arrays(tree: Any, arrays: Sequence[Any]) -> Any:
    """A tree with other arrays in the place of its own, in their order."""
    left = iter(arrays)
    return jax.tree.map(lambda leaf: next(left) if is_traced(leaf) else leaf, tree)


def shapes_of(tree: Any) -> Any:
    """A tree with the types of its arrays."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_traced(leaf) else leaf, tree
    )
