"""The state that a run begins with: its model, adapters and optimizer state; and models
that are found.
"""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis
from jaxtyping import PRNGKeyArray

from models.hf_io.adapters import load_adapters
from models.hf_io.decoder_weights import read_decoder
from models.hf_io.hub import model_folder
from models.hf_io.safetensors_folder import SafetensorsFolder, is_hub_snapshot
from models.parts.config import DecoderConfig
from models.parts.decoder import Decoder
from models.parts.experts import SparseExperts
from models.run_config import CHECKPOINTS, FoundModel, LmRunConfig, find_model
from stacked_remat import ScanCheckpointSpec, Stacked, streaming
from stacked_remat.lora import (
    LoraConfig,
    LoraLinear,
    apply_lora,
    lora_filter,
    lora_linears,
    merge_lora,
    quantize_linears,
)
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
    check_learning_rates,
    load_checkpoint,
    parameter_paths,
    trainable_except,
)
from stacked_remat.training.checkpoint import check_unsaved
from stacked_remat.training.precision import keeps_dtype
from stacked_remat.training.trainer_config import FloatName


def run_optimizer(
    config: LmRunConfig, eps_root: float = 0.0
) -> optax.GradientTransformation | FusedOptimizer:
    """The optimizer with the schedule and dtypes of a run; `eps_root` as
    `build_optimizer` takes it.
    """
    most = config.optimizer.max_grad_norm
    steps = config.trainer.num_steps
    options: Any = {
        "state_dtype": config.trainer.precision.optimizer_state,
        "eps_root": eps_root,
    }
    # Fused updates bound the norm themselves, of all layers together.
    unclipped = build_optimizer(
        dataclasses.replace(config.optimizer, max_grad_norm=None), steps, **options
    )
    if config.trainer.update.fused:
        return FusedOptimizer(unclipped, most)
    if most is not None and config.model.balances_by_bias:
        # Those of router biases are 1, 0 or -1 whatever the loss is: in the norm they
        # would shrink the others, and be shrunk by them.
        return optax.chain(
            optax.masked(optax.clip_by_global_norm(most), _but_router_biases), unclipped
        )
    return build_optimizer(config.optimizer, steps, **options)


def _but_router_biases(model: Any) -> Any:
    """True for all arrays but the biases of routers, whose gradients are directions."""

    def mark(node: Any) -> Any:
        marks = jax.tree.map(lambda _: True, node)
        if not isinstance(node, SparseExperts) or node.bias is None:
            return marks
        if node.bias.value.array is None:  # frozen
            return marks
        return eqx.tree_at(lambda one: one.bias.value.array, marks, False)

    return jax.tree.map(
        mark, model, is_leaf=lambda node: isinstance(node, SparseExperts)
    )


def trained_parts(
    config: LmRunConfig, model: Decoder, *, key: PRNGKeyArray
) -> tuple[Decoder, Trainable]:
    """The model to train, with adapters if the run has them, and which of its arrays
    are trained.

    Quantizes frozen weights if the run does, and frees those that were given.
    """
    if (form := config.trainer.precision.frozen) is not None:
        model = quantize_linears(model, form, where=_is_quantized, donate=True)
    model, trainable = with_adapters(model, config.lora, key=key)
    if not (config.freeze or config.optimizer.learning_rates):
        return model, trainable
    try:
        trainable = trainable_except(model, config.freeze, trainable)
        trained = eqx.filter(model, trainable)
        _check_left_to_train(config, model, trained)
        check_learning_rates(config.optimizer.learning_rates, trained)
    except ValueError as error:
        raise ConfigError(f"Bad config: {error}") from error
    return model, trainable


def _is_quantized(path: str) -> bool:
    """Whether frozen weights of a linear may be quantized.

    Rounding a router changes which experts run. An embedding that is the head is no
    linear map, so a head of its own stays too.
    """
    is_in_layer = path.startswith(("layers.", "mtp."))
    return is_in_layer and not path.endswith(".router")


