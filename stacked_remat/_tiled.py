"""Functions applied tile by tile along an axis, so that their internals exist for one tile at a time."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.axis import AxisSelector
from haliax.partitioning import physical_axis_size
from jax import lax
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr

from ._activity import is_differentiable
from ._checkpoint import saving_internals
from ._messages import parse_bytes
from ._scan.arguments import argument_namer
from ._scan.eager import compiled_once
from ._scan.marks import is_array, is_named, raw_array, take_marks_off
from ._static import Static
from ._sweep.gradient import merge, pick, scatter_leaves
from ._sweep.store import zeros_after


def tiled(
    fn: Callable[..., Any],
    axis: AxisSelector | int,
    *,
    tiles: int | Literal["auto"] = "auto",
    budget: int | str | None = None,
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
        tiles: how many, all of `ceil(size / tiles)` positions but the last, which may be smaller. `"auto"`
            for the fewest whose internals fit `budget`.
        budget: for `"auto"`, bytes or a string such as `"2GiB"`: what the backward pass of one tile may keep.
        reduce: `"sum"` adds up outputs that lack the axis over the tiles, in float32; with a dimension of
            plain arrays, all outputs. None refuses them.

    Returns:
        A function of the arguments of `fn`. Outputs have the axis where `fn` gives it to them.

    Raises:
        ValueError: nothing to split, arguments of different sizes, an output without the axis and without
            `reduce`, or tiles below 1; names the argument.

    Cost: `fn` once forward, and in the backward pass once more and its products. Memory: arguments, outputs
    and their cotangents, the gradients of shared arguments in float32, and the internals of one tile. Every
    loop is rolled; a smaller last tile is compiled beside it. An axis that Haliax's axis mapping divides over
    devices is cut within each device's part, so that every device has a part of every tile.
    Derivatives of gradients work; forward-mode differentiation does not. Names given inside `fn` by
    `checkpoint_name` are not seen by policies outside. The method is that of ALST (Bekman et al. 2025).
    """
    if reduce not in (None, "sum"):
        raise ValueError(f'reduce must be "sum" or None, got {reduce!r}.')
    if tiles != "auto" and (isinstance(tiles, bool) or not isinstance(tiles, int) or tiles < 1):
        raise ValueError(f'tiles must be "auto" or a number of tiles, at least 1; got {tiles!r}.')
    if (tiles == "auto") != (budget is not None):
        raise ValueError(
            'Give either tiles=k, or tiles="auto" with budget="2GiB": what the backward pass of one tile may '
            f"keep. Got tiles={tiles!r} and budget={budget!r}."
        )
    caller = _Caller(fn, axis, reduce)

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        def of_arguments(_: Any, arguments: Any) -> Any:
            return _apply(caller, arguments, tiles, budget)

        return compiled_once(of_arguments, (), (args, kwargs))

    return run


class _Caller(NamedTuple):
    """What a user gave to `tiled`."""

    fn: Callable[..., Any]
    axis: AxisSelector | int
    reduce: Literal["sum"] | None

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


