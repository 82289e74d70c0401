"""From paths, globs, folders and URLs to a sorted list of files, each with what tells its versions apart."""

import errno
import hashlib
import os
import posixpath
import re
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import fsspec
import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from ..credentials import without_credentials
from .data_error import DataError

# Installed packages differ from machine to machine, tests hold tables of data, pydoc_data is one large
# generated text.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"})

_WEB = ("http://", "https://")
_FILE = "file://"

# Two addresses that differ only in such entries of their queries are of one file.
_SECRET = re.compile(r"token|sig|secret|key|pass|pwd|auth|cred|expires|x-(amz|goog|ms)-", re.IGNORECASE)


@dataclass(frozen=True)
class SourceFile:
    """A file to read.

    Attributes:
        url: where it is, for fsspec.
        name: its path below the folder, or the fixed part of the glob, that it was found by.
        size: stored bytes; 0 where the file system does not say.
        version: changes when the contents do.
        identity: that of the file itself, the same however it is spelt: by `..`, by links, by its URL.
        split_name: its documents are split into trained-on and held-out by this name, which does not change
            when the folder moves; `name`, or that by which another source found the same file first.
    """

    url: str
    name: str
    size: int
    version: str
    identity: str
    split_name: str

    @property
    def place(self) -> str:
        """Where it is, for people and for what is saved: without credentials."""
        shown = without_credentials(self.url).removeprefix(_FILE)
        return shown.encode("utf-8", "replace").decode("utf-8")

    @property
    def local_path(self) -> str | None:
        """Its path on this machine, if it is there."""
        path = self.url.removeprefix(_FILE)
        return path if path.startswith("/") else None


def find_files(
    paths: Sequence[str], key: str, skipped: Callable[[str], None] = lambda reason: None
) -> tuple[SourceFile, ...]:
    """The files that `paths` stand for, each once, in the order of their names.

    A path that exists on this machine is that file or folder, whatever letters are in its name. Hidden files,
    and those in hidden folders, are left out of folders and globs. What is there and is no file to read (a
    link to nothing, a pipe) is skipped.

    Args:
        paths: files, globs or folders; local or URLs.
        key: where the paths stand in the config, for errors.
        skipped: is told what was skipped and why.

    Raises:
        DataError: a path that stands for no file, or on a file system that can not be opened.
    """
    found: dict[str, SourceFile] = {}
    for path in paths:
        shown, passed = without_credentials(path), list[str]()
        try:
            files = list(_files_of(path, passed.append))
        except Exception as error:  # file systems raise what they like
            hidden = "://" in path  # the address with its credentials stands in the original
            raise DataError(f"Can't look for the files of {shown!r} in {key}: {error}") from (
                None if hidden else error
            )
        if not files:
            reason = f" ({passed[0]})" if passed else ""
            raise DataError(
                f"{shown!r} in {key} stands for no file{reason}. Give a file that exists, a folder "
                f"with files, or a glob such as texts/**/*.txt."
            )
        if passed:
            more = f" and {len(passed) - 3} more" if len(passed) > 3 else ""
            reasons = ", ".join(passed[:3]).encode("utf-8", "replace").decode("utf-8")
            skipped(f"skipped in {shown!r} of {key}: {reasons}{more}")
        for file in files:
            found.setdefault(file.identity, file)
    return tuple(sorted(found.values(), key=lambda file: (file.name, file.url)))


