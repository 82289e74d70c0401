"""The mean scores of a log's examples, and of a model's layers, over steps."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .log import ScoreLogError, TokenScores, log_folder, read_scores

NORMALIZATIONS = {
    "step": "divided by the sum of the step's absolute scores",
    "norm": "divided by the norm of the example's gradient",
    "none": "not normalised",
}
"""How scores of different steps are made comparable: raw ones are largest in the first
steps.
"""


class ExampleRanking(NamedTuple):
    """Examples, from the highest mean score to the lowest, and how many steps scored
    each.
    """

    ids: np.ndarray
    scores: np.ndarray
    steps: np.ndarray


class RankedExample(NamedTuple):
    """An example of a ranking: its mean score over so many steps, its id, its file and
    line, which is empty if they are not known, its text, and the sums of its tokens'
    scores over the steps, if they were logged.
    """

    score: float
    steps: int
    example: str
    place: str
    text: str
    tokens: TokenScores | None


def rank_examples(
    folder: str | Path, normalize: str = "step", **selected: Any
) -> ExampleRanking:
    """The examples of a log by their mean score over the steps that scored them.

    `folder` is that of a run or of its log, `normalize` a key of `NORMALIZATIONS`,
    `selected` which rows, as `read_scores` takes it. Rows without a finite score are
    left out.

    Raises:
        FileNotFoundError: there is no such folder.
        ScoreLogError: it has no scores, no row is selected, or norms are asked for and
            were not logged.
        ValueError: `normalize` is none of the keys.

    Memory: about 30 bytes a row.
    """
    if normalize not in NORMALIZATIONS:
        known = ", ".join(map(repr, NORMALIZATIONS))
        raise ValueError(f"normalize is one of {known}; got {normalize!r}.")
    folder = log_folder(Path(folder))
    by_norm = normalize == "norm"
    table = finite_rows(
        folder, ["step", "example", "score", *(["norm"] if by_norm else [])], selected
    )
    summed = [("score", "sum")]
    if by_norm:
        if table["norm"].null_count:
            raise ScoreLogError(
                f"{folder} has rows without the norms of gradients, which are those of"
                " runs with ghost.norms: true, and of grad_dot with norms=True."
                " Give --normalize step."
            )
        squares = np.square(table["norm"].to_numpy().astype(np.float64))
        table = table.append_column("square", [squares])
        summed = [*summed, ("square", "sum")]
    # An example has a row for each layer and leaf. Without threads sums are in the
    # order of the rows, and two readings of a log give the same bits.
    table = table.group_by(["step", "example"], use_threads=False).aggregate(summed)
    scores = table["score_sum"].to_numpy()
    if normalize == "step":
        scores = scores / sums_of_steps(table, scores)
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


def extreme_examples(
    folder: Path,
    ranking: ExampleRanking,
    count: int,
    *,
    best: bool,
    **selected: Any,
) -> list[RankedExample]:
    """The first examples of a ranking, or the last ones from the lowest score on, with
    what the log says of them.
    """
    numbers = np.arange(len(ranking.ids))
    chosen = (numbers if best else numbers[::-1])[:count]
    wanted = [str(name) for name in ranking.ids[chosen]]
    places, texts = _described(folder, wanted, selected)
    tokens = _tokens(folder, wanted, selected)
    found = []
    for at, name in zip(chosen, wanted, strict=True):
        score = float(ranking.scores[at])
        steps = int(ranking.steps[at])
        described = (name, places[name], texts[name], tokens.get(name))
        found.append(RankedExample(score, steps, *described))
    return found


def write_csv(file: Path, found: Iterable[RankedExample]) -> None:
    """Writes examples with their whole texts, without the scores of tokens."""
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(RankedExample._fields[:-1])
        writer.writerows(example[:-1] for example in found)


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


def _tokens(
    folder: Path, examples: Sequence[str], selected: dict[str, Any]
) -> dict[str, TokenScores]:
    """The scores of the tokens of examples, added up over steps; of those whose were
    logged.
    """
    columns = ["example", "token_scores", "token_ends"]
    rows = read_scores(folder, columns, examples=examples, **selected).drop_null()
    found: dict[str, TokenScores] = {}
    for row in rows.to_pylist():
        own = TokenScores(np.array(row["token_scores"]), np.array(row["token_ends"]))
        before = found.get(row["example"])
        if before is not None:
            own = TokenScores(before.scores + own.scores, own.ends)
        found[row["example"]] = own
    return found


def finite_rows(folder: Path, columns: Sequence[str], selected: dict[str, Any]) -> Any:
    """The selected rows whose score is a finite number."""
    table = read_scores(folder, columns, **selected)
    table = table.filter(np.isfinite(table["score"].to_numpy()))
    if not table.num_rows:
        raise ScoreLogError(
            f"{folder} has no finite scores of these steps, layer and leaves."
            f" {_what_there_is(folder)}"
        )
    return table


def _what_there_is(folder: Path) -> str:
    """The steps and layers of a log."""
    table = read_scores(folder, ["step", "layer"])
    steps = table["step"].to_numpy()
    if not steps.size:
        return "It has no scores at all."
    there_are = f"It has scores of the steps {steps.min()} to {steps.max()}"
    layers = table["layer"].drop_null().to_numpy()
    if not layers.size:
        return f"{there_are}, none of them of a layer."
    return f"{there_are} and the layers {layers.min()} to {layers.max()}."


def sums_of_steps(table: Any, scores: np.ndarray) -> np.ndarray:
    """For each row the sum of the absolute scores of its step."""
    _, step = np.unique(table["step"].to_numpy(), return_inverse=True)
    return _nonzero(np.bincount(step, weights=np.abs(scores)))[step]


def _nonzero(values: np.ndarray) -> np.ndarray:
    return np.where(values > 0, values, 1.0)
