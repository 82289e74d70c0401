"""Finds the files of paths, globs, folders and URLs, each with an identity and a version."""

import errno
import hashlib
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from ..._messages import shortened
from ..errors import DataError, without_credentials

# Installed packages differ between machines, tests contain tables of data, pydoc_data is generated.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"})

_WEB = ("http://", "https://")
_FILE = "file://"

_USER = re.compile(r"(?<=://)[^/@]*@")


@dataclass(frozen=True)
class SourceFile:
    """A file to read.

    Attributes:
        url: its address, for fsspec.
        name: its path below the folder or the fixed part of the glob by which it was found.
        size: stored bytes; 0 if unknown.
        version: changes when the contents do.
        identity: the same for all paths, links and URLs of the file.
        split_name: decides which of its documents are held out, and does not change when the folder moves:
            `name`, or the name by which another source found the same file first; empty if none is.
    """

    url: str
    name: str
    size: int
    version: str
    identity: str
    split_name: str

    @property
    def place(self) -> str:
        """Its address without credentials, for messages and saved files."""
        shown = without_credentials(self.url).removeprefix(_FILE)
        return shown.encode("utf-8", "replace").decode("utf-8")

    @property
    def local_path(self) -> str | None:
        """Its path, if it is on this machine."""
        path = self.url.removeprefix(_FILE)
        return path if path.startswith("/") else None


def find_files(
    paths: Sequence[str], key: str, skipped: Callable[[str], None] = lambda reason: None
) -> tuple[SourceFile, ...]:
    """The files that `paths` match, each once, sorted by name.

    A path that exists on this machine is that file or folder, even with letters of a glob in it. Hidden files
    and folders are left out of folders and globs. Broken links, pipes and the like are skipped.

    Args:
        paths: files, globs or folders; local or URLs.
        key: the config key of the paths, for errors.
        skipped: called with what was skipped and why.

    Raises:
        DataError: a path matches no file, or its file system can't be opened.
    """
    found: dict[str, SourceFile] = {}
    for path in paths:
        shown, passed = without_credentials(path), list[str]()
        try:
            files = list(_files_of(path, passed.append))
        except Exception as error:  # file systems raise anything
            hidden = "://" in path  # the original error may show credentials
            raise DataError(f"Can't look for the files of {shown!r} in {key}: {error}") from (
                None if hidden else error
            )
        if not files:
            reason = f" ({passed[0]})" if passed else ""
            raise DataError(
                f"{shown!r} in {key} matches no file{reason}. Give a file that exists, a folder with files, "
                f"or a glob such as texts/**/*.txt."
            )
        if passed:
            reasons = shortened(passed, most=3).encode("utf-8", "replace").decode("utf-8")
            skipped(f"skipped in {shown!r} of {key}: {reasons}")
        for file in files:
            found.setdefault(file.identity, file)
    return tuple(sorted(found.values(), key=lambda file: (file.name, file.url)))


def standard_library_files() -> tuple[SourceFile, ...]:
    """The Python sources of the running interpreter's standard library, without its tests."""
    root = sysconfig.get_path("stdlib")
    sources = (
        place
        for place in _below(root, ())
        if place.endswith(".py") and not _NOT_LIBRARY.intersection(place.removeprefix(root).split("/"))
    )
    return tuple(sorted(_local_files(sources, root, lambda reason: None), key=lambda file: file.name))


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
    """The files of a glob or a URL, from a file system of fsspec."""
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
    """All files in a folder. Links to folders are followed, unless they lead to a folder above."""
    status = os.stat(folder)
    own = (status.st_dev, status.st_ino)
    if own in above:
        return
    # Links last: a file that is found twice keeps its name without links.
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
            skip(f"{place} is a broken link")
            continue
        if stat.S_ISREG(status.st_mode):
            url, name = _FILE + place, place.removeprefix(root).lstrip("/")
            version = f"{status.st_size} bytes, modified {status.st_mtime_ns // 1000} us"
            yield SourceFile(url, name, status.st_size, version, _local_identity(url, status), name)
        else:
            skip(f"{place} is a pipe, a socket or a device")


def _local_identity(url: str, status: os.stat_result) -> str:
    # Some file systems have no inode numbers.
    return f"{status.st_dev}:{status.st_ino}" if status.st_ino else os.path.realpath(url.removeprefix(_FILE))


def _visible(files: Iterable[SourceFile]) -> Iterator[SourceFile]:
    return (file for file in files if not any(part.startswith(".") for part in file.name.split("/")))


def _describe(filesystem: Any, place: str, root: str) -> SourceFile:
    """A file that is not on this machine, or is accessed through another protocol."""
    information = filesystem.info(place)
    size = information.get("size") or 0
    url = filesystem.unstrip_protocol(place)
    name = place.removeprefix(root).lstrip("/") if root else place
    told = filesystem.ukey(without_credentials(place))
    if place.startswith(_WEB):
        # The query is not part of the file's name and may hold a secret.
        name, _, query = name.partition("?")
        told += f" {information.get('ETag', '')} {hashlib.sha256(query.encode()).hexdigest()[:8]}"
    return SourceFile(url, name, size, f"{size} bytes, {told}", _identity(url), name)


def _identity(url: str) -> str:
    """One text for all addresses of a file."""
    last = url.rpartition("::")[2]  # the rest says how the file is accessed
    if last.startswith(_FILE) and os.path.exists(last.removeprefix(_FILE)):
        return _local_identity(last, os.stat(last.removeprefix(_FILE)))
    inside = url.removesuffix(last) if url.startswith(("zip:", "tar:", "libarchive:")) else ""
    return inside + _USER.sub("", last)
