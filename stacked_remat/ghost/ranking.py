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
    example, ids = _encoded(table["example"])
    step, of_step = np.unique(table["step"].to_numpy(), return_inverse=True)
    keys, of_row = np.unique(of_step * len(ids) + example, return_inverse=True)
    scores = np.bincount(of_row, weights=table["score"].to_numpy())
    of_key, example = keys // len(ids), keys % len(ids)
    if selected.normalize == "step":
        scores /= _nonzero(np.bincount(of_key, weights=np.abs(scores), minlength=len(step)))[of_key]
    elif by_norm:
        if table["norm"].null_count:
            raise ScoreLogError(
                f"{selected.folder} has rows without the norms of gradients, which are logged by runs with "
                f"ghost.norms: true and by a GhostManager with norms=True. Give --normalize step."
            )
        squares = np.square(table["norm"].to_numpy().astype(np.float64))
        scores /= _nonzero(np.sqrt(np.bincount(of_row, weights=squares)))
    counts = np.bincount(example, minlength=len(ids))
    means = np.bincount(example, weights=scores, minlength=len(ids)) / np.maximum(counts, 1)
    order = np.argsort(-means, kind="stable")
    order = order[counts[order] > 0]
    return ExampleRanking(ids[order], means[order], counts[order])


@dataclass(frozen=True)
class LeafScores:
    """A leaf's part of the scores.

    Attributes:
        path: of the leaf.
        shares: share of the absolute scores of all leaves, layer by layer; of one number for a leaf outside
            of stacks.
        sums: likewise the sum of the scores, divided by the sum of all absolute scores.
        in_stack: whether the numbers are of layers.
    """

    path: str
    shares: np.ndarray
    sums: np.ndarray
    in_stack: bool


def score_leaves(selected: Selection) -> list[LeafScores]:
    """Each leaf's part of the scores of a selection, every step counting the same.

    Raises:
        ScoreLogError: no row is selected.
    """
    table = selected.rows("step", "layer", "leaf", "score")
    leaf, paths = _encoded(table["leaf"])
    in_stack = np.asarray(table["layer"].is_valid())
    layer = table["layer"].fill_null(0).to_numpy()
    _, step = np.unique(table["step"].to_numpy(), return_inverse=True)
    scores = table["score"].to_numpy().astype(np.float64)
    scores = scores / _nonzero(np.bincount(step, weights=np.abs(scores)))[step] / (step.max() + 1)
    found = []
    for number, path in enumerate(paths):
        own = leaf == number
        if own.any():
            shares = np.bincount(layer[own], weights=np.abs(scores[own]))
            sums = np.bincount(layer[own], weights=scores[own])
            found.append(LeafScores(str(path), shares, sums, bool(in_stack[own].any())))
    return found


def _encoded(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """The codes and the values of a column of repeated texts."""
    (chunk,) = (
        column.unify_dictionaries().combine_chunks().chunks if column.num_chunks != 1 else column.chunks
    )
    return chunk.indices.to_numpy().astype(np.int64), chunk.dictionary.to_numpy(zero_copy_only=False)


def _nonzero(values: np.ndarray) -> np.ndarray:
    return np.where(values > 0, values, 1.0)
