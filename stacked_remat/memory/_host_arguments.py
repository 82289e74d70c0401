"""Arguments of a program as shapes that say which of them are in host memory."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ._targets import TargetError


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
        to_host: returns its arguments with some arrays moved to the host, or their shapes. It is traced, not
            run.
        args: its arguments: arrays, shapes, and anything else.

    Returns:
        Its results with shapes in place of arrays. Arrays that are only moved, or left where they are, keep
        their shardings, as shapes do.

    Raises:
        TargetError: for arrays on several devices whose compiler knows no host memory without them.
        TypeError: `to_host` does not return a tuple or list with one result for each argument.
    """

    def results(*args: PyTree) -> tuple[PyTree, ...]:
        found = to_host(*args)
        if not isinstance(found, tuple | list) or len(found) != len(args):
            got = f"{len(found)} of them" if isinstance(found, tuple | list) else f"a {type(found).__name__}"
            raise TypeError(
                f"what moves arguments to the host returns all {len(args)} of them in a tuple or list, those "
                f"that stay too; got {got}. Write it as lambda model, x: (streaming.to_host(model), x)."
            )
        return tuple(found)

    jaxpr, shapes, static = eqx.filter_make_jaxpr(results)(*args)
    given = jax.tree.leaves(eqx.filter(args, is_array_or_shape))
    sources = dict(zip(jaxpr.jaxpr.invars, given, strict=True))

    def source(var: Any) -> Any:
        return None if isinstance(var, Literal) else sources.get(var)

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            sources.update(zip(eqn.outvars, map(source, eqn.invars), strict=True))

    def argument(var: Any, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = getattr(source(var), "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
            sharding = None
        if var.aval.memory_space == jax.memory.Space.Host:
            sharding = sharding or on_one_device(jax.local_devices()[0], "pinned_host")
            sharding = sharding.with_memory_kind("pinned_host")
            if sharding.memory_kind is None:
                raise TargetError(
                    f"arguments on the host cannot be sized for {sharding.mesh.size} devices that are not "
                    f"attached: their compiler knows no host memory. Size one device, or use a TPU target."
                )
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    leaves, structure = jax.tree.flatten(shapes)
    moved = map(argument, jaxpr.jaxpr.outvars, leaves)
    return tuple(eqx.combine(jax.tree.unflatten(structure, moved), static))
