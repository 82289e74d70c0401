"""Traces and compiles a program for a target, without running it.

`report` is the public function; `plan` and `compare` (`_plan.py`) call `trace_call` and
then `TracedCall.report` themselves, since they often need FLOPs alone.

`trace_call` puts shapes on the target's devices in place of the arguments (`_placed`),
on one device or on a mesh like theirs (`_mesh_of`), and traces the function on them;
`_flops.py` counts what was traced. `TracedCall.report` compiles that. XLA's compiler
gives the bytes of arguments, results and temporaries, and `_compiled_text.py` reads the
rest off the compiled program's text. Compilations can be remembered in a folder.

Two properties of XLA shape this file. Compiled without the device, XLA:GPU counts
arguments on the host as arguments on the device, so there the traced program makes them
itself (`trace_call`). And XLA:TPU refuses a program that does not fit, where others
report its size: that is a `DoesNotFit`.
"""

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
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, use_abstract_mesh

from .._activity import bytes_of
from .._compat import compiled_with_text, made_on_host
from .._files import read_json_fields, replaced_whole
from .._memory_spaces import compiled_for
from .._static import PyTree
from . import _compiled_text
from ._compiled_text import Buffer, largest_buffers, sent_bytes
from ._flops import Flops, count_flops
from ._report import HostBytes, MemoryReport, TimeBound
from ._targets import Target, TargetError, find_target, target_of_device

# A call to size: the function, its arguments, and its keyword arguments.
Call: TypeAlias = tuple[Callable[..., Any], Sequence[PyTree], dict[str, PyTree]]


