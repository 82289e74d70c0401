"""Which outputs of a jaxpr can depend on which of its inputs, for differentiation.

A sweep must know before it runs which leaves have gradients: for each leaf of a carry
there is a cotangent or none, in all layers alike. JAX's own answer comes out of tracing
a derivative; these functions read the equations of a jaxpr instead:

    active_outputs     which outputs depend on an active input
    active_carry       the same over a loop of layers, to a fixed point
    surely_read        which inputs a derivative surely reads, and how many bytes
    forwarded_inputs   which outputs are inputs, unchanged

The answers are conservative: an output that is said to be inactive does not depend on
an active input; one that is said to be active may still have a zero derivative.

The rest looks into equations: the programs that they evaluate, whether these have
custom rules, and what a primitive of hijax expands to. `memory/`, `ghost/`, `_fused/`
and `_sweep/` interpret jaxprs with it.
"""

import functools
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array

from ._hijax import primitive_of

# Primitives that evaluate a program, argument by argument, by their names in each JAX.
CHECKPOINTS = ("checkpoint", "remat", "remat2")
CALLS = ("jit", "pjit", "closed_call", "eval_jaxpr", "core_call")


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
    # A leaf that becomes active in one layer is active in all: activity only grows, so
    # this ends.
    while True:
        grown = carry
        for jaxpr, shared, xs in layers:
            outputs = active_in(jaxpr, [*shared, *carry, *xs])
            of_carry = outputs[: len(carry)]
            grown = [*map(operator.or_, grown, of_carry)]
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
    variables = (*jaxpr.constvars, *jaxpr.invars)
    active = active_variables(jaxpr, itertools.compress(variables, inputs), counts)
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
        # It may write to these.
        refs = [*filter(_is_ref, equation.invars)]
        active.update(refs)
        if refs:
            outputs = [True] * len(equation.outvars)
        else:
            outputs = _active_results(equation, operands, counts)
        for var, is_active in zip(equation.outvars, outputs, strict=True):
            if is_active and counts(var):
                active.add(var)
    return active


def _is_ref(atom: object) -> TypeGuard[core.Var]:
    return isinstance(atom, core.Var) and hasattr(atom.aval, "inner_aval")


def _active_results(
    equation: core.JaxprEqn,
    operands: Sequence[bool],
    counts: Callable[[core.Var], bool],
) -> list[bool]:
    """Which results of an equation without references depend on active operands: found
    within calls and conditionals, all for other primitives.
    """
    called = _called(equation)
    if called is not None:
        return active_outputs(called, operands, counts)
    # If the index is active, so are all results.
    if equation.primitive.name != "cond" or operands[0]:
        return [True] * len(equation.outvars)
    by_branch = []
    for branch in equation.params["branches"]:
        constants = [False] * len(branch.jaxpr.constvars)
        inputs = [*constants, *operands[1:]]
        by_branch.append(active_outputs(branch.jaxpr, inputs, counts))
    return [*map(any, zip(*by_branch, strict=True))]


def is_in(atom: object, variables: set[core.Var]) -> bool:
    return isinstance(atom, core.Var) and atom in variables


def has_rules(jaxpr: core.Jaxpr) -> bool:
    """Whether custom rules may compute other values where a jaxpr is differentiated."""
    for equation in jaxpr.eqns:
        if _has_rule(equation):
            return True
        if any(map(has_rules, core.jaxprs_in_params(equation.params))):
            return True
    return False


def _has_rule(equation: core.JaxprEqn) -> bool:
    if equation.primitive.name != "custom_jvp_call":
        is_custom = equation.primitive.name == "custom_vjp_call"
        return is_custom or primitive_of(equation) is not None
    # JAX's own rules (of softmax, and those that `defjvps` makes) return what the
    # functions return.
    debug_info = getattr(equation.params.get("jvp_jaxpr_fun"), "debug_info", None)
    return _JAX_FOLDER not in str(getattr(debug_info, "func_src_info", None))


_JAX_FOLDER = str(Path(jax.__file__).parent) + os.sep


# Primitives whose derivatives read their operands (of `square`, twice the operand), or
# results from which these follow.
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
    sources = []
    for number, is_chosen in enumerate(inputs):
        sources.append(frozenset([number] if is_chosen else []))
    _, read, size = _sources_read(jaxpr, sources)
    return [number in read for number in range(len(inputs))], size


