"""Runs an operation on each device of a mesh, for its part of some named axes.

The compiler would gather the tokens of a loop over tokens on every device, and cannot
partition a kernel at all. The caller names the axes over which an operation may be
divided; Haliax's axis mapping (`haliax.axis_mapping`) and the mesh (`jax.set_mesh`)
decide which of them are.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
from haliax import Axis, NamedArray
from haliax.partitioning import axis_mapping, current_thread_local_mapping
from haliax.util import ensure_tuple, is_named_array
from jax.core import Tracer
from jax.sharding import AxisType, PartitionSpec

from .._compat import no_axis_mapping
from .._sweep.store import varying_alike
from ._backends import UnsupportedCallError

T = TypeVar("T")


def per_device(fn: Callable[..., T], *args: Any, over: Sequence[Axis], out: Any) -> T:
    """`fn(*args)`, computed by each device for its own part; a plain call if no axis is
    mapped to a mesh.

    Args:
        fn: computes positions along the axes `over` independently of each other;
            returns a named array or a tuple of them.
        args: trees of named and plain arrays; plain ones, and named ones without these
            axes, are replicated.
        over: axes that may be divided.
        out: the full axes of the result, in order, or a tuple of the axes of each
            result.

    Raises:
        UnsupportedCallError: an axis does not divide evenly, is mapped to an axis that
            the mesh lacks, or to the same one as another axis of one array, or inside
            `jax.shard_map` with `check_vma=True`.

    Where an axis of the mesh is `AxisType.Explicit`, arguments are resharded first, to
    what the mapping says.

    Cost: outside of `jax.jit` every call compiles `fn`.
    """
    # By the name of a named axis, the axes of the mesh that divide it
    cut = _cut(over)
    # Axes of the mesh over which a surrounding `jax.vmap` divides examples
    of_examples = _free_mesh_axes() & {*_examples_over.value}
    if not cut and not of_examples:
        return fn(*args)
    division = _Division.of(cut)
    is_any = lambda x: is_named_array(x) or eqx.is_array(x)  # noqa: E731
    arrays, static = eqx.partition(args, is_any, is_leaf=is_named_array)

    def spec_of(x: Any) -> PartitionSpec:
        if is_named_array(x):
            return division.spec(x.axes)
        return PartitionSpec()  # replicated

    specs = _map_arrays(spec_of, arrays)
    out_specs = jax.tree.map(division.spec, out, is_leaf=_is_axes)
    division.check(over)

    def with_own_axes(x: Any) -> Any:
        if not is_named_array(x):
            return x
        return NamedArray(x.array, division.own(x.axes))

    def own(arrays: Any) -> Any:
        mine = _map_arrays(with_own_axes, arrays)
        arguments = eqx.combine(mine, static, is_leaf=is_named_array)
        # Within it, every named axis is a device's own part, which nothing divides.
        with free_axis_mapping():
            results = fn(*arguments)
        return jax.tree.map(
            lambda axes, one: one.rearrange(division.own(axes)).array,
            out,
            results,
            is_leaf=_is_axes,
        )

    if any(
        jax.typeof(array).manual_axis_type.varying for array in jax.tree.leaves(arrays)
    ):
        raise UnsupportedCallError(
            "inside jax.shard_map(..., check_vma=True) an axis is mapped as well:"
            f" {cut}. Map none there, or use check_vma=False."
        )
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        arrays = jax.tree.map(jax.reshard, arrays, specs, is_leaf=is_named_array)
    # Other axes of the mesh stay with the compiler.
    names = of_examples.union(*cut.values())
    run = jax.shard_map(
        own, in_specs=(specs,), out_specs=out_specs, axis_names=names, check_vma=False
    )
    if not any(isinstance(array, Tracer) for array in jax.tree.leaves(arrays)):
        run = jax.jit(run)  # outside of it, jax.shard_map takes no mesh with Auto axes
    return jax.tree.map(
        lambda axes, array: NamedArray(array, axes), out, run(arrays), is_leaf=_is_axes
    )


class _Division(NamedTuple):
    """How a mesh divides named axes."""

    # By the name of an axis: the axes of the mesh that divide it, and into how many
    # parts
    cut: dict[str, tuple[str, ...]]
    parts: dict[str, int]

    @staticmethod
    def of(cut: dict[str, tuple[str, ...]]) -> "_Division":
        sizes = jax.sharding.get_abstract_mesh().shape
        parts = {}
        for name, physical in cut.items():
            parts[name] = math.prod(sizes[one] for one in physical)
        return _Division(cut, parts)

    def check(self, over: Sequence[Axis]) -> None:
        """Refuse axes that do not divide evenly."""
        for axis in over:
            parts = self.parts.get(axis.name, 1)
            if axis.size % parts:
                raise UnsupportedCallError(
                    f"The axis `{axis.name}` of {axis.size} can't be divided evenly"
                    f" over the {parts} devices of {', '.join(self.cut[axis.name])}:"
                    f" give it a multiple of {parts}, or map it to no axis of the mesh."
                )

    def own(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        """The axes of one device's part of an array."""
        own = []
        for axis in axes:
            part = axis.size // self.parts.get(axis.name, 1)
            own.append(axis.resize(part))
        return tuple(own)

    def spec(self, axes: Sequence[Axis]) -> PartitionSpec:
        """How an array of these axes is divided."""
        for one, other in itertools.combinations(axes, 2):
            over_one = self.cut.get(one.name, ())
            over_other = self.cut.get(other.name, ())
            if both := {*over_one} & {*over_other}:
                raise UnsupportedCallError(
                    f"The axes `{one.name}` and `{other.name}` are both mapped to"
                    f" {', '.join(sorted(both))}: one axis of the mesh divides one axis"
                    " of an array."
                )
        return PartitionSpec(*(self.cut.get(axis.name) for axis in axes))


