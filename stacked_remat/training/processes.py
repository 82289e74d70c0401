"""Several processes of one run: how they start, what they agree on, and how the loss of one is noticed."""

import contextlib
import ctypes
import inspect
import itertools
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._compat import cluster_methods, cluster_size, wait_for_processes
from .._messages import did_you_mean
from .config_error import ConfigError
from .signals import EXIT_INTERRUPTED

T = TypeVar("T")
_OFF = "Or set distributed: off to train in this process alone."
# What the collectives of CPUs (Gloo) and JAX's coordination service say when a process is gone.
_LOST = ("gloo", "connection closed by peer", "coordination service", "heartbeat", "unavailable:")
_IDS = "Give all the same num_processes, and each its own process_id."
_SEE_ABOVE = "The lines above say why."
_RESUMES = "The same command in all of them resumes the run from its last checkpoint."
_MORE_SECONDS = 60  # JAX aborts the process where its own time to connect is over
_SECONDS_TO_END = 10
_HOURS_TO_WAIT = 24  # the first process may have to tokenize the text
_waits = itertools.count()


def _is_integer(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_address(value: Any) -> bool:
    found = re.fullmatch(r"\S+:(\d{1,5})", value) if isinstance(value, str) else None
    return found is not None and 0 < int(found[1]) < 2**16


def _is_seconds(value: Any) -> bool:
    return _is_integer(value, 1)


def _are_devices(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, list | tuple) and all(map(_is_integer, value)))


_ADDRESS = ("a host and a port, such as 10.0.0.1:1234", _is_address)
_SECONDS = ("a whole number of seconds above 0, such as 300", _is_seconds)
_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "coordinator_address": _ADDRESS,
    "coordinator_bind_address": _ADDRESS,
    "num_processes": ("an integer above 0", lambda value: _is_integer(value, 1)),
    "process_id": ("an integer: 0 for the first process, 1 for the next", _is_integer),
    "local_device_ids": ("an integer or a list of integers, such as [0, 1]", _are_devices),
    "cluster_detection_method": (
        f"one of {', '.join(cluster_methods())}",
        lambda value: value in cluster_methods(),
    ),
    "initialization_timeout": _SECONDS,
    "heartbeat_timeout_seconds": _SECONDS,
    "shutdown_timeout_seconds": _SECONDS,
}


def check_distributed(distributed: bool | str | Mapping[str, Any]) -> None:
    """Checks `distributed`.

    Raises:
        ValueError: it is neither `auto`, `off` nor arguments of `jax.distributed.initialize`, or an argument
            has a value that JAX can't use.
    """
    valid = inspect.signature(jax.distributed.initialize).parameters
    if not isinstance(distributed, Mapping):
        if distributed not in (False, "off", "auto"):
            raise ValueError(
                f"distributed is auto, off, or a section with the arguments of "
                f"jax.distributed.initialize ({', '.join(valid)}); got {distributed!r}."
            )
        return
    for key, value in distributed.items():
        if key not in valid:
            raise ValueError(
                f"distributed.{key}: jax.distributed.initialize has no such argument."
                f"{did_you_mean(key, valid)} Valid: {', '.join(valid)}."
            )
        expected, is_valid = _VALUES.get(key, ("", lambda _: True))
        if not is_valid(value) and not (value is None and valid[key].default is None):
            raise ValueError(f"distributed.{key} is {expected}; got {value!r}.")