class DoesNotFit(RuntimeError):
    """The compiler refused the program because device memory is too small (XLA:TPU
    does).
    """


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """A call of a function, traced for a target."""

    target: Target
    # How many of the target's devices it runs on.
    devices: int
    # What `jax.jit(...).trace(...)` returns.
    traced: Any
    # FLOPs and transfers of the call, summed over devices.
    flops: Flops

    def report(self, cache: str | Path | None = None) -> MemoryReport:
        """Compile it, or read what an earlier compilation found in `cache`.

        A folder that can't be written to, or a file that can't be read, is ignored.
        """
        with warnings.catch_warnings():
            # Donation that was not used shows in the report.
            warnings.filterwarnings(
                "ignore", message="Some donated buffers were not usable"
            )
            # Primitives that expand into others do so when they are lowered, and may
            # choose by device.
            with compiled_for(self.target.devices()[0]):
                lowered = self.traced.lower()
            if cache is None:
                return self._report(self._compiled(lowered))
            path = Path(cache) / f"{self._key(lowered)}.json"
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                return self._report(read_json_fields(path))
            fields = self._compiled(lowered)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not at all: other processes may read the folder.
            with replaced_whole(path, shared=True) as unfinished:
                unfinished.write_text(json.dumps(fields), encoding="utf-8")
        return self._report(fields)

    def _compiled(self, lowered: Any) -> dict[str, Any]:
        """Compile a `jax.stages.Lowered`, and return the fields of a `MemoryReport`
        that the compiler knows, as JSON has them.

        Raises:
            DoesNotFit: with the largest buffers.
        """
        start = time.perf_counter()
        platform = self.target.devices()[0].platform
        compiled, text = compiled_with_text(lowered, platform)
        seconds = time.perf_counter() - start
        largest = largest_buffers(text)
        if isinstance(compiled, jax.errors.JaxRuntimeError):
            message = f"compiling for {self.target.name!r}: {compiled}"
            if largest:
                listed = "".join(map("\n  {}".format, largest))
                message += f"\nThe largest buffers beside the arguments:{listed}"
            raise DoesNotFit(message) from compiled
        stats = compiled.memory_analysis()
        return _bytes(stats, "") | {
            "host": _bytes(stats, "host_"),
            "sent": sent_bytes(text, self.devices) if self.devices > 1 else 0,
            "largest": largest,
            "compile_seconds": seconds,
        }

    def _report(self, fields: dict[str, Any]) -> MemoryReport:
        """A report with the fields that `_compiled` found, maybe long ago."""
        target = self.target
        if not target.flops:
            # "local" has no figures of its own; the device that it stands for may.
            target = target_of_device(target.devices()[0]) or target
        fields = fields | {
            "host": HostBytes(**fields["host"]),
            "largest": tuple(Buffer(*buffer) for buffer in fields["largest"]),
        }
        return MemoryReport(
            target=self.target.name,
            flops=self.flops,
            devices=self.devices,
            capacity=target.memory,
            least_time=TimeBound.of(self.flops, target, self.devices),
            **fields,
        )

    def _key(self, lowered: Any) -> str:
        """A hash of everything that decides what a report says: the program, the
        target, versions and flags, and the code that reads the compiled text.
        """
        device = self.target.devices()[0]
        parts = (
            self.target,
            self.devices,
            getattr(getattr(device, "client", None), "platform_version", ""),
            device.device_kind,
            os.environ.get("XLA_FLAGS"),
            os.environ.get("LIBTPU_INIT_ARGS"),
            _versions(),
            inspect.getsource(_compiled_text),
            # Without lines of source: after an edit that moves lines alone, what is
            # read from the folder still names the old ones.
            lowered.as_text(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache  # it reads the metadata of every package that is installed
def _versions() -> list[str]:
    """The versions of what compiles."""
    return sorted(
        f"{package.name} {package.version}"
        for package in importlib.metadata.distributions()
        if package.name.startswith(("jax", "libtpu"))
    )


def report(
    fn: Callable[..., Any],
    *args: PyTree,
    target: str | Target = "local",
    donate: str | Sequence[str] = (),
    cache: str | Path | None = None,
    **kwargs: PyTree,
) -> MemoryReport:
    """Compile `fn(*args, **kwargs)` for `target` and report what a call needs. Nothing
    is executed.

    Args:
        fn: a function or an Equinox module, not in `jax.jit` or `eqx.filter_jit`.
        *args: arguments as `eqx.filter_jit` takes them: arrays and
            `jax.ShapeDtypeStruct`s are traced, anything else is static. Shardings on a
            mesh, also on a `jax.sharding.AbstractMesh`, are moved to as many of the
            target's devices.
        target: a name in `TARGETS` or a `Target`.
        donate: names of the arguments whose buffers may be reused for results, or
            `"all"` (with the arrays in `fn`).
        cache: folder for what compilations find, which the same program, target and
            versions then need not repeat; `compile_seconds` is of the first.
        **kwargs: keyword arguments of `fn`.

    If the arguments lie on a mesh, `fn` is traced with it in use
    (`jax.sharding.use_abstract_mesh`). Those in host memory, by their sharding's memory
    kind, are there for `fn` too. Where no GPU is attached, XLA takes no arguments in
    host memory for one: the program makes them first, so they count as temporaries of
    the host, or as outputs where they are updated in place. Making them is not among
    the transfers.

    Returns:
        The report. Library workspaces and autotuning may differ on the device itself.

    Raises:
        ValueError: an unknown target; a name in `donate` that `fn` does not take.
        TypeError: `fn` is no function, or jitted.
        TargetError: the target's compiler plugin is not installed, has too few devices,
            or cannot size arguments on the host for several devices.
        DoesNotFit: the compiler refused the program because device memory is too small.

    Cost: tracing and one full compilation; no memory for arguments or results.
    """
    return trace_call((fn, args, kwargs), target, donate).report(cache)


def trace_call(
    call: Call, target: str | Target, donate: str | Sequence[str]
) -> TracedCall:
    """Trace a call as `report` compiles it.

    The traced function takes the donated arrays and the others, each as a tree like the
    whole call with None elsewhere. It makes arguments on the host itself, where the
    target can't size them.
    """
    fn, _, _ = call
    if not callable(fn):
        raise TypeError(
            f"report takes a function and then its arguments; got {type(fn).__name__}."
            " plan and compare take what makes it of a policy: lambda remat: lambda"
            " blocks, x: train_step(blocks, x, remat=remat)."
        )
    # As `jax.jit` and `eqx.filter_jit` return. Their own donation would be lost.
    if hasattr(fn, "lower") and hasattr(fn, "__wrapped__"):
        raise TypeError(
            "report compiles the function that it is given; got one in a jit. Give it"
            " the function itself (fn.__wrapped__), and say what is donated: report(fn,"
            " *args, donate=...)."
        )
    target = find_target(target)
    mesh = _mesh_of(target, call)

    def is_shape(leaf: Any) -> bool:
        return isinstance(leaf, jax.ShapeDtypeStruct)

    def is_made(leaf: Any) -> bool:
        return not target.sizes_host_arguments and _host_memory(leaf) is not None

    shapes, static = eqx.partition(_placed(target, mesh, call), is_shape)
    # Asked of the arguments as given, since devices that are not attached may know no
    # host memory.
    to_make, shapes = eqx.partition(shapes, jax.tree.map(is_made, call))
    donated, kept = eqx.partition(shapes, _donated_of(call, donate))
    host_shapes, structure = jax.tree.flatten(to_make)

    def run(donated: PyTree, kept: PyTree) -> PyTree:
        made = jax.tree.unflatten(structure, _made(host_shapes))
        fn, args, kwargs = eqx.combine(donated, kept, made, static)
        # What is returned beside arrays is static, and no result of the program.
        return eqx.filter(fn(*args, **kwargs), eqx.is_array)

    in_use: Any = contextlib.nullcontext()
    if mesh.axis_names:
        in_use = use_abstract_mesh(mesh.abstract_mesh)
    with compiled_for(target.devices()[0]):
        with in_use:
            traced = jax.jit(run, donate_argnums=0).trace(donated, kept)
        flops = count_flops(traced.jaxpr)
    # Making arguments moves them to the host, which the user's program does not.
    moved = flops.bytes_to_host - sum(map(bytes_of, host_shapes))
    flops = dataclasses.replace(flops, bytes_to_host=moved)
    return TracedCall(target, mesh.size, traced, flops)


def _made(shapes: Sequence[Any]) -> list[Any]:
    """Arrays of these shapes in host memory.

    Each is full of another number: XLA would make one array of two that are equal, and
    one product of two products with them.
    """
    arrays = []
    for number, shape in enumerate(shapes):

        def full(type_: Any, number: int = number) -> Any:
            return jnp.full(type_.shape, number, type_.dtype)

        arrays.append(made_on_host(jax.typeof(shape), full))
    return arrays


def _mesh_of(target: Target, call: Call) -> Mesh:
    """The mesh that a call's arguments lie on, made of the target's devices.

    Without axes for one device: a `NamedSharding` is the only kind from which JAX takes
    the memory of a shape, and it needs a mesh.
    """
    # By shape: a mesh and the abstract mesh of the same axes are one.
    meshes = {}
    for leaf in jax.tree.leaves(call):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            meshes[tuple(sharding.mesh.shape.items())] = sharding.mesh
        elif isinstance(sharding, Sharding) and sharding.num_devices > 1:
            raise ValueError(
                f"arguments on several devices must have NamedShardings, got {sharding}"
            )
    if len(meshes) > 1:
        raise ValueError(
            f"arguments lie on different meshes: {sorted(meshes)}; put all of them on"
            " one mesh"
        )
    # The same axes over the target's devices. An abstract mesh has no devices at all.
    for mesh in meshes.values():
        devices = target.devices(mesh.size)
        has_devices = isinstance(mesh, Mesh)
        if has_devices and {*mesh.devices.flat} == {*devices}:
            return mesh
        grid = np.asarray(devices, dtype=object)
        grid = grid.reshape([*mesh.shape.values()])
        return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
    return Mesh(np.asarray(target.devices()[0], dtype=object), ())


def _placed(target: Target, mesh: Mesh, call: Call) -> PyTree:
    """A call with shapes on the mesh in place of arrays, divided as these are."""

    def shape(path: Any, leaf: Any) -> Any:
        if not (eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)):
            return leaf
        kind = _host_memory(leaf)
        if kind is not None and mesh.size > 1 and not target.sizes_host_arguments:
            raise TargetError(
                f"target {target.name!r} cannot size {jtu.keystr(path)}, which is on"
                " the host, for several devices: without them XLA:GPU counts it in"
                " device memory. Size one device, use a TPU target, or compile on the"
                " GPUs themselves with target='local'."
            )
        spec = PartitionSpec()
        sharding = getattr(leaf, "sharding", None)
        if mesh.size > 1 and isinstance(sharding, NamedSharding):
            spec = sharding.spec
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=NamedSharding(mesh, spec, memory_kind=kind),
            # A Python scalar's type gives way to others, which makes another program.
            weak_type=bool(getattr(leaf, "weak_type", False)),
        )

    return jtu.tree_map_with_path(shape, call)


