"""A picture of the examples at one end of a ranking, and of the scores of all."""

from collections.abc import Sequence
from pathlib import Path

from .._pictures import new_figure, save_figure
from .ranking import ExampleRanking, RankedExample

_COLORS = {True: "tab:green", False: "tab:red"}  # whether a score is above zero
_LONGEST_NAME = 40


def write_picture(
    path: Path, found: Sequence[RankedExample], ranking: ExampleRanking, title: str
) -> None:
    """Writes a bar for each of the examples, and a histogram of the scores of all.

    Raises:
        PictureError: matplotlib is not installed.
    """
    figure = new_figure("--plot", 10, 1.5 + 0.25 * max(8, len(found)))
    bars, histogram = figure.subplots(1, 2, width_ratios=(2, 1))
    numbers = range(len(found))
    scores = [example.score for example in found]
    bars.barh(numbers, scores, color=[_COLORS[score > 0] for score in scores])
    bars.set_yticks(numbers, [_name(example) for example in found], fontsize=7)
    bars.invert_yaxis()
    bars.set_xlabel("score")
    histogram.hist(ranking.scores, 24, color="tab:gray")
    histogram.set(xlabel="score", ylabel="examples")
    for axes in (bars, histogram):
        axes.axvline(0, color="black", linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=8, wrap=True)
    save_figure(figure, path)


def _name(example: RankedExample) -> str:
    """The file's own name and the line of the first document, or the id."""
    first, *more = example.place.split("; ")
    name = first.rpartition("/")[2] or example.example
    if more:
        name += f" and {len(more)} more"
    short = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
    # No markup of mathematics
    return short.replace("$", r"\$")