def _check_left_to_train(config: LmRunConfig, model: Decoder, trained: Decoder) -> None:
    """Raises ValueError for patterns that freeze what something else has to train."""
    if not jax.tree.leaves(trained):
        raise ValueError(
            "freeze: the patterns match every parameter that would be trained. Leave"
            " some of them to train."
        )
    if config.trainer.update.fused and not jax.tree.leaves(trained.layers):
        raise ValueError(
            "freeze: the patterns match every parameter of the layers, and"
            " trainer.update.fused updates those. Leave out one of them."
        )
    if not config.model.balances_by_bias:
        return
    for path in sorted({*parameter_paths(model)} - {*parameter_paths(trained)}):
        if path.endswith(".mlp.bias.value"):
            raise ValueError(
                f"freeze: the patterns match {path}, the biases of routers, which"
                " model.bias: by_load trains. Leave them out, or write model.bias:"
                " frozen."
            )


def with_adapters(
    model: Decoder, lora: LoraConfig | None, *, key: PRNGKeyArray
) -> tuple[Decoder, Trainable]:
    """The model to train, and which of its arrays: only adapters, or all without
    `lora`.
    """
    if lora is None:
        return model, eqx.is_inexact_array
    _check_head_target(model, lora)
    try:
        # Another key than the model's, so that adapters are independent of its weights.
        adapted = apply_lora(model, lora, key=jax.random.fold_in(key, 1))
    except ValueError as error:
        raise ConfigError(f"Bad config: {error}") from error
    return adapted, lora_filter(adapted)


