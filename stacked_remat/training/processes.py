"""Several processes of one run: how they start, what they agree on, and how the loss of
one is noticed.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any, NoReturn, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._compat import cluster_size, exchange
from .errors import ConfigError
from .signals import EXIT_INTERRUPTED

T = TypeVar("T")
# What the collectives of CPUs (Gloo) and JAX's coordination service say when a process
# is gone.
_LOST = (
    "gloo",
    "connection closed by peer",
    "coordination service",
    "heartbeat",
    "unavailable:",
)
# Where MPI says how many processes it started: Open MPI, and MPICH with those that are
# made from it. JAX (0.10.2) looks for Open MPI before 5 alone.
_SIZES_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_SECONDS_TO_END = 10
_SECONDS_UNTIL_SIGNALS = 0.2
_HOURS_TO_WAIT = 24  # the first process may have to tokenize the text
_exchanges = itertools.count()


def start_processes(distributed: bool | str | Mapping[str, Any]) -> None:
    """Connects this process to the others of its run, before JAX looks for devices.

    `off` (or False, as YAML reads it) is for this process alone; `auto` for
    `jax.distributed.initialize` where JAX or MPI has started several processes, unless
    they are connected already; a mapping has its arguments; a ConfigError has JAX's
    reason. JAX itself ends a process that can't connect in time, or later finds that
    another one is gone.
    """
    if distributed in (False, "off"):
        return
    try:
        arguments: Any = distributed
        if distributed == "auto":
            count, arguments = _launched()
            if count < 2 or jax.distributed.is_initialized():
                return
            if arguments and importlib.util.find_spec("mpi4py") is None:
                raise ModuleNotFoundError(
                    f"MPI started this process as one of {count}, which find each other"
                    " by mpi4py; pip install mpi4py"
                )
        # JAX's own handler of SIGTERM would take the place of the run's.
        jax.config.update("jax_enable_preemption_service", False)
        _in_thread(lambda: jax.distributed.initialize(**arguments))
    except Exception as error:  # JAX and its detection of clusters raise anything
        raise ConfigError(
            f"distributed: JAX can't connect the processes: {type(error).__name__}:"
            f" {error}. Set distributed: off to train in this process alone."
        ) from error


def _launched() -> tuple[int, dict[str, Any]]:
    """How many processes were started together with this one, itself among them, and
    the arguments with which `jax.distributed.initialize` finds them.
    """
    found_by_jax = 1
    # JAX (0.12) fails where Open MPI 5 started a process that has no mpi4py.
    with contextlib.suppress(RuntimeError):
        found_by_jax = cluster_size() or 1
    if found_by_jax > 1:
        return found_by_jax, {}
    started_by_mpi = max(int(os.environ.get(name, 1)) for name in _SIZES_OF_MPI)
    return started_by_mpi, {"cluster_detection_method": "mpi4py"}


def _in_thread(work: Callable[[], T]) -> T:
    """`work()` in a thread: the main thread handles signals meanwhile."""
    # Python handles signals in the main thread alone, and only between its own
    # instructions: within a call into JAX that waits, SIGTERM would not be noticed.
    ended: Future[T] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except Exception as error:
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    # Not one long wait: a signal that comes just before a wait begins, or to another
    # thread, doesn't interrupt it.
    while not ended.done():
        wait([ended], timeout=_SECONDS_UNTIL_SIGNALS)
    return ended.result()


def of_all(value: T) -> list[T]:
    """The value of each process, in order, the same list in all; for what JSON has.

    Without a collective: those of CPUs wait for 30 seconds only. This waits for a day.
    """
    if jax.process_count() == 1:
        return [value]
    # A name of its own: JAX's store keeps what was written under a name.
    name = f"exchange {next(_exchanges)}"
    seconds = round(3600 * _HOURS_TO_WAIT)
    found = _in_thread(lambda: exchange(name, json.dumps(value), seconds))
    if found is None:
        raise TimeoutError(
            f"the processes of this run did not all arrive within {_HOURS_TO_WAIT}"
            " hours of each other."
        )
    return [json.loads(text) for text in found]


def agreed(work: Callable[[], T], *, takes_part: bool = True) -> T:
    """`work()` in all processes, or in those that take part; where it fails in one, it
    fails in all.
    """
    result: Any = None
    error = None
    try:
        result = work() if takes_part else None
    except Exception as raised:
        error = raised
    # Before anyone raises: a process that ended alone would let the others wait.
    failed = of_all(error is not None)
    if error is not None:
        raise error
    if True in failed:
        raise ConfigError(
            f"process {failed.index(True)} of this run failed; its output says why."
        )
    return result


def in_turn(work: Callable[[], T]) -> T:
    """`agreed`, in the first process and then in all others: for files that the first
    one makes.
    """
    is_first = jax.process_index() == 0
    first, other = (
        agreed(work, takes_part=is_turn) for is_turn in (is_first, not is_first)
    )
    return first if is_first else other


@final
class LargestOfAll:
    """The largest number of all processes, one call later, so that no call waits for
    the others.
    """

    def __init__(self) -> None:
        self._before: jax.Array | None = None

    def __call__(self, number: int) -> int:
        """The largest number of the call before this one, 0 at the first; of one
        process, `number`.
        """
        if jax.process_count() == 1:
            return number
        sharding = NamedSharding(
            Mesh(np.array(jax.devices()), ("all",)), PartitionSpec("all")
        )
        own = np.full(jax.local_device_count(), number, np.int32)
        # The result of the call before is there by now, so reading it doesn't wait.
        before = self._before
        self._before = jax.jit(jnp.max)(
            jax.make_array_from_process_local_data(sharding, own)
        )
        return 0 if before is None else int(before.addressable_data(0))


@contextlib.contextmanager
def ending_with_others() -> Iterator[None]:
    """Ends this process with `EXIT_INTERRUPTED` and a message where JAX says that
    another one is gone.

    At once: whatever waits for the other, such as a checkpoint that is being written or
    JAX's own end, would wait for minutes. Checkpoints that are written are whole. Where
    collectives do not fail but wait (TPUs, NCCL), JAX aborts the process after
    `heartbeat_timeout_seconds`.
    """
    try:
        yield
    except (
        jax.errors.JaxRuntimeError
    ) as error:  # others may have these words too, such as in a path
        text = str(error)
        # JAX has no class of errors for a lost process; only the words differ.
        if jax.process_count() > 1 and any(sign in text.lower() for sign in _LOST):
            reason = text.partition("\n")[0]
            print(
                "error: another process of this run has ended; its output says why."
                " The same command in all of them resumes the run from its last"
                f" checkpoint. ({reason})"
            )
            end_process(EXIT_INTERRUPTED)
        raise


def end_after_error(status: int) -> NoReturn:
    """Ends this process: together with the others if they end too, otherwise after some
    seconds.

    If the process of the coordination service ended before the others, JAX would abort
    these.
    """

    def leave() -> None:
        with contextlib.suppress(Exception):  # the others are gone
            jax.distributed.shutdown()

    # In a thread with a limit: the shutdown is a barrier, at which a process that is
    # gone never arrives.
    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    leaving.join(_SECONDS_TO_END)
    end_process(status)


def end_process(status: int) -> NoReturn:
    """Ends this process without waiting for the others of its run."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Not `sys.exit`: JAX's handlers at exit would wait for the others.
    os._exit(status)
