"""How well scores predict training without one example in a hundred, beside other ways
to attribute.

    pip install -e '.[influence]'
    python -m benchmarks.digits

With `--dattri` scores are also found by the code of dattri (`pip install dattri` beside
PyTorch), of the same networks.

A small network is trained on scikit-learn's images of digits, once with Adam and once
with Muon. Its training examples are scored for each of some held-out images by
`ghost.replay` and by the baselines of `METHODS`. Then it is trained again on 100 random
subsets that lack 1% of the examples. The linear datamodeling score of an image (Park et
al. 2023) is Spearman's correlation over these runs of its loss with the sum of the
scores of the examples that are left. Writes its mean and its least over the images to
`results/digits.json`, with intervals of 95% by bootstrap over the runs, and the number
of trainings, or of passes like one, that a method takes.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import Axis, NamedArray
from jax.flatten_util import ravel_pytree
from jaxtyping import PRNGKeyArray

from stacked_remat.training import ConstantSchedule, MuonConfig, build_optimizer

from .command import Rows, benchmark
from .influence import Examples, Task, Training, adam, correlations
from .planted_examples import interval

Pixel = Axis("pixel", 64)
Inner = Axis("inner", 32)
Digit = Axis("digit", 10)
DROPPED = 0.01
CHECKPOINTS = 5  # of TracIn
PROJECTED = 128  # dimensions of TRAK
DAMPINGS = (1e-2, 1.0, 100.0)  # of Gauss-Newton's matrix, times its mean eigenvalue

EKFAC_DAMPINGS = (1e-6, 1e-4, 1e-2)  # of dattri's, likewise

METHODS = {
    "random": "normal numbers",
    "logged loss": "the sum of an example's losses in the steps",
    "Grad-Dot": "dot products of gradients after the run",
    "TracIn": "the same at checkpoints of the run, times the rates",
    "ghost": "the same at every step: `ghost.grad_dot`",
    "influence function": "gradients after the run, and the inverse of Gauss-Newton's"
    " matrix in full, which EK-FAC approximates",
    "TRAK": "projected gradients of networks that were trained on halves",
    "replay": "`ghost.replay`",
    "dattri's": "EK-FAC and TRAK by the code of dattri, with `--dattri`",
}


class Network(eqx.Module):
    """A hidden layer between pixels and digits."""

    hidden: hnn.Linear
    head: hnn.Linear

    def __init__(self, *, key: PRNGKeyArray):
        hidden, head = jax.random.split(key)
        self.hidden = hnn.Linear.init(Pixel, Inner, key=hidden)
        self.head = hnn.Linear.init(Inner, Digit, key=head)

    def __call__(self, images: NamedArray) -> NamedArray:
        """Maps `[..., pixel]` to logits `[..., digit]`."""
        return self.head(hax.tanh(self.hidden(images)))


def margins(model: Network, batch: dict[str, NamedArray]) -> NamedArray:
    """For each image, the log of the odds of its digit."""
    logits = model(batch["images"])
    own = hnn.one_hot(batch["digits"], Digit)
    others = hax.where(own > 0, -jnp.inf, logits)
    return hax.sum(logits * own, Digit) - hnn.logsumexp(others, Digit)


def cross_entropy(model: Network, batch: dict[str, NamedArray]) -> NamedArray:
    """The loss of each image, as precise where it is small."""
    return hnn.softplus(-margins(model, batch))


def digits(optimizer: str, count: int, held_out: int) -> Task:
    """The network, and as many images."""
    try:
        from sklearn.datasets import (  # pyright: ignore[reportMissingImports]
            load_digits,
        )
    except ImportError as error:
        raise SystemExit(
            "The images come with scikit-learn: pip install -e '.[influence]'"
        ) from error
    images, numbers = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))[: count + held_out]
    images = (images[order] / 8.0 - 1.0).astype(np.float32)
    numbers = numbers[order].astype(np.int32)

    def batch(rows: np.ndarray) -> dict[str, NamedArray]:
        Batch = Axis(Examples.name, len(rows))
        return {
            "images": hax.named(images[rows], (Batch, Pixel)),
            "digits": hax.named(numbers[rows], Batch),
        }

    model = Network(key=jax.random.key(0))
    make, rate = OPTIMIZERS[optimizer]
    return Task(optimizer, model, cross_entropy, batch, count, rate, make)


def _muon(rates: optax.Schedule) -> Any:
    """The library's, with the schedule of a task."""
    plain = {"warmup": 0, "weight_decay": 0.0, "max_grad_norm": None}
    config = MuonConfig(learning_rate=1.0, schedule=ConstantSchedule(), **plain)
    unscaled = build_optimizer(config, 1, eps_root=1e-6)
    return optax.chain(unscaled, optax.scale_by_schedule(rates))


