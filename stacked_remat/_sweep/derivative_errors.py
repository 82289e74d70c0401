"""Errors for derivatives that a fold does not have.

JAX has errors of its own for them, but these say neither what was differentiated nor what to do instead, and
under `jit` they are raised far outside of the fold. So the inputs of a sweep, the results of a checkpointed
scan and those of a visitor pass through identities whose rules raise. Compiled programs do not contain them.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

_FORWARD_MODE = (
    "a fold whose policy has nested, segment_length, max_carries or first_layers, or whose layers are on the "
    "host or in a StackedPattern, has no forward-mode derivative (jvp, jacfwd, linearize); use reverse mode, "
    "or remat=True or remat=False with the layers on the device, those of several kinds in a BlockSeq"
)
_TRANSPOSE = (
    "a fold whose policy names what it keeps, or cuts its layers, cannot be transposed "
    "(jax.linear_transpose); use remat=False for it, or jax.vjp, which gives the transpose of a linear "
    "function too"
)
_VISITED = (
    "the results of a sweep with a visitor have no derivatives; differentiate those of "
    "sweep_back(cotangent), or use jax.lax.stop_gradient on these"
)


def reverse_mode_only(x: Array) -> Array:
    """Return `x`, with a derivative for reverse mode alone.

    Raises:
        TypeError: its forward-mode derivative is run, or compiled.
    """
    return _input.bind(x)


def not_transposable(x: Array) -> Array:
    """Return `x`, with all its derivatives, and an error where a program with it is transposed.

    Raises:
        TypeError: `jax.linear_transpose` of a function that calls this.
    """
    return _output.bind(x)


def not_differentiable(x: Array) -> Array:
    """Return `x`, without derivatives.

    Raises:
        TypeError: a derivative is run, transposed or compiled.
    """
    return _result.bind(x)


def _refusing(reason: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise TypeError(reason)

    return refuse


def _identity(name: str, tangent_of: Callable[[Any], Any] = lambda tangent: tangent) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[primitive] = lambda args, dims: (primitive.bind(*args), *dims)
    mlir.register_lowering(primitive, lambda _, x: [x])
    ad.primitive_transposes[primitive] = _refusing(_TRANSPOSE)

    def jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        (tangent,) = tangents
        return primitive.bind(*primals), tangent if isinstance(tangent, ad.Zero) else tangent_of(tangent)

    ad.primitive_jvps[primitive] = jvp
    return primitive


def _refused_tangent(name: str, reason: str, transpose: Callable[..., Any] | None = None) -> Primitive:
    """An identity on tangents that cannot be run or compiled, and transposed only if `transpose` is given."""
    primitive, refuse = Primitive(name), _refusing(reason)
    primitive.def_impl(refuse)
    primitive.def_abstract_eval(lambda x: x)
    ad.deflinear2(primitive, transpose or refuse)
    batching.primitive_batchers[primitive] = refuse
    mlir.register_lowering(primitive, refuse)
    return primitive


# Reverse mode transposes before it batches.
_input_tangent = _refused_tangent("reverse_mode_only_tangent", _FORWARD_MODE, lambda ct, _: [ct])
_input = _identity("reverse_mode_only", _input_tangent.bind)
_output = _identity("not_transposable")
_result = _identity("not_differentiable", _refused_tangent("not_differentiable_tangent", _VISITED).bind)
