"""Names of values inside layers, by which policies keep them on the device or the host.

JAX's own primitive for names is the same but for one thing: what a policy moves to the
host JAX (0.10.2, 0.12) moves by an equation that has no transpose, so that derivatives
of derivatives fail. A rule of a primitive says what `jax.checkpoint` keeps of it, and
that of this one moves by an equation with a transpose. It asks policies about JAX's
primitive, so all of JAX's serve.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.ad_checkpoint
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var, jaxprs_in_params
from jax.extend.core.primitives import name_p
from jax.interpreters import ad, batching, mlir, partial_eval

from ._hijax import primitive_of
from ._memory_spaces import to_device, to_host


def named(array: Any, name: str) -> Any:
    """The array, with a name that policies know it by."""
    if jax.numpy.iscomplexobj(array):  # JAX keeps named values as real numbers
        real = named(jax.numpy.real(array), name)
        return jax.lax.complex(real, named(jax.numpy.imag(array), name))
    if getattr(jax.config, "jax_remat3", False):  # whose names are no such equations
        return jax.ad_checkpoint.checkpoint_name(array, name)
    return _name_p.bind(array, name=name)


def name_given_by(equation: JaxprEqn) -> str:
    """The name that an equation gives to a value; "" if it gives none."""
    if equation.primitive.name == "name":
        return equation.params["name"]
    primitive = primitive_of(equation)
    # With `JAX_REMAT3=1`.
    if type(primitive).__name__ == "CheckpointName":
        return primitive.params["name"]
    return ""


def names_in(jaxpr: Jaxpr) -> set[str]:
    """All names that a program gives to values."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(name_given_by(equation))
        for inner in jaxprs_in_params(equation.params):
            names |= names_in(getattr(inner, "jaxpr", inner))
    return names - {""}


def _tangent(
    primals: Sequence[Any], tangents: Sequence[Any], *, name: str
) -> tuple[Any, Any]:
    return _name_p.bind(*primals, name=name), tangents[0]  # which has no name


def _offload(array: Any) -> tuple[Any, Any]:
    return array, to_host(array)


def _equation(fn: Callable, var: Any, results: Sequence[Any]) -> JaxprEqn:
    """The equation that calls `fn` for a variable."""
    closed = jax.make_jaxpr(jax.jit(fn))(var.aval)
    (equation,) = closed.jaxpr.eqns
    return equation.replace(invars=[var], outvars=[*results])


def _kept(
    policy: Callable[..., Any],
    is_unknown: Sequence[bool],
    is_instantiated: Sequence[bool],
    equation: JaxprEqn,
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """What `jax.checkpoint` executes in the forward pass and in the backward pass.

    Returns:
        The equation of each, whether the result is unknown in the forward pass, whether
        the backward pass computes it, and what it needs for that beside other results.
    """
    if is_unknown[0]:
        return None, equation, [True], [True], []
    (var,) = equation.invars
    (result,) = equation.outvars
    answer = policy(name_p, var.aval, **equation.params)
    kind = type(answer).__name__
    if answer is True or kind == "SaveableType":
        return equation, None, [False], [False], []
    if kind == "Offloadable":
        host_type = result.aval.update(memory_space=jax.memory.Space.Host)
        on_host = Var(host_type)
        with equation.ctx.manager:
            move = _equation(_offload, var, (result, on_host))
            back = _equation(to_device, on_host, [result])
        return move, back, [False], [True], [on_host]
    # A literal is there anyway, and so is an input that is kept for something else.
    needs_input = isinstance(var, Var) and not is_instantiated[0]
    inputs = [var] if needs_input else []
    return equation, equation, [False], [True], inputs


_name_p: Any = Primitive("name")
_name_p.def_impl(lambda array, *, name: array)
_name_p.def_abstract_eval(lambda array, *, name: array)
mlir.register_lowering(_name_p, lambda _, array, *, name: [array])
ad.primitive_jvps[_name_p] = _tangent
batching.defvectorized(_name_p)
partial_eval.partial_eval_jaxpr_custom_rules[_name_p] = _kept
