"""Which dimensions of an array hold examples, or tokens."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

EXAMPLE, POSITION, PLACE = 0, 1, 2
"""What a dimension may count: examples; positions of data; or places that there are as many of as positions,
such as those of an `iota`, a mask, a table, or slots to which tokens are sent."""

Factor: TypeAlias = tuple[int, int | None]
"""A size, and which of these it counts; None for any other."""
Dimension: TypeAlias = tuple[Factor, ...] | None
"""The factors of a dimension, the slowest first; None where the order of its rows is not known."""
Rows: TypeAlias = tuple[Dimension, ...]
"""One entry for each dimension of an array."""


Numbers: TypeAlias = tuple[tuple[int | None, int], ...]
"""Pairs of a column and a dimension: the entries of this column along the last dimension, or all if it is
None, are 0, 1, 2, ... along the dimension. Of an array that is False, `(None, -1)`."""


class Flow(NamedTuple):
    """What is known of a value.

    Attributes:
        rows: which of its dimensions hold examples.
        is_followed: whether it depends on a scored weight; between examples it then must not mix.
        mixed: where examples were mixed, or may have been, on the way from such weights; empty if nowhere.
        numbers: which of its rows it numbers; see `_numbers`.
    """

    rows: Rows
    is_followed: bool = False
    mixed: str = ""
    numbers: Numbers = ()


class Units(NamedTuple):
    """What scores are given for.

    Attributes:
        sizes: of examples, or of examples and positions. Empty where there is only one example, without
            positions: all rows are its rows.
        growth: by how much each is larger in the second trace; different primes, 1 for a single example.
        mesh_axes: within a `jax.shard_map`, the axes of the mesh that divide them.
        in_rule: whether the program is a derivative rule, which is not differentiated.
        of_data: whether what depends on data is followed, integers too, rather than on scored weights.
    """

    sizes: tuple[int, ...]
    growth: tuple[int, ...]
    mesh_axes: frozenset[str] = frozenset()
    of_data: bool = False
    in_rule: bool = False

    @property
    def growing(self) -> list[int]:
        """The units that are told apart by sizes."""
        return [unit for unit, growth in enumerate(self.growth) if growth > 1]

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


def has_examples(rows: Rows) -> bool:
    """Whether a value has rows of several examples, or may have; positions are not examples."""
    return any(dim is None or any(unit == EXAMPLE for _, unit in dim) for dim in rows)


def has_positions(rows: Rows) -> bool:
    """Whether a value has rows of positions of data."""
    return any(unit == POSITION for dim in rows for _, unit in dim or ())


def factor_units(dim: Dimension) -> list[int | None]:
    """What the factors of a dimension count, places as positions."""
    return [POSITION if unit == PLACE else unit for _, unit in dim or ()]


def counted(dim: Dimension) -> list[int]:
    """The units that a dimension counts, places as positions."""
    return [unit for unit in factor_units(dim) if unit is not None]


def of_batch(rows: Rows) -> Rows:
    """The rows of an array of the batch, or of what the library computes of one: its places are positions."""
    return tuple(dim and _put(dim, PLACE, POSITION) for dim in rows)


def of_places(rows: Rows) -> Rows:
    """The rows of a value whose order along positions may be any."""
    return tuple(dim and _put(dim, POSITION, PLACE) for dim in rows)


def _put(dim: tuple[Factor, ...], old: int, new: int) -> tuple[Factor, ...]:
    return tuple((size, new if unit == old else unit) for size, unit in dim)


def agreed(*dims: Dimension) -> Dimension:
    """The dimension that all of these are, None where they differ; of positions and places, positions."""
    return _common(dims, max)


def either(*dims: Dimension) -> Dimension:
    """As `agreed`, of positions and places places."""
    return _common(dims, min)


def _common(dims: Sequence[Dimension], choose: Callable[..., Any]) -> Dimension:
    if not dims or None in dims or len({_put(dim or (), PLACE, POSITION) for dim in dims}) != 1:
        return None
    known = [dim for dim in dims if dim is not None]
    return choose(known, key=lambda dim: sum(unit == POSITION for _, unit in dim))


def are_apart(rows: Rows) -> bool:
    """Whether each number of a value belongs to one example, and it is known to which."""
    units = [unit for dim in rows for _, unit in dim or ()]
    return units.count(EXAMPLE) == 1 and None not in rows


def of_input(shape: Sequence[int], other: Sequence[int], units: Units) -> Rows:
    """The rows of a value, from its shape in both traces; along positions they are places."""
    return tuple(_by_size(size, larger, units) for size, larger in zip(shape, other, strict=True))


def _by_size(size: int, other: int, units: Units) -> Dimension:
    some = units.of_growth(size, other)
    if some == ():
        return ((size, None),)
    if some is not None and len(some) == 1 and size == units.sizes[some[0]]:
        return ((size, PLACE if some[0] == POSITION else some[0]),)
    return None


def unknown(shape: Sequence[int], other: Sequence[int]) -> Rows:
    return tuple(
        ((size, None),) if size == larger else None for size, larger in zip(shape, other, strict=True)
    )


def known_rows(sized: Rows, own: Rows) -> Rows:
    """The rows that the sizes tell or, where these leave a doubt (several factors), the value's own."""
    if len(own) != len(sized):
        return sized
    if None in sized and None not in own:
        return own
    return tuple(agreed(dim, one) or dim for dim, one in zip(sized, own, strict=True))


def unit_dims(rows: Rows) -> set[int]:
    return {at for at, dim in enumerate(rows) if dim is None or any(unit is not None for _, unit in dim)}


def with_inherited(rows: Rows, shape: Sequence[int], inputs: Sequence[Rows]) -> Rows:
    return tuple(
        _inherited(size, inputs) if dim is None else dim for dim, size in zip(rows, shape, strict=True)
    )


def _inherited(size: int, inputs: Sequence[Rows]) -> Dimension:
    """The factors of the operands' dimensions of this size that hold several, if they agree."""
    candidates = {
        dim
        for rows in inputs
        for dim in rows
        if dim is not None and len(dim) > 1 and math.prod(n for n, _ in dim) == size
    }
    return candidates.pop() if len(candidates) == 1 else None
