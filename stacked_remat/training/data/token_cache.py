"""Caches of tokenized text, each in a folder: of a large file, or of some small ones.

The name of a folder has a hash of the files, the tokenizer and how they are read. Its
arrays are appended to files of raw numbers. `state.json` says how much of them is
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
from jaxtyping import Bool, UInt64

from ..._files import replaced_whole
from ..data_config import SourceConfig
from ..errors import DataError
from ..progress import ConsoleProgress
from .batch_stream import ProcessShare
from .checked_array import CheckedArray, blocks_of, num_blocks
from .document_places import DocumentPlaces
from .encoding import Counts, EncodedRecords, RecordEncoder
from .encoding_processes import EncodingProcesses, Group
from .files import SourceFile
from .packing import TokenizedDocuments
from .records import read_records
from .tokenizers import Tokenizer

_FORMAT = 10  # of the files of a cache
_STATE = "state.json"
_LOCK = ".lock"
_CHECKSUMS = "checksums"
_GROUP_RECORDS, _GROUP_BYTES = 256, 2**18  # tokenized at once
_LARGE_FILE = 2**22  # bytes of a file that has a cache of its own
_FILES_TOGETHER = 256  # about as many smaller ones have one together
_READ_AS = ("format", "text_key", "messages_key", "weight_key", "chat_template_kwargs")


@dataclass(frozen=True)
class CacheRequest:
    """The files to tokenize, in the order of their documents, and how."""

    name: str  # of the source, with which that of the cache's folder begins
    files: tuple[SourceFile, ...]
    source: SourceConfig
    tokenizer: Tokenizer
    on_malformed: Literal["error", "skip"] = "error"

    @property
    def encoder(self) -> RecordEncoder:
        """Makes documents of records."""
        return RecordEncoder(self.source, self.tokenizer, self.on_malformed)

    @property
    def size(self) -> int:
        """Stored bytes of the files."""
        return sum(file.size for file in self.files)

    def parts(self) -> list["CacheRequest"]:
        """Requests of the same documents, in their order, each with a cache of its own:
        one for each large file, and for each run of small ones.

        Where a run ends depends on the name of its last file alone, so that a file that
        is added or removed changes the cache of one run.
        """
        runs: list[list[SourceFile]] = [[]]
        for file in self.files:
            is_large = file.size >= _LARGE_FILE
            if is_large and runs[-1]:
                runs.append([])
            runs[-1].append(file)
            # By its name and not by its place in the list, which a new file before it
            # would shift.
            hashed = hashlib.sha256(file.name.encode("utf-8", "replace")).digest()
            if is_large or int.from_bytes(hashed) % _FILES_TOGETHER == 0:
                runs.append([])
        return [dataclasses.replace(self, files=tuple(run)) for run in runs if run]

    def folder(self, cache_dir: Path) -> Path:
        """The folder of the request's cache."""
        identity = json.dumps(self.identity()).encode()
        digest = hashlib.sha256(identity).hexdigest()[:16]
        name = re.sub(r"[^\w-]", "_", self.name)
        return cache_dir.expanduser() / f"{name}-{digest}"

    def identity(self) -> dict[str, Any]:
        """Everything that the tokens depend on; the name of the cache's folder has a
        hash of it.
        """
        return {
            "format": _FORMAT,
            "tokenizer": self.tokenizer.fingerprint,
            # Not its weight or paths: the same files in another mixture have the same
            # cache.
            "read as": {name: getattr(self.source, name) for name in _READ_AS},
            "answers only": self.encoder.answers_only,
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
    counts: Counts = field(default_factory=Counts)
    fingerprint: str = ""
    # The CRC-32 of what was written to each file of the layout.
    file_checksums: Mapping[str, int] = field(default_factory=dict)
    checksum: int = 0  # of the file of checksums
    complete: bool = False

    def layout(self, request: CacheRequest) -> dict[str, tuple[int, Any]]:
        """The files of a cache, with the number and the dtype of their entries."""
        num_documents = self.counts.num_documents
        num_tokens = self.counts.num_tokens
        files: dict[str, tuple[int, Any]] = {
            "tokens": (num_tokens, request.tokenizer.dtype),
            "lengths": (num_documents, np.int64),
            "keys": (num_documents, np.uint64),
            # Where a document comes from: the index of its file among the request's,
            # and the records before its own in that file.
            "files": (num_documents, np.uint32),
            "records": (num_documents, np.uint64),
        }
        if request.encoder.answers_only:
            files["counted"] = (num_tokens, bool)
        if request.source.weight_key is not None:
            files["weights"] = (num_documents, np.float32)
        return files

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
    counts: Counts

    def select(self, chosen: Bool[np.ndarray, " documents"]) -> "CachedTokens":
        """The documents for which `chosen` is True, in the same order."""
        documents = self.documents.select(chosen)
        return CachedTokens(documents, self.keys[chosen], self.counts)


def open_token_cache(
    request: CacheRequest,
    cache_dir: Path,
    progress: ConsoleProgress,
    processes: EncodingProcesses,
    *,
    save_tokens: int = 2**24,
) -> CachedTokens:
    """The tokens of the request's files, from their caches or tokenized now.

    After a kill the next call resumes where the state was last saved, which is after
    every `save_tokens`, with the same result. One process at a time builds a cache;
    others wait.
    """
    parts = request.parts()
    _build_all(request, parts, cache_dir, progress, processes, save_tokens)
    found = []
    for part in parts:
        with _usable(folder := part.folder(cache_dir)):
            found.append(_open(part, folder))
    counts = sum((part.counts for part in found), start=Counts())
    if counts.num_documents == 0:
        raise _error_without_text(request, counts)
    documents = TokenizedDocuments.joined([part.documents for part in found])
    keys = np.concatenate([part.keys for part in found])
    return CachedTokens(documents, keys, counts)


def _error_without_text(request: CacheRequest, counts: Counts) -> DataError:
    """The error for files of a source that have no document."""
    count = len(request.files)
    where = request.files[0].place if count == 1 else f"its {count} files"
    reasons = []
    if counts.num_empty:
        reasons.append(f"{counts.num_empty} records have none, or the weight 0")
    if counts.num_malformed:
        reasons.append(f"{counts.num_malformed} can't be read")
    why = " and ".join(reasons) or "no records"
    first = "".join(f" First: {problem}." for problem in counts.problems[:1])
    return DataError(f"{request.name}: there is no text in {where}: {why}.{first}")


def build_share(
    request: CacheRequest,
    cache_dir: Path,
    progress: ConsoleProgress,
    processes: EncodingProcesses,
    share: ProcessShare,
) -> None:
    """Builds the caches that fall to one of several processes, each of which builds
    others.
    """
    own = request.parts()[share.index :: share.count]
    _build_all(request, own, cache_dir, progress, processes)


def _build_all(
    request: CacheRequest,
    parts: Sequence[CacheRequest],
    cache_dir: Path,
    progress: ConsoleProgress,
    processes: EncodingProcesses,
    save_tokens: int = 2**24,
) -> None:
    """Builds those of the caches that are not complete."""
    # Found before any is built, so that the bar shows the progress in all of them.
    missing = []
    for part in parts:
        with _usable(folder := part.folder(cache_dir)):
            if not _read_state(folder, part).complete:
                missing.append(part)
    build = _Build(request.name, missing, progress, processes, save_tokens)
    try:
        for part in missing:
            with _usable(folder := part.folder(cache_dir)):
                folder.mkdir(parents=True, exist_ok=True)
                with (folder / _LOCK).open("w") as file:
                    # Until this process ends, at the latest
                    fcntl.flock(file, fcntl.LOCK_EX)
                    build.add(part, folder)
    finally:
        progress.stop()


@contextlib.contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Turns errors of the system into one that names the folder of a cache."""
    try:
        yield
    except OSError as error:  # errors of reading texts are DataErrors already
        raise DataError(
            f"Can't write or read the token cache {folder}: {error.strerror or error}."
            " Set data.cache_dir to a local folder that can be written and has free"
            " space."
        ) from error


def _read_state(folder: Path, request: CacheRequest) -> CacheState:
    path = folder / _STATE
    if not path.exists():
        return CacheState()
    try:
        saved = json.loads(path.read_bytes())
        state = CacheState(**saved | {"counts": Counts(**saved["counts"])})
        _check_types(state)
        _check_types(state.counts)
        for name, (count, dtype) in state.layout(request).items():
            path = folder / name
            if path.stat().st_size < count * np.dtype(dtype).itemsize:
                raise ValueError
        # The checksums of blocks are themselves checked here, and the blocks when they
        # are read: to read all of a large cache at every start would take minutes.
        if state.complete:
            path = folder / _CHECKSUMS
            if zlib.crc32(path.read_bytes()) != state.checksum:
                raise ValueError
    # Brackets within each other by the thousand exceed Python's recursion limit
    except (
        FileNotFoundError,
        ValueError,
        LookupError,
        TypeError,
        RecursionError,
    ) as error:
        raise _unusable(path, "damaged" if path.exists() else "missing") from error
    return state


def _unusable(path: Path, problem: str) -> DataError:
    """The error for a file of a cache."""
    return DataError(
        f"{path} is {problem}. Delete the token cache {path.parent}, and the next run"
        " tokenizes its text again."
    )


def _check_types(saved: CacheState | Counts) -> None:
    """Raises a TypeError for an entry that no state is saved with."""
    for entry in dataclasses.fields(saved):
        value = getattr(saved, entry.name)
        usual = getattr(type(saved)(), entry.name)
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
    digest = hashlib.sha256()
    block_checksums = []
    file_checksum = 0
    with path.open("rb") as file:
        for block in blocks_of(file):
            digest.update(block)
            block_checksums.append(zlib.crc32(block))
            file_checksum = zlib.crc32(block, file_checksum)
    if file_checksum != checksum:
        raise _unusable(path, "damaged: its bytes are not those that were written")
    return digest.digest(), block_checksums


class _Build:
    """Builds caches of a request one after the other, and shows its progress in all of
    them.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[CacheRequest],
        progress: ConsoleProgress,
        processes: EncodingProcesses,
        save_tokens: int,
    ):
        self._name = name
        self._progress = progress
        self._processes = processes
        self._save_tokens = save_tokens
        self._total = sum(part.size for part in parts)
        self._done = self._tokens = 0  # in the parts before

    def add(self, part: CacheRequest, folder: Path) -> None:
        """Builds the cache of a part, unless another process did meanwhile."""
        # Again, now that the folder is locked: another process may have built it
        # meanwhile.
        state = _read_state(folder, part)
        if not state.complete:
            self._build(part, folder, state)
        self._done += part.size
        # One more at the end, when the last cache is complete
        is_last = self._done == self._total
        if not state.complete:
            self._show(self._done + is_last, self._tokens)

    def _build(self, part: CacheRequest, folder: Path, state: CacheState) -> None:
        before = np.cumsum([0, *(file.size for file in part.files)])
        counts = state.counts
        saved = state.counts.num_tokens
        groups = _groups(part, state.next_file, state.next_record)
        with contextlib.ExitStack() as files:
            writer = _Writer(part, folder, state, files)
            for group, encoded in self._processes.encode(
                part.encoder, groups, self._total
            ):
                counts = writer.add(group, encoded)
                read = int(before[group.files[-1]]) + group.records[-1].offset
                done = min(read, part.size)
                self._show(self._done + done, self._tokens + counts.num_tokens)
                if counts.num_tokens >= saved + self._save_tokens:
                    saved = counts.num_tokens
                    writer.save()
            counts = writer.save(complete=True)
        self._tokens += counts.num_tokens

    def _show(self, done: int, num_tokens: int) -> None:
        what = f"tokenizing {self._name}"
        tokens = f"{num_tokens:,} tokens"
        self._progress.work(what, done, self._total + 1, tokens)


