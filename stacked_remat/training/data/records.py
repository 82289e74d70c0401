"""Reads files: each text file, line of JSON or row of Parquet is a document."""

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import fsspec
import fsspec.compression
from fsspec.core import OpenFile
from fsspec.implementations.local import LocalFileSystem

from ..data_config import SourceConfig
from ..errors import DataError
from ..extra import optional
from .files import SourceFile

Message: TypeAlias = dict[str, Any]
"""One turn of a chat: `role`, `content`, and any other fields that the chat template reads."""


@dataclass(frozen=True)
class Record:
    """One text or chat of a file, or why it can't be read, which begins with file and line."""

    number: int  # lines or rows before it
    offset: int  # stored bytes of the file that have been read, for progress
    content: str | list[Message] | None
    problem: str | None = None


class _Malformed(Exception):
    """Why a record has no content: the rest of a sentence that begins with its place."""


_Numbered: TypeAlias = tuple[int, int, Callable[[], Any]]  # a record's number, offset and how to parse it


def read_records(file: SourceFile, how: SourceConfig, start: int = 0) -> Iterator[Record]:
    """The records of a file of a source from number `start` on.

    Blank lines are not records. A DataError if the file can't be opened or decompressed, is not Parquet, or
    lacks both columns. Memory: one line or text file, or 64 rows of Parquet.
    """
    reader = _READERS[_format_of(file, how)]
    try:
        for number, offset, parse in reader(file, how, start):
            content = problem = None
            try:
                content = parse()
            except UnicodeDecodeError as error:
                problem = f"is not UTF-8 ({error.reason})"
                if reader is _read_text:
                    number = error.object[: error.start].count(b"\n")
            except RecursionError:
                problem = "is JSON that is nested too deeply"
            except _Malformed as error:
                problem = str(error)
            except ValueError as error:
                problem = f"is not JSON ({error}): write one object a line"
            yield Record(number, offset, content, problem and f"{place_of(file, number)} {problem}")
    except DataError:
        raise
    except Exception as error:  # file systems and decompressors raise anything
        hidden = file.local_path is None  # the original error may show credentials
        raise DataError(f"Can't read {file.place}: {error}") from (None if hidden else error)


def place_of(file: SourceFile, number: int) -> str:
    """The place of a record for messages: `folder/file.jsonl:17`."""
    return f"{file.place}:{number + 1}"


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
    name, path = file.name.lower(), file.local_path
    endings = () if as_stored else _COMPRESSED
    codec = next((_COMPRESSED[ending] for ending in endings if name.endswith(ending)), None)
    if codec not in fsspec.compression.compr:
        raise DataError(f"{file.place} is compressed with zstd: pip install zstandard, or decompress it.")
    if path is not None:  # in which fsspec would read `::` as a chain of file systems
        return OpenFile(LocalFileSystem(), path, compression=codec)
    return OpenFile(*fsspec.core.url_to_fs(file.url), compression=codec)


def _read_text(file: SourceFile, how: SourceConfig, start: int) -> Iterator[_Numbered]:
    if start == 0:
        with _opened(file) as plain:
            yield 0, file.size, functools.partial(plain.read().decode, "utf-8")


def _read_jsonl(file: SourceFile, how: SourceConfig, start: int) -> Iterator[_Numbered]:
    with (opened := _opened(file)) as plain:
        for number, line in enumerate(plain):
            if number >= start and line.strip():
                stored = opened.fobjects[0].tell()
                yield number, stored, lambda line=line: _content(json.loads(line), how)


def _read_parquet(file: SourceFile, how: SourceConfig, start: int) -> Iterator[_Numbered]:
    names = ("pyarrow", "pyarrow.parquet")
    pyarrow, parquet = (optional(name, f"Reading {file.place}") for name in names)
    with _opened(file, as_stored=True) as stored:
        try:
            table = parquet.ParquetFile(stored)
        except pyarrow.ArrowException as error:
            raise DataError(f"{file.place} is not a Parquet file: {error}") from None
        columns = [name for name in (how.text_key, how.messages_key) if name in table.schema_arrow.names]
        if not columns:
            raise DataError(
                f"{file.place} has neither a column {how.text_key!r} nor {how.messages_key!r}; it has "
                f"{', '.join(table.schema_arrow.names)}. Set data.sources.NAME.text_key to the column with "
                f"the text."
            )
        numbers = itertools.count()
        try:
            for batch in table.iter_batches(batch_size=_ROWS, columns=columns):
                for row, number in zip(range(batch.num_rows), numbers, strict=False):
                    if number >= start:
                        own, offset = batch.slice(row, 1), file.size * (number + 1) // table.metadata.num_rows
                        yield number, offset, lambda own=own: _content(own.to_pylist()[0], how)
        except pyarrow.ArrowException as error:
            raise DataError(f"{file.place} is damaged: {error}. Repair it, or leave it out.") from None


_READERS = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}


def _content(fields: Any, how: SourceConfig) -> str | list[Message]:
    if not isinstance(fields, dict):
        raise _Malformed(f"holds {type(fields).__name__}, not an object with keys: write one object a line")
    text, messages = fields.get(how.text_key), fields.get(how.messages_key)
    if isinstance(text, str):
        return text
    if text is not None:
        raise _Malformed(f"has {type(text).__name__}, not text, in {how.text_key!r}")
    if messages is None:
        if nulls := [key for key in (how.text_key, how.messages_key) if key in fields]:
            raise _Malformed(f"has null in {nulls[0]!r}")
        has = ", ".join(map(repr, fields)) or "no key"
        raise _Malformed(f"has neither {how.text_key!r} nor {how.messages_key!r}, but {has}")
    no_chat = f"has no chat in {how.messages_key!r}:"
    if not isinstance(messages, list) or not messages:
        raise _Malformed(f"{no_chat} expected a list of messages that is not empty")
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _Malformed(f"{no_chat} message {at} lacks a `role`")
        if message.get("content") is None and not message.get("tool_calls"):
            raise _Malformed(f"{no_chat} message {at} lacks its `content`")
    return messages
