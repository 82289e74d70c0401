"""The mean scores of a log's examples, and of a model's layers, over steps; printed as
tables.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .log import ScoreLogError, read_scores

NORMALIZATIONS = {
    "step": "divided by the sum of the step's absolute scores",
    "norm": "divided by the norm of the example's gradient",
    "none": "not normalised",
}
"""How scores of different steps are made comparable: raw ones are largest in the first
steps.
"""

_SIGN = "above zero where training on the example lowers the validation loss"
_LONGEST_TEXT = 160  # letters of an example that are shown
_WIDTHS = {"place": 1, "text": 2}  # of columns that share what the others leave


class ExampleRanking(NamedTuple):
    """Examples, from the highest mean score to the lowest, and how many steps scored
    each.
    """

    ids: np.ndarray
    scores: np.ndarray
    steps: np.ndarray


class RankedExample(NamedTuple):
    """An example of a ranking: its mean score over so many steps, its id, its file and
    line, which is empty if they are not known, and its text.
    """

    score: float
    steps: int
    example: str
    place: str
    text: str


def rank_examples(
    folder: Path, normalize: str = "step", **selected: Any
) -> ExampleRanking:
    """The examples of a log by their mean score over the steps that scored them.

    `normalize` is a key of `NORMALIZATIONS`, `selected` which rows, as `read_scores`
    takes it. Rows without a finite score are left out.

    Raises:
        ScoreLogError: no row is selected, or norms are asked for and were not logged.

    Memory: about 30 bytes a row.
    """
    by_norm = normalize == "norm"
    table = _finite(
        folder, ["step", "example", "score", *(["norm"] if by_norm else [])], selected
    )
    summed = [("score", "sum")]
    if by_norm:
        if table["norm"].null_count:
            raise ScoreLogError(
                f"{folder} has rows without the norms of gradients, which are logged by"
                " runs with ghost.norms: true and by a GhostManager with norms=True."
                " Give --normalize step."
            )
        squares = np.square(table["norm"].to_numpy().astype(np.float64))
        table, summed = (
            table.append_column("square", [squares]),
            [*summed, ("square", "sum")],
        )
    # An example has a row for each layer and leaf. Without threads sums are in the
    # order of the rows, and two readings of a log give the same bits.
    table = table.group_by(["step", "example"], use_threads=False).aggregate(summed)
    scores = table["score_sum"].to_numpy()
    if normalize == "step":
        scores = scores / _of_steps(table, scores)
    elif by_norm:
        scores = scores / _nonzero(np.sqrt(table["square_sum"].to_numpy()))
    table = table.append_column("mean", [scores]).group_by("example", use_threads=False)
    table = table.aggregate([("mean", "mean"), ("mean", "count")])
    means = table["mean_mean"].to_numpy()
    # Stable: of equal scores the example that was logged first comes first
    order = np.argsort(-means, kind="stable")
    ids = table["example"].cast("string").to_numpy()
    return ExampleRanking(
        ids[order], means[order], table["mean_count"].to_numpy()[order]
    )


def print_examples(
    folder: Path,
    count: int,
    normalize: str,
    *,
    best: bool,
    file: Path | None = None,
    **selected: Any,
) -> None:
    """Prints the examples with the highest scores, or the lowest, with their text; or
    writes them to a CSV file, with the whole texts.
    """
    ranked = rank_examples(folder, normalize, **selected)
    numbers = np.arange(len(ranked.ids))
    chosen = (numbers if best else numbers[::-1])[:count]
    wanted = [str(name) for name in ranked.ids[chosen]]
    places, texts = _described(folder, wanted, selected)
    found = []
    for at, name in zip(chosen, wanted, strict=True):
        score, steps = float(ranked.scores[at]), int(ranked.steps[at])
        found.append(RankedExample(score, steps, name, places[name], texts[name]))
    signs = f"scores {NORMALIZATIONS[normalize]}, {_SIGN}"
    if file is not None:
        _write(file, found)
        print(f"wrote {len(found)} of {len(numbers):,} examples to {file}; {signs}")
        return
    what = "most helpful" if best else "most harmful"
    title = f"The {len(chosen)} {what} of {len(numbers):,} examples; {signs}"
    # Where an example has a place, its id says nothing to a reader.
    column = "place" if any(places.values()) else "example"
    columns = {"score": "right", "steps": "right", column: "left", "text": "left"}
    lines = []
    for one in found:
        name = _from_here(one.place) or one.example
        lines.append((f"{one.score:+.3f}", str(one.steps), name, one.text))
    _print(title, columns, lines)


def _described(
    folder: Path, examples: Sequence[str], selected: dict[str, Any]
) -> tuple[dict[str, str], dict[str, str]]:
    """The places and the texts of examples; an example that is in several places has
    all of them.
    """
    columns = ["example", "place", "text"]
    rows = read_scores(folder, columns, examples=examples, **selected)
    texts = dict.fromkeys(examples, "")
    places: dict[str, dict[str, None]] = {example: {} for example in examples}
    for row in rows.group_by(columns, use_threads=False).aggregate([]).to_pylist():
        texts[row["example"]] = row["text"]
        # Logs of earlier versions have no places
        if row["place"]:
            places[row["example"]][row["place"]] = None
    return {name: " = ".join(own) for name, own in places.items()}, texts


def _from_here(place: str) -> str:
    """A place without the working folder, for a table."""
    return place.replace(f"{Path.cwd()}/", "")


def _write(file: Path, found: Iterable[RankedExample]) -> None:
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(RankedExample._fields)
        writer.writerows(found)


def print_layers(folder: Path, count: int, **selected: Any) -> None:
    """Prints the share of the scores of each layer, and of the leaves with the largest
    shares.

    Every step counts the same. Sums are of scores, divided by the sum of all absolute
    scores.
    """
    table = _finite(folder, ["step", "layer", "leaf", "score"], selected)
    scores = table["score"].to_numpy().astype(np.float64)
    scores = scores / _of_steps(table, scores) / len(table["step"].unique())
    table = table.append_column("sum", [scores]).append_column(
        "share", [np.abs(scores)]
    )

    def sums(*by: str) -> list[dict[str, Any]]:
        """From the smallest share."""
        found = table.group_by([*by], use_threads=False).aggregate(
            [("share", "sum"), ("sum", "sum")]
        )
        return sorted(found.to_pylist(), key=lambda one: one["share_sum"])

    def shown(one: dict[str, Any]) -> tuple[str, str]:
        return f"{one['share_sum']:.1%}", f"{one['sum_sum']:+.3f}"

    columns = {"share": "right", "sum": "right"}
    largest = {one["layer"]: one["leaf"] for one in sums("layer", "leaf")}
    by_layer = {one["layer"]: one for one in sums("layer") if one["layer"] is not None}
    if by_layer:
        lines = [
            (str(layer), *shown(one), largest[layer])
            for layer, one in sorted(by_layer.items())
        ]
        title = f"The layers' shares of the absolute scores, and their sums, {_SIGN}"
        _print(title, {"layer": "right", **columns, "largest leaf": "left"}, lines)
    lines = [(one["leaf"], *shown(one)) for one in sums("leaf")[::-1][:count]]
    _print("The largest leaves", {"leaf": "left", **columns}, lines)


def _finite(folder: Path, columns: Sequence[str], selected: dict[str, Any]) -> Any:
    """The selected rows whose score is a finite number."""
    table = read_scores(folder, columns, **selected)
    table = table.filter(np.isfinite(table["score"].to_numpy()))
    if not table.num_rows:
        raise ScoreLogError(
            f"{folder} has no finite scores of these steps, layer and leaves: select"
            " others."
        )
    return table


def _of_steps(table: Any, scores: np.ndarray) -> np.ndarray:
    """For each row the sum of the absolute scores of its step."""
    _, step = np.unique(table["step"].to_numpy(), return_inverse=True)
    return _nonzero(np.bincount(step, weights=np.abs(scores)))[step]


def _nonzero(values: np.ndarray) -> np.ndarray:
    return np.where(values > 0, values, 1.0)


def _print(title: str, columns: dict[str, Any], lines: Iterable[Sequence[str]]) -> None:
    """Print a table, each text on one line, not as markup, without control characters,
    and short.
    """
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError(
            "Printing needs rich: pip install 'stacked_remat[train]'."
        ) from error

    def plain(text: str) -> Text:
        spaced = " ".join(text.split())
        kept = "".join(
            letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}"
            for letter in spaced
        )
        short = kept if len(kept) <= _LONGEST_TEXT else f"{kept[: _LONGEST_TEXT - 1]}…"
        return Text(short, overflow="fold")

    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name, side in columns.items():
        table.add_column(name, justify=side, overflow="fold", ratio=_WIDTHS.get(name))
    for line in lines:
        table.add_row(*map(plain, line))
    Console().print(table)
