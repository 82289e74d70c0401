"""Errors for derivatives that a fold does not have.

JAX has errors of its own for them, but these say neither what was differentiated nor what to do instead, and
under `jit` they are raised far outside of the fold. So the inputs of a sweep and the results of a
checkpointed scan pass through identities whose rules raise. Compiled programs do not contain them.
"""

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

_FORWARD_MODE = (
    "a fold whose policy has nested, segment_length, max_carries or first_layers has no forward-mode "
    "derivative (jvp, jacfwd, linearize); use remat=True or remat=False for it, or reverse mode"
)
_TRANSPOSE = (
    "a fold whose policy names what it keeps, or cuts its layers, cannot be transposed "
    "(jax.linear_transpose); use remat=False for it, or jax.vjp, which gives the transpose of a linear "
    "function too"
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


def _refuse_forward_mode(*_: Any, **__: Any) -> Any:
    raise TypeError(_FORWARD_MODE)


def _refuse_transpose(*_: Any, **__: Any) -> Any:
    raise TypeError(_TRANSPOSE)


def _differentiate_input(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    return _input.bind(x), tangent if isinstance(tangent, ad.Zero) else _tangent.bind(tangent)


def _differentiate_output(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return _output.bind(*primals), *tangents


def _identity(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[primitive] = lambda args, dims: (primitive.bind(*args), *dims)
    mlir.register_lowering(primitive, lambda _, x: [x])
    ad.primitive_transposes[primitive] = _refuse_transpose
    return primitive


_input = _identity("reverse_mode_only")
ad.primitive_jvps[_input] = _differentiate_input
_output = _identity("not_transposable")
ad.primitive_jvps[_output] = _differentiate_output

_tangent = Primitive("reverse_mode_only_tangent")
_tangent.def_impl(_refuse_forward_mode)
_tangent.def_abstract_eval(lambda x: x)
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])
batching.primitive_batchers[_tangent] = _refuse_forward_mode  # reverse mode transposes before it batches
mlir.register_lowering(_tangent, _refuse_forward_mode)
