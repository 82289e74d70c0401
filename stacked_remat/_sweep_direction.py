"""An error for forward-mode derivatives of a sweep, which has none, wherever they are found out.

`jax.custom_vjp` has an error of its own for them, but it knows neither what was differentiated nor what to do
instead, and under `jit` it comes from far outside of the sweep. So what goes into a sweep passes through an
identity whose tangent is an operation that can be transposed, as reverse mode does, and not run.
"""

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

_MESSAGE = (
    "a fold whose policy has nested, segment_length, max_carries or first_layers has no forward-mode "
    "derivative (jvp, jacfwd, linearize); use remat=True or remat=False for it, or reverse mode"
)


def reverse_mode_only(x: Array) -> Array:
    """Return `x`, with a derivative for reverse mode alone.

    Raises:
        TypeError: its forward-mode derivative is run, or compiled.
    """
    return _value.bind(x)


def _refuse(*_: Any, **__: Any) -> Any:
    raise TypeError(_MESSAGE)


def _differentiate(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    return _value.bind(x), tangent if isinstance(tangent, ad.Zero) else _tangent.bind(tangent)


_value = Primitive("reverse_mode_only")
_value.def_impl(lambda x: x)
_value.def_abstract_eval(lambda x: x)
ad.primitive_jvps[_value] = _differentiate
batching.primitive_batchers[_value] = lambda args, dims: (_value.bind(*args), *dims)
mlir.register_lowering(_value, lambda _, x: [x])

_tangent = Primitive("reverse_mode_only_tangent")
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda x: x)
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])
batching.primitive_batchers[_tangent] = _refuse  # reverse mode transposes before it batches
mlir.register_lowering(_tangent, _refuse)
