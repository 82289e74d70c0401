"""The error for derivatives of results that have none, such as a visitor's.

They pass through an identity whose rule raises where a derivative is run, transposed or compiled. Compiled
programs do not contain it.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from .._static import PyTree


def not_differentiable(x: Array, why: str, of: Sequence[Array] = ()) -> Array:
    """Return `x`, without derivatives with respect to what it, or an array of `of`, depends on.

    Raises:
        TypeError: a derivative is run, transposed or compiled; says `why` there is none.
    """
    return _result.bind(x, *of, why=why)


def _refuse(*_: Any, why: str, **__: Any) -> NoReturn:
    raise TypeError(why)


def _jvp(primals: Sequence[PyTree], tangents: Sequence[PyTree], why: str) -> tuple[PyTree, PyTree]:
    found, *others = tangents
    nonzero = [tangent for tangent in others if not isinstance(tangent, ad.Zero)]
    if nonzero or not isinstance(found, ad.Zero):
        found = _tangent.bind(ad.instantiate_zeros(found), *nonzero, why=why)
    return _result.bind(*primals, why=why), found


_result, _tangent = Primitive("not_differentiable"), Primitive("not_differentiable_tangent")
for _primitive in (_result, _tangent):
    _primitive.def_abstract_eval(lambda x, *_, why: x)
_result.def_impl(lambda x, *_, why: x)
ad.primitive_jvps[_result] = _jvp
batching.primitive_batchers[_result] = lambda args, dims, why: (_result.bind(*args, why=why), dims[0])
mlir.register_lowering(_result, lambda _, x, *__, why: [x])
_tangent.def_impl(_refuse)
ad.deflinear2(_tangent, _refuse)
batching.primitive_batchers[_tangent] = _refuse
mlir.register_lowering(_tangent, _refuse)
