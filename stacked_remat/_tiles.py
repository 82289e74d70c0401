"""The loop over tiles as a JAX primitive: forwards and backwards, one tile exists at a
time.

`Cut` reads tiles from arrays and writes them; `Tiling` is a function's jaxpr for one
tile, applied in a loop. `Tiles` is that as a primitive, whose reverse mode is another
loop over tiles: it computes each tile again, and writes its cotangents where the tile
was read. JAX's transpose of the first loop would add an array of the whole size for
each tile. `_tiled.py` runs it by `run_tiles`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import Array

from ._activity import active_outputs, is_differentiable
from ._compat import batch_jaxpr, is_eager, without_constants
from ._static import PyTree
from ._sweep.gradient import pick
from ._sweep.primitive import Rule, tangents_by
from ._sweep.programs import jitted, run, traced_program
from ._sweep.rules import Bound, Differentiable, moved, not_mapped, of_part, primal_of
from ._sweep.slots import Arrays, Mask
from ._sweep.store import zeros_after

# Of each array the dimension along the axis; None if it has none
Dims = tuple[int | None, ...]
Derived = tuple["Tiling", Arrays]  # a tiling, and its constants


@dataclass(frozen=True)
class Cut:
    """How positions are cut into tiles.

    A tile has some positions of each device, so that all devices work on each tile.
    """

    # How many positions each device has
    size: int
    # How many devices the positions are divided over
    parts: int
    # How many positions of each device a tile has
    length: int

    def read(
        self, array: Array, dim: int | None, start: Array | int, length: int
    ) -> Array:
        """The tile of `length` positions of each device from `start` on; all of an
        array without the axis.
        """
        if dim is None:
            return array
        by_device = self._by_device(array, dim)
        part = lax.dynamic_slice_in_dim(by_device, start, length, dim + 1)
        return lax.collapse(part, dim, dim + 2)

    def read_all(
        self, arrays: Sequence[Array], dims: Dims, start: Array | int, length: int
    ) -> Arrays:
        """The same tile of each array."""
        pairs = zip(arrays, dims, strict=True)
        return [self.read(array, dim, start, length) for array, dim in pairs]

    def write(
        self, array: Array, dim: int | None, start: Array | int, tile: Array
    ) -> Array:
        """`array` with this tile from `start` on; without the axis, their sum."""
        if dim is None:
            # In the dtype of the sum, which `total` chose
            return array + tile.astype(array.dtype)
        by_device = self._by_device(array, dim)
        tile = self._by_device(tile, dim)
        written = lax.dynamic_update_slice_in_dim(by_device, tile, start, dim + 1)
        return written.reshape(array.shape)

    def joined(self, first: Array, last: Array, dim: int | None) -> Array:
        """One after the other; without the axis, their sum."""
        if dim is None:
            return first + last
        both = [self._by_device(part, dim) for part in (first, last)]
        by_device = jnp.concatenate(both, dim + 1)
        return lax.collapse(by_device, dim, dim + 2)

    def _by_device(self, array: Array, dim: int) -> Array:
        """The array with its positions in two dimensions: devices, and their own."""
        length = array.shape[dim] // self.parts
        before = array.shape[:dim]
        after = array.shape[dim + 1 :]
        return array.reshape(*before, self.parts, length, *after)

    def total(self, tile: ShapedArray, dim: int | None) -> ShapedArray:
        """The type of all tiles of a type; sums of them are in float32 at least."""
        if dim is not None:
            shape = [*tile.shape]
            shape[dim] = self.parts * self.size
            return tile.update(shape=tuple(shape))
        # Many small numbers are added: in bfloat16 late ones would be lost
        if is_differentiable(tile.dtype) and jnp.finfo(tile.dtype).bits < 32:
            return tile.update(dtype=jnp.dtype("float32"))
        return tile

    def loop(
        self,
        rule: Callable[[Arrays], Arrays],
        arrays: Sequence[Array],
        inputs: Dims,
        outputs: Dims,
        types: Sequence[Any],
    ) -> Arrays:
        """Apply a rule tile by tile; for derivatives each tile is computed again.

        `inputs` and `outputs` are the dimensions of the arrays that the rule takes and
        returns, and `types` those that the results get, of which tiles may be sums.
        """

        def of_tile(arrays: Sequence[Array], start: Array) -> Arrays:
            return rule(self.read_all(arrays, inputs, start, self.length))

        def body(totals: Arrays, i: Array) -> tuple[Arrays, None]:
            start = i * self.length
            # The tile is read within the checkpoint, which so keeps the whole arrays,
            # that are there anyway, and no copy of each tile.
            results = jax.checkpoint(of_tile, prevent_cse=False)(arrays, start)
            written = []
            for total, dim, new in zip(totals, outputs, results, strict=True):
                written.append(self.write(total, dim, start, new))
            return written, None

        # Otherwise XLA would fill them early, and hold them while inputs are computed
        totals = zeros_after(arrays, [*map(self.total, types, outputs)])
        numbers = jnp.arange(self.size // self.length, dtype=jnp.int32)
        totals, _ = lax.scan(body, totals, numbers)
        pairs = zip(totals, types, strict=True)
        return [total.astype(type_.dtype) for total, type_ in pairs]


@dataclass(frozen=True)
class Tiling:
    """A function of arrays, as a jaxpr for a tile, applied tile by tile."""

    # How positions are cut into tiles, all of one length
    cut: Cut
    # The function for the arrays of one tile
    jaxpr: Jaxpr = field(repr=False)
    # Of its inputs, constants first; None for what tiles share
    inputs: Dims
    # Of its outputs; None for a sum over tiles
    outputs: Dims
    # `jax.jit` names programs by it
    __name__ = "tiles"

    def __call__(self, *arrays: Array) -> Arrays:
        types = [var.aval for var in self.jaxpr.outvars]
        return self.cut.loop(
            lambda tile: eval_jaxpr(self.jaxpr, (), *tile),
            arrays,
            self.inputs,
            self.outputs,
            types,
        )

    @staticmethod
    def of(
        cut: Cut,
        traced: ClosedJaxpr,
        inputs: Sequence[int | None],
        outputs: Sequence[int | None],
    ) -> Derived:
        """A traced function's tiling, and its constants, which are the first inputs."""
        jaxpr, constants = without_constants(traced)
        dims = (*[None] * len(constants), *inputs)
        return Tiling(cut, jaxpr, dims, tuple(outputs)), constants