def align_varying_axes(what: str, arrays: T) -> T:
    """The arrays, all varying over the axes of an enclosing `jax.shard_map` over which
    some of them vary.

    Loops of an operation need it, whose carries keep their types.

    Raises:
        ValueError: a type says that its array is divided (`AxisType.Explicit`).
    """
    for array in jax.tree.leaves(arrays):
        names = [
            name
            for some in jax.typeof(array).sharding.spec
            for name in ensure_tuple(some or ())
        ]
        if names:
            raise ValueError(
                f"{what} has an array divided over {names[0]!r}, an axis of the mesh"
                " that is AxisType.Explicit. Map a named axis to it, as in"
                f" haliax.axis_mapping({{'batch': {names[0]!r}}}), call it inside"
                " jax.shard_map, or make the mesh with AxisType.Auto."
            )
    return varying_alike(arrays)


def mesh_axes(axis: Axis) -> tuple[str, ...]:
    """The axes of the mesh that `per_device` divides an axis over; none where it does
    not.

    Raises:
        UnsupportedCallError: it is mapped to an axis that the mesh lacks.
    """
    return _cut((axis,)).get(axis.name, ())


def unmapped(*axes: Axis) -> contextlib.AbstractContextManager[None]:
    """Within it, Haliax's axis mapping maps none of these axes: their arrays are whole
    on every device.

    For arrays that have two axes which are mapped to one axis of the mesh.
    """
    names = {axis.name for axis in axes}
    return _mapping_with(lambda name, physical: None if name in names else physical)


def free_axis_mapping() -> contextlib.AbstractContextManager[None]:
    """Restrict Haliax's axis mapping to mesh axes that no enclosing `jax.shard_map` has
    made manual.

    The rules of a `jax.custom_vjp` that call functions on named axes need it, because
    they are traced after `jax.shard_map` has returned.
    """
    free = _free_mesh_axes()
    return _mapping_with(
        lambda _, physical: tuple(one for one in ensure_tuple(physical) if one in free)
    )


def _mapping_with(
    kept: Callable[[str, Any], Any],
) -> contextlib.AbstractContextManager[None]:
    """Haliax's axis mapping with what is kept of each axis's part."""
    mapping = current_thread_local_mapping() or {}
    left = {
        name: some
        for name, physical in mapping.items()
        if (some := kept(name, physical))
    }
    return axis_mapping(left) if left else no_axis_mapping()


_examples_over = jax.make_user_context(default_value=())


@contextlib.contextmanager
def each_example(axis: Axis, over: Sequence[str]) -> Iterator[None]:
    """Within it, an axis has one example, and `jax.vmap` divides examples over these
    axes of the mesh.

    They are its `spmd_axis_name`. Each device then computes an operation for its
    examples.
    """
    with unmapped(axis), _examples_over(tuple(over)):
        yield


def _map_arrays(function: Callable[[Any], Any], arrays: Any) -> Any:
    return jax.tree.map(function, arrays, is_leaf=is_named_array)


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(axis, Axis) for axis in node)


def _cut(over: Sequence[Axis]) -> dict[str, tuple[str, ...]]:
    """The mesh axes that each axis is divided over: those of more than one device that
    are not manual.
    """
    mapping = current_thread_local_mapping() or {}
    free = _free_mesh_axes()
    mesh = jax.sharding.get_abstract_mesh()
    found: dict[str, tuple[str, ...]] = {}
    for axis in over:
        wanted = ensure_tuple(mapping.get(axis.name, ()))
        unknown = [
            one for one in wanted if not mesh.empty and one not in mesh.axis_names
        ]
        if unknown:
            raise UnsupportedCallError(
                f"The axis `{axis.name}` is mapped to {unknown[0]!r}; the mesh has "
                f"{', '.join(mesh.axis_names)}."
            )
        # Within a `jax.shard_map` its axes divide nothing any more.
        physical = tuple(one for one in wanted if one in free)
        if physical:
            found[axis.name] = physical
    return found


def _free_mesh_axes() -> set[str]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return set()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name for name, size, kind in axes if size > 1 and kind != AxisType.Manual}
