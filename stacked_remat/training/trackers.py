"""Where metrics go."""

import abc
import contextlib
import importlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from .config_error import ConfigError
from .run_folder import named_in_errors
from .trainer_config import TrackersConfig, TrackioConfig, WandbConfig

_LOCAL = {"wandb": "mode: offline", "trackio": "space_id: null"}
_SETTINGS = {"tensorboardX": "TensorBoard", "wandb": "Weights & Biases", "trackio": "Trackio"}


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

    def __init__(self, path: Path, *, resumed_after: int | None = None):
        """Opens the file to append to it.

        Args:
            path: the file.
            resumed_after: step that the run goes on from. Lines of later steps, and a last one that is not
                whole, are dropped first: an earlier process wrote them after its last checkpoint.

        Raises:
            ConfigError: a line before them is damaged; the file is as it was.
        """
        if resumed_after is not None and path.exists():
            _keep_lines(path, resumed_after)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends a line; numbers that are not finite become null, as JSON has none."""
        entry = {"step": step, **{name: _as_json(value) for name, value in metrics.items()}}
        with named_in_errors(self._path):
            self._file.write(json.dumps(entry, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with named_in_errors(self._path):
            self._file.close()


@final
class TensorBoardTracker(Tracker):
    """Event files for TensorBoard, written by tensorboardX."""

    def __init__(self, folder: Path, *, resumed_after: int | None = None):
        """Opens a new event file in `folder`; events of steps after `resumed_after` are shown no more.

        Raises:
            ConfigError: tensorboardX is not installed.
        """
        tensorboardX = _package("tensorboardX")
        purge = None if resumed_after is None else resumed_after + 1
        self._writer = tensorboardX.SummaryWriter(str(folder), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds a scalar for each number; those of an array are named by their index."""
        for name, value in _scalars(metrics):
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


@final
class HostedTracker(Tracker):
    """A run of Weights & Biases or of Trackio."""

    def __init__(self, run: Any, finish: Callable[[], None]):
        """Takes over a run that was started.

        Args:
            run: what the package's `init` returned.
            finish: ends it, when everything has been written or sent.
        """
        self._run = run
        self._finish = finish

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs a number for each metric; those of an array are named by their index."""
        self._run.log(dict(_scalars(metrics)), step=step)

    def close(self) -> None:
        """Waits for what is still on its way."""
        self._finish()


def _start_wandb(config: WandbConfig, folder: Path, run_config: Mapping[str, Any]) -> HostedTracker:
    """Starts a run of Weights & Biases, or goes on with the one whose id is in `folder`."""
    wandb = _package("wandb")
    with _named_errors("wandb"):
        run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or folder.name,
            mode=config.mode,
            dir=str(folder),
            config=dict(run_config),
            id=_run_id(folder / "wandb_run_id.txt"),
            resume="allow",
        )
    return HostedTracker(run, run.finish)


def _start_trackio(
    config: TrackioConfig, folder: Path, run_config: Mapping[str, Any], *, resume: bool
) -> HostedTracker:
    """Starts a run of Trackio, or goes on with the latest of its name.

    Trackio finds runs by their names alone, so only a run that goes on from a checkpoint may be found.
    """
    trackio = _package("trackio")
    with _named_errors("trackio"):
        run = trackio.init(
            project=config.project,
            name=config.name or folder.name,
            space_id=config.space_id,
            config=dict(run_config),
            resume="allow" if resume else "never",
        )
    return HostedTracker(run, trackio.finish)  # Run.finish leaves it to be finished again when Python ends


def build_trackers(
    config: TrackersConfig, folder: Path, run_config: Mapping[str, Any], *, resumed_after: int | None = None
) -> list[Tracker]:
    """The trackers that a config asks for, besides the JSON lines.

    Args:
        config: which ones.
        folder: the run folder.
        run_config: the resolved config, shown beside the run.
        resumed_after: step that the run goes on from, if it is not new.

    Raises:
        ConfigError: a package is not installed, or refuses the run, for want of a login or a network, say;
            the message names it.
    """
    built: list[Tracker] = []
    if config.tensorboard:
        built.append(TensorBoardTracker(folder / "tensorboard", resumed_after=resumed_after))
    if config.wandb.project is not None:
        built.append(_start_wandb(config.wandb, folder, run_config))
    if config.trackio.project is not None:
        built.append(_start_trackio(config.trackio, folder, run_config, resume=resumed_after is not None))
    return built


def check_trackers(config: TrackersConfig) -> None:
    """Imports the packages of the trackers that a config asks for.

    Raises:
        ConfigError: one is not installed; the message names it.
    """
    for asked_for, package in (
        (config.tensorboard, "tensorboardX"),
        (config.wandb.project is not None, "wandb"),
        (config.trackio.project is not None, "trackio"),
    ):
        if asked_for:
            _package(package)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        install = "'stacked_remat[tensorboard]'" if name == "tensorboardX" else name
        raise ConfigError(
            f"trainer.trackers asks for {_SETTINGS[name]}, which needs the package {name}: "
            f"pip install {install}"
        ) from error


@contextlib.contextmanager
def _named_errors(package: str) -> Iterator[None]:
    """Says which setting asked for what a package refuses, in whatever way it does."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"trainer.trackers.{package}: {_SETTINGS[package]} could not start the run: {error} Log in "
            f"there, keep the run on this machine ({_LOCAL[package]}), or leave the section out."
        ) from error


def _run_id(path: Path) -> str:
    if not path.exists():
        path.write_text(uuid.uuid4().hex, encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _keep_lines(path: Path, last_step: int) -> None:
    """Drops the lines of later steps, all at once."""
    kept = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            if line.endswith(b"\n") and json.loads(line.decode("utf-8"))["step"] <= last_step:
                kept.append(line)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path} is damaged: line {number} holds no metrics ({error}). Delete that line, or move the "
                f"file away, and start the same command again."
            ) from error
    rewritten = path.with_name(f".{path.name}.rewritten")
    with named_in_errors(path):
        rewritten.write_bytes(b"".join(kept))
        os.replace(rewritten, path)


def _scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        array = np.asarray(value)
        if array.ndim == 0:
            yield name, float(array)
        else:
            yield from ((f"{name}/{index}", float(number)) for index, number in enumerate(array.ravel()))


def _as_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, int | str | None):
        return value
    return _as_json(np.asarray(value).tolist())
