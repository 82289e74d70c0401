"""Training steps that also score their examples: by how much each lowers the loss of
held-out text.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jaxtyping import Array

from ..ghost import ScoreLog, StepScores, check_examples, grad_dot, val_direction
from .batches import BATCH_AXIS, POSITION_AXIS, HeldOutSet, TokenBatch
from .errors import ConfigError
from .ghost_config import GhostConfig, GhostValidationConfig
from .mesh import Partitioning
from .progress import ConsoleProgress
from .step import FusedOptimizer, Metrics, TrainState, TrainStep, marks, of_whole_batch

ExampleLosses: TypeAlias = Callable[[Any, TokenBatch], tuple[NamedArray, Metrics]]
"""From (model, batch) to each sequence's part of the batch's mean loss per token,
`[batch]`, and metrics.

It takes a batch of one sequence too.
"""


@dataclass(frozen=True)
class ValidationBatch:
    """A batch of held-out text, and the weight of its mean loss in that of all of
    them.
    """

    held_out: HeldOutSet
    index: int
    weight: float


def validation_batches(
    config: GhostValidationConfig,
    held_out: HeldOutSet,
    by_source: Mapping[str, HeldOutSet],
) -> tuple[ValidationBatch, ...]:
    """The batches against whose loss examples are scored; the loss of each text is its
    mean over tokens.

    Raises:
        ConfigError: a text has fewer batches than the config asks for.
    """
    texts = {
        f"held_out/{name}": (by_source.get(name), weight)
        for name, weight in config.sources.items()
    }
    total, found = sum(config.sources.values()) or 1.0, []
    for name, (text, weight) in (texts or {"held_out": (held_out, 1.0)}).items():
        count = 0 if text is None else len(text)
        if text is None or count < config.batches:
            raise ConfigError(
                f"The set {name} has {count} batches, fewer than"
                f" ghost.validation.batches = {config.batches}. Lower"
                " ghost.validation.batches, data.batch_size or data.seq_len, or hold"
                " out more text."
            )
        tokens = [
            float(text.batch(index).weights.array.sum())
            for index in range(config.batches)
        ]
        found += [
            ValidationBatch(text, index, weight / total * own / sum(tokens))
            for index, own in enumerate(tokens)
        ]
    return tuple(found)


@dataclass(frozen=True)
class Scoring:
    """How the examples of a run are scored, and where the scores go.

    Attributes:
        config: the method, and how often.
        losses: of a batch's examples.
        is_whole: whether the loss of the step is the sum of these, without random
            numbers or auxiliary losses such as the load balance of experts. If not, the
            update is by a pass of its own.
        validation: the batches of held-out text, from `validation_batches`.
        decode: the text of tokens.
        log: receives the scores.
        names: from a position of the stream of batches to the file and line of each
            example of the batch before it, as `BatchStream.names`; None for a stream
            that knows none.
    """

    config: GhostConfig
    losses: ExampleLosses
    is_whole: bool
    validation: tuple[ValidationBatch, ...]
    decode: Callable[[np.ndarray], str]
    log: ScoreLog
    names: Callable[[dict[str, Any]], Sequence[str]] | None = None


@final
class StepScorer:
    """Does the scored steps of a run in place of `step`, which is not fused, and logs
    their scores.

    `progress` says that the first of them is compiled.

    Memory: of a scored step, that of another step, one array more for each trained one,
    and what `grad_dot` takes.
    """

    def __init__(
        self, scoring: Scoring, step: TrainStep, progress: ConsoleProgress | None = None
    ):
        if isinstance(step.optimizer, FusedOptimizer):
            raise ValueError("Scored steps take no FusedOptimizer: leave it out.")
        self._scoring, self._ordinary = scoring, step
        self._partitioning = step.partitioning or Partitioning.one_device()
        self._add = eqx.filter_jit(self._add_direction, donate="all-except-first")
        self._step = eqx.filter_jit(self._scored_step, donate="all-except-first")
        self._found: _BatchScores | None = None
        self._progress, self._is_checked = progress, False

    def is_due(self, step: int) -> bool:
        """Whether the examples of this step are scored."""
        return step % self._scoring.config.every == 0

    def step(self, batch: TokenBatch, state: TrainState) -> tuple[TrainState, Metrics]:
        """The step, which returns what one without scores does; `log` takes the
        scores.
        """
        if not self._is_checked:
            if self._progress is not None:
                self._progress.waiting("compiling a step that scores its examples")
            check_examples(state.model, self._sums, batch)
            self._is_checked = True
        # In float32 whatever the weights are: parts of several batches are added up.
        direction = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, jnp.float32), state.trained
        )
        for one in self._scoring.validation:
            part = self._partitioning.shard_batch(one.held_out.batch(one.index))
            direction = self._add(
                (state.trained, state.frozen, part, jnp.asarray(one.weight)), direction
            )
        state, metrics, self._found = self._step((batch, direction), state)
        return state, metrics

    def _sums(self, model: Any, batch: TokenBatch) -> NamedArray:
        """The losses of the sequences, added up over their tokens: they are the same
        alone and in a batch.
        """
        return self._scoring.losses(model, batch)[0] * batch.total_weight

    def log(self, step: int, batch: TokenBatch, position: dict[str, Any]) -> None:
        """Logs the scores of the latest `step`; those of a step that is not finite are
        left out.

        `position` is that of the stream after the batch.
        """
        assert self._found is not None
        found, self._found = jax.tree.map(np.asarray, self._found), None
        if all(np.isfinite(array).all() for array in jax.tree.leaves(found)):
            scoring = self._scoring
            ids, texts = named_examples(batch, scoring.decode)
            places = None if scoring.names is None else scoring.names(position)
            scores = (found.losses, found.scores, found.norms)
            scoring.log.append(StepScores(step, ids, *scores, texts, places))

    def flush(self) -> None:
        """Writes what was logged to files."""
        self._scoring.log.flush()

    def _add_direction(
        self, data: tuple[Any, Any, TokenBatch, Array], direction: Any
    ) -> Any:
        """The direction plus the gradient of the loss of a batch, times a weight."""
        trained, frozen, batch, weight = data
        gradients = val_direction(
            eqx.combine(trained, frozen),
            lambda model, batch: self._scoring.losses(model, batch)[0],
            batch,
            reduction="sum",
            trainable=marks(trained),
        )
        return jax.tree.map(
            lambda sum_, new: sum_ + weight * new.astype(sum_.dtype),
            direction,
            gradients,
        )

    def _scored_step(
        self, data: tuple[TokenBatch, Any], state: TrainState
    ) -> tuple[TrainState, Metrics, "_BatchScores"]:
        """The step for a batch and a direction, a tree like the trained arrays, with
        scores.
        """
        (batch, direction), step = data, self._ordinary
        model = eqx.combine(step.shard(state.trained), state.frozen)
        options = {
            "direction": direction,
            "reduction": "sum",
            "trainable": marks(state.trained),
        }
        # The step's own gradients, for a loss that has more than the sum over
        # sequences.
        ordinary = step.gradients_of(state, batch)

        def compute(
            part: TokenBatch, share: Any, index: Any
        ) -> tuple[Any, Metrics, _BatchScores]:
            gradients, metrics, scores = self._scored_part(part, share, model, options)
            if not self._scoring.is_whole:
                # The compiler leaves out what gives only the gradients above.
                gradients, metrics, _ = ordinary(part, share, index)
            return step.shard(gradients), metrics, scores

        after, metrics, scores = step.by(compute, batch, state)
        # Row `i * count + n` is row `i` of microbatch `n`, so microbatches come last
        # when the two are joined.
        if step.microbatches > 1:  # `[microbatch, ..., row]`
            scores = jax.tree.map(
                lambda x: jnp.moveaxis(x, 0, -1).reshape(*x.shape[1:-1], -1), scores
            )
        of_example = self._scoring.config.token_mean == "example"
        factors = _batch_over_own_weights(batch) if of_example else jnp.ones(())
        return after, metrics, jax.tree.map(lambda array: array * factors, scores)

    def _scored_part(
        self, part: TokenBatch, share: Any, model: Any, options: dict[str, Any]
    ) -> tuple[Any, Metrics, "_BatchScores"]:
        """The gradients, metrics and scores of a microbatch that has a share of the
        batch's weights.
        """
        # The loss of a microbatch is a mean over its own weights: times its share of
        # the batch's, the sum over sequences is the loss of the whole batch.
        total = part.total_weight

        def of_examples(model: Any, one: TokenBatch) -> tuple[NamedArray, Any]:
            each, metrics = self._scoring.losses(model, one)
            each = each * (one.total_weight / total * share)
            return each, (each, metrics)

        options = {**options, "norms": self._scoring.config.norms}
        gradients, found = grad_dot(model, of_examples, part, has_aux=True, **options)
        each, metrics = found.aux
        metrics = of_whole_batch(metrics, 1.0 / _batch_over_own_weights(part))
        norms = None if found.norms is None else _arrays(found.norms)
        return (
            gradients,
            metrics,
            _BatchScores(_arrays(found.scores), each.array, norms),
        )


class _BatchScores(eqx.Module):
    """The scores and norms of a batch, as the log takes them: `[batch]` or `[layers,
    batch]`, by path.
    """

    scores: dict[str, Array]
    losses: Array
    norms: dict[str, Array] | None = None


def _arrays(by_path: dict[str, NamedArray]) -> dict[str, Array]:
    return {
        path: named.rearrange((..., BATCH_AXIS)).array
        for path, named in by_path.items()
    }


def _batch_over_own_weights(batch: TokenBatch) -> Array:
    """For each row, by how much its loss per own token is larger than its part of the
    batch's.
    """
    own = hax.sum(batch.weights, POSITION_AXIS).array
    return batch.total_weight / jnp.where(own > 0, own, 1.0)


def named_examples(
    batch: TokenBatch, decode: Callable[[np.ndarray], str]
) -> tuple[list[str], list[str]]:
    """The ids and the texts of a batch's examples, as logs of scores have them.

    Ids are hashes, the same in every epoch and run. Texts are of one document after the
    other.
    """
    arrays = {
        name: np.asarray(named.rearrange((BATCH_AXIS, POSITION_AXIS)).array)
        for name, named in vars(batch).items()
        if named is not None
    }
    ids, texts = [], []
    for index, tokens in enumerate(arrays["tokens"]):
        used = (
            np.flatnonzero(arrays["documents"][index])
            if "documents" in arrays
            else [len(tokens) - 1]
        )
        stop = used[-1] + 1 if len(used) else 0  # padding follows
        row = {name: array[index, :stop] for name, array in arrays.items()}
        # Of what the loss reads: rows that differ only in what is padding, or cut off,
        # are the same example.
        digest = hashlib.sha256()
        for name in ("tokens", "targets", "weights", "documents"):
            digest.update(row[name].tobytes() if name in row else b"none")
        ids.append(digest.hexdigest()[:16])
        # A document's last target is no input, so it is added to the text of its
        # inputs.
        ends = (
            np.flatnonzero(np.diff(row.get("documents", np.zeros(stop)), append=-1)) + 1
        )
        parts = zip(
            np.split(row["tokens"], ends[:-1]), row["targets"][ends - 1], strict=False
        )
        texts.append(
            "\n".join(decode(np.append(part, target)) for part, target in parts)
        )
    return ids, texts
