"""Packs documents of any length into sequences of one length; no token is lost or used
twice.

A document of n tokens has n - 1 positions, each with an input token and the next token
as target. Packing puts each of them into one sequence. The last token of a document
(the end of the text) is a target but never an input, so no position is spent between
two documents.
"""

import array
import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, final

import numpy as np
from jaxtyping import Bool, Float32, Int64, Integer, UInt32

from ..errors import DataError
from .checked_array import CheckedArray, JoinedArrays
from .document_places import (
    DocumentPlace,
    FindsPlaces,
    JoinedPlaces,
    PieceName,
    sequence_name,
)

PackedSequence: TypeAlias = dict[str, np.ndarray]
"""The fields of a `TokenBatch` for one sequence."""


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
        fingerprint: a hash of all tokens, document boundaries and weights.
        weight_factors: weight of each document in the loss; None if all have 1.
        place_of: finds the file and line of a document by its start; None if it has
            none.
    """

    all_tokens: Integer[np.ndarray, " tokens"] | CheckedArray | JoinedArrays
    counted: Bool[np.ndarray, " tokens"] | CheckedArray | JoinedArrays | None
    starts: Integer[np.ndarray, " documents"]
    lengths: Integer[np.ndarray, " documents"]
    fingerprint: str
    weight_factors: Float32[np.ndarray, " documents"] | None = None
    place_of: FindsPlaces | None = None

    @staticmethod
    def of(documents: Sequence[Integer[np.ndarray, " tokens"]]) -> "TokenizedDocuments":
        """Documents in memory, all of whose tokens count as targets."""
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        tokens = np.concatenate(documents) if documents else np.zeros(0, np.uint16)
        digest = hashlib.sha256(
            lengths.tobytes() + tokens.astype(np.uint32).tobytes()
        ).hexdigest()
        return TokenizedDocuments(
            tokens, None, np.cumsum(lengths) - lengths, lengths, digest
        )

    @staticmethod
    def joined(parts: Sequence["TokenizedDocuments"]) -> "TokenizedDocuments":
        """The documents of all parts, which are in files of the same kind."""
        if len(parts) == 1:
            return parts[0]
        lengths = np.concatenate([part.lengths for part in parts])
        fingerprints = "".join(part.fingerprint for part in parts)

        def arrays(name: str) -> Any:
            found = [getattr(part, name) for part in parts]
            return None if found[0] is None else found

        counted = arrays("counted")
        factors = arrays("weight_factors")
        places = arrays("place_of")
        stops = np.cumsum([len(part.all_tokens) for part in parts], dtype=np.int64)
        return TokenizedDocuments(
            JoinedArrays(arrays("all_tokens")),
            None if counted is None else JoinedArrays(counted),
            np.cumsum(lengths) - lengths,
            lengths,
            hashlib.sha256(fingerprints.encode()).hexdigest(),
            None if factors is None else np.concatenate(factors),
            None if places is None else JoinedPlaces(places, stops),
        )

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    @functools.cached_property
    def num_counted(self) -> int:
        """Number of tokens that count as targets; the first of a document never does.

        Cost: that of `targets_in`.
        """
        firsts = np.minimum(self.lengths, 1)
        return int(self.targets_in(np.arange(len(self)), firsts, self.lengths).sum())

    def targets_in(
        self,
        documents: Integer[np.ndarray, " pieces"],
        firsts: Integer[np.ndarray, " pieces"],
        stops: Integer[np.ndarray, " pieces"],
    ) -> Integer[np.ndarray, " pieces"]:
        """For pieces of documents, the number of their tokens from `firsts` to before
        `stops` that count.

        Cost: reads a byte a token, where not all tokens count, and 8 bytes of memory a
        token meanwhile.
        """
        if self.counted is None:
            return stops - firsts
        # One pass over the marks, and then a difference for every piece, however many.
        before = np.concatenate(
            [[0], np.cumsum(np.asarray(self.counted), dtype=np.int64)]
        )
        starts = self.starts[documents]
        return before[starts + stops] - before[starts + firsts]

    def select(self, chosen: Bool[np.ndarray, " documents"]) -> "TokenizedDocuments":
        """The documents for which `chosen` is True, in the same order."""
        # Which documents are chosen decides what is trained on, and so belongs to the
        # data's identity in checkpoints.
        packed = np.packbits(chosen).tobytes()
        digest = hashlib.sha256(self.fingerprint.encode() + packed).hexdigest()
        factors = self.weight_factors
        return dataclasses.replace(
            self,
            starts=self.starts[chosen],
            lengths=self.lengths[chosen],
            fingerprint=digest,
            weight_factors=None if factors is None else factors[chosen],
        )

    def tokens(
        self, document: int, first: int, stop: int
    ) -> Integer[np.ndarray, " tokens"]:
        """The tokens of a document from `first` to before `stop`."""
        start = int(self.starts[document])
        return self.all_tokens[start + first : start + stop]

    def place(self, document: int) -> DocumentPlace | None:
        """The file and line of a document; None for documents in memory."""
        if self.place_of is None:
            return None
        return self.place_of(int(self.starts[document]))

    def weights(
        self, document: int, first: int, stop: int
    ) -> Float32[np.ndarray, " tokens"] | np.float32:
        """For each token from `first` to before `stop`, the document's weight if the
        token counts as a target, else 0.
        """
        start = int(self.starts[document])
        factors = self.weight_factors
        factor = np.float32(1.0 if factors is None else factors[document])
        if self.counted is None:
            return factor
        return self.counted[start + first : start + stop] * factor


class Piece(NamedTuple):
    """`count` consecutive positions of a document in a sequence, of which `first` is
    the first.
    """

    document: int
    first: int
    count: int


@final
class _SplitPacking:
    """All documents concatenated and cut every `seq_len`; only the last sequence can
    have padding.

    Memory: 8 bytes a document.
    """

    def __init__(self, lengths: Int64[np.ndarray, " documents"], seq_len: int):
        self._ends = np.cumsum(lengths)
        self._seq_len = seq_len

    def __len__(self) -> int:
        return -(-int(self._ends[-1]) // self._seq_len)

    def __getitem__(self, sequence: int) -> list[Piece]:
        """The pieces of a sequence; cost: a binary search, and its documents."""
        at = sequence * self._seq_len
        stop = min((sequence + 1) * self._seq_len, int(self._ends[-1]))
        document = int(np.searchsorted(self._ends, at, side="right"))
        found = []
        while at < stop:
            # As many documents as the sequence has, whatever their lengths
            end = int(self._ends[document])
            start = int(self._ends[document - 1]) if document else 0
            found.append(Piece(document, at - start, min(end, stop) - at))
            at = end
            document = document + 1
        return found

    def table(self) -> Int64[np.ndarray, "pieces four"]:
        """A row for each piece: its sequence, document, first position and count."""
        begins = np.concatenate([[0], self._ends[:-1]])
        # A piece ends where its document or its sequence does.
        cuts = np.unique(
            np.concatenate([begins, np.arange(0, self._ends[-1], self._seq_len)])
        )
        documents = np.searchsorted(self._ends, cuts, side="right")
        counts = np.diff(cuts, append=self._ends[-1])
        return np.stack(
            [cuts // self._seq_len, documents, cuts - begins[documents], counts], axis=1
        )


@final
class _WholePacking:
    """Documents uncut, packed by best fit; see `_best_fit`.

    Documents longer than a sequence are cut into whole sequences and a rest. Memory: 8
    bytes for each piece of a document, and 8 for each sequence.
    """

    def __init__(self, lengths: Int64[np.ndarray, " documents"], seq_len: int):
        # Whole sequences of a long document, and a rest, which is packed with others.
        num_pieces = -(-lengths // seq_len)
        documents = np.repeat(np.arange(len(lengths), dtype=np.uint32), num_pieces)
        before = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
        numbers = (np.arange(len(documents)) - before).astype(np.uint32)
        self._lengths = lengths
        self._seq_len = seq_len
        counts = self._counts(documents, numbers)
        # Stable: ties keep the order of documents
        order = np.argsort(-counts, kind="stable")
        sequences = _best_fit(counts[order], seq_len)
        order = order[np.argsort(sequences, kind="stable")]
        # Of each piece, sequence by sequence: its document, and its number in it
        self._documents = documents[order]
        self._numbers = numbers[order]
        self._stops = np.cumsum(np.bincount(sequences))

    def _counts(self, documents: Any, numbers: Any) -> Any:
        """The positions of pieces."""
        rest = self._lengths[documents] - self._seq_len * numbers.astype(np.int64)
        return np.minimum(rest, self._seq_len)

    def __len__(self) -> int:
        return len(self._stops)

    def __getitem__(self, sequence: int) -> list[Piece]:
        """The pieces of a sequence."""
        start = int(self._stops[sequence - 1]) if sequence else 0
        own = slice(start, int(self._stops[sequence]))
        rows = self._rows(self._documents[own], self._numbers[own])
        return [Piece(*row) for row in rows.tolist()]

    def _rows(self, documents: Any, numbers: Any) -> Int64[np.ndarray, "pieces three"]:
        firsts = self._seq_len * numbers.astype(np.int64)
        counts = self._counts(documents, numbers)
        return np.stack([documents.astype(np.int64), firsts, counts], axis=1)

    def table(self) -> Int64[np.ndarray, "pieces four"]:
        """A row for each piece: its sequence, document, first position and count."""
        per_sequence = np.diff(self._stops, prepend=0)
        sequences = np.repeat(np.arange(len(self)), per_sequence)
        rows = self._rows(self._documents, self._numbers)
        return np.concatenate([sequences[:, None], rows], axis=1)


def _best_fit(
    counts: Int64[np.ndarray, " pieces"], seq_len: int
) -> UInt32[np.ndarray, " pieces"]:
    """The sequence of each piece, which come longest first: the one with the fewest
    free positions that are enough (Johnson, 1974), and else a new one.

    Cost: seconds for a million pieces, at the start of every run. Memory meanwhile: 8
    bytes a piece, and 4 for each sequence.
    """
    found = array.array("I")
    # Sequences by their free positions
    by_free: dict[int, array.array[int]] = {}
    free_sizes = 0  # bit n is set if a sequence has n free positions
    num_sequences = 0
    # Whose elements are Python's integers, as bits of any number need them
    for count in array.array("i", counts.astype(np.int32).tobytes()):
        # The lowest set bit from `count` on is the tightest fit; an integer of Python
        # has as many bits as a sequence has positions.
        fitting = free_sizes >> count
        if fitting:
            free = count + (fitting & -fitting).bit_length() - 1
            chosen = by_free[free].pop()
            if not by_free[free]:
                free_sizes &= ~(1 << free)
        else:
            free = seq_len
            chosen = num_sequences
            num_sequences += 1
        found.append(chosen)
        left = free - count
        if left:
            by_free.setdefault(left, array.array("I")).append(chosen)
            free_sizes |= 1 << left
    return np.frombuffer(found, np.uint32)


@final
class PackedDocuments:
    """Documents as sequences of `seq_len` positions, a random-access source for Grain.

    A sequence without a target teaches nothing, and is left out.

    Attributes:
        seq_len: positions in a sequence.
        num_documents: documents of two tokens or more.
        num_counted: target tokens of weight 1.
        num_cut: documents of more positions than a sequence, which any packing cuts.
        longest: positions of the longest document.
        num_left_out: sequences without a target.
        fingerprint: a hash of the tokens and the packing.
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
            packing: as in `DataConfig`.
            separate: whether sequences have the fields that separate documents.

        Raises:
            DataError: no document has two tokens or more.
        """
        # A document of one token has no target.
        self._documents = documents.select(documents.lengths > 1)
        if not len(self._documents):
            raise DataError(
                f"None of the {len(documents)} documents has two tokens or more."
            )
        self.seq_len = seq_len
        self.num_documents = len(self._documents)
        self._separate = separate
        pack = _SplitPacking if packing == "split" else _WholePacking
        # A document of n tokens has n - 1 positions: the last token is only a target.
        # Pieces of one document meet in a token, a target of one and an input of the
        # next, so no target is lost where a document is cut.
        positions = self._documents.lengths - 1
        self._pieces = pack(positions, seq_len)
        self.num_cut = int((positions > seq_len).sum())
        self.longest = int(positions.max())
        targets = self._num_targets()
        self._chosen = None if targets.all() else np.flatnonzero(targets)
        self.num_counted = int(targets.sum())
        self.num_left_out = int((targets == 0).sum())
        # A run that resumes needs the same sequences under the same numbers.
        packed = f"{self._documents.fingerprint} {packing} {seq_len}"
        packed += f" {self.num_left_out} left out" if self.num_left_out else ""
        self.fingerprint = hashlib.sha256(packed.encode()).hexdigest()

    def __repr__(self) -> str:
        return (
            f"PackedDocuments({len(self)} sequences of {self.seq_len},"
            f" {self.fingerprint[:16]})"
        )

    def __len__(self) -> int:
        """Sequences in an epoch."""
        return len(self._pieces) - self.num_left_out

    def _num_targets(self) -> Integer[np.ndarray, " sequences"]:
        """The number of targets of every sequence."""
        sequences, documents, firsts, counts = self._pieces.table().T
        # The target of a position is the token after it.
        targets = self._documents.targets_in(documents, firsts + 1, firsts + 1 + counts)
        return np.bincount(
            sequences, weights=targets, minlength=len(self._pieces)
        ).astype(np.int64)

    def name(self, index: int) -> str:
        """The files and lines of a sequence's documents, as `sequence_name` writes
        them; empty for documents in memory.
        """
        names = []
        for piece in self._pieces[self._sequence(index)]:
            place = self._documents.place(piece.document)
            if place is None:
                return ""
            stop = piece.first + piece.count + 1
            is_whole = stop - piece.first == self._documents.lengths[piece.document]
            names.append(PieceName(place, piece.first, None if is_whole else stop))
        return sequence_name(names)

    def _sequence(self, index: int) -> int:
        """The number of a sequence among those with and without targets."""
        return int(index if self._chosen is None else self._chosen[index])

    def __getitem__(self, index: int) -> PackedSequence:
        """A sequence: int32 `tokens`, `targets`, `documents` and `positions`, float32
        `weights`.

        `documents` numbers the pieces from 1; `positions` counts from 0 in each piece;
        padding at the end is 0 in all fields. Without `separate`, these two fields are
        left out.
        """
        names = ("tokens", "targets", "documents", "positions")
        found: PackedSequence = {
            name: np.zeros(self.seq_len, np.int32) for name in names
        }
        found["weights"] = np.zeros(self.seq_len, np.float32)
        at = 0
        pieces = self._pieces[self._sequence(index)]
        for number, piece in enumerate(pieces, 1):
            where = slice(at, at + piece.count)
            stop = piece.first + piece.count + 1
            tokens = self._documents.tokens(piece.document, piece.first, stop)
            found["tokens"][where] = tokens[:-1]
            found["targets"][where] = tokens[1:]
            found["documents"][where] = number
            found["positions"][where] = np.arange(piece.count)
            found["weights"][where] = self._documents.weights(
                piece.document, piece.first + 1, stop
            )
            at += piece.count
        if not self._separate:
            del found["documents"], found["positions"]
        return found
