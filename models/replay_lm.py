"""Replays the end of a run, and finds by how much each of its sequences lowered the
loss of held-out text.

    python -m models.replay_lm --run_dir runs/mine --from_step 80
    python -m stacked_remat.ghost top runs/mine/replay

Trains again from a checkpoint of `models.train_lm` to its last one, on the same
batches, and differentiates the held-out loss through all these steps
(`stacked_remat.ghost.replay`). Writes a log of scores as the `ghost` section of a
config does, with the leaf `replay` and no losses; a score is by how much the loss would
be higher without the sequence in that step, to first order.

Before that it trains three times with other weights of the sequences, which tells
whether the scores will predict (`stacked_remat.ghost.metasmoothness`). It says so, and
ends where that is too low.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import Array
from rich.console import Console

from models.command import command_parser, local_path, run_command, shown_on
from models.lm import auxiliary_of_sums, example_losses, next_token_loss
from models.run_config import LmRunConfig, read_run_config
from models.run_state import restored_state, run_optimizer
from stacked_remat import ghost
from stacked_remat.training import (
    BATCH_AXIS,
    ConfigError,
    ConsoleProgress,
    GhostValidationConfig,
    LionConfig,
    LossWithSums,
    TokenBatch,
    TrainingData,
    TrainState,
    TrainStep,
    checkpoint_run,
    load_tokenizer,
    open_training_data,
    validation_batches,
)
from stacked_remat.training.checkpoint import checkpoint_steps
from stacked_remat.training.processes import check_one_process
from stacked_remat.training.scoring import named_examples

_EPS_ROOT = 1e-30  # Adam's square root has no derivative at zero
# Of metasmoothness, which is 1 at most. In `benchmarks.metasmoothness` the scores of
# runs from 0.9 on predict, and those of runs below 0.5 hardly do.
_LEAST = 0.5
_GOOD = 0.9
_NOT_FINITE = "The replay has no scores: a loss or gradient of a step is not finite."


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """The command: returns the exit status."""
    console = Console() if console is None else console
    return run_command(
        lambda arguments, _: _replay(arguments, console), arguments, shown_on(console)
    )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_parser("replay_lm", __doc__)
    add = parser.add_argument
    add(
        "--run_dir",
        type=local_path,
        required=True,
        help="a run folder of models.train_lm",
    )
    add(
        "--from_step",
        type=int,
        help="of the checkpoint to begin with; the one before the latest by default",
    )
    add("--batches", type=int, default=1, help="of held-out text (default 1)")
    add(
        "--microbatches",
        type=int,
        help="parts of a batch, computed one after the other; those of the run by"
        " default, and more take less memory",
    )
    add(
        "--least_metasmoothness",
        type=float,
        default=_LEAST,
        help=f"below it nothing is replayed (default {_LEAST}; -1 for any)",
    )
    return parser.parse_args(arguments)


def _replay(arguments: Sequence[str], console: Console) -> int:
    options = _options(arguments)
    check_one_process("models.replay_lm")
    first, last = _span(options.run_dir / "checkpoints", options.from_step)
    config = _checked(read_run_config(options.run_dir, first))
    config = _in_microbatches(config, options.microbatches)
    # Without the rows of an earlier one
    log = ghost.ScoreLog(options.run_dir / "replay", resumed_after=0)
    tokenizer = load_tokenizer(
        config.tokenizer_name, config.data.chat_date, rows=config.vocab_size
    )
    progress = ConsoleProgress(console)
    data = open_training_data(
        config.data, tokenizer, seed=config.trainer.seed, progress=progress
    )
    try:
        batches, places = _batches(options.run_dir, data, first, last)
        state = restored_state(options.run_dir, config, first)
        held_out = validation_batches(
            GhostValidationConfig(batches=options.batches), data.held_out, {}
        )
        texts = [one.held_out.batch(one.index) for one in held_out]
    finally:
        data.training.close()
    # The replay scans over the batches, as one differentiable program.
    Steps = Axis("steps", last - first)
    stacked = hax.tree_util.tree_map(lambda *each: hax.stack(Steps, each), *batches)
    weights = jnp.asarray([one.weight for one in held_out])
    described = [named_examples(batch, tokenizer.decode) for batch in batches]
    numbers = jnp.asarray([[int(id_[:7], 16) for id_ in ids] for ids, _ in described])
    replay = Replay(config, Steps)
    what = f"replaying steps {first + 1} to {last}"
    try:
        progress.work(what, 0, 2, "compiling, then training three times")
        smooth = float(replay.metasmoothness(state, stacked, numbers))
        progress.message(_checked_smoothness(smooth, options.least_metasmoothness))
        progress.work(what, 1, 2, "compiling, then training forward and back")
        loss, found = replay.scores(state, stacked, texts, weights)
        loss = float(loss)
    except eqx.EquinoxRuntimeError as error:
        raise ConfigError(
            f"The replay has no scores: {str(error).splitlines()[0]}"
        ) from error
    finally:
        progress.stop()
    if not np.isfinite(loss):
        raise ConfigError(_NOT_FINITE)
    for index, (ids, shown) in enumerate(described):
        # The derivative of a loss: what lowers it has a positive score.
        scores = {"replay": -np.asarray(found[index])}
        # The log has losses of sequences, which a replay does not compute.
        unknown = np.full(len(ids), np.nan, np.float32)
        step_scores = ghost.StepScores(
            first + index + 1,
            ids,
            unknown,
            scores,
            texts=shown,
            places=places[index],
        )
        log.append(step_scores)
    log.flush()
    shown_on(console)(
        f"replayed steps {first + 1} to {last}; held-out loss {loss:.4f} after"
        f" them\n  python -m stacked_remat.ghost top {log.folder}"
    )
    return 0


def _span(folder: Path, first: int | None) -> tuple[int, int]:
    """The steps of the checkpoint to begin with and of the latest."""
    steps = checkpoint_steps(folder)
    earlier = [step for step in steps[:-1] if first is None or step == first]
    if not earlier:
        found = ", ".join(map(str, steps)) or "none"
        raise ConfigError(
            f"{folder} has checkpoints of the steps {found}; a replay goes from an"
            " earlier one to the last. Name one of them with --from_step, or train"
            " with more of them: trainer.checkpoint.every_steps and keep_last."
        )
    return earlier[-1], steps[-1]


def _checked(config: LmRunConfig) -> LmRunConfig:
    """The config with attention that has second derivatives, if its steps have
    derivatives.
    """
    for key, is_set in (
        ("trainer.update.fused", config.trainer.update.fused),
        ("trainer.streaming", config.trainer.streaming),
    ):
        if is_set:
            raise ConfigError(
                f"A run with {key} can't be replayed: its steps have no derivatives."
            )
    if config.model.further_tokens.trained_depths:
        raise ConfigError(
            "A run with model.mtp can't be replayed: the loss of further tokens is not"
            " known by sequence. Train without it."
        )
    if isinstance(config.optimizer, LionConfig):
        raise ConfigError(
            "A run with optimizer.type: lion can't be replayed: its updates are signs"
            " of gradients, whose derivative is zero. Score its examples by the dot"
            " products of a `ghost` section, or train with another optimizer."
        )
    # Kernels have first derivatives only.
    attention = dataclasses.replace(config.model.attention, backend="exact")
    # A skip has no derivative
    update = dataclasses.replace(config.trainer.update, on_nonfinite="stop")
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, attention=attention),
        trainer=dataclasses.replace(config.trainer, update=update),
    )


def _in_microbatches(config: LmRunConfig, count: int | None) -> LmRunConfig:
    """The config with so many microbatches; as it is if none are given."""
    if count is None:
        return config
    if count < 1 or config.data.batch_size % count:
        raise ConfigError(
            f"--microbatches {count} does not divide data.batch_size ="
            f" {config.data.batch_size}."
        )
    update = dataclasses.replace(config.trainer.update, microbatches=count)
    trainer = dataclasses.replace(config.trainer, update=update)
    return dataclasses.replace(config, trainer=trainer)


def _batches(
    run_dir: Path, data: TrainingData, first: int, last: int
) -> tuple[list[TokenBatch], list[list[str]]]:
    """The batches of the steps, and the files and lines of their sequences."""
    saved = checkpoint_run(run_dir / "checkpoints", step=first)
    data.training.set_state(saved["position"]["data"])
    batches = []
    names = []
    for _ in range(last - first):
        batches.append(jax.device_put(data.training.next()))
        names.append(data.training.names(data.training.get_state()))
    return batches, names


class _WeightedBatch(eqx.Module):
    """A batch, and by what the loss of each of its sequences is multiplied; a
    `TrainStep` reads of it what it reads of a `TokenBatch`.
    """

    batch: TokenBatch
    factors: NamedArray

    @property
    def weights(self) -> NamedArray:
        return self.batch.weights

    @property
    def total_weight(self) -> Array:
        return self.batch.total_weight


class Replay:
    """The steps of a run, with a weight for each of their sequences."""

    def __init__(self, config: LmRunConfig, Steps: Axis):
        self._config = config
        self._Steps = Steps
        self._optimizer = run_optimizer(config, _EPS_ROOT)
        self._Examples = Axis(BATCH_AXIS, config.data.batch_size)
        self.scores = eqx.filter_jit(self._scores)
        self.metasmoothness = eqx.filter_jit(self._metasmoothness)

    def _step(
        self, state: TrainState, batch: TokenBatch, weights: NamedArray
    ) -> TrainState:
        loss: Any = self._loss
        if self._config.model.has_auxiliary_losses:
            loss = LossWithSums(self._loss_and_sums, auxiliary_of_sums)
        run: Any = TrainStep.of(
            self._config.trainer, loss_function=loss, optimizer=self._optimizer
        )
        weighted: Any = _WeightedBatch(batch, weights)
        compute = run.gradients_of(state, weighted)
        if run.microbatches > 1:
            # The derivative of the step then has one microbatch's intermediates at a
            # time; without it those of all.
            compute = eqx.filter_checkpoint(compute)
        return run.by(compute, weighted, state)[0]

    def _loss_and_sums(self, model: Any, part: _WeightedBatch) -> Any:
        (parts, sums), _ = example_losses(model, part.batch, self._config.z_loss)
        loss = hax.sum(parts * part.factors).scalar()
        return (loss, sums), {"loss": loss}

    def _loss(self, model: Any, part: _WeightedBatch) -> Any:
        """That of a model without losses that the batch has together."""
        (loss, _), metrics = self._loss_and_sums(model, part)
        return loss, metrics

    def _scores(
        self,
        state: TrainState,
        batches: TokenBatch,
        texts: list[TokenBatch],
        shares: Any,
    ) -> Any:
        """The held-out loss, and its derivatives by the weights of the sequences."""

        def held_out(state: TrainState) -> Any:
            losses = [next_token_loss(state.model, text)[1]["loss"] for text in texts]
            return jnp.sum(shares * jnp.stack(losses))

        found = ghost.replay(
            self._step, state, batches, held_out, self._Steps, self._Examples
        )
        return found.loss, found.examples.array

    def _metasmoothness(
        self, state: TrainState, batches: TokenBatch, numbers: Any
    ) -> Any:
        """Whether the derivatives will predict; `numbers` are those of the sequences,
        `[step, sequence]`.
        """
        return ghost.metasmoothness(
            self._step,
            state,
            batches,
            lambda state: state.trained,
            self._Steps,
            self._Examples,
            key=jax.random.key(0),
            example_ids=hax.named(numbers, (self._Steps, self._Examples)),
        )


def _checked_smoothness(found: float, least: float) -> str:
    """What the metasmoothness of the steps says; a ConfigError where it is too low."""
    if not np.isfinite(found):
        raise ConfigError(_NOT_FINITE)
    line = f"metasmoothness {found:.2f}"
    if found < least:
        raise ConfigError(
            f"The {line} of these steps is below {least:g}: a replay would not predict"
            " training without a sequence. Lower optimizer.learning_rate,"
            " begin with a later checkpoint (--from_step), or replay all the same with"
            " --least_metasmoothness -1."
        )
    if found < _GOOD:
        return f"{line}: scores predict in part; from {_GOOD} on they are good"
    return f"{line}: scores predict training without a sequence"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
