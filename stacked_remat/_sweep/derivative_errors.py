"""The error for derivatives of a visitor's results, which a sweep does not have.

They pass through an identity whose rule raises where a derivative is run, transposed or compiled. Compiled programs do
not contain it.
"""

from typing import Any, NoReturn

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array


def not_differentiable(x: Array) -> Array:
    """Return `x`, without derivatives.

    Raises:
        TypeError: a derivative is run, transposed or compiled.
    """
    return _result.bind(x)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        "the results of a sweep with a visitor have no derivatives; differentiate those of "
        "sweep_back(cotangent), or use jax.lax.stop_gradient on these"
    )


def _jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (tangent,) = tangents
    return _result.bind(*primals), tangent if isinstance(tangent, ad.Zero) else _tangent.bind(tangent)


_result, _tangent = Primitive("not_differentiable"), Primitive("not_differentiable_tangent")
for _primitive in (_result, _tangent):
    _primitive.def_abstract_eval(lambda x: x)
_result.def_impl(lambda x: x)
ad.primitive_jvps[_result] = _jvp
batching.primitive_batchers[_result] = lambda args, dims: (_result.bind(*args), *dims)
mlir.register_lowering(_result, lambda _, x: [x])
_tangent.def_impl(_refuse)
ad.deflinear2(_tangent, _refuse)
batching.primitive_batchers[_tangent] = _refuse
mlir.register_lowering(_tangent, _refuse)
