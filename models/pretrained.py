"""Models that begin with the weights of a folder in Hugging Face's format.

What reads a folder is registered for the type of a model's config, by the package that defines the model.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from haliax import Axis, NamedArray
from jax.sharding import Sharding
from jaxtyping import DTypeLike

from models.hub import model_folder
from models.lm import LEFT_TO_THE_FOLDER, LanguageModel, LmConfig
from models.safetensors_folder import WeightsError, read_json_fields, shown
from stacked_remat import ScanCheckpointSpec
from stacked_remat.training import ConfigError, DataConfig, load_tokenizer

GENERATION_CONFIG = "generation_config.json"


@functools.singledispatch
def read_pretrained(
    config: LmConfig,
    root: Path,
    Vocab: Axis,
    *,
    remat: ScanCheckpointSpec,
    dtype: DTypeLike,
    sharding: Callable[[NamedArray], Sharding] | None = None,
) -> LanguageModel:
    """The model of `config` with the weights in `root`, in `dtype`.

    `sharding` says where each belongs, given its shape; on the default device without.

    Raises:
        TypeError: no reader is registered for this type of config.
        WeightsError: the weights are not of this model.
    """
    raise TypeError(f"No reader of Hugging Face's weights is registered for {type(config).__name__}.")


@functools.singledispatch
def pretrained_config(config: LmConfig, root: Path) -> tuple[LmConfig, int]:
    """The architecture of the folder with what `config` says beyond it, and the size of its vocabulary.

    Raises:
        TypeError: no reader is registered for this type of config.
        WeightsError: `config.json` is not of such a model, or asks for something that it hasn't.
    """
    raise TypeError(f"No reader of Hugging Face's weights is registered for {type(config).__name__}.")


def end_tokens(root: Path, num_tokens: int) -> tuple[int, ...]:
    """The tokens that end a text, of which a chat model has several; empty where the folder names none.

    As in transformers, `eos_token_id` of `generation_config.json` counts, and that of `config.json` where the
    first is not given.

    Args:
        root: the folder.
        num_tokens: how many tokens the model has.

    Raises:
        WeightsError: a file can't be read, or says something else than tokens of the model.
    """
    for path in (root / GENERATION_CONFIG, root / "config.json"):
        ends = read_json_fields(path).get("eos_token_id") if path.is_file() else None
        if ends is None:
            continue
        tokens = ends if isinstance(ends, list) else [ends]
        if not all(type(token) is int and 0 <= token < num_tokens for token in tokens):
            raise WeightsError(
                f"{path}: eos_token_id is {shown(ends)}; a token of the model, from 0 to {num_tokens - 1}, "
                f"or a list of such is expected. Correct it, or leave it out."
            )
        return tuple(tokens)
    return ()


class ModelEntries(Protocol):
    """What a config says of its model."""

    @property
    def model(self) -> LmConfig:
        """The architecture, unless it is the folder's."""
        ...

    @property
    def initialize_from_hf(self) -> str | None:
        """The folder."""
        ...

    @property
    def use_hf_model_config(self) -> bool:
        """Whether the architecture is the folder's."""
        ...

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding."""
        ...

    @property
    def data(self) -> DataConfig:
        """The tokenizer."""
        ...


def resolved_model(config: ModelEntries, *, check_folder: bool) -> tuple[LmConfig, int]:
    """The architecture that a config describes, and the rows of its embedding.

    Args:
        config: the entries.
        check_folder: whether to look into the folder even if the architecture is not read from it.

    Raises:
        ConfigError: `model` or `vocab_size` is not that of the folder; names every field that differs.
        WeightsError, FileNotFoundError: the folder can't be read.
    """
    model, rows = config.model, config.vocab_size
    if config.initialize_from_hf is not None and (check_folder or config.use_hf_model_config):
        root = model_folder(config.initialize_from_hf)
        found, found_rows = pretrained_config(config.model, root)
        usual = type(model)() if config.use_hf_model_config else ...  # what nobody wrote says nothing
        differing = list(_differences("model", model, found, usual))
        if rows is not None and rows != found_rows:
            differing.append(f"vocab_size: {rows} in the config, {found_rows} in the folder")
        if differing:
            raise ConfigError(
                f"The model of the config is not the one in {root}:\n  "
                + "\n  ".join(differing)
                + "\nCorrect it, or "
                + (
                    "leave it out."
                    if config.use_hf_model_config
                    else "write use_hf_model_config: true to take the folder's architecture."
                )
            )
        model, rows = found, found_rows  # what was left to the folder is the folder's
    return model, load_tokenizer(config.data.tokenizer).vocab_size if rows is None else rows


def _differences(path: str, config: object, found: object, usual: object) -> Iterator[str]:
    """A line for each field in which `config` is neither `found` nor, where that is given, `usual`."""
    alike = type(config) is type(found) if usual is ... else dataclasses.is_dataclass(found)
    if alike and dataclasses.is_dataclass(config):
        for field in dataclasses.fields(config):
            parts = [getattr(one, field.name, ...) for one in (config, found, usual)]
            if parts[0] is not None or not field.metadata.keys() >= LEFT_TO_THE_FOLDER.keys():
                yield from _differences(f"{path}.{field.name}", *parts)
    elif config not in (found, usual):
        yield f"{path}: {config!r} in the config, {found!r} in the folder"
