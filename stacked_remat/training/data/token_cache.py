"""A cache of tokenized text: a folder for each version of the files and the tokenizer.

Its arrays are appended to files of raw numbers. `state.json` says how much of them is
whole: what a killed process wrote beyond that is cut off, and its text tokenized again.
It also has the checksum of what was written to each file, which is compared when a
build resumes and when it ends, so that a damaged file never gets a valid checksum.
When everything is written, so are checksums of the files' blocks, which are compared
when a block is read.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt64

from ..._files import replaced_whole
from ..data_config import SourceConfig
from ..errors import DataError
from ..progress import ConsoleProgress
from .chat_template import ChatTemplateError, RenderedChat
from .checked_array import CheckedArray, blocks_of, num_blocks
from .files import SourceFile
from .packing import TokenizedDocuments
from .records import Document, Record, place_of, read_records
from .tokenizers import Counted, Tokenizer, Tokens

_FORMAT = 7  # of the files of a cache
_STATE, _LOCK, _CHECKSUMS = "state.json", ".lock", "checksums"
_GROUP_RECORDS, _GROUP_LETTERS = 256, 2**20  # tokenized at once
_PROBLEMS_KEPT, _UNREAD_KEPT = 5, 20
_READ_AS = ("format", "text_key", "messages_key", "chat_template_kwargs")


@dataclass(frozen=True)
class CacheRequest:
    """The files to tokenize, in the order of their documents, and how."""

    name: str  # of the source, with which that of the cache's folder begins
    files: tuple[SourceFile, ...]
    source: SourceConfig
    tokenizer: Tokenizer
    on_malformed: Literal["error", "skip"] = "error"

    @property
    def answers_only(self) -> bool:
        """Whether only answers count as targets."""
        return self.source.train_on == "answers"

    def identity(self) -> dict[str, Any]:
        """Everything that the tokens depend on; the name of the cache's folder has a
        hash of it.
        """
        return {
            "format": _FORMAT,
            "tokenizer": self.tokenizer.fingerprint,
            "read as": {name: getattr(self.source, name) for name in _READ_AS},
            "answers only": self.answers_only,
            "on malformed": self.on_malformed,
            "files": [
                {"url": file.place, "version": file.version} for file in self.files
            ],
        }


@dataclass(frozen=True)
class CacheState:
    """What a cache holds so far, what was left out, and the file and record where its
    text goes on.
    """

    next_file: int = 0
    next_record: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_malformed: int = 0
    problems: Sequence[str] = ()
    unread: Sequence[
        str
    ] = ()  # keys of records that nothing reads, in the order in which they came
    num_open: int = 0  # chats whose last answer the template leaves open
    num_unmarked_ends: int = 0  # chats whose answers lack their ends
    fingerprint: str = ""
    # The CRC-32 of what was written to each file of the layout.
    file_checksums: Mapping[str, int] = field(default_factory=dict)
    checksum: int = 0  # of the file of checksums
    complete: bool = False

    def layout(self, request: CacheRequest) -> dict[str, tuple[int, Any]]:
        """The files of a cache, with the number and the dtype of their entries."""
        counted = {"counted": (self.num_tokens, bool)} if request.answers_only else {}
        numbers = {
            "lengths": (self.num_documents, np.int64),
            "keys": (self.num_documents, np.uint64),
        }
        return {
            "tokens": (self.num_tokens, request.tokenizer.dtype),
            **numbers,
            **counted,
        }

    def num_blocks(self, request: CacheRequest) -> dict[str, int]:
        """For each of these files, how many checksums it has in the file of
        checksums.
        """
        files = self.layout(request).items()
        return {
            name: num_blocks(count * np.dtype(dtype).itemsize)
            for name, (count, dtype) in files
        }


@dataclass(frozen=True)
class CachedTokens:
    """The documents of a cache, a hash of each one's content, and counts."""

    documents: TokenizedDocuments
    keys: UInt64[np.ndarray, " documents"]
    counts: CacheState


