"""Tokens on disk in shards, each written whole or not at all."""

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Integer, UInt32

from ..checksums import checksum, json_with_checksum, read_json_with_checksum
from .tokenized import ArrayFile, TokenizedDocuments, damaged_cache
from .tokenizers import Counted, Tokens

_TOKENS, _COUNTED, _LENGTHS, _PLACES = "tokens.npy", "counted.npy", "lengths.npy", "places.npy"
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
        checksums: of the shard's files, by name.
    """

    next_file: int = 0
    next_record: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_malformed: int = 0
    problems: tuple[str, ...] = ()
    fingerprint: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)


def write_shard(
    folder: Path,
    index: int,
    documents: Sequence[tuple[Tokens, Counted | None]],
    places: Integer[np.ndarray, "2 documents"],
    summary: ShardSummary,
) -> None:
    """Writes a shard; it is not there until all of it is on the disk.

    Args:
        folder: of the shards.
        index: how many shards come before.
        documents: their tokens, and which of these count as targets, None for all; no document for a shard
            that only says what was left out.
        places: for each document the index of its file, and a number by which it is held out or not.
        summary: where to go on, and what was left out; the rest is filled in here.
    """
    unfinished = folder / ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    lengths = np.array([len(tokens) for tokens, _ in documents], dtype=np.uint32)
    tokens = np.concatenate([tokens for tokens, _ in documents]) if documents else np.zeros(0, np.uint16)
    arrays = {_TOKENS: tokens, _LENGTHS: lengths, _PLACES: places.astype(np.uint32)}
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
        checksums={name: checksum(unfinished / name) for name in arrays},
        fingerprint=hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest(),
    )
    with (unfinished / _SUMMARY).open("w", encoding="utf-8") as file:
        file.write(json_with_checksum(dataclasses.asdict(summary)))
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, shard_folder(folder, index))


def read_summaries(folder: Path) -> list[ShardSummary]:
    """The shards that are there, in order.

    Raises:
        DataError: what one says of itself is damaged or missing.
    """
    found = []
    while (shard := shard_folder(folder, len(found))).exists():
        try:
            fields = read_json_with_checksum(shard / _SUMMARY)
        except (FileNotFoundError, ValueError):
            raise damaged_cache(shard / _SUMMARY, folder) from None
        found.append(ShardSummary(**{**fields, "problems": tuple(fields["problems"])}))
    return found


def open_shards(folder: Path) -> tuple[TokenizedDocuments, UInt32[np.ndarray, "2 documents"]]:
    """The documents of all shards of a folder, and their places: the index of the file, and the key.

    Raises:
        DataError: a file is damaged or missing; that of tokens says so only when it is read.
    """
    summaries = read_summaries(folder)
    full = [index for index, summary in enumerate(summaries) if summary.num_documents]

    def file(index: int, name: str) -> ArrayFile:
        return ArrayFile(shard_folder(folder, index) / name, summaries[index].checksums[name])

    lengths, places = (
        np.concatenate([first, *(np.load(file(index, name).whole) for index in full)], axis=-1)
        for name, first in ((_LENGTHS, np.zeros(0, np.uint32)), (_PLACES, np.zeros((2, 0), np.uint32)))
    )
    lengths = lengths.astype(np.int64)
    sizes = np.array([summaries[index].num_tokens for index in full], dtype=np.int64)
    documents = TokenizedDocuments(
        shards=tuple(file(index, _TOKENS) for index in full),
        counted=tuple(
            file(index, _COUNTED) if _COUNTED in summaries[index].checksums else None for index in full
        ),
        shard_starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        fingerprint=hashlib.sha256("".join(s.fingerprint for s in summaries).encode()).hexdigest(),
    )
    return documents, places


def shard_folder(folder: Path, index: int) -> Path:
    """Where the shard of this index is."""
    return folder / f"shard-{index:05d}"
