"""Counts a program's FLOPs and transfers, loop bodies times the number of times they run.

XLA's own cost analysis counts the body of a loop once, and a training step over scanned layers is mostly
loops, so the traced program is counted instead. The trips of `while` loops are those that the names of
`_trips.py` say; where nothing says them, that is reported, never silently taken as one.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax.extend import source_info_util
from jax.extend.core import Literal, jaxprs_in_params
from jax.interpreters import partial_eval

from .._activity import expansion, has_tangent, is_in
from .._static import PyTree
from .._trips import branches_in, products_in, trips_in
from ._costs import Flops, leaf_cost

_KERNELS = "pallas_call", "mpmd_map"
_EXPANDED = "call_hi_primitive"  # what `jax.experimental.hijax` makes of a primitive that expands into others
_MOST_GRADIENTS = 2  # of one product, which has two factors; fused attention has more operands

_Active: TypeAlias = Sequence[bool]
_Count: TypeAlias = "tuple[Flops, list[bool]]"


def count_flops(jaxpr: Any, *, trained: Sequence[bool] | None = None) -> Flops:
    """Count the FLOPs of a traced program, and what it moves between host and device memory.

    Args:
        jaxpr: a closed jaxpr, as `jax.make_jaxpr(f)(*args)` or `jax.jit(f).trace(*args).jaxpr` return.
        trained: for each of its inputs whether its gradient is taken. With it, the products of the backward
            pass count too: one for each operand of a product that depends on such an input. Its transfers do
            not.

    Returns:
        The count. Equations whose results are never used are left out, as XLA leaves them out. Loops
        count body times trips: those of a `scan`, which `fori_loop` makes for bounds of Python integers, and
        of the loops of this package. Other `while` loops are counted once, those of divided experts (`over`
        of `grouped_experts`) as often as an even routing takes, and named in `too_low`.
    """
    active = [False] * len(jaxpr.in_avals) if trained is None else [*trained]
    found, _ = _Counter().run(jaxpr, active)
    return Flops(*map(round, found.counts), too_low=found.too_low, too_high=found.too_high)


class _Counter:
    """Counts one program: the cost of a jaxpr, and which of its results depend on what is trained."""

    def __init__(self) -> None:
        # By ids of jaxprs and equations, which the values keep alive.
        self._live: dict[int, tuple[Any, Any]] = {}
        self._expansions: dict[int, tuple[Any, Any]] = {}
        self._runs: dict[Any, _Count] = {}
        self._products: int | None = None  # FLOPs of each kernel called by what is counted

    def run(self, jaxpr: Any, active: _Active) -> _Count:
        """Count a jaxpr, open or closed, given which of its inputs depend on what is trained."""
        live = self._without_dead_code(jaxpr)
        key = id(jaxpr), self._products, *active
        if key not in self._runs:
            known = {var for var, is_active in zip(live.invars, active, strict=True) if is_active}
            atoms = [*live.outvars, *(atom for eqn in live.eqns for atom in eqn.invars)]
            read, cost = {atom for atom in atoms if not isinstance(atom, Literal)}, Flops()
            for eqn in live.eqns:
                around = self._products
                scopes = str(eqn.source_info.name_stack)
                self._products = products_in(scopes) or around
                called = self._called(eqn, read)
                active_inputs = [is_in(atom, known) for atom in eqn.invars]
                added, outputs = self._eqn(eqn, called, scopes, active_inputs)
                self._products, cost = around, cost + added
                pairs = zip(eqn.outvars, outputs, strict=True)
                known.update(var for var, is_active in pairs if is_active and has_tangent(var))
            self._runs[key] = cost, [is_in(atom, known) for atom in live.outvars]
        return self._runs[key]

    def _without_dead_code(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._live:
            open_jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
            live, _ = partial_eval.dce_jaxpr(open_jaxpr, [True] * len(open_jaxpr.outvars), instantiate=True)
            self._live[id(jaxpr)] = (jaxpr, live)
        return self._live[id(jaxpr)][1]

    def _called(self, eqn: Any, read: set[Any]) -> Any:
        """The jaxpr that an equation calls with its own operands; None for any other equation."""
        if eqn.primitive.name == _EXPANDED:
            if id(eqn) not in self._expansions:
                self._expansions[id(eqn)] = eqn, _expansion(eqn, [out in read for out in eqn.outvars])
            return self._expansions[id(eqn)][1]
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call"):
            found = eqn.params.get(key)
            if found is not None and len(getattr(found, "jaxpr", found).invars) == len(eqn.invars):
                return found
        return None

    def _eqn(self, eqn: Any, called: Any, scopes: str, active: list[bool]) -> _Count:
        name, params = eqn.primitive.name, eqn.params
        if name == "stop_gradient":
            return Flops(), [False] * len(eqn.outvars)
        if name == "scan":
            body = params["jaxpr"]
            each, outputs = self._loop(body, active, *_scan_parts(eqn))
            return each * params["length"], outputs
        if name == "while":
            return self._while(eqn, scopes, active)
        if name == "cond":
            return self._cond(eqn, scopes, active[1:])
        if name == "shard_map":
            shape, manual = params["mesh"].shape, params.get("manual_axes")
            body, outputs = self.run(params["jaxpr"], active)
            return body * math.prod(shape[axis] for axis in (manual or shape)), outputs
        if called is not None and name not in _KERNELS:
            return self.run(called, active)
        cost = self._kernel(eqn) if name in _KERNELS else self._inside(eqn)
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
        """A Pallas kernel: what is known of it, or its body times the steps of its grid."""
        if self._products is not None:
            return Flops(matmul=self._products)
        if "grid_mapping" not in eqn.params:
            return self._inside(eqn)
        grid, body = eqn.params["grid_mapping"].grid, self._unknown(eqn.params["jaxpr"])
        if not all(isinstance(size, int) for size in grid):
            return body + Flops(too_low=(f"a kernel with a dynamic grid{_where(eqn)} is counted once",))
        return body * math.prod(grid)

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
        most = Flops(*map(max, zip(*counts, strict=True)))
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
        if is_exact and trips is not None:
            return each * trips + once * (trips + 1), outputs
        counted = "once" if trips is None else f"{trips} times"
        reason = f"a while loop{_where(eqn)} whose trip count is not known in advance is counted {counted}"
        return (each + once) * (1 if trips is None else trips) + Flops(too_low=(reason,)), outputs

    def _loop(self, body: Callable, active: list[bool], num_consts: int, num_carry: int) -> _Count:
        """The cost of a trip. A carry that becomes active on one trip is so on all."""
        consts, carry = active[:num_consts], active[num_consts:][:num_carry]
        xs = active[num_consts + num_carry :]
        while True:
            cost, outputs = self.run(body, [*consts, *carry, *xs])
            grown = [old or new for old, new in zip(carry, outputs, strict=False)]
            if grown == carry:
                return cost, [*carry, *outputs[num_carry:]]
            carry = grown


def _scan_parts(eqn: Any) -> tuple[int, int]:
    """How many constants and how many carries a `scan` has, from shapes: parameters differ between JAXes."""
    body = eqn.params["jaxpr"]
    inner = getattr(body, "jaxpr", body)
    num_xs, num_ys = (
        sum(outer.aval.shape != own.aval.shape for outer, own in zip(outside, inside, strict=True))
        for outside, inside in ((eqn.invars, inner.invars), (eqn.outvars, inner.outvars))
    )
    num_carry = len(eqn.outvars) - num_ys
    return len(eqn.invars) - num_xs - num_carry, num_carry


def _expansion(eqn: Any, is_used: list[bool]) -> Any:
    """What a primitive expands into, with 0 in place of each result that is not used."""
    primitive = eqn.params["_prim"]

    def expand(*operands: PyTree) -> PyTree:
        flat = primitive.out_tree.flatten_up_to(primitive.expand(*operands))
        return [result if used else 0 for result, used in zip(flat, is_used, strict=True)]

    return expansion(eqn, expand)


def _where(eqn: Any) -> str:
    place = source_info_util.summarize(eqn.source_info)
    return f" ({place.rpartition('/')[2]})"


# Their jaxprs combine two elements, which `leaf_cost` counts.
_TINY_BODIES = frozenset(
    "reduce reduce_window scatter scatter-add scatter-mul scatter-min scatter-max scatter_sub argmax sort "
    "select_and_gather_add select_and_scatter_add reduce_precision custom_lin "
    "call_hi_primitive_linearized".split()
)
