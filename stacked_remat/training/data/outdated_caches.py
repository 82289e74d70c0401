"""Token caches that no run can find again: which they are, that no process reads them, and their removal."""

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
"""The identity of a cache, that of one that is being built, and the file that its builder locks."""

_READERS = ".readers"  # the file that every reader locks, all of them at once
_OURS = re.compile(r"complete\.json|unfinished\.json|\.lock|\.readers|\.unfinished|shard-\d{5,}")


@functools.cache
def hold(folder: Path) -> None:
    """Keeps the cache from being removed as long as this process lives, where the file system has locks."""
    try:
        flags = os.O_RDONLY if (folder / _READERS).exists() else os.O_RDONLY | os.O_CREAT
        descriptor = os.open(folder / _READERS, flags, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        pass


def remove_outdated(folder: Path, name: str, files: Iterable[SourceFile]) -> list[Path]:
    """Removes the caches that the one in `folder` replaces.

    These are caches of a source of the same name, beside it, that hold an earlier version of one of its
    files: nothing is found by that version any more. Caches by other tokenizers of the same versions, of
    other files or read otherwise stay, as do those that a process has open and folders with anything that
    this library did not write.

    Args:
        folder: the new cache.
        name: of its source.
        files: what it was made of.

    Returns:
        The folders that are no longer there.
    """
    versions = {file.place: file.version for file in files}
    others = [
        other
        for other in folder.parent.glob(f"{name}-*")
        if re.fullmatch(re.escape(name) + "-[0-9a-f]{16}", other.name) and other != folder
    ]
    return [other for other in sorted(others) if _is_outdated(other, versions) and _remove(other)]


def _is_outdated(folder: Path, versions: Mapping[str, str]) -> bool:
    identity = _identity(folder)
    held = identity.get("files", []) if isinstance(identity, dict) else []
    try:
        return any(versions.get(file["url"], file["version"]) != file["version"] for file in held)
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
    """Removes a cache unless a process reads or builds it, or something else lies in it."""
    try:
        if not all(_OURS.fullmatch(path.name) for path in folder.iterdir()):
            return False
        with (folder / LOCK).open("a") as builder, (folder / _READERS).open("a") as readers:
            for lock in (builder, readers):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            doomed = folder.with_name(f".{folder.name}.deleted")
            shutil.rmtree(doomed, ignore_errors=True)
            os.replace(folder, doomed)  # at once out of sight: half a cache must not be taken for a whole one
            shutil.rmtree(doomed, ignore_errors=True)
    except OSError:
        return False
    return True
