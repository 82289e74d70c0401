"""Stopping a run by signals: at once while there is nothing to save, later between two steps."""

import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any, final

EXIT_INTERRUPTED = 75
"""Exit status of a run that a signal ended and that the same command resumes (EX_TEMPFAIL)."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SHOW_CURSOR = b"\x1b[?25h\n"


class Interrupted(KeyboardInterrupt):
    """Raised for a signal while `StopSignals` ends work at once; its text is the signal's name."""


@final
class StopSignals:
    """A context in which the first SIGTERM or SIGINT only asks to stop, and a second SIGINT ends the process.

    The second SIGINT works even while the main thread is in a long call, such as XLA's compiler, for which
    Python's own handlers wait. The exit status is then 130, and nothing is cleaned up.

    Does nothing outside the main thread, where Python handles no signals.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        """Handles nothing until it is entered.

        Args:
            at_once: whether the first signal raises `Interrupted` in the main thread, until `defer`.
        """
        self._at_once = at_once
        self._received: str | None = None
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._ends: tuple[socket.socket, ...] = ()

    @property
    def received(self) -> str | None:
        """Name of the first signal received, or None."""
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
            return  # the thread handles a second SIGINT
        self._received = signal.Signals(number).name
        if self._at_once:
            raise Interrupted(self._received)


def _end_at_the_second(reader: socket.socket) -> None:
    """Reads signals from the wake-up socket, to which Python writes even while no handler can run."""
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
