"""Text to train on: the files of a folder, split by file into what is trained on and what is held out."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from .config import DataConfig
from .config_file import ConfigError
from .tokenizer import ByteTokenizer

# Installed packages differ from machine to machine, tests hold tables of data, pydoc_data is one large
# generated text.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"})


@dataclass(frozen=True)
class Corpus:
    """Token streams, documents apart by the tokenizer's separator, which also begins and ends each stream.

    Attributes:
        train: tokens to train on.
        held_out: tokens of other files.
        num_train_files: documents in `train`.
        num_held_out_files: documents in `held_out`.
    """

    train: Integer[np.ndarray, " tokens"]
    held_out: Integer[np.ndarray, " tokens"]
    num_train_files: int
    num_held_out_files: int


def read_corpus(config: DataConfig, tokenizer: ByteTokenizer) -> Corpus:
    """Reads the config's folder, or the standard library of the running interpreter.

    Files are taken in the order of their paths. A file is held out or not by a hash of its path within the
    folder, so that the split stays as it is when other files come or go.

    Raises:
        FileNotFoundError: the folder is missing or holds no file of the suffix.
        ConfigError: too few files for both halves of the split.
    """
    library = config.folder is None
    root = Path(sysconfig.get_path("stdlib")) if config.folder is None else Path(config.folder)
    files = sorted(
        (file.relative_to(root).as_posix(), file)
        for file in root.rglob(f"*{config.suffix}")
        if file.is_file() and not (library and _NOT_LIBRARY.intersection(file.relative_to(root).parts))
    )
    if not files:
        raise FileNotFoundError(
            f"No files ending in {config.suffix!r} in {root}. Set data.folder to a folder with text, and "
            f"data.suffix to what its files end in."
        )
    held_out = [file for name, file in files if _position(name) < config.held_out_fraction]
    train = [file for name, file in files if _position(name) >= config.held_out_fraction]
    if not held_out or not train:
        raise ConfigError(
            f"{root} has {len(files)} files ending in {config.suffix!r}: {len(train)} to train on and "
            f"{len(held_out)} held out at data.held_out_fraction = {config.held_out_fraction}. Both need at "
            f"least one: add files or change the fraction."
        )
    return Corpus(_join(train, tokenizer), _join(held_out, tokenizer), len(train), len(held_out))


def _position(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _join(files: list[Path], tokenizer: ByteTokenizer) -> Integer[np.ndarray, " tokens"]:
    separator = np.array([tokenizer.separator], dtype=np.uint16)
    pieces = [separator]
    for file in files:
        pieces += [tokenizer.encode(file.read_bytes()), separator]
    return np.concatenate(pieces)
