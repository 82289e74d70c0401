"""The arrays of a training state by name, their layouts and their digests."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from haliax.util import is_named_array
from jaxtyping import Array

from .. import streaming
from .._memory_spaces import is_on_host, on_one_device, to_device
from .._messages import entry_problems
from .._scan.marks import raw_array

State = TypeVar("State")

_ROWS_AT_ONCE = 4_096
"""Rows of an array in a file that are read at once for its digest: some MiB."""


def arrays_by_name(tree: Any) -> dict[str, Any]:
    """The arrays (or `jax.ShapeDtypeStruct`s) of a tree by path: `trained.head.weight`.

    The array of a `NamedArray` has the path of the latter.
    """
    return {name: raw_array(leaf) for name, leaf in _leaves(tree)}


def layout(tree: Any) -> dict[str, dict[str, Any]]:
    """The shape and dtype of each array, and the names of its axes if it has any, as
    JSON.
    """
    entries: dict[str, dict[str, Any]] = {}
    for name, leaf in _leaves(tree):
        array = raw_array(leaf)
        entries[name] = {"shape": list(array.shape), "dtype": str(array.dtype)}
        if isinstance(leaf, NamedArray):
            entries[name]["axes"] = [axis.name for axis in leaf.axes]
    return entries


def differences(
    saved: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """One line for each array that a checkpoint lacks, has in excess, or has in another
    layout.
    """
    here, there = (
        {name: _shown(entry) for name, entry in entries.items()}
        for entries in (wanted, saved)
    )
    return entry_problems(here, there)


def with_arrays(like: State, arrays: Mapping[str, Any]) -> State:
    """`like` with its arrays of these names replaced."""

    def replace(path: tuple[Any, ...], leaf: Any) -> Any:
        found = arrays.get(_name(path), leaf)
        # The axes of a named array may not be those of the array.
        return leaf if found is leaf else jax.tree.map(lambda _: found, leaf)

    return jax.tree_util.tree_map_with_path(replace, like, is_leaf=is_named_array)


def sharding_of(like: Any) -> jax.sharding.Sharding:
    """The sharding of an array or a shape with which it is made again; on the default
    device if it has none.
    """
    found = getattr(like, "sharding", None)
    if found is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if not is_on_host(like) or len(found.device_set) > 1:
        return found
    # Of an array that is made with `SingleDeviceSharding`, JAX (0.10.2) takes the
    # device for its memory, and a program that returns such arrays ends the process.
    (device,) = found.device_set
    return on_one_device(device, found.memory_kind)


def digests(tree: Any) -> dict[str, list[int]]:
    """Two numbers for each array by name, which almost surely differ if the bits of two
    arrays do.

    They depend on the bits of every element and on its index, so elements that change
    places, and changes that cancel in a sum of bits, are noticed. They are the same
    under every sharding. Arrays of one shape collide with a probability of about
    2**-64. Without `jax_enable_x64`, NumPy's numbers of 64 bits count as those of 32
    that JAX makes of them, as which checkpoints are restored.

    Those of arrays in files (`streaming.from_files`) are those of the arrays.

    Cost: one pass over the arrays on their devices, without a copy; files are read, an
    entry or some rows at a time.
    """
    found = {}
    for name, leaf in _leaves(tree, streaming.is_in_files):
        in_files = streaming.is_in_files(leaf)
        digest = _digest_of_files(leaf) if in_files else _digest(raw_array(leaf))
        found[name] = [int(number) for number in digest]
    return found


def _digest_of_files(array: streaming.ArrayInFiles) -> tuple[Array, Array]:
    totals = jnp.uint32(0), jnp.uint32(0)
    for first, part in _parts_of_files(array):
        sums = _digest_of_part(part, first)
        totals = totals[0] + sums[0], totals[1] + sums[1]
    return totals


def _parts_of_files(
    array: streaming.ArrayInFiles,
) -> Iterator[tuple[int, np.ndarray]]:
    """The parts of an array along its first axis, and where each begins."""
    numbers = np.asarray(raw_array(array.numbers))
    if numbers.ndim == 0:
        entry = array.read(int(numbers))
        for first in range(0, len(entry), _ROWS_AT_ONCE):
            yield first, np.asarray(entry[first : first + _ROWS_AT_ONCE])
        return
    for index, of_index in enumerate(numbers):
        entries = [array.read(int(number)) for number in of_index.reshape(-1)]
        shape = (1, *of_index.shape, *array.entry.shape)
        yield index, np.stack(entries).reshape(shape)


@jax.jit
def _digest_of_part(part: Array, first: Array) -> tuple[Array, Array]:
    return _sums_of_hashes(_words(part), first)


@jax.jit
def _digest(array: Array) -> tuple[Array, Array]:
    """Two sums of hashes of the elements, modulo 2**32: a sum of integers is the same
    in any order.
    """
    # An array in host memory goes through the device entry by entry: whole it might not
    # fit there.
    if not is_on_host(array):
        return _sums_of_hashes(_words(array))

    def add(
        totals: tuple[Array, Array], index: Array
    ) -> tuple[tuple[Array, Array], None]:
        entry = to_device(jax.lax.dynamic_slice_in_dim(array, index, 1))
        sums = _sums_of_hashes(_words(entry), first=index)
        return (totals[0] + sums[0], totals[1] + sums[1]), None

    if array.ndim == 0:
        return _sums_of_hashes(_words(to_device(array)))
    return jax.lax.scan(add, (jnp.uint32(0), jnp.uint32(0)), jnp.arange(len(array)))[0]


def _words(array: Array) -> Array:
    """The bits of an array as uint32; wider elements have a last axis of words."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    # Keys and bools have no bits of their own for a bitcast.
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    about = jnp.finfo if jnp.issubdtype(array.dtype, jnp.floating) else jnp.iinfo
    width = min(about(array.dtype).bits, 32)  # fewer than 8 in int4
    return jax.lax.bitcast_convert_type(array, f"uint{width}").astype(jnp.uint32)


