"""Training: config in, a trained model out. Knows batches, steps and run folders; names no architecture."""

from .batches import (
    BATCH_AXIS as BATCH_AXIS,
)
from .batches import (
    POSITION_AXIS as POSITION_AXIS,
)
from .batches import (
    PackedTokens as PackedTokens,
)
from .batches import (
    TokenBatch as TokenBatch,
)
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .config import (
    DataConfig as DataConfig,
)
from .config import (
    OptimizerConfig as OptimizerConfig,
)
from .config import (
    TrainerConfig as TrainerConfig,
)
from .config import (
    remat_policy as remat_policy,
)
from .config_file import (
    ConfigError as ConfigError,
)
from .config_file import (
    config_as_dict as config_as_dict,
)
from .config_file import (
    parse_config as parse_config,
)
from .corpus import Corpus as Corpus
from .corpus import read_corpus as read_corpus
from .loop import NonFiniteLossError as NonFiniteLossError
from .loop import TrainingResult as TrainingResult
from .loop import train as train
from .optimizer import build_optimizer as build_optimizer
from .optimizer import learning_rate_schedule as learning_rate_schedule
from .progress import ConsoleProgress as ConsoleProgress
from .progress import Progress as Progress
from .run_folder import RunFolder as RunFolder
from .step import (
    LossFunction as LossFunction,
)
from .step import (
    Metrics as Metrics,
)
from .step import (
    TrainState as TrainState,
)
from .step import (
    train_step as train_step,
)
from .tokenizer import ByteTokenizer as ByteTokenizer
from .trackers import JsonLinesTracker as JsonLinesTracker
from .trackers import Tracker as Tracker
