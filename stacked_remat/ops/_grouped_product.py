"""Products of rows, sorted by expert, with the matrices of their experts, and the derivatives of these.

With rows of which the first `sizes[0]` are of expert 0, and so on, and the last may be of none:

- `grouped_products`: each row times matrices of its expert, and a function of the elements of the results,
  not defined for rows of none;
- `grouped_outer`: for each expert the sum of the outer products of its rows.

A row may be read from its token, and the rows of a token may be summed: each is the derivative of the other.
So the derivatives of both kinds of product are products of the two kinds.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from .._compat import as_residual, of_residual
from ._expert_loop import InStack, masked

Sizes: TypeAlias = Int[Array, " expert"]


class Groups(NamedTuple):
    """The rows of some tokens, sorted by expert.

    Attributes:
        pair: the (token, choice) pair of each row.
        row: the row of each pair.
        expert: the expert of each row, the first one's first; of those that are not real a number beyond the
            last.
        sizes: how many rows each expert has, without those.
        real: False for rows of choices that are out of range, and for padding.
    """

    pair: Int[Array, " row"]
    row: Int[Array, "token choice"]
    expert: Int[Array, " row"]
    sizes: Sizes
    real: Bool[Array, " row"]

    @property
    def token(self) -> Int[Array, " row"]:
        """The token of each row; of those that are not real a number beyond the last."""
        return jnp.where(self.real, self.pair // self.row.shape[1], len(self.row))


class Rows(NamedTuple):
    """Rows `[row, inner]`; with `at` those of an array of tokens or experts, zero beyond the last."""

    array: Array
    at: Int[Array, " row"] | None = None

    def gathered(self) -> Float[Array, "row inner"]:
        """The rows as one array."""
        if self.at is None:
            return self.array
        return jnp.take(self.array, self.at, axis=0, mode="fill", fill_value=0)


class Term(NamedTuple):
    """A product of some rows, by their number, with a matrix, and whether that is transposed."""

    rows: int
    transposed: bool


class Product(NamedTuple):
    """The sum of some terms, and its dtype."""

    terms: tuple[Term, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Products:
    """What is computed of products of rows with matrices, `[row, outer]` each.

    Attributes:
        products: the products; their terms' matrices are in this order.
        dtype: of the result.
        function: `(products, others)` to the result, element by element; the only product itself if None.
    """

    products: tuple[Product, ...]
    dtype: Any
    function: Callable[[Sequence[Array], Sequence[Array]], Array] | None = None

    @property
    def terms(self) -> list[tuple[int, Term]]:
        """The number of the product, and the term, for each matrix."""
        return [(number, term) for number, product in enumerate(self.products) for term in product.terms]

    def result(self, products: Sequence[Array], others: Sequence[Array]) -> Array:
        """The result from the products in float32, or from tiles of them."""
        rounded = [one.astype(product.dtype) for one, product in zip(products, self.products, strict=True)]
        return rounded[0] if self.function is None else self.function(rounded, others)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What computes both kinds of product. Sums are in float32.

    Attributes:
        products: `(what, rows, matrices [expert, ...], others, sizes, products_too)` to a list of the result
            `[row, outer]` and, if asked for, the products; others are `[row, outer]` or `[row, 1]` too,
            and matrices may be `InStack`.
        outer: `(x [row, in], y [row, out], sizes, dtype)` to `[expert, in, out]`; both are `Rows`.
        sums: `(rows [row, out], groups)` to the sums of the rows of each token, `[token, out]`, without those
            that are not real.
        chunk_bytes: of the rows of a chunk of tokens.
        rows_of: rows come in multiples of it.
    """

    products: Callable[[Products, list[Rows], list[Array | InStack], list[Rows], Sizes, bool], list[Array]]
    outer: Callable[[Rows, Rows, Sizes, Any], Array]
    sums: Callable[[Array, Groups], Array]
    chunk_bytes: int = 2**29
    rows_of: int = 1


_GATHERED_BYTES = 2**27  # a chunk has them several times


def kernels_of(
    product: Callable[..., Array],
    outer: Callable[..., Array],
    rows_of: int = 1,
) -> Kernels:
    """Kernels that compute one product of arrays at a time.

    Args:
        product: `(x [row, in], w [expert, in, out], sizes, transposed, dtype)` to `[row, out]`; with
            `transposed` the matrices are `[expert, out, in]`.
        outer: `(x [row, in], y [row, out], sizes, dtype)` to `[expert, in, out]`.
        rows_of: see `Kernels`.
    """

    def products(
        what: Products, rows: Any, matrices: Any, others: Any, sizes: Sizes, products_too: bool
    ) -> list[Array]:
        gathered = [one.gathered() for one in rows]
        found: list[Any] = [0] * len(what.products)
        for (number, term), w in zip(what.terms, matrices, strict=True):
            w = w.own if isinstance(w, InStack) else w
            options = term.transposed, what.products[number].dtype
            found[number] += in_sequence(
                lambda *arrays, options=options: product(*arrays, *options), gathered[term.rows], w, sizes
            )
        result = what.result(found, [one.gathered() for one in others])
        return [result, *(found if products_too else ())]

    def of_rows(x: Rows, y: Rows, sizes: Sizes, dtype: Any) -> Array:
        return in_sequence(lambda *arrays: outer(*arrays, dtype), x.gathered(), y.gathered(), sizes)

    return Kernels(products, of_rows, sum_of_rows, _GATHERED_BYTES, rows_of)


