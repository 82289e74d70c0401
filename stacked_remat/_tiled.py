"""`tiled`: a function applied tile by tile along an axis, so that its internals exist
for one tile at a time.

An MLP treats the positions of a sequence independently of each other, so it may be
applied to a part of them at a time: a *tile*. The loop over tiles is in `_tiles.py`,
on lists of arrays. Here the arguments are taken apart, and the function is traced
twice, for all positions and for one tile, to see whether the results of tiles are parts
of the whole one. The method is that of ALST (Bekman et al. 2025).
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.axis import AxisSelector
from haliax.partitioning import physical_axis_name, physical_axis_size
from jax.extend.core import ClosedJaxpr

from ._checkpoint import checkpoint, saving_internals
from ._scan.arguments import argument_namer, is_unsplit_key
from ._scan.checks import describe
from ._scan.marks import Entry, is_array, is_named, raw_array, take_marks_off
from ._schedule import whole_number
from ._static import PyTree, Static, with_leaves
from ._sweep.store import varying_alike
from ._tiles import Cut, Dims, Tiling, run_tiles


def tiled(
    fn: Callable[..., Any],
    axis: AxisSelector | int,
    *,
    tiles: int,
    reduce: Literal["sum"] | None = None,
) -> Callable[..., Any]:
    """Apply `fn` tile by tile along an axis; backward, each tile is computed again, one
    after the other.

    ```python
    # y = mlp(x), with the internals of an eighth of it.
    y = tiled(mlp, Pos, tiles=8)(x)
    # The same along a dimension of plain arrays.
    y = tiled(lambda x: jax.vmap(mlp)(x), 0, tiles=8)(x)
    loss = tiled(sum_of_losses, Pos, tiles=32, reduce="sum")(hidden, targets)
    ```

    Equals `fn` for a function that treats positions along the axis independently of
    each other, as an MLP, a norm, a projection or a loss does; with `reduce="sum"`, for
    a function that sums over the axis.

    Args:
        fn: a function or a module, of arguments of any kind. Arrays that it closes
            over, and the arrays of a module, are shared by all tiles, and have
            gradients.
        axis: a named axis or its name: arguments that have it are split, everything
            else is shared. Or a dimension of plain arrays: every plain array in the
            arguments is split along it, except in `stacked_remat.shared(...)`.
        tiles: how many, all of `ceil(size / tiles)` positions but the last, which may
            be smaller.
        reduce: `"sum"` adds up outputs that lack the axis over the tiles, in float32;
            with a dimension of plain arrays, all outputs. None refuses them.

    Returns:
        A function of the arguments of `fn`. Outputs have the axis where `fn` gives it
        to them.

    Raises:
        ValueError: nothing to split, arguments of different sizes, a single random key
            that is not marked `shared`, or results of a tile that are not a part of
            those of all positions.

    Cost: `fn` once forward, and in the backward pass once more and its products.
    Memory: arguments, outputs and their cotangents, the gradients of shared arguments
    in float32, and the internals of one tile. A smaller last tile runs by itself, on
    copies of what is split, and the outputs are joined. An axis that Haliax's axis
    mapping divides over devices is cut within each device's part. `fn` is traced for
    all positions too, to compare its results. Random keys in closures and in
    `shared(...)` give every tile the same numbers. All derivatives work, each computed
    tile by tile. The method is that of ALST (Bekman et al. 2025).
    """
    call = _TiledCall.of(fn, axis, tiles, reduce)

    # Not with the `__dict__` of a module, whose fields are no attributes of a function
    @functools.wraps(fn, updated=())
    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return _apply(call, (args, kwargs))

    return run


class _TiledCall(NamedTuple):
    """What a user gave to `tiled`."""

    fn: Callable[..., Any]
    # The name of an axis, or a dimension of plain arrays
    axis: str | int
    # Of the axis; None if the arguments are to tell it
    size: int | None
    # What becomes of outputs that lack the axis; None refuses them
    reduce: Literal["sum"] | None
    # How many tiles the axis is cut into
    tiles: int

    @classmethod
    def of(cls, fn: Any, axis: Any, tiles: Any, reduce: Any) -> "_TiledCall":
        if not callable(fn):
            raise TypeError(
                f"tiled takes a function and then an axis; got {describe(fn)}."
            )
        if reduce not in (None, "sum"):
            raise ValueError(f'reduce must be "sum" or None, got {reduce!r}.')
        is_axis = isinstance(axis, int | str | Axis)
        if not is_axis or isinstance(axis, bool):
            raise TypeError(
                "axis must be a named axis, its name, or a dimension (an int); got"
                f" {axis!r}."
            )
        tiles = whole_number("tiles", tiles, "how many tiles to cut the axis into")
        size = None
        if isinstance(axis, Axis):
            axis, size = axis.name, axis.size
        return cls(fn, axis, size, reduce, tiles)

    def __str__(self) -> str:
        over = (
            f"dimension {self.axis}"
            if isinstance(self.axis, int)
            else f"axis `{self.axis}`"
        )
        return f"tiled over {over}"

    def dimension(self, leaf: Any) -> int | None:
        """The dimension of `leaf` along the axis, or None if it has none."""
        if isinstance(self.axis, int):
            rank = leaf.ndim if is_array(leaf) else 0
            if -rank <= self.axis < rank:
                return self.axis % rank
            return None
        if is_named(leaf):
            return leaf.axis_indices(self.axis)
        return None

    def output(self, leaf: Any) -> int | None:
        """The dimension of an output along the axis, or None for a sum."""
        # A plain array does not tell by its names whether it has the axis
        is_sum = isinstance(self.axis, int) and self.reduce == "sum"
        return None if is_sum else self.dimension(leaf)


def _apply(call: _TiledCall, arguments: PyTree) -> PyTree:
    """The result for the arguments of a call, which may be marked."""
    entries, arguments = take_marks_off(arguments)
    dims = []
    of_arrays = []
    for _, leaf, rule in entries:
        dim = None if rule == "shared" else call.dimension(leaf)
        dims.append(dim)
        if is_array(raw_array(leaf)):
            of_arrays.append(dim)
    size = _common_size(call, entries, dims)
    # By Haliax's mapping of axes; plain arrays have no axis in it
    parts = 1
    if isinstance(call.axis, str) and physical_axis_name(call.axis) is not None:
        parts = physical_axis_size(call.axis) or 1
    if size % parts:  # so the array is not divided over these devices
        parts = 1
    own_positions = size // parts  # positions of one device
    cut = Cut(own_positions, parts, length=-(-own_positions // call.tiles))
    # One tile has all positions
    if cut.size <= cut.length:
        args, kwargs = arguments
        return checkpoint(call.fn)(*args, **kwargs)
    return _by_tile(call, cut, arguments, tuple(of_arrays))


def _by_tile(call: _TiledCall, cut: Cut, arguments: PyTree, dims: Dims) -> PyTree:
    """The result for arguments without marks, of whose arrays the dimensions along the
    axis are given.
    """
    arrays, static = eqx.partition(arguments, is_array)
    leaves, structure = jax.tree.flatten(arrays)
    leaves = varying_alike([*map(jnp.asarray, leaves)])  # in `jax.shard_map`

    def result(arrays: Sequence[PyTree]) -> tuple[PyTree, Static]:
        filled = eqx.combine(jax.tree.unflatten(structure, arrays), static)
        args, kwargs = jax.tree.map(_resized, filled, is_leaf=is_named)
        # A tile is computed again whole, whatever the policies around it keep.
        with saving_internals(()):
            output = call.fn(*args, **kwargs)
        arrays_of_output, rest = eqx.partition(output, is_array)
        return arrays_of_output, Static(rest)

    def by_itself(arrays: Sequence[PyTree]) -> list[PyTree]:
        return jax.tree.leaves(checkpoint(result)(arrays)[0])

    whole, _ = _trace(result, leaves)
    # The types of a tile's arrays, by reading it
    first_tile = jax.make_jaxpr(
        lambda arrays: cut.read_all(arrays, dims, 0, cut.length)
    )
    tile, closed = _trace(result, first_tile(leaves).out_avals)
    _check_part(call, cut, tile, whole)
    outputs = []
    for leaf in jax.tree.leaves(whole, is_leaf=is_named):
        if is_array(raw_array(leaf)):
            outputs.append(call.output(leaf))
    last = cut.size % cut.length
    others = replace(cut, size=cut.size - last)
    # A smaller last tile runs by itself. Its inputs and those of the others are copies.
    inputs = cut.read_all(leaves, dims, 0, others.size) if last else leaves
    if others.size > cut.length:
        results = run_tiles(Tiling.of(others, closed, dims, outputs), inputs)
    else:
        results = by_itself(inputs)
    if last:
        of_last = by_itself(cut.read_all(leaves, dims, others.size, last))
        results = [*map(cut.joined, results, of_last, outputs)]
    types, rest = eqx.partition(whole, is_array)
    return eqx.combine(with_leaves(types, results), rest)


def _trace(
    fn: Callable[..., tuple[PyTree, Static]], types: Sequence[PyTree]
) -> tuple[PyTree, ClosedJaxpr]:
    """The result of `fn` with the types of its arrays, and its jaxpr."""
    closed, (outputs, rest) = jax.make_jaxpr(fn, return_shape=True)(types)
    return eqx.combine(outputs, rest.value), closed


# Unflattened with the array of a tile, a named array has the axes of the whole one.
def _resized(leaf: Any) -> Any:
    """A named array with axes of the sizes of its array; anything else as it is."""
    if not is_named(leaf):
        return leaf
    axes = map(Axis.resize, leaf.axes, leaf.array.shape)
    return NamedArray(leaf.array, tuple(axes))


def _common_size(
    call: _TiledCall, entries: Sequence[Entry], dims: Sequence[int | None]
) -> int:
    """The size along the axis of all arguments that have it."""
    name_of = argument_namer(call.fn, skip=0)
    by_dimension = isinstance(call.axis, int)
    sizes: dict[str, int] = {}
    for (path, leaf, rule), dim in zip(entries, dims, strict=True):
        name = name_of(path)
        # Over a dimension every plain array is split, so one without it may be a
        # mistake
        is_plain = by_dimension and is_array(leaf) and leaf.ndim > 0
        if dim is not None:
            sizes[name] = raw_array(leaf).shape[dim]
        elif rule == "per_layer" or (
            rule == "default" and (is_plain or is_unsplit_key(name, leaf))
        ):
            raise ValueError(
                f"{call}: {name} has the shape {raw_array(leaf).shape} without it. To"
                " give every tile all of it (of a random key: the same numbers), pass"
                f" stacked_remat.shared({name})."
            )
    if not sizes:
        raise ValueError(
            f"{call} was given nothing to split along it. Pass an array that has it"
            " as an argument; what the function closes over is shared by all tiles."
        )
    expected = call.size or next(iter(sizes.values()))
    for name, size in sizes.items():
        if size != expected:
            raise ValueError(
                f"{call} of {expected}: {name} has {size}. Give all the same size, or"
                f" pass it to every tile whole, stacked_remat.shared({name})."
            )
    return expected


def _check_part(call: _TiledCall, cut: Cut, tile: PyTree, whole: PyTree) -> None:
    """Refuse a function whose result for a tile is not a part of that for all
    positions.
    """
    of_tile = _described(call, tile, cut.parts * cut.length)
    of_whole = _described(call, whole, cut.parts * cut.size)
    for in_tile, in_whole in itertools.zip_longest(of_tile, of_whole):
        if in_tile != in_whole:
            raise ValueError(
                f"{call}: {in_tile} for a tile, and {in_whole} for all positions. The"
                " function must treat positions independently of each other; outputs"
                ' that are sums over them need reduce="sum".'
            )


def _described(call: _TiledCall, tree: PyTree, positions: int) -> Iterator[str]:
    """Each leaf of a result for so many positions, in words that are the same for a
    tile and for all positions if the one is a part of the other.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_named):
        array = raw_array(leaf)
        if is_array(array):
            shown = _described_array(call, leaf, positions)
        elif type(leaf) in (bool, int, float, complex, str):
            shown = repr(leaf)
        else:
            shown = "no array"
        yield f"output{jax.tree_util.keystr(path)} is {shown}"


def _described_array(call: _TiledCall, leaf: Any, positions: int) -> str:
    array = raw_array(leaf)
    dim = call.output(leaf)
    sizes = [*map(str, array.shape)]
    if dim is not None:
        other_size = f"{sizes[dim]} of {positions}"
        sizes[dim] = "n" if array.shape[dim] == positions else other_size
    if is_named(leaf):
        names = [f"{axis.name}: " for axis in leaf.axes]
        sizes = map("".join, zip(names, sizes, strict=True))
    shown = f"{array.dtype}[{', '.join(sizes)}]"
    if dim is None and call.reduce is None:
        shown += f" and lacks the axis of {positions}"
    return shown
