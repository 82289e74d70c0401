"""Reads files: each text file, line or item of JSON or row of Parquet is a document."""

import codecs
import dataclasses
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import fsspec.compression
from fsspec.core import OpenFile
from fsspec.implementations.local import LocalFileSystem

from ..data_config import SourceConfig
from ..errors import DataError
from ..extra import optional
from .files import SourceFile
from .record_forms import (
    NESTED_KEYS,
    Content,
    Document,
    MalformedRecord,
    columns_of,
    document_of,
)


@dataclass(frozen=True)
class Record:
    """One record of a file, which is parsed when its document is asked for, in
    whatever process that is.

    Attributes:
        place: file and line or item, for messages: `folder/file.jsonl:17`.
        number: lines, items or rows before it.
        offset: stored bytes of the file that have been read, for progress.
        size: about the bytes of the record itself.
        parse: makes its document.
    """

    place: str
    number: int
    offset: int
    size: int
    parse: Callable[[], Document]

    @functools.cached_property
    def _parsed(self) -> tuple[Document | None, str | None]:
        try:
            return self.parse(), None
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 ({error.reason})"
        except RecursionError:
            problem = "is JSON that is nested too deeply"
        except MalformedRecord as error:
            return None, f"{error.place or self.place} {error}"
        except ValueError as error:
            problem = (
                f"is not JSON ({error}): write one object a line, or an array of"
                " objects"
            )
        return None, f"{self.place} {problem}"

    @property
    def document(self) -> Document | None:
        """What it holds; None if that can't be read."""
        return self._parsed[0]

    @property
    def problem(self) -> str | None:
        """Why it can't be read, which begins with its place."""
        return self._parsed[1]

    @property
    def content(self) -> Content | None:
        """Its text or chat."""
        return self.document and self.document.content


def read_records(
    file: SourceFile, how: SourceConfig, start: int = 0
) -> Iterator[Record]:
    """The records of a file of a source from number `start` on.

    Blank lines are not records. A DataError if the file can't be opened or
    decompressed, is a JSON array that can't be read, is not Parquet, or lacks all
    columns of texts and chats. Memory: one line or text file, 64 rows of Parquet, or
    all of a JSON array.
    """
    reader = _READERS[_format_of(file, how)]
    try:
        yield from reader(file, how, start)
    except DataError:
        raise
    except Exception as error:  # file systems and decompressors raise anything
        hidden = file.local_path is None  # the original error may show credentials
        raise DataError(f"Can't read {file.place}: {error}") from (
            None if hidden else error
        )


def _format_of(file: SourceFile, how: SourceConfig) -> str:
    if how.format != "auto":
        return how.format
    name = file.name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "jsonl"
    return "parquet" if name.endswith((".parquet", ".pq")) else "text"


_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
_ROWS = 64  # of Parquet that are in memory at once


def _opened(file: SourceFile, *, as_stored: bool = False) -> OpenFile:
    """The file, to be entered; its decompressed bytes unless `as_stored`."""
    # The ending decides: contents may be anything, also bytes that look compressed.
    name = file.name.lower()
    path = file.local_path
    endings = () if as_stored else _COMPRESSED
    codec = next(
        (_COMPRESSED[ending] for ending in endings if name.endswith(ending)), None
    )
    if codec not in fsspec.compression.compr:
        raise DataError(
            f"{file.place} is compressed with zstd: pip install zstandard, or"
            " decompress it."
        )
    if path is not None:  # in which fsspec would read `::` as a chain of file systems
        return OpenFile(LocalFileSystem(), path, compression=codec)
    return OpenFile(*fsspec.core.url_to_fs(file.url), compression=codec)


def _read_text(file: SourceFile, how: SourceConfig, start: int) -> Iterator[Record]:
    if start == 0:
        with _opened(file) as plain:
            stored = plain.read()
        parse = functools.partial(_of_text, file.place, stored)
        yield Record(f"{file.place}:1", 0, file.size, len(stored), parse)


