"""Values of rows that are not computed yet: products with the matrices of experts, and functions of elements.

A kernel computes a product, what is added to it, and operations on its elements in one pass, so that nothing
between them is written and read again. A value is computed when an operation of another kind takes it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ._expert_loop import InStack
from ._grouped_product import Groups, Kernels, Product, Products, Term, grouped_products, rows_of_experts


@dataclass(frozen=True)
class Known:
    """A value `[expert, ...]`, `[token, ...]` or `[row, ...]`."""

    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Without the first axis."""
        return self.array.shape[1:]


@dataclass(frozen=True)
class OfExpert(Known):
    """A value of the weights alone, `[expert, ...]`.

    Attributes:
        in_stack: where it can be read without a copy, if it is there.
    """

    in_stack: InStack | None = None

    def matrices(self, shape: tuple[int, int]) -> Array | InStack:
        """It as matrices of this shape, where it is."""
        if self.in_stack is None:
            return self.array.reshape(-1, *shape)
        return replace(self.in_stack, stack=self.in_stack.stack.reshape(-1, *shape))


class OfToken(Known):
    """A value of the token alone, `[token, ...]`."""


class OfRow(Known):
    """A value of the row, `[row, ...]`."""


class PendingTerm(NamedTuple):
    """A product of rows with a matrix of their expert.

    Attributes:
        rows: `[row, inner]`, or `[token, inner]`.
        of_token: which of both.
        key: equal for terms with the same rows.
        matrices: `[expert, inner, outer]`, or `[expert, outer, inner]`.
        transposed: which of both.
    """

    rows: Array
    of_token: bool
    key: Any
    matrices: Array | InStack
    transposed: bool


@dataclass(eq=False)
class Pending:
    """A value of the row that is not computed yet: the sum of some terms, or the result of an equation.

    Attributes:
        shape: without `row`; all axes but one have size 1.
        dtype: of its elements.
        uses: how often the program takes or returns it.
        terms: of a sum.
        equation: of a result; it only gives its operand another shape if there is none.
        operands: pending values, `OfRow`, `OfExpert`, or numbers.
        found: once it is computed.
    """

    shape: tuple[int, ...]
    dtype: Any
    uses: int
    terms: tuple[PendingTerm, ...] = ()
    equation: Any = None
    operands: tuple[Any, ...] = ()
    found: OfRow | None = None

    def parts(self) -> Iterator["Pending"]:
        """The values that it is to be computed of, each once, after its own; itself last."""
        seen: dict[Pending, None] = {}

        def visit(one: Pending) -> None:
            for operand in one.operands:
                if isinstance(operand, Pending) and operand.found is None and operand not in seen:
                    visit(operand)
            seen[one] = None

        visit(self)
        return iter(seen)

    def products(self) -> list["Pending"]:
        """Those of its parts that are sums of terms."""
        return [part for part in self.parts() if part.terms]


_MOST_PRODUCTS = 2  # in one kernel, which has a tile of float32 sums for each

_MOST_PARTS = 64  # in one kernel

# Triton computes them too.
_ELEMENTWISE = {
    *("abs", "add", "clamp", "convert_element_type", "div", "exp", "integer_pow", "log", "logistic"),
    *("max", "min", "mul", "neg", "rsqrt", "sqrt", "square", "sub", "tanh"),
}
_OF_NUMBERS = {"clamp", "max", "min"}  # Triton's result is the other operand where one is not a number.
_RESHAPES = {"broadcast_in_dim", "copy", "expand_dims", "reshape", "squeeze", "transpose"}


def may_be_pending(equation: Any, operands: Sequence[Any]) -> bool:
    """Whether a kernel may compute the result of the equation of these values and numbers."""
    name, shape = equation.primitive.name, equation.outvars[0].aval.shape
    size, sizes = math.prod(shape), {math.prod(np.shape(one)) for one in operands}
    if size != max(shape, default=1) or not sizes <= {1, size}:
        return False
    if name in _RESHAPES:
        return isinstance(operands[0], Pending) or (isinstance(operands[0], OfRow) and sizes != {size})
    if name not in _ELEMENTWISE or equation.outvars[0].aval.dtype == bool:
        return False
    is_known = all(isinstance(one, Pending | Known) or _is_number(one) for one in operands)
    return is_known and any(isinstance(one, Pending) for one in operands)


def _is_number(operand: Any) -> bool:
    return not isinstance(operand, jax.Array) and np.size(operand) == 1


