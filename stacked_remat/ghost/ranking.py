"""The mean scores of a log's examples, and of a model's layers, over steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .log import ScoreLogError, read_scores

NORMALIZATIONS = {
    "step": "divided by the sum of the step's absolute scores",
    "norm": "divided by the norm of the example's gradient",
    "none": "not normalised",
}
"""How scores of different steps are made comparable: raw ones are largest in the first steps."""


@dataclass(frozen=True)
class Selection:
    """The rows of a log that are read, and how scores of different steps are made comparable.

    Attributes:
        folder: of the log.
        steps: the first and the last step; None for all.
        layer: number of a layer; None for the whole model.
        leaves: paths of leaves; None for all.
        normalize: a key of `NORMALIZATIONS`.
    """

    folder: Path
    steps: tuple[int, int] | None = None
    layer: int | None = None
    leaves: tuple[str, ...] | None = None
    normalize: str = "step"

    def rows(self, *columns: str, examples: Sequence[str] | None = None) -> Any:
        """These columns of the rows, as a `pyarrow.Table`; see `read_scores`.

        Rows whose score is not a finite number are left out.

        Raises:
            ScoreLogError: there are none.
        """
        table = read_scores(
            self.folder, columns, steps=self.steps, layer=self.layer, leaves=self.leaves, examples=examples
        )
        if "score" in columns:
            table = table.filter(np.isfinite(table["score"].to_numpy()))
        if not table.num_rows:
            raise ScoreLogError(
                f"{self.folder} has no finite scores of these steps, layer and leaves: select others."
            )
        return table


@dataclass(frozen=True)
class ExampleRanking:
    """Examples, from the highest mean score to the lowest.

    Attributes:
        ids: of the examples.
        scores: mean over the steps that scored the example.
        steps: how many steps scored it.
    """

    ids: np.ndarray
    scores: np.ndarray
    steps: np.ndarray


def rank_examples(selected: Selection) -> ExampleRanking:
    """The examples of a selection by their mean score over steps.

    Raises:
        ScoreLogError: no row is selected, or norms are asked for and were not logged.

    Memory: about 30 bytes a row.
    """
    by_norm = selected.normalize == "norm"
    table = selected.rows("step", "example", "score", *(["norm"] if by_norm else []))
    summed = [("score", "sum")]
    if by_norm:
        if table["norm"].null_count:
            raise ScoreLogError(
                f"{selected.folder} has rows without the norms of gradients, which are logged by runs with "
                f"ghost.norms: true and by a GhostManager with norms=True. Give --normalize step."
            )
        squares = np.square(table["norm"].to_numpy().astype(np.float64))
        table, summed = table.append_column("square", [squares]), [*summed, ("square", "sum")]
    table = table.group_by(["step", "example"], use_threads=False).aggregate(summed)
    scores = table["score_sum"].to_numpy()
    if selected.normalize == "step":
        scores = scores / _of_steps(table, scores)
    elif by_norm:
        scores = scores / _nonzero(np.sqrt(table["square_sum"].to_numpy()))
    table = table.append_column("mean", [scores]).group_by("example", use_threads=False)
    table = table.aggregate([("mean", "mean"), ("mean", "count")])
    means = table["mean_mean"].to_numpy()
    order = np.argsort(-means, kind="stable")
    ids = table["example"].cast("string").to_numpy()
    return ExampleRanking(ids[order], means[order], table["mean_count"].to_numpy()[order])


def score_leaves(selected: Selection) -> list[dict[str, Any]]:
    """The scores of each leaf and layer in a selection, every step counting the same.

    Returns:
        For each `leaf` and `layer`, None outside of stacks: its `share` of the absolute scores, and the `sum`
        of its scores divided by the sum of all absolute scores.

    Raises:
        ScoreLogError: no row is selected.
    """
    table = selected.rows("step", "layer", "leaf", "score")
    scores = table["score"].to_numpy().astype(np.float64)
    scores = scores / _of_steps(table, scores) / len(table["step"].unique())
    table = table.append_column("sum", [scores]).append_column("share", [np.abs(scores)])
    table = table.group_by(["leaf", "layer"], use_threads=False).aggregate([("share", "sum"), ("sum", "sum")])
    table = table.select(["leaf", "layer", "share_sum", "sum_sum"])
    return table.rename_columns(["leaf", "layer", "share", "sum"]).to_pylist()


def _of_steps(table: Any, scores: np.ndarray) -> np.ndarray:
    """For each row the sum of the absolute scores of its step."""
    _, step = np.unique(table["step"].to_numpy(), return_inverse=True)
    return _nonzero(np.bincount(step, weights=np.abs(scores)))[step]


def _nonzero(values: np.ndarray) -> np.ndarray:
    return np.where(values > 0, values, 1.0)
