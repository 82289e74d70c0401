"""Training: config in, a trained model out. Knows batches, steps and run folders; names no architecture."""

from .batches import (
    BATCH_AXIS as BATCH_AXIS,
    POSITION_AXIS as POSITION_AXIS,
    PackedTokens as PackedTokens,
    TokenBatch as TokenBatch,
)
from .checkpoint import load_checkpoint as load_checkpoint, save_checkpoint as save_checkpoint
from .config import (
    DataConfig as DataConfig,
    OptimizerConfig as OptimizerConfig,
    TrainerConfig as TrainerConfig,
    remat_policy as remat_policy,
)
from .config_file import (
    ConfigError as ConfigError,
    config_as_dict as config_as_dict,
    parse_config as parse_config,
)
from .corpus import Corpus as Corpus, read_corpus as read_corpus
from .loop import NonFiniteLossError as NonFiniteLossError, TrainingResult as TrainingResult, train as train
from .optimizer import build_optimizer as build_optimizer, learning_rate_schedule as learning_rate_schedule
from .progress import ConsoleProgress as ConsoleProgress, Progress as Progress
from .run_folder import RunFolder as RunFolder
from .step import (
    LossFunction as LossFunction,
    Metrics as Metrics,
    TrainState as TrainState,
    train_step as train_step,
)
from .tokenizer import ByteTokenizer as ByteTokenizer
from .trackers import JsonLinesTracker as JsonLinesTracker, Tracker as Tracker
