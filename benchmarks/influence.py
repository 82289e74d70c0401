"""How well scores of training examples predict what training without them does, and
find wrong labels.

    python -m benchmarks.influence

Two tasks: the classifier of `benchmarks.planted_examples`, a tenth of whose labels are
wrong, and a small Qwen3 on the source files of the Python standard library. Each is
trained once, and its examples are scored by `ghost.replay`, by gradient dot products
summed over the steps, by their losses in the steps, which any training run can log, and
at random. Then it is trained again, many times, on random halves and nine tenths of the
examples: the linear datamodeling score (Park et al. 2023) is Spearman's correlation of
the held-out losses of these runs with the sums of their examples' scores, the mean over
held-out texts. The language model is also trained with larger steps, of which
derivatives say less. Writes it to `results/influence.json`, with the area under the ROC
curve (AUC) of wrong labels. Intervals are of 95%, by bootstrap: over the runs of a
score, and over the examples of an AUC.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
import scipy.stats
from haliax import Axis, NamedArray

from models.architectures import Qwen3Config
from models.lm import losses_by_token
from models.parts.decoder import Decoder
from models.parts.sections import AttentionConfig
from stacked_remat import fold, ghost, map as map_, scan
from stacked_remat.training import POSITION_AXIS, TokenBatch
from stacked_remat.training.data.files import standard_library_files

from . import planted_examples
from .command import Rows, benchmark
from .planted_examples import Classifier

Examples = Axis("batch", 32)
SEQUENCE = 64
SHARES = (0.5, 0.9)


@dataclass(frozen=True)
class Task:
    """What is trained: the losses `[batch]` are of a model and the arrays of some rows.

    There are `count` examples to train on, and held-out ones follow them; `wrong` ones
    have a planted label. `optimizer` is made with a schedule of rates, from `rate` down
    by a cosine; with a larger `eps_root` of Adam the run is smoother as a function of
    the weights.
    """

    name: str
    model: Any
    losses: Callable[[Any, Any], NamedArray]
    batch: Callable[[np.ndarray], Any]
    count: int
    rate: float
    optimizer: Callable[[optax.Schedule], optax.GradientTransformation]
    wrong: np.ndarray | None = None


def adam(eps_root: float) -> Callable[[Any], optax.GradientTransformation]:
    """Adam for a `Task`."""
    return functools.partial(optax.adam, eps_root=eps_root)


def classifier(count: int, held_out: int) -> Task:
    """Code or documentation, with wrong labels among the examples and none among those
    that are held out.
    """
    data = planted_examples.labelled(count, held_out)
    model = Classifier(key=jax.random.key(0))
    losses = planted_examples.example_losses
    wrong = data.wrong[:count]
    optimizer = adam(1e-30)
    return Task("classifier", model, losses, data.batch, count, 1e-2, optimizer, wrong)


def language_model(count: int, held_out: int, rate: float = 2e-3) -> Task:
    """The next byte of a sequence of a source file."""
    files = standard_library_files()
    order = np.random.default_rng(0).permutation(len(files))
    rows = []
    for at in order:
        text = Path(files[at].url.removeprefix("file://")).read_bytes()[
            : 4 * (SEQUENCE + 1)
        ]
        rows += [
            text[i : i + SEQUENCE + 1]
            for i in range(0, len(text) - SEQUENCE, SEQUENCE + 1)
        ]
    tokens = np.array([[*row] for row in rows[: count + held_out]], np.int32)
    attention = AttentionConfig(backend="exact")  # which has second derivatives
    config = Qwen3Config(
        32, num_layers=2, num_heads=2, num_kv_heads=1, attention=attention, mlp_dim=64
    )
    model = Decoder.init(config, Axis("vocab", 256), remat=True, key=jax.random.key(0))

    def batch(rows: np.ndarray) -> TokenBatch:
        own = tokens[rows]
        return TokenBatch.of(
            own[:, :-1], own[:, 1:], np.ones((len(rows), SEQUENCE), np.float32)
        )

    def losses(model: Any, batch: TokenBatch) -> NamedArray:
        (by_token, _), _ = losses_by_token(model, batch)
        parts = hax.sum(by_token, POSITION_AXIS)
        return parts * parts.size

    return Task("language model", model, losses, batch, count, rate, adam(1e-6))


class Training:
    """The training of a task, from the same start and in the same order whatever
    weights the examples have.

    The held-out examples are in `targets` parts. Programs are compiled once, also for
    another `start`.
    """

    def __init__(self, task: Task, epochs: int, held_out: int, targets: int):
        generator = np.random.default_rng(1)
        orders = [
            generator.permutation(task.count).reshape(-1, Examples.size)
            for _ in range(epochs)
        ]
        self.order = np.concatenate(orders)  # [step, example]
        self.Steps = Axis("steps", len(self.order))
        self.batches = _stacked([task.batch(rows) for rows in self.order], self.Steps)
        texts = np.arange(task.count, task.count + held_out).reshape(targets, -1)
        self._Targets = Axis("targets", targets)
        self._held = _stacked([task.batch(rows) for rows in texts], self._Targets)
        rates = optax.cosine_decay_schedule(task.rate, self.Steps.size)
        optimizer = task.optimizer(rates)
        self.step = ghost.weighted_step(task.losses, optimizer)
        self.start: tuple[Any, Any] = (
            task.model,
            optimizer.init(eqx.filter(task.model, eqx.is_inexact_array)),
        )
        self._task = task
        self._targets = targets

    def losses(self, weights: np.ndarray) -> np.ndarray:
        """The held-out losses of runs with weights `[run, step, example]`: `[run,
        target]`.
        """
        return np.asarray(self._given(self._losses, weights))

    def after(self, weights: np.ndarray, of_last: Callable[[Any, Any], Any]) -> Any:
        """What a function of the last state and the held-out examples finds after runs
        with weights `[run, step, example]`: `[run, ...]`.
        """
        return self._given(self._runs(of_last), weights)

    @functools.cached_property
    def _losses(self) -> Any:
        def of_last(last: Any, held: Any) -> Any:
            return map_(lambda target: self._loss(last, target), self._Targets)(held)

        return self._runs(of_last)

    def _runs(self, of_last: Callable[[Any, Any], Any]) -> Any:
        @eqx.filter_jit
        def of_runs(start: Any, batches: Any, held: Any, weights: Any) -> Any:
            def run(weights: Any) -> Any:
                last = fold(self.step, self.Steps)(
                    start, batches, hax.named(weights, (self.Steps, Examples))
                )
                return of_last(last, held)

            return jax.lax.map(run, weights, batch_size=4)

        return of_runs

    def _given(self, of_runs: Any, weights: np.ndarray) -> Any:
        return of_runs(self.start, self.batches, self._held, weights.astype(np.float32))

    def replayed(self) -> np.ndarray:
        """The influence of the examples, `[target, example]`."""
        return self._of_examples(self._replay)

    @functools.cached_property
    def _replay(self) -> Any:
        @eqx.filter_jit
        def of_target(start: Any, batches: Any, target: Any) -> Any:
            def held_out(last: Any) -> Any:
                return self._loss(last, target)

            return ghost.replay(
                self.step, start, batches, held_out, self.Steps, Examples
            ).examples.array

        return of_target

    def dotted(self) -> np.ndarray:
        """The sums of the examples' gradient dot products, so that more is worse,
        `[target, example]`.
        """

        @eqx.filter_jit
        def of_target(start: Any, batches: Any, target: Any) -> Any:
            def scored(state: Any, batch: Any) -> tuple[Any, Any]:
                direction = ghost.val_direction(state[0], self._task.losses, target)
                _, found = ghost.grad_dot(
                    state[0], self._task.losses, batch, direction=direction
                )
                return self.step(state, batch, hax.ones(Examples)), found.total

            return (
                -scan(scored, self.Steps)(start, batches)[1]
                .rearrange((self.Steps, Examples))
                .array
            )

        return self._of_examples(of_target)

    def logged(self) -> np.ndarray:
        """The sums over the steps of the examples' losses, the same for every target,
        `[target, example]`.
        """
        found = self.during(lambda model, batch: self._task.losses(model, batch))
        losses = found.rearrange((self.Steps, Examples)).array
        return self._of_examples(lambda *_: losses)

    def during(self, of_step: Callable[[Any, Any], Any]) -> Any:
        """What a function of the model and the batch finds before each step of the run
        on all examples.
        """

        @eqx.filter_jit
        def of_steps(start: Any, batches: Any) -> Any:
            def step(state: Any, batch: Any) -> tuple[Any, Any]:
                after = self.step(state, batch, hax.ones(Examples))
                return after, of_step(state[0], batch)

            return scan(step, self.Steps)(start, batches)[1]

        return of_steps(self.start, self.batches)

    def _loss(self, state: Any, target: Any) -> Any:
        return hax.mean(self._task.losses(state[0], target)).scalar()

    def _of_examples(self, of_target: Callable[..., Any]) -> np.ndarray:
        """The sums over the steps of an example."""
        sums = np.zeros((self._targets, self._task.count))
        for index in range(self._targets):
            values = of_target(self.start, self.batches, _entry(self._held, index))
            np.add.at(sums[index], self.order, np.asarray(values, np.float64))
        return sums


@benchmark("influence")
def main(
    examples: int = 256,
    epochs: int = 8,
    runs: int = 64,
    targets: int = 8,
    only: str = "",
) -> Rows:
    """A row for each method and task with `only` in its name. `runs` are on each share
    of the examples.
    """
    held_out = 8 * targets
    tasks = (classifier, language_model, functools.partial(language_model, rate=5e-3))
    for task in (make(examples, held_out) for make in tasks):
        if only not in task.name:
            continue
        training = Training(task, epochs, held_out, targets)
        generator = np.random.default_rng(2)
        scores = {
            "replay": training.replayed(),
            "gradient dot products": training.dotted(),
            "logged loss": training.logged(),
            "random": generator.standard_normal((targets, examples)),
        }
        orders = np.stack(
            [generator.permutation(examples) for _ in range(len(SHARES) * runs)]
        )
        most = np.repeat([round(share * examples) for share in SHARES], runs)
        kept = orders < most[:, None]
        found = training.losses(kept[:, training.order])
        for name, of_target in scores.items():
            row: dict[str, Any] = {"task": task.name, "rate": task.rate, "method": name}
            wrong = task.wrong
            row["auc"] = row["auc_interval"] = None
            if wrong is not None:
                row["auc"], row["auc_interval"] = planted_examples.auc_and_interval(
                    of_target.mean(0), wrong
                )
            parts = zip(
                SHARES,
                np.split(kept, len(SHARES)),
                np.split(found, len(SHARES)),
                strict=True,
            )
            for share, own, losses in parts:
                predicted = own @ of_target.T  # [run, target]
                row[f"score_{share}"] = round(mean_score(predicted, losses), 4)
                row[f"score_{share}_interval"] = interval_of_score(predicted, losses)
            yield row


def mean_score(predicted: np.ndarray, losses: np.ndarray) -> float:
    """The mean over the targets of `correlations`."""
    return float(np.mean(correlations(predicted, losses)))


def correlations(predicted: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Spearman's correlation over the runs, for each target; both are `[run,
    target]`.
    """
    ranks = [scipy.stats.rankdata(array, axis=0) for array in (predicted, losses)]
    from_mean = [array - array.mean(0) for array in ranks]
    norms = [np.linalg.norm(array, axis=0) for array in from_mean]
    products = (from_mean[0] * from_mean[1]).sum(0)
    # 0 where all runs are equal
    return products / np.maximum(norms[0] * norms[1], 1e-12)


def interval_of_score(
    predicted: np.ndarray, losses: np.ndarray, draws: int = 1000
) -> str:
    generator = np.random.default_rng(3)
    scores = []
    for _ in range(draws):
        runs = generator.integers(len(losses), size=len(losses))
        scores.append(mean_score(predicted[runs], losses[runs]))
    return planted_examples.interval(scores)


def _stacked(batches: Sequence[Any], axis: Axis) -> Any:
    """Batches with an axis in front of their arrays."""
    return hax.tree_util.tree_map(lambda *each: hax.stack(axis, each), *batches)


def _entry(stacked: Any, index: int) -> Any:
    return hax.tree_util.tree_map(lambda leaf: leaf[leaf.axes[0], index], stacked)


if __name__ == "__main__":
    main()
