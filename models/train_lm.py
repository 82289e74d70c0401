"""Trains a language model from a config file.

    python -m models.train_lm --config_path models/configs/qwen3_moe_tiny.yaml [--trainer.num_steps 500 ...]

Leaves the resolved config, metrics and a checkpoint in the run folder.
"""

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
from models.lm import LanguageModel, LmConfig, build_model, next_token_loss
from models.qwen3_moe import Qwen3MoeConfig
from stacked_remat.training import (
    ByteTokenizer,
    ConfigError,
    ConsoleProgress,
    Corpus,
    DataConfig,
    JsonLinesTracker,
    NonFiniteLossError,
    OptimizerConfig,
    PackedTokens,
    Progress,
    RunFolder,
    TrainerConfig,
    TrainingResult,
    TrainState,
    build_optimizer,
    config_as_dict,
    held_out_evaluator,
    learning_rate_schedule,
    parse_config,
    read_corpus,
    remat_policy,
    save_checkpoint,
    train,
)


@dataclass(frozen=True)
class TrainLmConfig:
    """Everything a run depends on.

    Attributes:
        model: the architecture, by `type`.
        remat: memory policy of the model's stack of layers: an alias (true, false, nested, offload, ...) or
            the fields of a `ScanCheckpointPolicy`.
        data: the text.
        optimizer: AdamW and its schedule.
        trainer: length, reports and the run folder.
    """

    model: LmConfig = field(default_factory=Qwen3MoeConfig)
    remat: bool | dict[str, Any] | str = True
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        remat_policy(self.remat)
        learning_rate_schedule(self.optimizer, self.trainer.num_steps)


def train_lm(config: TrainLmConfig, progress: Progress) -> TrainingResult:
    """Runs the training that `config` describes.

    Raises:
        FileExistsError: the run folder holds an earlier run's results.
        FileNotFoundError, ConfigError: there is no text, or too little.
        NonFiniteLossError: training diverged.
    """
    tokenizer = ByteTokenizer()
    corpus = read_corpus(config.data, tokenizer)
    model = build_model(
        config.model,
        Axis("vocab", tokenizer.vocab_size),
        remat=remat_policy(config.remat),
        key=jax.random.key(config.trainer.seed),
    )
    optimizer = build_optimizer(config.optimizer, config.trainer.num_steps)
    evaluate = held_out_evaluator(
        next_token_loss, _packed(corpus.held_out, config), config.trainer.eval_batches
    )
    folder = _run_folder(config)
    progress.message(_summary(config, corpus, model, folder))
    tracker = JsonLinesTracker(folder.metrics)
    try:
        result = train(
            TrainState.init(model, optimizer),
            loss_function=next_token_loss,
            optimizer=optimizer,
            schedule=learning_rate_schedule(config.optimizer, config.trainer.num_steps),
            training=_packed(corpus.train, config),
            evaluate=evaluate,
            config=config.trainer,
            trackers=[tracker],
            progress=progress,
        )
    finally:
        tracker.close()
    save_checkpoint(folder.checkpoint, result.state, config_as_dict(config))
    progress.message(f"checkpoint, config and metrics are in {folder.root}")
    return result


def main(arguments: Sequence[str]) -> int:
    """The command: returns the exit status, after a one-line message for anything that the user can mend."""
    progress = ConsoleProgress()
    try:
        train_lm(parse_config(TrainLmConfig, arguments), progress)
    except (ConfigError, FileExistsError, FileNotFoundError, NonFiniteLossError) as error:
        progress.message(f"error: {error}")
        return 1
    return 0


def _packed(stream: Any, config: TrainLmConfig) -> PackedTokens:
    return PackedTokens(stream, config.data.seq_len, config.data.batch_size, config.trainer.seed)


def _run_folder(config: TrainLmConfig) -> RunFolder:
    root = config.trainer.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}"
    return RunFolder.create(Path(root), config_as_dict(config), overwrite=config.trainer.overwrite)


def _summary(config: TrainLmConfig, corpus: Corpus, model: LanguageModel, folder: RunFolder) -> str:
    parameters = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    step_tokens = config.data.batch_size * config.data.seq_len
    return (
        f"{parameters:,} parameters; {corpus.train.size:,} tokens in {corpus.num_train_files} files to train "
        f"on, {corpus.held_out.size:,} in {corpus.num_held_out_files} held out; {config.trainer.num_steps} "
        f"steps of {step_tokens:,} tokens; {jax.device_count()} {jax.default_backend()} device(s); "
        f"run folder {folder.root}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
