"""Arguments of a program as shapes on a target, and which of them are donated or on the host."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .._static import PyTree
from ._targets import Target, TargetError


def is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def shapes_of(tree: PyTree) -> PyTree:
    """A tree with shapes in the place of arrays, with their shardings."""

    def shape(leaf: Any) -> Any:
        if not eqx.is_array(leaf):
            return leaf
        sharding, weak = getattr(leaf, "sharding", None), bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(shape, tree)


def mesh_of(target: Target, call: PyTree) -> Mesh:
    """The mesh that a call's arguments lie on, of the target's devices; without axes for one device."""
    meshes = {}
    for leaf in jax.tree.leaves(call):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            meshes[tuple(sharding.mesh.shape.items())] = sharding.mesh
        elif isinstance(sharding, Sharding) and sharding.num_devices > 1:
            raise ValueError(f"arguments on several devices must have NamedShardings, got {sharding}")
    if len(meshes) > 1:
        raise ValueError(f"arguments lie on different meshes: {sorted(meshes)}; put all of them on one mesh")
    for mesh in meshes.values():
        devices = target.devices(mesh.size)
        if isinstance(mesh, Mesh) and {*mesh.devices.flat} == {*devices}:
            return mesh
        grid = np.asarray(devices, dtype=object).reshape([*mesh.shape.values()])
        return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
    return Mesh(np.asarray(target.devices()[0], dtype=object), ())


def placed(target: Target, mesh: Mesh, call: PyTree) -> PyTree:
    """A call with its shapes on the mesh."""

    def shape(path: Any, leaf: Any) -> Any:
        if not is_shape(leaf):
            return leaf
        if is_made(target, leaf) and mesh.size > 1:
            raise TargetError(
                f"target {target.name!r} cannot size {jtu.keystr(path)}, which is on the host, for several "
                "devices: without them XLA:GPU counts it in device memory. Size one device, use a TPU "
                "target, or compile on the GPUs themselves with target='local'."
            )
        sharding = leaf.sharding
        spec = sharding.spec if isinstance(sharding, NamedSharding) and mesh.size > 1 else PartitionSpec()
        return leaf.update(sharding=NamedSharding(mesh, spec, memory_kind=_host_memory(leaf)))

    return jtu.tree_map_with_path(shape, call)


def is_made(target: Target, leaf: Any) -> bool:
    """Whether the program has to make this argument, a leaf of the call as it was given."""
    return not target.sizes_host_arguments and _host_memory(leaf) is not None


def _host_memory(leaf: Any) -> str | None:
    """The kind of host memory that an argument is in; None for device memory."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return kind if kind is not None and "host" in kind else None


def donated_of(
    fn: Callable, args: Sequence[PyTree], kwargs: dict[str, PyTree], donate: str | Sequence[str]
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
