"""The shards of a token cache, each a folder that is written whole or not at all."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Integer, UInt32

from ..._files import replaced_whole
from .tokenized import TokenizedDocuments, damaged_cache, load_array
from .tokenizers import Counted, Tokens

_TOKENS, _COUNTED, _LENGTHS, _PLACES = "tokens.npy", "counted.npy", "lengths.npy", "places.npy"
_SUMMARY = "shard.json"


@dataclass(frozen=True)
class ShardSummary:
    """The contents of a shard, and where the next one begins.

    Attributes:
        next_file: index of the file where the next shard begins.
        next_record: number of the record in that file.
        num_documents: documents in the shard.
        num_tokens: tokens of the documents.
        num_empty: documents without text, which were left out.
        num_malformed: records that could not be read, which were left out.
        problems: the problems of the first of these.
        fingerprint: a hash of the tokens and document boundaries.
        has_counted: whether the shard says which tokens count.
    """

    next_file: int = 0
    next_record: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_malformed: int = 0
    problems: Sequence[str] = ()
    fingerprint: str = ""
    has_counted: bool = False


def write_shard(
    folder: Path,
    index: int,
    documents: Sequence[tuple[Tokens, Counted | None]],
    places: Integer[np.ndarray, "2 documents"],
    summary: ShardSummary,
) -> None:
    """Writes a shard, which exists only when all of it is on the disk.

    Args:
        folder: of the shards.
        index: number of shards before it.
        documents: their tokens, and which of these count as targets (None for all); may be empty.
        places: for each document the index of its file, and its key for holding it out.
        summary: where the next shard begins, and what was left out; the rest is filled in here.
    """
    lengths = np.array([len(tokens) for tokens, _ in documents], dtype=np.uint32)
    tokens = np.concatenate([tokens for tokens, _ in documents]) if documents else np.zeros(0, np.uint16)
    arrays = {_TOKENS: tokens, _LENGTHS: lengths, _PLACES: places.astype(np.uint32)}
    if any(counted is not None for _, counted in documents):
        arrays[_COUNTED] = np.concatenate(
            [np.ones(len(own), bool) if counted is None else counted for own, counted in documents]
        )
    with replaced_whole(shard_folder(folder, index)) as unfinished:
        unfinished.mkdir(parents=True)
        for name, array in arrays.items():
            np.save(unfinished / name, array)
        raw = b"".join(arrays[name].tobytes() for name in sorted(arrays))
        summary = dataclasses.replace(
            summary,
            num_documents=len(documents),
            num_tokens=int(tokens.size),
            has_counted=_COUNTED in arrays,
            fingerprint=hashlib.sha256(raw).hexdigest(),
        )
        (unfinished / _SUMMARY).write_text(json.dumps(dataclasses.asdict(summary), indent=2))
        for path in unfinished.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def read_summaries(folder: Path) -> list[ShardSummary]:
    """The summaries of a folder's shards, in order.

    Raises:
        DataError: one is damaged or missing.
    """
    found = []
    while (shard := shard_folder(folder, len(found))).exists():
        try:
            found.append(ShardSummary(**json.loads((shard / _SUMMARY).read_bytes())))
        except (FileNotFoundError, ValueError, TypeError):
            raise damaged_cache(shard / _SUMMARY, folder) from None
    return found


def open_shards(folder: Path) -> tuple[TokenizedDocuments, UInt32[np.ndarray, "2 documents"]]:
    """The documents of a folder's shards, and their places: index of the file, and key.

    Raises:
        DataError: a file is damaged or missing; for a file of tokens, only when it is first used.
    """
    summaries = read_summaries(folder)
    full = [index for index, summary in enumerate(summaries) if summary.num_documents]

    def file(index: int, name: str) -> Path:
        return shard_folder(folder, index) / name

    lengths, places = (
        np.concatenate([first, *(load_array(file(index, name)) for index in full)], axis=-1)
        for name, first in ((_LENGTHS, np.zeros(0, np.uint32)), (_PLACES, np.zeros((2, 0), np.uint32)))
    )
    lengths = lengths.astype(np.int64)
    sizes = np.array([summaries[index].num_tokens for index in full], dtype=np.int64)
    documents = TokenizedDocuments(
        shards=tuple(file(index, _TOKENS) for index in full),
        counted=tuple(file(index, _COUNTED) if summaries[index].has_counted else None for index in full),
        shard_starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        fingerprint=hashlib.sha256("".join(s.fingerprint for s in summaries).encode()).hexdigest(),
    )
    return documents, places


def shard_folder(folder: Path, index: int) -> Path:
    """The folder of a shard."""
    return folder / f"shard-{index:05d}"
