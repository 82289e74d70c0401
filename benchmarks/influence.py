"""How well scores of training examples predict what training without them does, and find wrong labels.

    python -m benchmarks.influence

Two tasks: the classifier of `benchmarks.planted_examples`, a tenth of whose labels are wrong, and a small
Qwen3 on the source files of the Python standard library. Each is trained once, and its examples are scored by
`ghost.replay`, by gradient dot products summed over the steps, and at random. Then it is trained again, many
times, on random halves and nine tenths of the examples: the linear datamodeling score (Park et al. 2023) is
Spearman's correlation of the held-out losses of these runs with the sums of their examples' scores, the mean
over held-out texts. Writes it to `results/influence.json`, with the area under the ROC curve (AUC) of wrong
labels.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from haliax import Axis, NamedArray

from models.architectures import Qwen3Config
from models.lm import build_model, example_losses as sequence_losses
from models.transformer.config import AttentionConfig
from stacked_remat import fold, ghost, scan
from stacked_remat.training import TokenBatch
from stacked_remat.training.data.files import standard_library_files

from . import planted_examples
from .record import RESULTS, write_results

Examples = Axis("batch", 32)
SEQUENCE = 64
SHARES = (0.5, 0.9)


@dataclass(frozen=True)
class Task:
    """What is trained, and on what.

    Attributes:
        name: for the table.
        model: before the first step.
        losses: (model, batch) to the loss of each example, `[batch]`.
        batch: the arrays of some examples, by their rows.
        count: of the examples to train on; held-out ones follow them.
        rate: the learning rate.
        wrong: which examples have a wrong label; None if labels are not planted.
    """

    name: str
    model: Any
    losses: Callable[[Any, Any], NamedArray]
    batch: Callable[[np.ndarray], Any]
    count: int
    rate: float
    wrong: np.ndarray | None = None


def classifier(count: int, held_out: int) -> Task:
    """Code or documentation, with wrong labels among the examples and none among those that are held out."""
    data = planted_examples.labelled(count)
    right = planted_examples.labelled(held_out, after=count, wrong=0.0)
    every = planted_examples.Examples(
        data.texts + right.texts,
        np.concatenate([data.labels, right.labels]),
        np.concatenate([data.wrong, right.wrong]),
    )
    model = planted_examples.Classifier.init(key=jax.random.key(0))
    return Task("classifier", model, planted_examples.example_losses, every.batch, count, 1e-2, data.wrong)


def language_model(count: int, held_out: int) -> Task:
    """The next byte of a sequence of a source file."""
    files = standard_library_files()
    order = np.random.default_rng(0).permutation(len(files))
    rows = []
    for at in order:
        text = Path(files[at].url.removeprefix("file://")).read_bytes()[: 4 * (SEQUENCE + 1)]
        rows += [text[i : i + SEQUENCE + 1] for i in range(0, len(text) - SEQUENCE, SEQUENCE + 1)]
    tokens = np.array([[*row] for row in rows[: count + held_out]], np.int32)
    attention = AttentionConfig(backend="exact")  # which has second derivatives
    config = Qwen3Config(32, num_layers=2, num_heads=2, num_kv_heads=1, attention=attention, mlp_dim=64)
    model = build_model(config, Axis("vocab", 256), remat=True, key=jax.random.key(0))

    def batch(rows: np.ndarray) -> TokenBatch:
        own = tokens[rows]
        return TokenBatch.of(own[:, :-1], own[:, 1:], np.ones((len(rows), SEQUENCE), np.float32))

    def losses(model: Any, batch: TokenBatch) -> NamedArray:
        (parts, _), _ = sequence_losses(model, batch)
        return parts * parts.size

    return Task("language model", model, losses, batch, count, 5e-3)


def measured(task: Task, *, epochs: int, runs: int, held_out: int, targets: int) -> list[dict[str, Any]]:
    """A row for each method: its score on the task."""
    generator = np.random.default_rng(1)
    orders = [generator.permutation(task.count).reshape(-1, Examples.size) for _ in range(epochs)]
    order = np.concatenate(orders)  # [step, example]
    Steps = Axis("steps", len(order))
    batches = _stacked([task.batch(rows) for rows in order], Steps)
    texts = np.arange(task.count, task.count + held_out).reshape(targets, -1)
    held = _stacked([task.batch(rows) for rows in texts], Axis("targets", targets))
    optimizer = optax.adam(optax.cosine_decay_schedule(task.rate, Steps.size), eps_root=1e-30)
    step = ghost.weighted_step(task.losses, optimizer)
    start = task.model, optimizer.init(eqx.filter(task.model, eqx.is_inexact_array))

    def loss(state: Any, target: Any) -> Any:
        return hax.mean(task.losses(state[0], target)).scalar()

    @eqx.filter_jit
    def losses_of(start: Any, batches: Any, weights: Any, held: Any) -> Any:
        """The held-out losses of a run with these weights of the examples, `[target]`."""

        def run(weights: Any) -> Any:
            named = hax.named(weights, (Steps, Examples))
            last = fold(step, Steps)(start, batches, named)
            return _of_each(lambda target: loss(last, target), held)

        return jax.lax.map(run, weights, batch_size=4)

    @eqx.filter_jit
    def replayed(start: Any, batches: Any, target: Any) -> Any:
        found = ghost.replay(step, start, batches, lambda last: loss(last, target), Steps, Examples)
        return found.examples.array

    @eqx.filter_jit
    def dotted(start: Any, batches: Any, target: Any) -> Any:
        def scored(state: Any, batch: Any) -> tuple[Any, Any]:
            direction = ghost.val_direction(state[0], task.losses, target)
            _, found = ghost.grad_dot(state[0], task.losses, batch, direction=direction)
            return step(state, batch, hax.ones(Examples)), found.total

        return -scan(scored, Steps)(start, batches)[1].rearrange((Steps, Examples)).array

    def of_examples(by_step: Any) -> np.ndarray:
        """The sums over the steps of an example, `[target, example]`."""
        sums = np.zeros((targets, task.count))
        for target, values in enumerate(by_step):
            np.add.at(sums[target], order, np.asarray(values, np.float64))
        return sums

    each = [_entry(held, index) for index in range(targets)]
    scores = {
        "replay": of_examples([replayed(start, batches, target) for target in each]),
        "gradient dot products": of_examples([dotted(start, batches, target) for target in each]),
        "random": generator.standard_normal((targets, task.count)),
    }
    rows = {
        name: {"task": task.name, "method": name, "auc": _auc(of_target.mean(0), task.wrong)}
        for name, of_target in scores.items()
    }
    for share in SHARES:
        most = round(share * task.count)
        kept = np.stack([generator.permutation(task.count) < most for _ in range(runs)])
        found = losses_of(start, batches, jnp.asarray(kept[:, order], jnp.float32), held)
        for name, of_target in scores.items():
            pairs = zip((kept @ of_target.T).T, np.asarray(found).T, strict=True)
            each = [_correlation(*pair) for pair in pairs]
            rows[name][f"score_{share}"] = round(float(np.mean(each)), 4)
    return list(rows.values())


def _correlation(predicted: np.ndarray, found: np.ndarray) -> float:
    """Spearman's, of ranks."""
    ranks = [scipy.stats.rankdata(values) for values in (predicted, found)]
    return float(np.corrcoef(*ranks)[0, 1])


