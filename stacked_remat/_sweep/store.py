"""Stacks of arrays, one entry per layer, in device or host memory.

The memory of a stack is part of its type. Entries are read to the device and written back to the stack's
memory, so the loops of a sweep are the same for both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from .._placement import has_host_arrays, is_on_host, on_device, platform, to_host
from .._trips import known_trips


def empty_stack(entry: Any, size: int) -> Any:
    """Stacks of zeros for `size` entries like the given one, in its memory: arrays, or their types."""

    def stack(leaf: Any) -> Array:
        if isinstance(leaf, jax.Array):
            return jnp.broadcast_to(jnp.zeros_like(leaf), (size, *leaf.shape))
        struct = jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype)
        if getattr(leaf, "memory_space", None) == jax.memory.Space.Host:
            return full_on_host(struct, 0)
        zeros, found = jnp.zeros_like(struct), leaf.manual_axis_type
        return lax.pcast(zeros, tuple(sorted(found.varying)), to="varying") if found else zeros

    return jax.tree.map(stack, entry)


def empty_stack_on_host(entry: Any, size: int) -> Any:
    """The same in host memory."""
    return jax.tree.map(
        lambda leaf: full_on_host(jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), 0), entry
    )


def zeros_like(stack: Array) -> Array:
    """Zeros of the shape of a stack, in the same memory."""
    return full_on_host(stack, 0) if is_on_host(stack) else jnp.zeros_like(stack)


def with_zeros_in_place(leaves: Sequence[Array]) -> list[Array]:
    """The arrays, with all their derivatives. Zero gradients of those on the host are made on the host.

    JAX would make them on the device, where what follows does not read all of the arrays.
    """
    return _with_zeros_in_place.bind(*leaves)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    passed = iter(with_zeros_in_place([t for t in tangents if not isinstance(t, ad.Zero)]))
    found = [t if isinstance(t, ad.Zero) else next(passed) for t in tangents]
    return with_zeros_in_place(primals), found


def _transpose(cotangents: Sequence[Any], *_: Any) -> list[Any]:
    def in_place(ct: Any) -> Any:
        aval: Any = ct.aval
        is_zero = isinstance(ct, ad.Zero) and aval.memory_space == jax.memory.Space.Host
        return full_on_host(aval, 0) if is_zero else ct

    return list(map(in_place, cotangents))


_with_zeros_in_place = Primitive("with_zeros_in_place")
_with_zeros_in_place.multiple_results = True
_with_zeros_in_place.def_impl(lambda *leaves: list(leaves))
_with_zeros_in_place.def_abstract_eval(lambda *leaves: list(leaves))
ad.primitive_jvps[_with_zeros_in_place] = _jvp
ad.primitive_transposes[_with_zeros_in_place] = _transpose
batching.primitive_batchers[_with_zeros_in_place] = lambda leaves, dims: (with_zeros_in_place(leaves), dims)
mlir.register_lowering(_with_zeros_in_place, lambda _, *leaves: list(leaves))


def zeros_after(done: Any, like: Any) -> Any:
    """Zeros of these shapes and types, sharded as these are, made once the arrays of `done` are there.

    XLA fills the buffers of a loop early otherwise, and holds them while what the loop reads is computed.
    """
    _, zero = lax.optimization_barrier(varying_alike((done, jnp.zeros((), jnp.int32))))

    def zeros(leaf: Any) -> Array:
        is_sharded = isinstance(leaf, ShapedArray) and any(leaf.sharding.spec)
        sharding = leaf.sharding if is_sharded else None
        return jnp.broadcast_to(zero.astype(leaf.dtype), leaf.shape, out_sharding=sharding)

    return jax.tree.map(zeros, like)


def varying_alike(arrays: Any) -> Any:
    """The arrays, all varying over the axes of a `jax.shard_map` over which some of them vary."""

    def varies_over(leaf: Any) -> frozenset[str]:
        return frozenset(jax.typeof(leaf).manual_axis_type.varying)

    every = frozenset[str]().union(*(varies_over(leaf) for leaf in jax.tree.leaves(arrays)))

    def vary(leaf: Any) -> Any:
        missing = tuple(sorted(every - varies_over(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, arrays)


def full_on_host(like: Any, value: int) -> Array:
    """An array in host memory that is `value` everywhere, of the shape and dtype of `like`."""
    if not like.shape:
        return to_host(jnp.full((), value, like.dtype))
    # A scan stacks on the host one entry at a time; the whole stack would be made on the device.
    entry = jnp.full(like.shape[1:], value, like.dtype)
    return lax.scan(lambda carry, _: (carry, to_host(entry)), None, None, length=like.shape[0])[1]


def read(stacked: Any, index: Any, length: int = 1) -> Any:
    """The entry at `index` of every array of a tree, on the device.

    With a `length` above 1 the arrays count as cut into parts of so many entries, and it is the part at
    `index`, entries in front.
    """

    def entry(stack: Array) -> Array:
        if length == 1:
            return lax.dynamic_index_in_dim(stack, index, keepdims=False)
        return lax.dynamic_slice_in_dim(stack, index * length, length)

    return on_device(jax.tree.map(entry, stacked))


def read_layer(
    stacks: list[Array], index: Any, unsliced: Sequence[bool], ahead: Sequence[Array] = (), length: int = 1
) -> list[Array]:
    """A layer's part of each stack: its entry, or the whole stack where it is unsliced.

    `ahead` has the entries of the stacks on the host, if `read_ahead` has read them; `length` as in `read`.
    """
    entries = iter(ahead)

    def part(stack: Array, whole: bool) -> Array:
        if whole:
            return stack
        return next(entries) if ahead and is_on_host(stack) else read(stack, index, length)

    return [part(stack, whole) for stack, whole in zip(stacks, unsliced, strict=True)]


def read_ahead(stacks: list[Array], index: Any, length: int = 1) -> list[Array]:
    """The entries at `index` of the stacks on the host, for `read_layer` an iteration later.

    In the carry of a loop they are transferred while the iteration before computes. On a CPU nothing is
    transferred.
    """
    return [read(stack, index, length) for stack in stacks if platform() != "cpu" and is_on_host(stack)]


def settle(fetched: list[Array], index: Any) -> tuple[list[Array], Any]:
    """What was read ahead, and the layer's index, from which the next one that is to be read is computed.

    A loop's carry has one buffer, and XLA would begin the next transfer into it only after the last use of
    what is there; so that is first copied to another buffer, in a way that XLA does not remove.
    """
    if not fetched:
        return fetched, index
    return lax.optimization_barrier(
        ([jnp.where(index >= 0, leaf, jnp.zeros_like(leaf)) for leaf in fetched], index)
    )


def read_before_writes(ahead: list[Array], state: Any) -> tuple[list[Array], Any]:
    """What was read ahead, and a state whose stacks on the host may now be written.

    Where XLA would otherwise copy a stack that is read and written in one iteration (for GPUs, and in loops
    within the iteration), or begin to read too late.
    """
    if ahead and has_host_arrays(state):
        return lax.optimization_barrier((ahead, state))
    return ahead, state


def apart_from_transfers(compute: Callable[[], Any]) -> Any:
    """The arrays that `compute` returns, in the body of a loop that XLA does not know to run once.

    XLA for GPUs reorders what is computed beside transfers, and then holds more of it at a time.
    """
    zeros = jax.tree.map(lambda type_: jnp.zeros(type_.shape, type_.dtype), jax.eval_shape(compute))
    once = lax.optimization_barrier(jnp.int32(1))
    with known_trips(1):
        return lax.fori_loop(0, once, lambda *_: compute(), zeros)


def at_least_one(stack: Array) -> Array:
    """The stack, or zeros of one layer if it has none: a layer is traced even if there are none to run."""
    if len(stack):
        return stack
    one = jax.ShapeDtypeStruct((1, *stack.shape[1:]), stack.dtype)
    # JAX can't make zeros on the host in another shape than the array that they are like.
    return full_on_host(one, 0) if is_on_host(stack) else jnp.zeros_like(stack, shape=one.shape)


def write(stacked: Any, index: Any, entry: Any) -> Any:
    """Replace the entry at `index` of every array of a tree; in place, in a compiled loop."""

    def replaced(stack: Array, new: Array) -> Array:
        moved = to_host(new) if is_on_host(stack) else new
        return lax.dynamic_update_index_in_dim(stack, moved, index, 0)

    return jax.tree.map(replaced, stacked, entry)
