"""How a `jax.shard_map` divides the rows of examples over devices."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Literal

from .._activity import active_variables, programs_in
from ._units import Dimension, Rows, Units, counted, factor_units, has_units


class Division:
    """Which units are divided over which axes of a mesh.

    Args:
        units: before they are divided.
        equation: of a `jax.shard_map`.
        inputs: the rows of its operands.
    """

    def __init__(self, units: Units, equation: Any, inputs: Sequence[Rows]) -> None:
        self._mesh = equation.params["mesh"].shape
        self.entries: list[Any] = [None] * len(units.sizes)
        """For each unit its entry in a `PartitionSpec`."""
        for rows, spec in zip(inputs, equation.params["in_specs"], strict=True):
            for dim, entry in zip(rows, spec, strict=False):
                if dim is not None and len(dim) == 1 and entry is not None:
                    for unit in counted(dim):
                        self.entries[unit] = entry
        parts = map(self._parts, self.entries)
        sizes = tuple(size // part for size, part in zip(units.sizes, parts, strict=True))
        axes = units.mesh_axes.union(*map(_names, self.entries))
        self.units = units._replace(sizes=sizes, mesh_axes=axes)
        """Of one device."""

        self.given: list[Rows] = [
            self._resized(rows, spec, lambda size, parts: size // parts, lost=frozenset())
            for rows, spec in zip(inputs, equation.params["in_specs"], strict=True)
        ]
        """The rows of the operands that one device has."""
        data = [at for at, rows in enumerate(inputs) if has_units(rows)]
        self.has_one_example = (
            sizes == (1,)
            and not any(None in self.given[at] for at in data)
            and not _is_across(_open(equation.params["jaxpr"]), data, axes)
        )
        """Whether all that a device computes is of one example."""

    def of_all(self, rows: Rows, spec: Sequence[Any]) -> Rows:
        """The rows of a result of all devices."""
        return self._resized(rows, spec, lambda size, parts: size * parts, lost=self.units.mesh_axes)

    def checked(self, rows: Rows, spec: Sequence[Any]) -> Rows:
        """The rows by the sizes of a result, unknown where devices put them together in another order."""
        return self._resized(rows, spec, lambda size, parts: size, lost=self.units.mesh_axes)

    def _resized(
        self, rows: Rows, spec: Sequence[Any], size_of: Callable[[int, int], int], lost: frozenset[str]
    ) -> Rows:
        found: list[Dimension] = []
        for dim, entry in itertools.zip_longest(rows, tuple(spec)):
            wanted = [None if unit is None else self.entries[unit] for unit in factor_units(dim)]
            if dim is not None and len(dim) == 1 and (entry == wanted[0] or dim[0][1] is None):
                (size, unit), names = dim[0], _names(entry)
                is_lost = unit is None and not lost.isdisjoint(names)
                found.append(None if is_lost else ((size_of(size, self._parts(entry)), unit),))
            else:
                found.append(dim if entry is None and not any(wanted) else None)
        return tuple(found)

    def _parts(self, entry: Any) -> int:
        return math.prod(self._mesh[name] for name in _names(entry))


def _is_across(jaxpr: Any, data: Sequence[int], axes: frozenset[str]) -> bool:
    """Whether anything that depends on these inputs is taken from other devices along one of the axes."""
    active = active_variables(jaxpr, [jaxpr.invars[at] for at in data], lambda dtype: True)
    return any(
        _contains_across(equation, axes)
        for equation in jaxpr.eqns
        if any(not isinstance(atom, Literal) and atom in active for atom in equation.invars)
    )


def _contains_across(equation: Any, axes: frozenset[str]) -> bool:
    inner = [eqn for jaxpr in programs_in(equation) for eqn in _open(jaxpr).eqns]
    return is_across(equation, axes) or any(_contains_across(eqn, axes) for eqn in inner)


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def is_across(equation: Any, axes: frozenset[str]) -> bool:
    """Whether an equation takes numbers from other devices along one of these axes."""
    names = {*_names(equation.params.get("axes")), *_names(equation.params.get("axis_name"))}
    return not axes.isdisjoint(names) and equation.primitive.name not in ("pvary", "pcast")


def _names(entry: Any) -> tuple[Any, ...]:
    return () if entry is None else tuple(entry) if isinstance(entry, tuple | list) else (entry,)
