"""Checkpoints: training states on disk, written in the background, each whole or not at
all.

A checkpoint is a folder named by its step, written by Orbax: the arrays of the state by
name, and in JSON the position of the data and the loop, the config, and the shape, the
dtype and a digest of every array. Digests are compared with those of the arrays that
are read: Orbax itself finds only some damage. It is imported where it is used: help and
errors in configs do not wait for it.
"""

import contextlib
import errno
import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._messages import shortened
from .array_layout import (
    arrays_by_name,
    differences,
    digests,
    layout,
    sharding_of,
    with_arrays,
)
from .errors import CheckpointDamagedError, CheckpointMismatchError
from .local_checkpoints import LocalFiles, has_parts
from .processes import LargestOfAll, of_all
from .trainer_config import CheckpointConfig

State = TypeVar("State")

_STATE = "state"
_RUN = "run"
_RUN_FILE = f"{_RUN}/metadata"  # as Orbax names what it writes as JSON
# Of what a checkpoint says of its run; before 2, digests did not tell all damage
_FORMAT = 2
_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")  # in TensorStore's errors


@final
class Checkpoints:
    """The checkpoints of one run.

    `save` copies the state to the host and returns; it is written in the background. A
    process that is killed meanwhile leaves earlier checkpoints unchanged.

    Attributes:
        folder: of the checkpoints.
        local: the files that this process writes near it between two checkpoints; None
            without.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        *,
        run_config: Mapping[str, Any],
        saved: Callable[[Any], Any] | None = None,
        written: Callable[[Any], Any] = lambda state: state,
        local: LocalFiles | None = None,
        report: Callable[[str], None] = warnings.warn,
    ):
        """Opens or makes the folder, and removes unfinished checkpoints of an earlier
        process.

        Args:
            folder: of the checkpoints.
            config: when to save and what to keep.
            run_config: the resolved config of the run, saved in each checkpoint.
            saved: maps a state to a tree of booleans that marks the arrays to save; all
                if not given. The others must never change, and must be given to
                `restore`: checkpoints have their digests, and are not restored with
                other arrays.
            written: makes of a state that `save` is given, or of a part of it, the
                arrays that are written.
            local: where this process writes its part of the state every
                `local_every_steps`; not at all if not given.
            report: is told where local checkpoints are of no use, or end.
        """
        import orbax.checkpoint as ocp

        self.folder = folder
        self._config = config
        self._run_config = dict(run_config)
        self._saved = saved
        self._written = written
        self._saving: int | None = None
        self._unsaved: dict[str, list[int]] | None = None
        self._last_save = time.monotonic()
        self._is_late = LargestOfAll()
        self._kept = _KeptStep()
        # Orbax asks the policy at each save, so the best step is set before.
        policy = _preservation(config, self._kept)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy, cleanup_tmp_directories=True
        )
        folder.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self.local = local
        self._report = report

    def latest(self) -> int | None:
        """The step of the latest checkpoint, whole or damaged; None if there is
        none.

        All processes of a run call this.
        """
        # Not by Orbax, which hides damaged ones: a run must not resume silently from an
        # earlier checkpoint.
        return max([*checkpoint_steps(self.folder), *self._local_steps()], default=None)

    def _local_steps(self) -> set[int]:
        """The steps of which every process has its part near it."""
        if self.local is None:
            return set()
        return set.intersection(*map(set, of_all(self.local.steps())))

    def is_due(self, step: int) -> bool:
        """Whether the config asks for a checkpoint after this step.

        By time, several processes agree on it a step later.
        """
        every = self._config.every_steps
        minutes = self._config.every_minutes
        by_step = every is not None and step % every == 0
        # Clocks of hosts differ, and a checkpoint is written by all or by none.
        by_time = minutes is not None and self._is_late(
            time.monotonic() - self._last_save >= 60 * minutes
        )
        return by_step or bool(by_time)

    def is_local_due(self, step: int) -> bool:
        """Whether the config asks for a local checkpoint after this step."""
        return self.local is not None and step % self._config.local_every_steps == 0

    def save(
        self,
        step: int,
        state: Any,
        position: Mapping[str, Any],
        *,
        best: int | None = None,
        local: bool = False,
    ) -> None:
        """Writes a checkpoint, in the background.

        Args:
            step: of the checkpoint; later than those of all others.
            state: the arrays to save. Their buffers may be donated as soon as this
                returns.
            position: anything else that is needed to resume, as JSON.
            best: the step of the best checkpoint, for `keep_best`.
            local: whether each process writes its part near it, and no more.

        Raises:
            OSError: this checkpoint or the one before it can't be written.
        """
        import orbax.checkpoint as ocp

        chosen, rest = self._divided(state)
        chosen = self._written(chosen)
        arrays = _with_elements(arrays_by_name(chosen))
        # Frozen weights never change, so their digests are found once.
        if self._unsaved is None:
            self._unsaved = digests(self._written(rest))
        run = {
            "format": _FORMAT,
            "position": dict(position),
            "config": self._run_config,
            "layout": layout(chosen),
            "unsaved": self._unsaved,
        }
        if local and self.local is not None:
            # Without digests, for which the devices would wait: files have checksums.
            with self._writing_near() as near:
                near.save(step, arrays, run)
            return
        # An error of the one before is raised here, and not lost in a thread.
        self.wait()
        self._kept.step = best
        run["saved"] = digests(chosen)
        items = {_STATE: ocp.args.PyTreeSave(arrays), _RUN: ocp.args.JsonSave(run)}
        self._saving = step
        with self._writing():
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._last_save = time.monotonic()
        self._is_late = LargestOfAll()

    def restore(self, like: State) -> tuple[State, dict[str, Any]]:
        """The state and the position of the latest checkpoint, be it local; all
        processes of a run call this.

        Args:
            like: a state of the same structure. Saved arrays may be
                `jax.ShapeDtypeStruct`s. Each array is restored with its sharding here,
                or on the default device; the number of devices may differ from that of
                the run that saved.

        Raises what `load_checkpoint` and `check_unsaved` raise.
        """
        self.wait()
        chosen, rest = self._divided(like)
        latest = self._latest_local(chosen)
        if self.local is not None and latest is not None:
            step, run = latest
            _check_same_rest(self.local.path(step), run["unsaved"], rest)
            wanted = arrays_by_name(chosen)
            found = self.local.read(step, run, _with_elements(wanted))
            restored = with_arrays(chosen, found | _without_elements(wanted))
            # Of this process alone, as others were killed before
            self.local.keep(last=step)
        else:
            check_unsaved(self.folder, rest)
            restored = load_checkpoint(self.folder, chosen)
            run = checkpoint_run(self.folder)
            self.begin()
        return eqx.combine(restored, rest), run["position"]

    def begin(self) -> None:
        """Says that the run does not go on from local checkpoints; all processes call
        this.
        """
        if self.local is not None:
            self.local.renew()

    def _latest_local(self, like: Any) -> tuple[int, dict[str, Any]] | None:
        """The step of the local checkpoint to resume from, and what it says of its run;
        None if there is no later one than those for all.
        """
        shared = max(checkpoint_steps(self.folder), default=-1)
        later = {step for step in self._local_steps() if step > shared}
        if self.local is None or not later:
            return None
        runs = {step: self.local.run(step) for step in later}
        last = max(later)
        _check_layout(self.local.path(last), runs[last]["layout"], layout(like))
        wanted = _with_elements(arrays_by_name(like))
        fitting = [step for step, run in runs.items() if has_parts(run, wanted)]
        usable = set.intersection(*map(set, of_all(fitting)))
        if usable:
            return max(usable), runs[max(usable)]
        problem = (
            f"The local checkpoints in {self.local.folder} divide arrays over devices"
            " in another way than this run"
        )
        if shared < 0:
            raise CheckpointMismatchError(
                f"{problem}, and there are no others. Resume with the devices and the"
                " mesh that the run had, or delete that folder to begin again."
            )
        self._report(f"{problem}, which resumes from the checkpoint of step {shared}.")
        return None

    def wait(self) -> None:
        """Waits until all checkpoints are on disk; raises an OSError if one can't be
        written.
        """
        with self._writing():
            self._manager.wait_until_finished()
        if self.local is not None:
            with self._writing_near() as near:
                near.wait()
                # Of these steps there is a checkpoint for all.
                near.keep(first=max(checkpoint_steps(self.folder), default=-1) + 1)

    def close(self) -> None:
        """Waits as `wait`, and ends the background threads."""
        try:
            self.wait()
        finally:
            with self._writing():
                self._manager.close()
            if self.local is not None:
                self.local.close()

    @contextlib.contextmanager
    def _writing_near(self) -> Iterator[LocalFiles]:
        """The local files; where they can't be written the run goes on without."""
        assert self.local is not None
        try:
            yield self.local
        except OSError as error:
            self._report(
                f"{error}. The run goes on without local checkpoints; those for all are"
                f" in {self.folder}."
            )
            self.local.close()
            self.local = None

    def _divided(self, state: Any) -> tuple[Any, Any]:
        """The part of a state that is saved, and the rest."""
        return eqx.partition(state, True if self._saved is None else self._saved(state))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns errors of writing into one that names the checkpoint."""
        try:
            yield
        except (OSError, ValueError) as error:  # TensorStore raises ValueErrors
            # A full disk should be called that, and not by a text of TensorStore's.
            code = _SYSTEM_ERROR.search(str(error))
            number = (
                error.errno
                if isinstance(error, OSError)
                else code and int(code.group(1))
            )
            reason = os.strerror(number) if number else error
            problem = (
                f"Can't write the checkpoint of step {self._saving}: {reason}. Earlier"
                " ones are whole"
            )
            raise OSError(number or errno.EIO, problem, str(self.folder)) from error


def load_checkpoint(
    folder: Path, like: State, *, step: int | None = None, part: str = ""
) -> State:
    """Reads a state, or a part of one, from a run's folder of checkpoints.

    Args:
        folder: of the checkpoints.
        like: a tree of the same structure; its arrays may be `jax.ShapeDtypeStruct`s.
        step: of the checkpoint; the latest if not given.
        part: path of `like` in the state, such as `trained`; all of the state if not
            given.

    Raises:
        CheckpointMismatchError: arrays differ in name, shape or dtype. Or what
            `checkpoint_run` raises.

    Cost: reads and digests the arrays of `like` alone, onto the devices of their
    shardings.
    """
    run = checkpoint_run(folder, step=step)
    path = _existing(folder, step)
    prefix = f"{part}." if part else ""
    saved = {
        name.removeprefix(prefix): entry
        for name, entry in run["layout"].items()
        if name.startswith(prefix)
    }
    # Compared before anything is read, which may take minutes.
    _check_layout(path, saved, layout(like))
    wanted = {prefix + name: array for name, array in arrays_by_name(like).items()}
    found = _read(path / _STATE, _with_elements(wanted))
    # Orbax itself finds only some damage.
    changed = [
        name
        for name, digest in digests(found).items()
        if digest != run["saved"].get(name)
    ]
    if changed:
        raise _damaged(
            path,
            f"arrays are not those that were written: {shortened(changed, most=3)}",
        )
    found |= _without_elements(wanted)
    return with_arrays(
        like,
        {name.removeprefix(prefix): array for name, array in found.items()},
    )


def _check_layout(path: Path, saved: Any, wanted: Any) -> None:
    """Refuses a checkpoint whose arrays are not those of this run."""
    differing = differences(saved, wanted)
    if differing:
        raise CheckpointMismatchError(
            f"The checkpoint {path} does not fit this run's model or optimizer:\n  "
            + shortened(differing, "\n  ", most=8)
        )


# An array without elements is in the layout alone, which has its shape.
def _with_elements(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if math.prod(array.shape)}


def _without_elements(arrays: Mapping[str, Any]) -> dict[str, Array]:
    return {
        name: jnp.zeros(array.shape, array.dtype)
        for name, array in arrays.items()
        if not math.prod(array.shape)
    }


def check_unsaved(folder: Path, rest: Any, *, step: int | None = None) -> None:
    """Checks that `rest`, a state with None for the arrays that are saved, is that of a
    checkpoint's run.

    A CheckpointMismatchError names the arrays that differ.
    """
    saved = checkpoint_run(folder, step=step)["unsaved"]
    _check_same_rest(_existing(folder, step), saved, rest)


def _check_same_rest(path: Path, saved: Mapping[str, Any], rest: Any) -> None:
    """Refuses a checkpoint whose run has other arrays that are not saved, by their
    digests.
    """
    found = digests(rest)
    differing = [
        name for name in sorted({*saved, *found}) if saved.get(name) != found.get(name)
    ]
    if differing:
        raise CheckpointMismatchError(
            f"The checkpoint {path} belongs to a run with other frozen weights:"
            f" {shortened(differing, most=3)}. Give the run the weights that it began"
            " with (the same files, or the same revision on the Hub), or start a new"
            " run."
        )


def checkpoint_run(folder: Path, *, step: int | None = None) -> dict[str, Any]:
    """What a checkpoint says of its run, as JSON: `config`, resolved, and `position`,
    to resume from.

    Args:
        folder: of the checkpoints.
        step: of the checkpoint; the latest if not given.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointDamagedError: the checkpoint is damaged.
        CheckpointMismatchError: an earlier version of the library wrote it.
    """
    path = _existing(folder, step)
    file = path / _RUN_FILE
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
        if missing := {"position", "config", "layout", "saved", "unsaved"} - run.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except FileNotFoundError:
        raise _damaged(path, f"{file} is missing") from None
    except (ValueError, AttributeError) as error:
        raise _damaged(path, f"{file} can't be read ({error})") from error
    if run.get("format") != _FORMAT:
        raise CheckpointMismatchError(
            f"An earlier version of stacked_remat wrote the checkpoint {path}: its"
            " digests do not tell all damage, and are not compared any more. Export it"
            " or end its run with that version."
        )
    return run


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of a folder's checkpoints, in order, including damaged ones, some of
    which Orbax hides.
    """
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        int(path.name) for path in paths if path.name.isdecimal() and path.is_dir()
    )


