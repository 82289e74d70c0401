"""Functions of trees as programs on arrays."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._activity import programs_in
from .._scan.marks import is_named


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A function of trees as a program on arrays, which are its inputs.

    `shapes` are the results as a tree, with the types of their arrays, and `rest` those
    that are no arrays.
    """

    closed: Any
    inputs: list[Any]
    shapes: Any
    rest: Any

    @property
    def leaves(self) -> list[Any]:
        """The types of the results, a named array as one."""
        return jax.tree.leaves(self.shapes, is_leaf=is_named)

    def rebuild(self, leaves: list[Any]) -> Any:
        """The results, from what is in the place of these leaves."""
        tree = jax.tree.structure(self.shapes, is_leaf=is_named)
        return eqx.combine(
            jax.tree.unflatten(tree, leaves), self.rest, is_leaf=is_named
        )


def trace(fn: Callable[..., Any], *args: Any) -> Traced:
    closed, shapes, rest = eqx.filter_make_jaxpr(fn)(*args)
    return Traced(closed, arrays_of(args), shapes, rest)


def is_traced(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def arrays_of(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if is_traced(leaf)]


def rounding(jaxpr: Any) -> Any:
    """The relative error that sums in other orders may lead to, by the lowest precision
    of a program.

    About 1e-5 in float32 and 2e-2 in bfloat16. TPUs and GPUs may multiply float32
    arrays in lower precision.
    """
    own = max(float(jnp.finfo(dtype).eps) for dtype in _dtypes(equations_of(jaxpr)))
    elsewhere = max(own, float(jnp.finfo(jnp.bfloat16).eps))
    # A power below 1 leaves room for many roundings in high precision, and for few in
    # low.
    return jax.lax.platform_dependent(
        cpu=lambda: own**0.75, default=lambda: elsewhere**0.75
    )


def has_small_range(equations: Iterable[Any]) -> bool:
    """Whether equations have numbers that float16 or less hold, in which small ones are
    lost.
    """
    return any(
        jnp.finfo(dtype).minexp > jnp.finfo(jnp.float32).minexp
        for dtype in _dtypes(equations)
    )


def _dtypes(equations: Iterable[Any]) -> set[Any]:
    """Of the real or complex numbers in equations; float32 if they have none."""
    atoms = [
        atom for equation in equations for atom in (*equation.invars, *equation.outvars)
    ]
    dtypes = {atom.aval.dtype for atom in atoms if hasattr(atom.aval, "dtype")}
    return {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)} or {
        jnp.dtype("float32")
    }


def equations_of(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program, and of those that they evaluate."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in programs_in(equation):
            yield from equations_of(getattr(inner, "jaxpr", inner))
