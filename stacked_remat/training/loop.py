"""The training loop around the pure step: batches, evaluation, checkpoints, metrics and
progress.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from .._messages import did_you_mean, shown
from ..memory import target_of_device
from .batches import TokenBatch, TokenStream
from .checkpoint import Checkpoints
from .errors import ConfigError
from .mesh import Partitioning
from .progress import ConsoleProgress
from .run_folder import RunFolder
from .scoring import Scoring, StepScorer
from .stage_rows import add_stage_rows, remove_stage_rows, slice_to_layers
from .step import Metrics, TrainState, TrainStep
from .throughput import Clock, peak_memory_bytes, training_flops
from .trackers import Tracker
from .trainer_config import TrainerConfig


class NonFiniteLossError(ArithmeticError):
    """A loss or a gradient is NaN or infinite, and training stopped."""


@dataclass(frozen=True)
class Position:
    """The progress of a run apart from its arrays; saved in checkpoints as JSON.

    Attributes:
        step: steps done.
        data: position of the stream of batches.
        held_out_before: loss on each held-out set before the first step.
        held_out_after: loss on each held-out set at the latest evaluation.
        skipped: number of steps skipped so far because they were not finite.
        best_step: the step after which an evaluation found the lowest loss on held-out
            text so far; None before the first evaluation after a step.
        best_loss: that loss.
        evaluations_since_best: evaluations after that one.
    """

    step: int
    data: dict[str, Any]
    held_out_before: dict[str, float]
    held_out_after: dict[str, float]
    skipped: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    evaluations_since_best: int = 0


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run.

    Attributes:
        state: the state after the last step.
        held_out_before: loss on each held-out set before the first step.
        held_out_after: loss on each held-out set at the latest evaluation: after the
            last step, unless the run was stopped before.
        stopped_by: what `should_stop` returned if it stopped the run before its last
            step.
        best_step: the step with the lowest loss on held-out text, after which
            evaluation has it; None if there was none after a step.
        best_loss: that loss.
    """

    state: TrainState
    held_out_before: Mapping[str, float]
    held_out_after: Mapping[str, float]
    stopped_by: str | None = None
    best_step: int | None = None
    best_loss: float | None = None


@dataclass(frozen=True)
class RunOutputs:
    """Where a run writes its results; the caller closes them.

    Attributes:
        folder: for traces.
        checkpoints: where the state is saved.
        trackers: all receive the same metrics.
        progress: shows the run to the user.
    """

    folder: RunFolder
    checkpoints: Checkpoints
    trackers: Sequence[Tracker]
    progress: ConsoleProgress


def train(
    state: TrainState,
    step: TrainStep,
    *,
    schedule: optax.Schedule,
    training: TokenStream,
    evaluators: Mapping[str, Callable[[Any], float]],
    config: TrainerConfig,
    outputs: RunOutputs,
    position: Position | None = None,
    should_stop: Callable[[], str | None] = lambda: None,
    scoring: Scoring | None = None,
) -> TrainingResult:
    """Trains up to step `config.num_steps`, or until `config.patience` is over;
    evaluates before, after, and every `config.eval_every` steps.

    Args:
        state: the state to start from; its buffers are donated.
        step: has the loss, the optimizer that `state` was initialised with, and the
            sharding, which must be active.
        schedule: the learning rate by step, for the log.
        training: batches to train on.
        evaluators: for each held-out set by name, a function from the model to its
            loss, which is logged as `NAME_loss`.
        config: how long to train, and how often to log, evaluate and save.
        outputs: where to write results.
        position: the position of `state`, if it comes from a checkpoint.
        should_stop: called after every step and after the evaluation that follows it;
            the text that it returns, such as the name of a signal, ends the run after a
            checkpoint.
        scoring: how the examples of some steps are scored; the weights are updated as
            without. It takes no `FusedOptimizer`.

    Raises:
        NonFiniteLossError: a step is not finite, and the config does not say to skip
            it, or too many were skipped.
        ConfigError: the config goes by the loss on held-out text, and there is none.
    """
    held = _HeldState(step, add_stage_rows(state, step.partitioning))
    del state  # its arrays are donated to the first step
    scorer = None if scoring is None else StepScorer(scoring, step, outputs.progress)
    shard = (step.partitioning or Partitioning.one_device()).shard_batch
    profiler = config.profiler
    report = _Report(config, schedule, evaluators, outputs, position)
    done = report.position.step
    stopped_by = None
    if position is None:
        report.evaluate(0, held.state.model)
    else:
        training.set_state(position.data)
    if not report.is_over(done):
        # One batch ahead, so that the device never waits for the host to make it.
        batch = shard(training.next())
        report.prepare(step, held.state, batch)
    outputs.progress.start(config.num_steps, done)
    with contextlib.ExitStack() as closing, contextlib.ExitStack() as tracing:
        closing.callback(outputs.progress.stop)
        while not report.is_over(done) and stopped_by is None:
            done += 1
            if done == profiler.start_step:
                tracing.enter_context(jax.profiler.trace(str(outputs.folder.profile)))
            scores = scorer if scorer is not None and scorer.is_due(done) else None
            targets = _num_targets(batch.weights.array)
            metrics = held.advance(batch, scores)
            # A CPU may do the step before the call returns.
            loss: Any = metrics["loss"]
            ended = time.monotonic() if loss.is_ready() else None
            num_tokens = batch.num_tokens
            data = training.get_state()
            if done < config.num_steps:
                batch = shard(training.next())  # made while the device works
            # Waits for the step before, while the device does this one
            report.dispatched(_Step(done, metrics, targets, num_tokens, ended))
            # Asked once a step in all processes, which have to agree on the answer.
            asked = should_stop()
            due = _Due.after(done, config, outputs.checkpoints)
            # What is written has to be of steps that are done: else the loop stays a
            # step ahead.
            if any(due) or asked is not None or scores is not None:
                report.catch_up()
            if scores is not None:
                scores.log(done, data)
            if done == profiler.last_step:
                report.catch_up()
                tracing.close()
            if due.evaluation:
                report.evaluate(done, held.state.model)
                asked = asked or should_stop()  # an evaluation may take long
            stopped_by = None if report.is_over(done) else asked
            is_last = report.is_over(done) or stopped_by is not None
            is_for_all = is_last or due.checkpoint or report.is_best(done)
            if is_for_all or due.local_checkpoint:
                report.save(done, data, held.state, scorer, is_last, not is_for_all)
    return report.result(remove_stage_rows(held.state, step.partitioning), stopped_by)


