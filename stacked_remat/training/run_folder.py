"""The folder that a run leaves behind, and whether a run may go on in it."""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .config_error import ConfigError
from .config_include import read_config_file

# What may differ when a run goes on: it changes where things go and what they cost, not what is computed.
_FREE = (
    "remat",
    "budget",
    "host_budget",
    "trainer.run_dir",
    "trainer.log_every",
    "trainer.mesh",
    "trainer.checkpoint",
    "trainer.trackers",
    "trainer.profiler",
    "trainer.update.on_nonfinite",
    "trainer.update.max_consecutive_skips",
)
_ABSENT = "not set"


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run's results."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved config, YAML."""
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Metrics, JSON lines."""
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints, a folder for each by its step."""
        return self.root / "checkpoints"

    @property
    def result(self) -> Path:
        """What the run ended with, JSON; it is there when the run is finished."""
        return self.root / "result.json"

    @property
    def profile(self) -> Path:
        """Traces of JAX's profiler."""
        return self.root / "profile"

    def nonfinite_step(self, step: int) -> Path:
        """The data of a step whose loss or gradient was not finite."""
        return self.root / f"nonfinite_step_{step}.npz"

    @staticmethod
    def open(
        root: Path, config: Mapping[str, Any], *, overwrite: bool = False, accept_changes: bool = False
    ) -> "RunFolder":
        """Makes the folder for a new run, or opens that of a run of the same config which did not finish.

        A new folder gets its config at once; that of an earlier run is left as it is until `begin`.

        Args:
            root: the folder; its parents are made too.
            config: the resolved config.
            overwrite: delete an earlier run's results, and nothing else, and start anew.
            accept_changes: open the folder of a run of another config too, and of one that is finished if the
                config is another.

        Raises:
            FileExistsError: the folder holds a finished run, or results without a config.
            ConfigError: it holds a run of another config, and the message names the keys that differ; one
                whose config can't be read; or, to be deleted, links to other places. Nothing is deleted then.
        """
        folder = RunFolder(root)
        if overwrite:
            folder._delete_results()
        else:
            folder._check(yaml.safe_load(yaml.safe_dump(dict(config))), accept_changes)  # as it is read back
        root.mkdir(parents=True, exist_ok=True)
        if not folder.config.exists():
            folder.begin(config)
        return folder

    def begin(self, config: Mapping[str, Any]) -> None:
        """Makes this the config of the run in the folder, when nothing stands against going on with it."""
        self.result.unlink(missing_ok=True)
        _write(self.config, yaml.safe_dump(dict(config), sort_keys=False))

    def finish(self, result: Mapping[str, Any]) -> None:
        """Writes what the run ended with."""
        _write(self.result, json.dumps(dict(result), indent=2) + "\n")

    def _check(self, config: Mapping[str, Any], accept_changes: bool) -> None:
        if not self.config.exists():
            if self._results():
                raise FileExistsError(
                    f"{self.root} holds results of an earlier run "
                    f"({', '.join(path.name for path in self._results())}) and no config. {_WAYS_OUT}"
                )
            return
        try:
            earlier = read_config_file(str(self.config)).plain
        except ConfigError as error:
            raise ConfigError(
                f"The config of the run in {self.root} can't be read, so nothing says whether this run may "
                f"go on there: {error} Restore it (each of its checkpoints holds a copy). {_WAYS_OUT}"
            ) from error
        changes = config_changes(earlier, config)
        if changes and not accept_changes:
            lines = "\n  ".join(changes)
            raise ConfigError(
                f"{self.root} holds a run of another config, which this one can't go on with:\n  {lines}\n"
                f"{_WAYS_OUT} To go on from its last checkpoint all the same, say "
                f"--trainer.checkpoint.accept_changes true."
            )
        if self.result.exists() and not changes:
            raise FileExistsError(f"{self.root} holds a finished run of this config. {_WAYS_OUT}")

    def _results(self) -> list[Path]:
        names = (self.config, self.metrics, self.checkpoints, self.result, self.profile)
        more = (self.root / "tensorboard", self.root / "wandb", self.root / "wandb_run_id.txt")
        found = [path for path in (*names, *more) if path.exists() or path.is_symlink()]
        return found + sorted(self.root.glob("nonfinite_step_*.npz"))

    def _delete_results(self) -> None:
        """Deletes all results; none of them where a link, a mount or a permission is in the way."""
        results = self._results()
        for path in results:
            if path.is_symlink():
                raise ConfigError(
                    f"{path} is a symbolic link to {os.readlink(path)}, and trainer.checkpoint.overwrite "
                    f"deletes nothing elsewhere. Remove the link, and what it leads to if that may go, or "
                    f"give this run a folder of its own with --trainer.run_dir. Nothing was deleted."
                )
            _check_deletable(path)
            _check_deletable(_doomed(path))  # what an earlier deletion left
        # At once out of sight: a half-deleted folder of checkpoints must not be taken for a run's.
        moved: list[tuple[Path, Path]] = []
        try:
            for path in results:
                doomed = _doomed(path)
                _delete(doomed)
                os.replace(path, doomed)
                moved.append((path, doomed))
        except BaseException:
            for path, doomed in moved:
                os.replace(doomed, path)
            raise
        for _, doomed in moved:
            _delete(doomed)


