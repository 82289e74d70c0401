"""Shows the most helpful and the most harmful training examples of a run, and the
layers in which they act.

python -m stacked_remat.ghost top|bottom|by-layer RUN [--count 10]
    [--csv FILE] [--plot FILE]
"""

import argparse
import fnmatch
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._pictures import FORMATS, PictureError, check_picture
from ._chart import write_picture
from ._tables import heading, print_examples, print_layers
from .log import ScoreLogError, import_pyarrow, log_folder, read_scores
from .ranking import NORMALIZATIONS, extreme_examples, rank_examples, write_csv

_COMMANDS = {
    "top": (
        "the examples whose gradients agree most with the direction: training on them"
        " lowers the validation loss most"
    ),
    "bottom": "the examples whose gradients oppose it most",
    "by-layer": "how large the scores are in each layer and leaf",
}


def main(arguments: Sequence[str]) -> int:
    """The command; returns 0, or 1 after an error in one message."""
    given = _parser().parse_args(arguments)
    try:
        if given.command != "by-layer" and given.plot is not None:
            check_picture("--plot", given.plot)
        csv = getattr(given, "csv", None)
        if csv is not None and not csv.parent.is_dir():
            raise ScoreLogError(
                f"--csv: the folder {str(csv.parent)!r} does not exist."
            )
        import_pyarrow()
        folder = log_folder(given.run.expanduser())
        selected = {"steps": given.steps, "leaves": _leaves(folder, given.leaf)}
        if given.command == "by-layer":
            print_layers(folder, given.count, **selected)
        else:
            _show_examples(given, folder, {"layer": given.layer, **selected})
    except (ScoreLogError, PictureError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _show_examples(
    given: argparse.Namespace, folder: Path, selected: dict[str, Any]
) -> None:
    """Prints the examples that were asked for, or writes them to files."""
    ranking = rank_examples(folder, given.normalize, **selected)
    best = given.command == "top"
    found = extreme_examples(folder, ranking, given.count, best=best, **selected)
    title = heading(ranking, len(found), best, given.normalize)
    if given.csv is not None:
        write_csv(given.csv, found)
        print(f"wrote {given.csv}. {title}")
    if given.plot is not None:
        write_picture(given.plot, found, ranking, title)
        print(f"wrote {given.plot}. {title}")
    if given.csv is None and given.plot is None:
        print_examples(found, ranking, title)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stacked_remat.ghost",
        description=(__doc__ or "").partition("\n\n")[0],
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="top|bottom|by-layer"
    )
    for name, meaning in _COMMANDS.items():
        command = commands.add_parser(name, help=meaning, description=meaning)
        command.add_argument(
            "run", type=Path, metavar="RUN", help="the run folder, or its log's folder"
        )
        command.add_argument(
            "--count", type=_positive, default=10, help="how many to show (10)"
        )
        command.add_argument(
            "--steps", type=_steps, metavar="FIRST:LAST", help="only these steps"
        )
        command.add_argument(
            "--leaf", metavar="PATTERN", help="only leaves like this, such as *q_proj*"
        )
        if name != "by-layer":
            command.add_argument("--layer", type=int, help="only this layer, from 0")
            command.add_argument(
                "--csv", type=Path, metavar="FILE", help="write them to this file"
            )
            command.add_argument(
                "--plot",
                type=Path,
                metavar="FILE",
                help=f"draw them and all scores ({' or '.join(FORMATS)})",
            )
            how = "; ".join(
                f"{key}: {meaning}" for key, meaning in NORMALIZATIONS.items()
            )
            command.add_argument(
                "--normalize",
                choices=NORMALIZATIONS,
                default="step",
                help=f"{how} (step)",
            )
    return parser


def _leaves(folder: Path, pattern: str | None) -> list[str] | None:
    """The leaves of a log that match a pattern; None for all."""
    if pattern is None:
        return None
    paths = read_scores(folder, ["leaf"])["leaf"].unique().to_pylist()
    leaves = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
    if not leaves:
        raise ScoreLogError(
            f"--leaf {pattern!r} matches none of the {len(paths)} leaves of {folder},"
            f" such as {', '.join(sorted(paths)[:3])}."
        )
    return leaves


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1, got {text!r}")
    return int(text)


def _steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(
            f"must be the first and the last step, such as 1:100, got {text!r}"
        )
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
