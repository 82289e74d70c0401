"""The folder of a run's results, and the checks before a run resumes in it."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from .._files import replaced_whole
from .._messages import shortened
from ..ghost import LOG_FOLDER
from .config_sections import config_yaml
from .config_tree import from_yaml, leaves, read_config_file
from .errors import ConfigError
from .local_checkpoints import forget
from .processes import of_all

# May change when a run resumes: these keys change paths and costs, but not results.
_FREE = (
    "remat",
    "distributed",
    "budget",
    "host_budget",
    "data.cache_dir",
    "data.tokenizing_processes",
    "trainer.run_dir",
    "trainer.log_every",
    "trainer.eval_every",
    "trainer.eval_batches",
    "trainer.mesh",
    "trainer.pipeline",
    "trainer.streaming",
    "trainer.checkpoint",
    "trainer.trackers",
    "trainer.profiler",
    "trainer.update.on_nonfinite",
    "trainer.update.max_consecutive_skips",
)
# May be different in each process of a run. That all see one run folder is checked when
# it is opened.
_OWN = (
    "distributed",
    "trainer.run_dir",
    "trainer.trackers",
    "data.cache_dir",
    "data.tokenizing_processes",
    "trainer.checkpoint.local_dir",
)
_ABSENT = "not set"
_LOCK = ".lock"


@final
class RunFolder:
    """Paths of a run's results.

    Attributes:
        root: the folder.
        config: the resolved config, YAML.
        metrics: metrics, JSON lines.
        checkpoints: the checkpoints, each a folder named by its step.
        scores: the scores of examples, Parquet files.
        result: the result, JSON; exists when the run is finished.
        profile: traces of JAX's profiler.
        local_id: which local checkpoints are of this run, if it writes any.
    """

    def __init__(self, root: Path):
        self.root = root
        self.config = root / "config.yaml"
        self.metrics = root / "metrics.jsonl"
        self.checkpoints = root / "checkpoints"
        self.scores = root / LOG_FOLDER
        self.result = root / "result.json"
        self.profile = root / "profile"
        self.local_id = root / "local_id"

    @staticmethod
    def open(
        root: Path,
        config: Mapping[str, Any],
        *,
        overwrite: bool = False,
        accept_changes: bool = False,
    ) -> "RunFolder":
        """Makes the folder of a new run, or opens that of an unfinished run of the same
        config.

        The config of a new run is written at once, that of an earlier run is not
        changed until `begin`.

        Args:
            root: the folder; its parents are made too.
            config: the resolved config.
            overwrite: delete an earlier run's results, and nothing else, and start a
                new run.
            accept_changes: also open the folder of a run of another config, even if
                that run is finished.

        Raises:
            FileExistsError: the folder has a finished run, or files and no config.
            ConfigError: it has a run of another config (the message names the keys), or
                an unreadable config.
        """
        folder = RunFolder(root)
        folder.check(config, overwrite=overwrite, accept_changes=accept_changes)
        if overwrite:
            folder._delete_results()
        root.mkdir(parents=True, exist_ok=True)
        if not folder.config.exists():
            folder.begin(config)
        return folder

    def check(
        self,
        config: Mapping[str, Any],
        *,
        overwrite: bool = False,
        accept_changes: bool = False,
    ) -> None:
        """Raises what `open` would, before anything is made or changed."""
        if self.root.exists() and not self.root.is_dir():
            raise FileExistsError(
                f"{self.root} is no folder. Give this run a folder of its own with"
                " --trainer.run_dir."
            )
        there = next(one for one in self.root.absolute().parents if one.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise FileNotFoundError(
                f"{self.root} can't be made: {there} is no folder that can be written"
                " to. Give this run another folder with --trainer.run_dir."
            )
        if not overwrite:
            # As it is read back
            self._check(from_yaml(config_yaml(config)), accept_changes)

    def begin(self, config: Mapping[str, Any]) -> None:
        """Writes the config and removes an earlier result: the run begins or
        resumes.
        """
        # Before anything else: a result says that the run of this config is finished.
        self.result.unlink(missing_ok=True)
        with replaced_whole(self.config) as path:
            path.write_text(config_yaml(config), encoding="utf-8")

    def finish(self, result: Mapping[str, Any]) -> None:
        """Writes the result."""
        with replaced_whole(self.result) as path:
            path.write_text(json.dumps(dict(result), indent=2) + "\n", encoding="utf-8")

    def _check(self, config: Mapping[str, Any], accept_changes: bool) -> None:
        if not self.config.exists():
            return _check_empty(self.root)
        changes = config_changes(read_config_file(str(self.config)), config)
        # Another config would silently go on from weights that it didn't make.
        if changes and not accept_changes:
            lines = "\n  ".join(changes)
            raise ConfigError(
                f"{self.root} has a run of another config, which can't be resumed with"
                f" this one:\n  {lines}\n{_WAYS_OUT} To resume from its last checkpoint"
                " anyway, give --trainer.checkpoint.accept_changes true."
            )
        if self.result.exists() and not changes:
            raise FileExistsError(
                f"{self.root} has a finished run of this config. {_WAYS_OUT}"
            )

    def _results(self) -> list[Path]:
        names = (
            self.config,
            self.metrics,
            self.checkpoints,
            self.scores,
            self.result,
            self.profile,
            self.local_id,
        )
        more = (
            self.root / "tensorboard",
            self.root / "wandb",
            self.root / "wandb_run_id.txt",
        )
        return [path for path in (*names, *more) if path.exists() or path.is_symlink()]

    def _delete_results(self) -> None:
        """Deletes all results; of a symbolic link only the link."""
        forget(self.local_id)
        for path in (
            self._results()
        ):  # the config first: without it, the rest is refused and not resumed
            (
                shutil.rmtree(path)
                if path.is_dir() and not path.is_symlink()
                else path.unlink()
            )


_WAYS_OUT = (
    "Give this run a folder of its own with --trainer.run_dir, or delete those results"
    " and start a new run with --trainer.checkpoint.overwrite true."
)


def _check_empty(root: Path) -> None:
    if others := sorted(
        {path.name for path in root.glob("*")} - {_LOCK, ".config.yaml.unfinished"}
    ):
        raise FileExistsError(
            f"{root} has files and no run, which has {_LOCK} and config.yaml:"
            f" {shortened(others, most=3)}. Give this run a folder of its own with"
            " --trainer.run_dir."
        )


@contextlib.contextmanager
def lock_run_folder(root: Path) -> Iterator[None]:
    """Makes a run's folder if needed, and locks it where the file system can, while
    this process lives.

    Raises:
        FileExistsError: another process has locked it, or it has files and no lock: it
            is no run's.
    """
    root.mkdir(parents=True, exist_ok=True)
    if not (root / _LOCK).exists():
        _check_empty(root)
    with (root / _LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileExistsError(
                f"Another process trains in {root}. Wait for it or end it, or give this"
                " run a folder of its own with --trainer.run_dir."
            ) from error
        # A file system without locks, as some network ones: two runs in one folder are
        # then the user's to avoid.
        except OSError:
            pass
        yield


def check_same_in_all(config: Mapping[str, Any], fix: str) -> None:
    """Refuses configs of the processes of a run that differ in more than what each has
    of its own.

    The ConfigError is the same in all processes: it names the keys, and ends with
    `fix`.
    """
    first, *others = of_all(dict(config))
    # Each process would wait for the others in a collective that they never reach.
    lines = [
        f"{key} is {there} in process 0 and {here} in process {index}"
        for index, other in enumerate(others, 1)
        for key, there, here in _differing(first, other, _OWN)
    ]
    if lines:
        listed = shortened(lines, "\n  ", most=8)
        raise ConfigError(
            f"the processes of this run have different configs:\n  {listed}\n{fix}"
        )


def config_changes(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each key that changes results and differs between two resolved
    configs.
    """
    changes = [
        f"{key} was {there} and is {here}"
        for key, there, here in _differing(earlier, now, _FREE)
    ]
    # The first pattern that matches counts, so their order is a setting too.
    before = _patterns(earlier)
    after = _patterns(now)
    if before != after and sorted(before) == sorted(after):
        changes.append(
            f"the order of the patterns of learning_rates was {', '.join(before)} and"
            f" is {', '.join(after)}"
        )
    return changes


def _patterns(config: Mapping[str, Any]) -> list[str]:
    """The patterns of learning rates of a resolved config, in order."""
    patterns = []
    for path, _ in leaves(config):
        if "learning_rates" in path[:-1]:
            patterns.append(str(path[-1]))
    return patterns


def _differing(
    one: Mapping[str, Any], other: Mapping[str, Any], free: Sequence[str]
) -> Iterator[tuple[str, Any, Any]]:
    """The keys with different values in two configs, except for some and what is below
    them; both values.
    """
    there, here = (
        {".".join(map(str, path)): own for path, own in leaves(tree)}
        for tree in (one, other)
    )
    for key in sorted({*there, *here}):
        values = there.get(key, _ABSENT), here.get(key, _ABSENT)
        if values[0] != values[1] and not any(
            key == each or key.startswith(f"{each}.") for each in free
        ):
            yield key, *values


@contextlib.contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Adds the path to system errors without one, such as a full disk's."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
