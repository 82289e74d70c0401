"""Reads files: each text file, line of JSON or row of Parquet is a document."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import fsspec
import fsspec.compression
from fsspec.core import OpenFile
from fsspec.implementations.local import LocalFileSystem

from ..data_config import RESERVED_VARIABLES, SourceConfig
from ..errors import DataError
from ..extra import optional
from .files import SourceFile

Message: TypeAlias = dict[str, Any]
"""One turn of a chat: `role`, `content`, and any other fields that the chat template
reads.
"""


TEMPLATE_KEYS = ("tools", "documents", "chat_template_kwargs")
"""Keys of a record with a chat that the chat template gets as variables, the last one
as several.
"""


@dataclass(frozen=True)
class Document:
    """What a record holds.

    Attributes:
        content: a text or a chat.
        variables: of the chat template, for this chat.
        unread: keys of the record that are not read.
    """

    content: str | list[Message]
    variables: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """One text or chat of a file, or why it can't be read, which begins with file and
    line.
    """

    number: int  # lines or rows before it
    offset: int  # stored bytes of the file that have been read, for progress
    document: Document | None
    problem: str | None = None

    @property
    def content(self) -> str | list[Message] | None:
        """The text or the chat."""
        return self.document and self.document.content


class _Malformed(Exception):
    """Why a record has no content: the rest of a sentence that begins with its
    place.
    """


# A record's number, offset and how to parse it
_Numbered: TypeAlias = tuple[int, int, Callable[[], Any]]


def read_records(
    file: SourceFile, how: SourceConfig, start: int = 0
) -> Iterator[Record]:
    """The records of a file of a source from number `start` on.

    Blank lines are not records. A DataError if the file can't be opened or
    decompressed, is not Parquet, or lacks both columns. Memory: one line or text file,
    or 64 rows of Parquet.
    """
    reader = _READERS[_format_of(file, how)]
    try:
        for number, offset, parse in reader(file, how, start):
            document = problem = None
            try:
                document = parse()
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
            yield Record(
                number,
                offset,
                document,
                problem and f"{place_of(file, number)} {problem}",
            )
    except DataError:
        raise
    except Exception as error:  # file systems and decompressors raise anything
        hidden = file.local_path is None  # the original error may show credentials
        raise DataError(f"Can't read {file.place}: {error}") from (
            None if hidden else error
        )


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


def _read_text(file: SourceFile, how: SourceConfig, start: int) -> Iterator[_Numbered]:
    if start == 0:
        with _opened(file) as plain:
            yield 0, file.size, functools.partial(_of_text, plain.read())


def _of_text(stored: bytes) -> Document:
    return Document(stored.decode("utf-8"))


def _read_jsonl(file: SourceFile, how: SourceConfig, start: int) -> Iterator[_Numbered]:
    with (opened := _opened(file)) as plain:
        for number, line in enumerate(plain):
            if number >= start and line.strip():
                stored = opened.fobjects[0].tell()
                yield number, stored, lambda line=line: _document(json.loads(line), how)


def _read_parquet(
    file: SourceFile, how: SourceConfig, start: int
) -> Iterator[_Numbered]:
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
        columns = [
            name
            for name in (how.text_key, how.messages_key, *TEMPLATE_KEYS)
            if name in names
        ]
        unread = tuple(name for name in names if name not in columns)
        if not {how.text_key, how.messages_key}.intersection(columns):
            raise DataError(
                f"{file.place} has neither a column {how.text_key!r} nor"
                f" {how.messages_key!r}; it has {', '.join(names)}. Set"
                " data.sources.NAME.text_key to the column with the text."
            )
        numbers = itertools.count()
        try:
            for batch in table.iter_batches(batch_size=_ROWS, columns=columns):
                for row, number in zip(range(batch.num_rows), numbers, strict=False):
                    if number >= start:
                        own, offset = (
                            batch.slice(row, 1),
                            file.size * (number + 1) // table.metadata.num_rows,
                        )
                        yield (
                            number,
                            offset,
                            lambda own=own: _of_row(own.to_pylist()[0], unread, how),
                        )
        except pyarrow.ArrowException as error:
            raise DataError(
                f"{file.place} is damaged: {error}. Repair it, or leave it out."
            ) from None


_READERS = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}


def _of_row(
    row: dict[str, Any], unread: tuple[str, ...], how: SourceConfig
) -> Document:
    """The document of a row, in whose columns a key that a record lacks is null."""
    nested = (how.messages_key, *TEMPLATE_KEYS)
    fields = {
        name: _without_nulls(value) if name in nested else value
        for name, value in row.items()
    }
    found = _document(fields, how)
    return dataclasses.replace(found, unread=(*found.unread, *unread))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_nulls(own) for key, own in value.items() if own is not None
        }
    return [_without_nulls(own) for own in value] if isinstance(value, list) else value


def _document(fields: Any, how: SourceConfig) -> Document:
    if not isinstance(fields, dict):
        raise _Malformed(
            f"holds {type(fields).__name__}, not an object with keys: write one object"
            " a line"
        )
    text, messages = fields.get(how.text_key), fields.get(how.messages_key)
    if isinstance(text, str):
        unread = tuple(
            key
            for key, value in fields.items()
            if key != how.text_key and value is not None
        )
        return Document(text, unread=unread)
    if text is not None:
        raise _Malformed(f"has {type(text).__name__}, not text, in {how.text_key!r}")
    if messages is None:
        if nulls := [key for key in (how.text_key, how.messages_key) if key in fields]:
            raise _Malformed(f"has null in {nulls[0]!r}")
        has = ", ".join(map(repr, fields)) or "no key"
        raise _Malformed(
            f"has neither {how.text_key!r} nor {how.messages_key!r}, but {has}"
        )
    _check_chat(messages, how.messages_key)
    read = (how.text_key, how.messages_key, *TEMPLATE_KEYS)
    unread = tuple(
        key for key, value in fields.items() if key not in read and value is not None
    )
    return Document(messages, _variables(fields), unread)


def _check_chat(messages: Any, key: str) -> None:
    no_chat = f"has no chat in {key!r}:"
    if not isinstance(messages, list) or not messages:
        raise _Malformed(f"{no_chat} expected a list of messages that is not empty")
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _Malformed(f"{no_chat} message {at} lacks a `role`")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise _Malformed(f"{no_chat} message {at} lacks its `content`")
        if isinstance(content, list):
            for part in content:
                _check_part(part, f"{no_chat} message {at}")
        elif not isinstance(content, str | dict | None):
            raise _Malformed(
                f"{no_chat} message {at} has {type(content).__name__}, not text, as"
                " `content`"
            )


def _check_part(part: Any, place: str) -> None:
    """Refuses parts of a message other than texts, such as images, which a text model
    does not see.
    """
    kind = part.get("type", "text") if isinstance(part, dict) else "text"
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str) or kind not in ("text", "input_text", "output_text"):
        shown_kind = kind if isinstance(kind, str) else type(part).__name__
        raise _Malformed(
            f"{place} has a part of the type {shown_kind!r} in its `content`; only"
            " texts are read"
        )


def _variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a record with a chat gives the chat template beside its messages."""
    found: dict[str, Any] = {}
    for key in ("tools", "documents"):
        value = _parsed(fields, key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(
            isinstance(own, dict) for own in value
        ):
            raise _Malformed(f"has no list of objects in {key!r}")
        found[key] = value
    given = _parsed(fields, "chat_template_kwargs")
    if given is None:
        return found
    if not isinstance(given, dict):
        raise _Malformed("has no object in 'chat_template_kwargs'")
    if taken := [name for name in given if name in RESERVED_VARIABLES or name in found]:
        raise _Malformed(
            f"has {taken[0]!r} in 'chat_template_kwargs', which the record itself gives"
        )
    return found | given


def _parsed(fields: Mapping[str, Any], key: str) -> Any:
    """A value that may be a text of JSON, as tables have it whose rows have tools of
    several shapes.
    """
    value = fields.get(key)
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise _Malformed(f"has a text in {key!r} that is not JSON ({error})") from error
