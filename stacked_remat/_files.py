"""Files written whole or not at all, JSON, and safetensors files with clear errors.

A process may be killed at any time, and a file may be cut short by a full disk or a
download that broke off. So nothing is written in place, but beside it and then renamed,
which a file system does at once; and what can't be read is an error that names the
file. Adapters, run folders, caches and `models/hf_io` read and write by these.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replaced_whole(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """A path beside `path` to write a file or a folder to, which takes its place on
    success.

    On failure `path` stays as it was. A folder replaces only an empty folder, or none.
    What a killed process left is removed, unless it is `shared`: written by several
    processes at once.
    """
    suffix = uuid.uuid4().hex[:8] if shared else "unfinished"
    # In the same folder, since a rename to another file system is a copy
    unfinished = path.with_name(f".{path.name}.{suffix}")
    _remove(unfinished)
    try:
        yield unfinished
        # At once for those who read `path`: it is the old file or the new one
        os.replace(unfinished, path)
    except OSError as error:
        # An error of writing to an open file has none
        error.filename = error.filename or str(path)
        raise
    finally:
        _remove(unfinished)


def _remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def read_json_fields(path: Path) -> dict[str, Any]:
    """The fields of a JSON file; a ValueError for one that is no valid object."""
    try:
        fields = json.loads(path.read_bytes())
    # Brackets within each other by the thousand exceed Python's recursion limit
    except (RecursionError, ValueError) as error:
        raise ValueError(
            f"{path} is not valid JSON: {error}. It may be truncated; fetch or save it"
            " again."
        ) from error
    if not isinstance(fields, dict):
        raise ValueError(
            f"{path} holds a {type(fields).__name__}; a JSON object was expected."
        )
    return fields


@contextlib.contextmanager
def opened_safetensors(path: Path) -> Iterator[Any]:
    """A safetensors file whose tensors are NumPy arrays; a ValueError where it can't be
    read as one.
    """
    # Errors of reading a tensor within the `with` are of the file as well
    safetensors = import_safetensors()
    try:
        with safetensors.safe_open(path, "numpy") as file:
            yield file
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} can't be read as a safetensors file ({error}). It may be"
            " truncated; fetch or save it again."
        ) from error


@contextlib.contextmanager
def written_safetensors(folder: Path) -> Iterator[None]:
    """Turns what safetensors raises for an error of the system into an OSError that
    names the folder.
    """
    try:
        yield
    except (import_safetensors().SafetensorError, OSError) as error:
        # Safetensors has the number of the error, as that of a full disk, only in the
        # message of its own.
        code = re.search(r"os error (\d+)", str(error))
        number = getattr(error, "errno", None) or errno.EIO
        if code:
            number = int(code[1])
        raise OSError(number, os.strerror(number), str(folder)) from error


def import_safetensors() -> Any:
    """The package safetensors, which is optional; the error says how to install it."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "Weights and adapters are in files of safetensors: pip install"
            " 'stacked_remat[weights]'."
        ) from error
    return safetensors
