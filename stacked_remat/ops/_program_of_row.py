"""The program of one expert and one row, evaluated on all rows and all experts at once.

Of each value of the program it is known whether it depends on the weights of the expert alone, or on the
row too. The first exists once for each expert, the second once for each row, or for each token if the row is
not changed. A product of a row's value with an expert's matrix is a grouped product, and operations on its
elements are left to the kernel that computes it; what else is computed of both takes the expert's value for
each row. So nothing has a copy of an expert's matrices for each row.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct, lax
from jax.extend.core import ClosedJaxpr, Literal
from jaxtyping import Array

from .._activity import CALLS, CHECKPOINTS, program_of
from ._expert_loop import InStack
from ._grouped_product import Groups, Kernels, rows_of_experts, rows_of_tokens, sum_of_rows
from ._pending_rows import (
    OfExpert,
    OfRow,
    OfToken,
    Pending,
    PendingTerm,
    computed,
    evaluated,
    may_be_pending,
    pending,
)
from .per_device import free_axis_mapping


class UnsupportedExpertError(ValueError):
    """A function of an expert has an operation that has no grouped form."""


@dataclasses.dataclass(frozen=True)
class RowProgram:
    """Evaluates functions of one expert's weights and one row.

    Attributes:
        kernels: what computes grouped products.
        groups: the rows of each expert and token.
    """

    kernels: Kernels
    groups: Groups

    def __call__(
        self,
        fn: Callable[..., Any],
        weights: Sequence[Array | InStack],
        tokens: Array,
        rows: Any = (),
        *,
        summed: bool = False,
    ) -> Any:
        """What `fn` returns for every row, `[row, ...]` each.

        Args:
            fn: `(weights of one expert, token, *rows)` to a tree of arrays, each with an axis of one row
                first.
            weights: `[expert, ...]` each.
            tokens: `[token, ...]`.
            rows: a tuple of trees of arrays `[row, ...]`.
            summed: whether to return the sum of the rows of each token, `[token, ...]`.

        Raises:
            UnsupportedExpertError: names the operation that has no grouped form.
        """
        given = [OfExpert(one.own, one) if isinstance(one, InStack) else OfExpert(one) for one in weights]
        own = tuple(ShapeDtypeStruct(one.shape, one.array.dtype) for one in given)
        one = jax.tree.map(lambda leaf: ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), (tokens, *rows))
        with free_axis_mapping():
            closed, shape = jax.make_jaxpr(fn, return_shape=True)(own, *one)
            closed = jax.make_jaxpr(_inlined(closed))(*closed.in_avals)
        of_rows = [OfRow(leaf[:, None]) for leaf in jax.tree.leaves(rows)]
        inputs = [*given, OfToken(tokens[:, None]), *of_rows]
        found = self._evaluate(closed.jaxpr, closed.consts, inputs)
        end = self._sum_of_rows if summed else lambda value: self._of_row(value).array[:, 0]
        return jax.tree.unflatten(jax.tree.structure(shape), list(map(end, found)))

    def _evaluate(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        known: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        atoms = [*(atom for equation in jaxpr.eqns for atom in equation.invars), *jaxpr.outvars]
        uses = Counter(atom for atom in atoms if not isinstance(atom, Literal))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            results = self._results(equation, list(map(read, equation.invars)), uses[equation.outvars[0]])
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _results(self, equation: Any, operands: list[Any], uses: int) -> list[Any]:
        kinds, name = {type(operand) for operand in operands} & _KINDS, equation.primitive.name
        if name == "mul" and kinds == {OfExpert} and (ones := [one for one in operands if _is_one(one)]):
            # Haliax multiplies weights by a factor that mostly is 1. The result would be a copy of them.
            return [one for one in operands if one is not ones[0]]
        if name == "dot_general" and len(kinds) == 2 and OfExpert in kinds:
            if not any(equation.params["dimension_numbers"][1]):
                return [self._dot(equation, operands[0], operands[1], uses)]
        if may_be_pending(equation, operands):
            operands = [self._for_row(one) if isinstance(one, OfToken) else one for one in operands]
            return [pending(equation, operands, uses, self._computed)]
        if len(kinds) < 2 and Pending not in kinds:
            return _mapped(equation, operands, *kinds)
        operands = [one if isinstance(one, OfExpert) else self._for_row(one) for one in operands]
        largest = max(math.prod(one.shape) for one in operands if isinstance(one, OfRow))
        for operand in operands:
            if isinstance(operand, OfExpert) and math.prod(operand.shape) > max(largest, *operand.shape, 0):
                raise UnsupportedExpertError(
                    f"its expert has the operation {name!r} of a row and of an array of weights "
                    f"{operand.array.shape[1:]}, which it would copy for each row"
                )
        return _mapped(equation, list(map(self._for_row, operands)), OfRow)

    def _computed(self, value: Pending) -> OfRow:
        return computed(self.kernels, self.groups, value)

    def _for_row(self, operand: Any) -> Any:
        """The operand with an expert's or a token's value for each row, computed if it is pending."""
        if isinstance(operand, Pending):
            return self._computed(operand)
        if isinstance(operand, OfToken):
            return OfRow(rows_of_tokens(operand.array, self.groups))
        if not isinstance(operand, OfExpert):
            return operand
        return OfRow(rows_of_experts(operand.array, self.groups))

    def _of_row(self, value: Any) -> OfRow:
        found = self._for_row(value)
        if isinstance(found, OfRow):
            return found
        return OfRow(jnp.broadcast_to(found, (*self.groups.expert.shape, *np.shape(found))))

    def _sum_of_rows(self, value: Any) -> Array:
        if isinstance(value, Pending) and value.found is None and value.terms:
            found = evaluated(self.kernels, self.groups, value, summed=True)
            return found.reshape(found.shape[0], *value.shape[1:])
        return sum_of_rows(self._of_row(value).array[:, 0], self.groups)

    def _dot(self, equation: Any, left: Any, right: Any, uses: int) -> Any:
        """A product of a row's value and an expert's, without axes that both keep."""
        contracted = list(equation.params["dimension_numbers"][0])
        row_is_left = not isinstance(left, OfExpert)
        if not row_is_left:
            left, right, contracted = right, left, contracted[::-1]
        left = left if isinstance(left, OfToken) else self._for_row(left)
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
        if times > 1:
            x = self._for_row(left).array
        rows = x.transpose(0, *free_of_x, *of_x).reshape(-1, inner)
        transposed = of_w == list(range(w.ndim - len(of_w), w.ndim))  # already last: no copy
        order = (*free_of_w, *of_w) if transposed else (*of_w, *free_of_w)
        if order != tuple(range(1, w.ndim)):
            right = OfExpert(w.transpose(0, *order))
        matrices = right.matrices(_sides(inner, outer, transposed))
        aval = equation.outvars[0].aval
        of_token = times == 1 and isinstance(left, OfToken)
        term = PendingTerm(rows, of_token, (id(left.array), *of_x), matrices, transposed)
        product = Pending(aval.shape, aval.dtype, uses, (term,))
        if times == 1 and math.prod(outer) == max(outer, default=1):
            return product
        groups = self.groups._replace(sizes=self.groups.sizes * times)
        found = evaluated(self.kernels, groups, product).reshape(len(self.groups.expert), *kept, *outer)
        if not row_is_left:
            found = jnp.moveaxis(found, range(1, 1 + len(kept)), range(1 + len(outer), found.ndim))
        return OfRow(found)


_KINDS = {OfExpert, OfToken, OfRow, Pending}


def _inlined(closed: Any) -> Callable[..., list[Any]]:
    """The function of a jaxpr, without calls of others."""

    def run(*args: Any) -> list[Any]:
        jaxpr = closed.jaxpr
        known: dict[Any, Any] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True)
        )
        for equation in jaxpr.eqns:
            operands = [atom.val if isinstance(atom, Literal) else known[atom] for atom in equation.invars]
            if equation.primitive.name in (*CALLS, *CHECKPOINTS):
                called = program_of(equation)
                results = _inlined(called if hasattr(called, "jaxpr") else ClosedJaxpr(called, ()))(*operands)
            else:
                results = _bound(equation, *operands)
            known.update(zip(equation.outvars, results, strict=True))
        return [atom.val if isinstance(atom, Literal) else known[atom] for atom in jaxpr.outvars]

    return run


def _bound(equation: Any, *operands: Any) -> list[Any]:
    found = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return list(found) if equation.primitive.multiple_results else [found]


def _is_one(operand: Any) -> bool:
    return not isinstance(operand, jax.Array) and np.ndim(operand) == 0 and operand == 1


def _others(array: Array, axes: Sequence[int]) -> list[int]:
    return [axis for axis in range(1, array.ndim) if axis not in axes]


def _sides(inner: int, outer: Sequence[int], transposed: bool) -> tuple[int, int]:
    return (math.prod(outer), inner) if transposed else (inner, math.prod(outer))


def _mapped(equation: Any, operands: list[Any], kind: Any = None) -> list[Any]:
    """The results of an equation for each row, expert or token; as it is without any."""
    if kind is None:
        return _bound(equation, *operands)
    axes = [0 if isinstance(operand, kind) else None for operand in operands]
    arrays = [operand.array if isinstance(operand, kind) else operand for operand in operands]
    return list(map(kind, jax.vmap(functools.partial(_bound, equation), axes)(*arrays)))
