"""The program of one expert and one row, evaluated on all rows and all experts at once.

Of each value of the program it is known whether it depends on the weights of the expert alone, or on the
row too. The first exists once for each expert, the second once for each row. A product of a row's value
with an expert's matrix is a grouped product; what else is computed of both takes the expert's value for each
row. So nothing has a copy of an expert's matrices for each row.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct, lax
from jax.extend.core import Literal
from jaxtyping import Array, Int

from ._grouped_product import Kernels, grouped_product
from .per_device import free_axis_mapping


class UnsupportedExpertError(ValueError):
    """A function of an expert has an operation that has no grouped form."""


@dataclasses.dataclass(frozen=True)
class Groups:
    """Which rows are of which expert: those of expert 0 come first.

    Attributes:
        sizes: how many rows each expert has.
        expert: the expert of each row.
    """

    sizes: Int[Array, " expert"]
    expert: Int[Array, " row"]


@dataclasses.dataclass(frozen=True)
class _OfExpert:
    """A value of the weights alone, `[expert, ...]`."""

    array: Array


@dataclasses.dataclass(frozen=True)
class _OfRow:
    """A value of the row, `[row, ...]`."""

    array: Array


@dataclasses.dataclass(frozen=True)
class RowProgram:
    """Evaluates functions of one expert's weights and one row.

    Attributes:
        kernels: what computes grouped products.
        groups: the rows of each expert.
    """

    kernels: Kernels
    groups: Groups

    def __call__(self, fn: Callable[..., Any], weights: Sequence[Array], rows: Any) -> Any:
        """What `fn` returns for every row, `[row, ...]` each.

        Args:
            fn: `(weights of one expert, *rows)` to a tree of arrays, each with an axis of one row first.
            weights: `[expert, ...]` each.
            rows: a tuple of trees of arrays `[row, ...]`.

        Raises:
            UnsupportedExpertError: names the operation that has no grouped form.
        """
        own = tuple(ShapeDtypeStruct(array.shape[1:], array.dtype) for array in weights)
        one = jax.tree.map(lambda leaf: ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), rows)
        with free_axis_mapping():
            closed, shape = jax.make_jaxpr(fn, return_shape=True)(own, *one)
        inputs = [*map(_OfExpert, weights), *(_OfRow(leaf[:, None]) for leaf in jax.tree.leaves(rows))]
        found = self._evaluate(closed.jaxpr, closed.consts, inputs)
        return jax.tree.unflatten(jax.tree.structure(shape), [self._of_row(one).array[:, 0] for one in found])

    def _evaluate(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        known: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            known.update(
                zip(equation.outvars, self._results(equation, list(map(read, equation.invars))), strict=True)
            )
        return list(map(read, jaxpr.outvars))

    def _results(self, equation: Any, operands: list[Any]) -> list[Any]:
        kinds = {type(operand) for operand in operands} & {_OfExpert, _OfRow}
        if len(kinds) < 2:
            return _mapped(equation, operands, *kinds)
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            called = params["jaxpr"]
            return self._evaluate(getattr(called, "jaxpr", called), getattr(called, "consts", ()), operands)
        if name == "dot_general" and not any(params["dimension_numbers"][1]):
            return [_OfRow(self._dot(equation, *operands))]
        largest = max(math.prod(one.array.shape[1:]) for one in operands if isinstance(one, _OfRow))
        for operand in operands:
            if isinstance(operand, _OfExpert) and math.prod(operand.array.shape[1:]) > largest:
                raise UnsupportedExpertError(
                    f"its expert has the operation {name!r} of a row and of an array of weights "
                    f"{operand.array.shape[1:]}, which it would copy for each row"
                )
        return _mapped(equation, [self._for_row(operand) for operand in operands], _OfRow)

    def _for_row(self, operand: Any) -> Any:
        """The operand with an expert's value for each row."""
        if not isinstance(operand, _OfExpert):
            return operand
        array = operand.array
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return _OfRow(jnp.take(array, self.groups.expert, axis=0))
        # Its derivative is summed in the dtype of what is taken.
        wide = jnp.take(array.astype(jnp.float32), self.groups.expert, axis=0)
        return _OfRow(wide.astype(array.dtype))

    def _of_row(self, value: Any) -> _OfRow:
        found = self._for_row(value)
        if isinstance(found, _OfRow):
            return found
        return _OfRow(jnp.broadcast_to(found, (*self.groups.expert.shape, *np.shape(found))))

    def _dot(self, equation: Any, left: Any, right: Any) -> Array:
        """A product of a row's value and an expert's, without axes that both keep."""
        contracted = list(equation.params["dimension_numbers"][0])
        row_is_left = isinstance(left, _OfRow)
        if not row_is_left:
            left, right, contracted = right, left, contracted[::-1]
        x, w = left.array, right.array
        if x.dtype != w.dtype:
            raise UnsupportedExpertError(
                f"its expert multiplies rows of {x.dtype} with weights of {w.dtype}: cast one to the dtype "
                "of the other"
            )
        if precisions := set(equation.params["precision"] or ()) - {lax.Precision.DEFAULT}:
            raise UnsupportedExpertError(f"its expert multiplies with the precision {precisions.pop()}")
        of_x, of_w = ([axis + 1 for axis in axes] for axes in contracted)
        free_of_x, free_of_w = (_others(array, axes) for array, axes in ((x, of_x), (w, of_w)))
        kept, outer = [x.shape[axis] for axis in free_of_x], [w.shape[axis] for axis in free_of_w]
        inner, times = math.prod(x.shape[axis] for axis in of_x), math.prod(kept)
        rows = x.transpose(0, *free_of_x, *of_x).reshape(-1, inner)
        transposed = of_w == list(range(w.ndim - len(of_w), w.ndim))  # already last: no copy
        order = (*free_of_w, *of_w) if transposed else (*of_w, *free_of_w)
        matrices = w.transpose(0, *order).reshape(len(w), *(_sides(inner, outer, transposed)))
        found = grouped_product(
            self.kernels,
            rows,
            matrices,
            self.groups.sizes * times,
            transposed=transposed,
            dtype=equation.outvars[0].aval.dtype,
        )
        found = found.reshape(len(x), *kept, *outer)
        if row_is_left:
            return found
        return jnp.moveaxis(found, range(1, 1 + len(kept)), range(1 + len(outer), found.ndim))


_CALLS = {"jit", "pjit", "closed_call", "checkpoint", "remat", "remat2"}


def _others(array: Array, axes: Sequence[int]) -> list[int]:
    return [axis for axis in range(1, array.ndim) if axis not in axes]


def _sides(inner: int, outer: Sequence[int], transposed: bool) -> tuple[int, int]:
    return (math.prod(outer), inner) if transposed else (inner, math.prod(outer))


def _mapped(equation: Any, operands: list[Any], kind: Any = None) -> list[Any]:
    """The results of an equation for each row, or each expert; as it is without either."""
    params = equation.primitive.get_bind_params(equation.params)
    several = equation.primitive.multiple_results

    def bind(*arrays: Any) -> list[Any]:
        found = equation.primitive.bind(*arrays, **params)
        return list(found) if several else [found]

    if kind is None:
        return bind(*operands)
    axes = [0 if isinstance(operand, kind) else None for operand in operands]
    arrays = [operand.array if isinstance(operand, kind) else operand for operand in operands]
    return list(map(kind, jax.vmap(bind, axes)(*arrays)))
