"""Shows the most helpful and the most harmful training examples of a run, and the
layers in which they act.

python -m stacked_remat.ghost top|bottom|by-layer RUN [--count 10] [--csv FILE]
"""

import argparse
import fnmatch
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from .log import ScoreLogError, import_pyarrow, log_folder, read_scores
from .ranking import NORMALIZATIONS, print_examples, print_layers

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
        import_pyarrow()
        folder = log_folder(given.run.expanduser())
        selected = {"steps": given.steps, "leaves": _leaves(folder, given.leaf)}
        if given.command == "by-layer":
            print_layers(folder, given.count, **selected)
        else:
            print_examples(
                folder,
                given.count,
                given.normalize,
                best=given.command == "top",
                file=given.csv,
                layer=given.layer,
                **selected,
            )
    except (ScoreLogError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


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
