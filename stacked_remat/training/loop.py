"""The loop around the pure step: it owns batches, evaluation, metrics and what is shown."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import numpy as np
import optax

from .batches import PackedTokens, TokenBatch
from .config import TrainerConfig
from .progress import Progress
from .step import LossFunction, Metrics, TrainState, train_step
from .trackers import Tracker


class NonFiniteLossError(ArithmeticError):
    """The loss became NaN or infinite; training on would only spread it."""


@dataclass(frozen=True)
class TrainingResult:
    """What a run ends with; losses are mean nats per token on the same held-out batches.

    Attributes:
        state: the state after the last step.
        held_out_before: loss before the first step.
        held_out_after: loss after the last step.
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
    training: PackedTokens,
    held_out: PackedTokens,
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
        training: batches to train on.
        held_out: batches to evaluate on.
        config: how long, and how often to log and evaluate.
        trackers: all receive the same metrics; closing them is the caller's.
        progress: what the user sees.

    Raises:
        NonFiniteLossError: the loss of a step is NaN or infinite.
        ValueError: there is less held-out text than one evaluation reads.
    """
    evaluate = _evaluator(loss_function, held_out, config)
    step = eqx.filter_jit(
        functools.partial(train_step, loss_function=loss_function, optimizer=optimizer),
        donate="all-except-first",
    )
    before = held_out_loss = evaluate(state.model)
    _log(trackers, 0, {"held_out_loss": before})
    progress.message(f"held-out loss before training: {before:.4f}")
    progress.start(config.num_steps)
    clock = _Clock()
    try:
        for done in range(1, config.num_steps + 1):
            batch = training.batch(done - 1)
            state, metrics = step(batch, state)
            loss = float(metrics["loss"])
            clock.tick(batch.num_tokens)
            if not np.isfinite(loss):
                raise _non_finite(done, loss, float(schedule(done - 1)), metrics)
            progress.advance(done, loss, clock.tokens_per_second)
            if done % config.log_every == 0 or done in (1, config.num_steps):
                rates = {
                    "learning_rate": float(schedule(done - 1)),
                    "tokens_per_second": clock.tokens_per_second,
                }
                _log(trackers, done, {**metrics, **rates})
            if done == config.num_steps or (config.eval_every is not None and done % config.eval_every == 0):
                held_out_loss = clock.paused(lambda: evaluate(state.model))
                _log(trackers, done, {"held_out_loss": held_out_loss})
                if done < config.num_steps:
                    progress.message(f"held-out loss after {done} steps: {held_out_loss:.4f}")
    finally:
        progress.stop()
    progress.message(f"held-out loss after training:  {held_out_loss:.4f}")
    return TrainingResult(state, before, held_out_loss)


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

    def paused(self, work: Callable[[], float]) -> float:
        before = time.monotonic()
        result = work()
        if self._began is not None:
            self._began += time.monotonic() - before
        return result

    @property
    def tokens_per_second(self) -> float:
        if self._began is None or self._now <= self._began:
            return float("nan")
        return self._tokens / (self._now - self._began)


def _evaluator(
    loss_function: LossFunction, held_out: PackedTokens, config: TrainerConfig
) -> Callable[[Any], float]:
    wanted = config.eval_batches * held_out.batch_size
    if len(held_out) < wanted:
        raise ValueError(
            f"The held-out text has {len(held_out)} sequences of {held_out.seq_len} tokens, fewer than the {wanted} of "
            f"trainer.eval_batches = {config.eval_batches} batches of {held_out.batch_size}. Lower trainer.eval_batches, "
            f"data.batch_size or data.seq_len, or raise data.held_out_fraction."
        )
    compiled = eqx.filter_jit(lambda model, batch: loss_function(model, batch)[1]["loss"])

    def evaluate(model: Any) -> float:
        total = count = 0.0
        for index in range(config.eval_batches):
            batch: TokenBatch = held_out.batch(index)
            tokens = float(np.sum(np.asarray(batch.weights.array)))
            total += float(compiled(model, batch)) * tokens
            count += tokens
        return total / count

    return evaluate


def _log(trackers: Sequence[Tracker], step: int, metrics: dict[str, Any]) -> None:
    for tracker in trackers:
        tracker.log(step, metrics)


def _non_finite(step: int, loss: float, learning_rate: float, metrics: Metrics) -> NonFiniteLossError:
    return NonFiniteLossError(
        f"The loss of step {step} is {loss}, with learning rate {learning_rate:.3g} and gradient norm "
        f"{float(metrics['grad_norm']):.3g}. Training stopped; no checkpoint was written. Usual fixes: a lower "
        f"optimizer.learning_rate, a longer optimizer.warmup_steps, or a smaller optimizer.max_grad_norm."
    )