def _doomed(path: Path) -> Path:
    return path.with_name(f".{path.name}.deleted")


def _check_deletable(path: Path) -> None:
    """Refuses what is mounted, and folders that may not be changed, at a path or below it."""
    within = f"{path.resolve()}/"
    problems = {mount: "is a mount point" for mount in _mount_points() if f"{mount}/".startswith(within)}
    if path.is_dir() and not path.is_symlink():
        for folder, _, _ in os.walk(path):
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                problems[folder] = "may not be changed by this user"
    for place, problem in problems.items():
        raise ConfigError(
            f"{place} {problem}, so trainer.checkpoint.overwrite can't delete {path}. Unmount it or change "
            f"its mode, or give this run a folder of its own with --trainer.run_dir. Nothing was deleted."
        )


def _mount_points() -> list[str]:
    """Where file systems are mounted, as far as the system says."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return []
    escaped = [line.split()[4] for line in lines]  # a space in a path is written \040
    return [
        os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), at)) for at in escaped
    ]


def _delete(path: Path) -> None:
    """Deletes a file, or a folder with all that is in it; errors name the whole path."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for child in path.iterdir():
        _delete(child)
    path.rmdir()


_WAYS_OUT = (
    "Give this run a folder of its own with --trainer.run_dir, or delete those results and start anew with "
    "--trainer.checkpoint.overwrite true."
)


@contextlib.contextmanager
def lock_run_folder(root: Path) -> Iterator[None]:
    """Keeps other processes out of a run's folder, which is made; the system lets go when a process dies.

    On file systems that know no locks it keeps nobody out.

    Raises:
        FileExistsError: another process is in it.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileExistsError(
                f"Another process trains in {root}. Wait for it or end it, or give this run a folder of its "
                f"own with --trainer.run_dir."
            ) from error
        except OSError:
            pass
        yield


def config_changes(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each key by which two resolved configs would give different results."""
    there, here = dict(_flat(earlier, ())), dict(_flat(now, ()))
    return [
        f"{key} was {there.get(key, _ABSENT)} and is {here.get(key, _ABSENT)}"
        for key in sorted({*there, *here})
        if there.get(key, _ABSENT) != here.get(key, _ABSENT)
        and not any(key == free or key.startswith(f"{free}.") for free in _FREE)
    ]


def _flat(entries: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key, value in entries.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, (*path, str(key)))
        else:
            yield ".".join((*path, str(key))), value


def _write(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with named_in_errors(path):
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)


@contextlib.contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Gives errors of the system that say no path, such as a full disk's, that of what is being written."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except ValueError as error:  # TensorStore's, which writes checkpoints
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
