"""Training steps that also score their examples: by how much each lowers the loss of
held-out text.
"""

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

from ..ghost import (
    GradDots,
    ScoreLog,
    StepScores,
    check_examples,
    grad_dot,
    val_direction,
)
from .batches import BATCH_AXIS, POSITION_AXIS, HeldOutSet, TokenBatch
from .errors import ConfigError
from .example_texts import Decode, examples_by_token, named_examples
from .ghost_config import GhostConfig, GhostValidationConfig
from .mesh import Partitioning
from .progress import ConsoleProgress
from .step import FusedOptimizer, Metrics, TrainState, TrainStep, marks, of_whole_batch

TokenLosses: TypeAlias = Callable[[Any, TokenBatch], tuple[NamedArray, Metrics]]
"""From (model, batch) to each token's part of the batch's mean loss, `[batch,
position]`, and metrics.

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

    @property
    def batch(self) -> TokenBatch:
        """The batch, or this process's rows of it."""
        return self.held_out.batch(self.index)


def validation_batches(
    config: GhostValidationConfig,
    held_out: HeldOutSet,
    by_source: Mapping[str, HeldOutSet],
    partitioning: Partitioning | None = None,
) -> tuple[ValidationBatch, ...]:
    """The batches against whose loss examples are scored; the loss of each text is its
    mean over tokens.

    `partitioning` is that of the run; on one device if not given.

    Raises:
        ConfigError: a text has fewer batches than the config asks for.
    """
    texts = {
        f"held_out/{name}": (by_source.get(name), weight)
        for name, weight in config.sources.items()
    }
    shard = (partitioning or Partitioning.one_device()).shard_batch
    total = sum(config.sources.values()) or 1.0
    found = []
    for name, (text, weight) in (texts or {"held_out": (held_out, 1.0)}).items():
        count = 0 if text is None else len(text)
        if text is None or count < config.batches:
            raise ConfigError(
                f"The set {name} has {count} batches, fewer than"
                f" ghost.validation.batches = {config.batches}. Lower"
                " ghost.validation.batches, data.batch_size or data.seq_len, or hold"
                " out more text."
            )
        # Of all processes, each of which has its own rows
        tokens = [
            float(jnp.sum(shard(text.batch(index)).weights.array))
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
        losses: of a batch's tokens.
        is_whole: whether the loss of the step is the sum of these, without random
            numbers or auxiliary losses such as the load balance of experts. If not, the
            update is by a pass of its own.
        validation: the batches of held-out text, from `validation_batches`.
        decode: the text of tokens.
        log: receives the scores; None in all processes but the first.
        names: from a position of the stream of batches to the file and line of each
            example of the batch before it, as `BatchStream.names`; None for a stream
            that knows none.
    """

    config: GhostConfig
    losses: TokenLosses
    is_whole: bool
    validation: tuple[ValidationBatch, ...]
    decode: Decode
    log: ScoreLog | None
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
        self._scoring = scoring
        self._ordinary = step
        self._partitioning = step.partitioning or Partitioning.one_device()
        self._zeros = eqx.filter_jit(self._zero_direction)
        self._add = eqx.filter_jit(self._add_direction, donate="all-except-first")
        self._step = eqx.filter_jit(self._scored_step, donate="all-except-first")
        self._found: tuple[TokenBatch, _BatchScores] | None = None
        self._progress = progress
        self._is_checked = False

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
            # What is computed of the whole batch needs no losses of examples alone.
            if not self._scoring.config.by_token:
                check_examples(state.model, self._sums, batch, tokens="sum")
            self._is_checked = True
        direction = self._zeros(state.trained)
        for one in self._scoring.validation:
            part = self._partitioning.shard_batch(one.batch)
            direction = self._add(
                (state.trained, state.frozen, part, jnp.asarray(one.weight)), direction
            )
        state, metrics, self._found = self._step((batch, direction), state)
        return state, metrics

    def _sums(self, model: Any, batch: TokenBatch) -> NamedArray:
        """The losses of tokens, which are the same alone and in a batch."""
        return self._scoring.losses(model, batch)[0] * batch.total_weight

    def log(self, step: int, position: dict[str, Any]) -> None:
        """Logs the scores of the latest `step`; those of a step that is not finite are
        left out.

        `position` is that of the stream after the batch.
        """
        assert self._found is not None
        scoring = self._scoring
        (batch, scores) = self._found
        self._found = None
        if scoring.log is None:
            return
        found = jax.tree.map(np.asarray, scores)
        if not all(np.isfinite(array).all() for array in jax.tree.leaves(found)):
            return
        ids, texts = named_examples(batch, scoring.decode)
        tokens = None
        if found.tokens is not None:
            texts, tokens = examples_by_token(batch, found.tokens.T, scoring.decode)
        places = None if scoring.names is None else scoring.names(position)
        numbers = (found.losses, found.scores, found.norms)
        scoring.log.append(StepScores(step, ids, *numbers, texts, places, tokens))

    def flush(self) -> None:
        """Writes what was logged to files."""
        if self._scoring.log is not None:
            self._scoring.log.flush()

    def _zero_direction(self, trained: Any) -> Any:
        # In float32 whatever the weights are: parts of several batches are added up.
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
        return self._ordinary.shard(zeros)

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
            tokens="sum",
            trainable=marks(trained),
        )
        return jax.tree.map(
            lambda sum_, new: sum_ + weight * new.astype(sum_.dtype),
            direction,
            gradients,
        )

    def _scored_step(
        self, data: tuple[TokenBatch, Any], state: TrainState
    ) -> tuple[TrainState, Metrics, tuple[TokenBatch, "_BatchScores"]]:
        """The step for a batch and a direction, a tree like the trained arrays; with
        the whole batch and its scores.
        """
        (batch, direction) = data
        step = self._ordinary
        model = eqx.combine(step.shard(state.trained), state.frozen)
        options = {
            "direction": direction,
            "reduction": "sum",
            "tokens": "sum",
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
        scores = jax.tree.map(lambda array: array * factors, scores)
        # The first process logs the examples of all.
        return after, metrics, self._partitioning.replicated((batch, scores))

    def _scored_part(
        self, part: TokenBatch, share: Any, model: Any, options: dict[str, Any]
    ) -> tuple[Any, Metrics, "_BatchScores"]:
        """The gradients, metrics and scores of a microbatch that has a share of the
        batch's weights.
        """
        # The loss of a microbatch is a mean over its own weights: times its share of
        # the batch's, the sum over sequences is the loss of the whole batch.
        total = part.total_weight

        def of_tokens(model: Any, one: TokenBatch) -> tuple[NamedArray, Any]:
            losses, metrics = self._scoring.losses(model, one)
            losses = losses * (one.total_weight / total * share)
            return losses, (hax.sum(losses, POSITION_AXIS), metrics)

        config = self._scoring.config
        options = {**options, "norms": config.norms, "has_aux": True}
        if config.by_token:
            options["granularity"] = "token"
        gradients, found = grad_dot(model, of_tokens, part, **options)
        losses, metrics = found.aux
        if config.by_token:
            return gradients, metrics, _BatchScores.by_token(found, losses)
        metrics = of_whole_batch(metrics, 1.0 / _batch_over_own_weights(part))
        norms = None if found.norms is None else _arrays(found.norms)
        return (
            gradients,
            metrics,
            _BatchScores(_arrays(found.scores), losses.array, norms),
        )


class _BatchScores(eqx.Module):
    """The scores and norms of a batch, as the log takes them: `[batch]` or `[layers,
    batch]`, by path; and those of its tokens, `[position, batch]`.
    """

    scores: dict[str, Array]
    losses: Array
    norms: dict[str, Array] | None = None
    tokens: Array | None = None

    @staticmethod
    def by_token(found: GradDots, losses: NamedArray) -> "_BatchScores":
        tokens = found.by_token.rearrange((POSITION_AXIS, BATCH_AXIS)).array
        return _BatchScores({"model": found.total.array}, losses.array, tokens=tokens)


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
