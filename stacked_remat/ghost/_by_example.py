"""Scores and norms from the gradient of one example at a time: exact for any model."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis
from jax import lax

from .._scan.marks import is_named, raw_array
from ._losses import Loss, Objective, map_examples
from ._probed import Scoring, layers_of
from ._stacks import leaves_with_paths
from ._traced import rounding, trace


def one_at_a_time(
    scoring: Scoring, params: Any, static: Any, per_example_loss: Loss, batch: Any, objective: Objective
) -> tuple[tuple[Any, None], Any, dict[str, Any], dict[str, Any]]:
    """The loss, its gradients, and the dot products and squared norms of every example's.

    Runs forward and backward for one example after the other, and adds up the gradients: the arithmetic of
    one step, and two gradients in memory. One more forward pass over the batch compares the losses.

    Returns:
        The dot products and squares have `[layers, batch]` or `[batch]`, of the gradients of the examples'
        own losses.
    """
    Batch = scoring.Batch
    scale = 1.0 / objective.scale(Batch.size)

    def gradient(number: Any) -> tuple[Any, Any]:
        def take(array: Any, at: int) -> Any:
            return lax.dynamic_slice_in_dim(array, number, 1, at)

        own = map_examples(batch, Batch, take, 1)

        def loss(params: Any) -> Any:
            return objective.reduced(per_example_loss(eqx.combine(params, static), own))[0]

        return jax.value_and_grad(loss)(params)

    def example(total: Any, number: Any) -> tuple[Any, Any]:
        value, found = gradient(number)
        by_path = dict(leaves_with_paths(found))
        dots, squares = {}, {}
        for path, along in scoring.direction.items():
            own, Layers = by_path[path], layers_of(scoring.model, path)
            dots[path] = dot(own, along, Layers)
            squares[path] = dot(own, own, Layers)
        total = jax.tree.map(lambda sum_, new: sum_ + new.astype(sum_.dtype) * scale, total, (value, found))
        return total, (dots, squares, value)

    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)),
        (jnp.zeros((), jnp.float32), params),
    )
    (value, summed), found = lax.scan(example, zeros, jnp.arange(Batch.size))
    gradients = jax.tree.map(lambda leaf, new: new.astype(leaf.dtype), params, summed)
    dots, squares, losses = jax.tree.map(lambda array: jnp.moveaxis(array, 0, -1), found)
    if Batch.size > 1:
        whole = objective.of_examples(per_example_loss(eqx.combine(params, static), batch))
        closed, _, _ = trace(per_example_loss, scoring.model, batch)
        where = scoring.mixing(per_example_loss, batch)
        found = _checked((value, dots, squares), losses, whole, rounding(closed.jaxpr), where)
        value, dots, squares = found
    return (value, None), gradients, dots, squares


def _checked(found: Any, alone: Any, whole: Any, relative: Any, where: str) -> Any:
    """What was found, with an error at run time where an example has another loss alone than in the batch.

    Losses are often differences of larger numbers: small ones may differ by a tenth of what a loss of 1 may.
    """
    return eqx.error_if(
        found,
        jnp.any(jnp.abs(alone - whole) > relative * (jnp.max(jnp.abs(whole)) + 0.1)),
        'norms=True, granularity="block" and "total" compute one example after the other, and examples have '
        f"other losses alone than in this batch{where and ': see '}{where}. Keep what examples share out of "
        "per_example_loss: divide by a constant, not by the size of the batch or a sum over it; let the "
        "batch hold what tells examples apart, such as their places in it and a random key for each. Or use "
        'granularity="leaf" without norms.',
    )


def dot(array: Any, other: Any, Layers: Axis | None) -> Any:
    """The sum of the products, of each layer where there are layers."""
    at = None
    if Layers is not None:
        at = [axis.name for axis in array.axes].index(Layers.name) if is_named(array) else 0
    first, second = (raw_array(one).astype(jnp.float32) for one in (array, other))
    return jnp.sum(first * second, tuple(n for n in range(first.ndim) if n != at))
