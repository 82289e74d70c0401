"""Stacks of arrays, one entry per layer, in device or host memory.

The memory of a stack is part of its type. Entries are read to the device and written
back to the stack's memory, so the loops of a sweep are the same for both.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import mapped_aval, unmapped_aval
from jaxtyping import Array

from .. import _xla_hints as xla_hints
from .._activity import is_differentiable
from .._compat import made_on_host
from .._memory_spaces import has_host_arrays, is_on_host, on_device, to_host
from .._static import PyTree

# Of a layer, a slot, a run, a trip or a row; known or traced.
Index: TypeAlias = int | Array


def empty_stack(entry: PyTree, size: int, on_host: bool = False) -> PyTree:
    """Stacks of zeros for `size` entries like the given one, in its memory or on the
    host.
    """

    def stack(leaf: Any) -> Array:
        type_ = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
        return zeros_of(
            type_.update(memory_space=jax.memory.Space.Host) if on_host else type_,
            (size,),
        )

    return jax.tree.map(stack, entry)


def zeros_of(type_: ShapedArray, in_front: tuple[int, ...] = ()) -> Array:
    """Zeros of a type, with dimensions in front; in its memory, sharded and varying
    over a mesh like it.
    """
    if is_on_host(type_):
        # Without a copy on the device on the way.
        return made_on_host(
            unmapped_aval(in_front[0], 0, type_) if in_front else type_, zeros_of
        )
    zero = jnp.zeros_like(jax.ShapeDtypeStruct((), type_.dtype))
    sharding = _sharding_of(type_, (None,) * len(in_front))
    zeros = jnp.broadcast_to(zero, (*in_front, *type_.shape), out_sharding=sharding)
    return varying_as(on_mesh(zeros), type_)


def on_mesh(stack: Array) -> Array:
    """The stack on the mesh, whole on each device, if its Explicit axes were set after
    it was made.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return stack
    is_placed = not jax.typeof(stack).sharding.mesh.empty
    return stack if is_placed else jax.reshard(stack, jax.P())


def zeros_like(stack: Array) -> Array:
    """Zeros of the shape of a stack, in the same memory."""
    return zeros_of(jax.typeof(stack)) if is_on_host(stack) else jnp.zeros_like(stack)


def with_tangents(buffers: PyTree, inputs: PyTree) -> PyTree:
    """The buffers of a loop, or an entry of one; those on the host have tangents, zeros
    on the host if they have none yet, where any of `inputs` has one.

    Where only one of a buffer and what is written to it has a tangent, JAX makes the
    zeros of the other on the device (0.10.2, 0.12).
    """
    if not has_host_arrays(buffers):
        return buffers
    leaves, tree = jax.tree.flatten(buffers)
    causes = []
    for leaf in jax.tree.leaves(inputs):
        if is_differentiable(jax.typeof(leaf).dtype):
            causes.append(leaf)

    # The value is the buffers; the causes are arguments so that the rule is asked
    # where one of them alone has a tangent.
    @jax.custom_jvp
    def made(leaves: list[Array], causes: list[Array]) -> list[Array]:
        return leaves

    def rule(primals: tuple, tangents: tuple) -> tuple[list[Array], list[Any]]:
        leaves, causes = primals
        leaf_tangents, cause_tangents = tangents
        further_causes = [*causes]
        for tangent in cause_tangents:
            if not isinstance(tangent, SymbolicZero):
                further_causes.append(tangent)
        made_tangents = []
        for leaf, tangent in zip(leaves, leaf_tangents, strict=True):
            if is_on_host(leaf) and is_differentiable(leaf.dtype):
                if isinstance(tangent, SymbolicZero):
                    tangent = zeros_like(leaf)
                tangent = with_tangents(tangent, further_causes)
            made_tangents.append(tangent)
        # Both may be differentiated once more.
        return with_tangents(leaves, causes), made_tangents

    made.defjvp(rule, symbolic_zeros=True)
    return jax.tree.unflatten(tree, made(leaves, causes))


def zeros_after(done: PyTree, like: PyTree) -> PyTree:
    """Zeros of these shapes and types, sharded as these are, made once the arrays of
    `done` are there.
    """
    # A barrier orders values that vary over the same axes alone.
    done, zero = varying_alike((done, jnp.zeros((), jnp.int32)))
    zero = xla_hints.zero_after(done, zero)

    def zeros(leaf: Any) -> Array:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        if isinstance(leaf, ShapedArray) and (
            is_key or varies_over(leaf) != varies_over(jax.typeof(zero))
        ):
            return zeros_of(leaf)
        return jnp.broadcast_to(
            zero.astype(leaf.dtype), leaf.shape, out_sharding=_sharding_of(leaf, ())
        )

    return jax.tree.map(zeros, like)


def _sharding_of(leaf: Any, in_front: tuple[None, ...]) -> Any:
    if not isinstance(leaf, ShapedArray) or not any(leaf.sharding.spec):
        return None
    return leaf.sharding.update(spec=(*in_front, *leaf.sharding.spec))


def varying_alike(arrays: PyTree) -> PyTree:
    """The arrays, all varying over the axes of a `jax.shard_map` over which some of
    them vary.
    """
    every = frozenset[str]().union(
        *(varies_over(jax.typeof(leaf)) for leaf in jax.tree.leaves(arrays))
    )
    return jax.tree.map(lambda leaf: varying_over(leaf, every), arrays)


