"""Draws the metrics of runs, in the terminal or as a picture.

    python -m models.plot runs/mine
    python -m models.plot runs/mine runs/other --out curves.svg

Reads `metrics.jsonl` of each run folder, whose run may still go on. A picture has a
panel for each metric and a line for each run, over the steps.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from models.command import command_parser, local_path, run_command, shown_on
from stacked_remat._pictures import (
    FORMATS,
    check_picture,
    new_figure,
    save_figure,
    text_bars,
)
from stacked_remat.training import ConfigError, DataError

SHOWN = (
    "loss",
    "held_out_loss",
    "learning_rate",
    "tokens_per_second",
    "mfu",
    "peak_memory_bytes",
)
"""The metrics that are drawn where `--metrics` names none and runs have them."""
_WIDTH = 60  # characters of a curve in the terminal


class Curve(NamedTuple):
    """A metric of a run, where it was logged and finite."""

    steps: list[int]
    values: list[float]


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """The command: returns the exit status."""
    console = Console() if console is None else console
    show = shown_on(console)

    def run(arguments: Sequence[str], _: Any) -> int:
        options = _parser().parse_args(arguments)
        runs = {str(folder): read_metrics(folder) for folder in options.runs}
        names = _chosen(options.metrics, runs)
        if options.out is not None:
            write_picture(runs, names, options.out)
            show(f"wrote {options.out}")
            return 0
        for folder, curves in runs.items():
            show(folder)
            for name in names:
                if name in curves:
                    show(text_curve(name, curves[name]))
        return 0

    return run_command(run, arguments, show)


def read_metrics(folder: Path) -> dict[str, Curve]:
    """The metrics of a run that are numbers, by name, in the order of their first line.

    Raises:
        ConfigError: the folder has no metrics.
        DataError: a line is damaged; the last may be incomplete.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no metrics.jsonl. Name the folder of a run of"
            " models.train_lm."
        )
    curves: dict[str, Curve] = {}
    *lines, unfinished = path.read_bytes().split(b"\n")
    del unfinished  # empty, or a line that a process is about to write
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
            step = int(found["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}, line {number} is no line of metrics ({error}). Restore the"
                " file, or remove the line."
            ) from error
        for name, value in found.items():
            # Lists are of layers; null is a number that was not finite.
            if name == "step" or not isinstance(value, int | float):
                continue
            curve = curves.setdefault(name, Curve([], []))
            curve.steps.append(step)
            curve.values.append(float(value))
    return curves


def text_curve(name: str, curve: Curve) -> str:
    """A line with the first and the last value of a metric, and bars between them.

    A bar is the mean of the values in its part of the steps, or of the nearest before.
    """
    first = curve.steps[0]
    last = curve.steps[-1]
    width = min(_WIDTH, len(curve.steps))
    parts: list[list[float]] = [[] for _ in range(width)]
    for step, value in zip(*curve, strict=True):
        # Bars divide the steps evenly, also where steps without a line are between.
        place = 0 if first == last else (step - first) * width // (last - first + 1)
        parts[place].append(value)
    means: list[float] = []
    for values in parts:
        means.append(math.fsum(values) / len(values) if values else means[-1])
    bars = text_bars(means)
    begin, end = (f"{value:.4g}" for value in (curve.values[0], curve.values[-1]))
    return f"  {name:<20} {begin:>10} {bars} {end}  (steps {first} to {last})"


def write_picture(
    runs: Mapping[str, Mapping[str, Curve]], names: Sequence[str], path: Path
) -> None:
    """Writes a panel for each metric with a line for each run.

    Raises:
        PictureError: the format is unknown, or matplotlib is not installed.
    """
    check_picture("--out", path)
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    figure = new_figure("--out", 6 * columns, 3 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for name, axes in zip(names, panels, strict=False):
        for folder, curves in runs.items():
            if name in curves:
                # A metric of a single step, or of few, is seen as points.
                marker = "o" if len(curves[name].steps) < 20 else None
                axes.plot(*curves[name], marker=marker, markersize=3, label=folder)
        axes.set(title=name, xlabel="step")
        axes.spines[["top", "right"]].set_visible(False)
    if len(runs) > 1:
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center"
        )
    save_figure(figure, path)


def _chosen(
    asked: Sequence[str], runs: Mapping[str, Mapping[str, Curve]]
) -> Sequence[str]:
    known = dict.fromkeys(name for curves in runs.values() for name in curves)
    if not known:
        raise DataError(f"{', '.join(runs)}: no metrics were logged yet.")
    for name in asked:
        if name not in known:
            raise ConfigError(
                f"--metrics: no run has {name!r}. There are {', '.join(known)}."
            )
    return asked or [name for name in SHOWN if name in known] or [*known]


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("plot", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=local_path, help="run folders")
    add(
        "--metrics",
        nargs="+",
        default=[],
        help=f"of metrics.jsonl; {', '.join(SHOWN)} where there are such",
    )
    add("--out", type=local_path, help=f"a file {' or '.join(FORMATS)}")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