def _groups(
    request: CacheRequest, first_file: int, first_record: int
) -> Iterator[Group]:
    """The records that are not encoded yet, in groups."""
    group = Group([], [])
    size = 0
    for at in range(first_file, len(request.files)):
        start = first_record if at == first_file else 0
        for record in read_records(request.files[at], request.source, start):
            group.files.append(at)
            group.records.append(record)
            size += record.size
            if len(group.records) >= _GROUP_RECORDS or size >= _GROUP_BYTES:
                yield group
                group = Group([], [])
                size = 0
    if group.records:
        yield group


class _Writer:
    def __init__(
        self,
        request: CacheRequest,
        folder: Path,
        state: CacheState,
        files: contextlib.ExitStack,
    ):
        self._request = request
        self._folder = folder
        self._state = state
        self._files = {}
        self._file_checksums = {}  # of what is written to the files, saved or not
        for name, (count, dtype) in state.layout(request).items():
            file = files.enter_context((folder / name).open("ab"))
            # What a killed process wrote after its last save is cut off, and written
            # again.
            file.truncate(count * np.dtype(dtype).itemsize)
            checksum = state.file_checksums.get(name, 0)
            _read_back(folder / name, checksum)
            self._files[name] = file
            self._file_checksums[name] = checksum

    def add(self, group: Group, encoded: EncodedRecords) -> Counts:
        """Writes the documents of a group, and returns the counts after it."""
        of_record = np.array(encoded.records, np.int64)
        numbers = np.array([record.number for record in group.records], np.uint64)
        arrays = {
            "tokens": encoded.tokens,
            "lengths": [np.array([len(own) for own in encoded.tokens], np.int64)],
            "keys": [np.array(encoded.keys, np.uint64)],
            "files": [np.array(group.files, np.uint32)[of_record]],
            "records": [numbers[of_record]],
            "counted": (
                np.ones(len(own), bool) if counted is None else counted
                for own, counted in zip(encoded.tokens, encoded.counted, strict=True)
            ),
            "weights": [np.array(encoded.weights, np.float32)],
        }
        for name, file in self._files.items():
            for array in arrays[name]:
                content = array.tobytes()
                file.write(content)
                self._file_checksums[name] = zlib.crc32(
                    content, self._file_checksums[name]
                )
        self._state = dataclasses.replace(
            self._state,
            next_file=group.files[-1],
            next_record=group.records[-1].number + 1,
            counts=self._state.counts + encoded.counts,
            file_checksums=dict(self._file_checksums),
        )
        return self._state.counts

    def save(self, *, complete: bool = False) -> Counts:
        """Saves the state, once everything before it is on the disk."""
        # The data before the state that says how much of it is whole: a machine that
        # loses power may write them in any order else.
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        if complete:
            self._complete()
        # Replaced at once: a process that is killed leaves the earlier state or this
        # one.
        with replaced_whole(self._folder / _STATE) as path:
            path.write_text(json.dumps(dataclasses.asdict(self._state), indent=2))
        return self._state.counts

    def _complete(self) -> None:
        """Compares all files with what was written, writes the checksums of their
        blocks, and sets what the last state says of them.
        """
        digest = hashlib.sha256()
        checksums = []
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


def _open(request: CacheRequest, folder: Path) -> CachedTokens:
    state = _read_state(folder, request)
    checksums = np.fromfile(folder / _CHECKSUMS, np.uint32)
    blocks = state.num_blocks(request)
    arrays = {}
    for name, (count, dtype) in state.layout(request).items():
        of_blocks, checksums = np.split(checksums, [blocks[name]])
        limit = request.tokenizer.vocab_size if name == "tokens" else None
        arrays[name] = CheckedArray(
            folder / name, dtype, of_blocks, count=count, limit=limit
        )
    # In memory, as every packing reads all of them; tokens and places stay on the disk.
    lengths = np.array(arrays["lengths"])
    places = [file.place for file in request.files]
    documents = TokenizedDocuments(
        arrays["tokens"],
        arrays.get("counted"),
        np.cumsum(lengths) - lengths,
        lengths,
        state.fingerprint,
        np.array(arrays["weights"]) if "weights" in arrays else None,
        DocumentPlaces(places, arrays["lengths"], arrays["files"], arrays["records"]),
    )
    return CachedTokens(documents, np.array(arrays["keys"]), state.counts)
