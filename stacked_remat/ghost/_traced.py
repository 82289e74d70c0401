"""Functions of trees as programs on arrays."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax


def trace(fn: Callable[..., Any], *args: Any) -> tuple[Any, list[Any], Callable[[list[Any]], Any]]:
    """A function of trees as a closed jaxpr, the arrays to give it, and what its results are as a tree."""
    arrays, static = eqx.partition(args, is_traced)
    inputs, structure = jax.tree.flatten(arrays)
    kept: list[Any] = []

    def of_arrays(*inputs: Any) -> Any:
        found = fn(*eqx.combine(jax.tree.unflatten(structure, inputs), static))
        arrays, rest = eqx.partition(found, eqx.is_array)
        kept[:] = [rest]
        return arrays

    closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*inputs)

    def rebuild(results: list[Any]) -> Any:
        return eqx.combine(jax.tree.unflatten(jax.tree.structure(shapes), results), kept[0])

    return closed, inputs, rebuild


def is_traced(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
