"""What a run shows in the terminal: a bar where there is one, plain lines where there is not."""

import abc
import os
import sys
import time
from typing import Any, final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress as RichBar,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_SECONDS_BETWEEN_LINES = 15.0


@final
class LastingOutput:
    """A text stream for what need not be read: its reader may go away, or its disk be full.

    What can't be written is dropped, and so is all that follows; letters that its encoding lacks become `?`.
    """

    def __init__(self, stream: Any):
        """Writes to `stream`, which has a file descriptor."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes what can be written; says that all was."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except OSError:
            self._drop()
        return len(text)

    def flush(self) -> None:
        """Writes what is still waiting."""
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self) -> None:
        # Python writes what is waiting when it ends, and would fail there.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def lasting_console() -> Console:
    """Standard output, as something that a command can go on without."""
    return Console(file=None if sys.stdout is None else LastingOutput(sys.stdout))  # pyright: ignore[reportArgumentType]


class Progress(abc.ABC):
    """Receives a run's progress to show it."""

    @abc.abstractmethod
    def message(self, text: str) -> None:
        """Shows a line that stays."""

    @abc.abstractmethod
    def work(self, what: str, done: int, total: int, status: str) -> None:
        """Shows how far work before the steps is, such as tokenizing; it ends when `done` is `total`.

        Args:
            what: a few words, the same in all calls for one work.
            done: of `total`, in any unit.
            total: at least 1.
            status: a few words more.
        """

    @abc.abstractmethod
    def start(self, num_steps: int, done: int = 0) -> None:
        """Begins `num_steps` steps, of which an earlier process did the first `done`."""

    @abc.abstractmethod
    def advance(self, step: int, loss: float, tokens_per_second: float, memory: int | None = None) -> None:
        """Step `step` of `num_steps` is done.

        Args:
            step: its number.
            loss: its loss.
            tokens_per_second: nan as long as it is not known.
            memory: the most bytes in use so far, if that is known.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """Ends the steps, or the work, finished or not."""


@final
class ConsoleProgress(Progress):
    """A bar with loss, tokens per second, memory and time left; with no terminal, a line every few steps."""

    def __init__(self, console: Console | None = None, *, line_every: int = 20):
        self._console = lasting_console() if console is None else console
        self._line_every = line_every
        self._bar: RichBar | None = None
        # What goes on, and when it began or its last line was shown.
        self._work: tuple[str, float] | None = None
        self._num_steps = 0
        self._first_done: tuple[int, float] | None = None

    def message(self, text: str) -> None:
        """Prints the line, above the bar if there is one."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def work(self, what: str, done: int, total: int, status: str) -> None:
        """Puts up a bar, moves it, takes it down at the end; with no terminal, a line now and then."""
        if self._work is None or self._work[0] != what:
            self.stop()
            self._work = (what, time.monotonic())
            if self._console.is_terminal:
                columns = (TextColumn(what, markup=False), BarColumn(), TaskProgressColumn())
                columns += (TextColumn("{task.fields[status]}"), TimeRemainingColumn())
                self._bar = RichBar(*columns, console=self._console)
                self._bar.start()
                self._bar.add_task(what, total=total, status=status)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, status=status)
        elif done == total or time.monotonic() > self._work[1] + _SECONDS_BETWEEN_LINES:
            self._work = (what, time.monotonic())
            self.message(f"{what}  {100 * done // total}%  {status}")
        if done == total:
            self.stop()

    def start(self, num_steps: int, done: int = 0) -> None:
        """Puts up the bar. It says that the first step compiles until that step is done."""
        self._num_steps = num_steps
        self._first_done = None
        if self._console.is_terminal:
            columns = (
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar = RichBar(*columns, console=self._console)
            self._bar.start()
            self._bar.add_task("training", total=num_steps, completed=done, status="compiling the first step")

    def advance(self, step: int, loss: float, tokens_per_second: float, memory: int | None = None) -> None:
        """Moves the bar, or prints a line if this step's turn has come."""
        status = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s{_gibibytes(memory)}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, status=status)
        elif step % self._line_every == 0 or step == self._num_steps or self._first_done is None:
            left = self._seconds_left(step)
            shown = f"loss {loss:.3f}" if left is None else f"{status}  {left:.0f} s left"
            self.message(f"step {step}/{self._num_steps}  {shown}")
        if self._first_done is None:
            self._first_done = (step, time.monotonic())

    def stop(self) -> None:
        """Takes down the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._work = None

    def _seconds_left(self, step: int) -> float | None:
        if self._first_done is None:
            return None
        first, then = self._first_done
        return (time.monotonic() - then) / (step - first) * (self._num_steps - step)


def _gibibytes(memory: int | None) -> str:
    return "" if memory is None else f"  {memory / 2**30:.2f} GiB"