def open_token_cache(
    request: CacheRequest,
    cache_dir: Path,
    progress: ConsoleProgress,
    *,
    save_tokens: int = 2**24,
) -> CachedTokens:
    """The tokens of the request's files, from the cache or tokenized now.

    After a kill the next call resumes where the state was last saved, which is after
    every `save_tokens`, with the same result. One process at a time builds; others
    wait.
    """
    digest = hashlib.sha256(json.dumps(request.identity()).encode()).hexdigest()[:16]
    name = re.sub(r"[^\w-]", "_", request.name)
    folder = cache_dir.expanduser() / f"{name}-{digest}"
    try:
        if not _read_state(folder, request).complete:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / _LOCK).open(
                "w"
            ) as file:  # until this process ends, at the latest
                fcntl.flock(file, fcntl.LOCK_EX)
                _build(request, folder, progress, save_tokens)
        return _open(request, folder)
    except OSError as error:  # errors of reading are DataErrors already
        raise DataError(
            f"Can't write or read the token cache {folder}: {error.strerror or error}."
            " Set data.cache_dir to a local folder that can be written and has free"
            " space."
        ) from error
    finally:
        progress.stop()


def _read_state(folder: Path, request: CacheRequest) -> CacheState:
    path = folder / _STATE
    if not path.exists():
        return CacheState()
    try:
        state = CacheState(**json.loads(path.read_bytes()))
        _check_types(state)
        for name, (count, dtype) in state.layout(request).items():
            path = folder / name
            if path.stat().st_size < count * np.dtype(dtype).itemsize:
                raise ValueError
        if state.complete:
            path = folder / _CHECKSUMS
            if zlib.crc32(path.read_bytes()) != state.checksum:
                raise ValueError
    # Brackets within each other by the thousand exceed Python's recursion limit
    except (FileNotFoundError, ValueError, TypeError, RecursionError) as error:
        raise _unusable(path, "damaged" if path.exists() else "missing") from error
    return state


def _unusable(path: Path, problem: str) -> DataError:
    """The error for a file of a cache."""
    return DataError(
        f"{path} is {problem}. Delete the token cache {path.parent}, and the next run"
        " tokenizes its text again."
    )


def _check_types(state: CacheState) -> None:
    """Raises a TypeError for a state with an entry that no state is saved with."""
    for entry in dataclasses.fields(state):
        value, usual = getattr(state, entry.name), getattr(CacheState(), entry.name)
        if isinstance(usual, Mapping):
            is_right = isinstance(value, dict) and all(map(_is_count, value.values()))
        elif isinstance(usual, tuple):
            is_right = isinstance(value, list) and all(
                isinstance(text, str) for text in value
            )
        elif type(usual) is int:
            is_right = _is_count(value)
        else:
            is_right = type(value) is type(usual)
        if not is_right:
            raise TypeError(f"{entry.name} is {value!r}")


def _is_count(value: Any) -> bool:
    # bool is a subclass of int
    return type(value) is int and value >= 0


def _read_back(path: Path, checksum: int) -> tuple[bytes, list[int]]:
    """The SHA-256 of a file and the checksums of its blocks.

    A DataError if the file has not the checksum of what was written to it.
    """
    digest, block_checksums, file_checksum = hashlib.sha256(), [], 0
    with path.open("rb") as file:
        for block in blocks_of(file):
            digest.update(block)
            block_checksums.append(zlib.crc32(block))
            file_checksum = zlib.crc32(block, file_checksum)
    if file_checksum != checksum:
        raise _unusable(path, "damaged: its bytes are not those that were written")
    return digest.digest(), block_checksums


def _build(
    request: CacheRequest, folder: Path, progress: ConsoleProgress, save_tokens: int
) -> None:
    state = _read_state(folder, request)
    if state.complete:  # another process did
        return
    before = np.cumsum([0, *(file.size for file in request.files)])
    what, total, saved = f"tokenizing {request.name}", int(before[-1]), state.num_tokens
    with contextlib.ExitStack() as files:
        writer = _Writer(request, folder, state, files)
        for group in _groups(request, state.next_file, state.next_record):
            state = writer.add(group)
            at, record = group[-1]
            done = min(int(before[at]) + record.offset, total)
            progress.work(what, done, total + 1, f"{state.num_tokens:,} tokens")
            if state.num_tokens >= saved + save_tokens:
                saved = state.num_tokens
                writer.save()
        writer.save(complete=True)
    progress.work(what, total + 1, total + 1, f"{state.num_tokens:,} tokens")


