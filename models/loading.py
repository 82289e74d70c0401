"""Finds the model of a run folder, of adapters, or of a folder in Hugging Face's format, and loads it."""

import argparse
import contextlib
import datetime
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import yaml
from haliax import Axis
from jaxtyping import PyTree

from models.command import local_path
from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder, num_weights
from models.hf_io.adapters import load_adapters
from models.hf_io.decoder_weights import read_decoder
from models.hf_io.formats import end_tokens, read_hf_config
from models.hf_io.hub import ADAPTER_CONFIG, model_folder
from models.hf_io.safetensors_folder import WeightsError, read_json
from models.run_config import LmRunConfig
from models.run_state import initial_state, saved_arrays, state_shapes
from stacked_remat import streaming
from stacked_remat.lora import merge_lora
from stacked_remat.training import (
    CheckpointDamagedError,
    ConfigError,
    DataError,
    Partitioning,
    Tokenizer,
    TrainState,
    cast_parameters,
    checkpoint_run,
    load_checkpoint,
    load_tokenizer,
    parse_config,
)
from stacked_remat.training.checkpoint import check_unsaved
from stacked_remat.training.memory_check import check_host_fits, memory_bytes

Dtype = Literal["float32", "bfloat16"]
_CHECKPOINTS = "checkpoints"
_MOST_POSITIONS = 2**31 - 1  # positions are 32-bit numbers