def in_sequence(kernel: Callable[..., Any], *arrays: Array) -> Any:
    """The kernel of the arrays; under `jax.vmap` of one example after the other.

    A batch is another axis of a kernel's grid: on GPUs there may be three, and JAX's kernel of outer products
    for TPUs then does not store those of its last expert (0.10.2, 0.12).
    """
    return jax.custom_batching.sequential_vmap(kernel)(*arrays)


@jax.custom_vjp
def rows_of_tokens(x: Float[Array, "token ..."], groups: Groups) -> Float[Array, "row ..."]:
    """The token of each row, zero for those that are not real."""
    return Rows(x, groups.token).gathered()


def rows_of_experts(x: Float[Array, "expert ..."], groups: Groups) -> Float[Array, "row ..."]:
    """The expert of each row, zero for those that are not real; its derivative is summed in float32."""
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return Rows(x.astype(jnp.float32) if is_narrow else x, groups.expert).gathered().astype(x.dtype)


@jax.custom_vjp
def sum_of_rows(rows: Float[Array, "row ..."], groups: Groups) -> Float[Array, "token ..."]:
    """The sum of the rows of each token, computed in float32, without those that are not real."""
    pairs = of_pairs(rows, groups)
    return jnp.sum(pairs, axis=1, dtype=jnp.float32).astype(rows.dtype)


@jax.custom_vjp
def rows_of_pairs(x: Float[Array, "token choice"], groups: Groups) -> Float[Array, " row"]:
    """The pair of each row."""
    return jnp.take(x.reshape(-1), groups.pair, mode="clip")


def of_pairs(rows: Float[Array, "row ..."], groups: Groups) -> Float[Array, "token choice ..."]:
    """The row of each pair, zero for those that are not real."""
    pairs, real = (jnp.take(one, groups.row, axis=0, mode="clip") for one in (rows, groups.real))
    return masked(pairs, real)


def _with_groups(fn: Callable[..., Array]) -> Callable[..., Any]:
    return lambda x, groups: (fn(x, groups), groups)


