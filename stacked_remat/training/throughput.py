"""Throughput of a run: time per step, tokens per second, model FLOPs and peak memory."""

import contextlib
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from ..memory import count_flops
from .batches import TokenBatch
from .step import LossFunction, RandomLoss


class Clock:
    """Time and tokens of the steps since the last restart, without the first step, which compiles."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._now = 0.0
        self._steps = self._tokens = 0

    def tick(self, tokens: int) -> None:
        """Counts a finished step of this many tokens."""
        self._now = time.monotonic()
        if self._began is None:
            self._began = self._now
        else:
            self._steps += 1
            self._tokens += tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time is not counted."""
        before = time.monotonic()
        yield
        if self._began is not None:
            paused = time.monotonic() - before
            self._began, self._now = self._began + paused, self._now + paused

    def restart(self) -> None:
        """Starts a new count at the last step."""
        if self._began is not None:
            self._began, self._steps, self._tokens = self._now, 0, 0

    @property
    def step_seconds(self) -> float:
        """Mean time of a step; nan before the first one is counted."""
        return (self._now - (self._began or 0.0)) / self._steps if self._steps else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second; nan before the first step is counted."""
        return self._tokens / (self._steps * self.step_seconds) if self._steps else float("nan")


def training_flops(
    loss_function: LossFunction | RandomLoss, model: Any, batch: TokenBatch, trained: Any = None
) -> float | None:
    """FLOPs of the matrix products of one step, without recomputation; costs one tracing.

    Each product of the loss counts once, and once more for the gradient of each factor that depends on
    trained arrays: three times for a trained weight, twice for a frozen one, once without gradients.

    Args:
        loss_function: the loss.
        model: its weights, or their shapes.
        batch: a batch, or its shapes.
        trained: the model with `None` in place of frozen arrays; all floating-point arrays by default.

    Returns:
        The count; None if the trip count of a loop depends on the data.
    """
    trained = eqx.filter(model, eqx.is_inexact_array) if trained is None else trained
    frozen = jax.tree.map(
        lambda leaf, own: leaf if own is None else None, model, trained, is_leaf=lambda leaf: leaf is None
    )

    def loss(trained: Any, frozen: Any, batch: TokenBatch) -> Any:
        model = eqx.combine(trained, frozen)
        if isinstance(loss_function, RandomLoss):
            return loss_function.function(model, batch, jax.random.key(0))
        return loss_function(model, batch)

    jaxpr, _, _ = eqx.filter_make_jaxpr(loss)(trained, frozen, batch)
    num_trained = len(jax.tree.leaves(trained))
    found = count_flops(jaxpr, trained=[index < num_trained for index in range(len(jaxpr.in_avals))])
    return None if found.too_low else float(found.matmul)


def peak_memory_bytes() -> int | None:
    """The peak memory of the first device so far; on a CPU, the peak of this process."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics and "peak_bytes_in_use" in statistics:
        return int(statistics["peak_bytes_in_use"])
    if jax.default_backend() != "cpu":
        return None
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The peak of resident memory of this process so far."""
    # Not `ru_maxrss` on Linux, which a process inherits from the one that started it.
    if (status := Path("/proc/self/status")).exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
