"""Tensors of a checkpoint, of layers, of experts or fused, in and out of the stacked
arrays of a model.

A `TensorMap` lists the tensors of one array of the model. From these follow what a
checkpoint must have, what is written, and how the array is filled on its devices
without ever being on the host as a whole.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, DTypeLike, Shaped

from models.hf_io.safetensors_folder import Pending, SafetensorsFolder, WeightsError
from stacked_remat._messages import entry_problems, float_problems, shortened

Tensor: TypeAlias = Shaped[np.ndarray, "..."]


@dataclass(frozen=True)
class ExpertsTensor:
    """A tensor that holds the matrices of all experts of a layer.

    Attributes:
        name: of the tensor, in place of the one that a linear map of one expert would
            have.
        transposed: whether its matrices are `[in, out]`, where those of the model are
            `[out, in]`.
        swapped: whether PEFT takes their inputs for outputs, as it does of matrices
            `[in, out]` unless transformers says that they are.
        interleaved: whether the outputs of linear maps that are in it alternate, rather
            than being one after the other.
    """

    name: str
    transposed: bool = False
    interleaved: bool = False
    swapped: bool = False


@dataclass(frozen=True)
class HeadsTensor:
    """A tensor that holds several linear maps head by head: of each head the outputs of
    all of them.

    Attributes:
        name: of the tensor.
        head_axes: how many of the first output axes of a map are its heads.
    """

    name: str
    head_axes: int = 1


@dataclass(frozen=True)
class TensorMap:
    """One array of a model and the tensors of a checkpoint that it holds.

    Attributes:
        path: of the array in the model, for messages.
        name: of the tensors, with a `{}` for the index along each of the first stacking
            axes. The tensors themselves have the other stacking axes.
        stacked: sizes of the stacking axes, which come first in the array; empty if a
            tensor is the array.
        tensor_shape: the shape of each tensor in the checkpoint.
        layer_shape: the shape of one entry along the stacking axes, in the array.
        layers: the numbers along the first stacking axis in the names; None for 0, 1,
            ….
        outputs: which outputs of the tensor's matrix are of this array; None for all.
        transposed: whether that matrix is `[in, out]`, and that of the model `[out,
            in]`.
        blocks: into how many blocks its rows are cut, as many as it has heads;
            `outputs` are of each block.
    """

    path: str
    name: str
    stacked: tuple[int, ...]
    tensor_shape: tuple[int, ...]
    layer_shape: tuple[int, ...]
    layers: tuple[int, ...] | None = None
    outputs: slice | None = None
    transposed: bool = False
    blocks: int = 1

    def __post_init__(self) -> None:
        matrix = np.broadcast_to(np.int8(0), self.matrix_shape)
        assert self.part(matrix).size == math.prod(self.layer_shape), self.path

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of the part of a tensor that has one entry along the stacking
        axes.
        """
        return self.tensor_shape[len(self.stacked) - self.name.count("{}") :]

    def part(self, matrix: Tensor) -> Tensor:
        """The view of a matrix that is of this array, as the model has it."""
        if self.transposed:
            return np.swapaxes(matrix[..., self.outputs or slice(None)], -1, -2)
        rows = matrix.reshape(self.blocks, -1, *matrix.shape[1:])
        return rows[:, self.outputs or slice(None)]

    def numbered(self) -> Iterator[tuple[tuple[int, ...], str, tuple[int, ...]]]:
        """For every entry: its index along the stacking axes, the name of its tensor,
        its index in that.

        The last axis runs fastest.
        """
        outer = self.name.count("{}")
        for at in itertools.product(*map(range, self.stacked)):
            numbers = (
                at[:outer]
                if self.layers is None
                else (self.layers[at[0]], *at[1:outer])
            )
            yield at, self.name.format(*numbers), at[outer:]


Read: TypeAlias = Callable[[str, tuple[int, ...]], Tensor]
"""(name of a tensor, indices of its first axes) to that part of the tensor."""


def check_tensors(maps: Sequence[TensorMap], folder: SafetensorsFolder) -> None:
    """Raises WeightsError for a checkpoint without exactly the tensors of a model, all
    of them floats.
    """
    expected = {
        name: list(one.tensor_shape) for one in maps for _, name, _ in one.numbered()
    }
    problems = entry_problems(
        expected, {name: list(shape) for name, shape in folder.shapes.items()}
    )
    # Integers would be cast without a word.
    problems += float_problems(
        {name: folder.dtypes[name] for name in expected if name in folder.shapes}
    )
    if problems:
        raise WeightsError(
            f"The tensors in {folder.root} are not those of this model; {len(problems)}"
            " differ. Check that the model's config is the checkpoint's own.\n  "
            + shortened(problems, "\n  ")
        )


