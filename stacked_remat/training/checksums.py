"""Checksums of files and of JSON objects, which find accidental damage but not deliberate changes."""

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

_PIECE = 2**22
_KEY = "checksum"


def checksum(path: Path) -> str:
    """The XXH3 checksum of a file, read once with 4 MiB of memory.

    Raises:
        OSError: the file can't be read.
    """
    found = xxhash.xxh3_64()
    piece = memoryview(bytearray(_PIECE))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                found.update(piece[:count])
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # `readinto` does not name the file
    return found.hexdigest()


def checksums(paths: Iterable[Path]) -> list[str]:
    """The checksums of files, computed in parallel."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(checksum, paths))


def json_with_checksum(fields: Mapping[str, Any]) -> str:
    """An object as JSON, with a checksum as one more field."""
    return json.dumps({**fields, _KEY: _of_fields(fields)}, indent=2)


def read_json_with_checksum(path: Path) -> dict[str, Any]:
    """The object that was written as `json_with_checksum`.

    Raises:
        OSError: the file can't be read.
        ValueError: the file is damaged.
    """
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it is not valid JSON ({error}).") from error
    if not isinstance(fields, dict) or fields.pop(_KEY, None) != _of_fields(fields):
        raise ValueError(f"{path} is damaged: its checksum differs.")
    return fields


def _of_fields(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())