def pending(
    equation: Any, operands: Sequence[Any], uses: int, compute: Callable[[Pending], OfRow]
) -> Pending:
    """The result of an equation of pending values, `OfRow`, `OfExpert` and numbers.

    Args:
        equation: see `may_be_pending`.
        operands: of it.
        uses: of the result.
        compute: computes a value, where a kernel would have too many products.
    """
    aval = equation.outvars[0].aval
    size = math.prod(aval.shape)

    def prepared(one: Any) -> Any:
        if isinstance(one, Pending):
            return compute(one) if math.prod(one.shape) != size else one
        return one if isinstance(one, Known) else np.reshape(one, ())

    operands = list(map(prepared, operands))
    (first, *_), name = operands, equation.primitive.name
    is_sole = isinstance(first, Pending) and first.found is None and first.uses == 1
    if name in _RESHAPES:
        if is_sole:
            return replace(first, shape=aval.shape, uses=uses)
        return Pending(aval.shape, aval.dtype, uses, operands=(first,))
    if name == "add" and all(_is_term(one) for one in operands) and operands[0] is not operands[1]:
        return Pending(aval.shape, aval.dtype, uses, operands[0].terms + operands[1].terms)
    value = Pending(aval.shape, aval.dtype, uses, equation=equation, operands=tuple(operands))
    while len(value.products()) > _MOST_PRODUCTS:
        compute(max((one for one in operands if isinstance(one, Pending)), key=_count))
    if len(list(value.parts())) > _MOST_PARTS:
        compute(value)
    return value


def _is_term(value: Any) -> bool:
    return isinstance(value, Pending) and value.found is None and bool(value.terms) and value.uses == 1


def _count(value: Pending) -> int:
    return 0 if value.found else len(value.products())


def computed(kernels: Kernels, groups: Groups, value: Pending) -> OfRow:
    """The value, after those of its parts that others take too."""
    if value.found is None:
        parts = list(value.parts())
        within = Counter(id(one) for part in parts for one in part.operands)
        for part in parts[:-1]:
            if part.found is None and part.products() and within[id(part)] < part.uses:
                computed(kernels, groups, part)
        value.found = OfRow(evaluated(kernels, groups, value).reshape(-1, *value.shape))
    return value.found


def evaluated(kernels: Kernels, groups: Groups, value: Pending, *, summed: bool = False) -> Array:
    """A pending value, `[row, outer]`, or the sum of the rows of each token."""
    parts = list(value.parts())
    products = [part for part in parts if part.terms]
    terms = [term for product in products for term in product.terms]
    rows = {term.key: term for term in terms}
    numbers = {key: number for number, key in enumerate(rows)}
    taken = [_found(one) for part in parts for one in part.operands]
    known = {id(one.array): one for one in taken if isinstance(one, Known)}
    of_experts = [isinstance(one, OfExpert) for one in known.values()]
    others = [one.array.reshape(len(one.array), -1) for one in known.values()]

    def function(of_products: Sequence[Array], of_others: Sequence[Array]) -> Array:
        results = dict(zip(map(id, products), of_products, strict=True))
        results |= dict(zip(known, of_others, strict=True))

        def read(one: Any) -> Any:
            one = _found(one)
            if isinstance(one, Known):
                return results[id(one.array)]
            return results[id(one)] if isinstance(one, Pending) else one

        for part in parts:
            if not part.terms:
                results[id(part)] = _of_elements(part.equation, *map(read, part.operands))
        return results[id(value)]

    if not products:
        pairs = zip(others, of_experts, strict=True)
        found = function((), [rows_of_experts(one, groups) if own else one for one, own in pairs])
        return jnp.broadcast_to(found, (len(found), math.prod(value.shape)))
    what = tuple(
        Product(tuple(Term(numbers[term.key], term.transposed) for term in one.terms), one.dtype)
        for one in products
    )
    return grouped_products(
        kernels,
        Products(what, value.dtype, None if value.terms else function),
        [term.rows for term in rows.values()],
        [term.matrices for term in terms],
        others,
        groups,
        of_experts=of_experts,
        of_tokens=[term.of_token for term in rows.values()],
        summed=summed,
    )


def _found(operand: Any) -> Any:
    return operand.found if isinstance(operand, Pending) and operand.found is not None else operand


def _of_elements(equation: Any, *operands: Any) -> Array:
    """The result of an equation on other shapes, computed in float32 if it is in fewer bits.

    Triton has no division in bfloat16.
    """
    if equation is None:
        return operands[0]
    shape = jnp.broadcast_shapes(*map(jnp.shape, operands))

    def wide(x: Any, atom: Any) -> Array:
        x = jnp.asarray(x, atom.aval.dtype)
        is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        return jnp.broadcast_to(x.astype(jnp.float32) if is_narrow else x, shape)

    operands = tuple(map(wide, operands, equation.invars))
    found = equation.primitive.bind(*operands, **equation.params)
    if equation.primitive.name in _OF_NUMBERS and jnp.issubdtype(found.dtype, jnp.floating):
        for one in operands:
            found = jnp.where(one == one, found, one)
    return found.astype(equation.outvars[0].aval.dtype)