def _auc(harm: np.ndarray, wrong: np.ndarray | None) -> float | None:
    if wrong is None:
        return None
    ranks = scipy.stats.rankdata(harm)[wrong]
    pairs = len(ranks) * (~wrong).sum()
    return round(float((ranks.sum() - len(ranks) * (len(ranks) + 1) / 2) / pairs), 4)


def _stacked(batches: Sequence[Any], axis: Axis) -> Any:
    """Batches with an axis in front of their arrays."""
    return jax.tree.map(lambda *each: hax.stack(axis, each), *batches, is_leaf=_is_named)


def _of_each(fn: Callable[[Any], Any], stacked: Any) -> Any:
    targets = len(jax.tree.leaves(stacked)[0])
    return jnp.stack([fn(_entry(stacked, index)) for index in range(targets)])


def _entry(stacked: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[leaf.axes[0], index], stacked, is_leaf=_is_named)


def _is_named(node: Any) -> bool:
    return isinstance(node, NamedArray)


def main(arguments: Sequence[str] | None = None) -> Path:
    """The command; returns the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--examples", type=int, default=256, help="to train on (256)")
    parser.add_argument("--epochs", type=int, default=8, help="of training (8)")
    parser.add_argument("--runs", type=int, default=64, help="on each share of the examples (64)")
    parser.add_argument("--targets", type=int, default=8, help="parts of the held-out examples (8)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args(arguments)
    held_out = 8 * given.targets
    rows = []
    for make in (classifier, language_model):
        task = make(given.examples, held_out)
        sizes = {"epochs": given.epochs, "runs": given.runs, "held_out": held_out, "targets": given.targets}
        rows += measured(task, **sizes)
        print(*rows[-3:], sep="\n", flush=True)
    path = given.out / "influence.json"
    settings = {"examples": given.examples, "epochs": given.epochs, "runs": given.runs}
    write_results(path, **settings, targets=given.targets, rows=rows)
    return path


if __name__ == "__main__":
    print(main())
