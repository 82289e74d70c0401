"""Files of carries: what forward sweeps write to disk, and reverse sweeps read back.

A compiled program calls these functions while it runs (`_sweep/disk.py`). It can pass
arrays alone, so it knows a file by its *ticket*, a number that no other file of the
process has.

    open_file(folder, shape)      the ticket of a file for one forward sweep
    write(ticket, place, leaves)  copies a carry, which a thread of the file writes
    read(ticket, place, types)    a carry; the thread then reads the one before, which
                                  the reverse sweep asks for next

So a program waits only where the disk takes longer than the layers of a segment.

A file has no name. The operating system frees its space once it is closed, or when the
process ends, however that ends. It is closed when the carry at place 0 is read: a
reverse sweep reads that last. Files of a sweep outside of `jax.jit` are closed when its
ticket is garbage (`keep_until_garbage`), so that its pullback may be called again.
Others that are never read stay until the process ends.
"""

import dataclasses
import errno
import itertools
import math
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np


@dataclasses.dataclass
class Traffic:
    """What the files of a process have done since it began."""

    # Bytes.
    written: int = 0
    read: int = 0
    # Seconds that programs waited for the disk, beside those that copies take.
    waited: float = 0.0
    # How many files are open.
    files: int = 0


traffic = Traffic()

# Open files by each of their tickets.
_files: dict[int, "_File"] = {}
_tickets = itertools.count(1)
# Guards all of the above: callbacks of several programs run at once.
_lock = threading.Lock()


class _File:
    """The carries of one forward sweep; of a whole batch under `jax.vmap`, whose
    examples have tickets of their own.
    """

    def __init__(self, folder: str, tickets: Sequence[int]) -> None:
        self.tickets = tickets
        # Whether it is closed by an array outside of the program, not by the last read.
        self.is_kept = False
        self._folder = folder
        # The bytes of a carry, once one is written.
        self._size = 0
        self._file = open_nameless(folder)
        self._thread = ThreadPoolExecutor(1, "stacked_remat carries")
        # The write that was submitted last, and what it writes.
        self._writing: Future[None] | None = None
        self._copies: list[np.ndarray] | None = None
        # The place of the carry that is read ahead, and the read.
        self._ahead: tuple[int, Future[list[np.ndarray]]] | None = None

    def write(self, place: int, leaves: Sequence[np.ndarray]) -> None:
        self._wait_for_writes()
        # A copy, since the program overwrites its buffers once this returns.
        if self._copies is None:
            self._copies = [np.array(leaf) for leaf in leaves]
            self._size = sum(leaf.nbytes for leaf in leaves)
        else:
            for copy, leaf in zip(self._copies, leaves, strict=True):
                np.copyto(copy, leaf)
        self._writing = self._thread.submit(self._write, place, self._copies)

    def read(self, place: int, types: Sequence[Any]) -> list[np.ndarray]:
        self._wait_for_writes()
        self._copies = None
        if self._ahead is not None and self._ahead[0] == place:
            reading = self._ahead[1]
        else:
            reading = self._thread.submit(self._read, place, types)
        leaves = self._result(reading, "read")
        self._ahead = None
        if place > 0:
            before = self._thread.submit(self._read, place - 1, types)
            self._ahead = place - 1, before
        elif not self.is_kept:
            self.close()
        return leaves

    def close(self) -> None:
        with _lock:
            if self.tickets[0] not in _files:
                return
            for ticket in self.tickets:
                del _files[ticket]
            traffic.files -= 1
        # After what the thread is still to do.
        self._thread.submit(self._file.close)
        self._thread.shutdown(wait=False)

    def _wait_for_writes(self) -> None:
        if self._writing is not None:
            self._result(self._writing, "write")
            self._writing = None

    def _result(self, job: "Future[Any]", verb: str) -> Any:
        """The result of a job of the thread; closes the file if it failed."""
        start = time.perf_counter()
        try:
            return job.result()
        except OSError as error:
            self.close()
            action = f"{verb} a carry of {self._size:,} bytes in"
            raise _error(action, self._folder, error) from None
        finally:
            with _lock:
                traffic.waited += time.perf_counter() - start

    def _write(self, place: int, leaves: Sequence[np.ndarray]) -> None:
        offset = place * self._size
        for leaf in leaves:
            rest = _bytes_of(leaf)
            while len(rest):
                # A call may write less than it is given.
                done = os.pwrite(self._file.fileno(), rest, offset)
                rest = rest[done:]
                offset = offset + done
                with _lock:
                    traffic.written += done

    def _read(self, place: int, types: Sequence[Any]) -> list[np.ndarray]:
        offset = place * self._size
        leaves = [np.empty(type_.shape, type_.dtype) for type_ in types]
        for leaf in leaves:
            rest = _bytes_of(leaf)
            while len(rest):
                done = os.preadv(self._file.fileno(), [rest], offset)
                if not done:
                    raise OSError("the file ends before the carry does")
                rest = rest[done:]
                offset = offset + done
                with _lock:
                    traffic.read += done
        return leaves


def open_nameless(folder: str) -> Any:
    """A file in a folder that no other process can open, and that ends with this
    process.

    Raises:
        OSError: none can be made there; names the folder.
    """
    try:
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError as error:
        raise _error("make a file in", folder, error) from None


def _error(action: str, folder: str, error: OSError) -> OSError:
    fix = "Give one with free space"
    if error.errno == errno.ENOENT:
        fix = "Make it, or give another"
    return OSError(
        error.errno,
        f'save_carries="disk" cannot {action} the folder {folder}:'
        f" {error.strerror or error}. {fix}"
        " (ScanCheckpointPolicy(carries_folder=...)), or cut the layers (nested=True),"
        " which keeps fewer carries.",
    )


def _bytes_of(leaf: np.ndarray) -> memoryview:
    """The bytes of an array, of a dtype that NumPy may not know."""
    return leaf.reshape(-1).view(np.uint8).data


def _file_of(tickets: np.ndarray) -> _File:
    """The file that all of these tickets are of."""
    flat = tickets.reshape(-1).tolist()
    with _lock:
        file = _files.get(flat[0])
    if file is None or file.tickets != flat:
        raise ValueError(
            'The carries of save_carries="disk" are gone: a reverse sweep has read them'
            " before. In a compiled program they can be read once. Map the pullback"
            " with jax.vmap instead of calling it again, call it outside of jax.jit, or"
            " keep the carries in memory (remat=True)."
        )
    return file


def open_file(folder: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tickets of a new file, one for each example of a batch."""
    with _lock:
        tickets = list(itertools.islice(_tickets, math.prod(shape)))
    file = _File(folder, tickets)
    with _lock:
        for ticket in tickets:
            _files[ticket] = file
        traffic.files += 1
    return np.asarray(tickets, np.int32).reshape(shape)


def write(tickets: np.ndarray, place: int, leaves: Sequence[np.ndarray]) -> None:
    """Keep a carry. Errors of the disk may be raised by the next call."""
    _file_of(tickets).write(place, leaves)


def read(tickets: np.ndarray, place: int, types: Sequence[Any]) -> list[np.ndarray]:
    """The carry that was written last at this place, of these shapes and dtypes."""
    return _file_of(tickets).read(place, types)


def keep_until_garbage(tickets: Any) -> None:
    """Keep the file of an array of tickets for as long as the array lives."""
    file = _file_of(np.asarray(tickets))
    file.is_kept = True
    # At the end of the process there is nothing to do.
    weakref.finalize(tickets, file.close).atexit = False
