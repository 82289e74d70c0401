"""Reading files: a document a text file, a line of JSON, or a row of a Parquet file."""

import contextlib
import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal, TypeAlias

import fsspec
import fsspec.compression
import fsspec.utils

from .data_error import DataError
from .files import SourceFile

Message: TypeAlias = dict[str, Any]
"""One turn of a chat: `role`, `content`, and what else the chat template reads."""


@dataclass(frozen=True)
class RecordFormat:
    """How the files of a source are read.

    Attributes:
        format: `text`, `jsonl`, `parquet`, or `auto` for what each file's name ends in.
        text_key: key or column of a document's text.
        messages_key: key or column of a chat.
    """

    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    text_key: str = "text"
    messages_key: str = "messages"


@dataclass(frozen=True)
class Record:
    """What one place in a file holds.

    Attributes:
        number: lines or rows before it in the file.
        offset: stored bytes of the file that have been read, to show progress.
        content: a text, or the messages of a chat.
        problem: why there is no content: a sentence that names file and line.
    """

    number: int
    offset: int
    content: str | list[Message] | None
    problem: str | None = None


def read_records(file: SourceFile, how: RecordFormat, start: int = 0) -> Iterator[Record]:
    """The records of a file from number `start` on; those before it are not parsed.

    Blank lines are no records. Memory: one line, one file of text, or one batch of Parquet rows.

    Raises:
        DataError: the file can't be opened or decompressed, is no Parquet, or lacks both columns.
    """
    reader = _READERS[_format_of(file, how)]
    try:
        yield from reader(file, how, start)
    except (OSError, EOFError, ImportError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"Can't read {file.url}: {error}") from error


def place_of(file: SourceFile, record: Record) -> str:
    """Where a record stands, for people: `folder/file.jsonl:17`."""
    return f"{file.url.removeprefix('file://')}:{record.number + 1}"


def _format_of(file: SourceFile, how: RecordFormat) -> str:
    if how.format != "auto":
        return how.format
    name = file.name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "jsonl"
    return "parquet" if name.endswith((".parquet", ".pq")) else "text"


_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@contextlib.contextmanager
def _opened(file: SourceFile) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The file as it is stored, and a buffered stream of its decompressed bytes."""
    codec = fsspec.utils.infer_compression(file.name)
    if codec is None and file.name.lower().endswith(".zst"):
        raise DataError(f"{file.url} is compressed with zstd: pip install zstandard, or decompress it.")
    decompress: Any = fsspec.compression.compr
    stored: Any
    with fsspec.open(file.url, "rb") as stored:
        if codec is None:
            yield stored, stored
        else:
            with decompress[codec](stored, mode="rb") as plain:
                yield stored, plain


def _read_text(file: SourceFile, how: RecordFormat, start: int) -> Iterator[Record]:
    if start > 0:
        return
    with _opened(file) as (_, plain):
        raw = plain.read()
    try:
        yield Record(0, file.size, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n")
        yield _malformed(file, line, file.size, f"is no UTF-8 ({error.reason})")


def _read_jsonl(file: SourceFile, how: RecordFormat, start: int) -> Iterator[Record]:
    with _opened(file) as (stored, plain):
        for number, line in enumerate(plain):
            if number < start or not line.strip():
                continue
            offset = stored.tell()
            try:
                fields = json.loads(line)
            except UnicodeDecodeError as error:
                yield _malformed(file, number, offset, f"is no UTF-8 ({error.reason})")
            except ValueError as error:
                yield _malformed(file, number, offset, f"is no JSON ({error})")
            except RecursionError:
                yield _malformed(file, number, offset, "is JSON that is nested too deeply to be read")
            else:
                yield _from_fields(file, how, number, offset, fields)


def _read_parquet(file: SourceFile, how: RecordFormat, start: int) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"Reading {file.url} takes pyarrow, which is not installed: pip install 'stacked_remat[data]'."
        ) from error
    with fsspec.open(file.url, "rb") as stored:
        try:
            table = pyarrow.parquet.ParquetFile(stored)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{file.url} is no Parquet file: {error}") from error
        columns = [name for name in (how.text_key, how.messages_key) if name in table.schema_arrow.names]
        if not columns:
            raise DataError(
                f"{file.url} has neither a column {how.text_key!r} nor {how.messages_key!r}; it has "
                f"{', '.join(table.schema_arrow.names)}. Name the one with the text: "
                f"data.sources.NAME.text_key."
            )
        total, number = max(table.metadata.num_rows, 1), 0
        for batch in table.iter_batches(batch_size=256, columns=columns):
            first, number = number, number + batch.num_rows
            if number > start:
                rows = batch.slice(max(start - first, 0)).to_pylist()
                for row, fields in enumerate(rows, max(first, start)):
                    yield _from_fields(file, how, row, file.size * (row + 1) // total, fields)


_READERS = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}


def _from_fields(file: SourceFile, how: RecordFormat, number: int, offset: int, fields: Any) -> Record:
    """The record of an object's or row's fields."""
    if not isinstance(fields, dict):
        return _malformed(file, number, offset, f"holds {type(fields).__name__}, not an object with keys")
    text, messages = fields.get(how.text_key), fields.get(how.messages_key)
    if isinstance(text, str):
        return Record(number, offset, text)
    if text is not None:
        return _malformed(file, number, offset, f"has {type(text).__name__}, not text, in {how.text_key!r}")
    if messages is None:
        has = ", ".join(map(repr, fields)) or "no key"
        return _malformed(
            file, number, offset, f"has neither {how.text_key!r} nor {how.messages_key!r}, but {has}"
        )
    problem = _problem_of_chat(messages)
    if problem is not None:
        return _malformed(file, number, offset, f"has no chat in {how.messages_key!r}: {problem}")
    return Record(number, offset, messages)


def _problem_of_chat(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return "expected a list of messages that is not empty"
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {at} lacks a `role`"
        if message.get("content") is None and "tool_calls" not in message:
            return f"message {at} lacks its `content`"
    return None


def _malformed(file: SourceFile, number: int, offset: int, problem: str) -> Record:
    place = place_of(file, Record(number, offset, None))
    return Record(number, offset, None, f"{place} {problem}")
