"""The loop over tiles as a JAX primitive: its derivatives, and its maps, are loops over tiles too."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from ._activity import active_outputs, is_differentiable
from ._compat import batch_jaxpr, trace_context
from ._static import Static
from ._sweep.gradient import Mask, merge, pick
from ._sweep.rules import (
    Differentiable,
    as_arrays,
    compiled,
    floats,
    is_zero,
    moved,
    not_mapped,
    primal_of,
)
from ._sweep.slots import Arrays
from ._sweep.store import zeros_after

Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class Cut:
    """Where arrays are cut.

    Attributes:
        size: positions along the axis.
        parts: devices that these are divided over; a tile has some positions of each.
        length: how many of each, but in a smaller last tile.
    """

    size: int
    parts: int
    length: int

    @property
    def lengths(self) -> list[int]:
        """The different lengths of tiles of one device."""
        last = self.size // self.parts % self.length
        return [self.length, last] if last else [self.length]

    def read(self, array: Any, dim: int | None, start: Any, length: int) -> Any:
        """The tile of `length` positions of each device from `start` on; all of an array without the axis."""
        if dim is None:
            return array
        part = lax.dynamic_slice_in_dim(self._by_device(array, dim), start, length, dim + 1)
        return part.reshape(*array.shape[:dim], self.parts * length, *array.shape[dim + 1 :])

    def write(self, array: Any, dim: int | None, start: Any, tile: Any) -> Any:
        """`array` with this tile from `start` on; without the axis, their sum."""
        if dim is None:
            return array + tile.astype(array.dtype)
        own, tile = self._by_device(array, dim), self._by_device(tile, dim)
        return lax.dynamic_update_slice_in_dim(own, tile, start, dim + 1).reshape(array.shape)

    def _by_device(self, array: Any, dim: int) -> Any:
        own = array.shape[dim] // self.parts
        return array.reshape(*array.shape[:dim], self.parts, own, *array.shape[dim + 1 :])


def _kept(derive: Callable[..., "Derived"]) -> Callable[..., "Derived"]:
    """Keep what is derived from equal tilings, as `jax.jit` does, unless it comes with arrays."""
    known = functools.lru_cache(maxsize=512)(lambda context, *args: [])

    @functools.wraps(derive)
    def derived(*args: Any) -> "Derived":
        found = known(trace_context(), *args)
        if found:
            return found[0], []
        tiling, constants = derive(*args)
        if not constants:
            found.append(tiling)
        return tiling, constants

    return derived


@dataclass(frozen=True)
class Tiling:
    """A function of arrays, applied tile by tile.

    What is derived from it comes with the arrays that are its last inputs beside those of the rule.

    Attributes:
        cut: into which tiles.
        jaxprs: the function on a tile of each length.
        inputs: the dimension of each along the axis; None where tiles share it.
        outputs: the same; None for a sum over tiles.
        later: the inputs that a tile outside of the loop gets in its turn. Backward, it would otherwise share
            what it computes again with the forward pass.
    """

    cut: Cut
    jaxprs: tuple[Jaxpr, ...]
    inputs: Dims
    outputs: Dims
    later: Mask
    __name__ = "tiles"

    def __call__(self, *arrays: Any) -> Arrays:
        cut, types = self.cut, ClosedJaxpr(self.jaxprs[0], ()).out_avals

        def step(totals: Arrays, start: Any, length: int, jaxpr: Jaxpr) -> Arrays:
            tile = [cut.read(*each, start, length) for each in zip(arrays, self.inputs, strict=True)]
            if any(self.later):
                tile = merge(tile, lax.optimization_barrier(pick(tile, self.later)), self.later)
            found = zip(totals, self.outputs, eval_jaxpr(jaxpr, (), *tile), strict=True)
            return [cut.write(total, dim, start, new) for total, dim, new in found]

        def body(totals: Arrays, i: Any) -> tuple[Arrays, None]:
            return step(totals, i * cut.length, cut.length, self.jaxprs[0]), None

        totals = zeros_after(arrays, [*map(self._total, types, self.outputs)])
        whole, last = divmod(cut.size // cut.parts, cut.length)
        if whole > 1:
            totals, _ = lax.scan(body, totals, jnp.arange(whole, dtype=jnp.int32))
        elif whole:
            totals = step(totals, 0, cut.length, self.jaxprs[0])
        if last:
            totals = step(totals, whole * cut.length, last, self.jaxprs[-1])
        return [total.astype(type_.dtype) for total, type_ in zip(totals, types, strict=True)]

    def _total(self, tile: Any, dim: int | None) -> Any:
        """The type of an output before its last cast: sums are kept in float32 at least."""
        if dim is not None:
            return tile.update(shape=(*tile.shape[:dim], self.cut.size, *tile.shape[dim + 1 :]))
        is_short = is_differentiable(tile.dtype) and jnp.finfo(tile.dtype).bits < 32
        return tile.update(dtype=jnp.dtype("float32")) if is_short else tile

    @_kept
    def primal(self, nonzero: Mask) -> "Derived":
        """The outputs where some inputs are differentiated, by what custom rules compute them with."""
        traced = [primal_of(jaxpr, nonzero) for jaxpr in self.jaxprs]
        return Tiling.of(self.cut, traced, self.inputs, self.outputs, self.later)

    @_kept
    def tangent(self, nonzero: Mask, active: Mask) -> "Derived":
        """The tangents of some outputs, from those of some inputs behind all inputs."""

        def rule(*arrays: Any, jaxpr: Jaxpr) -> Arrays:
            run, part = _of_part(jaxpr, arrays[: len(nonzero)], nonzero, active)
            return jax.jvp(run, (part,), ([*arrays[len(nonzero) :]],))[1]

        def tangents(jaxpr: Jaxpr) -> list[Any]:
            return [var.aval.to_tangent_aval() for var in pick(jaxpr.invars, nonzero)]

        inputs, later = ((*whole, *pick(whole, nonzero)) for whole in (self.inputs, self.later))
        return self._derived(rule, tangents, inputs, pick(self.outputs, active), later)

    @_kept
    def pullback(self, nonzero: Mask, has_ct: Mask) -> "Derived":
        """The cotangents of some inputs, from those of some outputs behind all inputs."""

        def rule(*arrays: Any, jaxpr: Jaxpr) -> Arrays:
            run, part = _of_part(jaxpr, arrays[: len(nonzero)], nonzero, has_ct)
            return jax.vjp(run, part)[1]([*arrays[len(nonzero) :]])[0]

        def cotangents(jaxpr: Jaxpr) -> list[Any]:
            return [var.aval.to_ct_aval() for var in pick(jaxpr.outvars, has_ct)]

        given = pick(self.outputs, has_ct)
        later = (*(dim is not None for dim in self.inputs), *[True] * len(given))
        return self._derived(rule, cotangents, (*self.inputs, *given), pick(self.inputs, nonzero), later)

    def _derived(self, rule: Callable[..., Arrays], more: Any, *fields: Any) -> "Derived":
        traced = []
        for jaxpr in self.jaxprs:
            types = [*(var.aval for var in jaxpr.invars), *(more(jaxpr) if more else [])]
            traced.append(jax.make_jaxpr(functools.partial(rule, jaxpr=jaxpr))(*types))
        return Tiling.of(self.cut, traced, *fields)

    @_kept
    def mapped(self, axis: Any, is_mapped: Mask) -> "Derived":
        """The same for a batch, in front of the inputs in the mask and of the outputs that depend on it."""
        of_outputs = [False] * len(self.outputs)
        for _ in self.jaxprs:  # what depends on it in one of them has it in all
            every = [
                batch_jaxpr(ClosedJaxpr(jaxpr, ()), axis, is_mapped, of_outputs) for jaxpr in self.jaxprs
            ]
            of_outputs = [any(column) for column in zip(*(found for _, found in every), strict=True)]
        inputs, outputs = (
            [dim if dim is None else dim + is_ for dim, is_ in zip(dims, mask, strict=True)]
            for dims, mask in ((self.inputs, is_mapped), (self.outputs, of_outputs))
        )
        return Tiling.of(self.cut, [traced for traced, _ in every], inputs, outputs, self.later)

    @staticmethod
    def of(
        cut: Cut,
        traced: Sequence[ClosedJaxpr],
        inputs: Sequence[int | None],
        outputs: Sequence[int | None],
        later: Sequence[bool],
    ) -> "Derived":
        """A traced function's tiling, and the constants of all jaxprs, which are its last inputs."""
        constants = [jnp.asarray(constant) for one in traced for constant in one.consts]
        types, jaxprs, start = [*map(jax.typeof, constants)], [], 0
        for one in traced:
            count, own = len(one.in_avals), slice(start, start + len(one.consts))

            def run(*arrays: Any, one: ClosedJaxpr = one, count: int = count, own: slice = own) -> Arrays:
                return eval_jaxpr(one.jaxpr, arrays[count:][own], *arrays[:count])

            jaxpr = jax.make_jaxpr(run)(*one.in_avals, *types).jaxpr if types else one.jaxpr
            jaxprs.append(dce_jaxpr(jaxpr, [True] * len(outputs), instantiate=True)[0])
            start = own.stop
        inputs, later = (*inputs, *[None] * len(constants)), (*later, *[False] * len(constants))
        return Tiling(cut, tuple(jaxprs), inputs, tuple(outputs), later), constants


