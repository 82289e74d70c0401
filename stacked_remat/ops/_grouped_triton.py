"""Grouped products on NVIDIA GPUs, in Pallas' Triton.

Matrices are read as they are, transposed or not. Kernels that take one order alone make XLA transpose a
layer's matrices, and with them the whole stack that they are a slice of.

JAX deprecates Triton in Pallas since 0.11.2, and is to remove it.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from ._expert_loop import InStack
from ._grouped_product import Groups, Kernels, Products, Rows, in_sequence

pallas_triton: Any
try:
    from jax.experimental.pallas import triton as pallas_triton
except ImportError:
    pallas_triton = None

_TILE = 128  # rows and columns of the part of a result that one program computes
_STEP = 32  # how much of the contracted axis it reads at once


def against_pallas_triton(is_attached: bool) -> str | None:
    """Why there are no kernels for a device that is attached, or is not; None if there are."""
    if pallas_triton is None:
        return f"JAX {jax.__version__} has no Triton in Pallas any more"
    if jax.__version_info__ >= (0, 11) and not is_attached:  # Pallas asks an attached device what it is
        return f"JAX {jax.__version__} compiles its kernels for an attached GPU alone"
    return None


def triton_kernels(interpret: bool = False) -> Kernels:
    """The kernels, or their interpretation, which runs anywhere."""
    return Kernels(
        functools.partial(_products, interpret=interpret),
        functools.partial(_outer, interpret=interpret),
        functools.partial(_sums, interpret=interpret),
    )


def _products(
    what: Products,
    rows: Sequence[Rows],
    matrices: Sequence[Array | InStack],
    others: Sequence[Rows],
    sizes: Array,
    products_too: bool,
    interpret: bool,
) -> list[Array]:
    count, is_first_transposed = _count(rows[0]), what.terms[0][1].transposed
    first_of = [one.first if isinstance(one, InStack) else jnp.int32(0) for one in matrices]
    matrices = [one.stack if isinstance(one, InStack) else one for one in matrices]
    outer = matrices[0].shape[1 if is_first_transposed else 2]
    steps = tuple(_tile(one.array.shape[1], _STEP) for one in rows)
    tile = _tile(count, _TILE), _tile(outer, _TILE)
    expert, first, end = _tiles_of_rows(sizes, count, tile[0])
    dtypes = [what.dtype, *(one.dtype for one in what.products if products_too)]
    flat, tree = jax.tree.flatten((list(rows), matrices, list(others)))

    def kernel(expert: Any, first: Any, end: Any, first_of: Any, *refs: Any) -> None:
        tiles = expert, first, end, first_of
        _of_tile(what, tile, steps, tiles, tree.unflatten(refs[: len(flat)]), refs[len(flat) :])

    call = pl.pallas_call(
        kernel,
        [jax.ShapeDtypeStruct((count, outer), dtype) for dtype in dtypes],
        grid=(pl.cdiv(outer, tile[1]), len(expert)),  # programs that share rows run together
        compiler_params=_parameters(len(what.products), rows[0].array.dtype),
        interpret=interpret,
        name="grouped_products",
    )
    return in_sequence(call, expert, first, end, jnp.stack(first_of), *flat)


def _outer(x: Rows, y: Rows, sizes: Array, dtype: Any, interpret: bool) -> Array:
    shape = (len(sizes), x.array.shape[1], y.array.shape[1])
    tile = (_tile(_count(x), _STEP), *(_tile(size, _TILE) for size in shape[1:]))
    end = jnp.cumsum(sizes)
    flat, tree = jax.tree.flatten((x, y))

    def kernel(first: Any, end: Any, *refs: Any) -> None:
        left, right = tree.unflatten(refs[:-1])
        _outer_of_tile(tile, first, end, left, right, refs[-1])

    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(shape, dtype),
        grid=(pl.cdiv(shape[2], tile[2]), pl.cdiv(shape[1], tile[1]), len(sizes)),
        compiler_params=_parameters(1, x.array.dtype),
        interpret=interpret,
        name="grouped_outer",
    )
    return in_sequence(call, end - sizes, end, *flat)


def _sums(rows: Array, groups: Groups, interpret: bool) -> Array:
    """The sums of the rows of each token. XLA would compute several at once, and keep all of their rows."""
    tokens, choices = groups.row.shape
    tile = _tile(tokens, 16), _tile(rows.shape[1], _TILE)
    row = jnp.where(jnp.take(groups.real, groups.row), groups.row, len(rows)).T

    def kernel(row: Any, rows: Any, out: Any) -> None:
        token, column = pl.program_id(0) * tile[0], pl.program_id(1) * tile[1]
        columns = column + jnp.arange(tile[1])
        is_token, is_column = token + jnp.arange(tile[0]) < tokens, columns < rows.shape[1]

        def add(choice: Any, total: Array) -> Array:
            own = pallas_triton.load(
                row.at[choice, pl.ds(token, tile[0])], mask=is_token, other=rows.shape[0]
            )
            found = _read(rows.at[own[:, None], columns[None, :]], own < rows.shape[0], is_column)
            return total + found.astype(jnp.float32)

        total = lax.fori_loop(0, choices, add, jnp.zeros(tile, jnp.float32))
        at = out.at[pl.ds(token, tile[0]), pl.ds(column, tile[1])]
        pallas_triton.store(at, total.astype(out.dtype), mask=is_token[:, None] & is_column[None, :])

    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((tokens, rows.shape[1]), rows.dtype),
        grid=(pl.cdiv(tokens, tile[0]), pl.cdiv(rows.shape[1], tile[1])),
        compiler_params=_parameters(1, rows.dtype),
        interpret=interpret,
        name="sums_of_rows",
    )
    return in_sequence(call, row, rows)


def _parameters(sums: int, dtype: Any) -> Any:
    """For a program with so many tiles of sums, in registers, that reads tiles of this dtype ahead."""
    return pallas_triton.CompilerParams(num_warps=4 * sums, num_stages=8 // jnp.dtype(dtype).itemsize)


def _count(rows: Rows) -> int:
    return len(rows.array if rows.at is None else rows.at)


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


def _of_tile(
    what: Products,
    tile: tuple[int, int],
    steps: Sequence[int],
    tiles: tuple[Any, Any, Any, Any],
    operands: tuple[Sequence[Rows], Sequence[Any], Sequence[Rows]],
    outs: Sequence[Any],
) -> None:
    (expert, first, end, first_of), (rows, matrices, others) = tiles, operands
    column, number = pl.program_id(0) * tile[1], pl.program_id(1)
    own, row = expert[number], first[number]
    is_row = (row + jnp.arange(tile[0])) < end[number]
    is_column = (column + jnp.arange(tile[1])) < outs[0].shape[1]

    def matrix(number: int, at: Any, is_inner: Array) -> Array:
        w, inner, outer = matrices[number], pl.ds(at, len(is_inner)), pl.ds(column, tile[1])
        entry = first_of[number] + own
        if what.terms[number][1].transposed:
            return _read(w.at[entry, outer, inner], is_column, is_inner).T
        return _read(w.at[entry, inner, outer], is_inner, is_column)

    @pl.when(row < end[number])
    def _() -> None:
        products = [jnp.zeros(tile, jnp.float32) for _ in what.products]
        for of, (x, step) in enumerate(zip(rows, steps, strict=True)):
            of_rows = _RowsOfTile.of(x, row, is_row)

            def add(
                i: Any, sums: list[Array], of: int = of, of_rows: Any = of_rows, step: int = step
            ) -> list[Array]:
                is_inner = (i * step + jnp.arange(step)) < of_rows.array.shape[1]
                left, sums = of_rows.read(i * step, is_inner), list(sums)
                for number, (product, term) in enumerate(what.terms):
                    if term.rows == of:
                        sums[product] += pallas_triton.dot(left, matrix(number, i * step, is_inner))
                return sums

            products = lax.fori_loop(0, pl.cdiv(x.array.shape[1], step), add, products)
        result = what.result(products, [_other(one, row, column, is_row, is_column) for one in others])
        at = pl.ds(row, tile[0]), pl.ds(column, tile[1])
        for out, one in zip(outs, [result, *products], strict=False):
            mask = is_row[:, None] & is_column[None, :]
            pallas_triton.store(out.at[at], one.astype(out.dtype), mask=mask)


class _RowsOfTile(NamedTuple):
    """Some rows of an array, as its index, and which of them there are."""

    array: Any
    index: Any
    is_row: Array

    @classmethod
    def of(cls, rows: Rows, first: Any, is_row: Array) -> "_RowsOfTile":
        """The rows from the first on."""
        index = pl.ds(first, len(is_row))
        if rows.at is not None:
            of_rows: Any = rows.at
            index = pallas_triton.load(of_rows.at[index], mask=is_row, other=0)
            is_row = is_row & (index < rows.array.shape[0])
        return cls(rows.array, index, is_row)

    def read(self, column: Any, is_column: Array) -> Array:
        """The columns from this one on."""
        columns: Any = pl.ds(column, len(is_column))
        index = self.index
        if isinstance(index, Array):
            index, columns = index[:, None], (column + jnp.arange(len(is_column)))[None, :]
        return _read(self.array.at[index, columns], self.is_row, is_column)


def _other(x: Rows, row: Any, column: Any, is_row: Array, is_column: Array) -> Array:
    if x.array.shape[1] == 1:
        is_column, column = jnp.ones(1, bool), 0
    return _RowsOfTile.of(x, row, is_row).read(column, is_column)


def _outer_of_tile(tile: tuple[int, ...], first: Any, end: Any, x: Rows, y: Rows, out: Any) -> None:
    step, inner, outer = tile
    right, left, own = pl.program_id(0) * outer, pl.program_id(1) * inner, pl.program_id(2)
    is_left = (left + jnp.arange(inner)) < x.array.shape[1]
    is_right = (right + jnp.arange(outer)) < y.array.shape[1]
    begin, stop = first[own], end[own]

    def add(i: Any, total: Array) -> Array:
        row = begin + i * step
        is_row = (row + jnp.arange(step)) < stop
        of_x = _RowsOfTile.of(x, row, is_row).read(left, is_left)
        of_y = _RowsOfTile.of(y, row, is_row).read(right, is_right)
        return total + pallas_triton.dot(of_x.T, of_y)

    steps = lax.div(stop - begin + jnp.int32(step - 1), jnp.int32(step))
    total = lax.fori_loop(0, steps, add, jnp.zeros((inner, outer), jnp.float32))
    at = out.at[own, pl.ds(left, inner), pl.ds(right, outer)]
    pallas_triton.store(at, total.astype(out.dtype), mask=is_left[:, None] & is_right[None, :])


def _read(at: Any, is_first: Array, is_second: Array) -> Array:
    """A tile of a matrix, zero outside of the rows and columns that are asked for."""
    return pallas_triton.load(at, mask=is_first[:, None] & is_second[None, :], other=0)
