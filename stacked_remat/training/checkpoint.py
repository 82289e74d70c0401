"""A training state on disk: written whole or not at all."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx

State = TypeVar("State")

_ARRAYS = "state.eqx"
_CONFIG = "config.json"


def save_checkpoint(folder: Path, state: Any, config: Mapping[str, Any]) -> None:
    """Writes the arrays of `state`, and the config that says what they are, into `folder`.

    All is written beside the folder first and then renamed, so that `folder` never holds half a checkpoint.
    One that is there already is replaced.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    eqx.tree_serialise_leaves(unfinished / _ARRAYS, state)
    (unfinished / _CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(unfinished, folder)


def load_checkpoint(folder: Path, like: State) -> State:
    """Reads a checkpoint into a state shaped as `like`, whose arrays may be `jax.ShapeDtypeStruct`s.

    Raises:
        FileNotFoundError: there is no checkpoint in `folder`.
        ValueError: the checkpoint is of another model or optimizer.
    """
    if not (folder / _ARRAYS).exists():
        raise FileNotFoundError(f"No checkpoint in {folder}: {_ARRAYS} is missing.")
    try:
        return eqx.tree_deserialise_leaves(folder / _ARRAYS, like)
    except (RuntimeError, ValueError, EOFError, TypeError) as error:
        raise ValueError(
            f"The checkpoint in {folder} does not fit the state it is read into: {error} Compare the config "
            f"with {folder / _CONFIG}."
        ) from error
