"""The memory, arithmetic and transfers of a program, found by compiling it without running it."""

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from .._compat import made_on_host
from .._messages import shortened
from .._placement import compiled_for
from ._compiled_sizes import sizes_of
from ._costs import Flops
from ._flops import count_flops
from ._host_arguments import host_memory_kind, is_array_or_shape, on_one_device
from ._largest import Buffer
from ._table import Table, Tabular, readable_bytes, readable_count
from ._targets import Target, TargetError, find_target, target_of_device
from ._time_bound import TimeBound


@dataclasses.dataclass(frozen=True)
class HostBytes:
    """Bytes in host memory that the program's device addresses: offloaded or given there."""

    arguments: int = 0
    outputs: int = 0
    temporaries: int = 0
    aliased: int = 0

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True)
class MemoryReport(Tabular):
    """What one call of a program needs, per device unless said otherwise.

    Attributes:
        target: name of the target it was compiled for.
        arguments: bytes of the arguments in device memory.
        outputs: bytes of the results in device memory, aliased ones included.
        temporaries: peak bytes that the program allocates while it runs.
        aliased: bytes of results written into donated arguments.
        host: the same four for host memory.
        flops: arithmetic of one call, and bytes moved between host and device, summed over devices.
        compile_seconds: wall time of the compilation.
        devices: number of devices the program runs on.
        capacity: bytes of memory of one device; None where it is not known.
        least_time: of one call, by its arithmetic and its transfers; None where the device's peak or link is
            not known.
        sent: bytes that a device sends to others in collectives, if each goes round a ring. Divided experts
            (`over` of `grouped_experts`) count as with an even routing; other loops whose trips depend on
            data count once.
        largest: the largest buffers in device memory at the peak, beside the arguments, as far as the text of
            the compiled program tells.
    """

    target: str
    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    host: HostBytes
    flops: Flops
    compile_seconds: float
    devices: int = 1
    capacity: int | None = None
    least_time: TimeBound | None = None
    sent: int = 0
    largest: tuple[Buffer, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of device memory while the program runs: arguments + outputs - aliased + temporaries."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def _table(self) -> Table:
        where = self.target if self.devices == 1 else f"{self.devices} x {self.target}, per device"
        names = {"aliased": "aliased with arguments"}
        rows = [
            (names.get(name, name), *(readable_bytes(sign * getattr(of, name)) for of in (self, self.host)))
            for name, sign in dict(arguments=1, outputs=1, aliased=-1, temporaries=1, total=1).items()
        ]
        notes = [
            *([] if self.capacity is None else [f"one device has {readable_bytes(self.capacity)}"]),
            f"{readable_count(self.flops.matmul)} FLOP in matrix products",
            f"{readable_count(self.flops.elementwise)} FLOP elementwise",
            *self._of_transfers(),
            *([f"{readable_bytes(self.sent)} sent by each device to others"] if self.sent else []),
            f"compiled in {self.compile_seconds:.1f} s",
            *self.flops.reasons,
            *(["the largest buffers at the peak, beside the arguments:"] if self.largest else []),
            *(f"  {each}" for each in self.largest),
        ]
        return Table(f"memory on {where}", ("", "device", "host"), tuple(rows), tuple(notes))

    def transfers(self, tokens: int | None = None) -> str:
        """What goes to the host and back in one call, and `TimeBound.verdict` on it; `"-"` if nothing does.

        Args:
            tokens: of one call, on all devices.
        """
        moved = self.flops.bytes_from_host + self.flops.bytes_to_host
        if not moved:
            return "-"
        size = readable_bytes(moved)
        return size if self.least_time is None else f"{size}, {self.least_time.verdict(tokens)}"

    def _of_transfers(self) -> list[str]:
        moved = self.flops.bytes_from_host, self.flops.bytes_to_host
        if not any(moved):
            return []
        sizes = "{} from the host, {} to the host".format(*map(readable_bytes, moved))
        if (least := self.least_time) is None:
            return [sizes]
        seconds = f"{least.compute:.3g} s of compute and {least.transfer:.3g} s of transfers"
        return [sizes, f"at least {seconds}: {least.verdict()}"]


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """A call that is traced and not compiled yet."""

    placement: "_Placement"
    traced: Any
    flops: Flops

    def report(self, cache: str | Path | None = None) -> MemoryReport:
        """Compile it, or read what an earlier compilation found in `cache`.

        Raises:
            DoesNotFit: the compiler refused the program because device memory is too small.
        """
        target, devices = self.placement.target, self.placement.devices
        with warnings.catch_warnings():
            # Donation that was not used shows in the report.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            with compiled_for(target.devices()[0]):  # primitives that expand into others do so now
                lowered = self.traced.lower()
            found = sizes_of(lowered, target, devices, cache)
        known = target if target.flops else target_of_device(target.devices()[0])
        return MemoryReport(
            target=target.name,
            **found.device,
            host=HostBytes(**found.host),
            flops=self.flops,
            sent=found.sent,
            largest=tuple(found.largest),
            compile_seconds=found.seconds,
            devices=devices,
            capacity=target.memory or _attached_memory(target),
            least_time=None if known is None else TimeBound.of(self.flops, known, devices),
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
        fn: a function, an Equinox module, or either already wrapped in `jax.jit` or `eqx.filter_jit`
            (their donation counts).
        *args: arguments as `eqx.filter_jit` takes them: arrays and `jax.ShapeDtypeStruct`s are traced,
            anything else is static. Shardings on a mesh are kept if the mesh is of the target's devices
            (see `target_mesh`), and otherwise moved to as many of the target's devices.
        target: a name in `TARGETS` or a `Target`.
        donate: names of the arguments whose buffers may be reused for results, or `"all"` (with the
            arrays in `fn`).
        cache: folder for what compilations find, which the same program, target and versions then need not
            repeat; `compile_seconds` is of the first. None to compile.
        **kwargs: keyword arguments of `fn`, but not `target`, `donate` and `cache`: if `fn` takes arguments
            of these names, pass them by position.

    If the arguments lie on a mesh, `fn` is traced with it in use (`jax.sharding.use_abstract_mesh`).

    Arguments in host memory, by their sharding's memory kind, are in host memory for `fn` too. Without a GPU,
    XLA takes none for one: there the program makes them first, so they count as temporaries of the host, or
    as outputs where they are updated in place. Making them is not among the transfers.

    Returns:
        The report. Library workspaces and autotuning may differ on the device itself.

    Raises:
        ValueError: an unknown target; a name in `donate` that `fn` does not take.
        TargetError: the target's compiler plugin is not installed, has too few devices, or cannot
            size arguments on the host for several devices or for a function in `jax.jit`.
        DoesNotFit: the compiler refused the program because device memory is too small.

    Cost: tracing and one full compilation; no memory for arguments or results.
    """
    return trace_call(fn, args, kwargs, target, donate).report(cache)


def trace_call(
    fn: Callable[..., Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    target: str | Target,
    donate: str | Sequence[str],
) -> TracedCall:
    """Trace `fn(*args, **kwargs)` as `report` compiles it."""
    chosen = find_target(target)
    fn, donate = _unwrap(fn, donate)
    given = fn, args, kwargs
    placement = _Placement.of(chosen, given, makes_arguments=not _is_jax_jit(fn))
    call = placement.place(given)
    if _is_jax_jit(fn):
        return _trace(placement, lambda: fn.trace(*call[1], **call[2]))
    arrays, static = eqx.partition(call, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    made, arrays = eqx.partition(arrays, jax.tree.map(placement.is_made, given, is_leaf=is_array_or_shape))
    donated, kept = eqx.partition(arrays, _donated(fn, args, kwargs, donate))
    shapes, structure = jax.tree.flatten(made)

    def run(donated: PyTree, kept: PyTree) -> PyTree:
        # XLA would make one array of those that are equal, and one product of those with both.
        filled = jax.tree.unflatten(structure, map(_full_on_host, shapes, range(len(shapes))))
        fn, args, kwargs = eqx.combine(donated, kept, filled, static)
        return eqx.filter(fn(*args, **kwargs), eqx.is_array)

    size = sum(shape.size * shape.dtype.itemsize for shape in shapes)
    return _trace(placement, lambda: jax.jit(run, donate_argnums=0).trace(donated, kept), size)


def _full_on_host(like: Any, value: int) -> jax.Array:
    return made_on_host(jax.typeof(like), lambda type_: jnp.full(type_.shape, value, type_.dtype))


def _trace(placement: "_Placement", trace: Callable[[], Any], made: int = 0) -> TracedCall:
    """The traced call; `made` are the bytes that it first moves to the host in place of arguments."""
    with compiled_for(placement.target.devices()[0]):
        with placement.in_use():
            traced = trace()
        flops = count_flops(traced.jaxpr)
    return TracedCall(placement, traced, flops + Flops(bytes_to_host=-made))


def _attached_memory(target: Target) -> int | None:
    device = target.devices()[0]
    if device.process_index != jax.process_index():  # JAX asks only a process's own
        device = jax.local_devices()[0]
    stats = device.memory_stats()
    return stats.get("bytes_limit") if stats else None


def _is_jax_jit(fn: Any) -> bool:
    return hasattr(fn, "trace") and hasattr(fn, "lower")


def _unwrap(fn: Any, donate: str | Sequence[str]) -> tuple[Any, str | Sequence[str]]:
    """Unwrap `eqx.filter_jit`, which would treat shapes as static values."""
    is_filter_jit = hasattr(fn, "donate_first") and hasattr(fn, "__wrapped__")
    if donate and (is_filter_jit or _is_jax_jit(fn)):
        raise ValueError("fn is jitted already: give its donation to the jit, not to report")
    if not is_filter_jit:
        return fn, donate
    return fn.__wrapped__, "all" if fn.donate_first else "all-except-first" if fn.donate_rest else ()


def _donated(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], donate: str | Sequence[str]) -> PyTree:
    """Which of `(fn, args, kwargs)` are donated, as a prefix tree of booleans."""
    if donate == "all":
        return True
    if donate == "all-except-first":
        return True, (False, *[True] * (len(args) - 1))[: len(args)], True
    if not donate:
        return False
    names = {donate} if isinstance(donate, str) else set(donate)
    parameters = list(inspect.signature(fn).parameters)
    # The arguments after the last parameter are its own: `*args`.
    by_position = [parameters[min(k, len(parameters) - 1)] for k in range(len(args))]
    if missing := sorted(names - kwargs.keys() - set(by_position)):
        expected = sorted({*by_position, *kwargs})
        raise ValueError(
            f"donate={missing[0]!r} is not an argument of this call: expected 'all' or some of {expected}"
        )
    return False, tuple(name in names for name in by_position), {name: name in names for name in kwargs}


@dataclasses.dataclass(frozen=True)
class _Placement:
    """Where a call's arguments are, on a device or a mesh; and whether it can make those on the host."""

    target: Target
    mesh: Mesh | None
    devices: int
    makes_arguments: bool

    @staticmethod
    def of(target: Target, call: PyTree, makes_arguments: bool) -> "_Placement":
        meshes = {}
        for leaf in jax.tree.leaves(call, is_leaf=is_array_or_shape):
            sharding = getattr(leaf, "sharding", None)
            if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
                meshes.setdefault(tuple(sharding.mesh.shape.items()), sharding.mesh)
            elif isinstance(sharding, Sharding) and sharding.num_devices > 1:
                raise ValueError(f"arguments on several devices must have NamedShardings, got {sharding}")
        if len(meshes) > 1:
            raise ValueError(
                f"arguments lie on different meshes: {sorted(meshes)}; put all of them on one mesh"
            )
        if not meshes:
            return _Placement(target, None, 1, makes_arguments)
        ((shape, mesh),) = meshes.items()
        devices = target.devices(mesh.size)
        if not isinstance(mesh, Mesh) or set(mesh.devices.flat) != set(devices):
            grid = np.asarray(devices, dtype=object).reshape([size for _, size in shape])
            mesh = Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
        return _Placement(target, mesh, mesh.size, False)

    def in_use(self) -> contextlib.AbstractContextManager[Any]:
        if self.mesh is None:
            return contextlib.nullcontext()
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    def place(self, call: PyTree) -> PyTree:
        """Replace every array by its shape on the target."""
        on_host: list[str] = []

        def shape(path: Any, leaf: Any) -> Any:
            if not is_array_or_shape(leaf):
                return leaf
            kind = host_memory_kind(leaf)
            if kind is not None:
                on_host.append(f"{jax.tree_util.keystr(path)} ({kind})")
            weak = bool(getattr(leaf, "weak_type", False))
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=self._sharding(leaf, kind), weak_type=weak
            )

        placed = jax.tree_util.tree_map_with_path(shape, call, is_leaf=is_array_or_shape)
        if on_host and not self.target.sizes_host_arguments and not self.makes_arguments:
            where = shortened(on_host, most=5)
            raise TargetError(_HOST_ARGUMENTS.format(target=self.target.name, where=where))
        return placed

    def is_made(self, leaf: Any) -> bool:
        """Whether the program makes this argument, a leaf of the call as it was given."""
        return not self.target.sizes_host_arguments and host_memory_kind(leaf) is not None

    def _sharding(self, leaf: Any, kind: str | None) -> Sharding:
        if self.mesh is None:
            device = self.target.devices()[0]
            return SingleDeviceSharding(device) if kind is None else on_one_device(device, kind)
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        return NamedSharding(self.mesh, spec, memory_kind=kind)


_HOST_ARGUMENTS = (
    "target {target!r} cannot size arguments that live on the host for several devices, or for a function in "
    "jax.jit: without the device attached, XLA:GPU would count them as device memory. On the host: {where}. "
    "Size one device, give the function without jax.jit, use a TPU target, or compile on the GPU itself with "
    "target='local'."
)
