"""The training loop around the pure step: batches, evaluation, checkpoints, metrics and progress."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import equinox as eqx
import jax
import numpy as np
import optax

from .batches import TokenBatch, TokenStream
from .checkpoint import Checkpoints
from .mesh import Partitioning
from .progress import Progress
from .run_folder import RunFolder
from .scoring import Scoring, StepScorer
from .step import FusedOptimizer, LossFunction, Metrics, RandomLoss, TrainState, build_step
from .throughput import Clock, ProfilerWindow, peak_flops, peak_memory_bytes, training_flops
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
    """

    step: int
    data: dict[str, Any]
    held_out_before: dict[str, float]
    held_out_after: dict[str, float]
    skipped: int = 0


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run.

    Attributes:
        state: the state after the last step.
        held_out_before: loss on each held-out set before the first step.
        held_out_after: loss on each held-out set at the latest evaluation: after the last step, unless the
            run was stopped before.
        stopped_by: what `should_stop` returned if it stopped the run before its last step.
    """

    state: TrainState
    held_out_before: Mapping[str, float]
    held_out_after: Mapping[str, float]
    stopped_by: str | None = None


@dataclass(frozen=True)
class RunOutputs:
    """Where a run writes its results; the caller closes them.

    Attributes:
        folder: for traces.
        checkpoints: where the state is saved; None for a run that can't be resumed.
        trackers: all receive the same metrics.
        progress: shows the run to the user.
    """

    folder: RunFolder
    checkpoints: Checkpoints | None
    trackers: Sequence[Tracker]
    progress: Progress


def train(
    state: TrainState,
    *,
    loss_function: LossFunction | RandomLoss,
    optimizer: optax.GradientTransformation | FusedOptimizer,
    schedule: optax.Schedule,
    training: TokenStream,
    evaluators: Mapping[str, Callable[[Any], float]],
    config: TrainerConfig,
    outputs: RunOutputs,
    position: Position | None = None,
    should_stop: Callable[[], str | None] = lambda: None,
    partitioning: Partitioning | None = None,
    scoring: Scoring | None = None,
) -> TrainingResult:
    """Trains up to step `config.num_steps`; evaluates before, after, and every `config.eval_every` steps.

    Args:
        state: the state to start from; its buffers are donated.
        loss_function: the loss to minimise.
        optimizer: the gradient transformation that `state` was initialised with.
        schedule: the learning rate by step, for the log.
        training: batches to train on.
        evaluators: for each held-out set by name, a function from the model to its loss, which is logged as
            `NAME_loss`.
        config: how long to train, and how often to log, evaluate and save.
        outputs: where to write results.
        position: the position of `state`, if it comes from a checkpoint.
        should_stop: called after every step and after the evaluation that follows it; the text that it
            returns, such as the name of a signal, ends the run after a checkpoint.
        partitioning: the sharding of the state and of batches; must be active.
        scoring: how the examples of some steps are scored; the weights are updated as without. It takes
            neither a `RandomLoss` nor a `FusedOptimizer`.

    Raises:
        NonFiniteLossError: a step is not finite, and the config does not say to skip it, or too many were
            skipped.
    """
    parts = (config, loss_function, optimizer, partitioning)
    step, scorer = _compiled(*parts), None if scoring is None else StepScorer(scoring, *parts)

    def next_batch() -> TokenBatch:
        batch = training.next()
        return jax.device_put(batch) if partitioning is None else partitioning.shard_batch(batch)

    reporter = _Reporter(config, schedule, outputs)
    evaluation = _Evaluation(evaluators, reporter, position)
    profiler = ProfilerWindow(config.profiler, outputs.folder.profile)
    if position is None:
        evaluation.run(0, state.model)
    else:
        training.set_state(position.data)
        reporter.skipped = position.skipped
    done, stopped_by = 0 if position is None else position.step, None
    if done < config.num_steps:
        batch = next_batch()
        reporter.prepare(loss_function, state, batch)
    outputs.progress.start(config.num_steps, done)
    try:
        while done < config.num_steps and stopped_by is None:
            done += 1
            profiler.before_step(done)
            scores = scorer if scorer is not None and scorer.is_due(done) else None
            state, metrics = (step if scores is None else scores.step)(batch, state)
            used, data = batch, training.get_state()
            if done < config.num_steps:
                batch = next_batch()  # made while the device works
            reporter.stepped(done, metrics, used)
            if scores is not None:
                scores.log(done, used)
            profiler.after_step(done)
            asked = should_stop()
            if done == config.num_steps or (config.eval_every and done % config.eval_every == 0):
                evaluation.run(done, state.model)
                asked = asked or should_stop()  # an evaluation may take long
            stopped_by = asked if done < config.num_steps else None
            now = Position(done, data, evaluation.before, evaluation.after, reporter.skipped)
            _save(state, now, reporter, scorer, last=bool(stopped_by) or done == config.num_steps)
    finally:
        outputs.progress.stop()
        profiler.stop()
    return TrainingResult(state, evaluation.before, evaluation.after, stopped_by)


def _compiled(
    config: TrainerConfig,
    loss_function: LossFunction | RandomLoss,
    optimizer: optax.GradientTransformation | FusedOptimizer,
    partitioning: Partitioning | None,
) -> Callable[[TokenBatch, TrainState], tuple[TrainState, Metrics]]:
    options: Any = {"loss_function": loss_function, "optimizer": optimizer, "partitioning": partitioning}
    return eqx.filter_jit(build_step(config, **options), donate="all-except-first")


def _save(
    state: TrainState, position: Position, reporter: "_Reporter", scorer: StepScorer | None, last: bool
) -> None:
    """Writes a checkpoint if one is due, after the scores up to it; waits for the last one."""
    checkpoints = reporter.outputs.checkpoints
    is_due = last or (checkpoints is not None and checkpoints.is_due(position.step))  # once: time passes
    if scorer is not None and is_due:
        scorer.flush()
    if checkpoints is not None and is_due:
        with reporter.clock.paused():
            checkpoints.save(position.step, state, asdict(position))
            if last:
                checkpoints.wait()


@final
class _Evaluation:
    """The first and the latest losses on the held-out sets."""

    def __init__(
        self,
        evaluators: Mapping[str, Callable[[Any], float]],
        reporter: "_Reporter",
        position: Position | None,
    ):
        self._evaluators = evaluators
        self._reporter = reporter
        self.before = {} if position is None else position.held_out_before
        self.after = {} if position is None else position.held_out_after

    def run(self, done: int, model: Any) -> None:
        with self._reporter.clock.paused():
            self.after = {name: evaluate(model) for name, evaluate in self._evaluators.items()}
        if done == 0:
            self.before = self.after
        self._reporter.evaluated(done, self.after)


@final
class _Reporter:
    """Reports a step's metrics to trackers and the terminal, and stops the run if they are not finite."""

    def __init__(self, config: TrainerConfig, schedule: optax.Schedule, outputs: RunOutputs):
        self.clock = Clock()
        self.outputs = outputs
        self.skipped = 0
        self._config = config
        self._schedule = jax.jit(schedule)
        self._seconds_at_peak: float | None = None

    def prepare(self, loss_function: LossFunction | RandomLoss, state: TrainState, batch: TokenBatch) -> None:
        """Finds the time of a step at the devices' peak, for the utilisation."""
        devices = list(state.step.devices())
        peak = self._config.profiler.peak_flops or peak_flops(devices[0])
        flops = peak and training_flops(loss_function, state.model, batch, state.trained)
        if peak and flops:
            self._seconds_at_peak = flops / (peak * len(devices))

    def stepped(self, done: int, metrics: Metrics, batch: TokenBatch) -> None:
        """Waits for step `done` and reports it."""
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        self.clock.tick(batch.num_tokens)
        learning_rate = float(self._schedule(np.int32(done - 1 - self.skipped)))
        memory = peak_memory_bytes()
        self.outputs.progress.advance(done, loss, self.clock.tokens_per_second, memory)
        if done % self._config.log_every == 0 or done in (1, self._config.num_steps):
            speed = {
                "tokens_per_second": self.clock.tokens_per_second,
                "step_seconds": self.clock.step_seconds,
                **({} if memory is None else {"peak_memory_bytes": memory}),
            }
            if self._seconds_at_peak is not None:  # model FLOPs utilisation (Chowdhery et al. 2022)
                speed["mfu"] = self._seconds_at_peak / self.clock.step_seconds
            self._log(done, {**metrics, "learning_rate": learning_rate, **speed})
            self.clock.restart()
        if not (np.isfinite(loss) and np.isfinite(norm)):
            self._not_finite(done, metrics, learning_rate)

    def evaluated(self, done: int, losses: Mapping[str, float]) -> None:
        """Reports the losses on held-out text after step `done`."""
        self._log(done, {f"{name}_loss": loss for name, loss in losses.items()})
        for name, loss in losses.items():
            shown = name.replace("held_out", "held-out", 1)
            self.outputs.progress.message(f"{shown} loss after {done} steps: {loss:.4f}")

    def _log(self, done: int, metrics: dict[str, Any]) -> None:
        for tracker in self.outputs.trackers:
            tracker.log(done, metrics)

    def _not_finite(self, done: int, metrics: Metrics, learning_rate: float) -> None:
        """Reports a skipped step, or raises."""
        found = f"loss {float(metrics['loss'])}, gradient norm {float(metrics['grad_norm']):.3g}"
        more = "; or trainer.update.on_nonfinite: skip, with which the same command resumes"
        if "skips" in metrics:
            self.skipped += 1
            in_a_row = int(metrics["skips"])
            self.outputs.progress.message(f"step {done} skipped: {found} ({in_a_row} in a row)")
            if in_a_row < self._config.update.max_consecutive_skips:
                return
            found += f", the last of {in_a_row} in a row (trainer.update.max_consecutive_skips)"
            more = ""
        raise NonFiniteLossError(
            f"Step {done} is not finite: {found}, with learning rate {learning_rate:.3g}. Training stopped. "
            f"Usual fixes: a lower optimizer.learning_rate, more optimizer.warmup or a smaller "
            f"optimizer.max_grad_norm{more}."
        )
