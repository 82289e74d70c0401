"""The loops over tiles, forward and backward, on raw arrays."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import lax
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr

from ._activity import is_differentiable
from ._compat import as_residual, of_residual
from ._sweep.gradient import merge, pick, scatter_leaves
from ._sweep.store import zeros_after


@dataclass(frozen=True)
class Cut:
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


class Output(NamedTuple):
    """An output: where it is in the results, its dimension along the axis, None for a sum, and its names."""

    path: str
    dim: int | None
    axes: tuple[Axis, ...] | None


class Traced(NamedTuple):
    """`fn` on tiles of one length, or on all positions.

    Attributes:
        closed: on the split arrays of a tile, then the shared ones.
        outputs: its outputs.
        structure: of what `fn` returns, with a leaf for each of `leaves`.
        leaves: the leaves of that which are not arrays, and an `Output` for each that is.
    """

    closed: ClosedJaxpr
    outputs: tuple[Output, ...]
    structure: Any
    leaves: tuple[Any, ...]

    def named(self, arrays: Sequence[Any]) -> Any:
        """What `fn` returns, with these arrays."""
        own = iter(arrays)

        def result(leaf: Any) -> Any:
            if not isinstance(leaf, Output):
                return leaf
            return next(own) if leaf.axes is None else NamedArray(next(own), leaf.axes)

        return jax.tree.unflatten(self.structure, [result(leaf) for leaf in self.leaves])


@dataclass(frozen=True, eq=False)
class Tiling:
    """The loops over tiles, on raw arrays: `split` by tile, `shared` by all."""

    cut: Cut
    length: int
    traced: tuple[Traced, ...]

    @property
    def outputs(self) -> tuple[Output, ...]:
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
        self, traced: Traced, offset: int, constants: int, tile: Sequence[Any], shared: Sequence[Any]
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

    def _whole(self, aval: Any, output: Output) -> jax.ShapeDtypeStruct:
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
def run_tiles(tiling: Tiling, split: Sequence[Any], shared: Sequence[Any]) -> list[Any]:
    return tiling.forward(split, shared)


def _forward_rule(tiling: Tiling, split: Any, shared: Any) -> tuple[list[Any], Any]:
    perturbed = tuple(
        tuple(leaf.perturbed and is_differentiable(leaf.value.dtype) for leaf in some)
        for some in (split, shared)
    )
    split, shared = ([leaf.value for leaf in some] for some in (split, shared))
    return tiling.forward(split, shared), (as_residual(perturbed), split, shared)


def _backward_rule(tiling: Tiling, residuals: Any, cotangents: Any) -> tuple[list[Any], list[Any]]:
    perturbed, split, shared = residuals
    return tiling.backward(of_residual(perturbed), split, shared, cotangents)


run_tiles.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