def _existing(folder: Path, step: int | None) -> Path:
    """The folder of a checkpoint; of the latest if no step is given."""
    steps = checkpoint_steps(folder)
    if not steps or (step is not None and step not in steps):
        wanted = "" if step is None else f" of step {step}"
        choice = f" It has steps {', '.join(map(str, steps))}." if steps else ""
        choice = choice if folder.is_dir() else " There is no such folder."
        if (folder.parent / "local_id").exists():
            choice += " The run has local ones, and writes one here as it goes on."
        raise FileNotFoundError(f"No checkpoint{wanted} in {folder}.{choice}")
    return folder / str(steps[-1] if step is None else step)


def _damaged(path: Path, problem: str) -> CheckpointDamagedError:
    others = [
        str(other) for other in checkpoint_steps(path.parent) if str(other) != path.name
    ]
    choice = (
        f", or delete it and take another one (of step {', '.join(others)})"
        if others
        else ""
    )
    return CheckpointDamagedError(
        f"The checkpoint {path} is damaged or incomplete: {problem}. Restore it from a"
        f" copy{choice}."
    )


def _read(state: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a checkpoint that have these names, in the shardings of
    `wanted`.
    """
    import orbax.checkpoint as ocp

    targets = {
        name: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding_of(one))
        for name, one in wanted.items()
    }
    arguments = ocp.args.PyTreeRestore(
        item=targets,
        restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
        partial_restore=True,
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(state.absolute(), args=arguments)
    except Exception as error:  # Orbax and TensorStore raise anything
        cause = error
        while isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        raise _damaged(state.parent, str(cause).partition("\n")[0]) from error


@final
class _KeptStep:
    """Orbax's policy that keeps the checkpoint of a step."""

    step: int | None = None

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> Sequence[bool]:
        return [checkpoint.step == self.step for checkpoint in checkpoints]


def _preservation(config: CheckpointConfig, best: _KeptStep) -> Any:
    """Orbax's policy that keeps what any of the config's entries keeps."""
    from orbax.checkpoint import checkpoint_managers as managers

    policies: list[managers.PreservationPolicy] = [managers.LatestN(config.keep_last)]
    if config.keep_every_steps is not None:
        policies.append(managers.EveryNSteps(config.keep_every_steps))
    if config.keep_best:
        policies.append(best)
    return managers.AnyPreservationPolicy(policies)
