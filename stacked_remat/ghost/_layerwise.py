"""Whether what is computed from the layers of a stack is computed from each layer alone."""

from collections.abc import Callable, Sequence
from typing import Any

_ELEMENTWISE = (
    "abs add add_any and cbrt ceil clamp convert_element_type copy cos cosh device_put div eq erf "
    "erf_inv exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul "
    "name ne neg not or pow reduce_precision rem reshard round rsqrt select_n sharding_constraint sign sin "
    "sinh sqrt square stop_gradient sub tan tanh".split()
)


def _without(gone: Sequence[int], at: int) -> int | None:
    return None if at in gone else at - sum(other < at for other in gone)


# Where a dimension of the operands is in the result, from the parameters.
_MOVED: dict[str, Callable[[int, Any], int | None]] = {
    **dict.fromkeys(_ELEMENTWISE, lambda at, params: at),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"),
        lambda at, params: _without(params["axes"], at),
    ),
    "squeeze": lambda at, params: _without(params["dimensions"], at),
    "transpose": lambda at, params: params["permutation"].index(at),
    "broadcast_in_dim": lambda at, params: params["broadcast_dimensions"][at],
}


def followed(equation: Any, layers: Sequence[int | None]) -> Sequence[tuple[Any, int | None]] | None:
    """Which layers each result of an equation has, each of the same layer alone, and in which dimension.

    Args:
        equation: the equation.
        layers: the dimension of the layers in each operand, None in those without.

    Returns:
        For each result an index of the layers, None for all, and a dimension, None for one layer or if there
        are none. None for equations that are not known to keep layers apart.
    """
    name, params, results = equation.primitive.name, equation.params, equation.outvars
    own = [
        (at, atom.aval.shape[at]) for at, atom in zip(layers, equation.invars, strict=True) if at is not None
    ]
    if not own:
        return [(None, None)] * len(results)
    (at, size), *others = dict.fromkeys(own)
    if at == 0 and name == "unstack" and params["axis"] == 0:
        return [(number, None) for number in range(size)]
    if at == 0 and name == "squeeze" and 0 in params["dimensions"]:
        return [(0, None)]
    if at == 0 and name == "slice":
        starts, ends, strides = (params[key] for key in ("start_indices", "limit_indices", "strides"))
        return [(slice(starts[0], ends[0], strides and strides[0]), 0)]
    to = _MOVED[name](at, params) if name in _MOVED and not others else None
    if to is None or any(result.aval.shape[to] != size for result in results):
        return None
    return [(None, to)] * len(results)
