"""A cache of tokenized text: one folder of shards for each version of the files and tokenizer."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt32

from ..._files import replaced_whole
from ..errors import DataError
from ..progress import Progress
from .chat_template import ChatTemplateError, RenderedChat
from .files import SourceFile
from .records import Message, Record, RecordFormat, place_of, read_records
from .tokenized import TokenizedDocuments, damaged_cache, load_array
from .tokenizers import Counted, Tokenizer, Tokens

_FORMAT = 3  # of the files of a cache
_COMPLETE, _LOCK, _SUMMARY = "complete.json", ".lock", "shard.json"
_TOKENS, _COUNTED, _LENGTHS, _KEYS = "tokens.npy", "counted.npy", "lengths.npy", "keys.npy"
_GROUP_RECORDS, _GROUP_LETTERS = 256, 2**20  # tokenized at once
_PROBLEMS_KEPT = 5


@dataclass(frozen=True)
class CacheRequest:
    """The files to tokenize, in the order of their documents, and how.

    The name of the cache's folder begins with `name`, that of the source.
    """

    name: str
    files: tuple[SourceFile, ...]
    how: RecordFormat
    tokenizer: Tokenizer
    answers_only: bool = False
    on_malformed: Literal["error", "skip"] = "error"

    def identity(self) -> dict[str, Any]:
        """Everything that the tokens depend on; the name of the cache's folder has a hash of it."""
        return {
            "format": _FORMAT,
            "tokenizer": self.tokenizer.fingerprint,
            "read as": dataclasses.asdict(self.how),
            "answers only": self.answers_only,
            "on malformed": self.on_malformed,
            "files": [
                {
                    "url": file.place,
                    "name": file.name,
                    "split by": file.split_name,
                    "size": file.size,
                    "version": file.version,
                }
                for file in self.files
            ],
        }


@dataclass(frozen=True)
class ShardSummary:
    """The contents of a shard, what was left out of it, and the file and record where the next one begins."""

    next_file: int = 0
    next_record: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_malformed: int = 0
    problems: Sequence[str] = ()
    fingerprint: str = ""
    has_counted: bool = False


@dataclass(frozen=True)
class CachedTokens:
    """The documents of a cache, a 32-bit hash of each one's file name and place in the file, and counts."""

    documents: TokenizedDocuments
    keys: UInt32[np.ndarray, " documents"]
    counts: ShardSummary


def open_token_cache(
    request: CacheRequest, cache_dir: Path, progress: Progress, *, shard_tokens: int = 2**24
) -> CachedTokens:
    """The tokens of the request's files, from the cache or tokenized now.

    Tokens are written in shards. After a kill the next call resumes after the last whole shard, with the
    same result. One process at a time builds; others wait. The folder's name has a hash of the tokenizer and
    of the files' addresses, sizes and times (or other versions of their file system), so that any change
    builds a new cache beside the earlier ones.

    Args:
        request: what to tokenize.
        cache_dir: a local folder; the cache is a folder in it.
        progress: shows the progress.
        shard_tokens: tokens of a shard, which are in memory until it is written.

    Raises:
        DataError: a file or a record can't be read, the cache can't be written or is damaged, or there is no
            text at all.
    """
    identity = json.dumps(request.identity(), indent=2)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = cache_dir.expanduser() / f"{request.name}-{digest}"
    try:
        if not (folder / _COMPLETE).exists():
            with _locked(folder):
                if not (folder / _COMPLETE).exists():
                    _build(request, folder, progress, shard_tokens)
        return _open(request, folder)
    except OSError as error:  # errors of reading are DataErrors already
        raise DataError(
            f"Can't write or read the token cache {folder}: {error.strerror or error}. Set "
            f"data.cache_dir to a local folder that can be written and has free space."
        ) from error
    finally:
        progress.stop()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Waits until no other process builds here. The system releases the lock of a process that dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(request: CacheRequest, folder: Path, progress: Progress, shard_tokens: int) -> None:
    count = _write_shards(request, folder, progress, shard_tokens)
    with replaced_whole(folder / _COMPLETE) as path:
        path.write_text(json.dumps({**request.identity(), "shards": count}), encoding="utf-8")


