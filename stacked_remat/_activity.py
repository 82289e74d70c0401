"""Which outputs of a jaxpr can depend on which of its inputs, for differentiation.

A conservative answer from the jaxpr's equations alone: an output that is said to be
inactive does not depend on an active input; one that is said to be active may still
have a zero derivative.
"""

import functools
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array

CHECKPOINTS = ("checkpoint", "remat", "remat2")
CALLS = ("jit", "pjit", "closed_call", "eval_jaxpr", "core_call")
"""Primitives that evaluate a program, argument by argument, by their names in each JAX,
as checkpoints do.
"""


def program_of(equation: core.JaxprEqn) -> Any:
    """What an equation that evaluates one jaxpr evaluates, open or closed."""
    return equation.params.get("jaxpr", equation.params.get("call_jaxpr"))


def is_differentiable(dtype: Any) -> bool:
    """Tell whether arrays of this type have tangents: not integers, booleans, or
    keys.
    """
    return jnp.issubdtype(dtype, jnp.inexact)


def has_tangent(var: core.Var) -> bool:
    return is_differentiable(getattr(var.aval, "dtype", bool))


def active_carry(
    layers: Sequence[tuple[core.Jaxpr, Sequence[bool], Sequence[bool]]],
    init: Sequence[bool],
    active_in: Callable[[core.Jaxpr, list[bool]], Sequence[bool]] | None = None,
) -> list[bool]:
    """Find the carry leaves that are active in a layer `(shared, carry, x) -> (carry,
    y)` of some kind.

    `active_in` finds a layer's active outputs, by default `active_outputs`.
    """
    active_in = active_in or active_outputs
    carry = list(init)
    while True:
        grown = carry
        for jaxpr, shared, xs in layers:
            outputs = active_in(jaxpr, [*shared, *carry, *xs])[: len(carry)]
            grown = [old or new for old, new in zip(grown, outputs, strict=True)]
        if grown == carry:
            return carry
        carry = grown


def active_outputs(
    jaxpr: core.Jaxpr,
    inputs: Sequence[bool],
    counts: Callable[[core.Var], bool] = has_tangent,
) -> list[bool]:
    """Find which outputs depend on an active input (constants first) through values
    that count.
    """
    active = active_variables(
        jaxpr, itertools.compress((*jaxpr.constvars, *jaxpr.invars), inputs), counts
    )
    return [is_in(atom, active) for atom in jaxpr.outvars]


def active_variables(
    jaxpr: core.Jaxpr,
    inputs: Iterable[core.Var],
    counts: Callable[[core.Var], bool] = has_tangent,
) -> set[core.Var]:
    """Find these inputs and all variables that depend on them through values that
    count.
    """
    active = set(inputs)
    for equation in jaxpr.eqns:
        operands = [is_in(atom, active) for atom in equation.invars]
        if not any(operands):
            continue
        refs = [
            var
            for var in equation.invars
            if isinstance(var, core.Var) and hasattr(var.aval, "inner_aval")
        ]
        active.update(refs)  # which it may write to
        inner, outputs = (
            None if refs else _called(equation),
            [True] * len(equation.outvars),
        )
        if inner is not None:
            outputs = active_outputs(inner, operands, counts)
        elif equation.primitive.name == "cond" and not operands[0] and not refs:
            branches = [each.jaxpr for each in equation.params["branches"]]
            given = (
                [*[False] * len(each.constvars), *operands[1:]] for each in branches
            )
            found = map(
                functools.partial(active_outputs, counts=counts), branches, given
            )
            outputs = [*map(any, zip(*found, strict=True))]
        active.update(
            var
            for var, depends in zip(equation.outvars, outputs, strict=True)
            if depends and counts(var)
        )
    return active


def is_in(atom: object, variables: set[core.Var]) -> bool:
    return isinstance(atom, core.Var) and atom in variables


