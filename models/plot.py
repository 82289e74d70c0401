"""Draws the losses of a run in the terminal.

    python -m models.plot --run_dir runs/mine

Reads `metrics.jsonl` of a run folder of `models.train_lm`, of a run that is finished or not.
"""

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from models.command import local_path, run_command, shown_on
from stacked_remat.training import DataError, lasting_console

Losses = Mapping[str, Sequence[tuple[int, float]]]
"""Steps and losses, by the name of the metric."""

_IS_LOSS = re.compile(r"loss|held_out(/.+)?_loss")
_MARKS = "*o+x#@%&"
_WIDTH, _HEIGHT = 70, 14


def read_losses(run: Path) -> Losses:
    """The losses in a run's metrics, of training and on held-out text, where they are finite.

    Raises:
        FileNotFoundError: there is no run in this folder.
        DataError: a line can't be read, or no line has a loss.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{run} is not a run folder of models.train_lm: it has no {path.name}.")
    found: dict[str, list[tuple[int, float]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            metrics = json.loads(line)
            step = int(metrics["step"])
            losses = {name: value for name, value in metrics.items() if _IS_LOSS.fullmatch(name)}
            values = {name: float(value) for name, value in losses.items() if value is not None}
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path} line {number} is not a line of metrics. Delete that line, and run this again."
            ) from error
        for name, value in values.items():
            if math.isfinite(value):
                found.setdefault(name, []).append((step, value))
    if not found:
        raise DataError(f"{path} has no loss yet. Run this again after the first step.")
    return dict(sorted(found.items(), key=lambda item: item[0] != "loss"))


def text_plot(losses: Losses) -> str:
    """The losses as lines of characters, for 80 columns: each column has the mean loss of its steps."""
    steps = [step for points in losses.values() for step, _ in points]
    first, last = min(steps), max(steps)
    columns: dict[str, dict[int, list[float]]] = {name: {} for name in losses}
    for name, points in losses.items():
        for step, loss in points:
            at = (step - first) * (_WIDTH - 1) // max(last - first, 1)
            columns[name].setdefault(at, []).append(loss)
    means = {
        name: {at: math.fsum(found) / len(found) for at, found in own.items()}
        for name, own in columns.items()
    }
    shown = [loss for own in means.values() for loss in own.values()]
    low, high = min(shown), max(shown)
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for mark, own in zip(itertools.cycle(_MARKS), means.values(), strict=False):
        for at, loss in own.items():
            row = round((high - loss) / (high - low or 1.0) * (_HEIGHT - 1))
            grid[row][at] = mark
    ends = {0: f"{high:.4g}", _HEIGHT - 1: f"{low:.4g}"}
    lines = [f"{ends.get(row, ''):>8} |{''.join(cells)}".rstrip() for row, cells in enumerate(grid)]
    axis = f"{first:,}" + f"step {last:,}".rjust(_WIDTH - len(f"{first:,}"))
    names = "   ".join(f"{mark} {name}" for mark, name in zip(itertools.cycle(_MARKS), means, strict=False))
    return "\n".join([*lines, " " * 9 + "+" + "-" * _WIDTH, " " * 10 + axis, names])


def main(arguments: Sequence[str]) -> int:
    """The command: returns the exit status."""
    show = shown_on(lasting_console())
    parser = argparse.ArgumentParser(
        prog="python -m models.plot", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--run_dir", type=local_path, required=True, help="a run folder of models.train_lm")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def work(arguments: Sequence[str], _: object) -> int:
        show(text_plot(read_losses(parser.parse_args(arguments).run_dir)))
        return 0

    return run_command(work, arguments, show)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
