"""Reading files: a document a text file, a line of JSON, or a row of a Parquet file."""

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypeAlias, cast

import fsspec
import fsspec.compression

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
        max_bytes: decompressed bytes of a text, a line or a row, above which it can't be read.
    """

    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    text_key: str = "text"
    messages_key: str = "messages"
    max_bytes: int = 2**28


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

    Blank lines are no records. Memory: one line, one file of text, or one batch of Parquet rows; what is
    longer than `how.max_bytes` is never held, and is a record with a problem.

    Raises:
        DataError: the file can't be opened or decompressed, is an archive, is no Parquet, or lacks both
            columns.
    """
    reader = _READERS[format_of(file, how)]
    try:
        yield from reader(file, how, start)
    except DataError:
        raise
    except Exception as error:  # file systems and decompressors raise what they like
        hidden = file.local_path is None  # the address with its credentials stands in the original
        raise DataError(f"Can't read {file.place}: {error}") from (None if hidden else error)


def place_of(file: SourceFile, record: Record) -> str:
    """Where a record stands, for people: `folder/file.jsonl:17`."""
    return f"{file.place}:{record.number + 1}"


def format_of(file: SourceFile, how: RecordFormat) -> str:
    """What a file is read as: `text`, `jsonl` or `parquet`."""
    if how.format != "auto":
        return how.format
    name = file.name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "jsonl"
    return "parquet" if name.endswith((".parquet", ".pq")) else "text"


_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
_DICTIONARY_PAGE = 2  # in Parquet's page headers, which are in Thrift's compact protocol
_SMALL_DICTIONARY = 2**24  # more than programs write, unless told to
_UNREAD = (".zip", ".tar", ".tgz", ".7z", ".rar", ".lz4", ".snappy", ".lzma", ".z")


@contextlib.contextmanager
def _stored(file: SourceFile) -> Iterator[BinaryIO]:
    """The file as it is stored."""
    # fsspec would take `::` in a path for a chain of file systems.
    path = file.local_path
    with open(path, "rb") if path is not None else fsspec.open(file.url, "rb") as stored:
        yield cast(BinaryIO, stored)


@contextlib.contextmanager
def _opened(file: SourceFile) -> Iterator[tuple[BinaryIO, io.BufferedReader]]:
    """The file as it is stored, and a buffered stream of its decompressed bytes."""
    name = file.name.lower()
    if name.endswith(_UNREAD):
        raise DataError(
            f"{file.place} is an archive, or compressed in a way that is not read here. Unpack it, or leave "
            f"it out of the paths; what can be read compressed ends in {', '.join(_COMPRESSED)}."
        )
    codec = next((codec for ending, codec in _COMPRESSED.items() if name.endswith(ending)), None)
    known: Any = fsspec.compression.compr
    if codec is not None and codec not in known:
        raise DataError(f"{file.place} is compressed with zstd: pip install zstandard, or decompress it.")
    with _stored(file) as stored:
        if codec is None:
            yield stored, io.BufferedReader(cast(Any, stored))
        else:
            with known[codec](stored, mode="rb") as plain:
                yield stored, io.BufferedReader(plain)


def _read_text(file: SourceFile, how: RecordFormat, start: int) -> Iterator[Record]:
    if start > 0:
        return
    with _opened(file) as (_, plain):
        raw = plain.read(how.max_bytes + 1)
    if len(raw) > how.max_bytes:
        yield _malformed(file, 0, file.size, _too_long(how))
        return
    try:
        yield Record(0, file.size, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n")
        yield _malformed(file, line, file.size, f"is no UTF-8 ({error.reason})")


def _read_jsonl(file: SourceFile, how: RecordFormat, start: int) -> Iterator[Record]:
    with _opened(file) as (stored, plain):
        number = -1
        while line := plain.readline(how.max_bytes + 1):
            number += 1
            too_long = len(line) > how.max_bytes
            if number >= start and (too_long or line.strip()):
                offset = stored.tell()
                if too_long:
                    yield _malformed(file, number, offset, _too_long(how))
                else:
                    yield _from_line(file, how, number, offset, line)
            while too_long and line and not line.endswith(b"\n"):
                line = plain.readline(2**20)


def _from_line(file: SourceFile, how: RecordFormat, number: int, offset: int, line: bytes) -> Record:
    try:
        fields = json.loads(line)
    except UnicodeDecodeError as error:
        return _malformed(file, number, offset, f"is no UTF-8 ({error.reason})")
    except ValueError as error:
        return _malformed(file, number, offset, f"is no JSON ({error})")
    except RecursionError:
        return _malformed(file, number, offset, "is JSON that is nested too deeply to be read")
    return _from_fields(file, how, number, offset, fields)


def _too_long(how: RecordFormat) -> str:
    return f"is longer than the {how.max_bytes:,} bytes that data.max_record_bytes allows"


def _read_parquet(file: SourceFile, how: RecordFormat, start: int) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"Reading {file.url} takes pyarrow, which is not installed: pip install 'stacked_remat[data]'."
        ) from error
    with _stored(file) as stored:
        try:
            table = pyarrow.parquet.ParquetFile(stored)
        except pyarrow.ArrowException as error:
            raise DataError(f"{file.place} is no Parquet file: {error}") from None
        columns = [name for name in (how.text_key, how.messages_key) if name in table.schema_arrow.names]
        if not columns:
            raise DataError(
                f"{file.place} has neither a column {how.text_key!r} nor {how.messages_key!r}; it has "
                f"{', '.join(table.schema_arrow.names)}. Name the one with the text: "
                f"data.sources.NAME.text_key."
            )
        # Many parts of a chat may share a value: a short file may stand for any number of long ones.
        shared = _shared_texts(file, how, table, columns, stored)
        table = pyarrow.parquet.ParquetFile(stored, read_dictionary=shared, metadata=table.metadata)
        try:
            yield from _rows(file, how, start, table, columns, stored)
        except pyarrow.ArrowException as error:
            raise DataError(f"{file.place} can't be read on: {error}. Mend it, or leave it out.") from None