rows_of_tokens.defvjp(_with_groups(rows_of_tokens), lambda groups, ct: (sum_of_rows(ct, groups), None))
sum_of_rows.defvjp(_with_groups(sum_of_rows), lambda groups, ct: (rows_of_tokens(ct, groups), None))
rows_of_pairs.defvjp(_with_groups(rows_of_pairs), lambda groups, ct: (of_pairs(ct, groups), None))


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call of `grouped_products`: what computes it, and its options."""

    kernels: Kernels
    what: Products
    of_tokens: tuple[bool, ...]
    of_experts: tuple[bool, ...]
    summed: bool

    def run(self, operands: "_Operands", groups: Groups, products_too: bool = False) -> list[Array]:
        """The result, and the products if asked for."""
        token = groups.token if any(self.of_tokens) else None
        rows = [Rows(x, token if own else None) for x, own in zip(operands.rows, self.of_tokens, strict=True)]
        others = [
            Rows(x, groups.expert if own else None)
            for x, own in zip(operands.others, self.of_experts, strict=True)
        ]
        parts = rows, list(operands.matrices), others
        found = self.kernels.products(self.what, *parts, groups.sizes, products_too)
        return [self.kernels.sums(found[0], groups) if self.summed else found[0], *found[1:]]

    def function(self, products: Sequence[Array], others: Sequence[Array], groups: Groups) -> Array:
        """The result from all products."""
        of_rows = [
            rows_of_experts(x, groups) if own else x for x, own in zip(others, self.of_experts, strict=True)
        ]
        assert self.what.function is not None
        return self.what.function(products, of_rows)


class _Operands(NamedTuple):
    rows: tuple[Array, ...]
    matrices: tuple[Array | InStack, ...]
    others: tuple[Array, ...]


def grouped_products(
    kernels: Kernels,
    what: Products,
    rows: Sequence[Array],
    matrices: Sequence[Float[Array, "expert ..."] | InStack],
    others: Sequence[Array],
    groups: Groups,
    *,
    of_tokens: Sequence[bool],
    of_experts: Sequence[bool] = (),
    summed: bool = False,
) -> Float[Array, "row outer"]:
    """The result of products of rows with the matrices of their experts.

    An argument that is not differentiated costs no product in the backward pass. If there is a
    function of the products, that pass reads the products too.

    Args:
        kernels: what computes it.
        what: which products, and the function of them.
        rows: `[row, inner]` each, or `[token, inner]`.
        matrices: of each term, `[expert, inner, outer]`, or `[expert, outer, inner]` if it is transposed;
            in the dtype of their rows.
        others: further arguments of the function, `[row, outer]` or `[row, 1]`; or `[expert, …]`.
        groups: the rows of each expert and token.
        of_tokens: which of `rows` are `[token, inner]`.
        of_experts: which of `others` are `[expert, …]`.
        summed: whether the result is the sum of the rows of each token.
    """
    call = _Call(kernels, what, tuple(of_tokens), tuple(of_experts), summed)
    found: Any = _products(call, False, _Operands(tuple(rows), tuple(matrices), tuple(others)), groups)
    return found[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _products(call: _Call, products_too: bool, operands: _Operands, groups: Groups) -> list[Array]:
    return call.run(operands, groups, products_too)


def _products_forward(call: _Call, products_too: bool, operands: Any, groups: Any) -> tuple[list[Array], Any]:
    wanted = as_residual(tuple(leaf.perturbed for leaf in jax.tree.leaves(operands)))
    operands, groups = jax.tree.map(lambda leaf: leaf.value, (operands, groups))
    # Not the kernel: of a second derivative this is a part of what is differentiated.
    found: Any = _products(call, call.what.function is not None, operands, groups)
    return found if products_too else found[:1], (wanted, operands, groups, found[1:])


def _products_backward(
    call: _Call, products_too: bool, residuals: Any, cotangents: list[Any]
) -> tuple[Any, None]:
    del products_too
    wanted, operands, groups, products = residuals
    if all(isinstance(one, SymbolicZero) for one in cotangents):
        return None, None
    wanted = jax.tree.unflatten(jax.tree.structure(operands), of_residual(wanted))
    what = call.what
    of_others: Any = (None,) * len(operands.others)
    cotangents = [_instantiated(one) for one in cotangents]
    if what.function is not None:
        own = functools.partial(call.function, groups=groups)
        _, pullback = jax.vjp(own, products, list(operands.others))
        of_products, of_others = pullback(cotangents[0])
        more = cotangents[1:]
        cotangents = list(map(jnp.add, of_products, more)) if more else of_products

    def of_rows(number: int) -> Any:
        if not wanted.rows[number]:
            return None
        own = [i for i, (_, term) in enumerate(what.terms) if term.rows == number]
        dtype = operands.rows[number].dtype
        terms = tuple(Term(at, not what.terms[i][1].transposed) for at, i in enumerate(own))
        return grouped_products(
            call.kernels,
            Products((Product(terms, dtype),), dtype),
            [cotangents[what.terms[i][0]].astype(dtype) for i in own],
            [operands.matrices[i] for i in own],
            (),
            groups,
            of_tokens=[call.summed] * len(own),
            summed=call.of_tokens[number],
        )

    def of_matrix(number: int) -> Any:
        if not any(jax.tree.leaves(wanted.matrices[number])):
            return None
        w, (product, term) = operands.matrices[number], what.terms[number]
        rows = operands.rows[term.rows]
        pair = (rows, cotangents[product].astype(rows.dtype))
        of_tokens = (call.of_tokens[term.rows], call.summed)
        if term.transposed:
            pair, of_tokens = pair[::-1], of_tokens[::-1]
        found: Any = grouped_outer(call.kernels, of_tokens, *pair, groups)
        return w.cotangent(found) if isinstance(w, InStack) else found

    numbers = range(len(operands.rows)), range(len(operands.matrices))
    found = _Operands(tuple(map(of_rows, numbers[0])), tuple(map(of_matrix, numbers[1])), tuple(of_others))
    return found, None


def _instantiated(cotangent: Any) -> Array:
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)  # pyright: ignore[reportArgumentType]
    return cotangent


_products.defvjp(_products_forward, _products_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def grouped_outer(
    kernels: Kernels,
    of_tokens: tuple[bool, bool],
    x: Float[Array, "_ inner"],
    y: Float[Array, "_ outer"],
    groups: Groups,
) -> Float[Array, "expert inner outer"]:
    """For each expert the sum over its rows of the outer products of `x` and `y`, in their dtype.

    `of_tokens` says which of them are `[token, ...]` and not `[row, ...]`.
    """
    left, right = (
        Rows(one, groups.token if own else None) for one, own in zip((x, y), of_tokens, strict=True)
    )
    return kernels.outer(left, right, groups.sizes, x.dtype)


def _outer_forward(
    kernels: Kernels, of_tokens: tuple[bool, bool], x: Array, y: Array, groups: Groups
) -> tuple[Array, Any]:
    return grouped_outer(kernels, of_tokens, x, y, groups), (x, y, groups)


def _outer_backward(
    kernels: Kernels, of_tokens: tuple[bool, bool], residuals: Any, cotangent: Array
) -> tuple[Array, Array, None]:
    x, y, groups = residuals

    def times(rows: Array, transposed: bool) -> Array:
        from_tokens, summed = of_tokens[::-1] if transposed else of_tokens
        what = Products((Product((Term(0, transposed),), rows.dtype),), rows.dtype)
        options: Any = dict(of_tokens=[from_tokens], summed=summed)
        return grouped_products(kernels, what, [rows], [cotangent], (), groups, **options)

    return times(y, True), times(x, False), None


grouped_outer.defvjp(_outer_forward, _outer_backward)
