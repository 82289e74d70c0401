"""Totals alone, of examples or documents, as derivatives of their losses along the direction."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis, NamedArray
from jax.core import eval_jaxpr

from .._messages import axes_text
from .._noted import noting
from .._scan.marks import is_named, raw_array
from ._losses import Task
from ._traced import trace
from ._weights import without_rules


def of_losses(task: Task, direction: dict[str, Any]) -> tuple[tuple[Any, Any], Any, Any]:
    """The loss and what comes with it, its gradients, and the derivatives of the losses as returned."""
    objective, params = task.objective, task.params
    found, gradients = task.value_and_grad()
    given = jtu.tree_map_with_path(
        lambda path, leaf: _direction_of(leaf, direction.get(jtu.keystr(path))), params, is_leaf=is_named
    )

    def losses(params: Any) -> Any:
        return raw_array(objective.parts(task.returned(params))[0]).astype(jnp.float32)

    with noting(_without_rules):
        _, along = jax.jvp(losses, (params,), (given,))
    return found, gradients, along


def _direction_of(leaf: Any, direction: Any) -> Any:
    if direction is None:
        return jax.tree.map(jnp.zeros_like, leaf)
    array = raw_array(direction).astype(raw_array(leaf).dtype)
    return NamedArray(array, leaf.axes) if is_named(leaf) else array


def _without_rules(fn: Any) -> Any:
    """A function without its rules for reverse mode, which forward mode can't pass."""

    def run(*args: Any) -> Any:
        traced = trace(fn, *args)
        closed = without_rules(traced.closed)
        arrays = eval_jaxpr(closed.jaxpr, closed.consts, *traced.inputs)
        pairs = zip(traced.leaves, arrays, strict=True)
        return traced.rebuild([NamedArray(x, like.axes) if is_named(like) else x for like, x in pairs])

    return run


def of_documents(along: Any, losses: Any, ids: Any, Documents: Axis, *, of_mean: bool) -> NamedArray:
    """The sums, or means, of the derivatives of tokens' losses by document, of which `ids` has the numbers.

    Raises:
        ValueError: there is not one id for each loss.
    """
    dtype = jnp.result_type(raw_array(ids))
    if is_named(ids) and is_named(losses) and {*ids.axes} == {*losses.axes}:
        ids = ids.rearrange(losses.axes)
    shape = jnp.shape(raw_array(ids))
    if not jnp.issubdtype(dtype, jnp.integer) or shape != along.shape:
        has = axes_text(losses.axes) if is_named(losses) else losses.shape
        raise ValueError(
            f"example_ids are integers, one for each loss, and per_example_loss returned losses with {has}; "
            f"got {dtype} of the shape {shape}. Give -1 for a token of no example."
        )
    flat = jnp.asarray(raw_array(ids)).reshape(-1)
    places = jnp.where(flat < 0, Documents.size, flat)  # which is left out, as larger numbers are

    def summed(array: Any) -> Any:
        return jax.ops.segment_sum(array.reshape(-1), places, Documents.size)

    found = summed(along)
    if of_mean:
        found = found / jnp.maximum(summed(jnp.ones_like(along)), 1.0)
    return NamedArray(found, (Documents,))
