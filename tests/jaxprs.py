"""The equations of a traced program, with those of its loops, branches and calls."""

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from stacked_remat._hijax import primitive_of


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, each before those of the jaxprs that it holds."""
    for equation in jaxpr.eqns:
        yield equation
        yield from inner_equations(equation)


def inner_equations(equation: Any) -> Iterator[Any]:
    primitive = primitive_of(equation)
    if primitive is not None:
        yield from equations(jax.make_jaxpr(primitive.expand)(*primitive.in_avals))
        return
    for value in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield from equations(value)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def equations_of(fn: Callable, *args: Any) -> list[Any]:
    """The equations of `fn` traced for `args`, whose leaves are arrays."""
    return list(equations(jax.make_jaxpr(fn)(*args)))


def count(jaxpr: Any, name: str) -> int:
    """How often a primitive is in a jaxpr."""
    return sum(equation.primitive.name == name for equation in equations(jaxpr))


def primitives(fn: Callable, *args: Any) -> collections.Counter[str]:
    """How often each primitive is in the program of `fn`."""
    return collections.Counter(
        equation.primitive.name for equation in equations_of(fn, *args)
    )


def outline(equations: Iterable[Any]) -> list[tuple]:
    """Primitives, types of results and plain parameters: equal for programs that differ
    in names alone.
    """
    return [
        (
            equation.primitive.name,
            [var.aval for var in equation.outvars],
            {
                key: value
                for key, value in equation.params.items()
                if _is_plain(key, value)
            },
        )
        for equation in equations
    ]


def _is_plain(key: str, value: Any) -> bool:
    return key != "name" and isinstance(value, bool | int | float | str)
