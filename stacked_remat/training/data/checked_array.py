"""Arrays in files, whose blocks are compared with checksums when they are first read.

A disk or a copy may change a file without an error. Text is tokenized once and read for
weeks, so the run that reads a damaged block finds it, before its tokens are trained on.
"""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
from jaxtyping import UInt32

from ..errors import DataError

# Bytes: small, since a run reads sequences in random order, and checks whole blocks
_BLOCK = 2**16


def num_blocks(num_bytes: int) -> int:
    """The number of checksums of a file."""
    return -(-num_bytes // _BLOCK)


def blocks_of(file: BinaryIO) -> Iterator[bytes]:
    """The blocks of a file, whose CRC-32s are their checksums."""
    return iter(lambda: file.read(_BLOCK), b"")


@final
class CheckedArray:
    """A one-dimensional array in a file, memory-mapped.

    Slices are NumPy arrays; `np.asarray` reads everything. Each block is checked once,
    the first time that an element of it is read.

    Raises:
        DataError: when a block that is read has another checksum, or an element that is
            not below `limit`.
    """

    def __init__(
        self,
        path: Path,
        dtype: Any,
        checksums: Sequence[int] | UInt32[np.ndarray, " blocks"],
        *,
        count: int,
        limit: int | None = None,
    ):
        """Opens a file of at least `count` elements, whose first `count` the checksums
        are of.

        Args:
            path: the file.
            dtype: of its elements, whose size divides that of a block.
            checksums: of the blocks, as `blocks_of` cuts the file into.
            count: elements of the array.
            limit: all elements are below it; any if not given.
        """
        # An empty file can't be mapped
        self._array = (
            np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)
        )
        self._path = path
        self._limit = limit
        self._checksums = checksums
        self._is_checked = np.zeros(len(checksums), bool)

    def __len__(self) -> int:
        """The number of elements."""
        return len(self._array)

    def __getitem__(self, where: slice) -> np.ndarray:
        """The elements of a slice; cost: a pass over their blocks, the first time."""
        first, stop, step = where.indices(len(self))
        assert step == 1
        a_block = _BLOCK // self._array.itemsize
        for block in range(first // a_block, num_blocks(stop * self._array.itemsize)):
            if not self._is_checked[block]:
                self._check(block, self._array[block * a_block : (block + 1) * a_block])
        return self._array[first:stop]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All elements."""
        return np.array(self[:], dtype, copy=copy)

    def _check(self, block: int, elements: np.ndarray) -> None:
        fix = (
            f"Delete the token cache {self._path.parent}, and the next run tokenizes"
            " its text again."
        )
        if zlib.crc32(elements.data) != int(self._checksums[block]):
            first = block * _BLOCK
            raise DataError(
                f"{self._path} is damaged: bytes {first:,} to"
                f" {first + elements.nbytes:,} are not those that were written. {fix}"
            )
        if self._limit is not None and elements.max() >= self._limit:
            raise DataError(
                f"{self._path} has the token {elements.max()}, and the vocabulary has"
                f" {self._limit:,}. {fix}"
            )
        self._is_checked[block] = True


@final
class JoinedArrays:
    """Arrays in files one after the other, as one; a slice lies within one of them."""

    def __init__(self, arrays: Sequence[CheckedArray]):
        """At least one array."""
        self._arrays = arrays
        self._stops = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        """The number of elements."""
        return int(self._stops[-1])

    def __getitem__(self, where: slice) -> np.ndarray:
        """The elements of a slice."""
        first, stop, _ = where.indices(len(self))
        at = int(np.searchsorted(self._stops, first, side="right"))
        array = self._arrays[min(at, len(self._arrays) - 1)]
        start = int(self._stops[at]) - len(array) if first < len(self) else first
        assert stop <= start + len(array)
        return array[first - start : stop - start]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All elements."""
        return np.concatenate([np.asarray(array, dtype) for array in self._arrays])
