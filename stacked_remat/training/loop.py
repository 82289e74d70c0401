"""The loop around the pure step: it owns batches, evaluation, metrics and what is shown."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import numpy as np
import optax

from .config import TrainerConfig
from .data.batch_stream import BatchStream
from .progress import Progress
from .step import LossFunction, Metrics, TrainState, train_step
from .trackers import Tracker


class NonFiniteLossError(ArithmeticError):
    """The loss became NaN or infinite; training on would only spread it."""


@dataclass(frozen=True)
class TrainingResult:
    """What a run ends with; losses are what the evaluation returns.

    Attributes:
        state: the state after the last step.
        held_out_before: held-out loss before the first step.
        held_out_after: held-out loss after the last step.
    """

    state: TrainState
    held_out_before: float
    held_out_after: float


def train(
    state: TrainState,
    *,
    loss_function: LossFunction,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    training: BatchStream,
    evaluate: Callable[[Any], float],
    config: TrainerConfig,
    trackers: Sequence[Tracker],
    progress: Progress,
) -> TrainingResult:
    """Trains for `config.num_steps` steps and evaluates before, after, and as often as the config says.

    Args:
        state: where to start; its buffers are donated and can't be used afterwards.
        loss_function: maps (model, batch) to the loss and metrics.
        optimizer: the gradient transformation that `state` was made with.
        schedule: the learning rate by step, for the log.
        training: batches to train on, one for every step.
        evaluate: maps a model to its loss on held-out text.
        config: how long, and how often to log and evaluate.
        trackers: all receive the same metrics; closing them is the caller's.
        progress: what the user sees.

    Raises:
        NonFiniteLossError: the loss of a step is NaN or infinite.
    """
    step = eqx.filter_jit(
        functools.partial(train_step, loss_function=loss_function, optimizer=optimizer),
        donate="all-except-first",
    )
    reporter = _Reporter(config, schedule, trackers, progress)
    before = after = evaluate(state.model)
    reporter.evaluated(0, before)
    progress.start(config.num_steps)
    try:
        for done in range(1, config.num_steps + 1):
            batch = training.next()
            state, metrics = step(batch, state)
            reporter.stepped(done, metrics, batch.num_tokens)
            if done == config.num_steps or (config.eval_every is not None and done % config.eval_every == 0):
                with reporter.clock.paused():
                    after = evaluate(state.model)
                reporter.evaluated(done, after)
    finally:
        progress.stop()
    return TrainingResult(state, before, after)


class _Reporter:
    """Turns what a step returns into lines for trackers and the terminal, or into an error."""

    def __init__(
        self,
        config: TrainerConfig,
        schedule: optax.Schedule,
        trackers: Sequence[Tracker],
        progress: Progress,
    ):
        self.clock = _Clock()
        self._config = config
        self._schedule = schedule
        self._trackers = trackers
        self._progress = progress

    def stepped(self, done: int, metrics: Metrics, tokens: int) -> None:
        """Waits for step `done` to end and reports it."""
        loss = float(metrics["loss"])
        self.clock.tick(tokens)
        learning_rate = float(np.asarray(self._schedule(done - 1)))
        if not np.isfinite(loss):
            raise _non_finite(done, loss, learning_rate, metrics)
        self._progress.advance(done, loss, self.clock.tokens_per_second)
        if done % self._config.log_every == 0 or done in (1, self._config.num_steps):
            speed = self.clock.tokens_per_second
            self._log(done, {**metrics, "learning_rate": learning_rate, "tokens_per_second": speed})

    def evaluated(self, done: int, held_out_loss: float) -> None:
        """Reports the loss on held-out text after step `done`."""
        self._log(done, {"held_out_loss": held_out_loss})
        self._progress.message(f"held-out loss after {done} steps: {held_out_loss:.4f}")

    def _log(self, done: int, metrics: dict[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(done, metrics)


class _Clock:
    """Tokens per second since the end of the first step, whose time is mostly the compiler's."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._now = 0.0
        self._tokens = 0

    def tick(self, tokens: int) -> None:
        self._now = time.monotonic()
        if self._began is None:
            self._began = self._now
        else:
            self._tokens += tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before = time.monotonic()
        yield
        if self._began is not None:
            self._began += time.monotonic() - before

    @property
    def tokens_per_second(self) -> float:
        if self._began is None or self._now <= self._began:
            return float("nan")
        return self._tokens / (self._now - self._began)


def _non_finite(step: int, loss: float, learning_rate: float, metrics: Metrics) -> NonFiniteLossError:
    return NonFiniteLossError(
        f"The loss of step {step} is {loss}, with learning rate {learning_rate:.3g} and gradient norm "
        f"{float(metrics['grad_norm']):.3g}. Training stopped; no checkpoint was written. Usual fixes: a "
        f"lower optimizer.learning_rate, more optimizer.warmup_steps, or a smaller optimizer.max_grad_norm."
    )
