"""Moving arrays between device and host memory from inside a compiled program.

The moves are annotations in the graph: XLA turns them into asynchronous copies on
accelerators. On the CPU both spaces are the same memory and the moves have no effect,
so programs with offloading run everywhere.
"""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def to_host(tree: Any) -> Any:
    # With the source, since JAX's transpose (0.10.2, 0.12) would leave the cotangent of
    # an array that comes from the device on the host.
    return jax.device_put(tree, jax.memory.Space.Host, src=jax.memory.Space.Device)


def to_device(tree: Any) -> Any:
    return jax.device_put(tree, jax.memory.Space.Device)


# `with compiled_for(device):` traces for another device than the one that is attached,
# or for a platform by name. Part of the keys of JAX's caches, so that what was traced
# for one device is not reused for another.
compiled_for = jax.make_user_context(default_value=None)


def platform() -> str:
    """The kind of device that the program being traced is for: `"cpu"`, `"cuda"`,
    `"tpu"`, ... `"cuda"` for all GPUs: JAX calls those of ROCm `"gpu"` too.
    """
    device = compiled_for.value or jax.default_backend()
    name = getattr(device, "platform", device)
    return "cuda" if name in ("gpu", "rocm") else name


def target_device() -> Any:
    """The device that the program being traced is for; an attached one if only a
    platform is known.
    """
    device = compiled_for.value
    return device if hasattr(device, "platform") else jax.local_devices()[0]


def is_on_host(array: Any) -> bool:
    """Whether an array, traced or not, the type of one, or the shape of one with its
    sharding, is in host memory.
    """
    if isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        array = jax.typeof(array)
    is_type = isinstance(array, ShapedArray)
    return is_type and array.memory_space == jax.memory.Space.Host


def on_one_device(device: Any, memory_kind: str | None = None) -> NamedSharding:
    """A sharding on one device from which JAX takes the memory space of a shape, as
    from no other kind.
    """
    return NamedSharding(
        Mesh(np.asarray(device, dtype=object), ()),
        PartitionSpec(),
        memory_kind=memory_kind,
    )


def on_several_devices(tree: Any) -> bool:
    """Whether there is a mesh of several devices, or an array of the tree is known to
    be on several.
    """

    def devices(leaf: Any) -> int:
        if isinstance(leaf, Tracer):
            return jax.typeof(leaf).sharding.mesh.size
        return len(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else 1

    return (
        max(
            jax.sharding.get_abstract_mesh().size,
            *map(devices, jax.tree.leaves(tree)),
            1,
        )
        > 1
    )


def has_host_arrays(tree: Any) -> bool:
    return any(map(is_on_host, jax.tree.leaves(tree)))


def on_device(tree: Any) -> Any:
    """The arrays of a tree, those on the host moved to the device."""
    return jax.tree.map(
        lambda leaf: to_device(leaf) if is_on_host(leaf) else leaf, tree
    )


def moves_to_host(shape: Iterable[int], dtype: Any) -> bool:
    """Whether an array of this shape in each layer is one that `streaming` keeps on the
    host: a matrix.

    Others are small, and XLA for TPUs reads no vector of bfloat16 out of a stack on the
    host.
    """
    return sum(size > 1 for size in shape) > 1 and jax.numpy.issubdtype(
        dtype, jax.numpy.number
    )
