"""Trains a language model from a config file.

    python -m models.train_lm --config_path models/configs/qwen3_moe_tiny.yaml [--trainer.num_steps 500 ...]

Leaves the resolved config, metrics and a checkpoint in the run folder.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from haliax import Axis

from models import qwen3_moe as qwen3_moe  # registers `type: qwen3_moe`
from models.lm import LmConfig, build_model, next_token_loss
from models.lora import with_adapters
from models.qwen3_moe import Qwen3MoeConfig
from models.step_memory import plan_step
from stacked_remat import OffloadError, check_offload
from stacked_remat.lora import LoraConfig
from stacked_remat.memory import BudgetError
from stacked_remat.training import (
    ConfigError,
    ConsoleProgress,
    DataConfig,
    DataError,
    JsonLinesTracker,
    NonFiniteLossError,
    OptimizerConfig,
    ProcessShare,
    Progress,
    RunFolder,
    TrainerConfig,
    TrainingResult,
    TrainState,
    build_optimizer,
    check_remat,
    config_as_dict,
    held_out_evaluator,
    learning_rate_schedule,
    load_tokenizer,
    open_training_data,
    parse_config,
    remat_entry,
    remat_policy,
    save_checkpoint,
    train,
)


@dataclass(frozen=True)
class TrainLmConfig:
    """Everything a run depends on.

    Attributes:
        model: the architecture, by `type`.
        lora: adapters to train instead of the model's own weights, which then get neither gradients nor
            optimizer state; null to train these.
        remat: memory policy of the model's stack of layers: an alias (true, false, nested, offload, ...), a
            preset of the model (attention_saved, ...), the fields of a `ScanCheckpointPolicy`, or `auto` for
            the one that fits `budget` with the least recomputation, found by compiling the step before the
            first one.
        budget: device memory for `remat: auto`, such as 72GiB; leave a tenth of the device free.
        host_budget: the same for the host; null for no limit.
        data: the text.
        optimizer: AdamW and its schedule.
        trainer: length, reports and the run folder.
    """

    model: LmConfig = field(default_factory=Qwen3MoeConfig)
    lora: LoraConfig | None = None
    remat: bool | dict[str, Any] | str = True
    budget: str | None = None
    host_budget: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        check_remat(self.remat, self.budget, self.host_budget, self.model.remat_presets)
        learning_rate_schedule(self.optimizer, self.trainer.num_steps)


def train_lm(config: TrainLmConfig, progress: Progress) -> TrainingResult:
    """Runs the training that `config` describes.

    Raises:
        FileExistsError: the run folder holds an earlier run's results.
        DataError, ConfigError: there is no text, too little, or some that can't be read.
        BudgetError: no policy fits the budget of `remat: auto`.
        OffloadError: the policy offloads, and this device's compiler gets that wrong.
        NonFiniteLossError: training diverged.
    """
    config = _with_planned_remat(config, progress)
    if remat_policy(config.remat, config.model.remat_presets).offloads:
        check_offload()
    key = jax.random.key(config.trainer.seed)
    tokenizer = load_tokenizer(config.data.tokenizer)
    Vocab = Axis("vocab", tokenizer.vocab_size)
    data = open_training_data(
        config.data,
        tokenizer,
        seed=config.trainer.seed,
        progress=progress,
        process=ProcessShare(jax.process_index(), jax.process_count()),
    )
    model = build_model(
        config.model, Vocab, remat=remat_policy(config.remat, config.model.remat_presets), key=key
    )
    model, trainable = with_adapters(model, config.lora, key=key)
    optimizer = build_optimizer(config.optimizer, config.trainer.num_steps)
    evaluate = held_out_evaluator(next_token_loss, data.held_out, config.trainer.eval_batches)
    folder = _run_folder(config)
    state = TrainState.init(model, optimizer, trainable)
    progress.message(_summary(config, data.summary, state, folder))
    tracker = JsonLinesTracker(folder.metrics)
    try:
        result = train(
            state,
            loss_function=next_token_loss,
            optimizer=optimizer,
            schedule=learning_rate_schedule(config.optimizer, config.trainer.num_steps),
            training=data.training,
            evaluate=evaluate,
            config=config.trainer,
            trackers=[tracker],
            progress=progress,
        )
    finally:
        tracker.close()
        data.training.close()
    save_checkpoint(folder.checkpoint, result.state, config_as_dict(config))
    progress.message(f"checkpoint, config and metrics are in {folder.root}")
    return result


def main(arguments: Sequence[str]) -> int:
    """The command: returns the exit status, after a one-line message for anything that the user can mend."""
    progress = ConsoleProgress()
    try:
        train_lm(parse_config(TrainLmConfig, arguments), progress)
    except _MENDABLE as error:
        progress.message(f"error: {error}")
        return 1
    return 0


_MENDABLE = (ConfigError, DataError, FileExistsError, NonFiniteLossError, BudgetError, OffloadError)


def _with_planned_remat(config: TrainLmConfig, progress: Progress) -> TrainLmConfig:
    """The config with the policy that `remat: auto` stands for on the device at hand."""
    if config.remat != "auto" or config.budget is None:
        return config
    progress.message(f"looking for the remat policy that fits {config.budget}")
    found = plan_step(config, budget=config.budget, host_budget=config.host_budget)
    progress.message(str(found))
    return dataclasses.replace(config, remat=remat_entry(found.policy), budget=None, host_budget=None)


def _run_folder(config: TrainLmConfig) -> RunFolder:
    root = config.trainer.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}"
    return RunFolder.create(Path(root), config_as_dict(config), overwrite=config.trainer.overwrite)


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
        f"{jax.device_count()} {jax.default_backend()} device(s); run folder {folder.root}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
