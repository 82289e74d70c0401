"""Throughput of a run: time per step, tokens per second, model FLOPs and peak
memory.
"""

import contextlib
import resource
import time
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..memory import count_flops
from .batches import TokenBatch
from .memory_check import number_in
from .step import LossFunction, marks


class Clock:
    """Time and tokens of the steps since the last restart, without the first step,
    which compiles.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._in_steps = 0.0
        self._last: float | None = None
        self.restart()

    def tick(self, tokens: int, ended: float | None = None) -> None:
        """Counts a step of this many tokens that ended now, or at this time of
        `time.monotonic`.
        """
        ended = time.monotonic() if ended is None else ended
        # The first step has no time: it compiles.
        if self._last is not None:
            self._seconds += ended - self._last
            self._in_steps += ended - self._last
            self._steps += 1
            self._tokens += tokens
        self._last = ended

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time is not counted."""
        before = time.monotonic()
        yield
        if self._last is not None:
            # As if the last step had ended later
            self._last += time.monotonic() - before

    def restart(self) -> None:
        """Starts a new count at the last step."""
        self._seconds = 0.0
        self._steps = 0
        self._tokens = 0

    @property
    def step_seconds(self) -> float:
        """Mean time of a step; nan before the first one is counted."""
        return self._seconds / self._steps if self._steps else float("nan")

    @property
    def goodput(self) -> float:
        """The share of the time since the clock was made that the counted steps
        took.
        """
        return self._in_steps / (time.monotonic() - self._began)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second; nan before the first step is counted."""
        return self._tokens / self._seconds if self._steps else float("nan")


def training_flops(
    loss_function: LossFunction, model: Any, batch: TokenBatch, trained: Any = None
) -> float | None:
    """FLOPs of the matrix products of one step, without recomputation; costs one
    tracing.

    Each product of the loss counts once, and once more for the gradient of each factor
    that depends on trained arrays: three times for a trained weight, twice for a frozen
    one, once without gradients.

    Args:
        loss_function: the loss.
        model: its weights, or their shapes.
        batch: a batch, or its shapes.
        trained: the model with `None` in place of frozen arrays; all floating-point
            arrays by default.

    Returns:
        The count; None if the trip count of a loop depends on the data.
    """
    if trained is None:
        trained = eqx.filter(model, _is_inexact)
    frozen = eqx.filter(model, marks(trained), inverse=True)

    def loss(trained: Any, frozen: Any, batch: TokenBatch) -> Any:
        return loss_function(eqx.combine(trained, frozen), batch)

    jaxpr, _, _ = eqx.filter_make_jaxpr(loss)(trained, frozen, batch)
    # Arguments are flattened in order, so the trained arrays come first.
    num_trained = len(jax.tree.leaves(trained))
    found = count_flops(
        jaxpr, trained=[index < num_trained for index in range(len(jaxpr.in_avals))]
    )
    return None if found.too_low else float(found.matmul)


def _is_inexact(leaf: Any) -> bool:
    """Whether an array, or its shape, is of floating-point numbers."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def peak_memory_bytes() -> int | None:
    """The peak memory of the first device so far; on a CPU, the peak of this
    process.
    """
    statistics = jax.local_devices()[0].memory_stats()
    if statistics and "peak_bytes_in_use" in statistics:
        return int(statistics["peak_bytes_in_use"])
    return peak_resident_bytes() if jax.default_backend() == "cpu" else None


def peak_resident_bytes() -> int:
    """The peak of resident memory of this process so far."""
    # Not `ru_maxrss` on Linux, which a process inherits from the one that started it.
    kibibytes = number_in("/proc/self/status", "VmHWM:")
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if kibibytes is None
        else 1024 * kibibytes
    )
