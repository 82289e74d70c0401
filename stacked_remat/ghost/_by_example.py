"""Losses of examples that are computed alone, compared with those in the batch."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ._examples import Examples
from ._losses import Loss, Objective, Reduction, Task
from ._traced import rounding, trace

_SHARED = (
    "Keep what examples share out of per_example_loss: normalise within an example, or"
    " by statistics that the batch holds; divide by a constant, not by the size of the"
    " batch or a sum over it; give what an example is compared with as an array of its"
    " own; return losses in the order of the batch; let it hold what tells examples"
    " apart, such as a random key for each. An array of the batch that all examples"
    ' share is marked stacked_remat.shared(array). granularity="total" scores losses of'
    " any kind."
)


def check_examples(
    model: Any,
    per_example_loss: Loss,
    batch: Any,
    *,
    tokens: Reduction | None = None,
    has_aux: bool = False,
) -> None:
    """Compares the losses of examples alone with those in the batch, before scores are
    taken of them.

    Args:
        model: any module.
        per_example_loss: as in `grad_dot`.
        batch: what it takes.
        tokens: as in `grad_dot`.
        has_aux: the same.

    Raises:
        ValueError: an example has another loss alone, by more than rounding in the
            lowest precision of the program: about 1 part in 100,000 in float32, and in
            40 in bfloat16.

    Cost: two forward passes over the batch. Not within `jax.jit`, where `grad_dot` has
    `check`.
    """
    task = Task.of(model, per_example_loss, batch, Objective("mean", tokens, has_aux))
    alone, whole, most = eqx.filter_jit(losses_alone)(task)
    differences = np.abs(np.asarray(alone) - np.asarray(whole))
    if not (differences > most).any():
        return
    # A loss that is NaN alone or in the batch compares as False, and is left to the
    # run.
    worst = int(np.nanargmax(differences))
    raise ValueError(
        f"Example {worst} has the loss {alone[worst]:.6g} alone, and {whole[worst]:.6g}"
        f" in the batch of {len(whole)}: it depends on other examples. {_SHARED}"
    )


def losses_alone(task: Task) -> tuple[Any, Any, Any]:
    """The losses of examples alone, those in the batch, and by how much they may
    differ.

    Losses are often differences of larger numbers: small ones may differ by a tenth of
    what a loss of 1 may.
    """
    traced, objective = trace(task.of_model, task.model, task.batch), task.objective
    whole = objective.of_examples(task.returned(task.params))
    most = rounding(traced.closed.jaxpr) * (jnp.max(jnp.abs(whole)) + 0.1)
    examples = Examples.of(task.batch, objective.examples(traced.shapes))
    alone = examples.map(
        lambda _, example: objective.of_examples(task.of_example(task.model, example))[
            0
        ]
    )
    return alone, whole, most


def checked_apart(found: Any, alone: Any, whole: Any, most: Any) -> Any:
    """What was found, with an error at run time where an example has another loss alone
    than in the batch.
    """
    message = f"Examples have other losses alone than in this batch. {_SHARED}"
    return eqx.error_if(found, jnp.any(jnp.abs(alone - whole) > most), message)
