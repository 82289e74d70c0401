"""The loss on text that is never trained on."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np

from .config_file import ConfigError
from .data.held_out import HeldOutBatches
from .step import LossFunction


def held_out_evaluator(
    loss_function: LossFunction, held_out: HeldOutBatches, num_batches: int
) -> Callable[[Any], float]:
    """A function from a model to its mean `loss` per token, in nats, on the first `num_batches` batches.

    Every call reads the same batches, so that its results can be compared. It compiles at the first.

    Raises:
        ConfigError: there is less held-out text than that.
    """
    if len(held_out) < num_batches:
        raise ConfigError(
            f"The held-out text has {held_out.num_sequences} sequences of {held_out.seq_len} tokens, too few "
            f"for trainer.eval_batches = {num_batches} batches of {held_out.batch_size}. Lower "
            f"trainer.eval_batches, data.batch_size or data.seq_len, or raise data.held_out_fraction."
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