OPTIMIZERS = {"adam": (adam(1e-6), 5e-3), "muon": (_muon, 5e-3)}


@dataclass(frozen=True)
class Scored:
    """Scores of a method, `[target, example]`, more where training on the example
    raises the loss, and how many trainings they took.
    """

    method: str
    scores: np.ndarray
    trainings: float


class Attribution:
    """The scores of a run's examples by all methods.

    Args:
        training: the run.
        task: what it trained.
        queries: how many images are scored for.
        halves: which examples networks of TRAK are trained on, `[network, example]`.
    """

    def __init__(
        self, training: Training, task: Task, queries: int, halves: np.ndarray
    ):
        self._training = training
        self._task = task
        kept = np.concatenate([halves, np.ones((1, task.count), bool)])
        models = np.asarray(training.after(kept[:, training.order], _model))
        self._of_halves = models[:-1]
        self._last = models[-1]
        everything = np.arange(task.count + queries)
        self._data = task.batch(everything)
        self._examples = slice(0, task.count)
        self._queries = slice(task.count, None)
        self._flat, self._restored = ravel_pytree(
            eqx.filter(task.model, eqx.is_inexact_array)
        )
        self._of_losses = self._over_images(cross_entropy)
        self._of_margins = self._over_images(margins)
        self._of_logits = self._over_images(_log_probabilities)

    def all(self, generator: np.random.Generator) -> Iterator[Scored]:
        """Those of each of `METHODS`."""
        training = self._training
        count = self._task.count
        queries = self._data["digits"].size - count
        path = np.asarray(training.during(lambda model, _: ravel_pytree(model)[0]))
        models = self._of_halves
        last = self._last
        ensemble = len(models)
        yield Scored("random", generator.standard_normal((queries, count)), 0)
        yield Scored("logged loss", training.logged(), 0)
        yield Scored("Grad-Dot", self._dots(last), 0)
        yield Scored("TracIn", self._traced(path), 0)
        yield Scored("ghost", training.dotted(), queries)
        for damping in DAMPINGS:
            name = f"influence function, damping {damping:g}"
            yield Scored(name, self._influence(last, damping), 0)
        for number in sorted({1, min(10, ensemble), ensemble}):
            yield Scored("TRAK", self._trak(models[:number], generator), number)
        yield Scored("replay", training.replayed(), 5 * queries)

    def by_dattri(self) -> Iterator[Scored]:
        """Those of dattri's own code, which is imported here."""
        from .digits_dattri import scores_of_dattri

        models = map(self._weights, self._of_halves)
        last = self._weights(self._last)
        images, numbers = (self._data[name].array for name in ("images", "digits"))
        found = scores_of_dattri(
            [*models],
            last,
            np.asarray(images),
            np.asarray(numbers),
            self._task.count,
            EKFAC_DAMPINGS,
            PROJECTED,
        )
        for name, trainings, scores in found:
            yield Scored(name, scores, trainings)

    def _weights(self, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The two maps, with the biases as last columns."""
        model = self._restored(jnp.asarray(parameters))
        maps = []
        for own in (model.hidden, model.head):
            weight = own.weight.rearrange((own.Out, own.In)).array
            maps.append(np.concatenate([weight, own.bias.array[:, None]], axis=1))
        hidden, head = maps
        return hidden, head

    def _over_images(self, of_each: Any) -> Callable[[Any], np.ndarray]:
        """The derivatives of what is found of each image by the parameters, `[image,
        ..., parameter]`.
        """
        One = Examples.resize(1)

        def of_image(flat: Any, image: Any) -> Any:
            named = {
                "images": hax.named(image["images"][None], (One, Pixel)),
                "digits": hax.named(image["digits"][None], One),
            }
            return of_each(self._restored(flat), named).array[0]

        images = {name: named.array for name, named in self._data.items()}
        over = jax.jit(jax.vmap(jax.jacrev(of_image), in_axes=(None, 0)))
        return lambda parameters: np.asarray(over(parameters, images), np.float64)

    def _dots(self, parameters: np.ndarray) -> np.ndarray:
        """A step against an example's gradient changes the loss by minus the dot
        product.
        """
        found = self._of_losses(parameters)
        return -found[self._queries] @ found[self._examples].T

    def _traced(self, path: np.ndarray) -> np.ndarray:
        steps = np.linspace(0, len(path) - 1, CHECKPOINTS).round().astype(int)
        summed: Any = 0.0
        for step in steps:
            rate = 0.5 * (1 + np.cos(np.pi * step / len(path)))
            summed += rate * self._dots(path[step])
        return summed

    def _influence(self, parameters: np.ndarray, damping: float) -> np.ndarray:
        """Koh and Liang 2017, with the damped matrix of Gauss-Newton for the Hessian.

        Of a softmax and its cross entropy that matrix is the mean over images of the
        sum over digits of the product of the gradient of the log probability with
        itself, times the probability.
        """
        rows = self._of_logits(parameters)[self._examples]
        model = self._restored(jnp.asarray(parameters))
        shares = np.exp(np.asarray(_log_probabilities(model, self._data).array))
        weighted = rows * np.sqrt(shares[self._examples])[..., None]
        flat = weighted.reshape(-1, rows.shape[-1])
        matrix = flat.T @ flat / len(rows)
        matrix += damping * np.trace(matrix) / len(matrix) * np.eye(len(matrix))
        found = self._of_losses(parameters)
        inverted = np.linalg.solve(matrix, found[self._queries].T)
        return -inverted.T @ found[self._examples].T

    def _trak(self, models: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Park et al. 2023: projected gradients of margins; the means over models of
        their regression and of the weights of the examples.
        """
        products = []
        weights = []
        for parameters in models:
            size = (len(parameters), PROJECTED)
            projection = generator.standard_normal(size) / np.sqrt(PROJECTED)
            found = self._of_margins(parameters) @ projection
            own = found[self._examples]
            queries = found[self._queries]
            products.append(queries @ np.linalg.solve(own.T @ own, own.T))
            model = self._restored(jnp.asarray(parameters))
            losses = np.asarray(cross_entropy(model, self._data).array)
            weights.append(-np.expm1(-losses[self._examples]))
        return -np.mean(products, 0) * np.mean(weights, 0)


def _log_probabilities(model: Network, batch: dict[str, NamedArray]) -> NamedArray:
    return hnn.log_softmax(model(batch["images"]), Digit)


def _model(state: Any, _: Any) -> Any:
    return ravel_pytree(state[0])[0]


@benchmark("digits")
def main(
    examples: int = 1024,
    epochs: int = 5,
    runs: int = 100,
    queries: int = 32,
    ensemble: int = 50,
    only: str = "",
    dattri: bool = False,
) -> Rows:
    """A row for each optimizer with `only` in its name and each method, with `dattri`
    also of its code.
    """
    for optimizer in OPTIMIZERS:
        if only not in optimizer:
            continue
        task = digits(optimizer, examples, queries)
        training = Training(task, epochs, queries, queries)
        generator = np.random.default_rng(2)
        dropped = max(round(DROPPED * examples), 1)
        kept = np.stack(
            [generator.permutation(examples) >= dropped for _ in range(runs)]
        )
        losses = training.losses(kept[:, training.order])
        halves = np.stack(
            [generator.permutation(examples) < examples // 2 for _ in range(ensemble)]
        )
        attribution = Attribution(training, task, queries, halves)
        theirs = attribution.by_dattri() if dattri else ()
        for found in itertools.chain(attribution.all(generator), theirs):
            predicted = kept @ found.scores.T
            yield {
                "optimizer": optimizer,
                "method": found.method,
                "trainings": found.trainings,
                **_mean_and_least(predicted, losses),
            }


def _mean_and_least(
    predicted: np.ndarray, losses: np.ndarray, draws: int = 300
) -> dict[str, Any]:
    """The mean and the least linear datamodeling score over the targets.

    Both arrays are `[run, target]`.
    """
    generator = np.random.default_rng(3)
    means = []
    leasts = []
    for _ in range(draws):
        runs = generator.integers(len(losses), size=len(losses))
        scores = correlations(predicted[runs], losses[runs])
        means.append(scores.mean())
        leasts.append(scores.min())
    scores = correlations(predicted, losses)
    return {
        "mean": round(float(scores.mean()), 4),
        "mean_interval": interval(means),
        "least": round(float(scores.min()), 4),
        "least_interval": interval(leasts),
    }


if __name__ == "__main__":
    main()
