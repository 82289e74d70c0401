"""Traces and compiles a program for a target, without running it."""

import contextlib
import dataclasses
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

from .._compat import compiled_with_text, made_on_host
from .._files import read_json_fields, replaced_whole
from .._placement import compiled_for
from .._static import PyTree
from . import _compiled_text
from ._compiled_text import Buffer, largest_buffers, sent_bytes
from ._flops import Flops, count_flops
from ._report import HostBytes, MemoryReport, TimeBound
from ._targets import Target, TargetError, find_target, target_of_device

# Fn, args, kwargs
Call: TypeAlias = tuple[Callable[..., Any], Sequence[PyTree], dict[str, PyTree]]


class DoesNotFit(RuntimeError):
    """The compiler refused the program because device memory is too small (XLA:TPU
    does).
    """


@dataclasses.dataclass(frozen=True)
class TracedCall:
    target: Target
    devices: int
    traced: Any
    flops: Flops

    def report(self, cache: str | Path | None = None) -> MemoryReport:
        """Compile it, or read what an earlier compilation found in `cache`.

        A folder that can't be written to, and a file that can't be read, are as none.
        """
        with warnings.catch_warnings():
            # Donation that was not used shows in the report.
            warnings.filterwarnings(
                "ignore", message="Some donated buffers were not usable"
            )
            with compiled_for(
                self.target.devices()[0]
            ):  # primitives that expand into others do so now
                lowered = self.traced.lower()
            if cache is None:
                return self._report(_compiled(lowered, self.target, self.devices))
            path = Path(cache) / f"{_key(lowered, self.target, self.devices)}.json"
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                return self._report(read_json_fields(path))
            found = _compiled(lowered, self.target, self.devices)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replaced_whole(path, shared=True) as unfinished:
                unfinished.write_text(json.dumps(found), encoding="utf-8")
        return self._report(found)

    def _report(self, found: dict[str, Any]) -> MemoryReport:
        target, devices = self.target, self.devices
        known = target if target.flops else target_of_device(target.devices()[0])
        largest = tuple(Buffer(*each) for each in found["largest"])
        return MemoryReport(
            target=target.name,
            flops=self.flops,
            devices=devices,
            capacity=(known or target).memory,
            least_time=(
                None if known is None else TimeBound.of(self.flops, known, devices)
            ),
            **found | {"host": HostBytes(**found["host"]), "largest": largest},
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
    kind, are there for `fn` too. Without a GPU, XLA takes none for one: there the
    program makes them first, so they count as temporaries of the host, or as outputs
    where they are updated in place. Making them is not among the transfers.

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
    """Trace a call as `report` compiles it."""
    fn, _, _ = call
    if not callable(fn):
        raise TypeError(
            f"report takes a function and then its arguments; got {type(fn).__name__}."
            " plan and compare take what makes it of a policy: lambda remat: lambda"
            " blocks, x: train_step(blocks, x, remat=remat)."
        )
    if hasattr(fn, "lower") and hasattr(fn, "__wrapped__"):
        raise TypeError(
            "report compiles the function that it is given; got one in a jit. Give it"
            " the function itself (fn.__wrapped__), and say what is donated: report(fn,"
            " *args, donate=...)."
        )
    target = find_target(target)
    mesh = _mesh_of(target, call)
    placed = _placed(target, mesh, call)
    arrays, static = eqx.partition(
        placed, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )
    # By the arguments as given: devices that are not attached may know no host memory.
    is_made = jax.tree.map(
        lambda leaf: not target.sizes_host_arguments and bool(_host_memory(leaf)), call
    )
    to_make, arrays = eqx.partition(arrays, is_made)
    donated, kept = eqx.partition(arrays, _donated_of(call, donate))
    shapes, structure = jax.tree.flatten(to_make)

    def run(donated: PyTree, kept: PyTree) -> PyTree:
        # XLA would make one array of those that are equal, and one product of those
        # with both.
        filled = [
            made_on_host(
                jax.typeof(each),
                lambda type_, k=k: jnp.full(type_.shape, k, type_.dtype),
            )
            for k, each in enumerate(shapes)
        ]
        fn, args, kwargs = eqx.combine(
            donated, kept, jax.tree.unflatten(structure, filled), static
        )
        return eqx.filter(fn(*args, **kwargs), eqx.is_array)

    in_use = (
        use_abstract_mesh(mesh.abstract_mesh)
        if mesh.axis_names
        else contextlib.nullcontext()
    )
    with compiled_for(target.devices()[0]):
        with in_use:
            traced = jax.jit(run, donate_argnums=0).trace(donated, kept)
        flops = count_flops(traced.jaxpr)
    # In the place of arguments
    of_made = sum(shape.size * shape.dtype.itemsize for shape in shapes)
    return TracedCall(target, mesh.size, traced, flops + Flops(bytes_to_host=-of_made))


def _mesh_of(target: Target, call: Call) -> Mesh:
    """The mesh that a call's arguments lie on, of the target's devices; without axes
    for one device.
    """
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
    for mesh in meshes.values():
        devices = target.devices(mesh.size)
        if isinstance(mesh, Mesh) and {*mesh.devices.flat} == {*devices}:
            return mesh
        grid = np.asarray(devices, dtype=object).reshape([*mesh.shape.values()])
        return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
    return Mesh(np.asarray(target.devices()[0], dtype=object), ())


def _placed(target: Target, mesh: Mesh, call: Call) -> PyTree:
    """A call with shapes on the mesh in the place of arrays."""

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
        sharding, weak = (
            getattr(leaf, "sharding", None),
            bool(getattr(leaf, "weak_type", False)),
        )
        spec = (
            sharding.spec
            if isinstance(sharding, NamedSharding) and mesh.size > 1
            else PartitionSpec()
        )
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak
        )

    return jtu.tree_map_with_path(shape, call)


