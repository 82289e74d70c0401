"""Counts a program's arithmetic, loop bodies times the number of times they run.

XLA's own cost analysis counts the body of a loop once, and a training step over scanned layers is mostly
loops, so the traced program is counted instead. Where a trip count is not a constant, the integers that it
depends on are evaluated (see `_integers.py`): the count is exact for loops whose bounds come from a table,
nested ones too. A trip count that depends on data is reported, never silently taken as one.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend import source_info_util
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

from ._backward import mark_products, scan_parts
from ._costs import Cost, leaf_cost
from ._integers import as_known, can_evaluate, evaluate, is_small_integer

_MAX_STEPS = 500_000  # equations visited before loops are no longer followed (about ten seconds)

_Value = np.ndarray | None
_Values = Sequence[_Value]


@dataclasses.dataclass(frozen=True)
class Flops:
    """Arithmetic of one call of a program, summed over all the devices it runs on.

    Attributes:
        matmul: of matrix products and convolutions, a multiply-add being two.
        elementwise: one for each element of an arithmetic, transcendental or reducing operation.
            Compilers fuse and simplify these, so it is a guide where `matmul` is exact.
        too_low: reasons why the true figures may be higher (empty when there are none).
        too_high: reasons why they may be lower: a branch that depends on data counts its most expensive side.
    """

    matmul: int
    elementwise: int
    too_low: tuple[str, ...] = ()
    too_high: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return not self.too_low and not self.too_high


def count_flops(jaxpr: Any, *, trained: Sequence[bool] | None = None) -> Flops:
    """Count the arithmetic of a traced program.

    Args:
        jaxpr: a closed jaxpr, as `jax.make_jaxpr(f)(*args)` or `jax.jit(f).trace(*args).jaxpr` return.
        trained: for each of its inputs whether its gradient is taken. With it, the products of the backward
            pass count too: one for each operand of a product that depends on such an input.

    Returns:
        The count. Equations whose results are never used are left out, as XLA leaves them out. Loops
        count body times trips; `while` loops whose trip count depends on the arguments are counted
        once and named in `too_low`.
    """
    counter = _Counter()
    if trained is not None:
        counter.count_gradients(jaxpr, trained)
    cost, _ = counter.run(jaxpr, [None] * len(jaxpr.in_avals))
    return Flops(cost.matmul, cost.elementwise, tuple(sorted(cost.too_low)), tuple(sorted(cost.too_high)))


class _Counter:
    """Counts one program, and evaluates the integers in it that are known."""

    def __init__(self) -> None:
        self.steps = 0
        self._live: dict[int, tuple[Any, Any]] = {}
        self._factors: dict[tuple[int, ...], int] = {}
        self._path: tuple[int, ...] = ()  # of the current equation, through those that hold it

    def count_gradients(self, jaxpr: Any, trained: Sequence[bool]) -> None:
        """From now on, products count with those of their gradients."""
        mark_products(self._without_dead_code, jaxpr, trained, self._factors)

    def run(self, jaxpr: Any, values: _Values, eqns: Any = None) -> tuple[Cost, list[_Value]]:
        """The cost and the known results of a jaxpr (open or closed), given what is known of its inputs.

        With `eqns`, only these equations are evaluated, for their results, and the cost is incomplete.
        """
        live = self._without_dead_code(jaxpr)
        consts = [as_known(const) for const in getattr(jaxpr, "consts", ())]
        known: dict[Any, _Value] = dict(zip(live.constvars, consts, strict=False))
        known.update(zip(live.invars, values, strict=True))
        cost = Cost()
        for eqn in live.eqns if eqns is None else eqns:
            self.steps += 1
            inputs = [_read(known, atom) for atom in eqn.invars]
            if eqns is not None and can_evaluate(eqn):
                results = evaluate(eqn, inputs)
            else:
                outer, self._path = self._path, (*self._path, id(eqn))
                added, results = self._eqn(eqn, inputs)
                factor = self._factors.get(self._path, 1)
                self._path = outer
                cost = cost + dataclasses.replace(added, matmul=added.matmul * factor)
            known.update(zip(eqn.outvars, results, strict=True))
        return cost, [_read(known, atom) for atom in live.outvars]

    def _without_dead_code(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._live:
            open_jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
            live, _ = partial_eval.dce_jaxpr(open_jaxpr, [True] * len(open_jaxpr.outvars), instantiate=True)
            self._live[id(jaxpr)] = (jaxpr, live)
        return self._live[id(jaxpr)][1]

    def integer_eqns(self, jaxpr: Any) -> Any:
        """The equations that the integer results of a jaxpr depend on."""
        live = self._without_dead_code(jaxpr)
        wanted = [is_small_integer(var.aval) for var in live.outvars]
        return partial_eval.dce_jaxpr(live, wanted, instantiate=True)[0].eqns

    def _eqn(self, eqn: Any, values: list[_Value]) -> tuple[Cost, list[_Value]]:
        name, params = eqn.primitive.name, eqn.params
        unknown: list[_Value] = [None] * len(eqn.outvars)
        if name == "scan":
            return self._scan(eqn, values)
        if name == "while":
            return self._while(eqn, values)
        if name == "cond":
            return self._cond(eqn, values)
        if name == "pallas_call":
            return self._kernel(eqn, values), unknown
        if name == "shard_map":
            shape, manual = params["mesh"].shape, params.get("manual_axes")
            # An input with the same shape inside is not divided, so it is the same on every device.
            inputs = [
                value if value is not None and value.shape == var.aval.shape else None
                for value, var in zip(values, params["jaxpr"].invars, strict=True)
            ]
            body, _ = self.run(params["jaxpr"], inputs)
            return body * math.prod(shape[axis] for axis in (manual or shape)), unknown
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call"):
            inner = params.get(key)
            if inner is not None and len(getattr(inner, "jaxpr", inner).invars) == len(values):
                return self.run(inner, values)
        if name in _TINY_BODIES:
            return leaf_cost(eqn), evaluate(eqn, values)
        nested = list(jaxprs_in_params(params))
        if not nested:
            return leaf_cost(eqn), evaluate(eqn, values)
        cost = Cost(too_low=frozenset({f"what is inside {name!r}{_where(eqn)} is counted once"}))
        for inner in nested:
            cost = cost + self.run(inner, _unknowns(getattr(inner, "jaxpr", inner).invars))[0]
        return cost, unknown

    def _kernel(self, eqn: Any, values: list[_Value]) -> Cost:
        """A Pallas kernel: its body times the steps of its grid."""
        grid, inner = eqn.params["grid_mapping"].grid, eqn.params["jaxpr"]
        body, _ = self.run(inner, _unknowns(inner.invars))
        if not all(isinstance(size, int) for size in grid):
            reason = f"a kernel with a dynamic grid{_where(eqn)} is counted once"
            return body + Cost(too_low=frozenset({reason}))
        steps = math.prod(grid)
        # The second argument of JAX's splash attention is its table of blocks, zero where nothing is visible.
        # All its matrix products are in the branch for the other blocks.
        if (eqn.params.get("name") or "").startswith("splash_") and values[1] is not None:
            steps = steps // values[1].size * np.count_nonzero(values[1])
            reason = "what a splash kernel does on the first and last block of a row counts on every block"
            body = dataclasses.replace(body, too_high=frozenset({reason}))
        return body * int(steps)

    def _cond(self, eqn: Any, values: list[_Value]) -> tuple[Cost, list[_Value]]:
        branches, (index, *operands) = eqn.params["branches"], values
        if index is not None:
            return self.run(branches[min(max(int(index), 0), len(branches) - 1)], operands)
        runs = [self.run(branch, operands) for branch in branches]
        most = max((cost for cost, _ in runs), key=lambda cost: (cost.matmul, cost.elementwise))
        results = [
            first if all(_same(first, other) for other in others) else None
            for first, *others in zip(*(result for _, result in runs), strict=True)
        ]
        if any((cost.matmul, cost.elementwise) != (most.matmul, most.elementwise) for cost, _ in runs):
            reason = f"a branch that depends on data{_where(eqn)} counts its most expensive side"
            most = most + Cost(too_high=frozenset({reason}))
        for cost, _ in runs:
            most = most + Cost(too_low=cost.too_low, too_high=cost.too_high)
        return most, results

    def _scan(self, eqn: Any, values: list[_Value]) -> tuple[Cost, list[_Value]]:
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        num_consts, num_carry = scan_parts(eqn)
        num_ys = len(eqn.outvars) - num_carry
        consts, carry, xs = (
            values[:num_consts],
            values[num_consts:][:num_carry],
            values[num_consts + num_carry :],
        )
        if length == 0:
            return Cost(), [*carry, *[None] * num_ys]
        order = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)

        def slices(trip: int) -> list[_Value]:
            return [None if x is None else x[order[trip]] for x in xs]

        return _Loop(self, body, consts, carry, slices).scanned(order)

    def _while(self, eqn: Any, values: list[_Value]) -> tuple[Cost, list[_Value]]:
        params = eqn.params
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        cond_consts, consts, carry = values[:first], values[first:second], values[second:]
        loop = _Loop(self, params["body_jaxpr"], consts, carry, lambda trip: [])
        reason = f"a while loop{_where(eqn)} whose trip count is not known in advance is counted once"
        comparisons = [test.primitive.name for test in self._without_dead_code(params["cond_jaxpr"]).eqns]
        monotone = len(comparisons) == 1 and comparisons[0] in ("lt", "le", "gt", "ge")
        return loop.repeated(
            lambda state: self.run(params["cond_jaxpr"], [*cond_consts, *state]), reason, monotone
        )


class _Loop:
    """One loop: its body, and what is known of its inputs."""

    def __init__(
        self,
        counter: _Counter,
        body: Any,
        consts: _Values,
        carry: _Values,
        slices: Callable[[int], list[_Value]],
    ) -> None:
        self._counter, self._consts, self._carry, self._slices = counter, list(consts), list(carry), slices
        inner = getattr(body, "jaxpr", body)
        self._carried = inner.invars[len(consts) : len(consts) + len(carry)]
        self._outs = inner.outvars
        pairs = zip(carry, self._outs, self._carried, strict=False)
        self._fixed = [value if out is var else None for value, out, var in pairs]
        num_xs = len(inner.invars) - len(consts) - len(carry)
        self._num_ys = len(inner.outvars) - len(carry)
        self._each, _ = counter.run(body, [*consts, *self._fixed, *[None] * num_xs])
        moved = any(v is not None and f is None for v, f in zip(carry, self._fixed, strict=True))
        self._moving = moved or any(value is not None for value in slices(0))
        self._body, self._eqns = body, None
        # A body that costs the same on every trip is counted once; then only its integers are evaluated.
        if self._is_constant():
            self._eqns = counter.integer_eqns(body)
        self._strides = self._find_strides()
        self._memo: dict[Any, tuple[Cost, list[_Value]]] = {}

    def _is_constant(self) -> bool:
        """Whether knowing the integers that change from trip to trip does not change the cost."""
        if self._each.exact or not self._moving:
            return True
        first, _ = self._counter.run(self._body, [*self._consts, *self._carry, *self._slices(0)])
        return (first.too_low, first.too_high) == (self._each.too_low, self._each.too_high)

    def _find_strides(self) -> list[int] | None:
        """The constant that each trip adds to each carry; None if the integers change in any other way."""
        ys = self._outs[len(self._carry) :]
        if self._eqns is None or any(is_small_integer(out.aval) for out in ys):
            return None
        steps = {eqn.outvars[0]: _stride(eqn, self._carried) for eqn in self._eqns if eqn.outvars}
        strides = []
        for value, var, out in zip(self._carry, self._carried, self._outs, strict=False):
            source, stride = (var, 0) if value is None or out is var else steps.pop(out, (None, 0))
            if source is not var:
                return None
            strides.append(stride)
        return None if steps else strides

    def _after(self, trips: int) -> list[_Value]:
        """The carry after that many trips, where each trip adds a constant."""
        moved = zip(self._carry, self._strides or [], strict=True)
        return [None if value is None else value.astype(np.int64) + trips * stride for value, stride in moved]

    def _trip(self, state: _Values, trip: int) -> tuple[Cost, list[_Value], list[_Value]]:
        """The cost of a trip, the carry after it, and its stacked outputs."""
        values = [*state, *self._slices(trip)]
        key = tuple(None if value is None else value.tobytes() for value in values)
        if key not in self._memo:
            cost, results = self._counter.run(self._body, [*self._consts, *values], self._eqns)
            self._memo[key] = (cost if self._eqns is None else self._each), results
        cost, results = self._memo[key]
        return cost, results[: len(self._carry)], results[len(self._carry) :]

    def scanned(self, order: range) -> tuple[Cost, list[_Value]]:
        """Cost and results of a loop that runs once for each element of `order`."""
        unknown_ys: list[_Value] = [None] * self._num_ys
        if not self._moving:
            return self._each * len(order), [*self._fixed, *unknown_ys]
        if self._strides is not None:
            return self._each * len(order), [*self._after(len(order)), *unknown_ys]
        state, total, stacked = self._carry, Cost(), []
        for trip in range(len(order)):
            if self._counter.steps > _MAX_STEPS:
                return self._each * len(order), [*self._fixed, *unknown_ys]
            cost, state, ys = self._trip(state, trip)
            total = total + cost
            stacked.append(ys)
        rows = stacked if order.step > 0 else stacked[::-1]
        return total, [*state, *(_stack([row[k] for row in rows]) for k in range(self._num_ys))]

    def repeated(
        self, go_on: Callable[[_Values], tuple[Cost, list[_Value]]], reason: str, monotone: bool
    ) -> tuple[Cost, list[_Value]]:
        """Cost and results of a loop that runs while `go_on` is true.

        `reason` is reported if its trip count is unknown. A `monotone` test, once false, stays false while
        each trip adds a constant to the carry.
        """
        test, _ = go_on(self._fixed)
        unknown = self._each + test + Cost(too_low=frozenset({reason}))
        if monotone and self._strides is not None and go_on(self._carry)[1][0] is not None:
            limit = 2**31  # more than a counter holds: the loop does not end
            trips = bisect.bisect_left(range(limit), 1, key=lambda trip: not go_on(self._after(trip))[1][0])
            if trips == limit:
                return unknown, list(self._fixed)
            return self._each * trips + test * (trips + 1), self._after(trips)
        state, total, trips = self._carry, Cost(), 0
        while True:
            (decision,) = go_on(state)[1]
            if decision is None or self._counter.steps > _MAX_STEPS:
                return unknown, list(self._fixed)
            if not decision:
                return total + test * (trips + 1), state
            cost, state, _ = self._trip(state, trips)
            total, trips = total + cost, trips + 1


def _unknowns(variables: Sequence[Any]) -> list[_Value]:
    """As many unknown values as there are variables."""
    return [None] * len(variables)


def _read(known: dict[Any, _Value], atom: Any) -> _Value:
    if hasattr(atom, "val"):
        return as_known(atom.val)
    return known.get(atom)


def _stride(eqn: Any, carried: Sequence[Any]) -> tuple[Any, int]:
    """The carry that an equation adds a literal to, and the literal."""
    if eqn.primitive.name == "add":
        for var, step in (eqn.invars, eqn.invars[::-1]):
            known = as_known(getattr(step, "val", None))
            if known is not None and any(var is carry for carry in carried):
                return var, int(known)
    return None, 0


def _same(first: _Value, second: _Value) -> bool:
    return first is not None and second is not None and np.array_equal(first, second)


def _stack(rows: list[_Value]) -> _Value:
    if not rows or any(row is None for row in rows):
        return None
    return as_known(np.stack([row for row in rows if row is not None]))


def _where(eqn: Any) -> str:
    return f" ({source_info_util.summarize(eqn.source_info)})"


# Their jaxprs combine two elements, which `leaf_cost` counts.
_TINY_BODIES = frozenset(
    "reduce reduce_window scatter scatter-add scatter-mul scatter-min scatter-max scatter_sub argmax sort "
    "select_and_gather_add select_and_scatter_add reduce_precision custom_lin".split()
)