def _of_part(jaxpr: Jaxpr, arrays: Sequence[Any], mask: Mask, results: Mask | None = None) -> Any:
    """Some results of a jaxpr as a function of the inputs in a mask, and these."""

    def run(part: Arrays) -> Arrays:
        found = eval_jaxpr(jaxpr, (), *merge(arrays, part, mask))
        return found if results is None else pick(found, results)

    return run, pick(arrays, mask)


Derived = tuple[Tiling, Arrays]


class Tiles(Differentiable):
    """The loop over tiles."""

    tiling: Tiling

    def __init__(self, tiling: Tiling, types: Sequence[Any]) -> None:
        self.in_avals = tuple(types)
        self.out_aval = jax.make_jaxpr(compiled(tiling))(*types).out_avals
        self.params = {"tiling": tiling}
        self.effects = frozenset().union(*(jaxpr.effects for jaxpr in tiling.jaxprs))
        super().__init__()

    def expand(self, *arrays: Any) -> Arrays:
        return compiled(self.tiling)(*arrays)

    def primal(self, nonzero: Mask, args: Any) -> Arrays:
        return run_tiles(self.tiling.primal(nonzero), args)

    def active(self, nonzero: Mask) -> Mask:
        found = [active_outputs(jaxpr, nonzero) for jaxpr in self.tiling.jaxprs]
        return tuple(map(any, zip(*found, strict=True)))

    def tangent(self, nonzero: Mask, primals: Any, tangents: Arrays) -> Arrays:
        return run_tiles(self.tiling.tangent(nonzero, self.active(nonzero)), [*primals, *tangents])

    def vjp_fwd(self, nonzero: Any, *arrays: Any) -> tuple[Arrays, Any]:
        nonzero = self._nonzero(nonzero)
        return self.primal(nonzero, arrays), (arrays, Static(nonzero))

    def vjp_bwd(self, residuals: Any, cotangents: Any, *sums: Any) -> None:
        arrays, nonzero = residuals[0], residuals[1].value
        is_float = floats(self.out_aval)
        has_ct = tuple(is_ and not is_zero(ct) for is_, ct in zip(is_float, cotangents, strict=True))
        derived = self.tiling.pullback(nonzero, has_ct)
        found = run_tiles(derived, [*arrays, *as_arrays(pick(cotangents, has_ct))])
        for total, ct in zip(pick(sums, nonzero), found, strict=True):
            total.accum(ct)

    def batch(self, axis: Any, args: Any, dims: Any) -> Any:
        if not_mapped(self, axis, dims):
            return self(*args), [None] * len(self.out_aval)
        tiling, constants = self.tiling.mapped(axis, tuple(dim is not None for dim in dims))
        found = run_tiles((tiling, constants), moved(args, dims, 0))
        return found, [0 if x.ndim > old.ndim else None for x, old in zip(found, self.out_aval, strict=True)]

    def dce(self, used: Any, *live: Any) -> Any:
        if self.effects or not any(used):
            return (True, True, self) if self.effects else (False, False, None)
        tiling, is_read = self.tiling, [False] * len(self.in_avals)
        for _ in range(2):  # inputs that one of them reads, all have
            found = [dce_jaxpr(jaxpr, used, instantiate=is_read) for jaxpr in tiling.jaxprs]
            is_read = [any(column) for column in zip(*(read for _, read in found), strict=True)]
        if all(used) and all(is_read):
            return True, True, self
        parts = (pick(tiling.inputs, is_read), pick(tiling.outputs, used), pick(tiling.later, is_read))
        smaller = Tiling(tiling.cut, tuple(jaxpr for jaxpr, _ in found), *map(tuple, parts))
        return tuple(is_read), [*used], Tiles(smaller, pick(self.in_avals, is_read))


def run_tiles(derived: Derived, arrays: Sequence[Any]) -> Arrays:
    """Run a tiling on arrays, and on the constants that it comes with."""
    tiling, constants = derived
    arrays = [*arrays, *constants]
    return Tiles(tiling, [*map(jax.typeof, arrays)])(*arrays)
