"""Training for any model: configs, data, steps, the loop around them, checkpoints and trackers."""

from . import extra as extra
from .batches import BATCH_AXIS, POSITION_AXIS, TokenBatch
from .checkpoint import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    Checkpoints,
    check_unsaved,
    checkpoint_config,
    load_checkpoint,
)
from .config_error import ConfigError
from .config_file import config_as_dict, parse_config
from .config_reference import config_reference
from .data.batch_stream import BatchStream, MixtureShare, ProcessShare
from .data.chat_template import ChatTemplate, ChatTemplateError, RenderedChat
from .data.data_error import DataError
from .data.held_out import HeldOutBatches
from .data.packing import PackedDocuments
from .data.tokenized import TokenizedDocuments
from .data.tokenizer_files import load_tokenizer, read_tokenizer_files
from .data.tokenizers import ByteTokenizer, Tokenizer
from .data.training_data import TrainingData, open_training_data
from .data_config import DataConfig, SourceConfig
from .evaluation import held_out_evaluator, held_out_evaluators
from .loop import NonFiniteLossError, Position, RunOutputs, TrainingResult, train
from .memory_check import check_fits, memory_bytes
from .mesh import Partitioning, mesh_sizes
from .optimizer import build_optimizer, learning_rate_schedule
from .optimizer_config import (
    AdafactorConfig,
    AdamWConfig,
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleConfig,
    SgdConfig,
    WarmupStableDecaySchedule,
)
from .precision import cast_parameters, in_float32
from .progress import ConsoleProgress, Progress, lasting_console
from .remat import NO_PRESETS, RematEntry, RematPresets, check_remat, remat_entry, remat_policy
from .run_folder import RunFolder, config_changes, lock_run_folder, named_in_errors
from .signals import EXIT_INTERRUPTED, Interrupted, StopSignals
from .step import (
    FusedOptimizer,
    LossFunction,
    Metrics,
    RandomLoss,
    Trainable,
    TrainState,
    build_step,
    train_step,
)
from .streams import HeldOutSet, TokenStream
from .throughput import peak_flops, training_flops
from .trackers import (
    HostedTracker,
    JsonLinesTracker,
    TensorBoardTracker,
    Tracker,
    build_trackers,
    check_trackers,
)
from .trainer_config import (
    CheckpointConfig,
    MeshConfig,
    PrecisionConfig,
    ProfilerConfig,
    TrackersConfig,
    TrackioConfig,
    TrainerConfig,
    UpdateConfig,
    WandbConfig,
)

__all__ = [
    "BATCH_AXIS",
    "EXIT_INTERRUPTED",
    "NO_PRESETS",
    "POSITION_AXIS",
    "AdafactorConfig",
    "AdamWConfig",
    "BatchStream",
    "ByteTokenizer",
    "ChatTemplate",
    "ChatTemplateError",
    "CheckpointConfig",
    "CheckpointDamagedError",
    "CheckpointMismatchError",
    "Checkpoints",
    "ConfigError",
    "ConsoleProgress",
    "ConstantSchedule",
    "CosineSchedule",
    "DataConfig",
    "DataError",
    "FusedOptimizer",
    "HeldOutBatches",
    "HeldOutSet",
    "HostedTracker",
    "Interrupted",
    "JsonLinesTracker",
    "LinearSchedule",
    "LionConfig",
    "LossFunction",
    "MeshConfig",
    "Metrics",
    "MixtureShare",
    "MuonConfig",
    "NonFiniteLossError",
    "OptimizerConfig",
    "PackedDocuments",
    "Position",
    "Partitioning",
    "PrecisionConfig",
    "ProcessShare",
    "ProfilerConfig",
    "Progress",
    "RandomLoss",
    "RematEntry",
    "RematPresets",
    "RenderedChat",
    "RunFolder",
    "RunOutputs",
    "ScheduleConfig",
    "SgdConfig",
    "SourceConfig",
    "StopSignals",
    "TensorBoardTracker",
    "TokenBatch",
    "TokenStream",
    "TokenizedDocuments",
    "Tokenizer",
    "Tracker",
    "TrackersConfig",
    "TrackioConfig",
    "TrainState",
    "TrainerConfig",
    "Trainable",
    "TrainingData",
    "TrainingResult",
    "UpdateConfig",
    "WandbConfig",
    "WarmupStableDecaySchedule",
    "build_optimizer",
    "build_step",
    "build_trackers",
    "cast_parameters",
    "check_fits",
    "check_remat",
    "check_trackers",
    "check_unsaved",
    "checkpoint_config",
    "config_as_dict",
    "config_changes",
    "config_reference",
    "held_out_evaluator",
    "held_out_evaluators",
    "in_float32",
    "lasting_console",
    "learning_rate_schedule",
    "load_checkpoint",
    "load_tokenizer",
    "lock_run_folder",
    "open_training_data",
    "memory_bytes",
    "mesh_sizes",
    "named_in_errors",
    "parse_config",
    "peak_flops",
    "read_tokenizer_files",
    "remat_entry",
    "remat_policy",
    "train",
    "train_step",
    "training_flops",
]
