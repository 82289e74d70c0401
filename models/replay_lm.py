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

Runs on the devices of the run's mesh, over several processes as `models.train_lm` does.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import traceback
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

from models.candidate import Candidate
from models.command import (
    check_counts,
    command_parser,
    local_path,
    run_command,
    shown_on,
)
from models.lm import auxiliary_of_sums, losses_by_token, next_token_loss
from models.run_config import LmRunConfig, read_run_config
from models.run_state import restored_state, run_optimizer
from stacked_remat import ghost
from stacked_remat.training import (
    BATCH_AXIS,
    POSITION_AXIS,
    ConfigError,
    ConsoleProgress,
    GhostValidationConfig,
    LionConfig,
    LossWithSums,
    Partitioning,
    TokenBatch,
    TrainingData,
    TrainState,
    TrainStep,
    ValidationBatch,
    checkpoint_run,
    load_tokenizer,
    open_training_data,
    validation_batches,
)
from stacked_remat.training.checkpoint import checkpoint_steps
from stacked_remat.training.example_texts import (
    Decode,
    examples_by_token,
    named_examples,
)
from stacked_remat.training.processes import (
    end_after_error,
    ending_with_others,
    in_turn,
    start_processes,
)
from stacked_remat.training.run_folder import check_same_in_all

_EPS_ROOT = 1e-30  # Adam's square root has no derivative at zero
# Of metasmoothness, which is 1 at most. In `benchmarks.metasmoothness` the scores of
# runs from 0.9 on predict, and those of runs below 0.5 hardly do.
_LEAST = 0.5
_GOOD = 0.9
_NOT_FINITE = "The replay has no scores: a loss or gradient of a step is not finite."


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """The command: returns the exit status."""
    console = Console() if console is None else console
    try:
        status = run_command(
            lambda arguments, _: _replay(arguments, console),
            arguments,
            shown_on(console),
        )
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        status = 1
    if status and jax.distributed.is_initialized():
        end_after_error(status)
    return status


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
    add(
        "--batches",
        type=int,
        default=1,
        help="of held-out text, of the run's ghost.validation.sources (default 1)",
    )
    add(
        "--log_dir",
        type=local_path,
        help="a folder for the scores; RUN_DIR/replay by default",
    )
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
    add(
        "--by_token",
        action="store_true",
        help="also the scores of the sequences' targets",
    )
    add(
        "--one_device",
        action="store_true",
        help="on one device, whatever trainer.mesh of the run has",
    )
    add(
        "--distributed",
        type=_distributed,
        default="auto",
        help="how several processes connect, as of models.train_lm: auto, off, or the"
        " arguments of jax.distributed.initialize as JSON",
    )
    return parser.parse_args(arguments)


def _distributed(text: str) -> Any:
    """The value of `--distributed`; a ValueError for what is not JSON."""
    return json.loads(text) if text.startswith("{") else text


def _replay(arguments: Sequence[str], console: Console) -> int:
    options = _options(arguments)
    check_counts(options, "batches")
    start_processes(options.distributed)
    given = {name: str(value) for name, value in vars(options).items()}
    check_same_in_all(given, "Start all with the same arguments.")
    with ending_with_others(), contextlib.ExitStack() as closing:
        return _replay_in_all(options, console, closing)


def _replay_in_all(
    options: argparse.Namespace, console: Console, closing: contextlib.ExitStack
) -> int:
    """The work of each process; the first one shows it and writes the log."""
    first, last = _span(options.run_dir / "checkpoints", options.from_step)
    config = _checked(read_run_config(options.run_dir, first))
    config = _in_microbatches(config, options.microbatches)
    partitioning = _partitioning(config, options.one_device)
    is_first = jax.process_index() == 0
    log = (
        _opened_log(options.log_dir or options.run_dir / "replay") if is_first else None
    )
    tokenizer = load_tokenizer(
        config.tokenizer_name, config.data.chat_date, rows=config.vocab_size
    )
    progress = ConsoleProgress(console if is_first else Console(quiet=True))
    data = in_turn(
        lambda: open_training_data(
            config.data,
            tokenizer,
            seed=config.trainer.seed,
            progress=progress,
            process=partitioning.process_share(config.data.batch_size),
        )
    )
    closing.callback(data.training.close)
    closing.enter_context(partitioning.active())
    steps = _steps(options.run_dir, data, first, last, partitioning, tokenizer.decode)
    # Of the texts that the run's own scores are against
    sources = {} if config.ghost is None else config.ghost.validation.sources
    held_out = validation_batches(
        GhostValidationConfig(batches=options.batches, sources=sources),
        data.held_out,
        data.held_out_by_source,
        partitioning,
    )
    state = restored_state(options.run_dir, config, first, partitioning)
    replay = Replay(config, steps.Steps, partitioning, by_token=options.by_token)
    least = options.least_metasmoothness
    loss, found = _computed(replay, state, steps, held_out, least, progress)
    if log is None:
        return 0
    _write(log, steps, found, tokenizer.decode)
    shown_on(console)(
        f"replayed steps {first + 1} to {last}; held-out loss {loss:.4f} after"
        f" them, by --batches {options.batches}\n  python -m stacked_remat.ghost top"
        f" {log.folder}"
    )
    return 0


