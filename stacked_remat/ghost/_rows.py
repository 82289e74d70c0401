"""Which dimensions of the values in a traced program are examples, or tokens.

The program is traced twice, the second time with more examples: a dimension that grew by the same factor
holds examples. What a reshape merges is followed through the program.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

Factor: TypeAlias = tuple[int, int | None]
"""A size, and which of the units (0 the example, 1 the position) it counts; None for any other."""
Dimension: TypeAlias = tuple[Factor, ...] | None
"""The factors of a dimension, the slowest first; None where the order of its rows is not known."""
Rows: TypeAlias = tuple[Dimension, ...]
"""One entry for each dimension of an array."""


class Units(NamedTuple):
    """What scores are given for.

    Attributes:
        sizes: of examples, or of examples and positions. Empty where there is only one example: all
            rows are its rows.
        growth: by how much each is larger in the second trace; different primes.
    """

    sizes: tuple[int, ...]
    growth: tuple[int, ...]

    def of_growth(self, size: int, other: int) -> tuple[int, ...] | None:
        """The units in a dimension that has the size `other` in the second trace; None if unclear."""
        for number in range(len(self.sizes) + 1):
            for some in itertools.combinations(range(len(self.sizes)), number):
                if other == size * math.prod(self.growth[unit] for unit in some):
                    return some
        return None


def has_units(rows: Rows) -> bool:
    """Whether a value has rows of several examples, or may have."""
    return any(dim is None or any(unit is not None for _, unit in dim) for dim in rows)


def of_input(shape: Sequence[int], other: Sequence[int], units: Units) -> Rows:
    """The rows of an input of the program, from its shape in both traces."""
    return tuple(_by_size(size, larger, units) for size, larger in zip(shape, other, strict=True))


def of_output(
    equation: Any, shape: Sequence[int], other: Sequence[int] | None, inputs: Sequence[Rows], units: Units
) -> Rows:
    """The rows of an equation's result.

    Args:
        equation: of the first trace.
        shape: of the result.
        other: the result's shape in the second trace, None where the traces differ.
        inputs: the rows of the operands.
        units: see there.
    """
    if not units.sizes:
        return tuple(((size, None),) for size in shape)
    if other is None:
        return (None,) * len(shape)
    if any(dim is None for rows in inputs for dim in rows):
        return tuple(
            ((size, None),) if size == larger else None for size, larger in zip(shape, other, strict=True)
        )
    if equation.primitive.name == "reshape" and 0 not in shape:
        return _regrouped(inputs[0], shape)
    found = [_by_size(size, larger, units) for size, larger in zip(shape, other, strict=True)]
    for at, (size, larger) in enumerate(zip(shape, other, strict=True)):
        if found[at] is None and units.of_growth(size, larger):
            found[at] = _inherited(size, inputs)
    if _may_reorder(equation, inputs, shape):
        return tuple(dim if dim and all(unit is None for _, unit in dim) else None for dim in found)
    return tuple(found)


def _by_size(size: int, other: int, units: Units) -> Dimension:
    some = units.of_growth(size, other)
    if some == ():
        return ((size, None),)
    if some is not None and len(some) == 1 and size == units.sizes[some[0]]:
        return ((size, some[0]),)
    return None


def _inherited(size: int, inputs: Sequence[Rows]) -> Dimension:
    """The factors of the operands' dimensions of this size that hold several, if they agree."""
    candidates = {
        dim
        for rows in inputs
        for dim in rows
        if dim is not None and len(dim) > 1 and math.prod(n for n, _ in dim) == size
    }
    return candidates.pop() if len(candidates) == 1 else None


def _regrouped(rows: Rows, shape: Sequence[int]) -> Rows:
    """The rows after a reshape: the same factors in the same order, in other groups."""
    factors = [factor for dim in rows for factor in dim or ()]
    found: list[Dimension] = []
    for size in shape:
        group: list[Factor] = []
        left = size
        while left > 1:
            while factors and factors[0][0] == 1:
                factors.pop(0)
            if not factors:
                return (None,) * len(shape)
            own, unit = factors.pop(0)
            if left % own == 0:
                group.append((own, unit))
                left //= own
            elif unit is None and own % left == 0:
                group.append((left, None))
                factors.insert(0, (own // left, None))
                left = 1
            else:
                return (None,) * len(shape)
        found.append(_merged(group) or ((size, None),))
    return tuple(found)


def _merged(group: Sequence[Factor]) -> tuple[Factor, ...]:
    found: list[Factor] = []
    for size, unit in group:
        if found and unit is None and found[-1][1] is None:
            found[-1] = (found[-1][0] * size, None)
        else:
            found.append((size, unit))
    return tuple(found)


def _unit_dims(rows: Rows) -> set[int]:
    return {at for at, dim in enumerate(rows) if dim is None or any(unit is not None for _, unit in dim)}


def _may_reorder(equation: Any, inputs: Sequence[Rows], shape: Sequence[int]) -> bool:
    """Whether the rows of examples may be in another order than the operands'."""
    name, params = equation.primitive.name, equation.params
    own = _unit_dims(inputs[0]) if inputs else set()
    if name == "sort":
        return params["dimension"] in own
    if name == "rev":
        return not own.isdisjoint(params["dimensions"])
    if name == "concatenate":
        filled = [rows for rows in inputs if all(n for dim in rows for n, _ in dim or ())]
        return len(filled) > 1 and any(params["dimension"] in _unit_dims(rows) for rows in filled)
    if name in ("slice", "dynamic_slice", "pad"):
        before = [math.prod(n for n, _ in dim or ()) for dim in inputs[0]]
        return any(before[at] != shape[at] for at in own)
    if name == "gather":
        batched = params["dimension_numbers"].operand_batching_dims
        sizes = [math.prod(n for n, _ in dim or ()) for dim in inputs[0]]
        return any(at not in batched and params["slice_sizes"][at] != sizes[at] for at in own)
    if name.startswith("scatter"):
        return bool(own) or any(_unit_dims(rows) for rows in inputs[1:])
    return False
