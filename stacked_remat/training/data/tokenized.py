"""Tokenized documents, on disk or in memory."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Bool, Float32, Integer


@final
@dataclass(frozen=True, eq=False)
class TokenizedDocuments:
    """Documents as tokens, in a fixed order.

    Memory: 16 bytes a document. Tokens on disk are memory-mapped.

    Attributes:
        all_tokens: those of all documents, one after the other.
        counted: which of them count as targets; None if all do.
        starts: index of each document's first token.
        lengths: number of tokens of each document.
        fingerprint: a hash of all tokens and document boundaries.
    """

    all_tokens: Integer[np.ndarray, " tokens"]
    counted: Bool[np.ndarray, " tokens"] | None
    starts: Integer[np.ndarray, " documents"]
    lengths: Integer[np.ndarray, " documents"]
    fingerprint: str

    @staticmethod
    def of(documents: Sequence[Integer[np.ndarray, " tokens"]]) -> "TokenizedDocuments":
        """Documents in memory, all of whose tokens count as targets."""
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        tokens = np.concatenate(documents) if documents else np.zeros(0, np.uint16)
        digest = hashlib.sha256(lengths.tobytes() + tokens.astype(np.uint32).tobytes()).hexdigest()
        return TokenizedDocuments(tokens, None, np.cumsum(lengths) - lengths, lengths, digest)

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
        if self.counted is None:
            return int(np.maximum(self.lengths - 1, 0).sum())
        before = np.concatenate([[0], np.cumsum(self.counted, dtype=np.int64)])
        firsts = np.minimum(self.starts + 1, self.starts + self.lengths)
        return int((before[self.starts + self.lengths] - before[firsts]).sum())

    def select(self, chosen: Bool[np.ndarray, " documents"]) -> "TokenizedDocuments":
        """The documents for which `chosen` is True, in the same order."""
        packed = np.packbits(chosen).tobytes()
        digest = hashlib.sha256(self.fingerprint.encode() + packed).hexdigest()
        starts, lengths = self.starts[chosen], self.lengths[chosen]
        return dataclasses.replace(self, starts=starts, lengths=lengths, fingerprint=digest)

    def tokens(self, document: int, first: int, stop: int) -> Integer[np.ndarray, " tokens"]:
        """The tokens of a document from `first` to before `stop`."""
        start = int(self.starts[document])
        return self.all_tokens[start + first : start + stop]

    def weights(self, document: int, first: int, stop: int) -> Float32[np.ndarray, " tokens"] | float:
        """For each token from `first` to before `stop`, 1 if it counts as a target, else 0."""
        start = int(self.starts[document])
        return 1.0 if self.counted is None else self.counted[start + first : start + stop].astype(np.float32)