def standard_library_files() -> tuple[SourceFile, ...]:
    """The Python sources of the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if path.is_file() and not _NOT_LIBRARY.intersection(name.parts):
            files.append(_of_status(str(path), name.as_posix(), path.stat()))
    return tuple(sorted(files, key=lambda file: file.name))


def _files_of(path: str, skip: Callable[[str], None]) -> Iterator[SourceFile]:
    here = os.path.abspath(os.path.expanduser(path.removeprefix(_FILE)))
    try:
        os.lstat(here)
    except (FileNotFoundError, NotADirectoryError):
        yield from _listed(path, skip)
        return
    if os.path.isdir(here):
        yield from _visible(_local_files(_below(here, ()), here, skip))
    else:
        yield from _local_files([here], os.path.dirname(here), skip)


def _listed(path: str, skip: Callable[[str], None]) -> Iterator[SourceFile]:
    """What a file system of fsspec knows of a glob or a URL."""
    filesystem, root = fsspec.core.url_to_fs(path)
    magic = "*[" if root.startswith(_WEB) else "*?["
    if any(letter in root for letter in magic):
        fixed = root[: min(root.find(letter) for letter in magic if letter in root)].rpartition("/")[0]
        places = filesystem.glob(root)
        if isinstance(filesystem, LocalFileSystem):
            yield from _visible(_local_files([p for p in places if not os.path.isdir(p)], fixed, skip))
        else:
            files = [place for place in places if filesystem.isfile(place)]
            yield from _visible(_describe(filesystem, place, fixed) for place in files)
    elif filesystem.isdir(root):
        yield from _visible(_describe(filesystem, place, root) for place in filesystem.find(root))
    elif filesystem.exists(root):
        yield _describe(filesystem, root, root.rpartition("/")[0])


def _below(folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """All in a folder but folders, links to folders followed; those that lead back up are not."""
    status = os.stat(folder)
    own = (status.st_dev, status.st_ino)
    if own in above:
        return
    # Links last: of a file that is there twice, the name is the one without them.
    for entry in sorted(os.scandir(folder), key=lambda entry: (entry.is_symlink(), entry.name)):
        if os.path.isdir(entry.path):  # the entry itself raises for a link to itself
            yield from _below(entry.path, (*above, own))
        else:
            yield entry.path


def _local_files(places: Iterable[str], root: str, skip: Callable[[str], None]) -> Iterator[SourceFile]:
    for place in places:
        try:
            status = os.stat(place)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            skip(f"{place} is a link to nothing")
            continue
        if stat.S_ISREG(status.st_mode):
            yield _of_status(_FILE + place, place.removeprefix(root).lstrip("/"), status)
        else:
            skip(f"{place} is a pipe, a socket or a device")


def _of_status(url: str, name: str, status: os.stat_result) -> SourceFile:
    version = f"{status.st_size} bytes, modified {status.st_mtime_ns // 1000} us"
    return SourceFile(url, name, status.st_size, version, _local_identity(url, status), name)


def _local_identity(url: str, status: os.stat_result) -> str:
    # Some file systems give no numbers to files.
    return f"{status.st_dev}:{status.st_ino}" if status.st_ino else os.path.realpath(url.removeprefix(_FILE))


def _visible(files: Iterable[SourceFile]) -> Iterator[SourceFile]:
    return (file for file in files if not any(part.startswith(".") for part in file.name.split("/")))


def _describe(filesystem: Any, place: str, root: str) -> SourceFile:
    """A file that is not on this machine, or is reached as if it were not."""
    information = filesystem.info(place)
    size = information.get("size") or 0
    url = filesystem.unstrip_protocol(place)
    name = place.removeprefix(root).lstrip("/") if root else place
    told = filesystem.ukey(without_credentials(place))
    if place.startswith(_WEB):
        # What follows is a query: it says nothing of what the file is, and may hold a secret.
        name, _, query = name.partition("?")
        told += f" {information.get('ETag', '')} {hashlib.sha256(query.encode()).hexdigest()[:8]}"
    return SourceFile(url, name, size, f"{size} bytes, {told}", _identity(url), name)


def _identity(url: str) -> str:
    """The same for all addresses of a file."""
    last = url.rpartition("::")[2]  # what comes before it says how the file is reached
    if last.startswith(_FILE) and os.path.exists(last.removeprefix(_FILE)):
        return _local_identity(last, os.stat(last.removeprefix(_FILE)))
    parts = urlsplit(last)
    scheme = "web" if last.startswith(_WEB) else parts.scheme
    host = re.sub(r":(80|443)$", "", parts.netloc.rpartition("@")[2].lower())
    query = [
        entry for entry in parse_qsl(parts.query, keep_blank_values=True) if not _SECRET.search(entry[0])
    ]
    inside = url.removesuffix(last) if url.startswith(("zip:", "tar:", "libarchive:")) else ""
    return f"{inside}{scheme}://{host}{posixpath.normpath('/' + unquote(parts.path))} {sorted(query)}"