def _host_memory(leaf: Any) -> str | None:
    """The kind of host memory that an argument is in; None for device memory."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return kind if kind is not None and "host" in kind else None


def _donated_of(call: Call, donate: str | Sequence[str]) -> PyTree:
    """What of a call is donated, as a prefix tree of booleans."""
    if donate == "all" or not donate:
        return bool(donate)
    fn, args, kwargs = call
    names = {donate} if isinstance(donate, str) else {*donate}
    # The arguments after the last parameter are its own: `*args`.
    parameters = [*inspect.signature(fn).parameters]
    by_position = (parameters + parameters[-1:] * len(args))[: len(args)]
    if missing := sorted(names - {*kwargs, *by_position}):
        raise ValueError(
            f"donate={missing[0]!r} is not an argument of this call: expected 'all' or"
            f" some of {sorted({*by_position, *kwargs})}"
        )
    return (
        False,
        tuple(name in names for name in by_position),
        {name: name in names for name in kwargs},
    )


def _compiled(lowered: Any, target: Target, devices: int) -> dict[str, Any]:
    """What the compilation of a `jax.stages.Lowered` tells of a report."""
    start = time.perf_counter()
    compiled, text = compiled_with_text(lowered, target.devices()[0].platform)
    if isinstance(compiled, jax.errors.JaxRuntimeError):
        listed = "".join(f"\n  {each}" for each in largest_buffers(text))
        largest = (
            f"\nThe largest buffers beside the arguments:{listed}" if listed else ""
        )
        raise DoesNotFit(
            f"compiling for {target.name!r}: {compiled}{largest}"
        ) from compiled
    seconds, stats = time.perf_counter() - start, compiled.memory_analysis()
    kinds = {
        "arguments": "argument",
        "outputs": "output",
        "temporaries": "temp",
        "aliased": "alias",
    }
    device, host = (
        {
            name: getattr(stats, f"{where}{kind}_size_in_bytes")
            for name, kind in kinds.items()
        }
        for where in ("", "host_")
    )
    sent = sent_bytes(text, devices) if devices > 1 else 0
    found = {
        "host": host,
        "sent": sent,
        "largest": largest_buffers(text),
        "compile_seconds": seconds,
    }
    return device | found


def _key(lowered: Any, target: Target, devices: int) -> str:
    """A name for everything that decides what the compiler does."""
    device = target.devices()[0]
    compiler = getattr(getattr(device, "client", None), "platform_version", "")
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    versions = sorted(
        f"{each.name} {each.version}" for each in importlib.metadata.distributions()
    )
    versions = [each for each in versions if each.startswith(("jax", "libtpu"))]
    texts = inspect.getsource(_compiled_text), lowered.as_text()
    parts = (
        repr(target),
        str(devices),
        compiler,
        device.device_kind,
        *flags,
        *versions,
        *texts,
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
