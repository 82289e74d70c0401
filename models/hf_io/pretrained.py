"""Reads from a folder in Hugging Face's format a model's architecture and the tokens that end its texts."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.decoder.config import DecoderConfig
from models.hf_io.formats import read_hf_config
from models.hf_io.safetensors_folder import WeightsError, read_json
from stacked_remat._messages import shown

GENERATION_CONFIG = "generation_config.json"


def pretrained_config(config: DecoderConfig, root: Path) -> tuple[DecoderConfig, int]:
    """The architecture of the folder and the size of its vocabulary.

    Args:
        config: takes precedence in what a run decides (`OF_RUN`) and in a longer context.
        root: the folder.

    Raises:
        WeightsError: `config.json` asks for something unsupported.
    """
    found, vocab_size = read_hf_config(root)
    found = _with_fields_of_run(found, config)
    if config.rotary.scaling is not None:  # a longer context than the folder was made for
        longest = config.rotary.max_position_embeddings
        rotary = replace(found.rotary, scaling=config.rotary.scaling, max_position_embeddings=longest)
        found = replace(found, rotary=rotary)
    # A size that either leaves to its default equals the same size written out.
    wide, given = found.HeadDim.size, config.attention.head_dim
    if given == wide or (given is None and wide * found.num_heads == found.hidden_dim):
        found = replace(found, attention=replace(found.attention, head_dim=given))
    if config.mlp_dim is None and found.Mlp == replace(found, mlp_dim=None).Mlp:
        found = replace(found, mlp_dim=None)
    return found, vocab_size


def _with_fields_of_run(found: Any, config: object) -> Any:
    """A config of a folder with what `config` has in the fields that a run decides."""
    changes = {}
    for field in dataclasses.fields(found):
        own, other = getattr(config, field.name, None), getattr(found, field.name)
        if "of_run" in field.metadata:
            changes[field.name] = other if own is None else own
        elif dataclasses.is_dataclass(own) and dataclasses.is_dataclass(other):
            changes[field.name] = _with_fields_of_run(other, own)
    return replace(found, **changes)


def end_tokens(root: Path, num_tokens: int) -> tuple[int, ...]:
    """The tokens that end a text; a chat model has several, and a folder may name none.

    As in transformers, `eos_token_id` is read from `generation_config.json`, else from `config.json`.

    Args:
        root: the folder.
        num_tokens: how many tokens the model has.

    Raises:
        WeightsError: a file can't be read, or names something other than tokens of the model.
    """
    for path in (root / GENERATION_CONFIG, root / "config.json"):
        ends = read_json(path).get("eos_token_id") if path.is_file() else None
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
