"""One step of training, as a pure function of a batch and a state."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis
from haliax.util import is_named_array
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray

from .batches import BATCH_AXIS, TokenBatch
from .mesh import Partitioning
from .trainer_config import TrainerConfig

T = TypeVar("T")

Metrics: TypeAlias = dict[str, Array]
"""Named scalars, or arrays of one number per layer."""

LossFunction: TypeAlias = Callable[[Any, TokenBatch], tuple[Float[Array, ""], Metrics]]
"""(model, batch) to the scalar to minimise and metrics, of which `loss` is the one to show.

`loss` is the mean over the batch's weights, with its gradient; what the scalar has beyond it (a load-balance
loss) is taken for a mean over the batch. Only microbatches make a difference between the two.
"""

Trainable: TypeAlias = Any
"""Which arrays of a model are trained: a predicate of a leaf, or a tree of bools like the model."""

_MICROBATCH = "microbatch"


@dataclass(frozen=True)
class RandomLoss:
    """A loss function that draws random numbers, as dropout does.

    Attributes:
        function: maps (model, batch, key) to what a `LossFunction` returns; every step and microbatch has its
            key.
    """

    function: Callable[[Any, TokenBatch, PRNGKeyArray], tuple[Float[Array, ""], Metrics]]


class TrainState(eqx.Module):
    """All that changes from step to step, and what a step needs besides.

    Attributes:
        step: steps done.
        trained: the model with `None` for all that is not trained.
        frozen: the model with `None` for all that is; no step changes it. A checkpoint of what training has
            changed is the state without it.
        optimizer_state: the optimizer's own, of the trained arrays alone.
        key: every step's random numbers are drawn from it and the step's number.
        skips: steps skipped in a row up to now, because they were not finite.
    """

    step: Int[Array, ""]
    trained: Any
    frozen: Any
    optimizer_state: optax.OptState
    key: PRNGKeyArray
    skips: Int[Array, ""]

    @staticmethod
    def init(
        model: Any,
        optimizer: optax.GradientTransformation,
        trainable: Trainable = eqx.is_inexact_array,
        *,
        key: PRNGKeyArray | None = None,
    ) -> "TrainState":
        """The state before the first step.

        Args:
            model: any tree.
            optimizer: the one that `train_step` is to use.
            trainable: what is trained; all floating-point arrays unless told otherwise.
            key: for what is random in the steps; `jax.random.key(0)` if not given.

        Raises:
            ValueError: what is to be trained has no gradient, or is nothing at all.
        """
        trained, frozen = eqx.partition(model, trainable)
        _check_differentiable(trained)
        return TrainState(
            jnp.zeros((), jnp.int32),
            trained,
            frozen,
            optimizer.init(trained),
            jax.random.key(0) if key is None else key,
            jnp.zeros((), jnp.int32),
        )

    @property
    def model(self) -> Any:
        """The whole model; copies nothing."""
        return eqx.combine(self.trained, self.frozen)


def build_step(
    config: TrainerConfig,
    *,
    loss_function: LossFunction | RandomLoss,
    optimizer: optax.GradientTransformation,
    partitioning: Partitioning | None = None,
) -> Callable[[TokenBatch, TrainState], tuple[TrainState, Metrics]]:
    """`train_step` with the microbatches, dtypes and policies that a config asks for."""
    return functools.partial(
        train_step,
        loss_function=loss_function,
        optimizer=optimizer,
        microbatches=config.update.microbatches,
        gradient_dtype=config.precision.gradients,
        skip_nonfinite=config.update.on_nonfinite == "skip",
        partitioning=partitioning,
    )


def train_step(
    batch: TokenBatch,
    state: TrainState,
    *,
    loss_function: LossFunction | RandomLoss,
    optimizer: optax.GradientTransformation,
    microbatches: int = 1,
    gradient_dtype: DTypeLike = jnp.float32,
    skip_nonfinite: bool = False,
    partitioning: Partitioning | None = None,
) -> tuple[TrainState, Metrics]:
    """Moves the state one step down the gradient of the loss on `batch`.

    What is frozen gets neither gradient nor optimizer state. Meant to be compiled with the state donated, so
    that it is updated in place, and what is frozen stays where it is:
    `eqx.filter_jit(functools.partial(train_step, ...), donate="all-except-first")`.

    Args:
        batch: the step's data.
        state: where to start.
        loss_function: what to minimise.
        optimizer: what `state` was made with.
        microbatches: equal parts of the batch to go through one after the other.
        gradient_dtype: in which gradients are added up.
        skip_nonfinite: whether a step whose loss or gradient is not finite changes nothing but `step` and
            `skips`.
        partitioning: what weights, gradients and the optimizer's state are divided over; nothing if not
            given. The step is to be traced while it is active.

    Returns:
        The next state, and the loss function's metrics (before the step) with `grad_norm` (before clipping)
        and, with `skip_nonfinite`, `skips`.

    Memory: the model's, and with microbatches one more array like what is trained in `gradient_dtype`.
    """
    key = jax.random.fold_in(state.key, state.step)
    divided = partitioning.shard_weights if partitioning is not None else _as_it_is
    loss = _of_trained(loss_function, state.frozen, divided)
    if microbatches == 1:
        gradients, metrics = _gradients(loss, state.trained, batch, key, gradient_dtype)
    else:
        gradients, metrics = _accumulated(loss, state.trained, batch, key, gradient_dtype, microbatches)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, state.trained)
    metrics = {**metrics, "grad_norm": optax.tree.norm(_cast(gradients, jnp.float32))}
    after = TrainState(
        state.step + 1,
        _updated(state.trained, updates),
        state.frozen,
        optimizer_state,
        state.key,
        jnp.zeros_like(state.skips),
    )
    if skip_nonfinite:
        after = _unless_nonfinite(after, state, metrics)
        metrics["skips"] = after.skips
    return divided(after), metrics


_Loss: TypeAlias = Callable[[Any, TokenBatch, PRNGKeyArray], tuple[Float[Array, ""], Metrics]]


def _of_trained(
    loss_function: LossFunction | RandomLoss, frozen: Any, divided: Callable[[Any], Any]
) -> _Loss:
    """The loss as a function of what is trained, the batch and a key."""

    def loss(trained: Any, batch: TokenBatch, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        model = eqx.combine(divided(trained), frozen)  # what holds for weights holds for their gradients
        if isinstance(loss_function, RandomLoss):
            return loss_function.function(model, batch, key)
        return loss_function(model, batch)

    return loss


def _gradients(
    loss: _Loss, trained: Any, batch: TokenBatch, key: PRNGKeyArray, dtype: DTypeLike
) -> tuple[Any, Metrics]:
    (_, metrics), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(trained, batch, key)
    return _cast(gradients, dtype), metrics


def _accumulated(
    loss: _Loss, trained: Any, batch: TokenBatch, key: PRNGKeyArray, dtype: DTypeLike, count: int
) -> tuple[Any, Metrics]:
    """The gradient and metrics of the whole batch, a microbatch at a time.

    The mean loss of the batch is the sum over microbatches of their mean losses, each times its share of the
    weights.
    """
    parts = _split(batch, count)
    total = jnp.maximum(hax.sum(batch.weights).scalar(), 1.0)

    def share_of_loss(
        trained: Any, part: TokenBatch, key: PRNGKeyArray
    ) -> tuple[Array, tuple[Array, Metrics]]:
        objective, metrics = loss(trained, part, key)
        share = hax.sum(part.weights).scalar() / total
        auxiliary = objective - metrics["loss"]
        return metrics["loss"] * share + auxiliary / count, (share, metrics)

    def add(summed: Any, index: Array) -> tuple[Any, tuple[Array, Metrics]]:
        part = jax.tree.map(lambda leaf: leaf[_MICROBATCH, index], parts, is_leaf=is_named_array)
        compute = eqx.filter_grad(share_of_loss, has_aux=True)
        gradients, found = compute(trained, part, jax.random.fold_in(key, index))
        return jax.tree.map(lambda total, new: total + new.astype(dtype), summed, gradients), found

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), trained)
    gradients, (shares, metrics) = jax.lax.scan(add, zeros, jnp.arange(count))
    means = {name: jnp.mean(values, axis=0) for name, values in metrics.items()}
    return gradients, {**means, "loss": jnp.sum(metrics["loss"] * shares)}


def _split(batch: TokenBatch, count: int) -> TokenBatch:
    """The batch with a leading axis of microbatches.

    Rows are dealt out in turn, so that each device of a batch that is sharded by rows keeps its own.

    Raises:
        ValueError: the rows can't be dealt out evenly.
    """

    def split(leaf: Any) -> Any:
        rows = leaf.resolve_axis(BATCH_AXIS).size
        if rows % count:
            raise ValueError(
                f"A batch of {rows} sequences can't be cut into trainer.update.microbatches = {count} equal "
                f"parts; use a divisor of data.batch_size."
            )
        axes = (Axis(BATCH_AXIS, rows // count), Axis(_MICROBATCH, count))
        return leaf.unflatten_axis(BATCH_AXIS, axes).rearrange((_MICROBATCH, ...))

    return jax.tree.map(split, batch, is_leaf=is_named_array)


def _updated(trained: Any, updates: Any) -> Any:
    """Adds the updates in their dtype and rounds to that of the parameters."""
    return jax.tree.map(
        lambda leaf, update: (leaf.astype(update.dtype) + update).astype(leaf.dtype), trained, updates
    )


def _unless_nonfinite(after: TrainState, before: TrainState, metrics: Metrics) -> TrainState:
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    trained, optimizer_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (after.trained, after.optimizer_state),
        (before.trained, before.optimizer_state),
    )
    skips = jnp.where(finite, 0, before.skips + 1)
    return TrainState(after.step, trained, after.frozen, optimizer_state, after.key, skips)


def _check_differentiable(trained: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    if not leaves:
        raise ValueError("Nothing of the model is trainable: no leaf was picked that has a gradient.")
    for path, leaf in leaves:
        if not eqx.is_inexact_array(leaf):
            raise ValueError(
                f"model{jax.tree_util.keystr(path)} can't be trained: {leaf!r} is no floating-point array. "
                "Leave it out of `trainable`."
            )


def _as_it_is(tree: T) -> T:
    return tree


def _cast(tree: Any, dtype: DTypeLike) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