def _sources_read(
    jaxpr: core.Jaxpr, sources: Sequence[frozenset[int]]
) -> tuple[list[frozenset[int]], frozenset[int], int]:
    """For each output, and for what is read, the numbers of the inputs that it depends
    on; bytes that are read.

    `sources` has the numbers for each input: within a call, those of the caller's.
    """
    sources_of = dict(zip(jaxpr.invars, sources, strict=True))
    nothing: frozenset[int] = frozenset()
    read = nothing
    size = 0
    # Variables whose bytes are counted.
    counted: set[core.Var] = set()

    def of(atom: Any) -> frozenset[int]:
        # A literal can't be looked up.
        if not isinstance(atom, core.Var):
            return nothing
        return sources_of.get(atom, nothing)

    for equation in jaxpr.eqns:
        name = equation.primitive.name
        atoms = equation.invars
        operands = [*map(of, atoms)]
        results = [nothing.union(*operands)] * len(equation.outvars)
        called = _called(equation)
        if called is not None and not called.constvars:
            results, read_inside, size_inside = _sources_read(called, operands)
            read |= read_inside
            size += size_inside
        elif name in _NONLINEAR or _is_square(equation):
            for var, source in zip(atoms, operands, strict=True):
                read |= source
                if source and isinstance(var, core.Var) and var not in counted:
                    counted.add(var)
                    size += bytes_of(var.aval)
        sources_of.update(zip(equation.outvars, results, strict=True))
    return [*map(of, jaxpr.outvars)], read, size


def _is_square(equation: core.JaxprEqn) -> bool:
    """Whether it is a product of a variable with itself."""
    if equation.primitive.name != "mul":
        return False
    first, second = equation.invars
    return first is second


def bytes_of(type_: Any) -> int:
    return type_.size * type_.dtype.itemsize


def forwarded_inputs(jaxpr: core.Jaxpr) -> list[int | None]:
    """For each output that is an input, unchanged, the number of that input; None for
    others. Through calls and `checkpoint_name`.
    """
    numbers: dict[Any, int] = {var: number for number, var in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        called = _called(equation)
        operand_numbers: list[int | None] = []
        if equation.primitive.name == "name":
            operand_numbers = [0]
        elif called is not None:
            operand_numbers = forwarded_inputs(called)
        for var, number in zip(equation.outvars, operand_numbers, strict=False):
            operand = None if number is None else equation.invars[number]
            if isinstance(operand, core.Var) and operand in numbers:
                numbers[var] = numbers[operand]
    results = []
    for atom in jaxpr.outvars:
        # A literal is no input, and can't be looked up.
        is_variable = isinstance(atom, core.Var)
        results.append(numbers.get(atom) if is_variable else None)
    return results


def expansion(equation: core.JaxprEqn) -> Any:
    """What a primitive that expands into others does, closed; None for any other."""
    primitive = primitive_of(equation)
    if primitive is None:
        return None
    # Its mesh, of which the axes of `jax.shard_map` are bound.
    with equation.ctx.manager:
        mesh = jax.sharding.get_abstract_mesh()
        axes = [(name, mesh.shape[name]) for name in mesh.manual_axes]
        trace = jax.make_jaxpr(primitive.expand, axis_env=axes)
        return trace(*primitive.in_avals)


PRODUCTS = (
    "dot_general",
    "scaled_dot",
    "ragged_dot_general",
    "conv_general_dilated",
    "pallas_call",
    "custom_call",
    "ffi_call",
)
"""Products and kernels, by their primitives' names."""


def programs_in(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """The jaxprs that an equation evaluates, with what a primitive of hijax expands
    to.
    """
    expanded = expansion(equation)
    if expanded is not None:
        return [expanded.jaxpr]
    return [*core.jaxprs_in_params(equation.params)]


def name_of(equation: core.JaxprEqn) -> str:
    """What an equation evaluates, for errors; of what expands into others, the
    class.
    """
    primitive = primitive_of(equation)
    return equation.primitive.name if primitive is None else type(primitive).__name__


def _called(equation: core.JaxprEqn) -> core.Jaxpr | None:
    """The jaxpr of an equation that only calls one, argument by argument (`jit`,
    `checkpoint`).
    """
    if equation.primitive.name not in (*CALLS, *CHECKPOINTS):
        return None
    inner = program_of(equation)
    inner = getattr(inner, "jaxpr", inner)
    inputs = len(inner.constvars) + len(inner.invars)
    return inner if inputs == len(equation.invars) else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def not_differentiable(why: str, x: Array, of: Sequence[Array]) -> Array:
    """Return `x`; raise a TypeError that says `why` where anything that `x` or `of`
    depends on is differentiated.
    """
    return x


def _refuse(why: str, _: None, cotangent: Array) -> NoReturn:
    raise TypeError(why)


not_differentiable.defvjp(lambda why, x, of: (x, None), _refuse)
