"""A training step as a pure function of a batch and a state."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis
from haliax.util import is_named_array
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray, UInt32

from .._fused.update import FusedState, fused_update
from .._microbatches import in_microbatches
from .._pipeline.value_and_grad import Pipeline, pipeline
from .._scan.marks import shared
from .batches import BATCH_AXIS, TokenBatch
from .mesh import Partitioning
from .stage_rows import slice_to_layers, stack_over_stages, update_without_rows
from .trainer_config import PipelineConfig, TrainerConfig

T = TypeVar("T")
Metrics: TypeAlias = dict[str, Array]
"""Named scalars, or arrays of one number per layer."""

LossFunction: TypeAlias = Callable[..., tuple[Float[Array, ""], Metrics]]
"""From (model, batch) to the scalar to minimise and metrics, one of which is `loss`.

A loss that draws random numbers, as dropout does, takes a key as its third argument
(`TrainState.key`).

`loss` is the mean over the batch's weights, and differentiable. The rest of the scalar
is averaged over microbatches, where `loss` is weighted by their shares of the weights.
That is not the rest of the whole batch where it is a product of means, as the
load-balance loss of experts is: write a `LossWithSums`.
"""

Trainable: TypeAlias = Any
"""Which arrays of a model are trained: a predicate on leaves, or a tree of bools like
the model.
"""

_MICROBATCH = "microbatch"


@dataclasses.dataclass(frozen=True)
class LossWithSums:
    """A loss function with a term that depends on sums over all examples of a batch.

    With microbatches, the term and its gradient are those of the whole batch. That
    takes the sums of all microbatches before the first gradient: one more forward pass.

    Attributes:
        parts: from (model, batch, and a key if the loss takes one) to `(loss, sums)`
            and metrics, one of which is `loss`, the mean over the batch's weights.
            `sums` is a tree of floating-point arrays; those of a batch are the sums of
            those of its microbatches.
        term: from (model, sums of a batch) to a scalar that is added to the loss, and
            metrics.
    """

    parts: Callable[..., tuple[tuple[Float[Array, ""], Any], Metrics]]
    term: Callable[[Any, Any], tuple[Float[Array, ""], Metrics]]

    def __call__(
        self, model: Any, batch: TokenBatch, *keys: PRNGKeyArray
    ) -> tuple[Array, Metrics]:
        """The loss of a batch, as a `LossFunction`."""
        (loss, sums), metrics = self.parts(model, batch, *keys)
        term, more = self.term(model, sums)
        return loss + term, {**metrics, **more}


@dataclasses.dataclass(frozen=True)
class FusedOptimizer:
    """An optimizer that is applied within the backward pass, to each layer once its
    gradient exists.

    See `stacked_remat.fused_update`. No gradient of a stack exists, so there are no
    microbatches, and a step that is not finite cannot be skipped.

    Attributes:
        optimizer: updates every layer by its own gradient.
        max_grad_norm: gradients with a larger global norm are scaled down to it; None
            for no clipping. It takes one more backward pass over the stacks.
    """

    optimizer: optax.GradientTransformation
    max_grad_norm: float | None = None

    def init(self, model: Any, trainable: Trainable) -> FusedState:
        """The state for the arrays of a model that are trained."""
        return fused_update(lambda *_: None, self.optimizer, trainable=trainable).init(
            model
        )


class TrainState(eqx.Module):
    """The state of training between two steps.

    Attributes:
        step: steps done.
        trained: the model with `None` in place of all leaves that are not trained.
        frozen: the model with `None` in place of all leaves that are trained. No step
            changes it, and checkpoints leave it out.
        optimizer_state: the optimizer's state for the trained arrays.
        key: the words of the key that is folded with the number of the step for each
            step's random numbers; None for a loss that draws none.
        skips: how many of the latest steps in a row were skipped because they were not
            finite.
    """

    step: Int[Array, ""]
    trained: Any
    frozen: Any
    optimizer_state: optax.OptState | FusedState
    key: UInt32[Array, " words"] | None
    skips: Int[Array, ""]

    @staticmethod
    def init(
        model: Any,
        optimizer: optax.GradientTransformation | FusedOptimizer,
        trainable: Trainable = eqx.is_inexact_array,
        *,
        key: PRNGKeyArray | None = None,
    ) -> "TrainState":
        """The state before the first step.

        Args:
            model: any tree.
            optimizer: the optimizer of the step.
            trainable: which arrays are trained; all floating-point arrays by default.
            key: for a loss that draws random numbers; each step and microbatch has its
                own key.

        Raises:
            ValueError: no array is trainable, or one that is not of floating-point
                numbers.
        """
        trained, frozen = eqx.partition(model, trainable)
        if not jax.tree.leaves(trained):
            raise ValueError(
                "Nothing of the model is trainable: `trainable` selects no leaf."
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
            if not eqx.is_inexact_array(leaf):
                raise ValueError(
                    f"model{jax.tree_util.keystr(path)} can't be trained: {leaf!r} is"
                    " not a floating-point array. Leave it out of `trainable`."
                )
        is_fused = isinstance(optimizer, FusedOptimizer)
        return TrainState(
            jnp.zeros((), jnp.int32),
            trained,
            frozen,
            optimizer.init(model, trainable) if is_fused else optimizer.init(trained),
            None if key is None else jax.random.key_data(key),
            jnp.zeros((), jnp.int32),
        )

    @property
    def model(self) -> Any:
        """The whole model, without copies."""
        return eqx.combine(self.trained, self.frozen)

    @property
    def loss_keys(self) -> tuple[PRNGKeyArray, ...]:
        """What the loss of the next step takes beside the model and the batch: a key,
        or nothing.
        """
        keys = () if self.key is None else (jax.random.wrap_key_data(self.key),)
        return tuple(jax.random.fold_in(key, self.step) for key in keys)


Compute: TypeAlias = Callable[[TokenBatch, Any, Any], tuple[Any, Metrics, Any]]
"""From a microbatch, its share of the batch's weights and its number to gradients,
metrics and more.
"""


class TrainStep(eqx.Module):
    """A function from a batch and a state to the next state, by the gradient of the
    loss on the batch.

    It also returns the loss function's metrics (before the step) with `grad_norm`
    (before clipping) and, with `skip_nonfinite`, `skips`. Frozen arrays get neither
    gradients nor optimizer state. Compile it with the state donated, so that it is
    updated in place: `eqx.filter_jit(step, donate="all-except-first")`.

    Attributes:
        loss_function: the loss to minimise.
        optimizer: the optimizer that the state was initialised with.
        microbatches: number of equal parts of the batch that are processed one after
            the other.
        gradient_dtype: dtype in which gradients are added up.
        skip_nonfinite: whether a step with a loss or gradient that is not finite
            changes only `step` and `skips`.
        partitioning: the sharding of weights, gradients and optimizer state; must be
            active while the step is traced. One device if not given.
        pipeline: an axis of its mesh over which microbatches go through the layers, as
            `stacked_remat.pipeline`. Without effect where that has one device.

    Raises:
        ValueError: a `FusedOptimizer` with microbatches, `skip_nonfinite` or a
            pipeline.

    Memory: the model's, and with microbatches one more copy of the trained arrays in
    `gradient_dtype`.

    Cost: that of a forward and a backward pass; microbatches of a `LossWithSums` take
    one more forward pass.
    """

    loss_function: LossFunction
    optimizer: optax.GradientTransformation | FusedOptimizer
    microbatches: int = 1
    gradient_dtype: DTypeLike = jnp.float32
    skip_nonfinite: bool = False
    partitioning: Partitioning | None = None
    pipeline: PipelineConfig | None = None

    @staticmethod
    def of(config: TrainerConfig, **others: Any) -> "TrainStep":
        """The step with the settings of a config, and the loss, optimizer and
        partitioning.
        """
        return TrainStep(
            microbatches=config.update.microbatches,
            gradient_dtype=config.precision.gradients,
            skip_nonfinite=config.update.on_nonfinite == "skip",
            pipeline=config.pipeline,
            **others,
        )

    def __check_init__(self) -> None:
        if isinstance(self.optimizer, FusedOptimizer) and (
            self.microbatches > 1 or self.skip_nonfinite or self.pipeline is not None
        ):
            raise ValueError(
                "A fused update has changed the weights before all gradients are known:"
                " it takes neither microbatches nor skip_nonfinite, nor a pipeline."
            )

    def __call__(
        self, batch: TokenBatch, state: TrainState
    ) -> tuple[TrainState, Metrics]:
        """The next state, and the metrics."""
        if isinstance(self.optimizer, FusedOptimizer):
            return self._fused(batch, state, self.optimizer)
        if self.is_pipelined:
            found = self._in_stages(batch, state)
            after, metrics = update_without_rows(self._updated, *found, state)
            return self.shard(after), metrics
        after, metrics, _ = self.by(self.gradients_of(state, batch), batch, state)
        return after, metrics

    def shard(self, tree: T) -> T:
        """A tree of weights, gradients or optimizer state, sharded."""
        return (
            tree if self.partitioning is None else self.partitioning.shard_weights(tree)
        )

    def gradients_of(self, state: TrainState, batch: TokenBatch) -> Compute:
        """The gradients of each microbatch's part of the objective of `batch`.

        The mean loss of the batch is the sum of the microbatches' mean losses times
        their shares of the weights.
        """
        sums = self._sums_of_batch(state, batch)

        def compute(
            part: TokenBatch, share: Any, index: Any
        ) -> tuple[Any, Metrics, None]:
            keys = self._keys(state.loss_keys, index)

            def share_of_loss(trained: Any) -> tuple[Array, Metrics]:
                # Which shards the gradients too
                model = eqx.combine(self.shard(trained), state.frozen)
                return self._share_of_objective(model, part, share, keys, sums)

            return *eqx.filter_grad(share_of_loss, has_aux=True)(state.trained), None

        return compute

    def _keys(
        self, keys: tuple[PRNGKeyArray, ...], index: Any
    ) -> tuple[PRNGKeyArray, ...]:
        """The keys of a microbatch, from those of the step."""
        if self.microbatches == 1:
            return keys
        # Microbatches of one key would have the same noise.
        return tuple(jax.random.fold_in(key, index) for key in keys)

    def _share_of_objective(
        self,
        model: Any,
        part: TokenBatch,
        share: Any,
        keys: tuple[PRNGKeyArray, ...],
        sums: tuple[Any, Any] | None,
    ) -> tuple[Array, Metrics]:
        """What a microbatch adds to the objective of the batch, and its metrics.

        With S the sum of the microbatches' sums s, the gradient of the term A(model, S)
        is that of A at a constant S, plus dA/dS times the gradient of S, of which each
        microbatch adds that of its own s. `sums` are S and dA/dS, constants here alone:
        their derivatives by the state exist, as replays need them.
        """
        loss = self.loss_function
        count = self.microbatches
        if count == 1:
            return loss(model, part, *keys)
        # The loss is a mean over the weights of its own part: that of the batch is
        # their mean by shares of the weights, not by numbers of rows.
        if sums is None:
            objective, metrics = loss(model, part, *keys)
            rest = (objective - metrics["loss"]) / count
            return metrics["loss"] * share + rest, metrics
        total, slope = sums
        with_sums: Any = loss
        (own_loss, own_sums), metrics = with_sums.parts(model, part, *keys)
        term, more = with_sums.term(model, total)
        products = jax.tree.map(
            lambda one, other: jnp.sum(one * other), slope, own_sums
        )
        objective = own_loss * share + sum(jax.tree.leaves(products)) + term / count
        return objective, {**metrics, **more}

    def _sums_of_batch(
        self, state: TrainState, batch: TokenBatch
    ) -> tuple[Any, Any] | None:
        """The sums of all microbatches of a `LossWithSums`, and the gradient of its
        term by them; None where the loss needs none.
        """
        loss = self.loss_function
        count = self.microbatches
        if count == 1 or not isinstance(loss, LossWithSums):
            return None
        model = eqx.combine(self.shard(state.trained), state.frozen)

        # One more forward pass: no gradient can be taken before the sums of the last
        # microbatch are there.
        if self.is_pipelined:
            total = self._sums_in_stages(loss, model, batch, state.loss_keys)
        else:
            parts = _split(batch, count)

            def sums_of(index: Any) -> Any:
                keys = self._keys(state.loss_keys, index)
                return loss.parts(model, _microbatch(parts, index), *keys)[0][1]

            def add(total: Any, index: Array) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, sums_of(index)), None

            zeros = jax.tree.map(
                lambda sums: jnp.zeros(sums.shape, sums.dtype),
                jax.eval_shape(sums_of, 0),
            )
            total, _ = jax.lax.scan(add, zeros, jnp.arange(count))
        model = slice_to_layers(model)
        slope, _ = jax.grad(lambda sums: loss.term(model, sums), has_aux=True)(total)
        return total, slope

    # --- Layers over devices

    @property
    def is_pipelined(self) -> bool:
        """Whether microbatches go through layers that are divided over devices."""
        if self.pipeline is None or self.partitioning is None:
            return False
        return self.partitioning.mesh.shape[self.pipeline.axis] > 1

    def evaluated(self, loss: LossFunction) -> LossFunction:
        """A loss without derivatives, whose only metric is the mean `loss` of a batch:
        with the layers where they are in the step.
        """
        if not self.is_pipelined:
            return loss

        def share_of_loss(model: Any, part: TokenBatch, share: Array) -> Array:
            return loss(model, part)[1]["loss"] * share[0] * self.microbatches

        def evaluated(model: Any, batch: TokenBatch) -> tuple[Array, Metrics]:
            shares = self._shares(batch)
            value = self._pipeline(share_of_loss).value(model, batch, shares)
            return value, {"loss": value}

        return evaluated

    def _in_stages(self, batch: TokenBatch, state: TrainState) -> tuple[Any, Metrics]:
        """The gradients and metrics of a batch."""
        count = self.microbatches

        def objective(
            model: Any, part: TokenBatch, share: Array, index: Array, more: Any
        ) -> tuple[Array, Metrics]:
            keys, sums = more
            found, metrics = self._share_of_objective(
                model, part, share[0], self._keys(keys, index[0]), sums
            )
            # The pipeline takes the mean over microbatches
            return found * count, metrics

        run = self._pipeline(objective, trainable=marks(state.trained), has_aux=True)
        model = eqx.combine(self.shard(state.trained), state.frozen)
        shares = self._shares(batch)
        more = shared((state.loss_keys, self._sums_of_batch(state, batch)))
        (_, metrics), gradients = run.value_and_grad(
            model, batch, shares, jnp.arange(count), more
        )
        return self.shard(gradients), of_whole_batch(metrics, shares)

    def _sums_in_stages(
        self,
        loss: LossWithSums,
        model: Any,
        batch: TokenBatch,
        keys: tuple[PRNGKeyArray, ...],
    ) -> Any:
        """The sums of all microbatches of a loss."""
        structures = []

        def sums_of(
            model: Any, part: TokenBatch, index: Array, keys: Any
        ) -> tuple[Array, Any]:
            (value, sums), _ = loss.parts(model, part, *self._keys(keys, index[0]))
            # Without names of axes, which arrays of all microbatches can't have
            leaves, structure = jax.tree.flatten(sums)
            structures.append(structure)
            return value, [*map(jnp.asarray, leaves)]

        run = self._pipeline(sums_of, has_aux=True)
        numbers = jnp.arange(self.microbatches)
        _, leaves = run.value(model, batch, numbers, shared(keys))
        totals = [jnp.sum(leaf, axis=0) for leaf in leaves]
        return jax.tree.unflatten(structures[0], totals)

    def _pipeline(self, loss: Callable[..., Any], **options: Any) -> Pipeline:
        settings = self.pipeline
        partitioning = self.partitioning
        assert settings is not None and partitioning is not None

        return pipeline(
            loss,
            settings.axis,
            microbatches=self.microbatches,
            schedule=settings.schedule,
            stack=functools.partial(stack_over_stages, partitioning=partitioning),
            gradient_dtype=self.gradient_dtype,
            **options,
        )

    def _shares(self, batch: TokenBatch) -> Array:
        """The share of each microbatch in the weights of a batch."""
        Microbatch = Axis(_MICROBATCH, self.microbatches)
        weights = _split(batch, self.microbatches).weights
        sums = hax.sum(weights, [axis for axis in weights.axes if axis != Microbatch])
        return sums.array / batch.total_weight

    def by(
        self, compute: Compute, batch: TokenBatch, state: TrainState
    ) -> tuple[TrainState, Metrics, Any]:
        """The next state and the metrics by these gradients, and what else is computed
        for microbatches.
        """
        gradients, metrics, found = self._of_microbatches(compute, batch, state.trained)
        after, metrics = self._updated(gradients, metrics, state)
        return self.shard(after), metrics, found

    def _updated(
        self, gradients: Any, metrics: Metrics, state: TrainState
    ) -> tuple[TrainState, Metrics]:
        """The next state, not sharded yet, and the metrics, by the gradients of a
        batch.
        """
        optimizer: Any = self.optimizer
        updates, optimizer_state = optimizer.update(
            gradients, state.optimizer_state, state.trained
        )
        metrics = {
            **metrics,
            "grad_norm": optax.tree.norm(optax.tree.cast(gradients, jnp.float32)),
        }

        def add(leaf: jax.Array, update: jax.Array) -> jax.Array:
            # In float32, and rounded once: a small update is lost if it is rounded to
            # bfloat16 before it is added.
            return (leaf.astype(update.dtype) + update).astype(leaf.dtype)

        trained = jax.tree.map(add, state.trained, updates)
        after = _after(state, trained, optimizer_state)
        if self.skip_nonfinite:
            finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
            skipped = dataclasses.replace(state, step=after.step, skips=state.skips + 1)
            # Frozen weights are the same in both, and are not copied by a select.
            both = (dataclasses.replace(each, frozen=None) for each in (after, skipped))
            kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), *both)
            after = dataclasses.replace(kept, frozen=state.frozen)
            metrics["skips"] = kept.skips
        return after, metrics

    def _of_microbatches(
        self, compute: Compute, batch: TokenBatch, trained: Any
    ) -> tuple[Any, Metrics, Any]:
        """The gradients and metrics of a batch, whose row `i * count + n` is row `i` of
        microbatch `n`.
        """
        count = self.microbatches
        dtype = self.gradient_dtype
        if count == 1:
            gradients, metrics, found = compute(batch, 1.0, 0)
            return optax.tree.cast(gradients, dtype), metrics, found
        parts = _split(batch, count)
        shares = self._shares(batch)

        def add(summed: Any, index: Array) -> tuple[Any, tuple[Metrics, Any]]:
            part = _microbatch(parts, index)
            gradients, metrics, found = compute(part, shares[index], index)
            summed = jax.tree.map(
                lambda total, new: total + new.astype(dtype), summed, gradients
            )
            return summed, (metrics, found)

        # A loop and not an unrolled sum, so that one microbatch's activations exist at
        # a time.
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), trained)
        gradients, (metrics, found) = jax.lax.scan(add, zeros, jnp.arange(count))
        return gradients, of_whole_batch(metrics, shares), found

    def _fused(
        self, batch: TokenBatch, state: TrainState, optimizer: FusedOptimizer
    ) -> tuple[TrainState, Metrics]:
        is_trained = marks(state.trained)
        before = state.optimizer_state
        step = fused_update(
            self.loss_function,
            optimizer.optimizer,
            trainable=is_trained,
            has_aux=True,
            max_grad_norm=optimizer.max_grad_norm,
            gradient_dtype=self.gradient_dtype,
        )
        model = eqx.combine(self.shard(state.trained), state.frozen)
        result = step(model, before, batch, *state.loss_keys)  # pyright: ignore[reportArgumentType]
        after = _after(state, eqx.filter(result.model, is_trained), result.state)
        return self.shard(after), {**result.value[1], "grad_norm": result.grad_norm}


def marks(trained: Any) -> Any:
    """True where the tree has an array, False where it has None."""
    return jax.tree.map(
        lambda leaf: leaf is not None, trained, is_leaf=lambda leaf: leaf is None
    )


def _after(state: TrainState, trained: Any, optimizer_state: Any) -> TrainState:
    return dataclasses.replace(
        state,
        step=state.step + 1,
        trained=trained,
        optimizer_state=optimizer_state,
        skips=jnp.zeros_like(state.skips),
    )


def of_whole_batch(metrics: Metrics, shares: Array) -> Metrics:
    """The metrics of a batch from those of its microbatches, `[microbatch, ...]`."""
    # Only the loss is known to be a mean over weights; for other metrics this is a mean
    # of means.
    means = {name: jnp.mean(values, axis=0) for name, values in metrics.items()}
    return {**means, "loss": jnp.sum(metrics["loss"] * shares)}


def _split(batch: TokenBatch, count: int) -> TokenBatch:
    Rows = batch.weights.resolve_axis(BATCH_AXIS)
    return in_microbatches(batch, Rows, Axis(_MICROBATCH, count))


def _microbatch(parts: TokenBatch, index: Any) -> TokenBatch:
    return jax.tree.map(
        lambda leaf: leaf[_MICROBATCH, index], parts, is_leaf=is_named_array
    )
