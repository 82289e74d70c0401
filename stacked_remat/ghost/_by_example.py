"""Losses and gradients of examples that are computed alone, one after the other: of any model."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._scan.marks import raw_array
from ._examples import Examples
from ._losses import Loss, Objective, Reduction, Task, leaves_with_paths
from ._probed import Scoring
from ._traced import rounding, trace

_SHARED = (
    "Keep what examples share out of per_example_loss: normalise within an example, or by statistics that "
    "the batch holds; divide by a constant, not by the size of the batch or a sum over it; give what an "
    "example is compared with as an array of its own; return losses in the order of the batch; let it hold "
    "what tells examples apart, such as a random key for each. An array of the batch that all examples share "
    'is marked stacked_remat.shared(array). granularity="total" scores losses of any kind.'
)


def check_examples(
    model: Any,
    per_example_loss: Loss,
    batch: Any,
    *,
    tokens: Reduction | None = None,
    has_aux: bool = False,
) -> None:
    """Compares the losses of examples alone with those in the batch, before scores are taken of them.

    Args:
        model: any module.
        per_example_loss: as in `grad_dot`.
        batch: what it takes.
        tokens: as in `grad_dot`.
        has_aux: the same.

    Raises:
        ValueError: an example has another loss alone, by more than rounding in the lowest precision of the
            program: about 1 part in 100,000 in float32, and in 40 in bfloat16.

    Cost: two forward passes over the batch. Not within `jax.jit`, where `grad_dot` has `check`.
    """
    task = Task.of(model, per_example_loss, batch, Objective("mean", tokens, has_aux))
    alone, whole, most = eqx.filter_jit(losses_alone)(task)
    differences = np.abs(np.asarray(alone) - np.asarray(whole))
    if not (differences > most).any():
        return
    worst = int(np.nanargmax(differences))
    raise ValueError(
        f"Example {worst} has the loss {alone[worst]:.6g} alone, and {whole[worst]:.6g} in the batch of "
        f"{len(whole)}: it depends on other examples. {_SHARED}"
    )


def losses_alone(task: Task) -> tuple[Any, Any, Any]:
    """The losses of examples alone, those in the batch, and by how much they may differ.

    Losses are often differences of larger numbers: small ones may differ by a tenth of what a loss of 1 may.
    """
    traced, objective = trace(task.of_model, task.model, task.batch), task.objective
    whole = objective.of_examples(task.returned(task.params))
    most = rounding(traced.closed.jaxpr) * (jnp.max(jnp.abs(whole)) + 0.1)
    examples = Examples.of(task.batch, objective.examples(traced.shapes))
    (alone,) = examples.map(lambda _, example: [_loss_of(task, task.params, example)])
    return alone, whole, most


def _loss_of(task: Task, params: Any, example: Any) -> Any:
    """The loss of a batch of one example."""
    return task.objective.of_examples(task.of_example(eqx.combine(params, task.static), example))[0]


def checked_apart(found: Any, alone: Any, whole: Any, most: Any) -> Any:
    """What was found, with an error at run time where an example has another loss alone than in the batch."""
    message = f"Examples have other losses alone than in this batch. {_SHARED}"
    return eqx.error_if(found, jnp.any(jnp.abs(alone - whole) > most), message)


def one_at_a_time(scoring: Scoring) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dot products and squared norms of every example's gradient, `[layers, batch]` or `[batch]`.

    Runs forward and backward for one example after the other. One more forward pass compares the losses.
    """
    task = scoring.task
    examples = Examples.of(task.batch, scoring.Batch)

    def of_example(number: Any) -> dict[str, Any]:
        found = jax.grad(lambda params: _loss_of(task, params, examples.take(number)))(task.params)
        own, at = (
            dict(leaves_with_paths(found)),
            {path: leaf.dimension for path, leaf in scoring.leaves.items()},
        )
        return {
            path: (dot(own[path], along, at[path]), dot(own[path], own[path], at[path]))
            for path, along in scoring.direction.items()
        }

    found = jax.tree.map(
        lambda array: jnp.moveaxis(array, 0, -1), lax.map(of_example, jnp.arange(scoring.Batch.size))
    )
    if scoring.Batch.size > 1:
        found = checked_apart(found, *losses_alone(task))
    dots, squares = ({path: pair[at] for path, pair in found.items()} for at in range(2))
    return dots, squares


def dot(array: Any, other: Any, layers: int | None) -> Any:
    """The sum of the products, of each layer where a dimension has layers."""
    first, second = (raw_array(one).astype(jnp.float32) for one in (array, other))
    return jnp.sum(first * second, tuple(n for n in range(first.ndim) if n != layers))
