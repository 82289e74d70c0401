"""Progress of a run: a bar in a terminal, plain lines elsewhere."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, final

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress as RichBar,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from ..memory import readable_bytes

_SECONDS_BETWEEN_LINES = 15.0
_BAR = BarColumn(bar_width=None)
_STATUS = TextColumn("{task.fields[status]}")


@final
class LastingOutput:
    """A text stream that stays usable when its reader goes away or its disk is full.

    From the first failed write on, all text is dropped. Characters outside its encoding
    become `?`.
    """

    def __init__(self, stream: Any):
        """Writes to `stream`, which has a file descriptor."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes the text, or drops it."""
        # A terminal of another encoding must not end a run with a UnicodeEncodeError.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with self._dropping():
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, or drops what is buffered."""
        with self._dropping():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # Python flushes the stream when it ends, and would fail there
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


def lasting_console() -> Console:
    """A console on standard output that stays usable when that is closed."""
    return Console(file=None if sys.stdout is None else LastingOutput(sys.stdout))  # pyright: ignore[reportArgumentType]


@final
class ConsoleProgress:
    """A run as a bar with loss, tokens per second, memory and time left; as lines
    without a terminal.
    """

    def __init__(self, console: Console | None = None, *, line_every: int = 20):
        self._console = lasting_console() if console is None else console
        self._line_every = line_every
        self._bar: RichBar | None = None
        # The current work, and when it began or its last line was shown.
        self._work: tuple[str, float] | None = None
        self._num_steps = 0
        self._first_done: tuple[int, float] | None = None

    def message(self, text: str) -> None:
        """Prints the line, above the bar if one is shown."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def work(self, what: str, done: int, total: int, status: str) -> None:
        """Shows work before the steps, such as tokenizing; without a terminal by a line
        every 15 seconds.

        The work `what` ends with the call in which `done` is `total`, which is at least
        1.
        """
        # One bar at a time: Rich can't show two live displays.
        if self._work is None or self._work[0] != what:
            self.stop()
            self._work = (what, time.monotonic())
            columns = (
                TextColumn(what, markup=False),
                _BAR,
                TaskProgressColumn(),
                _STATUS,
            )
            self._show_bar(*columns, total=total, status=status)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, status=status)
        elif done == total or time.monotonic() > self._work[1] + _SECONDS_BETWEEN_LINES:
            self._work = (what, time.monotonic())
            self.message(f"{what}  {100 * done // total}%  {status}")
        if done == total:
            self.stop()

    def start(self, num_steps: int, done: int = 0) -> None:
        """Begins a run of `num_steps` steps, `done` of which an earlier process did."""
        self._num_steps = num_steps
        self._first_done = None
        columns = (TextColumn("step {task.completed}/{task.total}"), _BAR, _STATUS)
        self._show_bar(
            *columns, total=num_steps, completed=done, status="compiling the first step"
        )

    def waiting(self, status: str) -> None:
        """Says what the next step waits for: in the bar, until that step is done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], status=status)

    def advance(
        self,
        step: int,
        loss: float,
        tokens_per_second: float,
        memory: int | None = None,
    ) -> None:
        """Shows that a step is done: moves the bar, or prints a line every `line_every`
        steps.

        `tokens_per_second` is nan if it is not known yet, and `memory` the peak of
        bytes in use so far.
        """
        status = f"loss {loss:.3f}"
        if math.isfinite(
            tokens_per_second
        ):  # not at the first step, whose time is that of compiling
            status += f"  {tokens_per_second:,.0f} tokens/s"
        status += "" if memory is None else f"  {readable_bytes(memory)}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, status=status)
        elif (
            step % self._line_every == 0
            or step == self._num_steps
            or self._first_done is None
        ):
            if self._first_done is not None:
                first, then = self._first_done
                left = (
                    (time.monotonic() - then)
                    / (step - first)
                    * (self._num_steps - step)
                )
                status += f"  {left:.0f} s left"
            self.message(f"step {step}/{self._num_steps}  {status}")
        # The time left is by the steps after the first, which compiles.
        self._first_done = self._first_done or (step, time.monotonic())

    def stop(self) -> None:
        """Ends the steps or the work, finished or not: removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._work = None

    def _show_bar(self, *columns: ProgressColumn, **task: Any) -> None:
        if self._console.is_terminal:
            columns = (*columns, TimeRemainingColumn(), TextColumn("left"))
            self._bar = RichBar(*columns, console=self._console, expand=True)
            self._bar.start()
            self._bar.add_task("", **task)
