"""Plants harmful examples in a task on real text, and finds them again by their scores
and by their loss.

    python -m benchmarks.planted_examples

The task is to say whether a piece of the Python standard library is code or
documentation. A small model is trained by a loop with `ghost.grad_dot`, which scores
the examples against held-out ones with right labels. `PLANTED` says which harmful
examples there are in each of the runs. Each example is ranked by its scores (gradient
dot products) and, as the baseline, by the mean of its loss in the same steps, which any
run can log. Writes the areas under the ROC curves (AUC) to
`results/planted_examples.json`, with intervals of 95% by bootstrap over the examples,
and the held-out loss of runs with and without what is planted; the logs of scores are
in `runs/planted`, for `python -m stacked_remat.ghost`.
"""

import ast
import functools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import numpy as np
import optax
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray

from stacked_remat import Stacked
from stacked_remat.ghost import (
    LOG_FOLDER,
    GradDots,
    ScoreLog,
    StepScores,
    grad_dot,
    val_direction,
)
from stacked_remat.ghost.log import read_scores
from stacked_remat.ghost.ranking import rank_examples
from stacked_remat.training.data.files import standard_library_files

from .command import Rows, benchmark

LABELS = ("code", "documentation")
Letters = Axis("letters", 128)
Position = Axis("position", 80)
Label = Axis("label", 2)
Embed = Axis("embed", 32)
Inner = Axis("inner", 64)
Layers = Axis("layers", 2)
BATCH = 64
SHARE = 0.1  # of the examples that are planted, where a number is chosen
COPIES = 20
PLANTED = {
    "wrong labels": "every tenth label is wrong",
    "copies": (
        "every tenth example is one of twenty copies of a piece, all with the wrong"
        " label"
    ),
    "a wrong rule": (
        "all documentation with a parenthesis has the label of code, and none has the"
        " right one"
    ),
    "another domain": (
        "every tenth example is in upper case, as no held-out one is, and has the wrong"
        " label"
    ),
}
"""The kinds of harmful examples."""


