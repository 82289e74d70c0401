"""Stopping a run by signals: at once while there is nothing to save, later between two
steps.
"""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, final

EXIT_INTERRUPTED = 75
"""Exit status of a run that a signal ended and that the same command resumes
(EX_TEMPFAIL).
"""

_SHOW_CURSOR = b"\x1b[?25h"


class Interrupted(KeyboardInterrupt):
    """Raised for a signal while `StopSignals` ends work at once; its text is the
    signal's name.
    """


@final
class StopSignals:
    """A context in which the first SIGTERM or SIGINT only asks to stop, and the next
    SIGINT ends the process.

    The system then ends it, whatever the process does; nothing is cleaned up. Does
    nothing outside the main thread, where Python handles no signals.

    Attributes:
        received: name of the first signal received, or None.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        """`at_once`: whether the first signal raises `Interrupted` in the main thread,
        until `defer`.
        """
        self._at_once = at_once
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def defer(self) -> None:
        """From now on the first signal only asks to stop."""
        self._at_once = False

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGTERM, signal.SIGINT)
            self._before = {
                number: signal.signal(number, self._receive) for number in numbers
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # From here on Ctrl-C ends the process at once, whatever it waits for.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self.received is not None:
            return
        if sys.stdout is not None and sys.stdout.isatty():
            os.write(sys.stdout.fileno(), _SHOW_CURSOR)  # which a progress bar hides
        self.received = signal.Signals(number).name
        if self._at_once:
            raise Interrupted(self.received)
