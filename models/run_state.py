"""What a run begins with: the model that its config describes, its optimizer, and the state of both."""

import dataclasses
import functools
from typing import NamedTuple, Protocol

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis

from models.hub import model_folder
from models.lm import LanguageModel, LmConfig, build_model, next_token_loss
from models.lora import with_adapters
from models.pretrained import ModelEntries, read_pretrained
from stacked_remat import ScanCheckpointSpec
from stacked_remat.lora import LoraConfig
from stacked_remat.training import (
    BATCH_AXIS,
    POSITION_AXIS,
    ConfigError,
    DataConfig,
    OptimizerConfig,
    Partitioning,
    RematEntry,
    TokenBatch,
    TrainerConfig,
    TrainState,
    build_optimizer,
    cast_parameters,
    remat_policy,
)


class StepConfig(ModelEntries, Protocol):
    """What a config says of the training step."""

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters, where they alone are trained."""
        ...

    @property
    def optimizer(self) -> OptimizerConfig:
        """What keeps state for every weight that is trained."""
        ...

    @property
    def trainer(self) -> TrainerConfig:
        """The seed, microbatches and dtypes; the number of steps, for the schedule."""
        ...


class ResolvedConfig(StepConfig, Protocol):
    """A config whose `model` and `vocab_size` are those of the end, and whose `remat` is a policy."""

    @property
    def remat(self) -> RematEntry:
        """The policy, as a config has it."""
        ...


class ModelOfRun(NamedTuple):
    """A model as it is in the end.

    Attributes:
        architecture: the config's, or that of the folder with its weights.
        vocab_size: rows of the embedding.
        remat: policy of its stacks of layers.
    """

    architecture: LmConfig
    vocab_size: int
    remat: ScanCheckpointSpec

    @staticmethod
    def of(config: "ResolvedConfig") -> "ModelOfRun":
        """The model of a config that `models.train_lm` resolved."""
        assert config.vocab_size is not None
        remat = remat_policy(config.remat, config.model.remat_presets)
        return ModelOfRun(config.model, config.vocab_size, remat)


def run_optimizer(config: StepConfig) -> optax.GradientTransformation:
    """The optimizer with the schedule and dtypes of a run."""
    return build_optimizer(
        config.optimizer,
        config.trainer.num_steps,
        state_dtype=config.trainer.precision.optimizer_state,
    )


def initial_state(
    config: StepConfig,
    model: ModelOfRun,
    partitioning: Partitioning | None = None,
    *,
    read_weights: bool = True,
) -> TrainState:
    """The state before the first step.

    Args:
        config: where the weights come from, what of them is trained, and how.
        model: what the config's model comes to.
        partitioning: where the arrays are made, none of them anywhere whole; on the default device if not
            given.
        read_weights: whether to read the weights of `initialize_from_hf`; if not, all of them are random.

    Raises:
        WeightsError, FileNotFoundError: the weights can't be read, or are not of this model.
        ConfigError: the adapters fit nothing; the arrays can't be divided like that.
    """
    model_key, step_key = jax.random.split(jax.random.key(config.trainer.seed))
    Vocab = Axis("vocab", model.vocab_size)
    dtype = config.trainer.precision.parameters

    def begin(weights: LanguageModel) -> TrainState:
        adapted, trainable = with_adapters(weights, config.lora, key=model_key)
        return TrainState.init(adapted, run_optimizer(config), trainable, key=step_key)

    def begin_at_random() -> TrainState:
        weights = build_model(model.architecture, Vocab, remat=model.remat, key=model_key)
        return begin(cast_parameters(weights, dtype))

    if config.initialize_from_hf is None or not read_weights:
        return begin_at_random() if partitioning is None else partitioning.init_sharded(begin_at_random)
    weights = read_pretrained(
        model.architecture,
        model_folder(config.initialize_from_hf),
        Vocab,
        remat=model.remat,
        dtype=dtype,
        sharding=None if partitioning is None else partitioning.weight_sharding,
    )
    return begin(weights) if partitioning is None else partitioning.init_sharded(begin, weights)


def batch_shapes(data: DataConfig, partitioning: Partitioning) -> TokenBatch:
    """The shapes of a batch, with where it belongs.

    Raises:
        ConfigError: its rows can't be divided over the devices.
    """

    def first_batch() -> TokenBatch:
        axes = (Axis(BATCH_AXIS, data.batch_size), Axis(POSITION_AXIS, data.seq_len))
        tokens = hax.zeros(axes, dtype=jnp.int32)
        documents = tokens if data.separate_documents else None
        return TokenBatch(tokens, tokens, hax.ones(axes, dtype=jnp.float32), documents, documents)

    return partitioning.batch_shapes(eqx.filter_eval_shape(first_batch))


def check_step(config: ResolvedConfig, partitioning: Partitioning) -> None:
    """Refuses what would only be noticed when the first step is traced; costs no memory.

    Raises:
        ConfigError: the model can't be made, not be divided over the devices, or not be applied here, such as
            with a kernel that runs elsewhere.
    """
    state = state_shapes(config, ModelOfRun.of(config), partitioning)
    batch = batch_shapes(config.data, partitioning)
    try:
        with partitioning.active():
            eqx.filter_eval_shape(next_token_loss, state.model, batch)
    except ValueError as error:
        raise ConfigError(f"The model of this config can't be applied here: {error}") from error


def state_shapes(
    config: StepConfig, model: ModelOfRun, partitioning: Partitioning | None = None
) -> TrainState:
    """The shapes of `initial_state`, with where they belong; costs no memory.

    Raises:
        ConfigError: as `initial_state`.
    """
    shapes = eqx.filter_eval_shape(functools.partial(initial_state, config, model, read_weights=False))
    if partitioning is None:
        return shapes
    partitioning.check_names(shapes)
    return partitioning.weight_shapes(shapes)


def saved_arrays(state: TrainState) -> TrainState:
    """True for the arrays that checkpoints hold: all but what is frozen."""
    marks = jax.tree.map(lambda _: True, state)
    return dataclasses.replace(marks, frozen=jax.tree.map(lambda _: False, state.frozen))
