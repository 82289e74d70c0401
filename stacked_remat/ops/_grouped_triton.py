"""Grouped products on NVIDIA GPUs, in Pallas' Triton.

Matrices are read as they are, transposed or not. Kernels that take one order alone make XLA transpose a
layer's matrices, and with them the whole stack that they are a slice of.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton
from jaxtyping import Array

from ._grouped_product import Kernels

_TILE = 128  # rows and columns of the part of a result that one program computes
_STEP = 32  # how much of the contracted axis it reads at once
_PARAMETERS = pallas_triton.CompilerParams(num_warps=4, num_stages=4)


def triton_kernels(interpret: bool = False) -> Kernels:
    """The kernels, or their interpretation, which runs anywhere."""
    return Kernels(
        functools.partial(_grouped_product, interpret=interpret),
        functools.partial(_grouped_outer, interpret=interpret),
    )


def _grouped_product(
    x: Array, w: Array, sizes: Array, transposed: bool, dtype: Any, interpret: bool
) -> Array:
    outer = w.shape[1 if transposed else 2]
    columns, step = _tile(outer, _TILE), _tile(x.shape[1], _STEP)
    rows = _tile(len(x), _TILE)
    expert, first, end = _tiles_of_rows(sizes, len(x), rows)
    kernel = functools.partial(_product_of_tile, tile=(rows, columns, step), transposed=transposed)
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((len(x), outer), dtype),
        grid=(pl.cdiv(outer, columns), len(expert)),  # programs that share rows run together
        compiler_params=_PARAMETERS,
        interpret=interpret,
        name="grouped_product",
    )(expert, first, end, x, w)


def _grouped_outer(x: Array, y: Array, sizes: Array, dtype: Any, interpret: bool) -> Array:
    shape = (len(sizes), x.shape[1], y.shape[1])
    tile = (_tile(len(x), _STEP), *(_tile(size, _TILE) for size in shape[1:]))
    end = jnp.cumsum(sizes)
    return pl.pallas_call(
        functools.partial(_outer_of_tile, tile=tile),
        jax.ShapeDtypeStruct(shape, dtype),
        grid=(pl.cdiv(shape[2], tile[2]), pl.cdiv(shape[1], tile[1]), len(sizes)),
        compiler_params=_PARAMETERS,
        interpret=interpret,
        name="grouped_outer",
    )(end - sizes, end, x, y)


def _tile(size: int, most: int) -> int:
    """A power of two of at least 16, the least that the tensor cores take."""
    return min(most, max(16, 2 ** math.ceil(math.log2(size))))


def _tiles_of_rows(sizes: Array, rows: int, tile: int) -> tuple[Array, Array, Array]:
    """The expert of each tile of rows, its first row, and the end of its expert's rows; unused ones are last.

    An expert's first tile begins at its first row, so only its last has rows of others.
    """
    last = jnp.cumsum(-(-sizes // tile))
    number = jnp.arange(rows // tile + len(sizes), dtype=jnp.int32)
    expert = jnp.sum(last[None, :] <= number[:, None], axis=1, dtype=jnp.int32)
    is_used = expert < len(sizes)
    expert = jnp.minimum(expert, len(sizes) - 1)
    end = jnp.cumsum(sizes)[expert]
    first = (end - sizes[expert]) + (number - (last - -(-sizes // tile))[expert]) * tile
    return expert, first.astype(jnp.int32), jnp.where(is_used, end, 0).astype(jnp.int32)


def _product_of_tile(
    expert: Any, first: Any, end: Any, x: Any, w: Any, out: Any, *, tile: tuple[int, ...], transposed: bool
) -> None:
    rows, columns, step = tile
    column, number = pl.program_id(0) * columns, pl.program_id(1)
    own, row = expert[number], first[number]
    is_row = (row + jnp.arange(rows)) < end[number]
    is_column = (column + jnp.arange(columns)) < out.shape[1]
    inner = x.shape[1]

    def add(i: Any, total: Array) -> Array:
        at = i * step
        is_inner = (at + jnp.arange(step)) < inner
        own_rows = _read(x.at[pl.ds(row, rows), pl.ds(at, step)], is_row, is_inner)
        if transposed:
            matrix = _read(w.at[own, pl.ds(column, columns), pl.ds(at, step)], is_column, is_inner).T
        else:
            matrix = _read(w.at[own, pl.ds(at, step), pl.ds(column, columns)], is_inner, is_column)
        return total + pallas_triton.dot(own_rows, matrix)

    @pl.when(row < end[number])
    def _() -> None:
        total = lax.fori_loop(0, pl.cdiv(inner, step), add, jnp.zeros((rows, columns), jnp.float32))
        mask = is_row[:, None] & is_column[None, :]
        at = out.at[pl.ds(row, rows), pl.ds(column, columns)]
        pallas_triton.store(at, total.astype(out.dtype), mask=mask)


def _outer_of_tile(first: Any, end: Any, x: Any, y: Any, out: Any, *, tile: tuple[int, ...]) -> None:
    step, inner, outer = tile
    right, left, own = pl.program_id(0) * outer, pl.program_id(1) * inner, pl.program_id(2)
    is_left = (left + jnp.arange(inner)) < x.shape[1]
    is_right = (right + jnp.arange(outer)) < y.shape[1]
    begin, stop = first[own], end[own]

    def add(i: Any, total: Array) -> Array:
        row = begin + i * step
        is_row = (row + jnp.arange(step)) < stop
        of_x = _read(x.at[pl.ds(row, step), pl.ds(left, inner)], is_row, is_left)
        of_y = _read(y.at[pl.ds(row, step), pl.ds(right, outer)], is_row, is_right)
        return total + pallas_triton.dot(of_x.T, of_y)

    total = lax.fori_loop(0, pl.cdiv(stop - begin, step), add, jnp.zeros((inner, outer), jnp.float32))
    at = out.at[own, pl.ds(left, inner), pl.ds(right, outer)]
    pallas_triton.store(at, total.astype(out.dtype), mask=is_left[:, None] & is_right[None, :])


def _read(at: Any, is_first: Array, is_second: Array) -> Array:
    """A tile of a matrix, zero outside of the rows and columns that are asked for."""
    return pallas_triton.load(at, mask=is_first[:, None] & is_second[None, :], other=0)
