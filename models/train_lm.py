"""Trains a language model from a config file.

    python -m models.train_lm --config_path models/configs/qwen3_moe_tiny.yaml [--trainer.num_steps 500 ...]

Leaves the resolved config, metrics and checkpoints in the run folder. The same command goes on where an
earlier process was stopped or killed, if `trainer.run_dir` names the folder.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from models.command import run_command
from models.lm import LmConfig, check_remat_names, next_token_loss
from models.pretrained import resolved_model
from models.qwen3_moe import Qwen3MoeConfig, hf as hf  # registers its types and its weights
from models.run_state import (
    ModelOfRun,
    check_step,
    initial_state,
    run_optimizer,
    saved_arrays,
    state_shapes,
)
from models.step_memory import check_memory, plan_step
from stacked_remat import check_offload
from stacked_remat.lora import LoraConfig
from stacked_remat.training import (
    EXIT_INTERRUPTED,
    AdamWConfig,
    Checkpoints,
    ConfigError,
    ConsoleProgress,
    DataConfig,
    JsonLinesTracker,
    OptimizerConfig,
    Partitioning,
    Position,
    ProcessShare,
    Progress,
    RunFolder,
    RunOutputs,
    StopSignals,
    Tokenizer,
    Tracker,
    TrainerConfig,
    TrainingResult,
    TrainState,
    build_trackers,
    check_remat,
    check_trackers,
    config_as_dict,
    held_out_evaluators,
    learning_rate_schedule,
    load_tokenizer,
    lock_run_folder,
    named_in_errors,
    open_training_data,
    parse_config,
    remat_entry,
    remat_policy,
    train,
)


@dataclass(frozen=True)
class TrainLmConfig:
    """Everything a run depends on.

    Attributes:
        model: the architecture, by `type`.
        initialize_from_hf: weights to begin with, a folder in Hugging Face's format or a name on its Hub
            (`owner/model`, `owner/model@revision`); null for random ones.
        use_hf_model_config: whether the architecture is that folder's; if not, `model` must be equal to it.
        vocab_size: rows of the embedding; if null, those in that folder, or one for each of the tokenizer's.
        lora: adapters to train instead of the model's own weights, which then get neither gradients nor
            optimizer state; null to train these.
        remat: memory policy of the model's stack of layers: an alias (true, false, nested, offload, ...), a
            preset of the model (attention_saved, ...), the fields of a `ScanCheckpointPolicy`, or `auto` for
            the first that fits `budget`, tried from most device memory to least (`models.plan_lm` shows
            them), found by compiling the step before the first one.
        budget: device memory for `remat: auto`, such as 72GiB; leave a tenth of the device free.
        host_budget: the same for the host; null for no limit.
        data: the text.
        optimizer: the optimizer, by `type` (AdamW if none is named), and its schedule.
        trainer: length, updates, precision, checkpoints, reports and the run folder.
    """

    model: LmConfig = field(default_factory=Qwen3MoeConfig)
    initialize_from_hf: str | None = None
    use_hf_model_config: bool = False
    vocab_size: int | None = None
    lora: LoraConfig | None = None
    remat: bool | dict[str, Any] | str = True
    budget: str | None = None
    host_budget: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        policy = check_remat(self.remat, self.budget, self.host_budget, self.model.remat_presets)
        check_remat_names(self.model, policy)
        learning_rate_schedule(self.optimizer, self.trainer.num_steps)
        if self.use_hf_model_config and self.initialize_from_hf is None:
            raise ValueError("use_hf_model_config has no effect without initialize_from_hf: name the folder.")
        if self.data.batch_size % self.trainer.update.microbatches:
            raise ValueError(
                f"data.batch_size = {self.data.batch_size} can't be cut into trainer.update.microbatches = "
                f"{self.trainer.update.microbatches} equal parts; make the one a multiple of the other."
            )


def train_lm(config: TrainLmConfig, progress: Progress, stop: StopSignals) -> TrainingResult:
    """Runs the training that `config` describes, from the last checkpoint in its run folder if there is one.

    Once a step is done, a signal that `stop` receives ends it after the step that is being done, with a
    checkpoint.

    Raises:
        FileExistsError: the run folder holds a finished run, or another process trains in it.
        DataError, ConfigError: there is no text, too little, or some that can't be read; the run folder holds
            a run of another config; a tracker's package is not installed.
        CheckpointMismatchError: the checkpoint in the run folder is of another model.
        BudgetError: no policy fits the budget of `remat: auto`.
        OffloadError: the policy offloads, and this device's compiler gets that wrong.
        WeightsError, FileNotFoundError: the weights to begin with can't be read, or are not of this model.
        NonFiniteLossError: training diverged.
    """
    check_trackers(config.trainer.trackers)
    partitioning = _partitioning(config)
    tokenizer = load_tokenizer(config.data.tokenizer)
    config = _with_planned_remat(_with_model(config, tokenizer), progress)
    check_step(config, partitioning)
    if remat_policy(config.remat, config.model.remat_presets).offloads:
        check_offload()
    data = open_training_data(
        config.data,
        tokenizer,
        seed=config.trainer.seed,
        progress=progress,
        process=ProcessShare(jax.process_index(), jax.process_count()),
    )
    evaluators = held_out_evaluators(
        next_token_loss,
        data.held_out,
        data.held_out_by_source,
        config.trainer.eval_batches,
        partitioning=partitioning,
    )
    with contextlib.ExitStack() as closing:
        closing.callback(data.training.close)
        folder = _run_folder(config, closing)
        closing.enter_context(partitioning.active())
        checkpoints = _checkpoints(config, folder, progress)
        closing.callback(_close, checkpoints)
        state, position = _first_state(config, partitioning, checkpoints)
        if position is not None:
            _check_length(config, position, folder)
            data.training.set_state(position.data)  # refuses other data while the folder is still as it was
            progress.message(f"going on after step {position.step} of an earlier process")
        trackers = _trackers(config, folder, position)
        for tracker in trackers:
            closing.callback(tracker.close)
        folder.begin(config_as_dict(config))
        progress.message(_summary(config, data.summary, state, folder))
        result = train(
            state,
            loss_function=next_token_loss,
            optimizer=run_optimizer(config),
            schedule=learning_rate_schedule(config.optimizer, config.trainer.num_steps),
            training=data.training,
            evaluators=evaluators,
            config=config.trainer,
            outputs=RunOutputs(folder, checkpoints, trackers, progress),
            position=position,
            should_stop=lambda: _asked_to_stop(stop),
            partitioning=partitioning,
        )
    _conclude(result, folder, progress)
    return result


def main(arguments: Sequence[str]) -> int:
    """The command: returns the exit status, after one message for anything that the user can mend.

    Returns:
        0 when the run is finished, 1 after an error, 75 when a signal ended it: the same command then goes
        on.
    """
    progress = ConsoleProgress()

    def run(arguments: Sequence[str], stop: StopSignals) -> int:
        result = train_lm(parse_config(TrainLmConfig, arguments), progress, stop)
        return 0 if result.stopped_by is None else EXIT_INTERRUPTED

    early = " before a step was done; the same command starts again, from the last checkpoint if there is one"
    return run_command(run, arguments, progress.message, interrupted=(EXIT_INTERRUPTED, early))


def _close(checkpoints: Checkpoints) -> None:
    with named_in_errors(checkpoints.folder):
        checkpoints.close()


def _asked_to_stop(stop: StopSignals) -> str | None:
    """What asks to stop, if anything does; from the first time on, when a step is done, it has to ask."""
    stop.defer()
    return stop.received


def _partitioning(config: TrainLmConfig) -> Partitioning:
    """The devices of the run; refuses batches that can't be divided over them."""
    partitioning = Partitioning.of(config.trainer.mesh)
    partitioning.check_rows(config.data.batch_size, config.trainer.update.microbatches)
    return partitioning