def _groups(
    request: CacheRequest, first_file: int, first_record: int
) -> Iterator[list[tuple[int, Record]]]:
    """Groups of records, each with the index of its file."""
    group: list[tuple[int, Record]] = []
    letters = 0
    for at in range(first_file, len(request.files)):
        start = first_record if at == first_file else 0
        for record in read_records(request.files[at], request.source, start):
            group.append((at, record))
            letters += _num_letters(record)
            if len(group) >= _GROUP_RECORDS or letters >= _GROUP_LETTERS:
                yield group
                group, letters = [], 0
    if group:
        yield group


def _num_letters(record: Record) -> int:
    """About the size of a record's text."""
    if record.content is None or isinstance(record.content, str):
        return len(record.content or "")
    return 1024 + sum(len(message.get("content") or "") for message in record.content)


class _Writer:
    def __init__(
        self,
        request: CacheRequest,
        folder: Path,
        state: CacheState,
        files: contextlib.ExitStack,
    ):
        self._request, self._folder, self._state = request, folder, state
        self._files = {}
        self._file_checksums = {}  # of what is written to the files, saved or not
        for name, (count, dtype) in state.layout(request).items():
            file = files.enter_context((folder / name).open("ab"))
            file.truncate(count * np.dtype(dtype).itemsize)
            checksum = state.file_checksums.get(name, 0)
            _read_back(folder / name, checksum)
            self._files[name], self._file_checksums[name] = file, checksum

    def add(self, group: Sequence[tuple[int, Record]]) -> CacheState:
        """Tokenizes a group of records, and returns the state after it."""
        texts: list[str | RenderedChat] = []
        keys, problems, num_empty = [], [], 0
        unread = dict.fromkeys(self._state.unread)
        rendered = self._rendered(group)
        for number, (at, record) in enumerate(group):
            record_texts, problem = self._texts_of(
                self._request.files[at], record, rendered.get(number)
            )
            if problem is not None:
                problems.append(problem)
            elif not any(map(_plain, record_texts)):
                num_empty += 1
            else:
                texts += record_texts
                keys += [_key(record)] * len(record_texts)
                assert record.document is not None
                unread |= dict.fromkeys(self._unread(record.document))
        documents = _encode(self._request.tokenizer, texts)
        lengths = [len(tokens) for tokens, _ in documents]
        arrays = {
            "tokens": (tokens for tokens, _ in documents),
            "lengths": [np.array(lengths, np.int64)],
            "keys": [np.array(keys, np.uint64)],
            "counted": (
                np.ones(len(tokens), bool) if counted is None else counted
                for tokens, counted in documents
            ),
        }
        for name, file in self._files.items():
            for array in arrays[name]:
                content = array.tobytes()
                file.write(content)
                self._file_checksums[name] = zlib.crc32(
                    content, self._file_checksums[name]
                )
        chats = [text for text in texts if isinstance(text, RenderedChat)]
        state, (at, record) = self._state, group[-1]
        self._state = dataclasses.replace(
            state,
            next_file=at,
            next_record=record.number + 1,
            num_documents=state.num_documents + len(documents),
            num_tokens=state.num_tokens + sum(lengths),
            num_empty=state.num_empty + num_empty,
            num_malformed=state.num_malformed + len(problems),
            problems=[*state.problems, *problems][:_PROBLEMS_KEPT],
            unread=[*unread][:_UNREAD_KEPT],
            num_open=state.num_open + sum(chat.is_open for chat in chats),
            num_unmarked_ends=state.num_unmarked_ends
            + sum(chat.has_unmarked_end for chat in chats),
            file_checksums=dict(self._file_checksums),
        )
        return self._state

    def save(self, *, complete: bool = False) -> None:
        """Saves the state, once everything before it is on the disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        if complete:
            self._complete()
        with replaced_whole(self._folder / _STATE) as path:
            path.write_text(json.dumps(dataclasses.asdict(self._state), indent=2))

    def _complete(self) -> None:
        """Compares all files with what was written, writes the checksums of their
        blocks, and sets what the last state says of them.
        """
        digest, checksums = hashlib.sha256(), []
        for name, checksum in self._file_checksums.items():
            file_digest, block_checksums = _read_back(self._folder / name, checksum)
            digest.update(file_digest)
            checksums += block_checksums
        content = np.array(checksums, np.uint32).tobytes()
        with replaced_whole(self._folder / _CHECKSUMS) as path:
            path.write_bytes(content)
        self._state = dataclasses.replace(
            self._state,
            fingerprint=digest.hexdigest(),
            checksum=zlib.crc32(content),
            complete=True,
        )

    def _rendered(
        self, group: Sequence[tuple[int, Record]]
    ) -> dict[int, list[RenderedChat] | ChatTemplateError | DataError]:
        """The texts, or the error, of each record of the group that has a chat."""
        chats = {}
        for number, (_, record) in enumerate(group):
            if record.document is not None and not isinstance(record.content, str):
                chats[number] = record.content, self._variables(record.document)
        if not chats:
            return {}
        template = self._request.tokenizer.chat_template
        results = template.render_all(
            [*chats.values()], answers=self._request.answers_only
        )
        return dict(zip(chats, results, strict=False))

    def _texts_of(
        self,
        file: SourceFile,
        record: Record,
        rendered: list[RenderedChat] | ChatTemplateError | DataError | None,
    ) -> tuple[Sequence[str | RenderedChat], str | None]:
        """The texts to tokenize, or why there are none."""
        place, problem = place_of(file, record.number), record.problem
        texts: Sequence[str | RenderedChat] = []
        if isinstance(rendered, DataError):
            raise DataError(f"{place}: {rendered}")
        if isinstance(rendered, ChatTemplateError):
            problem = f"{place} does not fit the chat template: {rendered}"
        elif rendered is not None:
            texts = rendered
        elif isinstance(record.content, str):
            texts = [record.content]
        try:
            "".join(map(_plain, texts)).encode("utf-8")
        except UnicodeEncodeError:
            problem = f"{place} has half a surrogate pair, which is not valid Unicode"
        if problem is not None and self._request.on_malformed == "error":
            raise DataError(
                f"{problem}. Fix it, or skip such records with data.on_malformed: skip."
            )
        return texts, problem

    def _variables(self, document: Document) -> dict[str, Any]:
        """The chat template's variables for a chat."""
        return {**self._request.source.chat_template_kwargs, **document.variables}

    def _unread(self, document: Document) -> Iterator[str]:
        """Keys of a record that neither this library nor the chat template reads."""
        yield from document.unread
        if isinstance(document.content, str):
            return
        words = self._request.tokenizer.chat_template.words
        yield from (
            f"{name}, for the chat template"
            for name in self._variables(document)
            if name not in words
        )
        for message in document.content:
            for name, value in message.items():
                if value is not None and name not in words:
                    yield f"{name} of messages"


