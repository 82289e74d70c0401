"""Training states on disk, written in the background, each whole or not at all.

A checkpoint is a folder named by its step, written by Orbax: the arrays of the state by name, and beside them
in JSON the position of the data and the loop, the config, and the shape and dtype of every array.
"""

import datetime
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    EveryNSeconds,
    EveryNSteps,
    LatestN,
    PreservationPolicy,
)

from .array_layout import arrays_by_name, differences, digests, is_key, layout, select, with_arrays
from .trainer_config import CheckpointConfig

State = TypeVar("State")

_STATE = "state"
_RUN = "run"


class CheckpointMismatchError(ValueError):
    """A checkpoint of another model or optimizer; the message names the arrays that differ."""


@final
class Checkpoints:
    """The checkpoints of one run.

    A save copies the state to the host and returns; the rest happens in the background. A process that is
    killed meanwhile leaves the checkpoints before that one as they were.

    Attributes:
        folder: holds a folder for each checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        *,
        run_config: Mapping[str, Any],
        saved: Callable[[Any], Any] | None = None,
    ):
        """Opens the folder, makes it if needed, and removes what an earlier process left unfinished.

        Args:
            folder: holds a folder for each checkpoint.
            config: when to save and what to keep.
            run_config: the resolved config of the run, kept in each checkpoint.
            saved: maps a state to a tree of booleans, those of its arrays that are saved; all if not given.
                What is not saved never changes, and has to be there when the state is restored: checkpoints
                hold its digests, and with other arrays none of them is restored.
        """
        self.folder = folder
        self._config = config
        self._run_config = dict(run_config)
        self._saved = saved
        self._unsaved: dict[str, list[int]] | None = None
        self._last_save = time.monotonic()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(_kept(config)),
            cleanup_tmp_directories=True,
            enable_async_checkpointing=config.asynchronous,
        )
        folder.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int | None:
        """The step of the latest checkpoint, if there is one."""
        return self._manager.latest_step()

    def is_due(self, step: int) -> bool:
        """Whether the config asks for a checkpoint after this step."""
        every, minutes = self._config.every_steps, self._config.every_minutes
        by_step = every is not None and step % every == 0
        return by_step or (minutes is not None and time.monotonic() - self._last_save >= 60 * minutes)

    def save(self, step: int, state: Any, position: Mapping[str, Any]) -> None:
        """Writes a checkpoint, in the background unless the config says otherwise.

        Args:
            step: names the checkpoint; there is none of this step yet.
            state: its arrays are saved. Their buffers may be donated as soon as this returns.
            position: anything more that is needed to go on, fit for JSON.

        Raises:
            RuntimeError: there is a checkpoint of this step or a later one.
        """
        chosen = select(state, self._saved)
        named = arrays_by_name(chosen)
        arrays = {name: _data(array) for name, array in named.items() if array.size}
        keys = {name: str(jax.random.key_impl(array)) for name, array in named.items() if is_key(array)}
        if self._unsaved is None:
            self._unsaved = digests(_others(state, self._saved))
        run = {
            "position": dict(position),
            "config": self._run_config,
            "layout": layout(chosen),
            "keys": keys,
            "unsaved": self._unsaved,
        }
        items = {_STATE: ocp.args.PyTreeSave(arrays), _RUN: ocp.args.JsonSave(run)}
        if not self._manager.save(step, args=ocp.args.Composite(**items)):
            raise RuntimeError(
                f"No checkpoint of step {step} was written to {self.folder}, where the latest is of step "
                f"{self.latest()}: Orbax refuses one that is not later."
            )
        self._last_save = time.monotonic()

    def restore(self, like: State) -> tuple[State, dict[str, Any]]:
        """The state and the position of the latest checkpoint.

        Args:
            like: a state of the same structure. Its arrays may be `jax.ShapeDtypeStruct`s where they are
                saved, and each is restored with the sharding that stands here, on the default device if there
                is none: the number of devices need not be that of the run that saved.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointMismatchError: arrays differ in name, shape or dtype, or those that are not saved in
                what they hold.
        """
        step = self.latest()
        if step is None:
            raise FileNotFoundError(f"No checkpoint in {self.folder}.")
        where = f"{self.folder / str(step)}"
        _check_unsaved(_read_run(self._manager, step), _others(like, self._saved), where)
        restored, run = _read(self._manager, step, where, select(like, self._saved), "")
        return with_arrays(like, restored), run["position"]

    def wait(self) -> None:
        """Returns when all checkpoints are on disk.

        Raises:
            Exception: whatever went wrong while writing.
        """
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the threads that write."""
        self._manager.close()


def load_checkpoint(folder: Path, like: State, *, step: int | None = None, part: str = "") -> State:
    """Reads a state, or a part of one, from a run's folder of checkpoints.

    Args:
        folder: holds a folder for each checkpoint.
        like: a tree of the same structure; its arrays may be `jax.ShapeDtypeStruct`s.
        step: of the checkpoint; the latest if not given.
        part: path of the part that `like` is of: `trained` for the trained weights alone.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointMismatchError: arrays differ in name, shape or dtype.
    """
    with _reader(folder) as manager:
        step = _existing(manager, folder, step)
        arrays, _ = _read(manager, step, f"{folder / str(step)}", like, f"{part}." if part else "")
        return with_arrays(like, arrays)