class Block(eqx.Module):
    """A residual block."""

    norm: hnn.LayerNorm
    up: hnn.Linear
    down: hnn.Linear

    def __init__(self, *, key: PRNGKeyArray):
        up, down = jax.random.split(key)
        self.norm = hnn.LayerNorm.init(Embed)
        self.up = hnn.Linear.init(Embed, Inner, key=up)
        self.down = hnn.Linear.init(Inner, Embed, key=down)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `[..., Embed]` to itself."""
        return x + self.down(hnn.gelu(self.up(self.norm(x))))


class Classifier(eqx.Module):
    """Labels a text by the mean of what it makes of its letters."""

    embedding: hnn.Embedding
    blocks: Stacked
    head: hnn.Linear

    def __init__(self, *, key: PRNGKeyArray):
        embedding, blocks, head = jax.random.split(key, 3)
        self.embedding = hnn.Embedding.init(Letters, Embed, key=embedding)
        self.blocks = Stacked.init(Layers, Block)(
            key=jax.random.split(blocks, Layers.size)
        )
        self.head = hnn.Linear.init(Embed, Label, key=head)

    def __call__(self, letters: NamedArray) -> NamedArray:
        """Maps letters `[batch, position]` to logits `[batch, label]`."""
        return self.head(hax.mean(self.blocks.fold(self.embedding(letters)), Position))


@dataclass(frozen=True)
class Examples:
    """Texts with labels, of which those that are planted are wrong."""

    texts: list[str]
    labels: np.ndarray
    wrong: np.ndarray

    def batch(self, rows: np.ndarray) -> dict[str, NamedArray]:
        """Some of them as arrays."""
        letters = np.array([list(self.texts[row].encode()) for row in rows], np.int32)
        Batch = Axis("batch", len(rows))
        return {
            "letters": hax.named(letters, (Batch, Position)),
            "labels": hax.named(self.labels[rows].astype(np.int32), Batch),
        }


def example_losses(model: Classifier, batch: dict[str, NamedArray]) -> NamedArray:
    """The cross entropy of each example."""
    targets = hnn.one_hot(batch["labels"], Label)
    return -hax.sum(hnn.log_softmax(model(batch["letters"]), Label) * targets, Label)


@benchmark("planted_examples")
def main(
    examples: int = 4000,
    steps: int = 400,
    every: int = 2,
    run: Path = Path("runs/planted"),
) -> Rows:
    """For each kind, how well what is planted is found by all steps, by the first 50,
    and by the others.

    Args:
        examples: to train on.
        steps: of training.
        every: steps between scored ones.
        run: folder of the logs, one for each kind.
    """
    for planted in PLANTED:
        folder = run / planted.replace(" ", "_")
        shutil.rmtree(folder / LOG_FOLDER, ignore_errors=True)
        wrong = train(
            folder, examples=examples, steps=steps, every=every, planted=planted
        )
        data = labelled(examples, 4 * BATCH, planted)
        kept = np.flatnonzero(~data.wrong[:examples])
        losses = [
            held_out_loss(data, examples, rows, steps)
            for rows in (np.arange(examples), kept)
        ]
        for part in ((1, steps), (1, 50), (51, steps)):
            yield {
                "planted": planted,
                "steps": f"{part[0]} to {part[1]}",
                **_found(ranked(folder, wrong, part), "scores"),
                **_found(ranked_by_loss(folder, wrong, part), "loss"),
                "held_out_loss": round(losses[0], 4),
                "held_out_loss_without": round(losses[1], 4),
            }


def _found(ranking: tuple[np.ndarray, np.ndarray], by: str) -> dict[str, Any]:
    """How well an order finds what is planted: the AUC, and the share of as many that
    come last in it.
    """
    harm, is_wrong = ranking
    count = int(is_wrong.sum())
    of_all, bounds = auc_and_interval(harm, is_wrong)
    return {
        f"auc_of_{by}": of_all,
        f"auc_of_{by}_interval": bounds,
        f"found_by_{by}": round(int(is_wrong[-count:].sum()) / count, 4),
    }


def train(
    folder: Path,
    *,
    examples: int,
    steps: int,
    every: int,
    planted: str = "wrong labels",
) -> np.ndarray:
    """Trains on examples, scores them, and returns which of them are planted."""
    data = labelled(examples, 4 * BATCH, planted)
    held_out = data.batch(np.arange(examples, examples + 4 * BATCH))
    log = ScoreLog(folder / LOG_FOLDER)
    model, state = _start()
    for step, rows in zip(
        range(1, steps + 1), _endless(np.arange(examples)), strict=False
    ):
        batch = data.batch(rows)
        if step % every:
            gradients = _gradients(model, batch)
        else:
            gradients, found = _scored(model, batch, held_out)
            texts = [f"{LABELS[data.labels[row]]}: {data.texts[row]}" for row in rows]
            log.append(
                StepScores.of(found, found.aux, step, rows.tolist(), texts=texts)
            )
        model, state = _updated(model, state, gradients)
    log.flush()
    return data.wrong


def held_out_loss(data: Examples, examples: int, rows: np.ndarray, steps: int) -> float:
    """The loss of the held-out examples after as many steps on some rows alone, without
    scores.
    """
    model, state = _start()
    for _, chosen in zip(range(steps), _endless(rows), strict=False):
        model, state = _updated(model, state, _gradients(model, data.batch(chosen)))
    return float(_loss(model, data.batch(np.arange(examples, len(data.texts)))))


_OPTIMIZER = optax.adam(2e-2)


def _start() -> tuple[Classifier, optax.OptState]:
    model = Classifier(key=jax.random.key(0))
    return model, _OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_jit
def _loss(model: Classifier, batch: dict[str, NamedArray]) -> Any:
    return hax.mean(example_losses(model, batch)).scalar()


_gradients = eqx.filter_jit(eqx.filter_grad(_loss))


@eqx.filter_jit
def _scored(
    model: Classifier, batch: dict[str, NamedArray], held_out: dict[str, NamedArray]
) -> tuple[Any, GradDots]:
    """The gradients, and the scores of the examples with their losses."""

    def with_losses(model: Classifier, batch: Any) -> tuple[NamedArray, NamedArray]:
        losses = example_losses(model, batch)
        return losses, losses

    direction = val_direction(model, example_losses, held_out)
    return grad_dot(model, with_losses, batch, direction=direction, has_aux=True)


@eqx.filter_jit
def _updated(
    model: Classifier, state: optax.OptState, gradients: Any
) -> tuple[Classifier, optax.OptState]:
    updates, state = _OPTIMIZER.update(gradients, state)
    return eqx.apply_updates(model, updates), state


def ranked(
    folder: Path, wrong: np.ndarray, steps: tuple[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The negative mean scores in some steps or all, in rising order, and which are
    planted.
    """
    found = rank_examples(folder / LOG_FOLDER, steps=steps)
    return -np.asarray(found.scores), wrong[found.ids.astype(int)]


