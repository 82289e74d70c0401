"""Totals alone, of examples or documents, as derivatives of their losses along the
direction.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis, NamedArray
from jax import lax
from jax.core import eval_jaxpr

from .._messages import axes_text
from .._noted import noting
from .._scan.marks import is_named, raw_array
from ._losses import Task
from ._traced import equations_of, has_small_range, is_traced, trace
from ._weights import without_rules


def of_losses(
    task: Task, direction: dict[str, Any]
) -> tuple[tuple[Any, Any], Any, Any]:
    """The loss and what comes with it, its gradients, and the derivatives of the losses
    as returned.
    """
    objective = task.objective
    params = task.params
    found, gradients = task.value_and_grad()

    def part(path: Any, leaf: Any) -> Any:
        if not is_traced(raw_array(leaf)):
            return leaf  # a frozen array's place
        zeros = jax.tree.map(jnp.zeros_like, leaf)
        return direction.get(jtu.keystr(path), zeros)

    # Along zeros where nothing is scored: one derivative in forward mode has all
    # totals.
    whole = jtu.tree_map_with_path(part, params, is_leaf=is_named)
    along, norm = in_range(task, whole)

    def losses(params: Any) -> Any:
        return raw_array(objective.parts(task.returned(params))[0]).astype(jnp.float32)

    with noting(_without_rules):
        _, along = jax.jvp(losses, (params,), (along,))
    return found, gradients, along * norm


def in_range(task: Task, direction: Any) -> tuple[Any, Any]:
    """A direction in the dtypes of what is trained, and by what to multiply derivatives
    along it.

    Where the loss has numbers in float16, the direction is divided by its norm.
    """
    norm = 1.0
    traced = trace(task.of_model, task.model, task.batch)
    if has_small_range(equations_of(traced.closed.jaxpr)):
        direction = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), direction)
        # A direction of norm 1 keeps tangents in the range in which the losses are; the
        # totals are multiplied again in float32.
        norm = lax.stop_gradient(
            jnp.maximum(norm_of(direction), jnp.finfo("float32").tiny)
        )
    return (
        jax.tree.map(
            lambda leaf, like: (leaf / norm).astype(like.dtype), direction, task.params
        ),
        norm,
    )


def norm_of(tree: Any) -> Any:
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


def _without_rules(fn: Any) -> Any:
    """A function without its rules for reverse mode, which forward mode can't pass."""

    def run(*args: Any) -> Any:
        traced = trace(fn, *args)
        closed = without_rules(traced.closed)
        arrays = eval_jaxpr(closed.jaxpr, closed.consts, *traced.inputs)
        pairs = zip(traced.leaves, arrays, strict=True)
        return traced.rebuild(
            [NamedArray(x, like.axes) if is_named(like) else x for like, x in pairs]
        )

    return run


def of_documents(
    along: Any, losses: Any, ids: Any, Documents: Axis, *, of_mean: bool
) -> NamedArray:
    """The sums, or means, of the derivatives of tokens' losses by document, of which
    `ids` has the numbers.

    Raises:
        ValueError: there is not one id for each loss.
    """
    if is_named(ids) and is_named(losses) and {*ids.axes} == {*losses.axes}:
        ids = ids.rearrange(losses.axes)
    ids = jnp.asarray(raw_array(ids))
    if not jnp.issubdtype(ids.dtype, jnp.integer) or ids.shape != along.shape:
        has = axes_text(losses.axes) if is_named(losses) else losses.shape
        raise ValueError(
            "example_ids are integers, one for each loss, and per_example_loss"
            f" returned losses with {has}; got {ids.dtype} of the shape {ids.shape}."
            " Give -1 for a token of no example."
        )
    # Which is left out, as larger numbers are
    places = jnp.where(ids < 0, Documents.size, ids).reshape(-1)

    def summed(array: Any) -> Any:
        return jax.ops.segment_sum(array.reshape(-1), places, Documents.size)

    # By place and not by row, so a document may be anywhere in the batch.
    found = summed(along)
    if of_mean:
        found = found / jnp.maximum(summed(jnp.ones_like(along)), 1.0)
    return NamedArray(found, (Documents,))