def start_processes(distributed: bool | str | Mapping[str, Any]) -> None:
    """Connects this process to the others of its run, before JAX looks for devices.

    Args:
        distributed: `off` (or False, as YAML reads it) for this process alone; `auto` for
            `jax.distributed.initialize()` where JAX finds a cluster of several processes (Slurm, Open MPI,
            Kubernetes, Cloud TPU); or the arguments of `jax.distributed.initialize`.

    From then on, where JAX aborts this process because another one is gone, it ends with `EXIT_INTERRUPTED`
    and a message.

    Raises:
        ConfigError: JAX can't connect, with its reason; or the processes did not connect within
            `initialization_timeout`. This process must then end: JAX goes on in a thread.
    """
    if distributed in (False, "off"):
        return
    if isinstance(distributed, Mapping):
        _check_port(distributed)
    try:
        if distributed == "auto":
            if (cluster_size() or 1) < 2:
                return
            distributed = {}
        assert isinstance(distributed, Mapping)
        connected = _connect(distributed)
    except Exception as error:  # JAX and its detection of clusters raise anything
        method = distributed.get("cluster_detection_method") if isinstance(distributed, Mapping) else None
        place = "distributed" if method is None else f"distributed.cluster_detection_method = {method}"
        raise ConfigError(f"{place}: JAX can't connect the processes: {_reason(error)}. {_OFF}") from error
    if not connected:
        raise ConfigError(
            f"distributed: the processes did not connect within initialization_timeout = "
            f"{_seconds_to_connect(distributed)} seconds. Start all of them, with the address of process 0 "
            f"as coordinator_address ({distributed.get('coordinator_address') or 'not set: JAX finds it'}), "
            f"or give a longer distributed.initialization_timeout. {_OFF}"
        )
    _when_aborted(EXIT_INTERRUPTED, f"error: JAX lost another process of this run. {_SEE_ABOVE} {_RESUMES}")


def _reason(error: Exception) -> str:
    """Why JAX can't connect, and the fix where a cluster's variables are missing."""
    missing = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(missing, str) or not missing.isupper():
        return str(error).strip().rstrip(".") or type(error).__name__
    return (
        f"the environment variable {missing} is not set. Start this process with the cluster's launcher "
        f"(srun for slurm, mpirun for ompi), or give coordinator_address, num_processes and process_id in "
        f"place of cluster_detection_method"
    )


def _check_port(arguments: Mapping[str, Any]) -> None:
    """Whether the first process can wait for the others at its address: JAX crashes where it can't."""
    bound = arguments.get("coordinator_bind_address")
    address = bound or arguments.get("coordinator_address")
    if arguments.get("process_id") != 0 or address is None:
        return
    host, _, port = address.rpartition(":")
    host = host.strip("[]") if bound else ""  # JAX then takes every address of this host
    is_dual = not host and socket.has_dualstack_ipv6()
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM) if host else ()
        family = found[0][0] if found else socket.AF_INET6 if is_dual else socket.AF_INET
        socket.create_server((host, int(port)), family=family, dualstack_ipv6=is_dual).close()
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"distributed.{'coordinator_bind_address' if bound else 'coordinator_address'}: process 0 can't "
            f"wait for the others at {address} ({error}). End the process that has the port, or name another "
            f"address of this host in all processes."
        ) from error


def _seconds_to_connect(arguments: Mapping[str, Any]) -> int:
    given = inspect.signature(jax.distributed.initialize).parameters["initialization_timeout"]
    return arguments.get("initialization_timeout", given.default)


def _connect(arguments: Mapping[str, Any]) -> bool:
    """Connects this process to the others; whether that was done in time.

    JAX gets more time than this function waits, because it aborts the process when its time is over.
    """
    # JAX's own handler of SIGTERM would take the place of the run's.
    jax.config.update("jax_enable_preemption_service", False)
    _when_aborted(1, f"error: distributed: JAX can't connect the processes. {_SEE_ABOVE} {_IDS} {_OFF}")
    seconds = _seconds_to_connect(arguments)
    arguments = {**arguments, "initialization_timeout": seconds + _MORE_SECONDS}
    ended = _in_thread(lambda: jax.distributed.initialize(**arguments), seconds)
    return ended.done() and ended.result() is None


def _in_thread(work: Callable[[], T], seconds: float | None = None) -> "Future[T]":
    """`work()` in a thread, after it has ended or so many seconds: the main thread handles signals."""
    ended: Future[T] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except Exception as error:
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    wait([ended], seconds)
    return ended


def processes_where(condition: bool) -> list[int]:
    """The indices of the processes in which the condition is true, the same list in all."""
    return np.flatnonzero(_gathered(condition)).tolist()


