"""Whether `ghost.metasmoothness` tells beforehand how well a replay predicts.

    python -m benchmarks.metasmoothness

A small network learns the labels of a random network with each optimizer and learning
rate of `SETTINGS`, from smooth runs to rough ones. For each, three trainings give the
metasmoothness; and as in `benchmarks.influence`, runs on 95% of the examples give the
linear datamodeling score of the replay's scores, with an interval of 95%. The last row
has Spearman's correlation of the two over the settings. Writes it to
`results/metasmoothness.json`.
"""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
import scipy.stats
from haliax import Axis, NamedArray

from stacked_remat import ghost

from .command import Rows, benchmark
from .digits import Digit, Network, Pixel, cross_entropy
from .influence import Examples, Task, Training, interval_of_score, mean_score

KEPT = 0.95
OPTIMIZERS = {"adam": optax.adam, "sgd": optax.sgd}
SETTINGS: dict[str, list[dict[str, float]]] = {
    "adam": [
        {"learning_rate": rate, "eps_root": eps_root}
        for eps_root in (1e-6, 1e-30)
        for rate in (2e-3, 1e-2, 5e-2, 0.2)
    ],
    "sgd": [{"learning_rate": rate, "momentum": 0.9} for rate in (0.02, 0.1, 0.5, 2.0)],
}


def labels_of_a_network(optimizer: str, count: int, held_out: int) -> Task:
    """Random images, and the labels that a random network gives them."""
    teacher, images, student = jax.random.split(jax.random.key(0), 3)
    Image = Axis("image", count + held_out)
    drawn = hax.random.normal(images, (Image, Pixel))
    logits = Network(key=teacher)(drawn)
    numbers = np.asarray(hax.argmax(logits, Digit).array)
    arrays = np.asarray(drawn.array)

    def batch(rows: np.ndarray) -> dict[str, NamedArray]:
        Batch = Axis(Examples.name, len(rows))
        return {
            "images": hax.named(arrays[rows], (Batch, Pixel)),
            "digits": hax.named(numbers[rows], Batch),
        }

    def make(_: optax.Schedule) -> optax.GradientTransformation:
        # Hyperparameters are in the state, so that one program serves all settings.
        return optax.inject_hyperparams(OPTIMIZERS[optimizer])(**SETTINGS[optimizer][0])

    model = Network(key=student)
    return Task(optimizer, model, cross_entropy, batch, count, 1.0, make)


@benchmark("metasmoothness")
def main(
    examples: int = 256,
    epochs: int = 4,
    runs: int = 48,
    targets: int = 16,
    only: str = "",
) -> Rows:
    """A row for each setting of the optimizers with `only` in their names, and one for
    all of them.
    """
    found: list[tuple[float, float]] = []
    for optimizer, settings in SETTINGS.items():
        if only not in optimizer:
            continue
        task = labels_of_a_network(optimizer, examples, targets)
        training = Training(task, epochs, targets, targets)
        model, state = training.start
        smoothness = eqx.filter_jit(_metasmoothness)
        generator = np.random.default_rng(2)
        most = round(KEPT * examples)
        kept = np.stack([generator.permutation(examples) < most for _ in range(runs)])
        for setting in settings:
            hyperparameters = {**state.hyperparams}
            for name, value in setting.items():
                hyperparameters[name] = np.asarray(value, np.float32)
            training.start = model, state._replace(hyperparams=hyperparameters)
            smooth = float(smoothness(training.start, training.batches, training))
            predicted = kept @ training.replayed().T
            losses = training.losses(kept[:, training.order])
            score = mean_score(predicted, losses)
            found.append((smooth, score))
            values = [f"{name} {value:g}" for name, value in setting.items()]
            yield {
                "setting": ", ".join([optimizer, *values]).replace("_", " "),
                "metasmoothness": round(smooth, 4),
                "score": round(score, 4),
                "score_interval": interval_of_score(predicted, losses),
            }
    correlation: Any = scipy.stats.spearmanr(
        [smooth for smooth, _ in found], [score for _, score in found]
    )
    yield {"setting": "all", "rank_correlation": round(float(correlation.statistic), 4)}


def _metasmoothness(start: Any, batches: Any, training: Training) -> Any:
    ids = hax.named(training.order, (training.Steps, Examples))
    return ghost.metasmoothness(
        training.step,
        start,
        batches,
        lambda state: state[0],
        training.Steps,
        Examples,
        key=jax.random.key(1),
        example_ids=ids,
    )


if __name__ == "__main__":
    main()