def _opened_log(folder: Path) -> ghost.ScoreLog:
    """The log of this replay, in a folder without scores."""
    try:
        return ghost.ScoreLog(folder)
    except ghost.ScoreLogError as error:
        raise ConfigError(
            f"{folder} has the scores of another replay. Name another folder with"
            " --log_dir, or remove this one."
        ) from error


def _partitioning(config: LmRunConfig, one_device: bool) -> Partitioning:
    """The mesh of the run, or one device."""
    if one_device:
        if jax.process_count() > 1:
            raise ConfigError("--one_device is for one process. Leave it out.")
        return Partitioning.one_device()
    candidate = Candidate(config)
    try:
        candidate.check_batch()
    except ConfigError as error:
        raise ConfigError(f"{error} Or replay on one device: --one_device.") from error
    return candidate.partitioning


@dataclasses.dataclass(frozen=True)
class _Replayed:
    """Steps to replay.

    Attributes:
        first: the step before the first of them.
        Steps: their axis.
        stacked: their batches, with that axis.
        batches: the same, each whole in every process.
        ids: of the sequences of each batch.
        texts: of these.
        places: their files and lines.
    """

    first: int
    Steps: Axis
    stacked: TokenBatch
    batches: list[TokenBatch]
    ids: list[list[str]]
    texts: list[list[str]]
    places: list[list[str]]


def _steps(
    run_dir: Path,
    data: TrainingData,
    first: int,
    last: int,
    partitioning: Partitioning,
    decode: Decode,
) -> _Replayed:
    """The steps after `first` up to `last`, read again."""
    saved = checkpoint_run(run_dir / "checkpoints", step=first)
    data.training.set_state(saved["position"]["data"])
    batches = []
    places = []
    for _ in range(last - first):
        batches.append(partitioning.shard_batch(data.training.next()))
        places.append(data.training.names(data.training.get_state()))
    whole = eqx.filter_jit(partitioning.replicated)(batches)
    described = [named_examples(batch, decode) for batch in whole]
    Steps = Axis("steps", last - first)

    @eqx.filter_jit
    def stack(batches: list[TokenBatch]) -> TokenBatch:
        return hax.tree_util.tree_map(lambda *each: hax.stack(Steps, each), *batches)

    return _Replayed(
        first,
        Steps,
        # The replay scans over the batches, as one differentiable program.
        stack(batches),
        whole,
        [ids for ids, _ in described],
        [texts for _, texts in described],
        places,
    )


def _computed(
    replay: "Replay",
    state: TrainState,
    steps: _Replayed,
    held_out: Sequence[ValidationBatch],
    least: float,
    progress: ConsoleProgress,
) -> tuple[float, np.ndarray]:
    """The held-out loss after the steps, and its derivatives by the weights of their
    sequences, or targets; a ConfigError where they would not predict.
    """
    numbers = np.asarray([[int(id_[:7], 16) for id_ in ids] for ids in steps.ids])
    texts = [replay.partitioning.shard_batch(one.batch) for one in held_out]
    weights = np.asarray([one.weight for one in held_out], np.float32)
    what = f"replaying steps {steps.first + 1} to {steps.first + steps.Steps.size}"
    try:
        progress.work(what, 0, 2, "compiling, then training three times")
        smooth = float(replay.metasmoothness(state, steps.stacked, numbers))
        progress.message(_checked_smoothness(smooth, least))
        progress.work(what, 1, 2, "compiling, then training forward and back")
        loss, found = replay.scores(state, steps.stacked, texts, weights)
        loss = float(loss)
        found = np.asarray(found)
    except eqx.EquinoxRuntimeError as error:
        raise ConfigError(
            f"The replay has no scores: {str(error).splitlines()[0]}"
        ) from error
    finally:
        progress.stop()
    if not np.isfinite(loss):
        raise ConfigError(_NOT_FINITE)
    return loss, found