def _of_text(place: str, stored: bytes) -> Document:
    try:
        return Document(stored.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = stored[: error.start].count(b"\n") + 1
        problem = f"is not UTF-8 ({error.reason})"
        raise MalformedRecord(problem, f"{place}:{line}") from error


def _read_json(file: SourceFile, how: SourceConfig, start: int) -> Iterator[Record]:
    with (opened := _opened(file)) as plain:
        for number, line in enumerate(plain):
            if number == 0 and line.removeprefix(codecs.BOM_UTF8)[:1] == b"[":
                yield from _read_array(file, how, start)
                return
            # Blank lines are counted, so that the numbers are those that editors show.
            if number >= start and line.strip():
                place = f"{file.place}:{number + 1}"
                stored = opened.fobjects[0].tell()
                parse = functools.partial(_of_line, line, how)
                yield Record(place, number, stored, len(line), parse)


def _of_line(line: bytes, how: SourceConfig) -> Document:
    return _of_value(_loaded(line), how)


def _of_value(value: Any, how: SourceConfig) -> Document:
    if (key := _key_twice(value)) is not None:
        raise MalformedRecord(f"has the key {key!r} twice in one object")
    return document_of(value, how)


class _HasTwice(dict[str, Any]):
    """An object that is written with a key twice, of which the last is taken."""

    def __init__(self, pairs: list[tuple[str, Any]]):
        super().__init__(pairs)
        ((self.key, _),) = Counter(key for key, _ in pairs).most_common(1)


def _key_twice(value: Any) -> str | None:
    """A key that an object in a value has twice."""
    if isinstance(value, _HasTwice):
        return value.key
    if not isinstance(value, dict | list):
        return None
    inner = value.values() if isinstance(value, dict) else value
    return next(filter(None, map(_key_twice, inner)), None)


def _loaded(stored: bytes) -> Any:
    """A value of JSON, in which a `_HasTwice` is where an object has a key twice."""

    def marked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        return found if len(found) == len(pairs) else _HasTwice(pairs)

    return json.loads(stored, object_pairs_hook=marked)


def _read_array(file: SourceFile, how: SourceConfig, start: int) -> Iterator[Record]:
    """The items of an array, in whose file lines have no meaning."""
    with _opened(file) as plain:
        stored = plain.read()
    try:
        items = _loaded(stored)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file.place} begins with `[` and is no array of JSON: {error}. Repair it,"
            " or write one object a line."
        ) from error
    size = len(stored) // max(len(items), 1)
    for number, item in enumerate(items):
        if number >= start:
            place = f"{file.place}, item {number + 1},"
            offset = file.size * (number + 1) // len(items)
            parse = functools.partial(_of_value, item, how)
            yield Record(place, number, offset, size, parse)


def _read_parquet(file: SourceFile, how: SourceConfig, start: int) -> Iterator[Record]:
    pyarrow, parquet = (
        optional(name, f"Reading {file.place}")
        for name in ("pyarrow", "pyarrow.parquet")
    )
    with _opened(file, as_stored=True) as stored:
        try:
            table = parquet.ParquetFile(stored)
        except pyarrow.ArrowException as error:
            raise DataError(f"{file.place} is not a Parquet file: {error}") from None
        names = table.schema_arrow.names
        columns = columns_of(names, how)
        if not columns:
            raise DataError(
                f"{file.place} has neither a column {how.text_key!r} nor"
                f" {how.messages_key!r}; it has {', '.join(names)}. Set"
                " data.sources.NAME.text_key to the column with the text."
            )
        unread = tuple(name for name in names if name not in columns)
        # A Parquet file can't be entered at a row: a build that resumes reads the rows
        # before too, and parses none of them.
        numbers = itertools.count()
        try:
            for batch in table.iter_batches(batch_size=_ROWS, columns=columns):
                size = batch.nbytes // max(batch.num_rows, 1)
                for row, number in zip(range(batch.num_rows), numbers, strict=False):
                    if number >= start:
                        place = f"{file.place}:{number + 1}"
                        offset = file.size * (number + 1) // table.metadata.num_rows
                        # Row by row: a text that is not UTF-8 then spoils its own row,
                        # and not the batch.
                        fields = _fields(batch.slice(row, 1))
                        parse = functools.partial(_of_row, fields, unread, how)
                        yield Record(place, number, offset, size, parse)
        except pyarrow.ArrowException as error:
            raise DataError(
                f"{file.place} is damaged: {error}. Repair it, or leave it out."
            ) from None


_READERS = {"text": _read_text, "jsonl": _read_json, "parquet": _read_parquet}


def _fields(row: Any) -> dict[str, Any] | UnicodeDecodeError:
    """The values of a row, in whose columns a key that a record lacks is null."""
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return error


def _of_row(
    fields: dict[str, Any] | UnicodeDecodeError,
    unread: tuple[str, ...],
    how: SourceConfig,
) -> Document:
    if isinstance(fields, UnicodeDecodeError):
        raise fields
    # In a column of structs every row has every key of any row; those that a record
    # lacks are null, and templates ask whether a key is there.
    nested = (how.messages_key, *NESTED_KEYS)
    written = {
        name: _without_nulls(value) if name in nested else value
        for name, value in fields.items()
    }
    found = document_of(written, how)
    return dataclasses.replace(found, unread=(*found.unread, *unread))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_nulls(own) for key, own in value.items() if own is not None
        }
    return [_without_nulls(own) for own in value] if isinstance(value, list) else value
