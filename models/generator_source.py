"""Models that continue text: what a run trained, or a folder in Hugging Face's format."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from haliax import Axis
from jaxtyping import PyTree

from models.hf_io.decoder_weights import read_decoder
from models.hf_io.formats import read_hf_config
from models.hf_io.hub import model_folder
from models.hf_io.pretrained import end_tokens
from models.hf_io.safetensors_folder import read_json
from models.lm import LanguageModel, LmConfig
from models.run_state import state_shapes
from models.trained_run import ends_of_run, read_run_config, trained_model
from stacked_remat import streaming
from stacked_remat.lora import merge_lora
from stacked_remat.training import (
    ConfigError,
    Tokenizer,
    cast_parameters,
    check_host_fits,
    load_tokenizer,
    memory_bytes,
)

Dtype = Literal["float32", "bfloat16"]
_MOST_POSITIONS = 2**31 - 1  # positions are 32-bit numbers


@dataclass(frozen=True)
class GeneratorSource:
    """A model that continues text, before its weights are read.

    Attributes:
        config: its architecture.
        vocab_size: rows of its embedding.
        tokenizer: its tokens.
        ends: tokens that end a text, the tokenizer's own among them.
        read: reads the model, its weights in the dtype in which it computes. Raises CheckpointMismatchError,
            FileNotFoundError or WeightsError for weights that are missing, damaged, or of another model.
        weights: their shapes, with shardings, if some are read to host memory; None if all are to be on the
            device.
    """

    config: LmConfig
    vocab_size: int
    tokenizer: Tokenizer
    ends: frozenset[int]
    read: Callable[[], LanguageModel]
    weights: PyTree | None = None

    def __post_init__(self) -> None:
        if self.tokenizer.vocab_size > self.vocab_size:
            raise ConfigError(
                f"The tokenizer has {self.tokenizer.vocab_size} tokens, and the model's embedding "
                f"{self.vocab_size} rows. Name the model's own with --tokenizer."
            )

    def check_memory(self, rows: int, slots: int) -> None:
        """Refuses more or longer sequences than the memory of the device holds.

        Args:
            rows: sequences.
            slots: tokens of each.

        Raises:
            ConfigError: the weights and the cache of keys and values are larger than all of its memory, or
                layers on the host larger than what the process can take there.
        """
        check_host_fits(
            {"weights": self.weights},
            "The run has trainer.streaming: its layers are read to the host. Give the process more memory.",
        )
        on_host = filter(streaming.is_on_host, jax.tree.leaves(self.weights))
        num_weights = self.config.num_weights(self.vocab_size) - sum(leaf.size for leaf in on_host)
        weights = num_weights * jnp.dtype(self.config.compute_dtype).itemsize
        cache, memory = self.config.cache_bytes(rows, slots), memory_bytes(jax.local_devices()[0])
        if memory is not None and weights > memory:
            raise ConfigError(
                f"The weights take {_mebibytes(weights)} in {self.config.compute_dtype}, and this device has "
                f"{_mebibytes(memory)}. Use a larger device or a smaller model; bfloat16 weights (--dtype, "
                f"or model.compute_dtype of the run) take half of what float32 ones do."
            )
        if slots > _MOST_POSITIONS or (memory is not None and weights + cache > memory):
            has = "" if memory is None else f" This device has {_mebibytes(memory)}."
            raise ConfigError(
                f"{rows} x {slots} tokens take {_mebibytes(cache)} for their keys and values, beside "
                f"{_mebibytes(weights)} of weights.{has} Lower --max_new_tokens, or continue fewer or "
                f"shorter prompts at once."
            )


def source_of_run(
    run_dir: Path,
    *,
    step: int | None = None,
    tokenizer: str | None = None,
    chat_date: str | None = None,
) -> GeneratorSource:
    """What a run trained, adapters merged as `models.export_hf` merges them.

    Args:
        run_dir: the run folder.
        step: of the checkpoint; the latest if not given.
        tokenizer: replaces the one that the run's config names.
        chat_date: replaces `data.chat_date` of the run.

    Raises:
        FileNotFoundError: there is no such run or checkpoint.
        DataError, ConfigError: there is no such tokenizer, or it is not the model's; the config of the run
            can't be read.
        WeightsError: the folder that training began with names end tokens that can't be read.
    """
    config = read_run_config(run_dir, step)
    data = config.data
    found = load_tokenizer(
        data.tokenizer if tokenizer is None else tokenizer, data.chat_date if chat_date is None else chat_date
    )

    def read() -> LanguageModel:
        model = trained_model(run_dir, config, step=step)
        return cast_parameters(merge_lora(model, donate=True), config.model.compute_dtype)

    ends = frozenset(ends_of_run(config, found.end))
    weights = None
    if config.trainer.streaming:
        state = state_shapes(config)
        weights = state.trained if config.lora is None else state.frozen
    return GeneratorSource(config.model, config.Vocab.size, found, ends, read, weights)


def source_of_folder(
    name: str,
    *,
    dtype: Dtype | None = None,
    tokenizer: str | None = None,
    chat_date: str | None = None,
) -> GeneratorSource:
    """A model in Hugging Face's format.

    Args:
        name: a folder, or a name on the Hub.
        dtype: in which to compute; the one that the folder's `config.json` names if not given.
        tokenizer: replaces the folder's.
        chat_date: the day that its chat template takes for today.

    Raises:
        FileNotFoundError: there is no such folder.
        WeightsError: the model is of an unknown architecture, or a file is damaged.
        DataError, ConfigError: there is no such tokenizer, or it is not the model's.
    """
    root = model_folder(name)
    if not (root / "config.json").is_file() and (root / "checkpoints").is_dir():
        raise FileNotFoundError(f"{root} has no config.json: it is a run folder. Use --checkpoint {root}.")
    config, rows = read_hf_config(root)
    if dtype is None:
        fields = read_json(root / "config.json")
        dtype = "bfloat16" if "bfloat16" in (fields.get("dtype"), fields.get("torch_dtype")) else "float32"
    config = replace(config, compute_dtype=dtype)
    if tokenizer is None and not (root / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"There is no tokenizer.json in {root}. Name a tokenizer with --tokenizer: a folder, a file, a "
            f"name on the Hugging Face Hub, or byte for UTF-8 bytes."
        )
    found = load_tokenizer(str(root) if tokenizer is None else tokenizer, chat_date)
    ends = frozenset({found.end, *end_tokens(root, rows)})
    read = functools.partial(read_decoder, root, config, Axis("vocab", rows), remat=False, dtype=dtype)
    return GeneratorSource(config, rows, found, ends, read)


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes >> 20:,} MiB"  # exact for integers of any size