def _checkpoints(config: TrainLmConfig, folder: RunFolder, progress: Progress) -> Checkpoints:
    return Checkpoints(
        folder.checkpoints,
        config.trainer.checkpoint,
        run_config=config_as_dict(config),
        saved=saved_arrays,
        message=progress.message,
    )


def _first_state(
    config: TrainLmConfig, partitioning: Partitioning, checkpoints: Checkpoints
) -> tuple[TrainState, Position | None]:
    """The state to start from and where it stands: that of the latest checkpoint, or a new one."""
    model = ModelOfRun.of(config)
    if checkpoints.latest() is None:
        return initial_state(config, model, partitioning), None
    # What is frozen is in no checkpoint, so it is made again.
    make = state_shapes if config.lora is None else initial_state
    state, position = checkpoints.restore(make(config, model, partitioning))
    return state, Position(**position)


def _run_folder(config: TrainLmConfig, closing: contextlib.ExitStack) -> RunFolder:
    """The folder of the run, for this process alone until `closing` ends."""
    given = config.trainer.run_dir
    root = Path(f"runs/{time.strftime('%Y%m%d-%H%M%S')}" if given is None else given).expanduser()
    if jax.process_index() == 0:
        closing.enter_context(lock_run_folder(root))
    return RunFolder.open(
        root,
        config_as_dict(config),
        overwrite=config.trainer.checkpoint.overwrite,
        accept_changes=config.trainer.checkpoint.accept_changes,
    )


