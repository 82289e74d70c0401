"""Arguments of a program as shapes on a target, and which of them are donated or on the host."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .._static import PyTree
from ._targets import Target, TargetError


def is_array_or_shape(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def host_memory_kind(leaf: Any) -> str | None:
    """The kind of host memory that an argument is in; None for device memory."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return kind if kind is not None and "host" in kind else None


def on_one_device(device: Any, memory_kind: str) -> NamedSharding:
    """A sharding on one device from which JAX takes the memory space of a shape, as from no other kind."""
    return NamedSharding(Mesh(np.asarray(device, dtype=object), ()), PartitionSpec(), memory_kind=memory_kind)


def arguments_on_host(
    to_host: Callable[..., Sequence[PyTree]], args: tuple[PyTree, ...]
) -> tuple[PyTree, ...]:
    """Return the shapes of `to_host(*args)`, for a report of a program with weights on the host.

    ```python
    moved = memory.arguments_on_host(lambda model, x: (streaming.to_host(model), x), (model, x))
    print(memory.report(step, *moved, target="v5p"))
    ```

    Args:
        to_host: returns its arguments with some arrays moved to the host, or their shapes. It is traced.
        args: its arguments: arrays, shapes, and anything else. In results like them arrays keep shardings.

    Raises:
        TargetError: for arrays on several devices whose compiler knows no host memory without them.
        TypeError: `to_host` does not return a tuple or list with one result for each argument.
    """

    def results(*args: PyTree) -> tuple[PyTree, ...]:
        found = to_host(*args)
        if not isinstance(found, tuple | list) or len(found) != len(args):
            got = f"{len(found)} of them" if isinstance(found, tuple | list) else f"a {type(found).__name__}"
            raise TypeError(
                f"what moves arguments to the host returns all {len(args)} of them in a tuple or list; it "
                f"returned {got}. Write lambda model, x: (streaming.to_host(model), x)."
            )
        return tuple(found)

    jaxpr, shapes, static = eqx.filter_make_jaxpr(results)(*args)
    given, before = jax.tree.flatten(eqx.filter(args, is_array_or_shape))
    moved, after = jax.tree.flatten(shapes)

    def argument(source: Any, shape: jax.ShapeDtypeStruct, type_: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(source, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
            sharding = None
        if type_.memory_space == jax.memory.Space.Host:
            sharding = sharding or on_one_device(jax.local_devices()[0], "pinned_host")
            sharding = sharding.with_memory_kind("pinned_host")
            if sharding.memory_kind is None:
                raise TargetError(
                    f"arguments on the host cannot be sized for {sharding.mesh.size} devices that are not "
                    f"attached: their compiler knows no host memory. Size one device, or use a TPU target."
                )
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    sources = given if before == after else [None] * len(moved)
    found = after.unflatten(map(argument, sources, moved, jaxpr.out_avals))
    return tuple(eqx.combine(found, static))


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a call's arguments are, on a device or a mesh."""

    target: Target
    mesh: Mesh | None

    @staticmethod
    def of(target: Target, call: PyTree) -> "Placement":
        """The placement on one device; if arguments lie on a mesh, on as many."""
        meshes = {}
        for leaf in jax.tree.leaves(call, is_leaf=is_array_or_shape):
            sharding = getattr(leaf, "sharding", None)
            if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
                meshes[tuple(sharding.mesh.shape.items())] = sharding.mesh
            elif isinstance(sharding, Sharding) and sharding.num_devices > 1:
                raise ValueError(f"arguments on several devices must have NamedShardings, got {sharding}")
        if len(meshes) > 1:
            raise ValueError(
                f"arguments lie on different meshes: {sorted(meshes)}; put all of them on one mesh"
            )
        for shape, mesh in meshes.items():
            devices = target.devices(mesh.size)
            if not isinstance(mesh, Mesh) or {*mesh.devices.flat} != {*devices}:
                grid = np.asarray(devices, dtype=object).reshape([size for _, size in shape])
                mesh = Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
            return Placement(target, mesh)
        return Placement(target, None)

    @property
    def devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    def in_use(self) -> contextlib.AbstractContextManager[Any]:
        if self.mesh is None:
            return contextlib.nullcontext()
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    def place(self, call: PyTree) -> PyTree:

        def shape(path: Any, leaf: Any) -> Any:
            if not is_array_or_shape(leaf):
                return leaf
            if self.is_made(leaf) and self.mesh is not None:
                raise TargetError(
                    f"target {self.target.name!r} cannot size {jtu.keystr(path)}, which is on the host, for "
                    "several devices: without them XLA:GPU counts it in device memory. Size one device, use "
                    "a TPU target, or compile on the GPUs themselves with target='local'."
                )
            weak = bool(getattr(leaf, "weak_type", False))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._sharding(leaf), weak_type=weak)

        return jtu.tree_map_with_path(shape, call, is_leaf=is_array_or_shape)

    def is_made(self, leaf: Any) -> bool:
        """Whether the program has to make this argument, a leaf of the call as it was given."""
        return not self.target.sizes_host_arguments and host_memory_kind(leaf) is not None

    def _sharding(self, leaf: Any) -> Sharding:
        kind = host_memory_kind(leaf)
        if self.mesh is None:
            device = self.target.devices()[0]
            return SingleDeviceSharding(device) if kind is None else on_one_device(device, kind)
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        return NamedSharding(self.mesh, spec, memory_kind=kind)


def donated_of(
    fn: Callable, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], donate: str | Sequence[str]
) -> PyTree:
    """Which of `(fn, args, kwargs)` are donated, as a prefix tree of booleans."""
    if donate == "all":
        return True
    if not donate:
        return False
    names = {donate} if isinstance(donate, str) else {*donate}
    # The arguments after the last parameter are its own: `*args`.
    parameters = [*inspect.signature(fn).parameters]
    by_position = [parameters[min(k, len(parameters) - 1)] for k in range(len(args))]
    if missing := sorted(names - {*kwargs, *by_position}):
        raise ValueError(
            f"donate={missing[0]!r} is not an argument of this call: expected 'all' or some of "
            f"{sorted({*by_position, *kwargs})}"
        )
    return False, tuple(name in names for name in by_position), {name: name in names for name in kwargs}
