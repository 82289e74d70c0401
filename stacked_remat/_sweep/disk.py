"""The carries of a sweep in files, as operations of its loops.

    open_file   before the forward sweep: a ticket, an array that stands for a file
    write       each carry that is kept; returns the ticket, a carry of the loop
    read        in the reverse sweep, from the last carry that was written to the first

They are primitives that call back to `_carry_files.py`. What orders them is the ticket,
which each loop carries, so a sweep waits for its own files alone. JAX drops writes
whose ticket nothing reads, as where a gradient is not used.
"""

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.interpreters import ad, batching
from jaxtyping import Array

from .. import _carry_files as files
from .._memory_spaces import compiled_for, on_several_devices
from .._python_calls import Caller, python_call
from .._static import PyTree
from .slots import Carry
from .store import Index


def check(folder: str, inputs: PyTree) -> None:
    """Refuse a sweep over these inputs whose carries can't be in files of a folder."""
    if on_several_devices(inputs):
        raise _CALLER.several_devices("several")
    # A program for another machine finds its folder there.
    if compiled_for.value is None:
        # Now, and not in the middle of a program: is there a folder to write to?
        files.open_nameless(folder).close()


def open_file(folder: str, inputs: PyTree) -> Array:
    """The ticket of a file for the carries of a forward sweep of these inputs.

    If some of the inputs are mapped (`jax.vmap`), so is the ticket.
    """
    # The inputs are arguments so that `jax.vmap` is seen, and each call of a loop has a
    # file of its own.
    (ticket,) = _open_p.bind(*jax.tree.leaves(inputs), folder=folder, shape=())
    return ticket


def write(ticket: Array, place: Index, carry: Carry) -> Array:
    """Write a carry to its place, and return the ticket, to be used from here on."""
    raw = [*map(_raw, carry)]
    (ticket,) = _write_p.bind(ticket, jnp.asarray(place, jnp.int32), *raw)
    return ticket


def read(ticket: Array, place: Index, types: Sequence[Any]) -> Carry:
    """Read the carry of a place, of these types. Place 0 is read last."""
    raw_types = []
    for type_ in types:
        raw = jax.eval_shape(_raw, type_)
        raw_types.append(ShapedArray(raw.shape, raw.dtype))
    place = jnp.asarray(place, jnp.int32)
    leaves = _read_p.bind(ticket, place, types=tuple(raw_types))
    return [*map(_as_typed, leaves, types)]


def keep_until_garbage(tickets: Sequence[Any]) -> None:
    """Outside of a trace, keep files for as long as the arrays of their tickets
    live.
    """
    for ticket in tickets:
        if not isinstance(ticket, Tracer):
            files.keep_until_garbage(ticket)


def _is_key(type_: Any) -> bool:
    return jnp.issubdtype(type_.dtype, jax.dtypes.prng_key)


def _raw(leaf: Array) -> Array:
    """A leaf of a carry as numbers, which a key of `jax.random` is not."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_typed(leaf: Array, type_: Any) -> Array:
    if not _is_key(type_):
        return leaf
    implementation = jax.random.key_impl(jnp.empty((), type_.dtype))
    return jax.random.wrap_key_data(leaf, impl=implementation)


# Callbacks: arrays of NumPy and parameters in, a sequence of arrays out


def _opened(*, folder: str, shape: tuple[int, ...]) -> Sequence[np.ndarray]:
    return [files.open_file(folder, shape)]


def _written(
    ticket: np.ndarray, place: np.ndarray, *leaves: np.ndarray
) -> Sequence[np.ndarray]:
    files.write(ticket, int(place), leaves)
    return [ticket]


def _was_read(
    ticket: np.ndarray, place: np.ndarray, *, types: tuple[ShapedArray, ...]
) -> Sequence[np.ndarray]:
    return files.read(ticket, int(place), types)


_CALLER = Caller(
    'save_carries="disk"',
    'Use save_carries="offload", or "nested".',
    'save_carries="offload" and leave out the host\'s bytes',
)

_open_p = python_call(
    "open_carry_file",
    _opened,
    lambda *_, folder, shape: [ShapedArray(shape, jnp.int32)],
    _CALLER,
    takes_arrays=False,
)
_write_p = python_call(
    "write_carry", _written, lambda ticket, place, *leaves: [ticket], _CALLER
)
_read_p = python_call(
    "read_carry", _was_read, lambda ticket, place, types: [*types], _CALLER
)


def _refused_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> NoReturn:
    # JAX calls it only where some tangent is not zero.
    raise TypeError(
        'With save_carries="disk", the derivative of a gradient has no forward mode'
        " (jax.jvp, jax.jacfwd, jax.hessian). Use reverse mode (jax.grad of jax.grad),"
        ' or another policy ("nested").'
    )


def _without_tangents(
    primitive: Any, primals: Any, tangents: Any, **params: Any
) -> Any:
    """For results that are integers, or without a tangent by `_refused_jvp`."""
    results = primitive.bind(*primals, **params)
    zeros = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    return results, zeros


def _batched_open(args: Any, dims: Any, *, folder: str, shape: Any) -> Any:
    """A ticket for each example: the first axis of the ticket is the batch."""
    # `jax.vmap` gives one size to all that it maps.
    sizes = set()
    for arg, dim in zip(args, dims, strict=True):
        if dim is not None:
            sizes.add(arg.shape[dim])
    (size,) = sizes
    return _open_p.bind(*args, folder=folder, shape=(size, *shape)), [0]


def _batched_write(args: Any, dims: Any) -> Any:
    ticket, place, *leaves = args
    ticket_dim, place_dim, *leaf_dims = dims
    if ticket_dim is None or place_dim is not None:
        raise NotImplementedError(
            'save_carries="disk" does not support a jax.vmap in which carries differ'
            " between examples though nothing that the layers are given does. Use"
            ' another policy ("nested").'
        )
    size = ticket.shape[ticket_dim]
    ticket = jnp.moveaxis(ticket, ticket_dim, 0)
    mapped = []
    for leaf, dim in zip(leaves, leaf_dims, strict=True):
        mapped.append(batching.bdim_at_front(leaf, dim, size))
    return _write_p.bind(ticket, place, *mapped), [0]


def _batched_read(args: Any, dims: Any, *, types: tuple[ShapedArray, ...]) -> Any:
    # All examples are at one place of their own file.
    ticket, place = args
    ticket = jnp.moveaxis(ticket, dims[0], 0)
    size = ticket.shape[0]
    types = tuple(type_.update(shape=(size, *type_.shape)) for type_ in types)
    return _read_p.bind(ticket, place, types=types), [0] * len(types)


ad.primitive_jvps[_open_p] = functools.partial(_without_tangents, _open_p)
ad.primitive_jvps[_write_p] = _refused_jvp
ad.primitive_jvps[_read_p] = functools.partial(_without_tangents, _read_p)
batching.primitive_batchers[_open_p] = _batched_open
batching.primitive_batchers[_write_p] = _batched_write
batching.primitive_batchers[_read_p] = _batched_read
