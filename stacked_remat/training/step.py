"""One step of training, as a pure function of a batch and a state."""

from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Float, Int

from .batches import TokenBatch

Metrics: TypeAlias = dict[str, Array]
"""Named scalars, or arrays of one number per layer."""

LossFunction: TypeAlias = Callable[[Any, TokenBatch], tuple[Float[Array, ""], Metrics]]
"""(model, batch) to the scalar to minimise and metrics, of which `loss` is the one to show."""

Trainable: TypeAlias = Any
"""Which arrays of a model are trained: a predicate of a leaf, or a tree of bools like the model."""


class TrainState(eqx.Module):
    """All that changes from step to step, and what the model holds besides.

    Attributes:
        step: steps done.
        trained: the model with `None` for all that is not trained.
        frozen: the model with `None` for all that is; no step changes it. A checkpoint of what training has
            changed is the state without it.
        optimizer_state: the optimizer's own, of the trained arrays alone.
    """

    step: Int[Array, ""]
    trained: Any
    frozen: Any
    optimizer_state: optax.OptState

    @staticmethod
    def init(
        model: Any, optimizer: optax.GradientTransformation, trainable: Trainable = eqx.is_inexact_array
    ) -> "TrainState":
        """The state before the first step.

        Args:
            model: any tree.
            optimizer: the one that `train_step` is to use.
            trainable: what is trained; all floating-point arrays unless told otherwise.

        Raises:
            ValueError: what is to be trained has no gradient, or is nothing at all.
        """
        trained, frozen = eqx.partition(model, trainable)
        _check_differentiable(trained)
        return TrainState(jnp.zeros((), jnp.int32), trained, frozen, optimizer.init(trained))

    @property
    def model(self) -> Any:
        """The whole model; copies nothing."""
        return eqx.combine(self.trained, self.frozen)


def train_step(
    batch: TokenBatch,
    state: TrainState,
    *,
    loss_function: LossFunction,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Metrics]:
    """Moves the state one step down the gradient of the loss on `batch`.

    What is frozen gets neither gradient nor optimizer state. Meant to be compiled with the state donated, so
    that it is updated in place, and what is frozen stays where it is:
    `eqx.filter_jit(functools.partial(train_step, ...), donate="all-except-first")`.

    Returns:
        The next state, and the loss function's metrics (before the step) with `grad_norm` (before clipping).
    """

    def loss_of(trained: Any) -> tuple[Float[Array, ""], Metrics]:
        return loss_function(eqx.combine(trained, state.frozen), batch)

    (_, metrics), gradients = eqx.filter_value_and_grad(loss_of, has_aux=True)(state.trained)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, state.trained)
    trained = eqx.apply_updates(state.trained, updates)
    return TrainState(state.step + 1, trained, state.frozen, optimizer_state), {
        **metrics,
        "grad_norm": optax.tree.norm(gradients),
    }


def _check_differentiable(trained: Any) -> None:
    leaves = jtu.tree_leaves_with_path(trained)
    if not leaves:
        raise ValueError("Nothing of the model is trainable: no leaf was picked that has a gradient.")
    for path, leaf in leaves:
        if not eqx.is_inexact_array(leaf):
            raise ValueError(
                f"model{jtu.keystr(path)} can't be trained: {leaf!r} is no floating-point array. Leave it "
                "out of `trainable`."
            )
