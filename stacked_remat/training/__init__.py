"""Training: config in, a trained model out. Knows batches, steps and run folders; names no architecture."""

from .batches import BATCH_AXIS, POSITION_AXIS, PackedTokens, TokenBatch
from .checkpoint import CheckpointMismatchError, Checkpoints, checkpoint_config, load_checkpoint
from .config import DataConfig, check_remat, remat_entry, remat_policy
from .config_file import ConfigError, config_as_dict, parse_config
from .corpus import Corpus, read_corpus
from .evaluation import held_out_evaluator
from .loop import NonFiniteLossError, Position, RunOutputs, TrainingResult, train
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
from .progress import ConsoleProgress, Progress
from .run_folder import RunFolder, config_changes
from .signals import EXIT_INTERRUPTED, StopSignals
from .step import LossFunction, Metrics, RandomLoss, Trainable, TrainState, build_step, train_step
from .streams import HeldOutSet, PackedHeldOut, PackedStream, TokenStream
from .throughput import peak_flops, training_flops
from .tokenizer import ByteTokenizer
from .trackers import (
    JsonLinesTracker,
    TensorBoardTracker,
    Tracker,
    TrackioTracker,
    WandbTracker,
    build_trackers,
    check_trackers,
)
from .trainer_config import (
    CheckpointConfig,
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
    "POSITION_AXIS",
    "AdafactorConfig",
    "AdamWConfig",
    "ByteTokenizer",
    "CheckpointConfig",
    "CheckpointMismatchError",
    "Checkpoints",
    "ConfigError",
    "ConsoleProgress",
    "ConstantSchedule",
    "Corpus",
    "CosineSchedule",
    "DataConfig",
    "HeldOutSet",
    "JsonLinesTracker",
    "LinearSchedule",
    "LionConfig",
    "LossFunction",
    "Metrics",
    "MuonConfig",
    "NonFiniteLossError",
    "OptimizerConfig",
    "PackedHeldOut",
    "PackedStream",
    "PackedTokens",
    "Position",
    "PrecisionConfig",
    "ProfilerConfig",
    "Progress",
    "RandomLoss",
    "RunFolder",
    "RunOutputs",
    "ScheduleConfig",
    "SgdConfig",
    "StopSignals",
    "TensorBoardTracker",
    "TokenBatch",
    "TokenStream",
    "Tracker",
    "TrackersConfig",
    "TrackioConfig",
    "TrackioTracker",
    "TrainState",
    "Trainable",
    "TrainerConfig",
    "TrainingResult",
    "UpdateConfig",
    "WandbConfig",
    "WandbTracker",
    "WarmupStableDecaySchedule",
    "build_optimizer",
    "build_step",
    "build_trackers",
    "cast_parameters",
    "check_remat",
    "check_trackers",
    "checkpoint_config",
    "config_as_dict",
    "config_changes",
    "held_out_evaluator",
    "in_float32",
    "learning_rate_schedule",
    "load_checkpoint",
    "parse_config",
    "peak_flops",
    "read_corpus",
    "remat_entry",
    "remat_policy",
    "train",
    "train_step",
    "training_flops",
]
