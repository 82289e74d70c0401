"""Commands report a user's mistake in one message and end cleanly on signals."""

import errno
import logging
import os
import signal
import subprocess
import sys
import types
from typing import Any

import jax
import pytest

from models.command import USER_ERRORS, error_message, escaped, run_command
from stacked_remat.training import ConfigError
from tests.test_architecture import SLOW_IMPORTS


def run(work, *arguments, **more):
    shown = []
    status = run_command(work, arguments, shown.append, **more)
    return status, shown


def fail_with(error):
    def work(arguments, stop):
        raise error

    return work


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        (errno.EACCES, "owner or its mode"),
        (errno.ENOSPC, "Free some space"),
        (errno.EXDEV, "Check the path"),
    ],
)
def test_system_errors_name_the_path_the_problem_and_the_fix(code, fix, capsys):
    error = OSError(code, os.strerror(code), "/runs/mine")
    status, (shown,) = run(fail_with(error))
    assert (
        status == 1
        and shown.startswith(f"error: /runs/mine: {os.strerror(code)}. ")
        and fix in shown
    )
    assert "Traceback" not in capsys.readouterr().err


def test_debug_shows_the_traceback_and_is_not_an_argument_of_the_command(capsys):
    def work(arguments, stop):
        raise ConfigError(f"got {arguments}")

    assert run(work, "--a", "--debug", "1") == (1, ["error: got ['--a', '1']"])
    assert "Traceback" in capsys.readouterr().err


def test_where_output_cannot_be_written_the_message_is_on_standard_error(
    monkeypatch, capsys
):
    def show(text):
        print(text, flush=True)

    full = open("/dev/full", "w")
    monkeypatch.setattr("sys.stdout", full)
    assert run_command(lambda *_: show("a text") or 0, [], show) == 1
    full.close()  # which writes what is still waiting, as the end of the process does
    assert "error: No space left on device." in capsys.readouterr().err


def test_bugs_keep_their_traceback():
    assert (
        not issubclass(TypeError, USER_ERRORS)
        and error_message(TypeError("a mistake of ours")) is None
    )
    with pytest.raises(TypeError, match="a mistake of ours"):
        run(fail_with(TypeError("a mistake of ours")))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
            "remat: nested or offload",
        ),
        (RuntimeError("Unable to initialize backend 'x'"), "Check JAX_PLATFORMS"),
        (RuntimeError("Could not determine home directory."), "Write the whole path"),
        (
            FileNotFoundError("No checkpoint in runs/mine."),
            "No checkpoint in runs/mine.",
        ),
        (MemoryError(), "too little memory"),
    ],
)
def test_other_errors_say_what_to_do(error, message):
    assert message in (error_message(error) or "")


def test_a_signal_ends_the_work_with_a_message():
    def work(arguments, stop):
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert run(work) == (143, ["stopped by SIGTERM"])
    assert run(work, interrupted=(75, " early")) == (75, ["stopped by SIGTERM early"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_only_errors_of_a_closed_event_loop_are_hidden(monkeypatch):
    shown = []
    monkeypatch.setattr(
        sys, "__excepthook__", lambda kind, error, trace: shown.append(str(error))
    )
    monkeypatch.setattr(
        sys, "__unraisablehook__", lambda found: shown.append(str(found.exc_value))
    )
    for hook in ("excepthook", "unraisablehook"):
        monkeypatch.setattr(sys, hook, getattr(sys, hook))  # set back after the test
    run(lambda arguments, stop: 0)
    for text in ("Event loop is closed", "something else"):
        sys.excepthook(RuntimeError, RuntimeError(text), None)
        unraisable: Any = types.SimpleNamespace(exc_value=RuntimeError(text))
        sys.unraisablehook(unraisable)
    assert shown == ["something else"] * 2
    assert logging.getLogger("asyncio").level == logging.CRITICAL


def test_a_password_in_an_error_is_not_shown():
    url = "https://user:SECRET@host/x"
    for error in (
        ConfigError(f"{url} is no folder"),
        FileNotFoundError(errno.ENOENT, "Not there", url),
    ):
        _, (shown,) = run(fail_with(error))
        assert "https://***@host/x" in shown and "SECRET" not in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc é 漢 \U0001f600", "a\tb\nc é 漢 \U0001f600"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31m\x00\x08\x0b\r\x7f", "\\x9b31m\\x00\\x08\\x0b\\r\\x7f"),
        ("a\u202eb\u2066c\ud800", "a\\u202eb\\u2066c\\ud800"),
    ],
)
def test_control_characters_are_escaped(text, shown):
    assert escaped(text) == shown
    assert "".join(map(escaped, text)) == shown  # wherever the text is cut


def test_commands_start_without_packages_that_take_long_to_import():
    commands = ", ".join(
        f"models.{name}" for name in ("train_lm", "plan_lm", "generate", "export_hf")
    )
    code = f"import sys, {commands}; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    imported = {name.partition(".")[0] for name in found.split()}
    assert imported.isdisjoint(
        SLOW_IMPORTS | {"aiohttp", "httpx", "httpx2", "requests", "sentencepiece"}
    )
