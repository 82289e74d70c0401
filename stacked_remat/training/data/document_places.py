"""Where documents come from: their files, and their lines in them.

A cache has the file and the record of each document on the disk. They are read when an
example is named, as in a log of scores; a run that names none has no memory for them.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Int64


class DocumentPlace(NamedTuple):
    """A file, and the line, item or row of a document in it, from 1."""

    file: str
    record: int


class FindsPlaces(Protocol):
    """Finds the place of a document by the index of its first token."""

    def __call__(self, start: int) -> DocumentPlace:
        """The place of the document whose tokens begin there."""
        ...


@dataclass(frozen=True)
class DocumentPlaces:
    """The places of the documents of a cache.

    Attributes:
        names: of the files.
        lengths: tokens of each document.
        files: for each document, the index of its file.
        records: for each document, the number of records before its own in the file.
    """

    names: Sequence[str]
    lengths: Any
    files: Any
    records: Any

    @functools.cached_property
    def _starts(self) -> Int64[np.ndarray, " documents"]:
        lengths = np.asarray(self.lengths, np.int64)
        return np.cumsum(lengths) - lengths

    def __call__(self, start: int) -> DocumentPlace:
        """The place of the document whose tokens begin there.

        Memory: 8 bytes for each document of the cache, from the first call on.
        """
        # The last of those that begin there: the ones before it have no tokens.
        document = int(np.searchsorted(self._starts, start, side="right")) - 1
        own = slice(document, document + 1)
        name = self.names[int(self.files[own][0])]
        return DocumentPlace(name, int(self.records[own][0]) + 1)


@dataclass(frozen=True)
class JoinedPlaces:
    """The places of the documents of several caches, one after the other.

    Attributes:
        parts: those of each cache.
        stops: the number of tokens in each cache and those before it.
    """

    parts: Sequence[FindsPlaces]
    stops: Int64[np.ndarray, " parts"]

    def __call__(self, start: int) -> DocumentPlace:
        """The place of the document whose tokens begin there."""
        part = int(np.searchsorted(self.stops, start, side="right"))
        before = int(self.stops[part - 1]) if part else 0
        return self.parts[part](start - before)


class PieceName(NamedTuple):
    """A document, or its tokens from `first` to before `stop` if that is not all."""

    place: DocumentPlace
    first: int
    stop: int | None


def sequence_name(pieces: Iterable[PieceName]) -> str:
    """The name of a sequence of pieces of documents.

    `a.jsonl:17` is a document, `a.jsonl:17[512:1024]` some of its tokens,
    `a.jsonl:17, 93; b.txt:1` three documents of two files.
    """
    names = []
    for file, group in itertools.groupby(pieces, lambda piece: piece.place.file):
        records = ", ".join(map(_record_name, group))
        names.append(f"{file}:{records}")
    return "; ".join(names)


def _record_name(piece: PieceName) -> str:
    if piece.stop is None:
        return str(piece.place.record)
    return f"{piece.place.record}[{piece.first}:{piece.stop}]"
