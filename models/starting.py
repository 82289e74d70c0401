"""Ends a command cleanly where a signal comes while its modules are still imported, which takes seconds.

Imports nothing that takes time. `models.command.run_command` handles signals from there on.
"""

import contextlib
import os
import signal
import sys
from types import FrameType

_STATUS = {"models.train_lm": 75}  # EXIT_INTERRUPTED: the same command starts again


def end_at_signals() -> None:
    """Lets SIGINT and SIGTERM end the process with one line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    text = f"stopped by {signal.Signals(number).name} while the program was loaded\n"
    with contextlib.suppress(OSError):
        os.write(1, text.encode())
    statuses = [status for name, status in _STATUS.items() if name in sys.orig_argv]
    os._exit(statuses[0] if statuses else 128 + number)


if sys.argv[:1] == ["-m"]:  # so while Python looks for the module of `python -m`, and at no other time
    end_at_signals()
