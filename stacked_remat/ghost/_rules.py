"""Derivative rules of users, `jax.custom_jvp` and `jax.custom_vjp`, as programs that can be followed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal as Constant

from .._activity import CALLS, CHECKPOINTS, programs_in
from ._traced import type_of
from ._units import Flow, has_examples
from ._weights import bind

_LIBRARY = Path(__file__).parents[1]
RULES = ("custom_jvp_call", "custom_vjp_call")
Kind: TypeAlias = Literal["zero", "constant", "linear", "other"]
"""How a value depends on a cotangent."""


def has_rule(equation: Any) -> bool:
    """Whether an equation is of a function with a derivative rule, or calls one."""
    inner = (eqn for jaxpr in programs_in(equation) for eqn in jaxpr.eqns)
    return equation.primitive.name in RULES or any(map(has_rule, inner))


def after_rule(
    equation: Any,
    twin: Any,
    inputs: Sequence[Flow],
    found: Sequence[Flow],
    of_body: Callable[[Any, Any, Sequence[Flow]], list[Flow]],
) -> list[Flow]:
    """What is known of the results of a function with a derivative rule.

    Args:
        equation: of a `jax.custom_jvp` or `jax.custom_vjp`.
        twin: the same of the second trace.
        inputs: what is known of its operands.
        found: what is known of its results by the function itself.
        of_body: what is known of the results of a program, given in both traces.
    """
    moving = [at for at, flow in enumerate(inputs) if flow.is_followed and _is_real(equation.invars[at])]
    if not moving or _is_own(equation):
        return list(found)
    results = [at for at, var in enumerate(equation.outvars) if _is_real(var)]
    is_vjp = equation.primitive.name == "custom_vjp_call"
    given = [found[at] for at in results] if is_vjp else [inputs[at] for at in moving]
    wanted = [inputs[at] for at in moving] if is_vjp else [found[at] for at in results]
    rule, larger = ((_back if is_vjp else _along)(one, moving, results) for one in (equation, twin))
    after = of_body(rule, larger, [*inputs, *(Flow(flow.rows, True, flow.mixed) for flow in given)])
    is_apart = all(
        not one.mixed and one.rows == own.rows
        for one, own in zip(after, wanted, strict=True)
        if one.is_followed and has_examples(own.rows)
    )
    if is_vjp:
        is_apart = is_apart and _is_linear(rule.jaxpr, len(inputs))
    mixed = "" if is_apart else f"the derivative rule of `{_source(equation)}`"
    followed = any(flow.is_followed for flow in after)
    return [
        Flow(flow.rows, flow.is_followed or followed, flow.mixed or mixed) if at in results else flow
        for at, flow in enumerate(found)
    ]


def _is_real(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _source(equation: Any) -> str:
    """The name, file and line of a function with a rule: `clip at /home/me/model.py:12`."""
    inner = equation.params["call_jaxpr"]
    return getattr(inner, "jaxpr", inner).debug_info.func_src_info


def _is_own(equation: Any) -> bool:
    """Whether the rule is of this library, where rules are other ways to the derivative of the function."""
    return Path(_source(equation).rpartition(" at ")[2]).is_relative_to(_LIBRARY)


def _types(variables: Sequence[Any]) -> list[Any]:
    return [type_of(var.aval, var.aval.shape) for var in variables]


def _results(equation: Any, primals: Sequence[Any], moving: Sequence[int], results: Sequence[int]) -> Any:
    """The results of a function, of those of its operands that are differentiated."""

    def of_moving(*arrays: Any) -> list[Any]:
        given = dict(zip(moving, arrays, strict=True))
        found = bind(equation, [given.get(at, primal) for at, primal in enumerate(primals)])
        return [found[at] for at in results]

    return of_moving


def _along(equation: Any, moving: Sequence[int], results: Sequence[int]) -> Any:
    """From operands and tangents to the tangents of the results."""

    def along(primals: list[Any], tangents: list[Any]) -> list[Any]:
        own = [primals[at] for at in moving]
        return jax.jvp(_results(equation, primals, moving, results), own, tangents)[1]

    types = _types(equation.invars)
    return jax.make_jaxpr(along)(types, [types[at] for at in moving])


def _back(equation: Any, moving: Sequence[int], results: Sequence[int]) -> Any:
    """From operands and cotangents of the results to those of the operands."""

    def back(primals: list[Any], cotangents: list[Any]) -> Any:
        own = [primals[at] for at in moving]
        _, pull = jax.vjp(_results(equation, primals, moving, results), *own)
        return pull(cotangents)

    return jax.make_jaxpr(back)(_types(equation.invars), _types([equation.outvars[at] for at in results]))


def _is_linear(rule: Any, constants: int) -> bool:
    """Whether the results are linear in the inputs after the first ones."""
    kinds: list[Kind] = ["constant" if at < constants else "linear" for at in range(len(rule.invars))]
    return {*_kinds(rule, kinds)} <= {"linear", "zero"}


def _kinds(jaxpr: Any, inputs: Sequence[Kind]) -> list[Kind]:
    """How the results of a program depend on the inputs that are linear; "other" where it can't be told."""
    known: dict[Any, Kind] = {var: "constant" for var in jaxpr.constvars}
    known |= dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Kind:
        if isinstance(atom, Constant):
            return "constant" if np.any(atom.val) else "zero"
        return known[atom]

    for equation in jaxpr.eqns:
        operands: list[Kind] = [read(atom) for atom in equation.invars]
        if equation.primitive.name in (*CALLS, *CHECKPOINTS, *_RULED):
            (inner,) = programs_in(equation)
            found = _kinds(inner, operands)
        else:
            found = [_kind(equation.primitive.name, operands)] * len(equation.outvars)
        known |= dict(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _kind(name: str, operands: Sequence[Kind]) -> Kind:
    places = range(len(operands))[_SUMMED[name]] if name in _SUMMED else ()
    summed = {operands[at] for at in places}
    fixed = {kind for at, kind in enumerate(operands) if at not in places}
    if summed == {"zero"} or (name in _PRODUCTS and "zero" in fixed and "other" not in fixed):
        return "zero"
    if "linear" not in operands and "other" not in operands:
        return "constant"
    if name in _PRODUCTS:
        return "linear" if operands.count("linear") == 1 and "other" not in fixed else "other"
    return "linear" if summed and summed <= {"linear", "zero"} and fixed <= {"constant", "zero"} else "other"


_RULED = ("custom_jvp_call", "custom_vjp_call", "call_hi_primitive")
_PRODUCTS = ("mul", "dot_general", "conv_general_dilated")
_SUMS = """add add_any broadcast_in_dim concatenate convert_element_type copy cumsum expand_dims fft imag
name neg optimization_barrier pad pbroadcast pcast psum psum_invariant pvary real reduce_precision reduce_sum
reduce_window_sum reshape rev sharding_constraint slice split squeeze stack stop_gradient sub tile transpose
unstack""".split()
_SUMMED: dict[str, slice] = {
    **dict.fromkeys(_SUMS, slice(None)),
    **dict.fromkeys(("div", "gather", "dynamic_slice"), slice(1)),
    "dynamic_update_slice": slice(2),
    "select_n": slice(1, None),
    **dict.fromkeys(("scatter", "scatter-add"), slice(0, 3, 2)),
}
"""The operands in which an equation is linear, together, where the others are constant."""
