"""Removes outdated token caches that no process uses."""

import fcntl
import functools
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .files import SourceFile

COMPLETE, UNFINISHED, LOCK = "complete.json", "unfinished.json", ".lock"
"""The identity of a cache and of one that is being built, and the file that its builder locks."""

_READERS = ".readers"  # every reader holds a shared lock of this file
_OURS = re.compile(r"\.?(complete\.json|unfinished\.json|shard-\d{5,})(\.unfinished)?|\.lock|\.readers")


@functools.cache
def hold(folder: Path) -> None:
    """Keeps the cache from being removed while this process runs, where the file system has locks."""
    try:
        flags = os.O_RDONLY if (folder / _READERS).exists() else os.O_RDONLY | os.O_CREAT
        descriptor = os.open(folder / _READERS, flags, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        pass


def remove_outdated(folder: Path, name: str, files: Iterable[SourceFile]) -> list[Path]:
    """Removes the caches that the one in `folder` replaces.

    These are the caches beside it, of a source of the same name, with an earlier version of one of its files,
    which can't be found again. Caches of the same versions by other tokenizers, of other files or read
    differently stay, as do those that a process has open and folders with anything that this library did not
    write.

    Args:
        folder: the new cache.
        name: of its source.
        files: of its source.

    Returns:
        The removed folders.
    """
    versions = {file.place: file.version for file in files}
    others = [
        other
        for other in folder.parent.glob(f"{name}-*")
        if re.fullmatch(re.escape(name) + "-[0-9a-f]{16}", other.name) and other != folder
    ]
    return [other for other in sorted(others) if _is_outdated(other, versions) and _remove(other)]


def _is_outdated(folder: Path, versions: Mapping[str, str]) -> bool:
    try:
        files = _identity(folder)["files"]
        return any(versions.get(file["url"], file["version"]) != file["version"] for file in files)
    except (TypeError, KeyError):
        return False


def _identity(folder: Path) -> Any:
    for name in (COMPLETE, UNFINISHED):
        try:
            return json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return None


def _remove(folder: Path) -> bool:
    """Removes a cache unless a process reads or builds it, or it has other files in it."""
    try:
        if not all(_OURS.fullmatch(path.name) for path in folder.iterdir()):
            return False
        with (folder / LOCK).open("a") as builder, (folder / _READERS).open("a") as readers:
            for lock in (builder, readers):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            doomed = folder.with_name(f".{folder.name}.deleted")
            shutil.rmtree(doomed, ignore_errors=True)
            os.replace(folder, doomed)  # renamed first: half a cache must not be taken for a whole one
            shutil.rmtree(doomed, ignore_errors=True)
    except OSError:
        return False
    return True
