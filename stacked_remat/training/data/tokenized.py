"""Tokenized documents, on disk or in memory."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, final

import numpy as np
from jaxtyping import Bool, Float32, Integer

from ..errors import DataError

Shard: TypeAlias = np.ndarray | Path
"""The concatenated tokens of some documents: an array, or the file of one."""


def load_array(path: Path, mmap_mode: Literal["r"] | None = None) -> np.ndarray:
    """An array of a token cache.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        return np.load(path, mmap_mode=mmap_mode)
    except (FileNotFoundError, ValueError, EOFError):
        raise damaged_cache(path, path.parent.parent) from None


def damaged_cache(path: Path, folder: Path) -> DataError:
    """The error for a missing or damaged file of a token cache."""
    found = "damaged" if path.exists() else "missing"
    return DataError(
        f"{path} is {found}. Delete the token cache {folder}, and the next run tokenizes its text again."
    )


@final
@dataclass(frozen=True, eq=False)
class TokenizedDocuments:
    """Documents as tokens, in a fixed order.

    Memory: 16 bytes a document. Shards on disk are memory-mapped.

    Attributes:
        shards: the tokens; each document is in one shard.
        counted: for each shard, which of its tokens count as targets; None if all do.
        shard_starts: number of tokens in the shards before each, and in all of them at the end.
        starts: index of each document's first token, over all shards.
        lengths: number of tokens of each document.
        fingerprint: a hash of all tokens and document boundaries.
    """

    shards: tuple[Shard, ...]
    counted: tuple[Shard | None, ...]
    shard_starts: Integer[np.ndarray, " shards+1"]
    starts: Integer[np.ndarray, " documents"]
    lengths: Integer[np.ndarray, " documents"]
    fingerprint: str

    @staticmethod
    def of(documents: Sequence[Integer[np.ndarray, " tokens"]]) -> "TokenizedDocuments":
        """Documents in memory, all of whose tokens count as targets."""
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        tokens = np.concatenate(documents) if documents else np.zeros(0, np.uint16)
        digest = hashlib.sha256(lengths.tobytes() + tokens.astype(np.uint32).tobytes()).hexdigest()
        ends = np.cumsum(lengths)
        starts = np.array([0, tokens.size])
        return TokenizedDocuments((tokens,), (None,), starts, ends - lengths, lengths, digest)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return int(self.lengths.sum())

    @functools.cached_property
    def num_counted(self) -> int:
        """Number of tokens that count as targets; the first of a document never does.

        Cost: reads a byte a token, where not all tokens count.
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
            chosen: whether to keep each document.
            what: a text that identifies the choice, for the fingerprint.
        """
        digest = hashlib.sha256(f"{self.fingerprint} {what}".encode()).hexdigest()
        starts, lengths = self.starts[chosen], self.lengths[chosen]
        return dataclasses.replace(self, starts=starts, lengths=lengths, fingerprint=digest)

    def tokens(self, document: int, first: int, stop: int) -> Integer[np.ndarray, " tokens"]:
        """The tokens of a document from `first` to before `stop`."""
        shard, offset = self._place(document)
        return _array(self.shards[shard])[offset + first : offset + stop]

    def weights(self, document: int, first: int, stop: int) -> Float32[np.ndarray, " tokens"] | float:
        """For each token from `first` to before `stop`, 1 if it counts as a target, else 0."""
        shard, offset = self._place(document)
        counted = self.counted[shard]
        return 1.0 if counted is None else _array(counted)[offset + first : offset + stop].astype(np.float32)

    def _place(self, document: int) -> tuple[int, int]:
        """A document's shard and its first token in it."""
        start = int(self.starts[document])
        shard = int(np.searchsorted(self.shard_starts, start, side="right")) - 1
        return shard, start - int(self.shard_starts[shard])


def _array(shard: Shard) -> np.ndarray:
    return _mapped(shard) if isinstance(shard, Path) else shard


# A mapped file keeps a descriptor open; there may be more shards than descriptors.
@functools.lru_cache(maxsize=128)
def _mapped(path: Path) -> np.ndarray:
    return load_array(path, "r")
