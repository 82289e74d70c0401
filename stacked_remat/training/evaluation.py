"""The mean loss on held-out text: over all sources, and for each of several."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import equinox as eqx
import jax.numpy as jnp

from .batches import HeldOutSet
from .errors import ConfigError
from .mesh import Partitioning
from .step import LossFunction

Evaluator: TypeAlias = Callable[[Any], float]
"""From a model to its mean loss per token, in nats."""


def held_out_evaluators(
    loss_function: LossFunction,
    held_out: HeldOutSet,
    by_source: Mapping[str, HeldOutSet],
    num_batches: int,
    *,
    partitioning: Partitioning | None = None,
) -> dict[str, Evaluator]:
    """Evaluators by name of metric: `held_out`, and `held_out/NAME` for each of several
    sources.

    Each call reads the same batches. The first one compiles, once for all evaluators
    whose batches have the same shape.

    Args:
        loss_function: its `loss` metric is averaged over the tokens.
        held_out: the held-out text of all sources together.
        by_source: the held-out text of each source; may be empty, and a single one is
            not evaluated twice.
        num_batches: batches per evaluation, the first ones; all batches of a set that
            has fewer.
        partitioning: shards the batches; must be active when the evaluators are called.

    Returns:
        The evaluators; none if nothing is held out.

    Raises:
        ConfigError: an evaluator finds no token that counts.
    """
    # One function for all sets, so that sets of one shape share a compilation.
    compiled = eqx.filter_jit(
        lambda model, batch: loss_function(model, batch)[1]["loss"]
    )
    shard = (partitioning or Partitioning.one_device()).shard_batch

    def evaluator(name: str, text: HeldOutSet) -> Evaluator:
        count = min(num_batches, len(text))

        def evaluate(model: Any) -> float:
            # Weighted by tokens: the last batch of a set may be mostly padding.
            total = tokens = 0.0
            for batch in (shard(text.batch(index)) for index in range(count)):
                own = float(jnp.sum(batch.weights.array))
                total += float(compiled(model, batch)) * own
                tokens += own
            if not tokens:
                raise ConfigError(
                    f"No token of the set {name} counts as a target. Hold out other"
                    " text."
                )
            return total / tokens

        return evaluate

    sets = {"held_out": held_out} if len(held_out) else {}
    # A single source is the whole set already.
    if len(by_source) > 1:
        sets |= {f"held_out/{source}": text for source, text in by_source.items()}
    return {name: evaluator(name, text) for name, text in sets.items()}
