"""One step of training, as a pure function of a batch and a state."""

from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from .batches import TokenBatch

Metrics: TypeAlias = dict[str, Array]
"""Named scalars, or arrays of one number per layer."""

LossFunction: TypeAlias = Callable[[Any, TokenBatch], tuple[Float[Array, ""], Metrics]]
"""(model, batch) to the scalar to minimise and metrics, of which `loss` is the one to show."""


class TrainState(eqx.Module):
    """All that changes from step to step.

    Attributes:
        step: steps done.
        model: the model; its floating-point arrays are trained.
        optimizer_state: the optimizer's own.
    """

    step: Int[Array, ""]
    model: Any
    optimizer_state: optax.OptState

    @staticmethod
    def init(model: Any, optimizer: optax.GradientTransformation) -> "TrainState":
        """The state before the first step."""
        return TrainState(
            jnp.zeros((), jnp.int32), model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        )


def train_step(
    batch: TokenBatch,
    state: TrainState,
    *,
    loss_function: LossFunction,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Metrics]:
    """Moves the state one step down the gradient of the loss on `batch`.

    Meant to be compiled with the state donated, so that it is updated in place:
    `eqx.filter_jit(functools.partial(train_step, ...), donate="all-except-first")`.

    Returns:
        The next state, and the loss function's metrics (before the step) with `grad_norm` (before clipping).
    """
    compute = eqx.filter_value_and_grad(loss_function, has_aux=True)
    (_, metrics), gradients = compute(state.model, batch)
    trained = eqx.filter(state.model, eqx.is_inexact_array)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, trained)
    model = eqx.apply_updates(state.model, updates)
    return TrainState(state.step + 1, model, optimizer_state), {
        **metrics,
        "grad_norm": optax.tree.norm(gradients),
    }
