"""What a run prints, in a terminal and without one."""

import io
import os
import re
import time

from rich.console import Console

from stacked_remat.training import ConsoleProgress
from stacked_remat.training.progress import LastingOutput


def run(progress, steps, memory=None):
    progress.message("[before]")
    progress.start(steps)
    for step in range(1, steps + 1):
        progress.advance(
            step, 5.0 - step / 10, float("nan") if step == 1 else 1234.5, memory
        )
    progress.stop()


def test_without_a_terminal_plain_lines_are_printed():
    out = io.StringIO()
    run(ConsoleProgress(Console(file=out, width=60), line_every=4), 9, memory=3 << 29)
    lines = out.getvalue().splitlines()
    assert lines[0] == "[before]"
    assert [line.split()[1] for line in lines[1:]] == ["1/9", "4/9", "8/9", "9/9"]
    assert "loss 4.900" in lines[1] and "nan" not in lines[1]
    assert "loss 4.600  1,234 tokens/s  1.50 GiB" in lines[2] and lines[2].endswith(
        "s left"
    )


def test_the_bar_fits_80_columns_whole():
    out = io.StringIO()
    progress = ConsoleProgress(
        Console(file=out, force_terminal=True, width=80, color_system=None)
    )
    progress.start(100_000, done=99_998)
    progress.advance(99_999, 12.3456, 1_234_567.8, 139 << 30)
    progress.stop()
    last = (
        re.sub(r"\x1b\[[^m]*?[A-Za-z]", "\r", out.getvalue()).rstrip().split("\r")[-1]
    )
    assert (
        "step 99999/100000 " in last
        and " loss 12.346  1,234,568 tokens/s  139.00 GiB " in last
    )
    assert last.endswith(" left") and len(last) == 80


def work(progress, total=3):
    for done in range(1, total + 1):
        progress.work("[tokenizing] web", done, total, f"{done * 1000:,} tokens")


def test_long_work_prints_a_line_at_intervals(monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    work(ConsoleProgress(Console(file=out, width=40)), total=8)
    shown = [line.split()[2] for line in out.getvalue().splitlines()]
    assert 2 <= len(shown) < 8 and shown[-1] == "100%"


def test_work_in_a_terminal_is_a_bar_until_it_ends_or_is_stopped():
    out = io.StringIO()
    progress = ConsoleProgress(
        Console(file=out, force_terminal=True, width=120, color_system=None)
    )
    work(progress)
    assert "[tokenizing] web" in out.getvalue() and "100%" in out.getvalue()
    progress.work("other", 1, 2, "")
    progress.stop()
    run(progress, 2)
    assert "2/2" in out.getvalue()


def test_output_without_a_reader_is_dropped(tmp_path):
    reader, writer = os.pipe()
    with open(writer, "w", encoding="ascii") as stream:
        console = Console(file=LastingOutput(stream))  # pyright: ignore[reportArgumentType]
        progress = ConsoleProgress(console)
        progress.message("held-out loss → 2")
        assert os.read(reader, 100) == b"held-out loss ? 2\n"
        os.close(reader)
        for _ in range(2):
            progress.message("no one reads this")
