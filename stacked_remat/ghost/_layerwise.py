"""Whether what is computed from the layers of a stack is computed from each layer alone."""

import math
from collections.abc import Sequence
from typing import Any

from .._activity import CALLS, CHECKPOINTS, program_of
from ._weights import Result, Weight

MIXED = -1
"""In place of a dimension: what is computed from several layers."""

_ELEMENTWISE = frozenset(
    "abs add add_any and cbrt ceil clamp convert_element_type copy cos cosh device_put div eq erf "
    "erf_inv exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul "
    "name ne neg not or pow reduce_precision rem reshard round rsqrt select_n sharding_constraint sign sin "
    "sinh sqrt square stop_gradient sub tan tanh".split()
)


def layers_of(node: Any, weight: Weight, layers: int | None) -> int | None:
    """The dimension of a node that has the layers of a weight, each of the same layer alone.

    Of the weight it is `layers`, None for one without. `MIXED` for any equation that isn't known to keep
    layers apart.
    """
    found: dict[int, list[int | None]] = {}

    def of(node: Any) -> int | None:
        if not isinstance(node, Result):
            return layers if node is weight else None
        if id(node.call) not in found:
            found[id(node.call)] = _after(node.call.equation, [*map(of, node.call.operands)])
        return found[id(node.call)][node.index]

    return of(node)


def _after(equation: Any, given: Sequence[int | None]) -> list[int | None]:
    """The dimensions of layers in the results of an equation, from those in its operands."""
    name = equation.primitive.name
    if name in (*CALLS, *CHECKPOINTS, "custom_jvp_call"):
        jaxpr = getattr(program_of(equation), "jaxpr", program_of(equation))
        at = dict(zip(jaxpr.invars, given, strict=True))
        for inner in jaxpr.eqns:
            operands = [None if hasattr(atom, "val") else at.get(atom) for atom in inner.invars]
            at |= zip(inner.outvars, _after(inner, operands), strict=True)
        return [None if hasattr(atom, "val") else at.get(atom) for atom in jaxpr.outvars]
    held = {dimension for dimension in given if dimension is not None}
    if not held:
        return [None] * len(equation.outvars)
    if MIXED in held:
        return [MIXED] * len(equation.outvars)
    rule = _elementwise if name in _ELEMENTWISE else _RULES.get(name, lambda *_: MIXED)
    own = [(atom.aval.shape, at) for atom, at in zip(equation.invars, given, strict=True)]
    return [rule(equation.params, own, var.aval.shape) for var in equation.outvars]


Operands = list[tuple[tuple[int, ...], int | None]]


def _elementwise(params: Any, operands: Operands, shape: tuple[int, ...]) -> int:
    found = {at for _, at in operands if at is not None}
    is_whole = all(len(own) == len(shape) and own[at] == shape[at] for own, at in operands if at is not None)
    return found.pop() if len(found) == 1 and is_whole else MIXED


def _alone(rule: Any) -> Any:
    """A rule of an operation on one array, whose dimension of layers is in its first operand."""

    def checked(params: Any, operands: Operands, shape: tuple[int, ...]) -> int:
        (own, at), *others = operands
        if at is None or any(other is not None for _, other in others):
            return MIXED
        found = rule(params, own, at, shape)
        return found if found >= 0 and shape[found] == own[at] else MIXED

    return checked


def _without(removed: Sequence[int], at: int) -> int:
    return MIXED if at in removed else at - sum(other < at for other in removed)


def _reshaped(params: Any, own: tuple[int, ...], at: int, shape: tuple[int, ...]) -> int:
    before = math.prod(own[:at])
    fits = (n for n, size in enumerate(shape) if math.prod(shape[:n]) == before and size == own[at])
    return MIXED if params.get("dimensions") else next(fits, MIXED)


def _kept(params: Any, own: tuple[int, ...], at: int, shape: tuple[int, ...]) -> int:
    """Of a slice: one that has all layers; other dimensions may be cut and padded."""
    padded = params.get("padding_config", [(0, 0, 0)] * len(own))[at]
    return at if shape[at] == own[at] and not any(padded) else MIXED


def _concatenated(params: Any, operands: Operands, shape: tuple[int, ...]) -> int:
    found = {at for _, at in operands if at is not None}
    return found.pop() if len(found) == 1 and params["dimension"] not in found else MIXED


def _product(params: Any, operands: Operands, shape: tuple[int, ...]) -> int:
    """Dimensions of a product are those of the batch, and those of each side that are not contracted."""
    contracted, batch = params["dimension_numbers"]
    found = set()
    for side, (own, at) in enumerate(operands):
        kept = [n for n in range(len(own)) if n not in (*contracted[side], *batch[side])]
        first = len(operands[0][0]) - len(contracted[0]) if side else len(batch[0])
        order = [*batch[side], *kept]
        if at is not None:
            inside = order.index(at) if at in order else MIXED
            found.add(inside if inside < len(batch[0]) else inside - len(batch[0]) + first)
    return found.pop() if len(found) == 1 else MIXED


_reduced = _alone(lambda params, own, at, shape: _without(params["axes"], at))
_RULES = {
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), _reduced),
    "squeeze": _alone(lambda params, own, at, shape: _without(params["dimensions"], at)),
    "transpose": _alone(lambda params, own, at, shape: params["permutation"].index(at)),
    "broadcast_in_dim": _alone(lambda params, own, at, shape: int(params["broadcast_dimensions"][at])),
    "reshape": _alone(_reshaped),
    **dict.fromkeys(("slice", "split", "pad"), _alone(_kept)),
    "concatenate": _concatenated,
    "dot_general": _product,
}