def _wait_for_others() -> None:
    """Waits until all processes are here: in a first collective, those of CPUs wait for 30 seconds only."""
    name, seconds = f"agreed {next(_waits)}", round(3600 * _HOURS_TO_WAIT)
    if jax.process_count() > 1 and not _in_thread(lambda: wait_for_processes(name, seconds)).result():
        raise TimeoutError(
            f"the processes of this run did not all arrive within {_HOURS_TO_WAIT} hours of each "
            f"other. Their output says how far they are; end those that go on."
        )


def agreed(work: Callable[[], T]) -> T:
    """`work()` in all processes, without collectives in it; where it fails in one, it fails in all.

    Raises:
        ConfigError: it failed in another process. In those where it failed, their own error.
        TimeoutError: a process takes a day longer than another one.
    """
    return _agreed(work, True)


def in_turn(work: Callable[[], T]) -> T:
    """`work()` in the first process, then in all others: for files that the first one makes.

    Raises:
        ConfigError: it failed in another process. In those where it failed, their own error.
        TimeoutError: a process takes a day longer than another one.
    """
    is_first = jax.process_index() == 0
    first, other = (_agreed(work, is_turn) for is_turn in (is_first, not is_first))
    return first if is_first else other


def _agreed(work: Callable[[], Any], takes_part: bool) -> Any:
    result = error = None
    if takes_part:
        try:
            result = work()
        except Exception as raised:
            error = raised
    _wait_for_others()
    failed = processes_where(error is not None)
    if error is not None:
        raise error
    if failed:
        raise ConfigError(f"process {failed[0]} of this run failed; its output says why.")
    return result


def of_first(number: int) -> int:
    """The number that the first process has; below 2**32."""
    return int(_gathered(np.uint32(number))[0])


def of_all(text: str) -> list[str]:
    """The text of each process, in order, the same list in all; without null characters."""
    _wait_for_others()
    encoded = text.encode()
    longest = int(_gathered(len(encoded)).max())
    rows = _gathered(np.frombuffer(encoded.ljust(longest, b"\0"), np.uint8))
    return [row.tobytes().rstrip(b"\0").decode() for row in rows]


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
    except jax.errors.JaxRuntimeError as error:  # others may have these words too, such as in a path
        text = str(error)
        if jax.process_count() > 1 and any(sign in text.lower() for sign in _LOST):
            reason = text.partition("\n")[0]
            print(f"error: another process of this run has ended; its output says why. {_RESUMES} ({reason})")
            end_process(EXIT_INTERRUPTED)
        raise


def end_after_error(status: int) -> NoReturn:
    """Ends this process: together with the others if they end too, otherwise after some seconds.

    If the process of the coordination service ended before the others, JAX would abort these.
    """
    _when_aborted(status)

    def leave() -> None:
        with contextlib.suppress(Exception):  # the others are gone
            jax.distributed.shutdown()

    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    leaving.join(_SECONDS_TO_END)
    end_process(status)


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


_handlers: list[Any] = []  # which C calls, so they must live as long as the process


def _when_aborted(status: int, message: str | None = None) -> None:
    """From now on, ends this process with a status and a message where JAX aborts it.

    JAX's coordination service aborts from a thread when it can't connect in time, and when it finds that the
    coordinator or another process is gone, which may be before a collective fails. JAX takes no Python
    function for that (jaxlib 0.10 to 0.12 can't convert its argument), and a handler made with Python's
    `signal` would run after the abort.
    """

    @_AbortHandler
    def end(_: int) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            if message is not None:
                print(message)
            end_process(status)

    _handlers.append(end)
    _LIBC.signal(signal.SIGABRT, end)


def _gathered(value: Any) -> np.ndarray:
    """The values of all processes, along the first axis."""
    if jax.process_count() == 1:
        return np.asarray([value])
    found = multihost_utils.process_allgather(np.asarray(value))
    return found.reshape(jax.process_count(), *np.shape(value))