def _write_shards(request: CacheRequest, folder: Path, progress: Progress, shard_tokens: int) -> int:
    """Tokenizes what is not in a shard yet, and returns the number of shards."""
    finished = _read_summaries(folder)
    start = finished[-1] if finished else ShardSummary()
    shard = _Shard(request)
    before = np.concatenate([[0], np.cumsum([file.size for file in request.files])])
    what, total = f"tokenizing {request.name}", int(before[-1])
    tokens, index = sum(summary.num_tokens for summary in finished), len(finished)
    for group in _groups(request, start.next_file, start.next_record):
        shard.add(group)
        at, record = group[-1]
        done = min(int(before[at]) + record.offset, total)
        progress.work(what, done, total + 1, f"{tokens + shard.num_tokens:,} tokens")
        if shard.num_tokens >= shard_tokens:
            tokens += shard.num_tokens
            shard.write(_shard_folder(folder, index))
            shard, index = _Shard(request), index + 1
    if not shard.is_empty:
        tokens += shard.num_tokens
        shard.write(_shard_folder(folder, index))
        index += 1
    progress.work(what, total + 1, total + 1, f"{tokens:,} tokens")
    return index


def _groups(request: CacheRequest, first_file: int, first_record: int) -> Iterator[list[tuple[int, Record]]]:
    """Groups of records, each with the index of its file."""
    group: list[tuple[int, Record]] = []
    letters = 0
    for at in range(first_file, len(request.files)):
        start = first_record if at == first_file else 0
        for record in read_records(request.files[at], request.how, start):
            group.append((at, record))
            letters += len(record.content) if isinstance(record.content, str) else 1024
            if len(group) >= _GROUP_RECORDS or letters >= _GROUP_LETTERS:
                yield group
                group, letters = [], 0
    if group:
        yield group


class _Shard:
    """Collects the documents of a shard."""

    def __init__(self, request: CacheRequest):
        self._request = request
        self._documents: list[tuple[Tokens, Counted | None]] = []
        self._keys: list[int] = []
        self._next = (0, 0)
        self._num_empty = 0
        self._problems: list[str] = []
        self.num_tokens = 0

    @property
    def is_empty(self) -> bool:
        return not (self._documents or self._num_empty or self._problems)

    def add(self, group: Sequence[tuple[int, Record]]) -> None:
        """Tokenizes a group of records."""
        texts: list[str | RenderedChat] = []
        for at, record in group:
            text = self._text_of(self._request.files[at], record)
            if text == "" or (isinstance(text, RenderedChat) and not text.text):
                self._num_empty += 1
            elif text is not None:
                texts.append(text)
                self._keys.append(_key(self._request, at, record))
        documents = _encode(self._request.tokenizer, texts)
        self._documents += documents
        self.num_tokens += sum(len(tokens) for tokens, _ in documents)
        at, record = group[-1]
        self._next = (at, record.number + 1)

    def write(self, folder: Path) -> None:
        """Writes the collected documents as a shard, which exists only when all of it is on the disk."""
        tokens, counted = zip(*self._documents, strict=True) if self._documents else ((), ())
        arrays = {
            _TOKENS: np.concatenate(tokens) if tokens else np.zeros(0, np.uint16),
            _LENGTHS: np.array([len(own) for own in tokens], dtype=np.uint32),
            _KEYS: np.array(self._keys, dtype=np.uint32),
        }
        if any(own is not None for own in counted):
            both = zip(tokens, counted, strict=True)
            marks = [np.ones(len(own), bool) if marked is None else marked for own, marked in both]
            arrays[_COUNTED] = np.concatenate(marks)
        raw = b"".join(arrays[name].tobytes() for name in sorted(arrays))
        summary = ShardSummary(
            *self._next,
            num_documents=len(tokens),
            num_tokens=self.num_tokens,
            num_empty=self._num_empty,
            num_malformed=len(self._problems),
            problems=self._problems[:_PROBLEMS_KEPT],
            fingerprint=hashlib.sha256(raw).hexdigest(),
            has_counted=_COUNTED in arrays,
        )
        with replaced_whole(folder) as unfinished:
            unfinished.mkdir(parents=True)
            for name, array in arrays.items():
                np.save(unfinished / name, array)
            (unfinished / _SUMMARY).write_text(json.dumps(dataclasses.asdict(summary), indent=2))
            for path in unfinished.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def _text_of(self, file: SourceFile, record: Record) -> str | RenderedChat | None:
        """The text to tokenize, or None after counting a problem."""
        place, problem, text = place_of(file, record.number), record.problem, record.content or ""
        if not isinstance(text, str):
            try:
                text = _render(self._request, text)
            except ChatTemplateError as error:
                problem, text = f"{place} does not fit the chat template: {error}", ""
        if problem is None:
            try:
                (text if isinstance(text, str) else text.text).encode("utf-8")
                return text
            except UnicodeEncodeError:
                problem = f"{place} has half a surrogate pair, which is not valid Unicode"
        if self._request.on_malformed == "error":
            raise DataError(f"{problem}. Fix it, or skip such records with data.on_malformed: skip.")
        self._problems.append(problem)
        return None