def _pull_back(
    tiling: Tiling, nonzero: Mask, has_ct: Mask, arrays: Arrays, cotangents: Arrays
) -> Arrays:
    """The cotangents of some inputs of a tiling, from those of some outputs."""
    jaxpr = tiling.jaxpr
    count = len(arrays)

    def rule(tile: Arrays) -> Arrays:
        of_tile = functools.partial(eval_jaxpr, jaxpr, ())
        differentiated, primals = of_part(of_tile, tile[:count], nonzero, has_ct)
        _, pullback = jax.vjp(differentiated, primals)
        (new_cotangents,) = pullback(tile[count:])
        return new_cotangents

    return tiling.cut.loop(
        rule,
        [*arrays, *cotangents],
        (*tiling.inputs, *pick(tiling.outputs, has_ct)),
        tuple(pick(tiling.inputs, nonzero)),
        [var.aval.to_ct_aval() for var in pick(jaxpr.invars, nonzero)],
    )


class Tiles(Differentiable):
    """A tiling as a primitive; `Differentiable` says what each method is for."""

    tiling: Tiling

    def __init__(self, tiling: Tiling, types: Sequence[ShapedArray]) -> None:
        self._program = jitted(tiling)
        self.in_avals = tuple(types)
        self.out_aval = traced_program(self._program, *types).jaxpr.out_avals
        self.params = {"tiling": tiling}
        self.effects = tiling.jaxpr.effects
        self.programs = (tiling.jaxpr,)
        super().__init__()

    def expand(self, *arrays: Array) -> Arrays:
        return run(self._program, *arrays)

    def primal(self, nonzero: Mask, args: PyTree) -> Arrays:
        old = self.tiling
        traced = primal_of(old.jaxpr, nonzero)
        return run_tiles(Tiling.of(old.cut, traced, old.inputs, old.outputs), args)

    def active(self, nonzero: Mask) -> Mask:
        return tuple(active_outputs(self.tiling.jaxpr, nonzero))

    def tangent(self, nonzero: Mask, primals: PyTree, tangents: Arrays) -> Arrays:
        # Outside of a trace the tangents are one program, which is compiled once
        if not is_eager():
            return super().tangent(nonzero, primals, tangents)
        active = self.active(nonzero)
        return tangents_by(self.tiling, self.tiling, nonzero, active, primals, tangents)

    def cotangents(
        self, nonzero: Mask, has_ct: Mask, args: PyTree, cts: Arrays
    ) -> Arrays:
        back = Bound("tiles_back", _pull_back, (self.tiling, nonzero, has_ct))
        arrays = [*args]
        # Outside of a trace the executable is found by its jaxpr, as for any `Rule`
        if is_eager():
            return Rule(back, back, arrays, cts)(arrays, cts)
        return jitted(back)(arrays, cts)

    def batch(self, axis: Any, args: PyTree, dims: PyTree) -> PyTree:
        if not_mapped(self, axis, dims):
            return self(*args), [None] * len(self.out_aval)
        old = self.tiling
        is_mapped = [dim is not None for dim in dims]
        must_be_mapped = [True] * len(old.outputs)
        closed = ClosedJaxpr(old.jaxpr, ())
        traced, _ = batch_jaxpr(closed, axis, is_mapped, must_be_mapped)
        # The batch axis comes in front, of arrays that are mapped and of all outputs
        inputs = []
        for dim, mapped in zip(old.inputs, is_mapped, strict=True):
            inputs.append(dim if dim is None else dim + mapped)
        outputs = [dim if dim is None else dim + 1 for dim in old.outputs]
        tiling = Tiling.of(old.cut, traced, inputs, outputs)
        arrays = [*map(moved, args, dims)]
        return run_tiles(tiling, arrays), [0] * len(outputs)


def run_tiles(derived: Derived, arrays: Sequence[Array]) -> Arrays:
    """Run a tiling on arrays, and on the constants that it comes with."""
    tiling, constants = derived
    arrays = [*constants, *arrays]
    types = [*map(jax.typeof, arrays)]
    return Tiles(tiling, types)(*arrays)