def _apply(caller: _Caller, arguments: Any, tiles: int | Literal["auto"], budget: int | str | None) -> Any:
    entries, tree = take_marks_off(arguments)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_named)
    dims = [
        caller.dimension(leaf) if rule != "shared" else None
        for leaf, (_, _, rule) in zip(leaves, entries, strict=True)
    ]
    size = _common_size(caller, entries, dims)
    parts = 1 if isinstance(caller.axis, int) else physical_axis_size(_resolved(caller, size)) or 1
    if size % parts:
        raise ValueError(
            f"tiled over {caller.axis_text}: its {size} positions can't be divided evenly over the {parts} "
            f"devices that it is mapped to. Give it a multiple of {parts}."
        )
    arrays = [raw_array(leaf) for leaf in leaves]
    split = [array for array, dim in zip(arrays, dims, strict=True) if dim is not None]
    is_shared = [dim is None and is_array(array) for array, dim in zip(arrays, dims, strict=True)]
    shared = [jnp.asarray(array) for array in pick(arrays, is_shared)]
    cut = _Cut(tuple(dim for dim in dims if dim is not None), size, parts)

    def rebuilt(split: Sequence[Any], shared: Sequence[Any]) -> Any:
        own, common = iter(split), iter(shared)
        given = []
        for leaf, dim, is_common in zip(leaves, dims, is_shared, strict=True):
            array = next(own) if dim is not None else next(common) if is_common else leaf
            given.append(_renamed(leaf, array, dim) if is_named(leaf) else array)
        args, kwargs = jax.tree.unflatten(structure, given)
        with saving_internals(False):
            return caller.fn(*args, **kwargs)

    if tiles == "auto":
        tiles = _fitting(rebuilt, split, shared, cut, budget)
    length = -(-(size // parts) // tiles)
    traced = [_trace(caller, rebuilt, cut, n, split, shared) for n in cut.lengths(length)]
    tiling = _Tiling(cut, length, tuple(traced), len(split))
    constants = [jnp.asarray(leaf) for one in traced for leaf in one.closed.consts]
    outputs: Any = _run(tiling, split, [*shared, *constants])
    return traced[0].named(outputs, size)


def _resolved(caller: _Caller, size: int) -> Axis:
    return caller.axis if isinstance(caller.axis, Axis) else Axis(str(caller.axis), size)


def _renamed(leaf: NamedArray, array: Any, dim: int | None) -> NamedArray:
    """`leaf` with another array, which may be a part along `dim`."""
    axes = leaf.axes
    if dim is not None:
        axes = (*axes[:dim], axes[dim].resize(array.shape[dim]), *axes[dim + 1 :])
    return NamedArray(array, axes)


def _common_size(caller: _Caller, entries: Sequence[Any], dims: Sequence[int | None]) -> int:
    """The size of the axis.

    Raises:
        ValueError: nothing has it, or sizes differ.
    """
    name_of = argument_namer(caller.fn, skip=0)
    sizes: dict[str, int] = {}
    for (path, leaf, rule), dim in zip(entries, dims, strict=True):
        if dim is not None:
            sizes[name_of(path)] = raw_array(leaf).shape[dim]
        elif rule == "per_layer" or (rule != "shared" and isinstance(caller.axis, int) and is_array(leaf)):
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


@dataclass(frozen=True)
class _Cut:
    """Where arrays are cut.

    Attributes:
        dims: the dimension of each split array.
        size: positions along the axis.
        parts: devices that these are divided over; a tile has some positions of each.
    """

    dims: tuple[int, ...]
    size: int
    parts: int

    def lengths(self, length: int) -> list[int]:
        """The different lengths of tiles of one device: `length`, and that of a smaller last tile."""
        own = self.size // self.parts
        return [length, own % length] if own % length else [length]

    def read(self, array: Any, dim: int, start: Any, length: int) -> Any:
        """The tile of `length` positions of each device, from `start` on."""
        part = lax.dynamic_slice_in_dim(self._by_device(array, dim), start, length, dim + 1)
        return part.reshape(*array.shape[:dim], self.parts * length, *array.shape[dim + 1 :])

    def write(self, array: Any, dim: int, start: Any, tile: Any) -> Any:
        """`array` with this tile from `start` on."""
        tile = self._by_device(tile, dim)
        return lax.dynamic_update_slice_in_dim(self._by_device(array, dim), tile, start, dim + 1).reshape(
            array.shape
        )

    def _by_device(self, array: Any, dim: int) -> Any:
        return array.reshape(*array.shape[:dim], self.parts, -1, *array.shape[dim + 1 :])


class _Output(NamedTuple):
    """An output of a tile: its dimension along the axis, None for a sum; its names, None if it has none."""

    dim: int | None
    axes: tuple[Axis, ...] | None


class _Traced(NamedTuple):
    """`fn` on tiles of one length.

    Attributes:
        closed: on the split arrays of a tile, then the shared ones.
        outputs: its outputs.
        structure: of what `fn` returns, with a leaf for each of `leaves`.
        leaves: the leaves of that which are not arrays, and `None` for those which are.
    """

    closed: ClosedJaxpr
    outputs: tuple[_Output, ...]
    structure: Any
    leaves: tuple[Any, ...]

    def named(self, arrays: Sequence[Any], size: int) -> Any:
        """What `fn` returns, from its whole outputs."""
        found = iter(zip(arrays, self.outputs, strict=True))
        leaves = []
        for leaf in self.leaves:
            if not isinstance(leaf, _Output):
                leaves.append(leaf)
                continue
            array, (dim, axes) = next(found)
            if axes is not None:
                array = _renamed(NamedArray(array, _resized(axes, dim, size)), array, dim)
            leaves.append(array)
        return jax.tree.unflatten(self.structure, leaves)


def _resized(axes: tuple[Axis, ...], dim: int | None, size: int) -> tuple[Axis, ...]:
    return axes if dim is None else (*axes[:dim], axes[dim].resize(size), *axes[dim + 1 :])


def _trace(
    caller: _Caller,
    fn: Callable[..., Any],
    cut: _Cut,
    length: int,
    split: Sequence[Any],
    shared: Sequence[Any],
) -> _Traced:
    found: list[Any] = []

    def flat(split: Sequence[Any], shared: Sequence[Any]) -> list[Any]:
        entries, structure = jax.tree_util.tree_flatten_with_path(fn(split, shared), is_leaf=is_named)
        leaves = [
            _output(caller, path, leaf, length * cut.parts) if is_named(leaf) or is_array(leaf) else leaf
            for path, leaf in entries
        ]
        found[:] = [structure, leaves]
        return [raw_array(leaf) for _, leaf in entries if is_named(leaf) or is_array(leaf)]

    def tile_of(arrays: Sequence[Any]) -> list[Any]:
        return [cut.read(array, dim, 0, length) for array, dim in zip(arrays, cut.dims, strict=True)]

    closed = jax.make_jaxpr(flat)(jax.eval_shape(tile_of, list(split)), list(shared))
    structure, leaves = found
    outputs = tuple(leaf for leaf in leaves if isinstance(leaf, _Output))
    return _Traced(closed, outputs, structure, tuple(leaves))


def _output(caller: _Caller, path: Any, leaf: Any, length: int) -> _Output:
    dim = caller.dimension(leaf)
    if isinstance(caller.axis, int) and caller.reduce == "sum":
        dim = None
    axes = leaf.axes if is_named(leaf) else None
    size = None if dim is None else raw_array(leaf).shape[dim]
    if size not in (None, length) or (dim is None and caller.reduce is None):
        where = f"output{jax.tree_util.keystr(path)}"
        has = "lacks it" if size is None else f"has {size} positions for a tile of {length}"
        raise ValueError(
            f"tiled over {caller.axis_text}: {where} {has}. The function must treat positions independently "
            'of each other; outputs that are sums over them need reduce="sum".'
        )
    return _Output(dim, axes)


def _fitting(
    fn: Callable[..., Any], split: Sequence[Any], shared: Sequence[Any], cut: _Cut, budget: Any
) -> int:
    """The fewest tiles of which the backward pass of each keeps at most `budget` bytes on a device."""

    def kept(split: Sequence[Any], shared: Sequence[Any]) -> list[Any]:
        inexact = [is_differentiable(leaf.dtype) for leaf in split]

        def outputs(part: Sequence[Any]) -> list[Any]:
            leaves = jax.tree.leaves(fn(merge(split, part, inexact), shared))
            return [leaf for leaf in leaves if is_array(leaf) and is_differentiable(leaf.dtype)]

        return jax.tree.leaves(jax.vjp(outputs, pick(split, inexact))[1])

    def size_of(leaves: Sequence[Any]) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    needed = size_of(jax.eval_shape(kept, list(split), list(shared))) - size_of(shared)
    most = cut.size // cut.parts
    return min(max(1, math.ceil(needed / cut.parts / parse_bytes(budget))), most)


@dataclass(frozen=True, eq=False)
class _Tiling:
    """The loops over tiles, on raw arrays: `split` by tile, `shared` by all."""

    cut: _Cut
    length: int
    traced: tuple[_Traced, ...]
    count: int

    @property
    def outputs(self) -> tuple[_Output, ...]:
        return self.traced[0].outputs

    def over_tiles(self, step: Callable[[Any, Any, int, Callable], Any], carry: Any) -> Any:
        """`step(carry, start, length, fn)` for every tile, in a loop, and for a smaller last one."""
        own = self.cut.size // self.cut.parts
        whole = own // self.length
        offset = 0
        calls = []
        for one in self.traced:
            constants = len(one.closed.consts)
            calls.append(functools.partial(self._call, one, offset, constants))
            offset += constants
        if whole > 1:

            def body(carry: Any, i: Any) -> tuple[Any, None]:
                return step(carry, i * self.length, self.length, calls[0]), None

            carry, _ = lax.scan(body, carry, jnp.arange(whole, dtype=jnp.int32))
        elif whole:
            carry = step(carry, 0, self.length, calls[0])
        if own % self.length:
            carry = step(carry, whole * self.length, own % self.length, calls[-1])
        return carry

    def _call(
        self, traced: _Traced, offset: int, constants: int, tile: Sequence[Any], shared: Sequence[Any]
    ) -> list[Any]:
        every = sum(len(one.closed.consts) for one in self.traced)
        given, of_all = shared[: len(shared) - every], shared[len(shared) - every :]
        own = of_all[offset : offset + constants]
        return eval_jaxpr(traced.closed.jaxpr, own, *tile, *given)

    def tile(self, arrays: Sequence[Any], start: Any, length: int) -> list[Any]:
        return [
            self.cut.read(array, dim, start, length) for array, dim in zip(arrays, self.cut.dims, strict=True)
        ]

    def forward(self, split: Sequence[Any], shared: Sequence[Any]) -> list[Any]:
        def step(carry: list[Any], start: Any, length: int, fn: Callable[..., list[Any]]) -> list[Any]:
            found = fn(self.tile(split, start, length), shared)
            return [
                old + new.astype(old.dtype) if out.dim is None else self.cut.write(old, out.dim, start, new)
                for old, new, out in zip(carry, found, self.outputs, strict=True)
            ]

        avals = self.traced[0].closed.out_avals
        start = zeros_after((split, shared), [*map(self._whole, avals, self.outputs)])
        sums = self.over_tiles(step, start)
        return [leaf.astype(aval.dtype) for leaf, aval in zip(sums, avals, strict=True)]

    def _whole(self, aval: Any, output: _Output) -> jax.ShapeDtypeStruct:
        if output.dim is None:
            return jax.ShapeDtypeStruct(aval.shape, _sum_dtype(aval.dtype))
        before, after = aval.shape[: output.dim], aval.shape[output.dim + 1 :]
        return jax.ShapeDtypeStruct((*before, self.cut.size, *after), aval.dtype)

    def backward(
        self,
        perturbed: tuple[Sequence[bool], Sequence[bool]],
        split: Sequence[Any],
        shared: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """The cotangents of the perturbed arrays, `None` for the others."""
        of_split, of_shared = perturbed
        wanted_dims = pick(self.cut.dims, of_split)
        has_ct = [not isinstance(ct, SymbolicZero) for ct in cotangents]
        given = [ct for ct, has in zip(cotangents, has_ct, strict=True) if has]
        outputs = pick(self.outputs, has_ct)

        def step(carry: Any, start: Any, length: int, fn: Callable[..., list[Any]]) -> Any:
            tile = self.tile(split, start, length)
            own = [
                ct if out.dim is None else self.cut.read(ct, out.dim, start, length)
                for ct, out in zip(given, outputs, strict=True)
            ]
            # A tile outside of the loop would share its forward pass with the one that is done.
            tile, own = lax.optimization_barrier((tile, own))

            def of_perturbed(tile_part: Any, shared_part: Any) -> list[Any]:
                found = fn(merge(tile, tile_part, of_split), merge(shared, shared_part, of_shared))
                return pick(found, has_ct)

            _, pullback = jax.vjp(of_perturbed, pick(tile, of_split), pick(shared, of_shared))
            new_split, new_shared = pullback(own)
            old_split, old_shared = carry
            return (
                [
                    self.cut.write(old, dim, start, new)
                    for old, dim, new in zip(old_split, wanted_dims, new_split, strict=True)
                ],
                [old + new.astype(old.dtype) for old, new in zip(old_shared, new_shared, strict=True)],
            )

        totals = [
            jax.ShapeDtypeStruct(array.shape, _sum_dtype(array.dtype)) for array in pick(shared, of_shared)
        ]
        start = zeros_after((split, shared, given), (pick(split, of_split), totals))
        new_split, new_shared = self.over_tiles(step, start)
        new_shared = [
            new.astype(old.dtype) for new, old in zip(new_shared, pick(shared, of_shared), strict=True)
        ]
        return scatter_leaves(new_split, of_split), scatter_leaves(new_shared, of_shared)


def _sum_dtype(dtype: Any) -> Any:
    """In which sums over tiles are kept: at least float32."""
    return jnp.float32 if is_differentiable(dtype) and jnp.finfo(dtype).bits < 32 else dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(tiling: _Tiling, split: Sequence[Any], shared: Sequence[Any]) -> list[Any]:
    return tiling.forward(split, shared)


def _forward_rule(tiling: _Tiling, split: Any, shared: Any) -> tuple[list[Any], Any]:
    perturbed = tuple(
        [leaf.perturbed and is_differentiable(leaf.value.dtype) for leaf in some] for some in (split, shared)
    )
    split, shared = ([leaf.value for leaf in some] for some in (split, shared))
    return tiling.forward(split, shared), (Static(tuple(map(tuple, perturbed))), split, shared)


def _backward_rule(tiling: _Tiling, residuals: Any, cotangents: Any) -> tuple[list[Any], list[Any]]:
    perturbed, split, shared = residuals
    return tiling.backward(perturbed.value, split, shared, cotangents)


_run.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
