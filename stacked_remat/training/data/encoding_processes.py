"""Encodes records in several processes: each gets a group of records, and replies with
its documents.

A process is the same Python running `main`, until its standard input ends. Groups and
documents are pickled: both ends are this library. The pools of Python's standard
library would import the program that trains once more in each process.
"""

import collections
import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self, final

from ..errors import DataError
from .encoding import EncodedRecords, RecordEncoder
from .records import Record

# Bytes of text for which it is worth the seconds that processes take to start
_WORTH_STARTING = 2**25
_PROGRAM = "from stacked_remat.training.data.encoding_processes import main; main()"


class Group(NamedTuple):
    """Records that are encoded at once, and the index of the file of each."""

    files: list[int]
    records: list[Record]


@final
class EncodingProcesses:
    """A context with processes, which start with the first groups that are worth it."""

    def __init__(self, count: int | None = None):
        """`count` processes, even for little text; by default one for each core."""
        self._count = count
        self._started: list[_Process] = []
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._started:
            process.kill()
        if self._threads is not None:
            # Their reads end with the processes
            self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            process.close()

    def encode(
        self, encoder: RecordEncoder, groups: Iterable[Group], num_bytes: int
    ) -> Iterator[tuple[Group, EncodedRecords]]:
        """The documents of each group, in order.

        Args:
            encoder: of the records. One with a tokenizer of another package encodes in
                this process.
            groups: read somewhat ahead.
            num_bytes: about the size of all.
        """
        count = self._count
        if count is None:
            count = _num_cores() if num_bytes >= _WORTH_STARTING else 1
        # Another package's tokenizer may not be importable, or not picklable, in a
        # child.
        is_own = type(encoder.tokenizer).__module__.startswith(f"{__package__}.")
        if count == 1 or not is_own:
            for group in groups:
                yield group, encoder(group.records)
            return
        self._start(count)
        pickled = pickle.dumps(encoder)
        yield from self._in_order(groups, lambda group: self._ask(pickled, group))

    def _start(self, count: int) -> None:
        if self._threads is not None:
            return
        self._threads = ThreadPoolExecutor(count)
        for _ in range(count):
            process = _Process()
            self._started.append(process)
            self._idle.put(process)

    def _in_order(
        self, groups: Iterable[Group], ask: Callable[[Group], EncodedRecords]
    ) -> Iterator[tuple[Group, EncodedRecords]]:
        """The replies in the order of the groups, of which two for each process are
        under way.
        """
        assert self._threads is not None
        asked: collections.deque[tuple[Group, Future[EncodedRecords]]]
        asked = collections.deque()
        for group in groups:
            asked.append((group, self._threads.submit(ask, group)))
            # Enough that no process waits for the writer, and not so many that all text
            # is in memory.
            if len(asked) > 2 * len(self._started):
                first, reply = asked.popleft()
                yield first, reply.result()
        for first, reply in asked:
            yield first, reply.result()

    def _ask(self, pickled: bytes, group: Group) -> EncodedRecords:
        # A thread waits for a process that is free; threads do nothing but wait.
        process = self._idle.get()
        try:
            return process.ask(pickled, group.records)
        finally:
            self._idle.put(process)


@final
class _Process:
    """A running `main`, and the encoder that it has."""

    def __init__(self) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {
            "PYTHONPATH": paths,
            "JAX_PLATFORMS": "cpu",  # devices are this process's
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
        )
        self._encoder = b""

    def ask(self, encoder: bytes, records: list[Record]) -> EncodedRecords:
        """The documents of records; raises what the encoder raises."""
        to_process = self._process.stdin
        from_process = self._process.stdout
        assert to_process is not None and from_process is not None
        try:
            # The encoder has a whole tokenizer: it is sent when it changes, not with
            # each group.
            if encoder != self._encoder:
                pickle.dump(encoder, to_process)
                self._encoder = encoder
            pickle.dump(records, to_process)
            to_process.flush()
            reply = pickle.load(from_process)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise DataError(
                "A process that tokenizes has ended, with the status"
                f" {self._process.wait()}; -9 is usually too little memory. Set"
                " data.tokenizing_processes to fewer."
            ) from error
        if isinstance(reply, Exception):
            raise reply
        return reply

    def kill(self) -> None:
        """Ends the process."""
        self._process.kill()

    def close(self) -> None:
        """Waits for its end, and closes what leads to it."""
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # of what was not written
                stream.close()


def main() -> None:
    """Replies to each list of records with their documents, by the encoder that came
    last, until the input ends.
    """
    # Which a terminal sends to this process too
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    to_parent = sys.stdout.buffer
    sys.stdout = sys.stderr
    encoder: RecordEncoder | None = None
    while True:
        try:
            request: Any = pickle.load(sys.stdin.buffer)
        except (EOFError, pickle.UnpicklingError):  # of a parent that was killed
            return
        if isinstance(request, bytes):
            encoder = pickle.loads(request)
            continue
        assert encoder is not None
        try:
            reply: Any = encoder(request)
        except Exception as error:
            reply = error
        try:
            pickle.dump(reply, to_parent)
            to_parent.flush()
        except BrokenPipeError:
            os._exit(1)


def _num_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
