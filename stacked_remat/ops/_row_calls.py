"""Functions whose rows do not depend on each other, which `jax.vmap` gives the rows of
all examples at once.

What is not a row, such as weights, is then read once, and its gradient is summed over
all rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._noted import noting


def call_on_rows(fn: Callable[[Any, Any], Any], rows: Any, shared: Any) -> Any:
    """`fn(rows, shared)`; in `jax.vmap` where `shared` is the same for all, of all rows
    in one dimension.

    That is for one example of several, within `noting`; elsewhere a plain call. All are
    trees of arrays; those of `rows` and of the result have the rows in front.
    """
    if not noting.value:
        return fn(rows, shared)
    return _bind(fn, rows, shared)


def _bind(fn: Callable[[Any, Any], Any], rows: Any, shared: Any) -> Any:
    leaves, tree = jax.tree.flatten((rows, shared))
    closed, types = jax.make_jaxpr(fn, return_shape=True)(rows, shared)
    count = len(jax.tree.leaves(rows))
    found = _rows_p.bind(*leaves, jaxpr=closed, fn=fn, tree=tree, count=count)
    return jax.tree.unflatten(jax.tree.structure(types), found)


def _evaluate(*leaves: Any, jaxpr: Any, **_: Any) -> list[Any]:
    return eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *leaves)


def _differentiated(primals: Any, tangents: Any, **params: Any) -> Any:
    """As what it computes is differentiated, by the arrays that have a tangent."""
    moving = []
    for number, tangent in enumerate(tangents):
        if not isinstance(tangent, ad.Zero):
            moving.append(number)

    def of_moving(*arrays: Any) -> list[Any]:
        leaves = list(primals)
        for number, array in zip(moving, arrays, strict=True):
            leaves[number] = array
        return _evaluate(*leaves, **params)

    # What has no tangent is a constant here, so its derivative is not computed.
    moving_primals = [primals[number] for number in moving]
    moving_tangents = [tangents[number] for number in moving]
    return jax.jvp(of_moving, moving_primals, moving_tangents)


def _batched(
    axis: Any, leaves: Any, dims: Any, *, fn: Any, tree: Any, count: int, **_: Any
) -> Any:
    """The batching rule: the examples' rows as rows of one call."""
    rows = leaves[:count]
    shared = leaves[count:]
    if any(dim is not None for dim in dims[count:]):
        # Each example has weights of its own, so rows can't be merged.
        in_axes = jax.tree.unflatten(tree, dims)
        mapped = jax.vmap(fn, in_axes, spmd_axis_name=axis.spmd_name)
        arguments = jax.tree.unflatten(tree, leaves)
        found = jax.tree.leaves(mapped(*arguments))
        return found, [0] * len(found)
    # `fn` gets the rows of all examples, one example after the other.
    merged = []
    for leaf, dim in zip(rows, dims[:count], strict=True):
        if dim is None:
            of_examples = jnp.broadcast_to(leaf, (axis.size, *leaf.shape))
        else:
            of_examples = jnp.moveaxis(leaf, dim, 0)
        merged.append(of_examples.reshape(-1, *of_examples.shape[2:]))
    arguments = jax.tree.unflatten(tree, [*merged, *shared])
    found = []
    for leaf in jax.tree.leaves(_bind(fn, *arguments)):
        found.append(leaf.reshape(axis.size, -1, *leaf.shape[1:]))
    return found, [0] * len(found)


_rows_p = Primitive("rows")
_rows_p.multiple_results = True
_rows_p.def_impl(_evaluate)
_rows_p.def_abstract_eval(lambda *_, jaxpr, **__: list(jaxpr.out_avals))
ad.primitive_jvps[_rows_p] = _differentiated
batching.fancy_primitive_batchers[_rows_p] = _batched
mlir.register_lowering(_rows_p, mlir.lower_fun(_evaluate, multiple_results=True))
