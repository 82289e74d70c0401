"""Products of rows, sorted by expert, with the matrices of their experts, and the derivatives of these.

With `x` rows of which the first `sizes[0]` are of expert 0, and so on:

- `grouped_product`: each row times the matrix of its expert;
- `grouped_outer`: for each expert the sum of the outer products of its rows.

Each is bilinear, and its derivatives are products of the two kinds.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from .._compat import as_residual, of_residual

Sizes: TypeAlias = Int[Array, " expert"]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What computes both kinds of product. Sums are in float32.

    Attributes:
        product: `(x [row, in], w [expert, in, out], sizes, transposed, dtype)` to `[row, out]`; with
            `transposed` the matrices are `[expert, out, in]`.
        outer: `(x [row, in], y [row, out], sizes, dtype)` to `[expert, in, out]`.
        rows_of: rows come in multiples of it.
    """

    product: Callable[[Array, Array, Sizes, bool, Any], Array]
    outer: Callable[[Array, Array, Sizes, Any], Array]
    rows_of: int = 1


@dataclasses.dataclass(frozen=True)
class _Product:
    """One product: what computes it, whether matrices are transposed, and the dtype of the result."""

    kernels: Kernels
    transposed: bool
    dtype: Any


def grouped_product(
    kernels: Kernels,
    x: Float[Array, "row inner"],
    w: Float[Array, "expert ..."],
    sizes: Sizes,
    *,
    transposed: bool = False,
    dtype: Any = None,
) -> Float[Array, "row outer"]:
    """Each row times the matrix of its expert, `[in, out]`, or `[out, in]` if it is transposed.

    An argument that is not differentiated costs no product in the backward pass.

    Args:
        kernels: what computes it.
        x: the rows of expert 0, then those of expert 1, and so on.
        w: the matrices, in the dtype of `x`.
        sizes: how many rows each expert has; sums to the number of rows.
        transposed: whether the last axis of the matrices is the one of `x`.
        dtype: of the result; that of `x` if not given.
    """
    found: Any = _product(_Product(kernels, transposed, jnp.dtype(dtype or x.dtype)), x, w, sizes)
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _Product, x: Array, w: Array, sizes: Array) -> Array:
    return how.kernels.product(x, w, sizes, how.transposed, how.dtype)


def _product_forward(how: _Product, x: Any, w: Any, sizes: Any) -> tuple[Array, Any]:
    wanted = as_residual((x.perturbed, w.perturbed))
    x, w, sizes = x.value, w.value, sizes.value
    return how.kernels.product(x, w, sizes, how.transposed, how.dtype), (wanted, x, w, sizes)


def _product_backward(how: _Product, residuals: Any, cotangent: Any) -> tuple[Any, Any, None]:
    wanted, x, w, sizes = residuals
    of_x = of_w = None
    if isinstance(cotangent, SymbolicZero):
        return None, None, None
    of_rows, of_matrices = of_residual(wanted)
    cotangent = cotangent.astype(x.dtype)
    if of_rows:
        of_x = grouped_product(how.kernels, cotangent, w, sizes, transposed=not how.transposed)
    if of_matrices:
        pair = (cotangent, x) if how.transposed else (x, cotangent)
        of_w = grouped_outer(how.kernels, *pair, sizes)
    return of_x, of_w, None


_product.defvjp(_product_forward, _product_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_outer(
    kernels: Kernels, x: Float[Array, "row inner"], y: Float[Array, "row outer"], sizes: Sizes
) -> Float[Array, "expert inner outer"]:
    """For each expert the sum over its rows of the outer products of `x` and `y`, in their dtype."""
    return kernels.outer(x, y, sizes, x.dtype)


def _outer_forward(kernels: Kernels, x: Array, y: Array, sizes: Array) -> tuple[Array, Any]:
    return kernels.outer(x, y, sizes, x.dtype), (x, y, sizes)


def _outer_backward(kernels: Kernels, residuals: Any, cotangent: Array) -> tuple[Array, Array, None]:
    x, y, sizes = residuals
    of_x = grouped_product(kernels, y, cotangent, sizes, transposed=True)
    return of_x, grouped_product(kernels, x, cotangent, sizes), None


grouped_outer.defvjp(_outer_forward, _outer_backward)
