"""The loss on text that is never trained on."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np

from .config_file import ConfigError
from .step import LossFunction
from .streams import HeldOutSet


def held_out_evaluator(
    loss_function: LossFunction, held_out: HeldOutSet, num_batches: int, *, name: str = "held_out"
) -> Callable[[Any], float]:
    """A function from a model to its mean `loss` per token, in nats, on the first `num_batches` batches.

    Every call reads the same batches, so that its results can be compared. It compiles at the first.

    Args:
        loss_function: what is averaged.
        held_out: where the batches come from.
        num_batches: how many of them.
        name: of the set, for the error.

    Raises:
        ConfigError: there is less held-out text than that.
    """
    if len(held_out) < num_batches:
        raise ConfigError(
            f"The set {name} has {len(held_out)} batches, fewer than trainer.eval_batches = {num_batches}. "
            f"Lower trainer.eval_batches, data.batch_size or data.seq_len, or hold out more text."
        )
    compiled = eqx.filter_jit(lambda model, batch: loss_function(model, batch)[1]["loss"])

    def evaluate(model: Any) -> float:
        total = count = 0.0
        for index in range(num_batches):
            batch = held_out.batch(index)
            tokens = float(np.sum(np.asarray(batch.weights.array)))
            total += float(compiled(model, batch)) * tokens
            count += tokens
        return total / count

    return evaluate
