"""Ending a process from outside: at once before there is anything to save, then between two steps."""

import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any, final

EXIT_INTERRUPTED = 75
"""Exit status of a run that a signal ended: the same command goes on, or starts again (EX_TEMPFAIL)."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SHOW_CURSOR = b"\x1b[?25h\n"


class Interrupted(KeyboardInterrupt):
    """A signal came where `StopSignals` is to end the work at once; its text is the signal's name."""


@final
class StopSignals:
    """While it is entered, the first SIGTERM or SIGINT only asks to stop; a second SIGINT ends the process.

    The second one is obeyed even while the main thread is inside of a long call, such as XLA's compiler,
    which Python's own handlers have to wait for: the exit status is then 130, and nothing is cleaned up.

    In a thread that is not the main one it does nothing, because Python handles signals in that one alone.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        """Handles nothing yet.

        Args:
            at_once: whether the first signal raises `Interrupted`, in the main thread, until `defer`.
        """
        self._at_once = at_once
        self._received: str | None = None
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._ends: tuple[socket.socket, ...] = ()

    @property
    def received(self) -> str | None:
        """Name of the signal that asks to stop, if one came."""
        return self._received

    def defer(self) -> None:
        """From now on the first signal only asks to stop."""
        self._at_once = False

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._ends = reader, writer = socket.socketpair()
            writer.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._receive)
            threading.Thread(target=_end_at_the_second, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ends:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup_before)
            self._ends[1].close()  # ends the thread, which closes the other end
        self._before, self._ends = {}, ()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            return  # a second SIGINT is the thread's
        self._received = signal.Signals(number).name
        if self._at_once:
            raise Interrupted(self._received)


def _end_at_the_second(reader: socket.socket) -> None:
    """Reads the signals as they come: Python writes their numbers even where no handler can run yet."""
    received = False
    with reader:
        while numbers := reader.recv(16):
            for number in numbers:
                if number == signal.SIGINT and received:
                    _end_at_once()
                received = received or number in _SIGNALS


def _end_at_once() -> None:
    if sys.stdout is not None and sys.stdout.isatty():
        os.write(sys.stdout.fileno(), _SHOW_CURSOR)  # which a progress bar hides
    os._exit(128 + signal.SIGINT)