def _render(request: CacheRequest, messages: Sequence[Message]) -> RenderedChat:
    template = request.tokenizer.chat_template
    if request.answers_only:
        return template.render_with_answers(messages)
    return RenderedChat(template.render(messages))


def _encode(tokenizer: Tokenizer, texts: Sequence[str | RenderedChat]) -> list[tuple[Tokens, Counted | None]]:
    """The documents of texts and chats, in their order; each kind is tokenized in one call."""
    plain = iter(tokenizer.encode_documents([text for text in texts if isinstance(text, str)]))
    chats = iter(tokenizer.encode_chats([text for text in texts if isinstance(text, RenderedChat)]))
    return [(next(plain), None) if isinstance(text, str) else next(chats) for text in texts]


def _key(request: CacheRequest, at: int, record: Record) -> int:
    """A hash of a document that depends neither on the location of its folder nor on its other files."""
    name = request.files[at].split_name
    if not name:
        return 2**32 - 1  # above every fraction
    place = name if record.number == 0 else f"{name}:{record.number}"
    return int.from_bytes(hashlib.sha256(place.encode("utf-8", "surrogateescape")).digest()[:4], "big")


def _open(request: CacheRequest, folder: Path) -> CachedTokens:
    summaries = _read_summaries(folder)
    try:
        count = json.loads((folder / _COMPLETE).read_bytes())["shards"]
    except (ValueError, KeyError, TypeError):
        raise damaged_cache(folder / _COMPLETE, folder) from None
    if len(summaries) != count:
        raise damaged_cache(_shard_folder(folder, len(summaries)), folder)
    numbers = ("num_documents", "num_tokens", "num_empty", "num_malformed")
    totals: dict[str, Any] = {name: sum(getattr(summary, name) for summary in summaries) for name in numbers}
    problems = [problem for summary in summaries for problem in summary.problems][:_PROBLEMS_KEPT]
    counts = ShardSummary(**totals, problems=problems)
    if counts.num_documents == 0:
        raise DataError(
            f"The {len(request.files)} files of {request.name} have no text: {counts.num_empty} documents "
            f"are empty and {counts.num_malformed} can't be read."
            + "".join(f" First: {problem}." for problem in counts.problems[:1])
        )
    shards = [(_shard_folder(folder, index), own) for index, own in enumerate(summaries) if own.num_documents]
    lengths, keys = (
        np.concatenate([load_array(shard / name) for shard, _ in shards]) for name in (_LENGTHS, _KEYS)
    )
    lengths = lengths.astype(np.int64)
    documents = TokenizedDocuments(
        shards=tuple(shard / _TOKENS for shard, _ in shards),
        counted=tuple(shard / _COUNTED if own.has_counted else None for shard, own in shards),
        shard_starts=np.cumsum([0, *(own.num_tokens for _, own in shards)]),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        fingerprint=hashlib.sha256("".join(own.fingerprint for own in summaries).encode()).hexdigest(),
    )
    return CachedTokens(documents, keys, counts)


def _read_summaries(folder: Path) -> list[ShardSummary]:
    found = []
    while (shard := _shard_folder(folder, len(found))).exists():
        try:
            found.append(ShardSummary(**json.loads((shard / _SUMMARY).read_bytes())))
        except (FileNotFoundError, ValueError, TypeError):
            raise damaged_cache(shard / _SUMMARY, folder) from None
    return found


def _shard_folder(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}"
