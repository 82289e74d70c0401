"""Runs a command: reports each user error as one message, handles signals, and prints
text safely.
"""

import argparse
import contextlib
import errno
import gc
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from models.hf_io.safetensors_folder import WeightsError
from stacked_remat import OffloadError
from stacked_remat._pictures import PictureError
from stacked_remat.ghost import ScoreLogError
from stacked_remat.memory import BudgetError, TargetError
from stacked_remat.training import (
    ChatTemplateError,
    CheckpointDamagedError,
    CheckpointMismatchError,
    ConfigError,
    DataError,
    Interrupted,
    NonFiniteLossError,
    StopSignals,
)
from stacked_remat.training.errors import without_credentials

USER_ERRORS: tuple[type[Exception], ...] = (
    BudgetError,
    ChatTemplateError,
    CheckpointDamagedError,
    CheckpointMismatchError,
    ConfigError,
    DataError,
    MemoryError,
    NonFiniteLossError,
    OffloadError,
    OSError,
    PictureError,
    ScoreLogError,
    TargetError,
    WeightsError,
)
"""Errors that a user or an administrator can fix; any other is a bug, and shows its
traceback.
"""

_FIXES = {
    errno.EACCES: "Change its owner or its mode, or name another path.",
    errno.ENOSPC: (
        "Free some space, or name a folder on another disk; the same command then"
        " resumes."
    ),
    errno.EMFILE: "Raise the limit on open files (ulimit -n).",
}
# The last line of the traceback of what a program called, if a user can fix it
_OF_CALLBACK = re.compile(
    r"CpuCallback error.*^[\w.]*(?:WeightsError|OSError): (?P<message>.*)",
    re.DOTALL | re.MULTILINE,
)
_DEBUG = "--debug"
# Control characters, which a terminal acts on, and marks of direction, which reorder
# the text around them.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def run_command(
    work: Callable[[Sequence[str], StopSignals], int],
    arguments: Sequence[str],
    show: Callable[[str], None],
    *,
    interrupted: tuple[int, str] | None = None,
) -> int:
    """Runs a command and returns its exit status; a user error ends it with one message
    and status 1.

    `--debug` among the arguments shows the traceback as well. The first SIGINT or
    SIGTERM ends the work at once, and cleanly, until it calls `StopSignals.defer`; a
    second SIGINT ends the process.

    Args:
        work: takes the arguments without `--debug`, and the signals that came; returns
            the exit status.
        interrupted: exit status after a signal, and a text to add to the message; 128
            plus the signal's number, and no text, if not given.
    """
    debug = _DEBUG in arguments
    arguments = [argument for argument in arguments if argument != _DEBUG]
    if not debug:
        _quiet_checkpoints()
    with StopSignals(at_once=True) as stop:  # to the end: a second signal may come late
        try:
            return work(arguments, stop)
        except Interrupted as signalled:
            status, what = interrupted or (128 + signal.Signals[str(signalled)], "")
            show(f"stopped by {signalled}{what}")
            return status
        except Exception as error:
            message = error_message(error)
            if message is None:
                raise
            if debug:
                text = without_credentials(escaped(traceback.format_exc()))
                print(text, end="", file=sys.stderr)
        _show_error(without_credentials(f"error: {escaped(message)}"), show)
        # finalizers run now, and not with tracebacks while Python shuts down
        gc.collect()
        return 1


def shown_on(console: Console) -> Callable[[str], None]:
    """A function that prints a line on a console, as text without markup."""

    def show(text: str) -> None:
        console.print(
            encodable(text, console), highlight=False, markup=False, soft_wrap=True
        )

    return show


def backend_lines(taken: Mapping[str, str]) -> list[str]:
    """A line for each operation whose backend was chosen, with the key that chooses it.

    `taken` is what `stacked_remat.ops.backends_taken` yields.
    """
    lines = []
    for what, backend in taken.items():
        operation = what.partition(",")[0]
        lines.append(
            f"{what} runs by the backend {backend} (model.{operation}.backend)"
        )
    return lines


