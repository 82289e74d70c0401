"""From paths, globs, folders and URLs to a sorted list of files, each with what tells its versions apart."""

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import fsspec.core

from .data_error import DataError

# Installed packages differ from machine to machine, tests hold tables of data, pydoc_data is one large
# generated text.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"})

_WEB = ("http://", "https://")


@dataclass(frozen=True)
class SourceFile:
    """A file to read.

    Attributes:
        url: where it is, for fsspec.
        name: its path below the folder, or the fixed part of the glob, that it was found by; its documents
            are split into trained-on and held-out by this name, which does not change when the folder moves.
        size: stored bytes; 0 where the file system does not say.
        version: changes when the contents do.
    """

    url: str
    name: str
    size: int
    version: str


def find_files(paths: Sequence[str], key: str) -> tuple[SourceFile, ...]:
    """The files that `paths` stand for, each once, in the order of their names.

    Hidden files, and those in hidden folders, are left out of folders and globs.

    Args:
        paths: files, globs or folders; local or URLs.
        key: where the paths stand in the config, for errors.

    Raises:
        DataError: a path that stands for no file, or on a file system that is not to be had.
    """
    found: dict[str, SourceFile] = {}
    for path in paths:
        try:
            files = list(_files_of(path))
        except (OSError, ImportError, ValueError) as error:
            raise DataError(f"Can't look for the files of {path!r} in {key}: {error}") from error
        if not files:
            raise DataError(
                f"{path!r} in {key} stands for no file. Give a file that exists, a folder with files, or a "
                f"glob such as texts/**/*.txt."
            )
        for file in files:
            found.setdefault(file.url, file)
    return tuple(sorted(found.values(), key=lambda file: (file.name, file.url)))


def standard_library_files() -> tuple[SourceFile, ...]:
    """The Python sources of the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if path.is_file() and not _NOT_LIBRARY.intersection(name.parts):
            status = path.stat()
            version = _local_version(status.st_size, status.st_mtime_ns)
            files.append(SourceFile(str(path), name.as_posix(), status.st_size, version))
    return tuple(sorted(files, key=lambda file: file.name))


def _files_of(path: str) -> Iterator[SourceFile]:
    filesystem, root = fsspec.core.url_to_fs(path)
    magic = "*[" if root.startswith(_WEB) else "*?["
    if any(letter in root for letter in magic):
        fixed = root[: min(root.find(letter) for letter in magic if letter in root)].rpartition("/")[0]
        places = [place for place in filesystem.glob(root) if filesystem.isfile(place)]
        yield from _visible(_describe(filesystem, place, fixed) for place in places)
    elif filesystem.isdir(root):
        yield from _visible(_describe(filesystem, place, root) for place in filesystem.find(root))
    elif filesystem.exists(root):
        yield _describe(filesystem, root, root.rpartition("/")[0])


def _visible(files: Iterable[SourceFile]) -> Iterator[SourceFile]:
    return (file for file in files if not any(part.startswith(".") for part in file.name.split("/")))


def _describe(filesystem: Any, place: str, root: str) -> SourceFile:
    information = filesystem.info(place)
    size = information.get("size") or 0
    if "mtime" in information:
        version = _local_version(size, round(information["mtime"] * 1e9))
    else:
        version = f"{size} bytes, {filesystem.ukey(place)}"
    name = place.removeprefix(root).lstrip("/") if root else place
    if place.startswith(_WEB):
        name = name.partition("?")[0]  # what follows is a query and says nothing of what the file is
    return SourceFile(filesystem.unstrip_protocol(place), name, size, version)


def _local_version(size: int, modified_ns: int) -> str:
    return f"{size} bytes, modified {modified_ns // 1000} us"
