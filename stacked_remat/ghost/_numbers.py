"""Integers that number their own rows, such as `jnp.arange(batch)`, and what they choose by index."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from ._units import Numbers, Rows, agreed, has_units

_FALSE: Numbers = ((None, -1),)
_KEEPING = ("convert_element_type", "copy", "stop_gradient", "reshard", "sharding_constraint")


def numbers_of(equation: Any, operands: Sequence[Numbers]) -> Numbers:
    """What the first result of an equation numbers, from what its operands do."""
    name, params = equation.primitive.name, equation.params
    if name == "iota":
        return ((None, params["dimension"]),)
    if not any(operands):
        return ()
    if name in _KEEPING:
        dtype, shape = equation.outvars[0].aval.dtype, equation.outvars[0].aval.shape
        has_room = jnp.issubdtype(dtype, jnp.integer) and max(shape) <= jnp.iinfo(dtype).max
        return operands[0] if has_room else ()
    if name == "lt":
        zero = equation.invars[1]
        is_below = isinstance(zero, Literal) and zero.val == 0 and operands[0] != _FALSE
        return _FALSE if is_below and [column for column, _ in operands[0]] == [None] else ()
    if name == "select_n":
        return operands[1] if operands[0] == _FALSE else ()
    if name == "broadcast_in_dim":
        return _broadcast(equation, operands[0])
    if name == "concatenate":
        return _joined(equation, operands)
    return ()


def numbers_of_constant(array: Any, rows: Rows) -> Numbers:
    """What a constant with these rows numbers, such as `np.arange(batch)[:, None]`.

    That it does in the program itself is enough: the second trace, with more examples, is not evaluated.
    """
    if array is None or isinstance(array, Tracer) or not has_units(rows):
        return ()
    shape, dtype = np.shape(array), jnp.result_type(array)
    size, is_mask = max(shape), jnp.issubdtype(dtype, jnp.bool_)
    if size != np.prod(shape) or not (is_mask or jnp.issubdtype(dtype, jnp.integer)):
        return ()
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return ()
    numbers = np.asarray(array).ravel()
    if is_mask:
        return () if numbers.any() else _FALSE
    return ((None, shape.index(size)),) if np.array_equal(numbers, np.arange(size)) else ()


def _broadcast(equation: Any, own: Numbers) -> Numbers:
    before, after = equation.invars[0].aval.shape, equation.params["shape"]
    places = equation.params["broadcast_dimensions"]
    if own == _FALSE:
        return own
    return tuple(
        (column, places[dim]) for column, dim in own if column is None and before[dim] == after[places[dim]]
    )


def _joined(equation: Any, operands: Sequence[Numbers]) -> Numbers:
    """Columns that are put beside each other."""
    last = len(equation.outvars[0].aval.shape) - 1
    if equation.params["dimension"] != last:
        return ()
    found, first = [], 0
    for var, own in zip(equation.invars, operands, strict=True):
        size = var.aval.shape[last]
        counted = [dim for column, dim in own if column is None and 0 <= dim < last]
        found += [(first + at, dim) for dim in counted for at in range(size)]
        first += size
    return tuple(found)


def own_rows(equation: Any, numbers: Numbers, inputs: Sequence[Rows]) -> list[tuple[int, int]]:
    """The dimensions of what is read or updated by index of which each row of the indices has its own row.

    Returns:
        Pairs of such a dimension and the one of the indices that numbers it.
    """
    dims, by_column, (operand, indices) = equation.params["dimension_numbers"], dict(numbers), inputs[:2]
    if equation.primitive.name == "gather":
        chosen, sizes = dims.start_index_map, equation.params["slice_sizes"]
        single = {at for at in dims.collapsed_slice_dims if sizes[at] == 1}
    else:
        chosen, single = dims.scatter_dims_to_operand_dims, {*dims.inserted_window_dims}
    found = []
    for column, at in enumerate(chosen):
        of_index = by_column.get(column)
        if of_index is not None and at in single:
            if has_units((operand[at],)) and agreed(operand[at], indices[of_index]):
                found.append((at, of_index))
    return found
