"""Which leaves of a carry a reversal needs, by the equations of a step.

A leaf that a step only adds to, or writes to at an index, as a sum or a buffer of
outputs, is not read by anything but itself. Then neither what a step makes of the other
leaves nor a derivative of the step depends on its value, and no kept carry needs it: a
buffer for all outputs of a loop is there once, not once for each kept carry.

The test is on the jaxpr of the step and conservative. A leaf is followed through
operations that are linear in it with coefficients that have no derivative. Where any
other operation reads it, where an index or a predicate depends on it, or where it gets
into another leaf, it is needed.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._activity import CALLS, CHECKPOINTS, program_of
from .._hijax import primitive_of

# Numbers of leaves of the carry
_Leaves = frozenset[int]
_NONE: _Leaves = frozenset()

# Linear in all operands
_LINEAR = frozenset(
    "add sub neg add_any convert_element_type reshape broadcast_in_dim squeeze"
    " transpose copy copy_p slice concatenate expand_dims reduce_sum rev".split()
)
# Linear in the operands with these numbers; the others are indices or predicates
_LINEAR_IN = {
    "dynamic_slice": (0,),
    "gather": (0,),
    "dynamic_update_slice": (0, 1),
    "scatter": (0, 2),
    "scatter-add": (0, 2),
}


def read_leaves(jaxpr: Jaxpr, carry: int) -> tuple[bool, ...]:
    """Which of the leaves of the carry are read, in a step whose last inputs they are.

    The outputs of the step are the leaves after it.
    """
    others = len(jaxpr.invars) - carry
    sources = [_NONE] * others + [frozenset([number]) for number in range(carry)]
    results, read = _followed(jaxpr, sources)
    for number, found in enumerate(results):
        read |= found - {number}
    return tuple(number in read for number in range(carry))


def _followed(
    jaxpr: Jaxpr, sources: Sequence[_Leaves]
) -> tuple[list[_Leaves], _Leaves]:
    """The leaves on which each output depends linearly, and those that are read, given
    the leaves on which each input depends.
    """
    known: dict[Any, _Leaves] = dict(zip(jaxpr.invars, sources, strict=True))
    read = _NONE

    def leaves_of(atom: Any) -> _Leaves:
        return _NONE if isinstance(atom, Literal) else known.get(atom, _NONE)

    for equation in jaxpr.eqns:
        operands = [*map(leaves_of, equation.invars)]
        if not any(operands):
            continue
        results, read_here = _through(equation, operands)
        read |= read_here
        known.update(zip(equation.outvars, results, strict=True))
    return [*map(leaves_of, jaxpr.outvars)], read


def _through(
    equation: JaxprEqn, operands: Sequence[_Leaves]
) -> tuple[list[_Leaves], _Leaves]:
    """As `_followed`, of one equation."""
    name = equation.primitive.name
    if name in (*CALLS, *CHECKPOINTS):
        inner = program_of(equation)
        inner = getattr(inner, "jaxpr", inner)
        if len(inner.invars) == len(operands) and not inner.constvars:
            return _followed(inner, operands)
    primitive = primitive_of(equation)
    if hasattr(primitive, "followed"):
        # A loop of this package within the step
        return primitive.followed(operands)
    if name == "cond":
        return _through_branches(equation, operands)
    linear_in = range(len(operands)) if name in _LINEAR else _LINEAR_IN.get(name, ())
    if name == "select_n":
        linear_in = range(1, len(operands))
    results = _NONE.union(*(operands[number] for number in linear_in))
    others = set(range(len(operands))).difference(linear_in)
    read = _NONE.union(*(operands[number] for number in others))
    return [results] * len(equation.outvars), read


def _through_branches(
    equation: JaxprEqn, operands: Sequence[_Leaves]
) -> tuple[list[_Leaves], _Leaves]:
    """As `_followed`, of a conditional."""
    index, *inputs = operands
    read = index
    results = [_NONE] * len(equation.outvars)
    for branch in equation.params["branches"]:
        found, read_here = _followed(branch.jaxpr, inputs)
        read |= read_here
        results = [before | more for before, more in zip(results, found, strict=True)]
    return results, read
