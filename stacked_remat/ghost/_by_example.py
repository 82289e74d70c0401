"""Losses of examples that are computed alone, compared with those in the batch."""

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp

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
    found = eqx.filter_jit(_compared)(task)
    if found.are_apart:
        return
    raise ValueError(
        f"Example {int(found.worst)} has the loss {float(found.alone):.6g} alone, and"
        f" {float(found.whole):.6g} in the batch of {found.count}: it depends on other"
        f" examples. {_SHARED}"
    )


class _Comparison(NamedTuple):
    """Losses of examples alone and in the batch."""

    # Whether they are the same for all.
    are_apart: Any
    # The example that differs most, and its losses alone and in the whole batch.
    worst: Any
    alone: Any
    whole: Any
    # How many examples there are.
    count: int


def _compared(task: Task) -> _Comparison:
    # Numbers alone, which every process of a run can read
    alone, whole, most = losses_alone(task)
    differences = jnp.abs(alone - whole)
    # A loss that is NaN alone or in the batch compares as False, and is left to the
    # run.
    are_apart = ~jnp.any(differences > most)
    worst = jnp.argmax(jnp.nan_to_num(differences, nan=-1.0, posinf=jnp.inf))
    return _Comparison(are_apart, worst, alone[worst], whole[worst], len(whole))


def losses_alone(task: Task) -> tuple[Any, Any, Any]:
    """The losses of examples alone, those in the batch, and by how much they may
    differ.

    Losses are often differences of larger numbers: small ones may differ by a tenth of
    what a loss of 1 may.
    """
    traced = trace(task.of_model, task.model, task.batch)
    objective = task.objective
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
