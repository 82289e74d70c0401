"""Training: config in, a trained model out. Knows batches, steps and run folders; names no architecture."""

from .batches import BATCH_AXIS, POSITION_AXIS, PackedTokens, TokenBatch
from .checkpoint import load_checkpoint, save_checkpoint
from .config import DataConfig, OptimizerConfig, TrainerConfig
from .config_file import ConfigError, config_as_dict, parse_config
from .corpus import Corpus, read_corpus
from .evaluation import held_out_evaluator
from .loop import NonFiniteLossError, TrainingResult, train
from .optimizer import build_optimizer, learning_rate_schedule
from .progress import ConsoleProgress, Progress
from .remat import NO_PRESETS, RematEntry, RematPresets, check_remat, remat_entry, remat_policy
from .run_folder import RunFolder
from .step import LossFunction, Metrics, Trainable, TrainState, train_step
from .tokenizer import ByteTokenizer
from .trackers import JsonLinesTracker, Tracker

__all__ = [
    "BATCH_AXIS",
    "NO_PRESETS",
    "POSITION_AXIS",
    "ByteTokenizer",
    "ConfigError",
    "ConsoleProgress",
    "Corpus",
    "DataConfig",
    "JsonLinesTracker",
    "LossFunction",
    "Metrics",
    "NonFiniteLossError",
    "OptimizerConfig",
    "PackedTokens",
    "Progress",
    "RematEntry",
    "RematPresets",
    "RunFolder",
    "TokenBatch",
    "Tracker",
    "TrainState",
    "TrainerConfig",
    "Trainable",
    "TrainingResult",
    "build_optimizer",
    "check_remat",
    "config_as_dict",
    "held_out_evaluator",
    "learning_rate_schedule",
    "load_checkpoint",
    "parse_config",
    "read_corpus",
    "remat_entry",
    "remat_policy",
    "save_checkpoint",
    "train",
    "train_step",
]
