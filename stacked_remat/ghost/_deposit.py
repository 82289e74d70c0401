"""The score of a weight where it meets data, found in the backward pass."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._sweep.store import varying_over
from ._units import Rows, Units, factor_units
from ._weights import Tangent


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity
class _Meeting:
    """How the backward pass finds the scores.

    Attributes:
        tangent: the derivative of the results along the direction, without its arrays.
        rows: of each result.
        units: the scores' units.
        shape: of the probe.
        varying: the axes of the mesh along which the score differs within a `jax.shard_map`.
    """

    tangent: Tangent
    rows: tuple[Rows, ...]
    units: Units
    shape: tuple[int, ...]
    varying: frozenset[str]


def deposit(results: list[Any], rows: list[Rows], units: Units, probe: Any, tangent: Tangent) -> list[Any]:
    """The results as they are; the backward pass adds the scores to the cotangent of `probe`.

    Args:
        results: what an equation returned that depends on the weight.
        rows: of each result.
        units: the units of scores.
        probe: float32 zeros, a number for each unit.
        tangent: of the results, along the direction of the weight. It is evaluated in the backward pass.
    """
    arrays = [lax.stop_gradient(array) for array in tangent.arrays]
    varying = frozenset().union(
        *(jax.typeof(array).manual_axis_type.varying for array in (*results, *arrays, probe))
    )
    meeting = _Meeting(dataclasses.replace(tangent, arrays=[]), tuple(rows), units, probe.shape, varying)
    return _deposit(meeting, results, varying_over(probe, varying), arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _deposit(meeting: _Meeting, results: list[Any], probe: Any, arrays: list[Any]) -> list[Any]:
    return results


def _forward(meeting: _Meeting, results: list[Any], probe: Any, arrays: list[Any]) -> tuple[list[Any], Any]:
    return results, arrays


def _backward(meeting: _Meeting, arrays: list[Any], cotangents: list[Any]) -> tuple[Any, Any, None]:
    tangents = meeting.tangent.evaluate(arrays)
    score = jnp.zeros(meeting.units.sizes or (1,), jnp.float32)
    for cotangent, tangent, rows in zip(cotangents, tangents, meeting.rows, strict=True):
        if jnp.iscomplexobj(tangent):
            product = jnp.real(cotangent * tangent)
        else:
            product = cotangent.astype(jnp.float32) * tangent.astype(jnp.float32)
        score = score + sum_per_unit(product, rows, meeting.units)
    return cotangents, varying_over(score.reshape(meeting.shape), meeting.varying), None


_deposit.defvjp(_forward, _backward)


def sum_per_unit(array: Any, rows: Rows, units: Units) -> Any:
    """The sums of an array over the rows of each unit, with the sizes of the units."""
    if not units.sizes:
        return jnp.sum(array)[None]
    split = array.reshape([size for dim in rows for size, _ in dim or ()])
    numbers = [unit for dim in rows for unit in factor_units(dim)]
    order = [numbers.index(unit) for unit in units.growing]
    summed = jnp.sum(split, axis=tuple(at for at in range(len(numbers)) if at not in order))
    return jnp.transpose(summed, [sorted(order).index(at) for at in order]).reshape(units.sizes)


def spread_over_rows(probe: Any, dim: Any, units: Units) -> Any:
    """A number per unit for each row of a dimension: the transpose of `sum_per_unit`."""
    size = math.prod(n for n, _ in dim)
    if not units.sizes:
        return jnp.broadcast_to(probe.reshape(1), (size,))
    present = [unit for unit in factor_units(dim) if unit is not None]
    assert sorted(present) == units.growing
    sizes = [units.sizes[unit] for unit in units.growing]
    ordered = jnp.transpose(probe.reshape(sizes), [units.growing.index(unit) for unit in present])
    places = tuple(at for at, (_, unit) in enumerate(dim) if unit is not None)
    return lax.broadcast_in_dim(ordered, [n for n, _ in dim], places).reshape(size)