def _plain(text: str | RenderedChat) -> str:
    return text if isinstance(text, str) else text.text


def _encode(
    tokenizer: Tokenizer, texts: Sequence[str | RenderedChat]
) -> list[tuple[Tokens, Counted | None]]:
    """The documents of texts and chats, in their order; each kind is tokenized in one
    call.
    """
    plain = iter(
        tokenizer.encode_documents([text for text in texts if isinstance(text, str)])
    )
    chats = iter(
        tokenizer.encode_chats(
            [text for text in texts if isinstance(text, RenderedChat)]
        )
    )
    return [
        (next(plain), None) if isinstance(text, str) else next(chats) for text in texts
    ]


def _key(record: Record) -> int:
    """A hash of a document that depends on nothing but its text or messages."""
    content = (
        record.content
        if isinstance(record.content, str)
        else json.dumps(record.content, default=str)
    )
    return int.from_bytes(hashlib.sha256(content.encode("utf-8")).digest()[:8], "big")


def _open(request: CacheRequest, folder: Path) -> CachedTokens:
    state = _read_state(folder, request)
    if state.num_documents == 0:
        raise DataError(
            f"The {len(request.files)} files of {request.name} have no text:"
            f" {state.num_empty} documents are empty and {state.num_malformed} can't be"
            " read." + "".join(f" First: {problem}." for problem in state.problems[:1])
        )
    checksums = np.fromfile(folder / _CHECKSUMS, np.uint32)
    blocks, arrays = state.num_blocks(request), {}
    for name, (count, dtype) in state.layout(request).items():
        of_blocks, checksums = np.split(checksums, [blocks[name]])
        limit = request.tokenizer.vocab_size if name == "tokens" else None
        arrays[name] = CheckedArray(
            folder / name, dtype, of_blocks, count=count, limit=limit
        )
    lengths = np.array(arrays["lengths"])
    documents = TokenizedDocuments(
        arrays["tokens"],
        arrays.get("counted"),
        np.cumsum(lengths) - lengths,
        lengths,
        state.fingerprint,
    )
    return CachedTokens(documents, np.array(arrays["keys"]), state)