def _check_length(config: TrainLmConfig, position: Position, folder: RunFolder) -> None:
    if position.step > config.trainer.num_steps:
        raise ConfigError(
            f"trainer.num_steps = {config.trainer.num_steps}, and the run in {folder.root} has "
            f"done {position.step} steps. Ask for more, or give this run a folder of its own with "
            f"--trainer.run_dir."
        )


def _with_model(config: TrainLmConfig, tokenizer: Tokenizer) -> TrainLmConfig:
    """The config with the architecture and the vocabulary that it has in the end; refuses what can't fit."""
    model, vocab_size = resolved_model(config, check_folder=True)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"The tokenizer {config.data.tokenizer!r} has {tokenizer.vocab_size} tokens, and the model's "
            f"embedding {vocab_size} rows. Use the model's own tokenizer, or a larger vocab_size."
        )
    config = dataclasses.replace(config, model=model, vocab_size=vocab_size)
    check_memory(config)
    return config


def _trackers(config: TrainLmConfig, folder: RunFolder, position: Position | None) -> list[Tracker]:
    done = -1 if position is None else position.step
    more = build_trackers(
        config.trainer.trackers, folder.root, config_as_dict(config), resumed_after=position and position.step
    )
    return [JsonLinesTracker(folder.metrics, resumed_after=done), *more]


def _conclude(result: TrainingResult, folder: RunFolder, progress: Progress) -> None:
    if result.stopped_by is not None:
        progress.message(
            f"stopped by {result.stopped_by} after step {int(result.state.step)}; the same command with "
            f"--trainer.run_dir {folder.root} goes on from there"
        )
        return
    folder.finish({"held_out_before": result.held_out_before, "held_out_after": result.held_out_after})
    progress.message(f"checkpoints, config and metrics are in {folder.root}")


def _with_planned_remat(config: TrainLmConfig, progress: Progress) -> TrainLmConfig:
    """The config with the policy that `remat: auto` stands for on the device at hand."""
    if config.remat != "auto" or config.budget is None:
        return config
    progress.message(f"looking for the remat policy that fits {config.budget}")
    found = plan_step(config, budget=config.budget, host_budget=config.host_budget)
    progress.message(str(found))
    return dataclasses.replace(config, remat=remat_entry(found.policy), budget=None, host_budget=None)


def _summary(config: TrainLmConfig, text: str, state: TrainState, folder: RunFolder) -> str:
    parameters, trained = (
        sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array)))
        for tree in (state.model, state.trained)
    )
    some = "" if parameters == trained else f", {trained:,} of them trained"
    step_tokens = config.data.batch_size * config.data.seq_len
    return (
        f"{parameters:,} parameters{some}; {text}; "
        f"{config.trainer.num_steps} steps of {step_tokens:,} tokens; "
        f"{len(state.step.devices())} {jax.default_backend()} device(s); run folder {folder.root}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