def _host_memory(leaf: Any) -> str | None:
    """The kind of host memory that an argument is in; None for device memory."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return kind if kind is not None and "host" in kind else None


def _donated_of(call: Call, donate: str | Sequence[str]) -> PyTree:
    """What of a call is donated, as a prefix tree of booleans.

    Raises:
        ValueError: a name is no argument.
    """
    if donate == "all" or not donate:
        return bool(donate)
    fn, args, kwargs = call
    names = {donate} if isinstance(donate, str) else {*donate}
    # Arguments beyond the last parameter are the last one's: it is `*args`.
    parameters = [*inspect.signature(fn).parameters]
    by_position = parameters + parameters[-1:] * len(args)
    by_position = by_position[: len(args)]
    arguments = {*by_position, *kwargs}
    if missing := sorted(names - arguments):
        raise ValueError(
            f"donate={missing[0]!r} is not an argument of this call: expected 'all' or"
            f" some of {sorted(arguments)}"
        )
    return (
        False,
        tuple(name in names for name in by_position),
        {name: name in names for name in kwargs},
    )


def _bytes(stats: Any, where: str) -> dict[str, int]:
    """XLA's figures of one memory, "" for the device's, by our names."""
    return {
        "arguments": getattr(stats, f"{where}argument_size_in_bytes"),
        "outputs": getattr(stats, f"{where}output_size_in_bytes"),
        "temporaries": getattr(stats, f"{where}temp_size_in_bytes"),
        "aliased": getattr(stats, f"{where}alias_size_in_bytes"),
    }
