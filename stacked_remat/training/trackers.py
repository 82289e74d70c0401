"""Where metrics go."""

import abc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np


class Tracker(abc.ABC):
    """Receives metrics as a run goes on."""

    @abc.abstractmethod
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records numbers, or arrays of numbers, measured at the end of step `step` (0: before the first)."""

    @abc.abstractmethod
    def close(self) -> None:
        """Says that no more will come."""


@final
class JsonLinesTracker(Tracker):
    """One JSON object a line: the step and its metrics. A line is in the file before `log` returns."""

    def __init__(self, path: Path):
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends a line; numbers that are not finite become null, as JSON has none."""
        entry = {"step": step, **{name: _as_json(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(entry, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _as_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, int | str | None):
        return value
    return _as_json(np.asarray(value).tolist())
