"""The second-order term of In-Run Data Shapley."""

from typing import Any

import equinox as eqx
import jax

from ._losses import Loss, Objective, Reduction, Task


def shapley_direction(
    model: Any,
    per_example_loss: Loss,
    val_batch: Any,
    *,
    direction: Any,
    gradients: Any,
    learning_rate: Any,
    reduction: Reduction = "mean",
    tokens: Reduction | None = None,
    trainable: Any = eqx.is_inexact_array,
) -> Any:
    """A direction whose scores are In-Run Data Shapley values to second order (Wang et al. 2024).

    For a step of gradient descent `w - learning_rate * gradients`, the Shapley value of an example for the
    reduction of the validation loss is to second order

        learning_rate * part_i * <grad_i, direction - learning_rate / 2 * H @ gradients>

    with the Hessian `H` of the validation loss, and `part_i` the example's factor in the reduced loss, 1 for
    "sum" and 1 / batch for "mean". Without the second term it is the first-order value.

    Args:
        model: any module, before the step.
        per_example_loss: as in `val_direction`.
        val_batch: what it takes.
        direction: the gradient of the validation loss.
        gradients: of the training batch's reduced loss.
        learning_rate: of the step.
        reduction: of the validation loss, as for `direction`.
        tokens: the same.
        trainable: as in `grad_dot`.

    Returns:
        A direction for `grad_dot`. Cost: one Hessian-vector product.
    """
    task = Task.of(model, per_example_loss, val_batch, Objective(reduction, tokens), trainable)
    _, product = jax.jvp(jax.grad(task.loss), (task.params,), (gradients,))
    return jax.tree.map(
        lambda along, curved: along - (learning_rate / 2 * curved).astype(along.dtype), direction, product
    )
