"""Products in half precision whose float32 sums are not rounded.

The gradient of a matrix is a product of rows and cotangents. In bfloat16 JAX rounds its
result to bfloat16. Gradients of blocks of rows that are then added are rounded once
each, and where they cancel, their sum is off by many times the rounding of one.
`unrounded` takes such results of a function in float32, as summed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import JaxprEqn, Literal, primitives as prims
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, DTypeLike

_MOVES = {
    "add_any",
    "broadcast_in_dim",
    "convert_element_type",
    "neg",
    "pad",
    "reshape",
    "squeeze",
    "transpose",
}
"""Primitives after a product that give its values to the results, linearly, whatever
their dtype.
"""


def is_half(dtype: DTypeLike) -> bool:
    """Whether sums of these numbers are rounded to fewer digits than float32 has."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


def unrounded(
    fn: Callable[[Any], Any], argument: Any, is_sum: Callable[[Any], Any]
) -> Any:
    """`fn(argument)`, of which some results are in float32, as the products that make
    them sum them.

    Args:
        is_sum: a tree like the result, of bools: which of them are. Others are as `fn`
            gives them.

    A result that no product makes, by transpositions, sums and the like, is only cast.
    """
    closed, types = jax.make_jaxpr(fn, return_shape=True)(argument)
    jaxpr = closed.jaxpr
    outputs = list(zip(jaxpr.outvars, jax.tree.leaves(is_sum(types)), strict=True))
    wide = _Wide({var for var, mark in outputs if mark and _is_var(var)})
    # The equations that are computed in float32, from the last on
    later = [equation for equation in reversed(jaxpr.eqns) if wide.takes(equation)]
    later.reverse()
    read = [*jaxpr.outvars]
    for equation in later:
        read += equation.invars
    # What they and the results read of the program before; a dict keeps the order.
    first = dict.fromkeys(var for var in read if _is_var(var) and var not in wide.made)
    program = jaxpr.replace(outvars=[*first])
    before, _ = dce_jaxpr(program, [True] * len(first), instantiate=True)
    arrays = eval_jaxpr(before, closed.consts, *jax.tree.leaves(argument))
    values = dict(zip(first, arrays, strict=True))
    for equation in later:
        values[equation.outvars[0]] = wide.value(equation, values)
    found = []
    for var, mark in outputs:
        if mark:
            found.append(_widened(_read(var, values)))
        else:
            found.append(_narrow(var, values))
    return jax.tree.unflatten(jax.tree.structure(types), found)


class _Wide:
    """The variables that are wanted in float32, found from the last equation to the
    first.
    """

    def __init__(self, wanted: set[Any]):
        self.wanted = wanted
        self.made: set[Any] = set()  # those of `wanted` that `value` computes

    def takes(self, equation: JaxprEqn) -> bool:
        """Whether `value` computes an equation; then what it moves is wanted in float32
        too.
        """
        primitive = equation.primitive
        out, *others = equation.outvars
        if others or out not in self.wanted:
            return False
        atoms = out, *equation.invars
        is_move = primitive.name in _MOVES and all(map(_is_float, atoms))
        sums = prims.dot_general_p, prims.reduce_sum_p
        is_sum = primitive in sums and is_half(_dtype(out))
        if not is_move and not is_sum:
            return False
        self.made.add(out)
        if is_move:
            # A sum reads narrow values, and a move what it moves.
            self.wanted.update(filter(_is_var, equation.invars))
        return True

    def value(self, equation: JaxprEqn, values: dict[Any, Array]) -> Array:
        """The result of an equation that is taken, in float32."""
        if equation.primitive is prims.dot_general_p:
            narrow = [_narrow(atom, values) for atom in equation.invars]
            float32 = jnp.dtype(jnp.float32)
            params = equation.params | {"preferred_element_type": float32}
            return prims.dot_general_p.bind(*narrow, **params)
        operands = [_widened(_read(atom, values)) for atom in equation.invars]
        if equation.primitive is prims.convert_element_type_p:
            return operands[0]
        return equation.primitive.bind(*operands, **equation.params)


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, Literal)


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype


def _is_float(atom: Any) -> bool:
    return _dtype(atom) == jnp.float32 or is_half(_dtype(atom))


def _read(atom: Any, values: dict[Any, Array]) -> Any:
    if isinstance(atom, Literal):
        return jnp.asarray(atom.val, _dtype(atom))
    return values[atom]


def _narrow(atom: Any, values: dict[Any, Array]) -> Array:
    return _read(atom, values).astype(_dtype(atom))


def _widened(value: Array) -> Array:
    return value.astype(jnp.float32) if is_half(value.dtype) else value
