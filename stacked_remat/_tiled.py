"""Functions applied tile by tile along an axis, so that their internals exist for one tile at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.axis import AxisSelector
from haliax.partitioning import physical_axis_name, physical_axis_size
from jax.extend.core import ClosedJaxpr

from ._activity import is_differentiable
from ._checkpoint import saving_internals
from ._scan.arguments import argument_namer, is_unsplit_key
from ._scan.checks import describe
from ._scan.marks import is_array, is_named, raw_array, take_marks_off
from ._schedule import whole_number
from ._static import PyTree, Static
from ._sweep.gradient import merge, pick
from ._sweep.store import varying_alike
from ._sweep.trace import kept
from ._tiles import Cut, Tiling, run_tiles


def tiled(
    fn: Callable[..., Any],
    axis: AxisSelector | int,
    *,
    tiles: int,
    reduce: Literal["sum"] | None = None,
) -> Callable[..., Any]:
    """Apply `fn` tile by tile along an axis; backward, each tile is computed again, one after the other.

    ```python
    y = tiled(mlp, Pos, tiles=8)(x)                       # y = mlp(x), with the internals of an eighth of it
    y = tiled(lambda x: jax.vmap(mlp)(x), 0, tiles=8)(x)  # along a dimension of plain arrays
    loss = tiled(sum_of_losses, Pos, tiles=32, reduce="sum")(hidden, targets)
    ```

    Equals `fn` for a function that treats positions along the axis independently of each other, as an MLP, a
    norm, a projection or a loss does; with `reduce="sum"`, for a function that sums over the axis.

    Args:
        fn: a function or a module, of arguments of any kind. Arrays that it closes over, and the arrays of a
            module, are shared by all tiles, and have gradients.
        axis: a named axis or its name: arguments that have it are split, everything else is shared. Or a
            dimension of plain arrays: every plain array in the arguments is split along it, except in
            `stacked_remat.shared(...)`.
        tiles: how many, all of `ceil(size / tiles)` positions but the last, which may be smaller.
        reduce: `"sum"` adds up outputs that lack the axis over the tiles, in float32; with a dimension of
            plain arrays, all outputs. None refuses them.

    Returns:
        A function of the arguments of `fn`. Outputs have the axis where `fn` gives it to them.

    Raises:
        ValueError: nothing to split, arguments of different sizes, a single random key that is not marked
            `shared`, or results of a tile that are not a part of those of all positions.

    Cost: `fn` once forward, and in the backward pass once more and its products. Memory: arguments, outputs
    and their cotangents, the gradients of shared arguments in float32, and the internals of one tile, on a
    CPU also of a smaller last one, which is compiled beside the rolled loop. An axis that Haliax's axis
    mapping divides over devices is cut within each device's part. `fn` is traced for all positions too, to
    compare its results. Random keys in closures and in `shared(...)` give every tile the same numbers. All
    derivatives work, each computed tile by tile; meshes with `AxisType.Explicit` do not. Policies outside do
    not see names given inside `fn` by `checkpoint_name`. The method is that of ALST (Bekman et al. 2025).
    """
    if not callable(fn):
        raise TypeError(f"tiled takes a function and then an axis; got {describe(fn)}.")
    if reduce not in (None, "sum"):
        raise ValueError(f'reduce must be "sum" or None, got {reduce!r}.')
    if isinstance(axis, bool) or not isinstance(axis, int | str | Axis):
        raise TypeError(f"axis must be a named axis, its name, or a dimension (an int); got {axis!r}.")
    tiles = whole_number("tiles", tiles, "how many tiles to cut the axis into")
    caller = _Caller(fn, axis, reduce, tiles)

    @functools.wraps(fn, updated=())
    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return _apply(caller, (args, kwargs))

    return run


_OfTile: TypeAlias = Callable[[Sequence[PyTree]], Any]


class _Caller(NamedTuple):
    """What a user gave to `tiled`."""

    fn: Callable[..., Any]
    axis: AxisSelector | int
    reduce: Literal["sum"] | None
    tiles: int

    @property
    def axis_text(self) -> str:
        if isinstance(self.axis, int):
            return f"dimension {self.axis}"
        return f"axis `{self.axis if isinstance(self.axis, str) else self.axis.name}`"

    def dimension(self, leaf: Any) -> int | None:
        """The dimension of `leaf` along the axis, or None if it has none."""
        if isinstance(self.axis, int):
            rank = leaf.ndim if is_array(leaf) else 0
            return self.axis % rank if -rank <= self.axis < rank else None
        if not is_named(leaf):
            return None
        name = self.axis if isinstance(self.axis, str) else self.axis.name
        return next((i for i, own in enumerate(leaf.axes) if own.name == name), None)

    def output(self, leaf: Any) -> int | None:
        """The dimension of an output along the axis, or None for a sum."""
        return None if isinstance(self.axis, int) and self.reduce == "sum" else self.dimension(leaf)


def _apply(caller: _Caller, arguments: PyTree) -> PyTree:
    entries, tree = take_marks_off(arguments)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_named)
    dims = [
        caller.dimension(leaf) if rule != "shared" else None
        for leaf, (_, _, rule) in zip(leaves, entries, strict=True)
    ]
    cut = _cut(caller, _common_size(caller, entries, dims))
    _check_mesh(caller, leaves)
    if cut.size == 0:
        args, kwargs = tree
        return caller.fn(*args, **kwargs)
    arrays = [raw_array(leaf) for leaf in leaves]
    is_given = [dim is not None or is_array(array) for array, dim in zip(arrays, dims, strict=True)]
    given = varying_alike([jnp.asarray(array) for array in pick(arrays, is_given)])  # in `jax.shard_map`

    def rebuilt(given: Sequence[PyTree]) -> PyTree:
        every = zip(leaves, merge(arrays, given, is_given), strict=True)
        own = [_renamed(leaf, array) if is_named(leaf) else array for leaf, array in every]
        args, kwargs = jax.tree.unflatten(structure, own)
        with saving_internals(()):
            return caller.fn(*args, **kwargs)

    arguments, static = eqx.partition(tree, is_array)
    rules, (values, tree) = tuple(rule for _, _, rule in entries), jax.tree.flatten(static)
    key = (caller.fn, "tiled", caller[1:], rules, tree, *values)
    plan = functools.partial(_plan, caller, rebuilt, cut, given, pick(dims, is_given))
    whole, tiling, constants = kept(key, arguments, plan)
    _check_closure(caller, given, constants)
    types, rest = eqx.partition(whole, _is_type)
    arrays = run_tiles((tiling, constants), given)
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(types), arrays), rest)


def _plan(
    caller: _Caller, fn: _OfTile, cut: Cut, given: Sequence[PyTree], dims: Sequence[int | None]
) -> tuple[PyTree, Tiling, list[PyTree]]:
    """The result of `fn` for all positions, in types, and what runs it tile by tile."""
    (whole, _), *tiles = (_trace(fn, cut, n, given, dims) for n in (None, *cut.lengths))
    for (part, _), n in zip(tiles, cut.lengths, strict=True):
        _check_part(caller, part, n * cut.parts, whole, cut.size)
    results = jax.tree.leaves(whole, is_leaf=is_named)
    outputs = [caller.output(leaf) for leaf in results if _is_type(raw_array(leaf))]
    return whole, *Tiling.of(cut, [closed for _, closed in tiles], dims, outputs)


def _check_mesh(caller: _Caller, leaves: Sequence[PyTree]) -> None:
    """Refuse arrays whose sharding is part of their type."""
    for leaf in map(raw_array, leaves):
        spec = jax.typeof(leaf).sharding.spec if isinstance(leaf, jax.Array) else ()
        if any(part is not None for part in spec):
            raise ValueError(
                f"tiled over {caller.axis_text}: an array {leaf.shape} is sharded by its type, as {spec}. "
                "Use a mesh with AxisType.Auto axes, or call tiled inside of jax.shard_map."
            )


def _check_closure(caller: _Caller, split: Sequence[PyTree], constants: Sequence[PyTree]) -> None:
    """Refuse arrays that `fn` closes over and that do not vary as its arguments, in `jax.shard_map`."""
    for leaf in constants:
        differs = jax.typeof(leaf).manual_axis_type.varying != jax.typeof(split[0]).manual_axis_type.varying
        if differs and is_differentiable(leaf.dtype):
            raise ValueError(
                f"tiled over {caller.axis_text} inside of jax.shard_map: the function closes over an array "
                f"{leaf.shape} that is the same on every device. Pass it as an argument, in "
                "stacked_remat.shared(...), or give jax.shard_map check_vma=False."
            )


def _cut(caller: _Caller, size: int) -> Cut:
    """The tiles of each of the devices over which Haliax's axis mapping divides the axis."""
    axis, parts = caller.axis if isinstance(caller.axis, Axis) else Axis(str(caller.axis), size), 1
    if not isinstance(caller.axis, int) and physical_axis_name(axis) is not None:
        parts = physical_axis_size(axis) or 1
    if size % parts:
        raise ValueError(
            f"tiled over {caller.axis_text}: its {size} positions can't be divided evenly over the {parts} "
            f"devices that it is mapped to. Give it a multiple of {parts}."
        )
    return Cut(size, parts, -(-(size // parts) // caller.tiles))


def _renamed(leaf: NamedArray, array: Any) -> NamedArray:
    """`leaf` with another array, which may be a part of its own."""
    return NamedArray(array, tuple(map(Axis.resize, leaf.axes, array.shape)))


def _common_size(caller: _Caller, entries: Sequence[PyTree], dims: Sequence[int | None]) -> int:
    name_of, is_plain = argument_namer(caller.fn, skip=0), isinstance(caller.axis, int)
    sizes: dict[str, int] = {}
    for (path, leaf, rule), dim in zip(entries, dims, strict=True):
        if dim is not None:
            sizes[name_of(path)] = raw_array(leaf).shape[dim]
        elif rule == "default" and is_unsplit_key(name_of(path), leaf):
            raise ValueError(
                f"tiled over {caller.axis_text}: {name_of(path)} is a single random key, from which every "
                "tile would draw the same numbers. Draw them outside and pass them as an argument that is "
                f"split, or say that tiles share the key, stacked_remat.shared({name_of(path)})."
            )
        elif rule == "per_layer" or (rule == "default" and is_plain and is_array(leaf) and leaf.ndim):
            raise ValueError(
                f"tiled over {caller.axis_text}: {name_of(path)} has the shape {raw_array(leaf).shape} "
                f"without it. To give every tile all of it, pass stacked_remat.shared({name_of(path)})."
            )
    if not sizes:
        raise ValueError(
            f"tiled over {caller.axis_text} was given nothing to split along it. Pass an array that has it "
            "as an argument; what the function closes over is shared by all tiles."
        )
    expected = caller.axis.size if isinstance(caller.axis, Axis) else next(iter(sizes.values()))
    if wrong := {name: size for name, size in sizes.items() if size != expected}:
        name, size = next(iter(wrong.items()))
        raise ValueError(
            f"tiled over {caller.axis_text} of {expected}: {name} has {size}. Give all the same size, or "
            f"pass it to every tile whole, stacked_remat.shared({name})."
        )
    return expected


def _trace(
    fn: _OfTile, cut: Cut, length: int | None, given: Sequence[PyTree], dims: Sequence[int | None]
) -> tuple[PyTree, ClosedJaxpr]:
    """`fn` on tiles of `length` positions of each device, with None on all: types of its result and jaxpr."""

    def of_tile(tile: Sequence[PyTree]) -> tuple[PyTree, Static]:
        arrays, rest = eqx.partition(fn(tile), is_array)
        return arrays, Static(rest)

    def tile_of(arrays: Sequence[PyTree]) -> list[PyTree]:
        if length is None:
            return list(arrays)
        return [cut.read(array, dim, 0, length) for array, dim in zip(arrays, dims, strict=True)]

    tile = jax.make_jaxpr(tile_of)(list(given)).out_avals  # with the axes over which they vary
    closed, (types, rest) = jax.make_jaxpr(of_tile, return_shape=True)(tile)
    return eqx.combine(types, rest.value), closed


def _is_type(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _check_part(caller: _Caller, tile: PyTree, length: int, whole: PyTree, size: int) -> None:
    """Refuse a function whose result for a tile is not a part of that for all positions."""
    (own, structure), (entire, structure_of_all) = (
        jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named) for tree in (tile, whole)
    )
    if structure != structure_of_all:
        raise _not_a_part(caller, "the structure of what it returns", "depends on the size of a tile")
    for (path, part), (_, of_all) in zip(own, entire, strict=True):
        where, type_ = f"output{jax.tree_util.keystr(path)}", raw_array(of_all)
        if not _is_type(type_):
            if isinstance(of_all, bool | int | float | complex | str) and part != of_all:
                raise _not_a_part(caller, where, f"is {part!r} for a tile and {of_all!r} for all positions")
            continue
        if jnp.issubdtype(type_.dtype, jax.dtypes.prng_key):
            raise ValueError(f"tiled over {caller.axis_text}: {where} is a random key. Make keys outside.")
        dim, sizes = caller.output(of_all), [*type_.shape]
        if dim is None and caller.reduce is None:
            raise _not_a_part(caller, where, "lacks it")
        if dim is not None:
            sizes[dim] = length if sizes[dim] == size else -1
        names = [[axis.name for axis in leaf.axes] if is_named(leaf) else None for leaf in (part, of_all)]
        found = raw_array(part)
        if (found.shape, found.dtype, names[0]) != (tuple(sizes), type_.dtype, names[1]):
            shown = [f"{each.dtype}{[*each.shape]}".replace(" ", "") for each in (found, type_)]
            how = f"is {shown[0]} for a tile of {length} and {shown[1]} for all {size}"
            raise _not_a_part(caller, where, how)


def _not_a_part(caller: _Caller, what: str, how: str) -> ValueError:
    return ValueError(
        f"tiled over {caller.axis_text}: {what} {how}. The function must treat positions independently of "
        'each other; outputs that are sums over them need reduce="sum".'
    )
