"""From documents of any length to sequences of one length, no token lost or used twice.

A document of n tokens has n - 1 places where a token is given and the next is to be predicted. Packing puts
each of these places into one sequence. What follows a document's last token is never predicted, so that token
(the end of the text) is a target and no input, and no position is spent on the border between two documents.
"""

import abc
import hashlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import numpy as np
from jaxtyping import Int64

from .data_error import DataError
from .tokenized import TokenizedDocuments

Sequence: TypeAlias = dict[str, np.ndarray]
"""The fields of a `TokenBatch` for one sequence, each over its positions."""


@dataclass(frozen=True)
class Piece:
    """Places of one document that stand beside each other in a sequence.

    Attributes:
        document: index of the document.
        first: the first of its places.
        count: how many.
    """

    document: int
    first: int
    count: int


class Packing(abc.ABC):
    """Which pieces of documents each sequence is made of."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Sequences in an epoch."""

    @abc.abstractmethod
    def pieces(self, sequence: int) -> list[Piece]:
        """The pieces of a sequence, from its first position on."""


@final
class SplitPacking(Packing):
    """All places of all documents in a row, cut every `seq_len`: only the last sequence can have padding.

    Memory: 8 bytes a document.
    """

    def __init__(self, places: Int64[np.ndarray, " documents"], seq_len: int):
        self._ends = np.cumsum(places)
        self._seq_len = seq_len

    def __len__(self) -> int:
        """Sequences in an epoch."""
        return -(-int(self._ends[-1]) // self._seq_len)

    def pieces(self, sequence: int) -> list[Piece]:
        """The pieces of a sequence; cost: a binary search, and its documents."""
        at, stop = sequence * self._seq_len, min((sequence + 1) * self._seq_len, int(self._ends[-1]))
        document = int(np.searchsorted(self._ends, at, side="right"))
        found = []
        while at < stop:
            end = int(self._ends[document])
            start = int(self._ends[document - 1]) if document else 0
            found.append(Piece(document, at - start, min(end, stop) - at))
            at, document = end, document + 1
        return found


@final
class WholePacking(Packing):
    """Documents uncut, each where it leaves the least room (best fit, the longest first; Johnson 1974).

    Those longer than a sequence are cut into whole sequences and a rest. Memory: some 100 bytes a document;
    cost: seconds for a million documents, at the start of every run.
    """

    def __init__(self, places: Int64[np.ndarray, " documents"], seq_len: int):
        pieces = [
            Piece(document, first, min(seq_len, int(count) - first))
            for document, count in enumerate(places)
            for first in range(0, int(count), seq_len)
        ]
        pieces.sort(key=lambda piece: -piece.count)  # stable: ties stay in the order of documents
        self._sequences: list[list[Piece]] = []
        with_room: dict[int, list[int]] = defaultdict(list)
        rooms = 0  # a bit for each room that some sequence has
        for piece in pieces:
            fitting = rooms >> piece.count
            if fitting:
                room = piece.count + (fitting & -fitting).bit_length() - 1
                chosen = with_room[room].pop()
                if not with_room[room]:
                    rooms &= ~(1 << room)
            else:
                room, chosen = seq_len, len(self._sequences)
                self._sequences.append([])
            self._sequences[chosen].append(piece)
            if room > piece.count:
                with_room[room - piece.count].append(chosen)
                rooms |= 1 << (room - piece.count)

    def __len__(self) -> int:
        """Sequences in an epoch."""
        return len(self._sequences)

    def pieces(self, sequence: int) -> list[Piece]:
        """The pieces of a sequence, the longest first."""
        return self._sequences[sequence]


_PACKINGS = {"split": SplitPacking, "whole": WholePacking}


@final
class PackedDocuments:
    """Documents as sequences of `seq_len` positions, a source that Grain can read at any index.

    Attributes:
        seq_len: positions in a sequence.
        num_documents: documents that are in the sequences; those of one token have nothing to tell.
        num_targets: tokens that are a target, each once an epoch, whatever their weight.
        num_counted: those of them that count.
        fingerprint: a hash of the tokens and of how they are packed.
    """

    def __init__(
        self,
        documents: TokenizedDocuments,
        seq_len: int,
        packing: Literal["split", "whole"],
        *,
        separate: bool = True,
    ):
        """Packs the documents.

        Args:
            documents: as tokens.
            seq_len: positions in a sequence.
            packing: how they are cut, as `DataConfig` says.
            separate: whether sequences say where a document ends.

        Raises:
            DataError: no document has two tokens.
        """
        self._documents = documents.select(documents.lengths > 1, "more than one token")
        if not len(self._documents):
            raise DataError(f"None of the {len(documents)} documents has two tokens or more.")
        self.seq_len = seq_len
        self.num_documents = len(self._documents)
        self.num_targets = self._documents.num_tokens - self.num_documents
        self.num_counted = self._documents.num_counted
        self.fingerprint = hashlib.sha256(
            f"{self._documents.fingerprint} {packing} {seq_len}".encode()
        ).hexdigest()
        self._separate = separate
        self._packing: Packing = _PACKINGS[packing](self._documents.lengths - 1, seq_len)

    def __repr__(self) -> str:
        return f"PackedDocuments({len(self)} sequences of {self.seq_len}, {self.fingerprint[:16]})"

    def __len__(self) -> int:
        """Sequences in an epoch."""
        return len(self._packing)

    def __getitem__(self, index: int) -> Sequence:
        """A sequence: int32 `tokens`, `targets`, `documents` and `positions`, float32 `weights`.

        `documents` counts a sequence's pieces from 1; `positions` counts from 0 in each; padding, at the end,
        is 0 in all fields. Where documents are not `separate`, these two are left out.
        """
        names = ("tokens", "targets", "documents", "positions")
        found: Sequence = {name: np.zeros(self.seq_len, np.int32) for name in names}
        found["weights"] = np.zeros(self.seq_len, np.float32)
        at = 0
        for number, piece in enumerate(self._packing.pieces(int(index)), 1):
            where = slice(at, at + piece.count)
            tokens = self._documents.tokens(piece.document, piece.first, piece.first + piece.count + 1)
            found["tokens"][where] = tokens[:-1]
            found["targets"][where] = tokens[1:]
            found["documents"][where] = number
            found["positions"][where] = np.arange(piece.count)
            found["weights"][where] = self._documents.weights(
                piece.document, piece.first + 1, piece.first + piece.count + 1
            )
            at += piece.count
        if not self._separate:
            del found["documents"], found["positions"]
        return found
