"""Training: config in, a trained model out. Knows batches, steps and run folders; names no architecture."""

from .batches import BATCH_AXIS, POSITION_AXIS, TokenBatch
from .checkpoint import load_checkpoint, save_checkpoint
from .config import OptimizerConfig, TrainerConfig
from .config_file import ConfigError, config_as_dict, parse_config
from .data.batch_stream import BatchStream, MixtureShare, ProcessShare
from .data.chat_template import ChatTemplate, ChatTemplateError, RenderedChat
from .data.data_error import DataError
from .data.held_out import HeldOutBatches
from .data.packing import PackedDocuments
from .data.tokenized import TokenizedDocuments
from .data.tokenizer_files import load_tokenizer
from .data.tokenizers import ByteTokenizer, Tokenizer
from .data.training_data import TrainingData, open_training_data
from .data_config import DataConfig, SourceConfig
from .evaluation import held_out_evaluator
from .loop import NonFiniteLossError, TrainingResult, train
from .optimizer import build_optimizer, learning_rate_schedule
from .progress import ConsoleProgress, Progress
from .remat import NO_PRESETS, RematEntry, RematPresets, check_remat, remat_entry, remat_policy
from .run_folder import RunFolder
from .step import LossFunction, Metrics, Trainable, TrainState, train_step
from .trackers import JsonLinesTracker, Tracker

__all__ = [
    "BATCH_AXIS",
    "NO_PRESETS",
    "POSITION_AXIS",
    "BatchStream",
    "ByteTokenizer",
    "ChatTemplate",
    "ChatTemplateError",
    "ConfigError",
    "ConsoleProgress",
    "DataConfig",
    "DataError",
    "HeldOutBatches",
    "JsonLinesTracker",
    "LossFunction",
    "Metrics",
    "MixtureShare",
    "NonFiniteLossError",
    "OptimizerConfig",
    "PackedDocuments",
    "ProcessShare",
    "Progress",
    "RematEntry",
    "RematPresets",
    "RenderedChat",
    "RunFolder",
    "SourceConfig",
    "TokenBatch",
    "TokenizedDocuments",
    "Tokenizer",
    "Tracker",
    "TrainState",
    "TrainerConfig",
    "Trainable",
    "TrainingData",
    "TrainingResult",
    "build_optimizer",
    "check_remat",
    "config_as_dict",
    "held_out_evaluator",
    "learning_rate_schedule",
    "load_checkpoint",
    "load_tokenizer",
    "open_training_data",
    "parse_config",
    "remat_entry",
    "remat_policy",
    "save_checkpoint",
    "train",
    "train_step",
]