def _check_head_target(model: Decoder, lora: LoraConfig) -> None:
    """Refuses a pattern for a head that is the embedding, which is no linear map, or
    whose weight stays in files.
    """
    if model.head is not None:
        in_files = streaming.is_in_files(model.head.weight)
        matching = [own for own in lora.targets if fnmatch.fnmatchcase("head", own)]
        if in_files and matching:
            raise ConfigError(
                f"lora.targets: {matching[0]!r} is of the head too, which takes no"
                " adapter with trainer.streaming: files. Name others, such as *_proj,"
                " or write trainer.streaming: true."
            )
        return
    paths = [*lora_linears(model)]
    for pattern in lora.targets:
        if fnmatch.fnmatchcase("head", pattern) and not fnmatch.filter(paths, pattern):
            raise ConfigError(
                f"lora.targets: {pattern!r} is of the head, which this model ties to"
                " the embedding: they are one matrix, without a linear map to adapt."
                " Leave it out."
            )


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a model is made or read, under which policy, and whether its layers are on
    the host.
    """

    partitioning: Partitioning
    remat: ScanCheckpointSpec
    streamed: bool

    @staticmethod
    def of(
        run: LmRunConfig | None, over: Partitioning | None = None, remat: Any = True
    ) -> "Placement":
        """On the first device if no others are given; layers on the host if they are
        there in the run.
        """
        assert remat is not None, "remat: auto has to be resolved first"
        # What reads a run, as generation does, has all weights in memory.
        streamed = run is not None and run.trainer.streaming is True
        return Placement(over or Partitioning.one_device(), remat, streamed)

    def random(
        self, config: DecoderConfig, Vocab: Axis, dtype: FloatName, key: PRNGKeyArray
    ) -> Decoder:
        """A model with random weights."""

        def init_stack(
            Layers: Axis, init_layer: Any, *, remat: ScanCheckpointSpec
        ) -> Callable[..., Stacked]:
            def init(*args: Any, **kwargs: Any) -> Any:
                return cast_parameters(init_layer(*args, **kwargs), dtype)

            return (streaming if self.streamed else Stacked).init(
                Layers, init, remat=remat
            )

        model = Decoder.init(
            config, Vocab, remat=self.remat, init_stack=init_stack, key=key
        )
        return cast_parameters(model, dtype)

    def shapes(self, found: FoundModel, dtype: FloatName) -> Decoder:
        """The shapes of its weights in this dtype, with their shardings."""
        make = functools.partial(
            self.random, found.config, found.Vocab, dtype, jax.random.key(0)
        )
        return self.partitioning.shapes_of(make)

    def load_model(self, found: FoundModel, dtype: FloatName) -> Decoder:
        """The model with its adapters merged, its weights in this dtype, but for those
        of parts that keep their own, such as decays.
        """
        model = merge_lora(self.read_model(found, dtype), donate=True)

        def cast(node: Any) -> Any:
            if keeps_dtype(node):
                return node
            return jax.device_put(node.astype(dtype), node.sharding)

        return jax.tree.map(cast, model, is_leaf=keeps_dtype)

    def open_files(self, found: FoundModel, dtype: FloatName) -> Decoder:
        """The model with its frozen weights in its files, read in this dtype.

        Raises:
            ConfigError: the model is no folder in Hugging Face's format, or is to be on
                several devices.
        """
        if found.run is not None or found.base is not None:
            raise ConfigError(
                "trainer.streaming: files reads a model in Hugging Face's format, and"
                f" initialize_from_hf, {found.name}, is a run or a folder of adapters."
                " Write it with models.export_hf, or leave out trainer.streaming."
            )
        devices = self.partitioning.mesh.size
        if devices > 1:
            raise ConfigError(
                "trainer.streaming: files is for one device, and trainer.mesh has"
                f" {devices}. Give trainer.mesh.axes one device, or write"
                " trainer.streaming: true."
            )
        folder = model_folder(found.name)
        return read_decoder(folder, self.shapes(found, dtype), in_files=True)

    def read_model(self, found: FoundModel, dtype: FloatName) -> Decoder:
        """The model with its adapters; weights of a run in the run's own dtype, others
        in this one.
        """
        base = found.base and dataclasses.replace(found.base, config=found.config)
        if found.run is not None:
            return self._read_run(found, found.run, base)
        if base is not None:
            return load_adapters(self.load_model(base, dtype), model_folder(found.name))
        return read_decoder(model_folder(found.name), self.shapes(found, dtype))

    def _read_run(
        self, found: FoundModel, run: LmRunConfig, base: FoundModel | None
    ) -> Decoder:
        folder = found.root / CHECKPOINTS
        dtype = run.trainer.precision.parameters
        key = _model_key(run)
        if run.lora is None:
            shapes = self.shapes(found, dtype)
            trainable = trainable_except(shapes, run.freeze)
            trained, frozen = eqx.partition(shapes, trainable)
            load = functools.partial(load_checkpoint, folder, step=found.step)
            model = load(trained, part="trained")
            # Frozen weights are a part of their own in a checkpoint, as they have no
            # optimizer state.
            if run.freeze:
                model = eqx.combine(model, load(frozen, part="frozen"))
            return model
        if base is not None:
            weights = self.load_model(base, dtype)
        else:
            weights = self.partitioning.init_sharded(
                self.random, found.config, found.Vocab, dtype, key
            )
        # A checkpoint has adapters alone; frozen weights are compared by a checksum.
        adapted, trainable = trained_parts(run, weights, key=key)
        trained, frozen = eqx.partition(
            self.partitioning.shard_weights(adapted), trainable
        )
        check_unsaved(folder, {"frozen": frozen}, step=found.step)
        return eqx.combine(
            load_checkpoint(folder, trained, step=found.step, part="trained"), frozen
        )


def check_weights(found: FoundModel) -> None:
    """Refuses a folder whose files of weights are missing or truncated, by their
    headers; reads no tensor, and fetches nothing.

    Raises:
        FileNotFoundError, WeightsError: as `Placement.read_model`.
    """
    if found.base is not None:
        check_weights(found.base)
    # Weights of a run are in its checkpoint, and those of the Hub come later.
    elif found.run is None and not is_hub_snapshot(found.root):
        SafetensorsFolder.open(found.root)


def initial_state(
    config: LmRunConfig, partitioning: Partitioning | None = None
) -> TrainState:
    """The state before the first step.

    Args:
        partitioning: where the arrays are made, none of them whole on a device; on the
            first device if not given. With `trainer.streaming`, the layers are made on
            the host, one after the other.
    """
    placement = Placement.of(config, partitioning, config.policy)
    begin = functools.partial(_begun, config, placement)
    init = placement.partitioning.init_sharded
    name = config.initialize_from_hf
    return init(begin) if name is None else init(begin, _base(config, name, placement))


def _base(config: LmRunConfig, name: str, placement: Placement) -> Decoder:
    """The model that a run begins with, `initialize_from_hf`."""
    found = dataclasses.replace(find_model(name), config=config.model)
    read = placement.open_files if config.reads_files else placement.load_model
    return read(found, config.trainer.precision.parameters)


def state_shapes(
    config: LmRunConfig,
    partitioning: Partitioning | None = None,
    *,
    remat: ScanCheckpointSpec | None = None,
) -> TrainState:
    """The shapes of `initial_state`, with their shardings, under another policy if
    given; costs no memory, or where weights stay in files that of the others.
    """
    placement = Placement.of(
        config, partitioning, config.policy if remat is None else remat
    )
    begin = functools.partial(_begun, config, placement)
    name = config.initialize_from_hf
    if config.reads_files and name is not None:
        # The files tell which weights stay there.
        begin = functools.partial(begin, _base(config, name, placement))
    return placement.partitioning.shapes_of(begin)


def restored_state(
    run_dir: Path,
    config: LmRunConfig,
    step: int | None = None,
    partitioning: Partitioning | None = None,
) -> TrainState:
    """The state of a run's checkpoint, on the first device if no partitioning is given;
    the weights under adapters are read or made again.
    """
    make = state_shapes if config.lora is None else initial_state
    like = make(config, partitioning)
    # What is not saved must be what the run began with: a checksum of it is in the
    # checkpoint.
    saved, rest = eqx.partition(like, saved_arrays(like))
    check_unsaved(run_dir / CHECKPOINTS, rest, step=step)
    return eqx.combine(load_checkpoint(run_dir / CHECKPOINTS, saved, step=step), rest)


def _begun(
    config: LmRunConfig, placement: Placement, weights: Decoder | None = None
) -> TrainState:
    """The state before the first step with these weights, or with random ones."""
    key = _model_key(config)
    dtype = config.trainer.precision.parameters
    if weights is None:
        weights = placement.random(config.model, config.Vocab, dtype, key)
    adapted, trainable = trained_parts(config, weights, key=key)
    if placement.streamed and config.trainer.update.fused:  # adapters too
        adapted = streaming.to_host(adapted)
    return TrainState.init(adapted, run_optimizer(config), trainable)


def _model_key(run: LmRunConfig) -> PRNGKeyArray:
    return jax.random.split(jax.random.key(run.trainer.seed))[0]


def batch_shapes(data: DataConfig, partitioning: Partitioning) -> TokenBatch:
    """The shapes of a batch, with their shardings."""

    def first_batch() -> TokenBatch:
        axes = (Axis(BATCH_AXIS, data.batch_size), Axis(POSITION_AXIS, data.seq_len))
        tokens = hax.zeros(axes, dtype=jnp.int32)
        documents = tokens if data.separate_documents else None
        return TokenBatch(
            tokens, tokens, hax.ones(axes, dtype=jnp.float32), documents, documents
        )

    return partitioning.batch_shapes(eqx.filter_eval_shape(first_batch))


def saved_arrays(state: TrainState) -> TrainState:
    """True for the arrays that checkpoints hold: all but those that are frozen under
    adapters, which begin from a model that is kept elsewhere, or from the seed.
    """
    marks = jax.tree.map(lambda _: True, state)
    linears = lora_linears(state.frozen).values()
    if not any(isinstance(linear, LoraLinear) for linear in linears):
        return marks
    return dataclasses.replace(
        marks, frozen=jax.tree.map(lambda _: False, state.frozen)
    )
