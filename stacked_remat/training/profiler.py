"""Traces of a few steps by JAX's profiler."""

from pathlib import Path
from typing import final

import jax

from .trainer_config import ProfilerConfig


@final
class ProfilerWindow:
    """Traces the steps of a config into a folder that TensorBoard and Perfetto read.

    A run that resumes after the first of these steps has no trace.
    """

    def __init__(self, config: ProfilerConfig, folder: Path):
        self._first = config.start_step
        self._last = (config.start_step or 0) + config.num_steps - 1
        self._folder = folder
        self._running = False

    def before_step(self, step: int) -> None:
        """Starts the trace if this is its first step."""
        if step == self._first:
            self._folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def after_step(self, step: int) -> None:
        """Ends the trace if this was its last step; its results must have been waited for."""
        if step == self._last:
            self.stop()

    def stop(self) -> None:
        """Ends the trace, finished or not."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