def escaped(text: str) -> str:
    r"""The text with escapes such as `\x1b` for what a terminal would act on, except
    newlines and tabs.

    Works character by character, so that a text may be cut anywhere.
    """
    return _OBEYED.sub(
        lambda found: found[0].encode("unicode_escape").decode("ascii"), text
    )


def command_parser(command: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of a command of `models`; `about` is the docstring of its module,
    whose first paragraph describes it.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m models.{command}",
        description=(about or "").partition("\n\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument(
        _DEBUG, action="store_true", help="show the traceback of an error"
    )
    return parser


def check_counts(options: argparse.Namespace, *names: str) -> None:
    """Refuse a number below 1 of these options; one that is not given is None."""
    for name in names:
        number = getattr(options, name)
        if number is not None and number < 1:
            raise ConfigError(f"--{name} must be at least 1, got {number}.")


def local_path(text: str) -> Path:
    """A path from the command line, with `~` expanded."""
    return Path(text).expanduser()


def encodable(text: str, console: Console) -> str:
    """The text with escapes for the characters that the console's encoding lacks."""
    return text.encode(console.encoding, "backslashreplace").decode(console.encoding)


def _show_error(message: str, show: Callable[[str], None]) -> None:
    """Shows a message, on standard error where standard output can't be written to."""
    try:
        show(message)
    except OSError:
        print(message, file=sys.stderr)
        # Python flushes standard output when it ends, and would fail there.
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _quiet_checkpoints() -> None:
    """Hides tracebacks of errors while checkpoints are written that are also raised.

    Orbax logs them, and asyncio those of tasks that nobody awaits after the first one;
    TensorStore's threads report to an event loop that the first error has closed, and
    reads of other arrays fail after the first. All of them may fail until the process
    ends, so nothing is restored.
    """

    def is_shown(error: Any) -> bool:
        return not str(error).startswith(
            ("Event loop is closed", "Encountered error while reading array")
        )

    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.excepthook = lambda *error: (
        sys.__excepthook__(*error) if is_shown(error[1]) else None
    )
    sys.unraisablehook = lambda found: (
        sys.__unraisablehook__(found) if is_shown(found.exc_value) else None
    )


def error_message(error: Exception) -> str | None:
    """What happened, to which path or key, and the fix; None for an error that the user
    can't fix.
    """
    text = str(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in text:
        return (
            f"The device has too little memory: {text.splitlines()[0]} Keep less for"
            " the backward pass (remat: nested or offload), make batches or sequences"
            " smaller, or use more microbatches (trainer.update.microbatches)."
        )
    if isinstance(error, RuntimeError) and text.startswith(
        "Unable to initialize backend"
    ):
        return f"JAX found no device: {text} Check JAX_PLATFORMS and the driver."
    if "has duplicate entries for" in text:  # JAX's error for a PartitionSpec
        return (
            f"{text}. In trainer.mesh, map only one of the axes of an array to an axis"
            " of the mesh."
        )
    if isinstance(error, RuntimeError) and text.startswith(
        "Could not determine home directory"
    ):
        return (
            "A path begins with ~ and a user without a home folder here. Write the"
            " whole path."
        )
    if found := _OF_CALLBACK.search(text):
        # Of a program that reads files, or writes them, while it runs
        return found["message"].strip()
    if not isinstance(error, USER_ERRORS):
        return None
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        path = f"{error.filename}: " if error.filename else ""
        return (
            f"{path}{error.strerror}."
            f" {_FIXES.get(error.errno, 'Check the path and its file system.')}"
        )
    if isinstance(error, MemoryError):
        return (
            f"This machine has too little memory. {text}".strip()
            + " In a run, a smaller data.seq_len or data.batch_size takes less."
        )
    return text