def has_rules(jaxpr: core.Jaxpr) -> bool:
    """Whether custom rules may compute other values where a jaxpr is differentiated."""
    return any(
        _has_rule(equation)
        or any(map(has_rules, core.jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


def _has_rule(equation: core.JaxprEqn) -> bool:
    if equation.primitive.name != "custom_jvp_call":
        return equation.primitive.name in ("custom_vjp_call", "call_hi_primitive")
    # JAX's own rules (of softmax, and those that `defjvps` makes) return what the
    # functions return.
    debug_info = getattr(equation.params.get("jvp_jaxpr_fun"), "debug_info", None)
    return _JAX_FOLDER not in str(getattr(debug_info, "func_src_info", None))


_JAX_FOLDER = str(Path(jax.__file__).parent) + os.sep


_NONLINEAR = frozenset(
    "dot_general conv_general_dilated exp exp2 log log1p expm1 tanh logistic sin cos"
    " tan asin acos atan sinh cosh integer_pow pow square sqrt rsqrt cbrt erf"
    " erf_inv".split()
)


def surely_read(jaxpr: core.Jaxpr, inputs: Sequence[bool]) -> tuple[list[bool], int]:
    """Which of some inputs derivatives surely read, or values that depend on them;
    bytes of what they read.

    Found without tracing, from a few primitives whose derivatives read their operands.
    All inputs are taken to be differentiated; others may be said to be read, and are
    not.
    """
    sources = [1 << number if chosen else 0 for number, chosen in enumerate(inputs)]
    _, read, size = _sources_read(jaxpr, sources)
    return [bool(read >> number & 1) for number in range(len(inputs))], size


def _sources_read(
    jaxpr: core.Jaxpr, sources: Sequence[int]
) -> tuple[list[int], int, int]:
    """For each output, and for what is read, a bit for each input that it depends on;
    bytes that are read.
    """
    known = dict(zip(jaxpr.invars, sources, strict=True))
    read, size = 0, 0
    seen: set[core.Var] = set()

    def of(atom: Any) -> int:
        return known.get(atom, 0) if isinstance(atom, core.Var) else 0

    for equation in jaxpr.eqns:
        operands = [of(atom) for atom in equation.invars]
        outputs = [functools.reduce(operator.or_, operands, 0)] * len(equation.outvars)
        inner = _called(equation)
        is_square = (
            equation.primitive.name == "mul"
            and equation.invars[0] is equation.invars[1]
        )
        if inner is not None and not inner.constvars:
            outputs, inner_read, inner_size = _sources_read(inner, operands)
            read, size = read | inner_read, size + inner_size
        elif is_square or equation.primitive.name in _NONLINEAR:
            for var, source in zip(equation.invars, operands, strict=True):
                read |= source
                if source and isinstance(var, core.Var) and var not in seen:
                    seen.add(var)
                    size += bytes_of(var.aval)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [of(atom) for atom in jaxpr.outvars], read, size


def bytes_of(type_: Any) -> int:
    return type_.size * type_.dtype.itemsize


def forwarded_inputs(jaxpr: core.Jaxpr) -> list[int | None]:
    """For each output that is an input, unchanged, the number of that input."""
    numbers: dict[Any, int] = {var: number for number, var in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        inner = _called(equation)
        found = (
            [0]
            if equation.primitive.name == "name"
            else forwarded_inputs(inner)
            if inner
            else []
        )
        for var, number in zip(equation.outvars, found, strict=False):
            operand = None if number is None else equation.invars[number]
            if isinstance(operand, core.Var) and operand in numbers:
                numbers[var] = numbers[operand]
    return [
        numbers.get(var) if isinstance(var, core.Var) else None for var in jaxpr.outvars
    ]


def expansion(equation: core.JaxprEqn, fn: Callable | None = None) -> Any:
    """What a primitive that expands into others does, or `fn` in its place, closed;
    None for any other.
    """
    if equation.primitive.name != "call_hi_primitive":
        return None
    primitive = equation.params["_prim"]
    with (
        equation.ctx.manager
    ):  # its mesh, of which the axes of `jax.shard_map` are bound
        mesh = jax.sharding.get_abstract_mesh()
        axes = [(name, mesh.shape[name]) for name in mesh.manual_axes]
        return jax.make_jaxpr(fn or primitive.expand, axis_env=axes)(
            *primitive.in_avals
        )


def programs_in(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    expanded = expansion(equation)
    return (
        [*core.jaxprs_in_params(equation.params)]
        if expanded is None
        else [expanded.jaxpr]
    )


def name_of(equation: core.JaxprEqn) -> str:
    """What an equation evaluates, for errors; of what expands into others, the
    class.
    """
    named = equation.params.get("_prim")
    return equation.primitive.name if named is None else type(named).__name__


def _called(equation: core.JaxprEqn) -> core.Jaxpr | None:
    """The jaxpr of an equation that only calls one, argument by argument (`jit`,
    `checkpoint`).
    """
    if equation.primitive.name not in (*CALLS, *CHECKPOINTS):
        return None
    inner = program_of(equation)
    inner = getattr(inner, "jaxpr", inner)
    return (
        inner
        if len(inner.constvars) + len(inner.invars) == len(equation.invars)
        else None
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def not_differentiable(why: str, x: Array, of: Sequence[Array]) -> Array:
    """Return `x`; a derivative by what it, or an array of `of`, depends on is a
    TypeError that says `why`.
    """
    return x


def _refuse(why: str, _: None, cotangent: Array) -> NoReturn:
    raise TypeError(why)


not_differentiable.defvjp(lambda why, x, of: (x, None), _refuse)