def _leaves(table: Any, columns: list[str]) -> list[int]:
    """The columns that hold a text or the parts of a chat, in the file's own numbering."""
    paths = [table.schema.column(at).path for at in range(len(table.schema))]
    return [at for at, path in enumerate(paths) if path.split(".")[0] in columns]


def _shared_texts(
    file: SourceFile, how: RecordFormat, table: Any, columns: list[str], stored: BinaryIO
) -> list[str]:
    """The columns whose values must not be written out, since rows of the longest would be too long.

    Raises:
        DataError: the values that a column's rows share are too long together.
    """
    shared = {}
    for group in range(table.num_row_groups):
        about = table.metadata.row_group(group)
        for at in _leaves(table, columns):
            chunk = about.column(at)
            longest = _dictionary_bytes(stored, chunk)
            if longest > max(how.max_bytes, _SMALL_DICTIONARY):
                raise DataError(f"{file.place}: the dictionary of row group {group} {_too_long(how)}.")
            if longest * chunk.num_values > how.max_bytes * about.num_rows:
                shared[table.schema.column(at).path] = None
    return list(shared)


def _dictionary_bytes(stored: BinaryIO, chunk: Any) -> int:
    """The size of the values that the rows of a column share, decompressed; 0 if they share none."""
    stored.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
    header = iter(stored.read(16))
    fields = []  # kind of the page, and its size: numbers of 7 bits a byte after a byte 0x15 each
    for _ in range(2):
        if next(header, None) != 0x15:
            return 0
        number = shift = 0
        for byte in header:
            number, shift = number | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                break
        fields.append(number >> 1)
    return fields[1] if fields[0] == _DICTIONARY_PAGE else 0


def _rows(
    file: SourceFile, how: RecordFormat, start: int, table: Any, columns: list[str], stored: BinaryIO
) -> Iterator[Record]:
    total, number = max(table.metadata.num_rows, 1), 0
    for group in range(table.num_row_groups):
        about = table.metadata.row_group(group)
        chunks = [about.column(at) for at in _leaves(table, columns)]
        held = sum(max(chunk.total_uncompressed_size, 4 * chunk.num_values) for chunk in chunks)
        first, number = number, number + about.num_rows
        if number <= start or not about.num_rows:
            continue
        if held > how.max_bytes * about.num_rows:
            raise DataError(f"{file.place}: on average, a row of row group {group} {_too_long(how)}.")
        longest = max(_longest(stored, chunk) for chunk in chunks)
        at_once = max(1, min(256, how.max_bytes // max(held // about.num_rows, longest, 1)))
        for batch in table.iter_batches(batch_size=at_once, row_groups=[group], columns=columns):
            rows = batch.slice(min(max(start - first, 0), batch.num_rows))
            first += batch.num_rows
            for row, fields in enumerate(_fields(rows, how), first - rows.num_rows):
                offset = file.size * (row + 1) // total
                if isinstance(fields, str):
                    yield _malformed(file, row, offset, fields)
                else:
                    yield _from_fields(file, how, row, offset, fields)


def _longest(stored: BinaryIO, chunk: Any) -> int:
    """How long each value of a column may be, if longer than what is stored for it; else 0."""
    if "DELTA_BYTE_ARRAY" in chunk.encodings:  # each may begin with the whole value before it
        return chunk.total_uncompressed_size
    return _dictionary_bytes(stored, chunk)


def _fields(rows: Any, how: RecordFormat) -> Iterator[dict[str, Any] | str]:
    """The fields of each row, or what is wrong with it."""
    if sum(map(_decoded_bytes, rows.columns)) <= how.max_bytes:
        with contextlib.suppress(UnicodeDecodeError):
            yield from rows.to_pylist()
            return
    for at in range(rows.num_rows):
        row = rows.slice(at, 1)
        if sum(map(_decoded_bytes, row.columns)) > how.max_bytes:
            yield _too_long(how)
            continue
        try:
            yield from row.to_pylist()
        except UnicodeDecodeError as error:
            yield f"is no UTF-8 ({error.reason})"


def _decoded_bytes(column: Any) -> int:
    """What a column's values take once each is written out, where several point to one of a dictionary."""
    import pyarrow.compute
    import pyarrow.types

    compute: Any = pyarrow.compute  # whose functions are made when it is imported
    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        lengths = compute.binary_length(column.dictionary).take(column.indices)
        return column.indices.nbytes + (compute.sum(lengths.cast("int64")).as_py() or 0)
    if pyarrow.types.is_struct(kind):
        return sum(map(_decoded_bytes, column.flatten()))
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_map(kind):
        return _decoded_bytes(column.flatten())
    return column.nbytes


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