def varying_as(array: Array, type_: ShapedArray) -> Array:
    """The array, varying over the axes over which the values of a type vary too."""
    return varying_over(array, varies_over(type_))


def varies_over(type_: ShapedArray) -> frozenset[str]:
    """The axes of a `jax.shard_map` over which the values of a type vary."""
    found = type_.manual_axis_type  # None for a `jax.ShapeDtypeStruct` without
    return frozenset(found.varying if found else ())


def varying_over(array: Any, axes: frozenset[str]) -> Any:
    """The array, varying over these axes of a `jax.shard_map` too: its cotangent is
    summed over them.
    """
    missing = tuple(sorted(axes - varies_over(jax.typeof(array))))
    return lax.pcast(array, missing, to="varying") if missing else array


def cotangent_as(cotangent: Array, type_: ShapedArray) -> Array:
    """The cotangent of an array of a type, from that of `varying_as` of it."""
    axes = axes_beyond(cotangent, type_)
    return lax.psum(cotangent, tuple(sorted(axes))) if axes else cotangent


def axes_beyond(array: Array, type_: ShapedArray) -> frozenset[str]:
    """The axes over which an array varies and the values of a type do not."""
    return varies_over(jax.typeof(array)) - varies_over(type_)


def on_all_devices(is_: Array) -> Array:
    """Whether it is True on all devices of a `jax.shard_map` over which it varies."""
    axes = tuple(sorted(varies_over(jax.typeof(is_))))
    return lax.pmin(is_.astype(jnp.int32), axes) > 0 if axes else is_


def read(stacked: PyTree, index: Index) -> PyTree:
    """The entry at `index` of every array of a tree, on the device."""

    def entry(stack: Array) -> Array:
        # These two have no gather, to which JAX's `jax.vmap` of a slice would lead.
        if is_on_host(stack) or jax.sharding.get_abstract_mesh().explicit_axes:
            return _entry_of(0)(stack, jnp.asarray(index))
        return slice_of(stack, index, 0)

    return on_device(jax.tree.map(entry, stacked))


def slice_of(stack: Array, index: Index, axis: int) -> Array:
    # Not `lax.dynamic_index_in_dim`, a `jax.jit` that is traced anew for each type.
    entry = lax.dynamic_slice_in_dim(
        stack, index, 1, axis, allow_negative_indices=False
    )
    return lax.squeeze(entry, (axis,))


@functools.cache
def _entry_of(axis: int) -> Callable[[Array, Array], Array]:
    """`slice_of` with a rule for `jax.vmap`, whose own would make a gather: host memory
    and some shardings have no gather.
    """
    mapped = jax.custom_batching.custom_vmap(functools.partial(slice_of, axis=axis))

    @mapped.def_vmap
    def _(
        _: int, is_mapped: list[bool], stack: Array, index: Array
    ) -> tuple[Array, bool]:
        if is_mapped[1]:
            # Examples read different entries: a gather after all.
            dims = [0 if is_ else None for is_ in is_mapped]
            return jax.vmap(functools.partial(slice_of, axis=axis), dims)(
                stack, index
            ), True
        return _entry_of(axis + 1)(stack, index), True

    # JAX's derivative of a `custom_vmap` has a gather where the tangents alone are
    # mapped. The tangents are read as the stack is.
    entry = jax.custom_jvp(mapped)

    @entry.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
        stack, index = primals
        tangent, _ = tangents
        return entry(stack, index), entry(tangent, index)

    return entry


def read_layer(
    stacks: list[Array],
    index: Index,
    unsliced: Sequence[bool],
    ahead: Sequence[Array] = (),
    is_ahead: Sequence[bool] = (),
) -> list[Array]:
    """A layer's part of each stack, the whole where unsliced.

    `ahead` has the entries of the stacks in the mask `is_ahead`, where they were read
    before.
    """
    entries = iter(ahead)
    parts = []
    for place, stack in enumerate(stacks):
        if unsliced[place]:
            part = stack
        elif ahead and is_ahead[place]:
            part = next(entries)
        else:
            part = read(stack, index)
        parts.append(part)
    return parts


def entry_types(stacks: list[Array], unsliced: Sequence[bool]) -> list[ShapedArray]:
    """The types of what `read_layer` returns; of stacks without layers too."""
    types = []
    for stack, is_whole in zip(stacks, unsliced, strict=True):
        if is_whole:
            types.append(jax.typeof(at_least_one(stack)))
        else:
            entry = mapped_aval(stack.shape[0], 0, jax.typeof(stack))
            types.append(entry.update(memory_space=jax.memory.Space.Device))
    return types


def at_least_one(stack: Array) -> Array:
    """The stack, or zeros of one layer if it has none: a layer is traced even if there
    are none to run.
    """
    if stack.shape[0]:
        return stack
    of_one = jax.typeof(stack).update(shape=(1, *stack.shape[1:]))
    return zeros_of(of_one)


def write(stacked: PyTree, index: Index, entry: PyTree) -> PyTree:
    """Replace the entry at `index` of every array of a tree; in place, in a compiled
    loop.
    """

    def replaced(stack: Array, new: Array) -> Array:
        if is_on_host(stack):
            new = with_tangents(to_host(new), stack)
        return lax.dynamic_update_slice_in_dim(
            stack, lax.expand_dims(new, (0,)), index, 0, allow_negative_indices=False
        )

    return jax.tree.map(replaced, stacked, entry)
