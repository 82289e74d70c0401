"""Training for any model: configs, data, steps, the loop around them, checkpoints and
trackers.
"""

from . import extra as extra
from .batches import (
    BATCH_AXIS as BATCH_AXIS,
    POSITION_AXIS as POSITION_AXIS,
    HeldOutSet as HeldOutSet,
    TokenBatch as TokenBatch,
    TokenStream as TokenStream,
)
from .checkpoint import (
    Checkpoints as Checkpoints,
    checkpoint_run as checkpoint_run,
    load_checkpoint as load_checkpoint,
)
from .config_file import parse_config as parse_config
from .config_reference import config_reference as config_reference
from .config_schema import config_schema as config_schema
from .config_sections import (
    ChoiceRegistry as ChoiceRegistry,
    config_as_dict as config_as_dict,
)
from .data.batch_stream import (
    BatchStream as BatchStream,
    HeldOutBatches as HeldOutBatches,
    ProcessShare as ProcessShare,
)
from .data.chat_template import (
    ChatTemplate as ChatTemplate,
    ChatTemplateError as ChatTemplateError,
    RenderedChat as RenderedChat,
)
from .data.first_example import FirstExample as FirstExample
from .data.packing import (
    PackedDocuments as PackedDocuments,
    TokenizedDocuments as TokenizedDocuments,
)
from .data.tokenizer_files import (
    load_tokenizer as load_tokenizer,
    read_tokenizer_files as read_tokenizer_files,
)
from .data.tokenizers import ByteTokenizer as ByteTokenizer, Tokenizer as Tokenizer
from .data.training_data import (
    TrainingData as TrainingData,
    first_examples as first_examples,
    open_training_data as open_training_data,
    tokenize_share as tokenize_share,
)
from .data_config import DataConfig as DataConfig, SourceConfig as SourceConfig
from .errors import (
    CheckpointDamagedError as CheckpointDamagedError,
    CheckpointMismatchError as CheckpointMismatchError,
    ConfigError as ConfigError,
    DataError as DataError,
)
from .evaluation import held_out_evaluators as held_out_evaluators
from .ghost_config import (
    GhostConfig as GhostConfig,
    GhostValidationConfig as GhostValidationConfig,
)
from .loop import (
    NonFiniteLossError as NonFiniteLossError,
    Position as Position,
    RunOutputs as RunOutputs,
    TrainingResult as TrainingResult,
    train as train,
)
from .mesh import (
    Partitioning as Partitioning,
    gathered as gathered,
    mesh_sizes as mesh_sizes,
)
from .optimizer import (
    build_optimizer as build_optimizer,
    learning_rate_schedule as learning_rate_schedule,
)
from .optimizer_config import (
    AdafactorConfig as AdafactorConfig,
    AdamWConfig as AdamWConfig,
    ConstantSchedule as ConstantSchedule,
    CosineSchedule as CosineSchedule,
    LinearSchedule as LinearSchedule,
    LionConfig as LionConfig,
    MuonConfig as MuonConfig,
    OptimizerConfig as OptimizerConfig,
    ScheduleConfig as ScheduleConfig,
    SgdConfig as SgdConfig,
    WarmupStableDecaySchedule as WarmupStableDecaySchedule,
)
from .parameters import (
    check_learning_rates as check_learning_rates,
    parameter_paths as parameter_paths,
    trainable_except as trainable_except,
)
from .precision import cast_parameters as cast_parameters
from .progress import ConsoleProgress as ConsoleProgress
from .remat import (
    RematPresets as RematPresets,
    check_remat as check_remat,
    remat_policy as remat_policy,
)
from .run_folder import RunFolder as RunFolder, lock_run_folder as lock_run_folder
from .scoring import (
    Scoring as Scoring,
    TokenLosses as TokenLosses,
    ValidationBatch as ValidationBatch,
    validation_batches as validation_batches,
)
from .signals import (
    EXIT_INTERRUPTED as EXIT_INTERRUPTED,
    Interrupted as Interrupted,
    StopSignals as StopSignals,
)
from .step import (
    FusedOptimizer as FusedOptimizer,
    LossFunction as LossFunction,
    LossWithSums as LossWithSums,
    Metrics as Metrics,
    Trainable as Trainable,
    TrainState as TrainState,
    TrainStep as TrainStep,
)
from .trackers import (
    JsonLinesTracker as JsonLinesTracker,
    Tracker as Tracker,
    build_trackers as build_trackers,
    check_trackers as check_trackers,
)
from .trainer_config import (
    CheckpointConfig as CheckpointConfig,
    MeshConfig as MeshConfig,
    PipelineConfig as PipelineConfig,
    PrecisionConfig as PrecisionConfig,
    ProfilerConfig as ProfilerConfig,
    TrackersConfig as TrackersConfig,
    TrainerConfig as TrainerConfig,
    UpdateConfig as UpdateConfig,
    WandbConfig as WandbConfig,
)
