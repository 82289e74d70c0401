"""The loss on text that is never trained on: all of it, and that of each source."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp

from .batches import TokenBatch
from .config_error import ConfigError
from .mesh import Partitioning
from .step import LossFunction
from .streams import HeldOutSet

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
    """Evaluators by the names of their metrics: `held_out`, and `held_out/NAME` for each of several sources.

    They are compiled once for all, where their batches have the same shape.

    Args:
        loss_function: what is averaged.
        held_out: the held-out text of all sources together.
        by_source: that of each, by name; a single one is not evaluated once more.
        num_batches: how many batches an evaluation reads; of a source that has fewer, all of them.
        partitioning: what batches are divided over; the functions are to be called while it is active.

    Raises:
        ConfigError: there is less held-out text than that in all.
    """
    compiled = _compiled(loss_function)
    evaluators = {"held_out": _evaluator(compiled, held_out, num_batches, "held_out", partitioning)}
    if len(by_source) > 1:
        for source, one in by_source.items():
            name, count = f"held_out/{source}", min(num_batches, len(one))
            evaluators[name] = _evaluator(compiled, one, count, name, partitioning)
    return evaluators


def held_out_evaluator(
    loss_function: LossFunction,
    held_out: HeldOutSet,
    num_batches: int,
    *,
    name: str = "held_out",
    partitioning: Partitioning | None = None,
) -> Evaluator:
    """A function from a model to its mean `loss` per token, in nats, on the first `num_batches` batches.

    Every call reads the same batches, so that its results can be compared. It compiles at the first.

    Args:
        loss_function: what is averaged.
        held_out: where the batches come from.
        num_batches: how many of them.
        name: of the set, for the error.
        partitioning: what batches are divided over; the function is to be called while it is active.

    Raises:
        ConfigError: there is less held-out text than that.
    """
    return _evaluator(_compiled(loss_function), held_out, num_batches, name, partitioning)


def _compiled(loss_function: LossFunction) -> Callable[[Any, TokenBatch], Any]:
    return eqx.filter_jit(lambda model, batch: loss_function(model, batch)[1]["loss"])


def _evaluator(
    compiled: Callable[[Any, TokenBatch], Any],
    held_out: HeldOutSet,
    num_batches: int,
    name: str,
    partitioning: Partitioning | None,
) -> Evaluator:
    if len(held_out) < num_batches:
        raise ConfigError(
            f"The set {name} has {len(held_out)} batches, fewer than trainer.eval_batches = {num_batches}. "
            f"Lower trainer.eval_batches, data.batch_size or data.seq_len, or hold out more text."
        )
    own_rows_are_all = jax.process_count() == 1
    if own_rows_are_all and not any(held_out.batch(i).weights.array.any() for i in range(num_batches)):
        raise ConfigError(
            f"No token in the first {num_batches} batches of the set {name} counts as a target. Raise "
            f"trainer.eval_batches, or hold out other text."
        )

    def evaluate(model: Any) -> float:
        total = count = 0.0
        for index in range(num_batches):
            batch = held_out.batch(index)
            if partitioning is not None:
                batch = partitioning.shard_batch(batch)
            tokens = float(jnp.sum(batch.weights.array))
            total += float(compiled(model, batch)) * tokens
            count += tokens
        return total / count

    return evaluate