class _Due(NamedTuple):
    """What follows a step, by its number and the clock."""

    evaluation: bool
    checkpoint: bool
    # In files near each process
    local_checkpoint: bool

    @staticmethod
    def after(done: int, config: TrainerConfig, checkpoints: Checkpoints) -> "_Due":
        every = config.eval_every
        is_last = done == config.num_steps
        return _Due(
            is_last or (every is not None and done % every == 0),
            checkpoints.is_due(done),
            checkpoints.is_local_due(done),
        )


@final
class _HeldState:
    """The state of a run, with the compiled step that replaces it.

    Between steps it is a flat list of arrays: to take apart and build again a tree of
    hundreds of modules costs the host milliseconds a step.
    """

    def __init__(self, step: TrainStep, state: TrainState):
        arrays, self._others = eqx.partition(state, eqx.is_array)
        self._leaves, self._structure = jax.tree.flatten(arrays)

        def stepped(
            leaves: list[Array], batch: TokenBatch
        ) -> tuple[list[Array], Metrics]:
            after, metrics = step(batch, self._built(leaves))
            return self._taken_apart(after), metrics

        # The state is donated, so that weights are updated in place; the batch isn't:
        # scores and the log read it after the step.
        self._step = jax.jit(stepped, donate_argnums=0)

    @property
    def state(self) -> TrainState:
        """The state after the latest step; the next one donates its arrays."""
        return self._built(self._leaves)

    def advance(self, batch: TokenBatch, scorer: StepScorer | None) -> Metrics:
        """Dispatches a step, by a scorer if its examples are scored; the metrics."""
        if scorer is None:
            self._leaves, metrics = self._step(self._leaves, batch)
        else:
            state, metrics = scorer.step(batch, self.state)
            self._leaves = self._taken_apart(state)
        return metrics

    def _taken_apart(self, state: TrainState) -> list[Array]:
        arrays, others = eqx.partition(state, eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        if structure != self._structure:
            raise TypeError(
                "A step returned a state of another structure than it was given:"
                f" {structure}, not {self._structure}."
            )
        # What is no array is part of the compiled step.
        before = dict(jax.tree_util.tree_leaves_with_path(self._others))
        for path, leaf in jax.tree_util.tree_leaves_with_path(others):
            if path not in before or leaf != before[path]:
                raise TypeError(
                    f"A step changed state{jax.tree_util.keystr(path)}, which is"
                    f" {shown(leaf)} now and no array. Let the optimizer's init make an"
                    " array of it: jnp.asarray(0)."
                )
        return leaves

    def _built(self, leaves: list[Array]) -> TrainState:
        return eqx.combine(jax.tree.unflatten(self._structure, leaves), self._others)


_RATES = 2**12  # learning rates in a table


@jax.jit
def _num_targets(weights: Array) -> Array:
    """The number of targets that count, over all processes."""
    return jnp.count_nonzero(weights)


class _Step(NamedTuple):
    """A step that is dispatched; arrays may not be there yet."""

    number: int
    metrics: Metrics
    targets: Any
    num_tokens: int
    ended: float | None  # when it was done, if that was as it was dispatched


def _set_of_best(source: str | None, evaluators: Mapping[str, Any]) -> str:
    """The held-out set that the best step goes by: that of a source, or the first one,
    which is the text of all sources together.
    """
    if source is None:
        return next(iter(evaluators), "held_out")
    if f"held_out/{source}" in evaluators:
        return f"held_out/{source}"
    sources = [name.split("/", 1)[1] for name in evaluators if "/" in name]
    if not sources:
        raise ConfigError(
            f"trainer.best_source names {source!r}, and there is one source: leave"
            " trainer.best_source out."
        )
    raise ConfigError(
        f"trainer.best_source names {source!r}, which is no source with held-out text;"
        f" there are {', '.join(sources)}.{did_you_mean(source, sources)}"
    )


@final
class _Report:
    """Reports steps and evaluations to trackers and the terminal, and stops a run that
    is not finite.
    """

    def __init__(
        self,
        config: TrainerConfig,
        schedule: optax.Schedule,
        evaluators: Mapping[str, Callable[[Any], float]],
        outputs: RunOutputs,
        position: Position | None,
    ):
        self.position = Position(0, {}, {}, {}) if position is None else position
        if config.by_held_out_loss and not evaluators:
            raise ConfigError(
                f"{config.by_held_out_loss} goes by the loss on held-out text, and none"
                " is held out. Raise data.held_out_fraction, or name files under"
                " data.sources.NAME.held_out."
            )
        self._set_of_best = _set_of_best(config.best_source, evaluators)
        self._config = config
        self._evaluators = evaluators
        self._outputs = outputs
        self._schedule = jax.jit(jax.vmap(schedule))
        self._clock = Clock()
        self._rates = np.empty(0)
        self._table_number = -1
        self._pending: _Step | None = None
        self._seconds_at_peak: float | None = None
        self._memory: int | None = None  # at the last line of the log

    def prepare(self, step: TrainStep, state: TrainState, batch: TokenBatch) -> None:
        """Finds the time of a step at the devices' peak, for the utilisation."""
        devices = list(state.step.devices())
        # A device whose peak is not known has no utilisation, unless the config has it.
        target = target_of_device(devices[0])
        peak = self._config.profiler.peak_flops or (target and target.flops)
        loss = lambda model, batch: step.loss_function(model, batch, *state.loss_keys)  # noqa: E731
        weights = state.model, state.trained
        if step.is_pipelined:
            weights = eqx.filter_eval_shape(slice_to_layers, weights)
        model, trained = weights
        flops = peak and training_flops(loss, model, batch, trained)
        if peak and flops:
            self._seconds_at_peak = flops / (peak * len(devices))

    def dispatched(self, step: _Step) -> None:
        """Waits for the step before, and reports it."""
        self.catch_up()
        self._pending = step

    def catch_up(self) -> None:
        """Waits for the step that was dispatched last, and reports it."""
        step = self._pending
        self._pending = None
        if step is not None:
            self._report(step)

    def _report(self, step: _Step) -> None:
        done = step.number
        metrics = step.metrics
        loss = float(metrics["loss"])
        norm = float(metrics["grad_norm"])
        self._clock.tick(step.num_tokens, step.ended)
        is_logged = done % self._config.log_every == 0
        is_logged = is_logged or done in (1, self._config.num_steps)
        if is_logged:
            self._memory = peak_memory_bytes()
        self._outputs.progress.advance(
            done, loss, self._clock.tokens_per_second, self._memory
        )
        targets = int(step.targets)
        # Not an error: a row of a mixture may have none by chance, and a loss of 0
        # changes only what decays.
        if not targets:
            self._outputs.progress.message(
                f"step {done} has no target: its loss is 0, and it teaches nothing"
            )
        if is_logged:
            speed = {
                "tokens_per_second": self._clock.tokens_per_second,
                "step_seconds": self._clock.step_seconds,
                "goodput": self._clock.goodput,
            }
            if self._memory is not None:
                speed["peak_memory_bytes"] = self._memory
            if (
                self._seconds_at_peak is not None
            ):  # model FLOPs utilisation (Chowdhery et al. 2022)
                speed["mfu"] = self._seconds_at_peak / self._clock.step_seconds
            self._log(
                done,
                {
                    **metrics,
                    "targets": targets,
                    "tokens": done * step.num_tokens,
                    "learning_rate": self._learning_rate(done),
                    **speed,
                },
            )
            self._clock.restart()
        if not (np.isfinite(loss) and np.isfinite(norm)):
            self._not_finite(done, metrics)

    def _learning_rate(self, done: int) -> float:
        """That of a step, from a table: to compute it, the device would first do the
        step that is dispatched.
        """
        # A skipped step doesn't advance the schedule, whose count is in the optimizer's
        # state.
        number, at = divmod(done - 1 - self.position.skipped, _RATES)
        if number != self._table_number:
            updates = number * _RATES + np.arange(_RATES, dtype=np.int32)
            self._rates = np.asarray(self._schedule(updates))
            self._table_number = number
        return float(self._rates[at])

    def evaluate(self, done: int, model: Any) -> None:
        """Reports the losses on held-out text after step `done`, if there is any."""
        if not self._evaluators:
            return
        with self._clock.paused():
            losses = {
                name: evaluate(model) for name, evaluate in self._evaluators.items()
            }
        if done == 0:
            self.position = replace(self.position, held_out_before=losses)
        else:
            self._compare(done, losses[self._set_of_best])
        self.position = replace(self.position, held_out_after=losses)
        self._log(done, {f"{name}_loss": loss for name, loss in losses.items()})
        for name, loss in losses.items():
            shown = name.replace("held_out", "held-out", 1)
            self._outputs.progress.message(
                f"{shown} loss after {done} steps: {loss:.4f}"
            )

    def _compare(self, done: int, loss: float) -> None:
        """Counts an evaluation with this loss, which the best step goes by."""
        best = self.position.best_loss
        if best is None or loss < best:
            changes = {"best_step": done, "best_loss": loss}
            self.position = replace(self.position, **changes, evaluations_since_best=0)
        else:
            count = self.position.evaluations_since_best + 1
            self.position = replace(self.position, evaluations_since_best=count)

    def is_over(self, done: int) -> bool:
        """Whether the run ends after step `done`."""
        patience = self._config.patience
        waited = self.position.evaluations_since_best
        has_waited = patience is not None and waited >= patience
        return done == self._config.num_steps or has_waited

    def is_best(self, done: int) -> bool:
        """Whether the checkpoint of a step is the best, and such are kept."""
        return self._config.checkpoint.keep_best and self.position.best_step == done

    def save(
        self,
        done: int,
        data: dict[str, Any],
        state: TrainState,
        scorer: StepScorer | None,
        is_last: bool,
        local: bool,
    ) -> None:
        """Writes a checkpoint, after scores and metrics up to it; waits for the last
        one.
        """
        checkpoints = self._outputs.checkpoints
        best = self.position.best_step
        self.position = replace(self.position, step=done, data=data)
        if scorer is not None:
            scorer.flush()
        for tracker in self._outputs.trackers:
            tracker.flush()
        # Metrics and scores first: a run that is killed between them and the checkpoint
        # drops their last rows when it resumes, but never lacks any.
        with self._clock.paused():
            position = asdict(self.position)
            checkpoints.save(done, state, position, best=best, local=local)
            if is_last:
                checkpoints.wait()

    def result(self, state: TrainState, stopped_by: str | None) -> TrainingResult:
        """The result of the run, which ended with this state."""
        found = self.position
        return TrainingResult(
            state,
            found.held_out_before,
            found.held_out_after,
            stopped_by,
            found.best_step,
            found.best_loss,
        )

    def _log(self, done: int, metrics: dict[str, Any]) -> None:
        for tracker in self._outputs.trackers:
            tracker.log(done, metrics)

    def _not_finite(self, done: int, metrics: Metrics) -> None:
        """Reports a skipped step, or raises."""
        learning_rate = self._learning_rate(done)
        found = (
            f"loss {float(metrics['loss'])}, gradient norm"
            f" {float(metrics['grad_norm']):.3g}"
        )
        more = (
            "; or trainer.update.on_nonfinite: skip, with which the same command"
            " resumes"
        )
        if "skips" in metrics:
            skipped = self.position.skipped + 1
            self.position = replace(self.position, skipped=skipped)
            in_a_row = int(metrics["skips"])
            self._outputs.progress.message(
                f"step {done} skipped: {found} ({in_a_row} in a row)"
            )
            if in_a_row < self._config.update.max_consecutive_skips:
                return
            found += (
                f", the last of {in_a_row} in a row"
                " (trainer.update.max_consecutive_skips)"
            )
            more = ""
        raise NonFiniteLossError(
            f"Step {done} is not finite: {found}, with learning rate"
            f" {learning_rate:.3g}. Training stopped. Usual fixes: a lower"
            " optimizer.learning_rate, more optimizer.warmup or a smaller"
            f" optimizer.max_grad_norm{more}."
        )
