"""The model of a command's arguments, its weights, and what its tokenizer is."""

import argparse
import dataclasses

import jax
import jax.numpy as jnp

from models.command import local_path
from models.parts.decoder import Decoder
from models.run_config import BYTES, FoundModel, LmRunConfig, find_model
from models.run_state import Placement
from stacked_remat import streaming
from stacked_remat.training import ConfigError, DataError, Partitioning
from stacked_remat.training.memory_check import check_host_fits, memory_bytes

_MOST_POSITIONS = 2**31 - 1  # positions are 32-bit numbers


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `model_of_arguments` reads."""
    source = parser.add_mutually_exclusive_group(required=True)
    add = parser.add_argument
    source.add_argument(  # as an absolute path, which is no name on the Hub
        "--run_dir",
        dest="model",
        type=lambda path: str(local_path(path).absolute()),
        help="a run folder",
    )
    source.add_argument(
        "--model",
        help="a folder in Hugging Face's format or of adapters, or owner/model",
    )
    add("--step", type=int, help="of the run's checkpoint; the latest if not given")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="in which to compute; the model's own if not given",
    )
    add(
        "--tokenizer",
        help="replaces the model's: byte, a folder, a file, a name on the Hub",
    )


def model_of_arguments(options: argparse.Namespace) -> FoundModel:
    """`find_model` by the arguments of a command; reads the tokenizer too."""
    found = find_model(options.model, options.step, options.dtype, options.tokenizer)
    try:
        assert found.ends
    except DataError as error:
        key = (
            "data.tokenizer"
            if found.run and options.tokenizer is None
            else "--tokenizer"
        )
        raise DataError(str(error).replace("data.tokenizer", key)) from error
    return found


def load_model(found: FoundModel, partitioning: Partitioning | None = None) -> Decoder:
    """The model with its adapters merged, in the dtype in which it computes, without
    layers that predict further tokens.
    """
    model = Placement.of(found.run, partitioning).load_model(
        found, found.config.compute_dtype
    )
    return dataclasses.replace(model, mtp=None)


def rows_that_fit(found: FoundModel, slots: int) -> int:
    """How many sequences of so many tokens the device holds beside the weights.

    Raises ConfigError if it does not hold one, or the host the layers that are there.
    """
    stored = (
        found.run.trainer.precision.parameters
        if found.run
        else found.config.compute_dtype
    )
    # Only shapes: nothing is read or made yet.
    weights = Placement.of(found.run).shapes(found, stored)
    check_host_fits(
        {"weights": weights},
        "The run has trainer.streaming: its layers are read to the host. Give the"
        " process more memory.",
    )
    numbers = sum(
        leaf.size for leaf in jax.tree.leaves(weights) if not streaming.is_on_host(leaf)
    )
    size = numbers * jnp.dtype(found.config.compute_dtype).itemsize
    cache = weights.cache_bytes(1, slots)
    memory = memory_bytes(jax.local_devices()[0])
    if slots > _MOST_POSITIONS or (memory is not None and size + cache > memory):
        has = "" if memory is None else f", and this device has {_mebibytes(memory)}"
        raise ConfigError(
            f"The weights take {_mebibytes(size)} in {found.config.compute_dtype}, the"
            f" keys and values of {slots} tokens {_mebibytes(cache)}{has}. Use fewer"
            " tokens, --dtype bfloat16, a smaller model, or a larger device."
        )
    # Where the device does not say its memory, as a CPU, rows are not bounded.
    return _MOST_POSITIONS if memory is None else (memory - size) // cache


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes >> 20:,} MiB"  # exact for integers of any size


def tokenizer_remark(config: LmRunConfig) -> str:
    """The tokenizer of a resolved config, and a word where it is bytes for a pretrained
    model.
    """
    name = config.tokenizer_name
    if name != BYTES or config.initialize_from_hf is None:
        return name
    begun = find_model(config.initialize_from_hf)
    if begun.tokenizer_name == BYTES:  # of a run
        return name
    if begun.tokenizer_name:
        return (
            f"{name}, as data.tokenizer says, and not that of {begun.name}"
            f" ({begun.tokenizer_name})"
        )
    return f"{name}, since {begun.name} has no tokenizer; data.tokenizer names another"