@dataclass(frozen=True)
class FoundModel:
    """A model, before its weights are read.

    Attributes:
        read: reads the model with its adapters, divided like this over devices, or on the first one.
        root: the folder of that model, or of this one; None if there is none, or it is gone.
        base: the name of the model that it began with or adapts; None if there is none.
        run: the config of the run that trained it, if one did.
        figures: the results of a run that is finished.
        weights: their shapes, with shardings, if some are read to host memory.
    """

    config: DecoderConfig
    Vocab: Axis
    tokenizer: Tokenizer
    tokenizer_name: str
    read: Callable[[Partitioning | None], Decoder] = field(repr=False)
    root: Path | None = None
    base: str | None = None
    run: LmRunConfig | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    weights: PyTree | None = None

    def __post_init__(self) -> None:
        assert self.ends  # which refuses what the model lacks
        if self.tokenizer.vocab_size > self.Vocab.size:
            raise ConfigError(
                f"The tokenizer has {self.tokenizer.vocab_size} tokens, and the model's embedding "
                f"{self.Vocab.size} rows. Name the model's own with --tokenizer."
            )

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text: the tokenizer's, then others that the folder of a chat model names."""
        found = () if self.root is None else end_tokens(self.root, self.Vocab.size)
        return (self.tokenizer.end, *sorted({*found} - {self.tokenizer.end}))

    def load(self, partitioning: Partitioning | None = None) -> Decoder:
        """The model with its adapters merged, its weights in the dtype in which it computes."""
        model = merge_lora(self.read(partitioning), donate=True)
        return cast_parameters(model, self.config.compute_dtype)

    def rows_that_fit(self, slots: int) -> int:
        """How many sequences of so many tokens the device holds beside the weights.

        Raises ConfigError if it does not hold one, or the host the layers that are there.
        """
        check_host_fits(
            {"weights": self.weights},
            "The run has trainer.streaming: its layers are read to the host. Give the process more memory.",
        )
        on_host = filter(streaming.is_on_host, jax.tree.leaves(self.weights))
        numbers = num_weights(self.config, self.Vocab.size) - sum(leaf.size for leaf in on_host)
        weights = numbers * jnp.dtype(self.config.compute_dtype).itemsize
        cache, memory = self.config.cache_bytes(1, slots), memory_bytes(jax.local_devices()[0])
        if slots > _MOST_POSITIONS or (memory is not None and weights + cache > memory):
            has = "" if memory is None else f", and this device has {_mebibytes(memory)}"
            raise ConfigError(
                f"The weights take {_mebibytes(weights)} in {self.config.compute_dtype}, the keys and values "
                f"of {slots} tokens {_mebibytes(cache)}{has}. Use fewer tokens, --dtype bfloat16, a smaller "
                f"model, or a larger device."
            )
        return _MOST_POSITIONS if memory is None else (memory - weights) // cache


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `model_of_arguments` reads."""
    source, add = parser.add_mutually_exclusive_group(required=True), parser.add_argument
    source.add_argument("--run_dir", type=local_path, help="a run folder of models.train_lm")
    source.add_argument(
        "--model", help="a folder in Hugging Face's format, or owner/model on its Hub; adapters of PEFT too"
    )
    add("--step", type=int, help="of the run's checkpoint; the latest if not given")
    add("--dtype", choices=("float32", "bfloat16"), help="in which to compute; the model's own if not given")
    add("--tokenizer", help="replaces the model's: byte, a folder, a file, a name on the Hub")


def model_of_arguments(options: argparse.Namespace) -> FoundModel:
    """`find_model` by the arguments of a command."""
    find, name = (find_model, options.model) if options.run_dir is None else (_of_run, options.run_dir)
    try:
        return find(name, options.step, options.dtype, options.tokenizer)
    except DataError as error:
        key = "data.tokenizer" if options.tokenizer is None else "--tokenizer"
        raise DataError(str(error).replace("data.tokenizer", key)) from error


def find_model(
    name: str, step: int | None = None, dtype: Dtype | None = None, tokenizer: str | None = None
) -> FoundModel:
    """What a run trained, a model in Hugging Face's format, or one with adapters in PEFT's.

    Args:
        name: a run folder, a folder in Hugging Face's format, or a name on its Hub.
        step: of the run's checkpoint; the latest if not given.
        dtype: in which to compute; the one that the run or the folder's `config.json` names if not given.
        tokenizer: replaces the model's own.
    """
    root, base, adapters = model_folder(name), None, None
    if (root / _CHECKPOINTS).is_dir():
        return _of_run(root, step, dtype, tokenizer)
    if step is not None:
        raise ConfigError(f"--step has no effect with {name}, which is no run folder. Leave it out.")
    if (root / ADAPTER_CONFIG).is_file() and not (root / "config.json").is_file():
        adapters, settings = root, read_json(root / ADAPTER_CONFIG)
        base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
        if not isinstance(base, str):
            raise WeightsError(
                f"{root / ADAPTER_CONFIG} has no base_model_name_or_path: name the model there."
            )
        if revision is not None and not Path(base).expanduser().is_dir():
            base = f"{base}@{revision}"
        root = model_folder(base)
    config, rows = read_hf_config(root)
    fields = read_json(root / "config.json")
    if dtype is None:
        dtype = "bfloat16" if "bfloat16" in (fields.get("dtype"), fields.get("torch_dtype")) else "float32"
    config, Vocab = replace(config, compute_dtype=dtype), Axis("vocab", rows)
    if tokenizer is None:
        own = [one for one in (adapters, root) if one and (one / "tokenizer.json").is_file()]
        if not own:
            raise FileNotFoundError(
                f"There is no tokenizer.json in {root}. Name a tokenizer with --tokenizer: a folder, a file, "
                f"a name on the Hugging Face Hub, or byte for UTF-8 bytes."
            )
        tokenizer = str(own[0])
    tokens = load_tokenizer(tokenizer, str(datetime.date.today()))

    def read(partitioning: Partitioning | None) -> Decoder:
        sharding = None if partitioning is None else partitioning.weight_sharding
        model = read_decoder(root, config, Vocab, remat=False, dtype=dtype, sharding=sharding)
        return model if adapters is None else load_adapters(model, adapters)

    return FoundModel(config, Vocab, tokens, tokenizer, read, root, base)


def _of_run(run_dir: Path, step: int | None, dtype: Dtype | None, tokenizer: str | None) -> FoundModel:
    config = read_run_config(run_dir, step)
    if dtype is not None:
        config = replace(config, model=replace(config.model, compute_dtype=dtype))
    tokenizer = tokenizer or config.data.tokenizer
    tokens = load_tokenizer(tokenizer, config.data.chat_date or str(datetime.date.today()))
    weights = None
    if config.trainer.streaming:
        state = state_shapes(config)
        weights = state.trained if config.lora is None else state.frozen
    root, base, result = None, config.initialize_from_hf, run_dir / "result.json"
    figures = read_json(result) if step is None and result.is_file() else {}
    if base is not None:
        with contextlib.suppress(FileNotFoundError, WeightsError):
            root = model_folder(base, weights=False)

    def read(partitioning: Partitioning | None) -> Decoder:
        like = _like(run_dir, config, step, partitioning)
        trained = load_checkpoint(run_dir / _CHECKPOINTS, like.trained, step=step, part="trained")
        return eqx.combine(trained, like.frozen)

    model, rows = config.model, config.Vocab
    return FoundModel(model, rows, tokens, tokenizer, read, root, base, config, figures, weights)


def read_run_config(run_dir: Path, step: int | None = None) -> LmRunConfig:
    """The resolved config of the run that wrote a checkpoint."""
    folder = run_dir / _CHECKPOINTS
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{run_dir} is not a run folder: it has no checkpoints/ in it. Name the one that models.train_lm "
            f"wrote to (trainer.run_dir)."
        )
    try:
        saved: Any = checkpoint_run(folder, step=step)["config"]
        if not isinstance(saved, dict) or saved.get("vocab_size") is None:
            raise ConfigError("it has no vocab_size")
        entries = [f"--{key}={yaml.safe_dump(value)}" for key, value in saved.items()]
        return parse_config(LmRunConfig, entries)
    except (OSError, CheckpointDamagedError):
        raise
    except Exception as error:  # a damaged checkpoint may raise anything
        problem = str(error).replace(" on the command line", "").rstrip(".")
        raise ConfigError(
            f"The config in the checkpoint {folder} can't be used: {problem}. It is damaged, or of another "
            f"version: choose another with --step, or train again."
        ) from error


def restored_state(run_dir: Path, config: LmRunConfig, step: int | None = None) -> TrainState:
    """The state of a run's checkpoint; the weights under adapters are read or made again."""
    like = _like(run_dir, config, step, None)
    saved, rest = eqx.partition(like, saved_arrays(like))
    return eqx.combine(load_checkpoint(run_dir / _CHECKPOINTS, saved, step=step), rest)


def _like(
    run_dir: Path, config: LmRunConfig, step: int | None, partitioning: Partitioning | None
) -> TrainState:
    """A state like that of a checkpoint, which has the same frozen weights: these are in no checkpoint."""
    if config.lora is None:
        return state_shapes(config, partitioning)
    like = initial_state(config, partitioning)
    check_unsaved(run_dir / _CHECKPOINTS, eqx.filter(like, saved_arrays(like), inverse=True), step=step)
    return like


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes >> 20:,} MiB"  # exact for integers of any size