def read_array(
    one: TensorMap, read: Read, dtype: DTypeLike, sharding: Sharding
) -> Shaped[Array, "..."]:
    """Makes one array of a model from its tensors, in place on the devices that this
    process addresses.

    Args:
        dtype: of the array; tensors are cast on the device.

    Returns:
        The array, of shape `(*one.stacked, *one.layer_shape)`.

    Cost: one entry in host memory, or of a tensor of all experts the matrix of one, and
    on each device one part of it besides the array.
    """
    shape = (*one.stacked, *one.layer_shape)
    dtype = jnp.dtype(dtype)
    shards: list[_Shard] = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        ranges = tuple(
            range(size)[part] for part, size in zip(index or (), shape, strict=True)
        )
        place = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        # From NumPy, whose zeros take no memory before they are written: on a device
        # they might not fit.
        shards.append(
            _Shard(jax.device_put(np.zeros([*map(len, ranges)], dtype), place), ranges)
        )
    with jax.set_mesh(
        None
    ):  # each shard is an array of one device, also where the caller uses a mesh
        for position, name, inside in one.numbered():
            # Other processes read for their own devices.
            holders = [shard for shard in shards if shard.holds(position)]
            if holders:
                tensor = one.part(read(name, inside)).reshape(one.layer_shape)
                for shard in holders:
                    shard.put(position, tensor)
                # Or tensors accumulate on the host
                jax.block_until_ready([shard.array for shard in holders])
                del tensor  # before the next one is read
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [shard.array for shard in shards]
    )


class EntriesInFiles:
    """The entries of one array of a model by their number, read from the files of a
    folder when they are asked for.

    Raises WeightsError for a file that has changed since this was made: what was read
    before would be of other weights.
    """

    def __init__(self, one: TensorMap, folder: SafetensorsFolder, dtype: DTypeLike):
        self._map = one
        self._folder = folder
        self._dtype = dtype
        self._entries = [(name, inside) for _, name, inside in one.numbered()]
        self._stamps = {path: _stamp(path) for path in folder.paths}

    def __call__(self, number: int) -> Tensor:
        """An entry, a view of the file where its dtype is that of the array."""
        for path, stamp in self._stamps.items():
            if _stamp(path) != stamp:
                raise WeightsError(
                    f"{path} has changed since its weights began to be read. Leave it"
                    " as it is while a program runs, and start again."
                )
        name, inside = self._entries[number]
        tensor = self._map.part(self._folder.read(name, inside))
        return tensor.reshape(self._map.layer_shape).astype(self._dtype, copy=False)


def _stamp(path: Path) -> tuple[int, int] | None:
    """What differs once a file is written again; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def pending_tensors(
    arrays: Iterable[tuple[TensorMap, Shaped[Array, "..."]]],
) -> dict[str, Pending]:
    """The tensors of the arrays of a model by name, each made only when it is
    written.
    """
    # By tensor: several arrays may have parts of one.
    entries: dict[
        str, list[tuple[TensorMap, Array, tuple[int, ...], tuple[int, ...]]]
    ] = {}
    for one, array in arrays:
        for position, name, inside in one.numbered():
            entries.setdefault(name, []).append((one, array, position, inside))

    def made(name: str) -> Tensor:
        (one, array, *_), *_ = entries[name]
        tensor = np.empty(one.tensor_shape, array.dtype)
        for one, array, position, inside in entries[name]:
            view = one.part(tensor[inside])
            view[...] = _one(array, position).reshape(view.shape)
        return tensor

    return {
        name: Pending(
            math.prod(one.tensor_shape) * array.dtype.itemsize, partial(made, name)
        )
        for name, ((one, array, *_), *_) in entries.items()
    }


@dataclass
class _Shard:
    """One device's part of an array that is being filled."""

    array: Any
    ranges: tuple[range, ...]

    def holds(self, position: tuple[int, ...]) -> bool:
        return all(at in own for at, own in zip(position, self.ranges, strict=False))

    def put(self, position: tuple[int, ...], tensor: Tensor) -> None:
        part = tensor[
            tuple(slice(own.start, own.stop) for own in self.ranges[len(position) :])
        ]
        at = [at - own.start for at, own in zip(position, self.ranges, strict=False)]
        device = self.array.sharding.with_memory_kind("device")
        self.array = _put(
            self.array, part, jax.device_put(np.array(at, np.int32), device)
        )


@jax.jit(donate_argnums=0)
def _put(array: Array, part: Array, one: Array) -> Array:
    new = part.astype(array.dtype).reshape((1,) * one.size + part.shape)
    # An array on the host is written there.
    new = jax.device_put(new, jax.typeof(array).memory_space)
    zero = jnp.zeros((), one.dtype)
    return lax.dynamic_update_slice(array, new, [*one, *[zero] * part.ndim])


@jax.jit
def _take(array: Array, one: Array) -> Array:
    # Indices are traced, so that all layers have one program.
    for index in one:
        array = lax.dynamic_index_in_dim(array, index, keepdims=False)
    return array


def _one(array: Array, position: tuple[int, ...]) -> Tensor:
    # One layer or expert at a time comes to the host.
    return np.asarray(
        _take(array, jnp.asarray(position, jnp.int32)) if position else array
    )