def _sums_of_hashes(words: Array, first: Array | int = 0) -> tuple[Array, Array]:
    """For two hash functions, the sum of the hashes of all words, each with its index.

    `first` is the index of the first entry along the first axis in the whole array.
    """
    # Two numbers are the index of a word, since an array may have more than 2**32 of
    # them; an entry has not.
    entry = jnp.asarray(first, jnp.uint32)
    within = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        if axis == 0:
            entry = entry + index
        else:
            within = within * jnp.uint32(size % 2**32) + index
    sums = []
    for seed in _SEEDS:
        # Mixed with the index, so that two elements that change places are noticed;
        # mixed before and after, so that changes of one bit don't cancel in the sum.
        place = _mixed(_mixed(entry + jnp.uint32(seed)) + within)
        hashes = _mixed((words * jnp.uint32(seed)) ^ place)
        sums.append(jnp.sum(hashes, dtype=jnp.uint32))
    return sums[0], sums[1]


_SEEDS = (0x9E3779B1, 0x85EBCA77)  # any two odd numbers


def _mixed(x: Array) -> Array:
    """A permutation of uint32 that changes half of the bits for any change
    (MurmurHash3's finalizer).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _leaves(
    tree: Any, is_in_files: Callable[[Any], bool] = lambda node: False
) -> Iterator[tuple[str, Any]]:
    """The arrays of a tree, named or not, with their names; and what `is_in_files`."""

    def is_leaf(node: Any) -> bool:
        return is_named_array(node) or is_in_files(node)

    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        # A part of a state has None in the places of the arrays of other parts.
        array = leaf.numbers if is_in_files(leaf) else leaf
        if isinstance(raw_array(array), jax.Array | jax.ShapeDtypeStruct | np.ndarray):
            yield _name(path), leaf


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _shown(entry: Mapping[str, Any]) -> str:
    axes = [f"{name} " for name in entry.get("axes", ())] or [""] * len(entry["shape"])
    sizes = (f"{name}{size}" for name, size in zip(axes, entry["shape"], strict=True))
    return f"{entry['dtype']}[{', '.join(sizes)}]"
