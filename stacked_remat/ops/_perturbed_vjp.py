"""Derivative rules that know which of their inputs are differentiated."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

T = TypeVar("T")
Run: TypeAlias = Callable[[Any, Any, Any], T]
"""(what is not traced, inputs, constants) to a result."""


def perturbed_vjp(
    run: Run[T],
    backward: Callable[[Any, tuple[bool, ...], Any, T], Any],
    forward: Run[tuple[T, Any]] | None = None,
) -> Run[T]:
    """`run` with a derivative by its inputs that costs only what is asked for.

    Args:
        run: computes the result.
        backward: `(static, wanted, residuals, cotangent)` to the cotangents of the
            inputs, None for those that are not wanted; `wanted` has a bool for each
            leaf of the inputs.
        forward: the result and the residuals; by default these are the inputs and the
            constants.
    """
    found: Any = jax.custom_vjp(run, nondiff_argnums=(0,))

    def forward_rule(static: Any, inputs: Any, constants: Any) -> tuple[T, Any]:
        leaves = jax.tree.leaves(inputs)
        wanted = [
            leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.inexact)
            for leaf in leaves
        ]
        # Without data, in its shape: JAX gives a rule with symbolic zeros,
        # differentiated by several sets of inputs in turn, residuals of one in the
        # structure of another.
        packed = np.packbits(wanted).tolist()
        flags = np.zeros((0, len(wanted), *packed))
        inputs, constants = jax.tree.map(lambda leaf: leaf.value, (inputs, constants))
        if (
            forward is None
        ):  # not `run`: of a second derivative this is a part of what is differentiated
            return found(static, inputs, constants), (flags, (inputs, constants))
        out, residuals = forward(static, inputs, constants)
        return out, (flags, residuals)

    def backward_rule(static: Any, residuals: Any, cotangent: Any) -> tuple[Any, None]:
        flags, residuals = residuals
        _, count, *packed = flags.shape
        wanted = np.unpackbits(np.asarray(packed, np.uint8), count=count).tolist()
        if all(isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(cotangent)):
            return None, None
        cotangent = jax.tree.map(
            lambda ct: ct if eqx.is_array(ct) else jnp.zeros(ct.shape, ct.dtype),
            cotangent,
        )
        return backward(static, tuple(map(bool, wanted)), residuals, cotangent), None

    found.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return found


def vjp_of_part(
    fn: Callable[[T], Any], inputs: T, wanted: Any
) -> tuple[Any, Callable[[Any], tuple[T]]]:
    """`jax.vjp(fn, inputs)` by those inputs that are wanted; the cotangents of others
    are None.
    """
    part, rest = eqx.partition(inputs, wanted)
    return jax.vjp(lambda part: fn(eqx.combine(part, rest)), part)
