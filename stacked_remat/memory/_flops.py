"""Counts a program's FLOPs and transfers, loop bodies times the number of times they run.

XLA's own cost analysis counts the body of a loop once, and a training step over scanned layers is mostly
loops, so the traced program is counted instead. Where a trip count is not a constant of the program, the
names of `_trips.py` say it; one that nothing says is reported, never silently taken as one.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from jax.extend import source_info_util
from jax.extend.core import Literal, jaxprs_in_params

from .._activity import is_differentiable
from .._trips import blocks_in, branches_in, trips_in
from ._costs import Flops, leaf_cost
from ._jaxprs import Jaxprs

_MOST_GRADIENTS = 2  # of one product, which has two factors; fused attention has more operands

_Active: TypeAlias = Sequence[bool]
_Count: TypeAlias = "tuple[Flops, list[bool]]"


def count_flops(jaxpr: Any, *, trained: Sequence[bool] | None = None) -> Flops:
    """Count the FLOPs of a traced program, and what it moves between host and device memory.

    Args:
        jaxpr: a closed jaxpr, as `jax.make_jaxpr(f)(*args)` or `jax.jit(f).trace(*args).jaxpr` return.
        trained: for each of its inputs whether its gradient is taken. With it, the products of the backward
            pass count too: one for each operand of a product that depends on such an input. Its elementwise
            FLOPs and its transfers do not.

    Returns:
        The count. Equations whose results are never used are left out, as XLA leaves them out. Loops
        count body times trips: those of a `scan`, of a `while` loop that counts from one constant to
        another by ones, and of the loops of this package. Other `while` loops are counted once, those of
        divided experts (`over` of `grouped_experts`) as often as an even routing takes, and named in
        `too_low`.
    """
    active = [False] * len(jaxpr.in_avals) if trained is None else [*trained]
    found, _ = _Counter().run(jaxpr, active)
    matmul, elementwise, from_host, to_host = map(round, found.counts)
    return Flops(matmul, elementwise, from_host, to_host, found.too_low, found.too_high)


class _Counter:
    """Counts one program: the cost of a jaxpr, and which of its results depend on what is trained."""

    def __init__(self) -> None:
        self._jaxprs = Jaxprs()
        self._runs: dict[Any, _Count] = {}
        self._blocks: int | None = None  # of splash kernels called by what is counted

    def run(self, jaxpr: Any, active: _Active) -> _Count:
        """Count a jaxpr, open or closed, given which of its inputs depend on what is trained."""
        live = self._jaxprs.live(jaxpr)
        key = id(jaxpr), self._blocks, *active
        if key not in self._runs:
            known = {var for var, is_active in zip(live.invars, active, strict=True) if is_active}
            cost = Flops()
            for eqn in live.eqns:
                around = self._blocks
                scopes = str(eqn.source_info.name_stack)
                self._blocks = blocks_in(scopes) or around
                added, outputs = self._eqn(eqn, scopes, [_is_in(known, atom) for atom in eqn.invars])
                self._blocks, cost = around, cost + added
                pairs = zip(eqn.outvars, outputs, strict=True)
                known.update(var for var, is_active in pairs if is_active and _has_gradient(var))
            self._runs[key] = cost, [_is_in(known, atom) for atom in live.outvars]
        return self._runs[key]

    def _eqn(self, eqn: Any, scopes: str, active: list[bool]) -> _Count:
        name, params = eqn.primitive.name, eqn.params
        if name == "stop_gradient":
            return Flops(), [False] * len(eqn.outvars)
        if name == "scan":
            body = params["jaxpr"]
            each, outputs = self._loop(body, active, *scan_parts(eqn))
            return each * params["length"], outputs
        if name == "while":
            return self._while(eqn, scopes, active)
        if name == "cond":
            return self._cond(eqn, scopes, active[1:])
        if name == "shard_map":
            shape, manual = params["mesh"].shape, params.get("manual_axes")
            body, outputs = self.run(params["jaxpr"], active)
            return body * math.prod(shape[axis] for axis in (manual or shape)), outputs
        called = None if name == "pallas_call" else self._jaxprs.called(eqn)
        if called is not None:
            return self.run(called, active)
        cost = self._kernel(eqn) if name == "pallas_call" else self._inside(eqn)
        gradients = min(_MOST_GRADIENTS, sum(active))
        cost = dataclasses.replace(cost, matmul=cost.matmul * (1 + gradients))
        return cost, [any(active)] * len(eqn.outvars)

    def _inside(self, eqn: Any) -> Flops:
        """The cost of an equation that calls nothing with its own operands."""
        name = eqn.primitive.name
        nested = [] if name in _TINY_BODIES else list(jaxprs_in_params(eqn.params))
        if not nested:
            return leaf_cost(eqn)
        reason = f"what is inside {name!r}{_where(eqn)} is counted once"
        return sum(map(self._unknown, nested), Flops(too_low=(reason,)))

    def _unknown(self, jaxpr: Any) -> Flops:
        return self.run(jaxpr, [False] * len(getattr(jaxpr, "jaxpr", jaxpr).invars))[0]

    def _kernel(self, eqn: Any) -> Flops:
        """A Pallas kernel: its body times the steps of its grid."""
        grid, body = eqn.params["grid_mapping"].grid, self._unknown(eqn.params["jaxpr"])
        if not all(isinstance(size, int) for size in grid):
            return body + Flops(too_low=(f"a kernel with a dynamic grid{_where(eqn)} is counted once",))
        steps = math.prod(grid)
        if (eqn.params.get("name") or "").startswith("splash_"):
            # Its second argument is its table of blocks. All its matrix products are in the branch for those
            # that are visible.
            steps = steps // eqn.invars[1].aval.size * (self._blocks or eqn.invars[1].aval.size)
            reason = "what a splash kernel does on the first and last block of a row counts on every block"
            body = dataclasses.replace(body, too_high=(reason,))
        return body * steps

    def _cond(self, eqn: Any, scopes: str, active: list[bool]) -> _Count:
        runs = [self.run(branch, active) for branch in eqn.params["branches"]]
        outputs = [any(outputs) for outputs in zip(*(outputs for _, outputs in runs), strict=True)]
        costs, shares, index = [cost for cost, _ in runs], branches_in(scopes), eqn.invars[0]
        if isinstance(index, Literal):
            return costs[min(max(int(index.val), 0), len(costs) - 1)], outputs
        if len(shares) == len(costs):
            parts = (cost * share for cost, share in zip(costs, shares, strict=True))
            return sum(parts, Flops()), outputs
        counts = [cost.counts for cost in costs]
        matmul, elementwise, *_ = max(counts)
        from_host, to_host = (max(count[direction] for count in counts) for direction in (2, 3))
        most = Flops(matmul, elementwise, from_host, to_host)
        if any(count != most.counts for count in counts):
            reason = f"a conditional that depends on data{_where(eqn)} counts its most expensive branch"
            most = most + Flops(too_high=(reason,))
        reasons = (Flops(too_low=cost.too_low, too_high=cost.too_high) for cost in costs)
        return sum(reasons, most), outputs

    def _while(self, eqn: Any, scopes: str, active: list[bool]) -> _Count:
        params = eqn.params
        body, test, state = params["body_jaxpr"], params["cond_jaxpr"], active[params["cond_nconsts"] :]
        num_carry = len(eqn.outvars)
        each, outputs = self._loop(body, state, len(state) - num_carry, num_carry)
        once = self._unknown(test)
        trips, is_exact = trips_in(scopes)
        if trips is None:
            trips = _constant_trips(eqn, self._jaxprs.live(test), self._jaxprs.live(body))
            is_exact = trips is not None
        if is_exact and trips is not None:
            return each * trips + once * (trips + 1), outputs
        counted = "once" if trips is None else f"{trips} times"
        reason = f"a while loop{_where(eqn)} whose trip count is not known in advance is counted {counted}"
        return (each + once) * (1 if trips is None else trips) + Flops(too_low=(reason,)), outputs

    def _loop(self, body: Any, active: list[bool], num_consts: int, num_carry: int) -> _Count:
        """The cost of a trip. A carry that becomes active on one trip is so on all."""
        consts, carry, xs = (
            active[:num_consts],
            active[num_consts:][:num_carry],
            active[num_consts + num_carry :],
        )
        while True:
            cost, outputs = self.run(body, [*consts, *carry, *xs])
            grown = [old or new for old, new in zip(carry, outputs, strict=False)]
            if grown == carry:
                return cost, [*carry, *outputs[num_carry:]]
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


def _constant_trips(eqn: Any, test: Any, body: Any) -> int | None:
    """The trips of a loop that counts by ones up to a constant, as `fori_loop` does; None for others."""
    if [each.primitive.name for each in test.eqns] != ["lt"] or isinstance(test.eqns[0].invars[0], Literal):
        return None
    of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    given = dict(zip(test.invars, [*eqn.invars[:of_test], *eqn.invars[of_test + of_body :]], strict=True))
    carried = dict(
        zip(test.invars[of_test:], zip(body.invars[of_body:], body.outvars, strict=True), strict=True)
    )
    counter, limit = test.eqns[0].invars
    if not isinstance(limit, Literal):
        own, result = carried.get(limit, (None, None))
        limit = given[limit] if own is result else None
    if counter not in carried or not isinstance(limit, Literal) or not isinstance(given[counter], Literal):
        return None
    own, result = carried[counter]
    added = [each.invars for each in body.eqns if each.primitive.name == "add" and each.outvars[0] is result]
    if not any(a is own and isinstance(b, Literal) and b.val == 1 for a, b in added):
        return None
    return max(0, int(limit.val) - int(given[counter].val))


def _is_in(known: set[Any], atom: Any) -> bool:
    return not isinstance(atom, Literal) and atom in known


def _has_gradient(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and is_differentiable(dtype)


def _where(eqn: Any) -> str:
    place = source_info_util.summarize(eqn.source_info)
    return f" ({place.rpartition('/')[2]})"


# Their jaxprs combine two elements, which `leaf_cost` counts.
_TINY_BODIES = frozenset(
    "reduce reduce_window scatter scatter-add scatter-mul scatter-min scatter-max scatter_sub argmax sort "
    "select_and_gather_add select_and_scatter_add reduce_precision custom_lin "
    "call_hi_primitive_linearized".split()
)
