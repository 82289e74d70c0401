"""Plants wrong labels in a task on real text, trains on it, and finds them again by their scores.

    python -m benchmarks.planted_examples

The task is to say whether a piece of the Python standard library is code or documentation. Every tenth
training example has the other label. A small model is trained on all of them by a loop with a `GhostManager`,
which scores the examples against held-out ones whose labels are right. Writes the area under the ROC curve
(AUC) of the scores to `results/planted_examples.json`; the log of scores is in `runs/planted`, for
`python -m stacked_remat.ghost`.
"""

import ast
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import numpy as np
import optax
import scipy.stats
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray

from stacked_remat import Stacked
from stacked_remat.ghost import LOG_FOLDER, GhostManager, ScoreLog
from stacked_remat.ghost.ranking import rank_examples
from stacked_remat.training.data.files import standard_library_files

from .command import Rows, benchmark

LABELS = ("code", "documentation")
Letters, Position = Axis("letters", 128), Axis("position", 80)
Label, Embed, Inner, Layers = Axis("label", 2), Axis("embed", 32), Axis("inner", 64), Axis("layers", 2)
BATCH = 64
PLANTED = 0.1


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
        self.blocks = Stacked.init(Layers, Block)(key=jax.random.split(blocks, Layers.size))
        self.head = hnn.Linear.init(Embed, Label, key=head)

    def __call__(self, letters: NamedArray) -> NamedArray:
        """Maps letters `[batch, position]` to logits `[batch, label]`."""
        return self.head(hax.mean(self.blocks.fold(self.embedding(letters)), Position))


@dataclass(frozen=True)
class Examples:
    """Texts with labels, some of which are wrong."""

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
def main(examples: int = 4000, steps: int = 400, every: int = 2, run: Path = Path("runs/planted")) -> Rows:
    """How well the scores of all steps, of the first 50 and of the others find wrong labels.

    Args:
        examples: to train on.
        steps: of training.
        every: steps between scored ones.
        run: folder of the log.
    """
    shutil.rmtree(run / LOG_FOLDER, ignore_errors=True)
    wrong = train(run, examples=examples, steps=steps, every=every)
    harm, is_wrong = ranked(run, wrong)
    count = int(is_wrong.sum())
    parts = {"auc": None, "auc_of_50_steps": (1, 50), "auc_of_later_steps": (51, steps)}
    yield {
        "scored": len(harm),
        "wrong": count,
        "wrong_among_as_many_lowest": int(is_wrong[-count:].sum()),
        **{name: auc(*ranked(run, wrong, part)) for name, part in parts.items()},
    }


def train(folder: Path, *, examples: int, steps: int, every: int) -> np.ndarray:
    """Trains on examples, scores them, and returns which of them have wrong labels."""
    data = labelled(examples, 4 * BATCH)
    held_out = data.batch(np.arange(examples, examples + 4 * BATCH))
    manager = GhostManager(example_losses, held_out, ScoreLog(folder / LOG_FOLDER), every=every)
    model, optimizer = Classifier(key=jax.random.key(0)), optax.adam(2e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def updated(
        model: Classifier, state: optax.OptState, gradients: Any
    ) -> tuple[Classifier, optax.OptState]:
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state

    for step, rows in zip(range(1, steps + 1), _endless(examples), strict=False):
        texts = [f"{LABELS[data.labels[row]]}: {data.texts[row]}" for row in rows]
        manager.attach_train_batch(data.batch(rows), step=step, examples=rows.tolist(), texts=texts)
        gradients = manager.prepare_gradients(model, manager.prepare_forward_input())
        manager.aggregate_and_log()
        model, state = updated(model, state, gradients)
        manager.clear_gradients()
        if manager.should_save_metrics(step):
            manager.save_metrics()
    manager.cleanup()
    return data.wrong


def ranked(
    folder: Path, wrong: np.ndarray, steps: tuple[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The negative mean scores in some steps or all, in rising order, and whose labels are wrong."""
    found = rank_examples(folder / LOG_FOLDER, steps=steps)
    return -np.asarray(found.scores), wrong[found.ids.astype(int)]


def auc(harm: np.ndarray, wrong: np.ndarray) -> float:
    """The share of pairs of a wrong and a right label in which the wrong one does more harm."""
    pairs = wrong.sum() * (~wrong).sum()
    return round(float(scipy.stats.mannwhitneyu(harm[wrong], harm[~wrong]).statistic / pairs), 4)


def labelled(count: int, held_out: int) -> Examples:
    """Pieces of the standard library in random order, half of them documentation, some with wrong labels.

    These are among the first `count`; others that are held out follow.
    """
    pieces: dict[str, int] = {}
    files = standard_library_files()
    for at in np.random.default_rng(0).permutation(len(files)):
        if len(pieces) >= count + held_out:
            break
        for code, documentation in _functions(Path(files[at].url.removeprefix("file://"))):
            pieces |= {code: 0, documentation: 1}
    to_train, to_hold = (np.random.default_rng(1).permutation(size) for size in (count, held_out))
    every = list(pieces.items())
    own = [every[at] for at in (*to_train, *(count + to_hold))]
    labels, is_wrong = np.array([label for _, label in own]), np.arange(len(own)) < PLANTED * count
    return Examples([text for text, _ in own], np.where(is_wrong, 1 - labels, labels), is_wrong)


def _functions(file: Path) -> Iterator[tuple[str, str]]:
    """The beginnings of the code and of the documentation of each function that has enough of both."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and (documentation := ast.get_docstring(node)):
            texts = (ast.unparse(ast.Module(node.body[1:], [])), documentation)
            code, words = (" ".join(text.split())[: Position.size] for text in texts)
            if len(code) == len(words) == Position.size and code.isascii() and words.isascii():
                yield code, words


def _endless(count: int) -> Iterator[np.ndarray]:
    """Rows of batches, in a new order in each epoch."""
    generator = np.random.default_rng(2)
    while True:
        order = generator.permutation(count)
        yield from (order[at : at + BATCH] for at in range(0, count - BATCH + 1, BATCH))


if __name__ == "__main__":
    main()
