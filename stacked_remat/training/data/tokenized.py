"""Documents as tokens: on disk or in memory, and which of them belong together."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
from jaxtyping import Bool, Float32, Integer

from ..checksums import checksum
from .data_error import DataError

Shard: TypeAlias = Any
"""The tokens of some documents, one after the other: an array, or an `ArrayFile`."""


@final
@dataclass(frozen=True, eq=False)
class ArrayFile:
    """An array that numpy saved, in a folder of a folder of shards.

    Attributes:
        path: of the file.
        checksum: of the file as it was written.
    """

    path: Path
    checksum: str

    @functools.cached_property
    def whole(self) -> Path:
        """The path, after the file was compared with the checksum, once.

        Raises:
            DataError: it is not what was written.
        """
        try:
            found = checksum(self.path)
        except FileNotFoundError:
            found = None
        if found != self.checksum:
            raise damaged_cache(self.path, self.path.parent.parent)
        return self.path


def damaged_cache(path: Path, folder: Path) -> DataError:
    """The error for a file of a token cache that is not what was written."""
    found = "damaged: it is not what was written" if path.exists() else "missing"
    return DataError(
        f"{path} is {found}. Delete the token cache {folder}, and the next run tokenizes its text again."
    )


@final
@dataclass(frozen=True, eq=False)
class TokenizedDocuments:
    """Documents as tokens, in a fixed order.

    Memory: 16 bytes a document; shards on disk are mapped, and read where they are needed, after each was
    compared with its checksum when it is needed for the first time.

    Attributes:
        shards: where the tokens are; a document lies in one of them.
        counted: for each shard, which of its tokens count where they are targets; None if all do.
        shard_starts: number of tokens in the shards before each, and in all of them at the end.
        starts: the first token of each document, counted over all shards.
        lengths: tokens of each document.
        fingerprint: a hash of all tokens and of where documents end.
    """

    shards: tuple[Shard, ...]
    counted: tuple[Shard | None, ...]
    shard_starts: Integer[np.ndarray, " shards+1"]
    starts: Integer[np.ndarray, " documents"]
    lengths: Integer[np.ndarray, " documents"]
    fingerprint: str

    @staticmethod
    def of(documents: Sequence[Integer[np.ndarray, " tokens"]]) -> "TokenizedDocuments":
        """Documents that are in memory, with every token counted."""
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        tokens = np.concatenate(documents) if documents else np.zeros(0, np.uint16)
        digest = hashlib.sha256(lengths.tobytes() + tokens.astype(np.uint32).tobytes()).hexdigest()
        ends = np.cumsum(lengths)
        starts = np.array([0, tokens.size])
        return TokenizedDocuments((tokens,), (None,), starts, ends - lengths, lengths, digest)

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    @functools.cached_property
    def num_counted(self) -> int:
        """Tokens after the first of a document that count where they are targets.

        Cost: reads what says so, a byte a token, where not all do.
        """
        total = 0
        for shard, counted in enumerate(self.counted):
            first, last = self.shard_starts[shard], self.shard_starts[shard + 1]
            here = (self.starts >= first) & (self.starts < last) & (self.lengths > 1)
            starts, lengths = self.starts[here] - first, self.lengths[here]
            if counted is None:
                total += int((lengths - 1).sum())
            else:
                before = np.concatenate([[0], np.cumsum(_array(counted), dtype=np.int64)])
                total += int((before[starts + lengths] - before[starts + 1]).sum())
        return total

    def select(self, chosen: Bool[np.ndarray, " documents"], what: str) -> "TokenizedDocuments":
        """Some of the documents, in the same order.

        Args:
            chosen: which.
            what: what tells this choice from others, for the fingerprint.
        """
        digest = hashlib.sha256(f"{self.fingerprint} {what}".encode()).hexdigest()
        return TokenizedDocuments(
            self.shards,
            self.counted,
            self.shard_starts,
            self.starts[chosen],
            self.lengths[chosen],
            digest,
        )

    def tokens(self, document: int, first: int, stop: int) -> Integer[np.ndarray, " tokens"]:
        """The tokens of a document from `first` to before `stop`."""
        shard, offset = self._place(document)
        return _array(self.shards[shard])[offset + first : offset + stop]

    def weights(self, document: int, first: int, stop: int) -> Float32[np.ndarray, " tokens"] | float:
        """For the tokens from `first` to before `stop`, 1 if it counts as a target, else 0."""
        shard, offset = self._place(document)
        counted = self.counted[shard]
        return 1.0 if counted is None else _array(counted)[offset + first : offset + stop].astype(np.float32)

    def _place(self, document: int) -> tuple[int, int]:
        """The shard of a document, and where in it the document begins."""
        start = int(self.starts[document])
        shard = int(np.searchsorted(self.shard_starts, start, side="right")) - 1
        return shard, start - int(self.shard_starts[shard])


def _array(shard: Shard) -> np.ndarray:
    return _mapped(shard) if isinstance(shard, ArrayFile) else shard


# A mapped file keeps a descriptor open, and there may be more shards than a process may open files.
@functools.lru_cache(maxsize=128)
def _mapped(file: ArrayFile) -> np.ndarray:
    return np.load(file.whole, mmap_mode="r")
