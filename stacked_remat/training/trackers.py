"""Trackers, which write the metrics of a run to files or services."""

import abc
import importlib
import json
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from .._files import replaced_whole
from .errors import ConfigError
from .run_folder import named_in_errors
from .trainer_config import TrackersConfig, WandbConfig


class Tracker(abc.ABC):
    """Receives the metrics of a run."""

    @abc.abstractmethod
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records numbers, or arrays of numbers, of the end of step `step` (0: before
        the first).
        """

    @abc.abstractmethod
    def flush(self) -> None:
        """Hands what was logged to the operating system, or to a process that outlives
        this one.

        Called before each checkpoint: a run that is killed does not log the steps
        before it again.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the tracker."""


@final
class JsonLinesTracker(Tracker):
    """One JSON object per line: the step and its metrics. `log` flushes each line to
    the file.
    """

    def __init__(self, path: Path, *, resumed_after: int | None = None):
        """Opens the file to append to it.

        Args:
            path: the file.
            resumed_after: the step after which the run resumes. Lines of later steps,
                and an incomplete last line, are dropped first: an earlier process wrote
                them after its last checkpoint.

        Raises:
            ConfigError: a line is damaged; the file is unchanged.
        """
        # Steps after the checkpoint are done again, and would be there twice.
        if resumed_after is not None and path.exists():
            _keep_lines(path, resumed_after)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends a line; numbers that are not finite become null."""
        numbers = {
            name: _as_json(np.asarray(value).tolist())
            for name, value in metrics.items()
        }
        with named_in_errors(self._path):
            self._file.write(
                json.dumps({"step": step, **numbers}, allow_nan=False) + "\n"
            )
            self._file.flush()

    def flush(self) -> None:
        """Does nothing, since `log` does it."""

    def close(self) -> None:
        """Closes the file."""
        with named_in_errors(self._path):
            self._file.close()


@final
class _TensorBoard(Tracker):
    """An event file for TensorBoard, which hides earlier events of steps after
    `resumed_after`.

    The package's `SummaryWriter` passes events to a thread, and its `flush` does not
    wait for all of them.
    """

    def __init__(self, folder: Path, resumed_after: int | None):
        _package("tensorboardX")
        package = _package("tensorboardX.event_file_writer")
        self._protocol = _package("tensorboardX.proto.event_pb2")
        self._scalar = _package("tensorboardX.summary").scalar
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = package.EventsWriter(str(folder / "events"), f".{os.getpid()}")
        # TensorBoard itself drops earlier events of later steps when it reads this
        # mark.
        if resumed_after is not None:
            start = self._protocol.SessionLog(status=self._protocol.SessionLog.START)
            self._write(step=resumed_after + 1, session_log=start)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in _scalars(metrics):
            # TensorBoard has curves of numbers alone; an array is one for each of its
            # entries.
            self._write(step=step, summary=self._scalar(name, value))

    def _write(self, **event: Any) -> None:
        self._writer.write_event(self._protocol.Event(wall_time=time.time(), **event))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@final
class _Wandb(Tracker):
    """A run of Weights & Biases, the same one when the run resumes."""

    def __init__(
        self, config: WandbConfig, folder: Path, run_config: Mapping[str, Any]
    ):
        package = _package("wandb")
        identifier = folder / "wandb_run_id.txt"
        # Kept in the folder, so that a run that resumes goes on in the same page.
        if not identifier.exists():
            identifier.write_text(uuid.uuid4().hex, encoding="utf-8")
        try:
            self._run = package.init(
                project=config.project,
                entity=config.entity,
                name=config.name or folder.name,
                mode=config.mode,
                dir=str(folder),
                config=dict(run_config),
                id=identifier.read_text(encoding="utf-8").strip(),
                resume="allow",
            )
        except Exception as error:  # the package raises anything
            raise ConfigError(
                "trainer.trackers.wandb: Weights & Biases could not start the run:"
                f" {error} Log in there, keep the run on this machine (mode: offline),"
                " or remove the section."
            ) from error

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(_scalars(metrics)), step=step)

    def flush(self) -> None:
        """Does nothing: the package writes in a process of its own."""

    def close(self) -> None:
        self._run.finish()


def build_trackers(
    config: TrackersConfig,
    folder: Path,
    run_config: Mapping[str, Any],
    *,
    resumed_after: int | None = None,
) -> list[Tracker]:
    """The trackers of a config, besides the JSON lines; they log each number of an
    array by its index.

    Args:
        config: of the trackers.
        folder: the run folder.
        run_config: the resolved config, recorded with the run.
        resumed_after: the step after which the run resumes; None for a new run.

    Raises:
        ConfigError: a package is not installed or can't start the run, for lack of a
            login or a network perhaps; the message names it.
    """
    built: list[Tracker] = []
    if config.wandb.project is not None:  # first, since it may fail
        built.append(_Wandb(config.wandb, folder, run_config))
    if config.tensorboard:
        built.append(_TensorBoard(folder / "tensorboard", resumed_after))
    return built


def check_trackers(config: TrackersConfig) -> None:
    """Imports the packages of a config's trackers; a ConfigError names one that is not
    installed.
    """
    if config.tensorboard:
        _package("tensorboardX")
    if config.wandb.project is not None:
        _package("wandb")


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        install = (
            "'stacked_remat[tensorboard]'" if package == "tensorboardX" else package
        )
        raise ConfigError(
            f"trainer.trackers needs the package {package}: pip install {install}"
        ) from error


def _keep_lines(path: Path, last_step: int) -> None:
    """Drops the lines of later steps."""
    kept = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            # A line without an end was being written when its process was killed.
            if (
                line.endswith(b"\n")
                and json.loads(line.decode("utf-8"))["step"] <= last_step
            ):
                kept.append(line)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path} is damaged: line {number} is not a line of metrics ({error})."
                " Delete that line, or move the file away, and start the same command"
                " again."
            ) from error
    with replaced_whole(path) as rewritten:
        rewritten.write_bytes(b"".join(kept))


def _scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        array = np.asarray(value)
        if array.ndim == 0:
            yield name, float(array)
        else:
            yield from (
                (f"{name}/{index}", float(number))
                for index, number in enumerate(array.ravel())
            )


def _as_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    # JSON has no NaN: other readers than Python's refuse a file with one.
    return None if isinstance(value, float) and not math.isfinite(value) else value
