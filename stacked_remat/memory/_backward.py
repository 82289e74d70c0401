"""Finds which operands of products depend on what is trained: each adds a product to the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

from .._activity import is_differentiable
from ._jaxprs import Jaxprs

_MOST = 2  # gradients of one product, which has two factors; fused attention has more operands


def mark_products(
    jaxprs: Jaxprs,
    jaxpr: Any,
    active: Sequence[bool],
    factors: dict[tuple[int, ...], int],
    path: tuple[int, ...] = (),
) -> list[bool]:
    """Count how many products each equation needs, forward and backward.

    Args:
        jaxprs: those of the program.
        jaxpr: the program, open or closed.
        active: which of its inputs depend on what is trained.
        factors: filled in for equations that hold no jaxpr: 1 for the equation itself, and 1 for each operand
            with a gradient. Keys are the ids of the equations around it and its own, because calls of one
            function share a jaxpr.
        path: the equations around this jaxpr.

    Returns:
        Which outputs depend on what is trained.
    """
    program = jaxprs.live(jaxpr)
    known = {var for var, is_active in zip(program.invars, active, strict=True) if is_active}

    def reads(atom: Any) -> bool:
        return not hasattr(atom, "val") and atom in known

    for eqn in program.eqns:
        operands = [reads(atom) for atom in eqn.invars]
        outputs = _mark(jaxprs, eqn, operands, factors, (*path, id(eqn)))
        pairs = zip(eqn.outvars, outputs, strict=True)
        known.update(var for var, is_active in pairs if is_active and _has_gradient(var))
    return [reads(atom) for atom in program.outvars]


def _mark(
    jaxprs: Jaxprs,
    eqn: Any,
    operands: list[bool],
    factors: dict[tuple[int, ...], int],
    path: tuple[int, ...],
) -> list[bool]:
    name, params = eqn.primitive.name, eqn.params

    def inner(jaxpr: Any, active: Sequence[bool]) -> list[bool]:
        return mark_products(jaxprs, jaxpr, active, factors, path)

    if name == "stop_gradient":
        return [False] * len(eqn.outvars)
    if name == "scan":
        num_consts, num_carry = scan_parts(eqn)
        return _looped(inner, params["jaxpr"], operands, num_consts, num_carry)
    if name == "while":
        carried = operands[params["cond_nconsts"] :]
        first = params["body_nconsts"]
        return _looped(inner, params["body_jaxpr"], carried, first, len(carried) - first)
    if name == "cond":
        runs = [inner(branch, operands[1:]) for branch in params["branches"]]
        return [any(outputs) for outputs in zip(*runs, strict=True)]
    if name != "pallas_call":
        called = jaxprs.called(eqn)
        if called is not None:
            return inner(called, operands)
    factors[path] = max(factors.get(path, 1), 1 + min(_MOST, sum(operands)))
    return [any(operands)] * len(eqn.outvars)


def _looped(
    inner: Callable[[Any, Sequence[bool]], list[bool]],
    body: Any,
    operands: list[bool],
    num_consts: int,
    num_carry: int,
) -> list[bool]:
    """Which outputs of a loop are active; a carry that becomes active on one trip is so on all."""
    consts, carry, xs = (
        operands[:num_consts],
        operands[num_consts:][:num_carry],
        operands[num_consts + num_carry :],
    )
    while True:
        outputs = inner(body, [*consts, *carry, *xs])
        grown = [old or new for old, new in zip(carry, outputs, strict=False)]
        if grown == carry:
            return [*carry, *outputs[num_carry:]]
        carry = grown


def scan_parts(eqn: Any) -> tuple[int, int]:
    """How many constants and how many carries a `scan` has.

    Found from shapes, because the equation's parameters differ between versions of JAX: scanned inputs and
    stacked outputs have one more axis outside the body than inside.
    """
    body = eqn.params["jaxpr"]
    inner = getattr(body, "jaxpr", body)
    num_xs, num_ys = (
        sum(outer.aval.shape != own.aval.shape for outer, own in zip(outside, inside, strict=True))
        for outside, inside in ((eqn.invars, inner.invars), (eqn.outvars, inner.outvars))
    )
    num_carry = len(eqn.outvars) - num_ys
    return len(eqn.invars) - num_xs - num_carry, num_carry


def _has_gradient(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and is_differentiable(dtype)
