"""Traces and compiles a program for a target, without running it."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import use_abstract_mesh

from .._compat import compiled_with_text, made_on_host
from .._files import read_json_fields, replaced_whole
from .._placement import compiled_for
from .._static import PyTree
from . import _compiled_text, _report
from ._arguments import donated_of, is_made, is_shape, mesh_of, placed, shapes_of
from ._compiled_text import Buffer, largest_buffers, sent_bytes
from ._flops import Flops, count_flops
from ._report import HostBytes, MemoryReport, TimeBound
from ._targets import Target, find_target, target_of_device

_COMPILERS = ("jax", "libtpu")
_KINDS = {"arguments": "argument", "outputs": "output", "temporaries": "temp", "aliased": "alias"}


class DoesNotFit(RuntimeError):
    """The compiler refused the program because device memory is too small (XLA:TPU does)."""


@dataclasses.dataclass(frozen=True)
class TracedCall:
    target: Target
    devices: int
    traced: Any
    flops: Flops

    def report(self, cache: str | Path | None = None) -> MemoryReport:
        """Compile it, or read what an earlier compilation found in `cache`."""
        target, devices = self.target, self.devices
        with warnings.catch_warnings():
            # Donation that was not used shows in the report.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            with compiled_for(target.devices()[0]):  # primitives that expand into others do so now
                lowered = self.traced.lower()
            found = _sizes_of(lowered, target, devices, cache)
        known = target if target.flops else target_of_device(target.devices()[0])
        least_time = None if known is None else TimeBound.of(self.flops, known, devices)
        return MemoryReport(
            target=target.name,
            flops=self.flops,
            devices=devices,
            capacity=(known or target).memory,
            least_time=least_time,
            **found,
        )


def report(
    fn: Callable[..., Any],
    *args: PyTree,
    target: str | Target = "local",
    donate: str | Sequence[str] = (),
    cache: str | Path | None = None,
    **kwargs: PyTree,
) -> MemoryReport:
    """Compile `fn(*args, **kwargs)` for `target` and report what a call needs. Nothing is executed.

    Args:
        fn: a function or an Equinox module, not in `jax.jit` or `eqx.filter_jit`.
        *args: arguments as `eqx.filter_jit` takes them: arrays and `jax.ShapeDtypeStruct`s are traced,
            anything else is static. Shardings on a mesh, also on a `jax.sharding.AbstractMesh`, are moved to
            as many of the target's devices.
        target: a name in `TARGETS` or a `Target`.
        donate: names of the arguments whose buffers may be reused for results, or `"all"` (with the
            arrays in `fn`).
        cache: folder for what compilations find, which the same program, target and versions then need not
            repeat; `compile_seconds` is of the first.
        **kwargs: keyword arguments of `fn`; those with names of the above go by position.

    If the arguments lie on a mesh, `fn` is traced with it in use (`jax.sharding.use_abstract_mesh`). Those
    in host memory, by their sharding's memory kind, are there for `fn` too. Without a GPU, XLA takes none for
    one: there the program makes them first, so they count as temporaries of the host, or as outputs where
    they are updated in place. Making them is not among the transfers.

    Returns:
        The report. Library workspaces and autotuning may differ on the device itself.

    Raises:
        ValueError: an unknown target; a name in `donate` that `fn` does not take.
        TypeError: `fn` is no function, or jitted.
        TargetError: the target's compiler plugin is not installed, has too few devices, or cannot
            size arguments on the host for several devices.
        DoesNotFit: the compiler refused the program because device memory is too small.

    Cost: tracing and one full compilation; no memory for arguments or results.
    """
    return trace_call(fn, args, kwargs, target, donate).report(cache)


def trace_call(
    fn: Callable[..., Any],
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    target: str | Target,
    donate: str | Sequence[str],
) -> TracedCall:
    """Trace `fn(*args, **kwargs)` as `report` compiles it."""
    if not callable(fn):
        raise TypeError(f"report takes a function and then its arguments; got {type(fn).__name__}.")
    if hasattr(fn, "lower") and hasattr(fn, "__wrapped__"):
        raise TypeError(
            "report compiles the function that it is given; got one in a jit. Give it the function itself, "
            "and say what is donated: report(fn, *args, donate=...)."
        )
    target, given = find_target(target), shapes_of((fn, args, kwargs))
    mesh = mesh_of(target, given)
    arrays, static = eqx.partition(placed(target, mesh, given), is_shape)
    to_make, arrays = eqx.partition(arrays, jax.tree.map(functools.partial(is_made, target), given))
    donated, kept = eqx.partition(arrays, donated_of(fn, args, kwargs, donate))
    shapes, structure = jax.tree.flatten(to_make)

    def run(donated: PyTree, kept: PyTree) -> PyTree:
        # XLA would make one array of those that are equal, and one product of those with both.
        filled = jax.tree.unflatten(structure, map(_full_on_host, shapes, range(len(shapes))))
        fn, args, kwargs = eqx.combine(donated, kept, filled, static)
        return eqx.filter(fn(*args, **kwargs), eqx.is_array)

    in_use = use_abstract_mesh(mesh.abstract_mesh) if mesh.axis_names else contextlib.nullcontext()
    with compiled_for(target.devices()[0]):
        with in_use:
            traced = jax.jit(run, donate_argnums=0).trace(donated, kept)
        flops = count_flops(traced.jaxpr)
    of_made = sum(shape.size * shape.dtype.itemsize for shape in shapes)  # in the place of arguments
    return TracedCall(target, mesh.size, traced, flops + Flops(bytes_to_host=-of_made))


def _sizes_of(lowered: Any, target: Target, devices: int, folder: str | Path | None) -> dict[str, Any]:
    """What the compilation of a `jax.stages.Lowered` tells of a report, or an earlier one, kept in `folder`.

    A folder that can't be written to, and a file that can't be read, are as none.
    """
    if folder is None:
        return _compiled(lowered, target, devices)
    path = Path(folder) / f"{_key(lowered, target, devices)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = read_json_fields(path)
        largest = tuple(Buffer(*each) for each in found["largest"])
        return found | {"host": HostBytes(**found["host"]), "largest": largest}
    found = _compiled(lowered, target, devices)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_whole(path, shared=True) as unfinished:
            unfinished.write_text(json.dumps(found, default=vars), encoding="utf-8")
    return found


def _compiled(lowered: Any, target: Target, devices: int) -> dict[str, Any]:
    start = time.perf_counter()
    compiled, text = compiled_with_text(lowered, target.devices()[0].platform)
    if isinstance(compiled, jax.errors.JaxRuntimeError):
        listed = "".join(f"\n  {each}" for each in largest_buffers(text))
        largest = f"\nThe largest buffers beside the arguments:{listed}" if listed else ""
        raise DoesNotFit(f"compiling for {target.name!r}: {compiled}{largest}") from compiled
    seconds, stats = time.perf_counter() - start, compiled.memory_analysis()
    device, host = (
        {name: getattr(stats, f"{where}{kind}_size_in_bytes") for name, kind in _KINDS.items()}
        for where in ("", "host_")
    )
    sent = sent_bytes(text, devices) if devices > 1 else 0
    found = {"host": HostBytes(**host), "sent": sent, "largest": largest_buffers(text)}
    return device | found | {"compile_seconds": seconds}


def _key(lowered: Any, target: Target, devices: int) -> str:
    """A name for everything that decides what the compiler does."""
    device = target.devices()[0]
    compiler = getattr(getattr(device, "client", None), "platform_version", "")
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    versions = sorted(f"{each.name} {each.version}" for each in importlib.metadata.distributions())
    parts = [repr(target), str(devices), compiler, device.device_kind, *flags]
    parts += [each for each in versions if each.startswith(_COMPILERS)]
    parts += [inspect.getsource(module) for module in (_compiled_text, _report)]
    return hashlib.sha256("\0".join([*parts, lowered.as_text()]).encode()).hexdigest()


def _full_on_host(like: PyTree, value: int) -> jax.Array:
    return made_on_host(jax.typeof(like), lambda type_: jnp.full(type_.shape, value, type_.dtype))
