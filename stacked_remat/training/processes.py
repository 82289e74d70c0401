"""Several processes of one run: how they start, what they agree on, and how the loss of one is noticed."""

import contextlib
import ctypes
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._compat import cluster_size
from .._messages import did_you_mean
from .config_error import ConfigError
from .signals import EXIT_INTERRUPTED

T = TypeVar("T")
_OFF = "Or set distributed: off to train in this process alone."
# What the collectives of CPUs (Gloo) and JAX's coordination service say when a process is gone.
_FAILED = "another process of this run has failed:"
_LOST = (_FAILED, "gloo", "connection closed by peer", "coordination service", "heartbeat", "unavailable:")
_RESUMES = "The same command in all of them resumes the run from its last checkpoint."


def check_distributed(distributed: bool | str | Mapping[str, Any]) -> None:
    """Checks `distributed`.

    Raises:
        ValueError: it is neither `auto`, `off` nor arguments of `jax.distributed.initialize`.
    """
    valid = list(inspect.signature(jax.distributed.initialize).parameters)
    if not isinstance(distributed, Mapping):
        if distributed not in (False, "off", "auto"):
            raise ValueError(
                f"distributed is auto, off, or a section with the arguments of "
                f"jax.distributed.initialize ({', '.join(valid)}); got {distributed!r}."
            )
        return
    for key in distributed:
        if key not in valid:
            raise ValueError(
                f"distributed.{key}: jax.distributed.initialize has no such argument."
                f"{did_you_mean(key, valid)} Valid: {', '.join(valid)}."
            )


def start_processes(distributed: bool | str | Mapping[str, Any]) -> None:
    """Connects this process to the others of its run, before JAX looks for devices.

    Args:
        distributed: `off` (or False, as YAML reads it) for this process alone; `auto` for
            `jax.distributed.initialize()` where JAX finds a cluster of several processes (Slurm, Open MPI,
            Kubernetes, Cloud TPU); or the arguments of `jax.distributed.initialize`.

    Raises:
        ConfigError: JAX can't connect; with its reason.
    """
    if distributed in (False, "off"):
        return
    try:
        if distributed == "auto":
            if (cluster_size() or 1) < 2:
                return
            distributed = {}
        assert isinstance(distributed, Mapping)
        # JAX's own handler of SIGTERM would take the place of the run's.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(**distributed)
        _LIBC.signal(signal.SIGABRT, _aborted)
    except Exception as error:  # JAX and its detection of clusters raise anything
        raise ConfigError(f"distributed: JAX can't connect the processes: {error} {_OFF}") from error


def in_turn(work: Callable[[], T]) -> T:
    """`work()` in the first process, then in all others: for files that the first one makes.

    Where it fails in another process, this one ends as in `ending_with_others`.
    """
    result: Any = None
    for is_turn in (jax.process_index() == 0, jax.process_index() != 0):
        error = None
        if is_turn:
            try:
                result = work()
            except Exception as raised:
                error = raised
        failed = np.flatnonzero(_gathered(error is not None))
        if error is not None:
            raise error
        if failed.size:
            raise RuntimeError(f"{_FAILED} {failed[0]}")
    return result


def of_first(number: int) -> int:
    """The number that the first process has; below 2**32."""
    return int(_gathered(np.uint32(number))[0])


def any_signal(name: str | None) -> str | None:
    """The signal that some process has received, the same in all; None if none has."""
    number = int(_gathered(0 if name is None else int(signal.Signals[name])).max())
    return signal.Signals(number).name if number else None


def whole(arrays: Any) -> Any:
    """A tree of arrays with those of all processes' devices on the host of each; all processes call it."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, arrays)
    return multihost_utils.process_allgather(arrays, tiled=True)


@contextlib.contextmanager
def ending_with_others() -> Iterator[None]:
    """Ends this process with `EXIT_INTERRUPTED` and a message where JAX says that another one is gone.

    At once: whatever waits for the other, such as a checkpoint that is being written or JAX's own end, would
    wait for minutes. Checkpoints that are written are whole. Where collectives do not fail but wait (TPUs,
    NCCL), JAX aborts the process after `heartbeat_timeout_seconds`; `start_processes` gives that end the same
    status.
    """
    try:
        yield
    except Exception as error:
        text = str(error).lower()
        if jax.process_count() > 1 and any(sign in text for sign in _LOST):
            print(f"error: another process of this run has ended; its output says why. {_RESUMES}")
            end_process(EXIT_INTERRUPTED)
        raise


def end_process(status: int) -> NoReturn:
    """Ends this process without waiting for the others of its run."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


_AbortHandler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_LIBC = ctypes.CDLL(None)
_LIBC.signal.argtypes = [ctypes.c_int, _AbortHandler]
_LIBC.signal.restype = ctypes.c_void_p


@_AbortHandler
def _aborted(_: int) -> None:
    """Ends this process where JAX's coordination service aborts it, with `EXIT_INTERRUPTED`.

    The service aborts from a thread of its own when it finds that the coordinator or another process is gone,
    which may be before a collective fails. JAX takes no Python function for that (jaxlib 0.10 to 0.12 can't
    convert its argument), and a handler made with Python's `signal` would run after the abort.
    """
    if threading.get_ident() != threading.main_thread().ident:
        print(f"error: JAX lost another process of this run; the lines above say why. {_RESUMES}")
        end_process(EXIT_INTERRUPTED)


def _gathered(value: Any) -> np.ndarray:
    """The values of all processes."""
    if jax.process_count() == 1:
        return np.asarray([value])
    return multihost_utils.process_allgather(np.asarray(value)).reshape(-1)
