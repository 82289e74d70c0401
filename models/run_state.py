"""The state that a run begins with: its model, adapters and optimizer state, and the shapes of all three."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray
from jax.sharding import Sharding
from jaxtyping import PRNGKeyArray

from models.decoder.decoder import Decoder
from models.decoder.experts import SparseExperts
from models.hf_io.decoder_weights import read_decoder
from models.hf_io.hub import model_folder
from models.run_config import LmRunConfig
from stacked_remat import ScanCheckpointSpec, Stacked, streaming
from stacked_remat.lora import LoraConfig, LoraLinear, apply_lora, lora_filter
from stacked_remat.training import (
    BATCH_AXIS,
    POSITION_AXIS,
    ConfigError,
    DataConfig,
    FusedOptimizer,
    Partitioning,
    TokenBatch,
    Trainable,
    TrainState,
    build_optimizer,
    cast_parameters,
)


def run_optimizer(
    config: LmRunConfig, eps_root: float = 0.0
) -> optax.GradientTransformation | FusedOptimizer:
    """The optimizer with the schedule and dtypes of a run; `eps_root` as `build_optimizer` takes it."""
    most, steps = config.optimizer.max_grad_norm, config.trainer.num_steps
    options: Any = {"state_dtype": config.trainer.precision.optimizer_state, "eps_root": eps_root}
    unclipped = build_optimizer(dataclasses.replace(config.optimizer, max_grad_norm=None), steps, **options)
    if config.trainer.update.fused:
        return FusedOptimizer(unclipped, most)
    if most is not None and config.model.balances_by_bias:
        return optax.chain(optax.masked(optax.clip_by_global_norm(most), _but_router_biases), unclipped)
    return build_optimizer(config.optimizer, steps, **options)


def _but_router_biases(model: Any) -> Any:
    """True for all arrays but the biases of routers, whose gradients are directions."""

    def mark(node: Any) -> Any:
        marks = jax.tree.map(lambda _: True, node)
        if not isinstance(node, SparseExperts) or node.bias is None:
            return marks
        return eqx.tree_at(lambda one: one.bias.array, marks, False)

    return jax.tree.map(mark, model, is_leaf=lambda node: isinstance(node, SparseExperts))


def with_adapters(model: Decoder, lora: LoraConfig | None, *, key: PRNGKeyArray) -> tuple[Decoder, Trainable]:
    """The model to train, and which of its arrays: only adapters, or all without `lora`."""
    if lora is None:
        return model, eqx.is_inexact_array
    try:
        # Another key than the model's, so that adapters are independent of its weights.
        adapted = apply_lora(model, lora, key=jax.random.fold_in(key, 1))
    except ValueError as error:
        raise ConfigError(f"Bad config: {error}") from error
    if isinstance(adapted.head, LoraLinear):
        raise ConfigError(
            "The loss takes the weight of the head, which can't be adapted: leave it out of lora.targets."
        )
    return adapted, lora_filter(adapted)


def initial_state(
    config: LmRunConfig,
    partitioning: Partitioning | None = None,
    *,
    remat: ScanCheckpointSpec | None = None,
    read_weights: bool = True,
) -> TrainState:
    """The state before the first step.

    Args:
        partitioning: where the arrays are made, none of them whole on a device; on the first device if not
            given. With `trainer.streaming`, the layers are made on the host, one after the other.
        read_weights: whether to read the weights of `initialize_from_hf`; if not, all of them are random.
    """
    model_key = jax.random.split(jax.random.key(config.trainer.seed))[0]
    dtype = config.trainer.precision.parameters
    if remat is None:
        remat = config.policy
        assert remat is not None, "remat: auto has to be resolved first"

    partitioning, streamed = partitioning or Partitioning.one_device(), config.trainer.streaming

    def begin(weights: Decoder) -> TrainState:
        adapted, trainable = with_adapters(weights, config.lora, key=model_key)
        if streamed and config.trainer.update.fused:  # adapters too
            adapted = streaming.to_host(adapted)
        return TrainState.init(adapted, run_optimizer(config), trainable)

    def init_stack(Layers: Axis, Block: Any, *, remat: ScanCheckpointSpec) -> Callable[..., Stacked]:
        def init(*args: Any, **kwargs: Any) -> Any:
            return cast_parameters(Block.init(*args, **kwargs), dtype)

        return (streaming if streamed else Stacked).init(Layers, init, remat=remat)

    def begin_at_random() -> TrainState:
        make = functools.partial(Decoder.init, config.model, config.Vocab, init_stack=init_stack)
        return begin(cast_parameters(make(remat=remat, key=model_key), dtype))

    if config.initialize_from_hf is None or not read_weights:
        return partitioning.init_sharded(begin_at_random)
    streamed_axis = config.model.Layers.name if streamed else None

    def sharding(weight: NamedArray) -> Sharding:
        of_layer = [axis.size for axis in weight.axes if axis.name != streamed_axis]
        is_moved = len(of_layer) < len(weight.axes) and streaming.moves_to_host(of_layer, weight.dtype)
        return partitioning.weight_sharding(weight, on_host=is_moved)

    options: Any = {"remat": remat, "dtype": dtype, "sharding": sharding}
    weights = read_decoder(model_folder(config.initialize_from_hf), config.model, config.Vocab, **options)
    return partitioning.init_sharded(begin, weights)


def state_shapes(
    config: LmRunConfig,
    partitioning: Partitioning | None = None,
    *,
    remat: ScanCheckpointSpec | None = None,
) -> TrainState:
    """The shapes of `initial_state`, with their shardings; costs no memory."""
    make = functools.partial(initial_state, config, remat=remat, read_weights=False)
    return (partitioning or Partitioning.one_device()).shapes_of(make)


def batch_shapes(data: DataConfig, partitioning: Partitioning) -> TokenBatch:
    """The shapes of a batch, with their shardings."""

    def first_batch() -> TokenBatch:
        axes = (Axis(BATCH_AXIS, data.batch_size), Axis(POSITION_AXIS, data.seq_len))
        tokens = hax.zeros(axes, dtype=jnp.int32)
        documents = tokens if data.separate_documents else None
        return TokenBatch(tokens, tokens, hax.ones(axes, dtype=jnp.float32), documents, documents)

    return partitioning.batch_shapes(eqx.filter_eval_shape(first_batch))


def saved_arrays(state: TrainState) -> TrainState:
    """True for the arrays that checkpoints hold: all but those that are frozen."""
    marks = jax.tree.map(lambda _: True, state)
    return dataclasses.replace(marks, frozen=jax.tree.map(lambda _: False, state.frozen))