def check_unsaved(folder: Path, rest: Any, *, step: int | None = None) -> None:
    """Makes sure that what a run's checkpoints leave out is what the run had.

    Args:
        folder: holds a folder for each checkpoint.
        rest: a state with `None` for all that is saved.
        step: of the checkpoint; the latest if not given.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointMismatchError: it is not; names the arrays.
    """
    with _reader(folder) as manager:
        step = _existing(manager, folder, step)
        _check_unsaved(_read_run(manager, step), rest, f"{folder / str(step)}")


def checkpoint_config(folder: Path, *, step: int | None = None) -> dict[str, Any]:
    """The resolved config of the run that wrote a checkpoint; the latest if no step is given.

    Raises:
        FileNotFoundError: there is no such checkpoint.
    """
    with _reader(folder) as manager:
        return _read_run(manager, _existing(manager, folder, step))["config"]


def _others(state: Any, saved: Callable[[Any], Any] | None) -> Any:
    """The arrays of a state that are not saved."""
    return None if saved is None else eqx.filter(state, saved(state), inverse=True)


def _check_unsaved(run: Mapping[str, Any], rest: Any, where: str) -> None:
    earlier = run.get("unsaved", {})  # those of earlier versions hold none
    found = digests(rest)
    others = [name for name in sorted({*earlier, *found}) if earlier.get(name) != found.get(name)]
    if others:
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise CheckpointMismatchError(
            f"The checkpoint {where} goes with other weights than these, which training leaves as they are: "
            f"{shown}. Give the run the weights that it began with (the same files, or the same revision on "
            f"the Hub), or begin a new run."
        )


def _reader(folder: Path) -> ocp.CheckpointManager:
    if not folder.is_dir():
        raise FileNotFoundError(f"No checkpoint in {folder}: there is no such folder.")
    options = ocp.CheckpointManagerOptions(create=False, save_interval_steps=0, read_only=True)
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # Orbax warns that the folder is only read, which is what is asked for
    try:
        return ocp.CheckpointManager(folder.absolute(), options=options)
    finally:
        log.setLevel(level)


def _existing(manager: ocp.CheckpointManager, folder: Path, step: int | None) -> int:
    steps = sorted(manager.all_steps())
    if not steps or (step is not None and step not in steps):
        there = f" There are those of steps {', '.join(map(str, steps))}." if steps else ""
        raise FileNotFoundError(
            f"No checkpoint{'' if step is None else f' of step {step}'} in {folder}.{there}"
        )
    return steps[-1] if step is None else step


def _read(
    manager: ocp.CheckpointManager, step: int, where: str, like: Any, prefix: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of `like`, from those of the checkpoint whose names begin with `prefix`, and its JSON."""
    run = _read_run(manager, step)
    saved = {name[len(prefix) :]: entry for name, entry in run["layout"].items() if name.startswith(prefix)}
    differing = differences(saved, layout(like))
    if differing:
        lines = "\n  ".join(differing)
        raise CheckpointMismatchError(f"The checkpoint {where} is of another model or optimizer:\n  {lines}")
    wanted = arrays_by_name(like)
    targets = {prefix + name: _target(array) for name, array in wanted.items() if np.prod(array.shape)}
    arguments = ocp.args.PyTreeRestore(
        item=targets,
        restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
        partial_restore=bool(prefix),
    )
    found = manager.restore(step, args=ocp.args.Composite(**{_STATE: arguments}))[_STATE]
    empty = {name: jnp.zeros(a.shape, a.dtype) for name, a in wanted.items() if not np.prod(a.shape)}
    arrays = {name[len(prefix) :]: _typed(array, run["keys"].get(name)) for name, array in found.items()}
    return {**arrays, **empty}, run


def _read_run(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    return manager.restore(step, args=ocp.args.Composite(**{_RUN: ocp.args.JsonRestore()}))[_RUN]


def _kept(config: CheckpointConfig) -> list[PreservationPolicy]:
    policies: list[PreservationPolicy] = [LatestN(config.keep_last)]
    if config.keep_every_steps is not None:
        policies.append(EveryNSteps(config.keep_every_steps))
    if config.keep_every_hours is not None:
        hours = datetime.timedelta(hours=config.keep_every_hours)
        policies.append(EveryNSeconds(max(1, round(hours.total_seconds()))))
    return policies


def _data(array: Any) -> Any:
    return jax.random.key_data(array) if is_key(array) else array


def _typed(data: Any, implementation: str | None) -> Any:
    return data if implementation is None else jax.random.wrap_key_data(data, impl=implementation)


def _target(array: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(array, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = jax.eval_shape(jax.random.key_data, array) if is_key(array) else array
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
