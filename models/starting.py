"""The start of a command, while its modules are imported: handles signals, and leaves garbage alone.

The planner shows errors of XLA and hides its warnings, unless `TF_CPP_MIN_LOG_LEVEL` is set. Imports
nothing that takes time. `models.command.run_command` handles signals and garbage from there on.
"""

import contextlib
import gc
import os
import signal
import sys
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    text = f"stopped by {signal.Signals(number).name} while the program was loaded\n"
    with contextlib.suppress(OSError):
        os.write(1, text.encode())
    # EXIT_INTERRUPTED: the same command starts again
    os._exit(75 if "models.train_lm" in sys.orig_argv else 128 + number)


if sys.argv[:1] == ["-m"]:  # only while Python looks for the module of `python -m`
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    if "models.plan_lm" in sys.orig_argv:  # XLA's warnings about the programs that it only compiles
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    gc.disable()  # imports make millions of objects, and next to no garbage to find among them
