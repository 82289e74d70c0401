"""Ending a run from outside, between two steps."""

import signal
import threading
from types import FrameType
from typing import Any, final

EXIT_INTERRUPTED = 75
"""Exit status of a run that a signal ended after a checkpoint: the same command goes on (EX_TEMPFAIL)."""


@final
class StopSignals:
    """While it is entered, the first SIGTERM or SIGINT only asks to stop; a second SIGINT interrupts as ever.

    In a thread that is not the main one it does nothing, because Python handles signals in that one alone.
    """

    def __init__(self) -> None:
        self._received: str | None = None
        self._before: dict[int, Any] = {}

    @property
    def received(self) -> str | None:
        """Name of the signal that asks to stop, if one came."""
        return self._received

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = signal.Signals(number).name