def _write(
    log: ghost.ScoreLog, steps: _Replayed, found: np.ndarray, decode: Decode
) -> None:
    """Writes the scores of the steps, of which the derivatives are `[step, sequence]`,
    or `[step, sequence, position]`.
    """
    for index, ids in enumerate(steps.ids):
        # The derivative of a loss: what lowers it has a positive score.
        scores = -found[index]
        texts = steps.texts[index]
        tokens = None
        if scores.ndim == 2:
            texts, tokens = examples_by_token(steps.batches[index], scores, decode)
            scores = scores.sum(axis=1)
        # The log has losses of sequences, which a replay does not compute.
        unknown = np.full(len(ids), np.nan, np.float32)
        log.append(
            ghost.StepScores(
                steps.first + index + 1,
                ids,
                unknown,
                {"replay": scores},
                texts=texts,
                places=steps.places[index],
                tokens=tokens,
            )
        )
    log.flush()


def _span(folder: Path, first: int | None) -> tuple[int, int]:
    """The steps of the checkpoint to begin with and of the latest."""
    if not folder.parent.is_dir():
        raise ConfigError(f"{folder.parent} does not exist: --run_dir names a run.")
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
    # Stages have no second derivatives: every device has all layers instead.
    trainer = dataclasses.replace(config.trainer, update=update, pipeline=None)
    model = dataclasses.replace(config.model, attention=attention)
    return dataclasses.replace(config, model=model, trainer=trainer)


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


class _WeightedBatch(eqx.Module):
    """A batch, and by what the loss of each of its sequences, or targets, is
    multiplied; a `TrainStep` reads of it what it reads of a `TokenBatch`.
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
    """The steps of a run, with a weight for each of their sequences, or of the targets
    of these.
    """

    def __init__(
        self,
        config: LmRunConfig,
        Steps: Axis,
        partitioning: Partitioning,
        *,
        by_token: bool = False,
    ):
        self.partitioning = partitioning
        self._config = config
        self._Steps = Steps
        self._optimizer = run_optimizer(config, _EPS_ROOT)
        self._Examples = Axis(BATCH_AXIS, config.data.batch_size)
        Positions = Axis(POSITION_AXIS, config.data.seq_len)
        self._Weighted = (self._Examples, Positions) if by_token else self._Examples
        self.scores = eqx.filter_jit(self._scores)
        self.metasmoothness = eqx.filter_jit(self._metasmoothness)

    def _step(
        self, state: TrainState, batch: TokenBatch, weights: NamedArray
    ) -> TrainState:
        loss: Any = self._loss
        if self._config.model.has_auxiliary_losses:
            loss = LossWithSums(self._loss_and_sums, auxiliary_of_sums)
        run: Any = TrainStep.of(
            self._config.trainer,
            loss_function=loss,
            optimizer=self._optimizer,
            partitioning=self.partitioning,
        )
        weighted: Any = _WeightedBatch(batch, weights)
        compute = run.gradients_of(state, weighted)
        if run.microbatches > 1:
            # The derivative of the step then has one microbatch's intermediates at a
            # time; without it those of all.
            compute = eqx.filter_checkpoint(compute)
        return run.by(compute, weighted, state)[0]

    def _loss_and_sums(self, model: Any, part: _WeightedBatch) -> Any:
        (parts, sums), _ = losses_by_token(model, part.batch, self._config.z_loss)
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
        """The held-out loss, and its derivatives by the weights."""

        def held_out(state: TrainState) -> Any:
            losses = [next_token_loss(state.model, text)[1]["loss"] for text in texts]
            return jnp.sum(shares * jnp.stack(losses))

        found = ghost.replay(
            self._step, state, batches, held_out, self._Steps, self._Weighted
        )
        return self.partitioning.replicated((found.loss, found.examples.array))

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