def ranked_by_loss(
    folder: Path, wrong: np.ndarray, steps: tuple[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The mean losses of the examples that `ranked` has, in rising order, and which are
    planted.
    """
    columns = ["step", "example", "loss"]
    rows = read_scores(folder / LOG_FOLDER, columns, steps=steps).group_by(
        ["step", "example"]
    )
    means = (
        rows.aggregate([("loss", "min")])
        .group_by("example")
        .aggregate([("loss_min", "mean")])
    )
    losses = means["loss_min_mean"].to_numpy()
    ids = means["example"].cast("string").to_numpy()
    order = np.argsort(losses, kind="stable")
    return losses[order], wrong[ids[order].astype(int)]


def auc(harm: np.ndarray, wrong: np.ndarray) -> float:
    """The share of pairs of a wrong and a right label in which the wrong one does more
    harm; pairs of equal harm count half.
    """
    return round(_share_of_pairs(harm[wrong], np.sort(harm[~wrong])), 4)


def _share_of_pairs(own: np.ndarray, others: np.ndarray) -> float:
    """The share of pairs in which the first is larger; the second are in rising
    order.
    """
    below = np.searchsorted(others, own, side="left")
    not_above = np.searchsorted(others, own, side="right")
    return float((below + not_above).mean() / (2 * len(others)))


def auc_and_interval(
    harm: np.ndarray, wrong: np.ndarray, draws: int = 500
) -> tuple[float, str]:
    """The AUC, and its interval of 95% by bootstrap over the examples of both kinds."""
    generator = np.random.default_rng(3)
    own = harm[wrong]
    others = harm[~wrong]
    found = []
    for _ in range(draws):
        of_own = own[generator.integers(len(own), size=len(own))]
        of_others = others[generator.integers(len(others), size=len(others))]
        found.append(_share_of_pairs(of_own, np.sort(of_others)))
    return auc(harm, wrong), interval(found)


def interval(draws: Sequence[float]) -> str:
    """The middle 95% of draws."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return f"{low:.3f} to {high:.3f}"


def labelled(count: int, held_out: int, planted: str = "wrong labels") -> Examples:
    """Pieces of the standard library in random order, half of them documentation, and
    what is planted.

    That is among the first `count`; others that are held out follow, with right labels.
    """
    every = _pieces(count + held_out)
    to_train, to_hold = (
        np.random.default_rng(1).permutation(size) for size in (count, held_out)
    )
    own = [every[at] for at in (*to_train, *(count + to_hold))]
    texts = [text for text, _ in own]
    labels = np.array([label for _, label in own])
    is_wrong = np.arange(len(own)) < SHARE * count
    match planted:
        case "wrong labels":
            pass
        case "copies":
            for row in np.flatnonzero(is_wrong):
                first = row - row % COPIES
                texts[row] = texts[first]
                labels[row] = labels[first]
        case "a wrong rule":
            has_parenthesis = np.array(["(" in text for text in texts])
            is_wrong = (labels == 1) & has_parenthesis & (np.arange(len(own)) < count)
        case "another domain":
            for row in np.flatnonzero(is_wrong):
                texts[row] = texts[row].upper()
        case other:
            raise ValueError(
                f"{other!r} is no kind of harmful examples; write one of"
                f" {list(PLANTED)}."
            )
    return Examples(texts, np.where(is_wrong, 1 - labels, labels), is_wrong)


@functools.cache
def _pieces(count: int) -> list[tuple[str, int]]:
    """At least so many texts, and whether each is documentation."""
    pieces: dict[str, int] = {}
    files = standard_library_files()
    for at in np.random.default_rng(0).permutation(len(files)):
        if len(pieces) >= count:
            break
        for code, documentation in _functions(
            Path(files[at].url.removeprefix("file://"))
        ):
            pieces |= {code: 0, documentation: 1}
    return list(pieces.items())


def _functions(file: Path) -> Iterator[tuple[str, str]]:
    """The beginnings of the code and of the documentation of each function that has
    enough of both.
    """
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and (
            documentation := ast.get_docstring(node)
        ):
            texts = (ast.unparse(ast.Module(node.body[1:], [])), documentation)
            code, words = (" ".join(text.split())[: Position.size] for text in texts)
            if (
                len(code) == len(words) == Position.size
                and code.isascii()
                and words.isascii()
            ):
                yield code, words


def _endless(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Rows of batches, in a new order in each epoch."""
    generator = np.random.default_rng(2)
    while True:
        order = rows[generator.permutation(len(rows))]
        yield from (
            order[at : at + BATCH] for at in range(0, len(order) - BATCH + 1, BATCH)
        )


if __name__ == "__main__":
    main()
