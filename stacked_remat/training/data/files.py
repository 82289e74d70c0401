"""Finds the files of paths, globs, folders and URLs, each with a version."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import fsspec.core

from ..errors import DataError, without_credentials

# Installed packages differ between machines, tests contain tables of data, pydoc_data
# is generated.
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
)

_WEB = ("http://", "https://")
_FILE = "file://"


@dataclass(frozen=True)
class SourceFile:
    """A file to read."""

    url: str  # for fsspec
    # its path below the folder or the fixed part of the glob by which it was found
    name: str
    size: int  # stored bytes; 0 if unknown
    version: str  # changes when the contents do

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


def find_files(paths: Sequence[str], key: str) -> tuple[SourceFile, ...]:
    """The files that paths, globs, folders or URLs match, each once, sorted by name.

    A path that exists on this machine is that file or folder, even with letters of a
    glob in it. Hidden files and folders are left out of folders and globs. Broken
    links, pipes and the like are skipped. A DataError for a path without files names
    the config key of paths.
    """
    found: dict[str, SourceFile] = {}
    for path in paths:
        shown = without_credentials(path)
        is_url = "://" in path.removeprefix(_FILE)
        try:
            files = list(
                _remote_files(path)
                if is_url
                else _local_files(path.removeprefix(_FILE))
            )
        # File systems raise anything, and their errors may show credentials.
        except Exception as error:
            raise DataError(
                f"Can't look for the files of {shown!r} in {key}: {error}"
            ) from (None if is_url else error)
        if not files:
            raise DataError(
                f"{shown!r} in {key} matches no file. Give a file that exists, a folder"
                " with files, or a glob such as texts/**/*.txt."
            )
        for file in files:
            found.setdefault(
                os.path.realpath(file.local_path) if file.local_path else file.url, file
            )
    return tuple(sorted(found.values(), key=lambda file: (file.name, file.url)))


def standard_library_files() -> tuple[SourceFile, ...]:
    """The Python sources of the running interpreter's standard library, without its
    tests.
    """
    sources = (
        file
        for file in _local_files(sysconfig.get_path("stdlib"))
        if file.name.endswith(".py")
    )
    chosen = (
        file for file in sources if not _NOT_LIBRARY.intersection(file.name.split("/"))
    )
    return tuple(sorted(chosen, key=lambda file: file.name))


def _local_files(path: str) -> Iterator[SourceFile]:
    here = os.path.abspath(os.path.expanduser(path))
    # A file may be called `a[1].txt`: what exists is not a glob.
    if os.path.isdir(here):
        root = here
        places = _below(here)
    elif os.path.lexists(here):
        root = os.path.dirname(here)
        places = [here]
    else:
        root = _fixed_part(here, "*?[")
        places = glob.glob(here, recursive=True)
    for place in places:
        if os.path.isfile(place):
            name = place.removeprefix(root).lstrip("/")
            status = os.stat(place)
            version = (
                f"{status.st_size} bytes, modified {status.st_mtime_ns // 1000} us"
            )
            yield SourceFile(_FILE + place, name, status.st_size, version)


def _below(folder: str) -> Iterator[str]:
    """All files in a folder that are not hidden; folders that links lead to are visited
    once.
    """
    seen = set()
    for here, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(filter(_is_visible, folders))
        # A link to a folder above would be followed for ever.
        if (own := os.path.realpath(here)) in seen:
            folders.clear()
            continue
        seen.add(own)
        yield from (os.path.join(here, name) for name in names if _is_visible(name))


def _remote_files(path: str) -> Iterator[SourceFile]:
    """The files of a URL, from a file system of fsspec."""
    filesystem, root = fsspec.core.url_to_fs(path)
    magic = "*[" if root.startswith(_WEB) else "*?["
    if any(letter in root for letter in magic):
        places = [place for place in filesystem.glob(root) if filesystem.isfile(place)]
        root = _fixed_part(root, magic)
    elif filesystem.isdir(root):
        places = filesystem.find(root)
    else:
        places = [root] if filesystem.exists(root) else []
        root = root.rpartition("/")[0]
    files = (_describe(filesystem, place, root) for place in places)
    yield from (file for file in files if all(map(_is_visible, file.name.split("/"))))


def _fixed_part(path: str, magic: str) -> str:
    """The folder above the first part of a glob that has letters with a meaning."""
    first = min(
        (at for at, letter in enumerate(path) if letter in magic), default=len(path)
    )
    return path[:first].rpartition("/")[0]


def _is_visible(name: str) -> bool:
    return not name.startswith(".")


def _describe(filesystem: Any, place: str, root: str) -> SourceFile:
    information = filesystem.info(place)
    size = information.get("size") or 0
    name = place.removeprefix(root).lstrip("/") if root else place
    told = filesystem.ukey(without_credentials(place))
    if place.startswith(_WEB):
        # The query is not part of the file's name and may hold a secret.
        name, _, query = name.partition("?")
        told += (
            f" {information.get('ETag', '')}"
            f" {hashlib.sha256(query.encode()).hexdigest()[:8]}"
        )
    return SourceFile(
        filesystem.unstrip_protocol(place), name, size, f"{size} bytes, {told}"
    )
