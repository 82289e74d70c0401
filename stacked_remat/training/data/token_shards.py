"""Tokens on disk in shards, each written whole or not at all."""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Integer, UInt32

from .tokenized import TokenizedDocuments
from .tokenizers import Counted, Tokens

_TOKENS, _COUNTED, _LENGTHS, _KEYS = "tokens.npy", "counted.npy", "lengths.npy", "keys.npy"
_SUMMARY = "shard.json"


@dataclass(frozen=True)
class ShardSummary:
    """What a shard holds, and where the next one goes on.

    Attributes:
        next_file: index of the file where the next shard begins.
        next_record: number of the record in that file.
        num_documents: documents in the shard.
        num_tokens: their tokens.
        num_empty: documents without text, left out.
        num_malformed: records that could not be read, left out.
        problems: what was wrong with the first of them.
        fingerprint: a hash of the tokens and of where documents end.
    """

    next_file: int = 0
    next_record: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_malformed: int = 0
    problems: tuple[str, ...] = ()
    fingerprint: str = ""


def write_shard(
    folder: Path,
    index: int,
    documents: Sequence[tuple[Tokens, Counted | None]],
    keys: Integer[np.ndarray, " documents"],
    summary: ShardSummary,
) -> None:
    """Writes a shard; it is not there until all of it is on the disk.

    Args:
        folder: of the shards.
        index: how many shards come before.
        documents: their tokens, and which of these count as targets, None for all; no document for a shard
            that only says what was left out.
        keys: a number for each document, by which documents are held out or not.
        summary: where to go on, and what was left out; the rest is filled in here.
    """
    unfinished = folder / ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    lengths = np.array([len(tokens) for tokens, _ in documents], dtype=np.uint32)
    tokens = np.concatenate([tokens for tokens, _ in documents]) if documents else np.zeros(0, np.uint16)
    arrays = {_TOKENS: tokens, _LENGTHS: lengths, _KEYS: keys.astype(np.uint32)}
    if any(counted is not None for _, counted in documents):
        arrays[_COUNTED] = np.concatenate(
            [np.ones(len(own), bool) if counted is None else counted for own, counted in documents]
        )
    for name, array in arrays.items():
        with (unfinished / name).open("wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())
    summary = dataclasses.replace(
        summary,
        num_documents=len(documents),
        num_tokens=int(tokens.size),
        fingerprint=hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest(),
    )
    with (unfinished / _SUMMARY).open("w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(summary), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, _shard(folder, index))


def read_summaries(folder: Path) -> list[ShardSummary]:
    """The shards that are there, in order."""
    found = []
    while (_shard(folder, len(found)) / _SUMMARY).exists():
        fields = json.loads((_shard(folder, len(found)) / _SUMMARY).read_text(encoding="utf-8"))
        found.append(ShardSummary(**{**fields, "problems": tuple(fields["problems"])}))
    return found


def open_shards(folder: Path) -> tuple[TokenizedDocuments, UInt32[np.ndarray, " documents"]]:
    """The documents of all shards of a folder, and their keys."""
    summaries = read_summaries(folder)
    full = [index for index, summary in enumerate(summaries) if summary.num_documents]
    lengths, keys = (
        np.concatenate([np.zeros(0, np.uint32), *(np.load(_shard(folder, index) / name) for index in full)])
        for name in (_LENGTHS, _KEYS)
    )
    lengths = lengths.astype(np.int64)
    counted = [_shard(folder, index) / _COUNTED for index in full]
    sizes = np.array([summaries[index].num_tokens for index in full], dtype=np.int64)
    documents = TokenizedDocuments(
        shards=tuple(_shard(folder, index) / _TOKENS for index in full),
        counted=tuple(path if path.exists() else None for path in counted),
        shard_starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        fingerprint=hashlib.sha256("".join(s.fingerprint for s in summaries).encode()).hexdigest(),
    )
    return documents, keys


def _shard(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}"
