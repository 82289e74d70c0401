"""Counts a program's arithmetic and transfers, loop bodies times the number of times they run.

XLA's own cost analysis counts the body of a loop once, and a training step over scanned layers is mostly
loops, so the traced program is counted instead. Where a trip count is not a constant, the integers that it
depends on are evaluated (see `_integers.py`): the count is exact for loops whose bounds come from a table,
nested ones too. A trip count that depends on data is reported, never silently taken as one.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import source_info_util
from jax.extend.core import jaxprs_in_params

from .._expected_trips import trips_expected
from ._backward import mark_products, scan_parts
from ._costs import Flops, leaf_cost
from ._integers import as_known, evaluate
from ._jaxprs import Jaxprs

_MAX_STEPS = 500_000  # equations visited before loops are no longer followed (about ten seconds)

_ENDLESS = -1  # trips

_Value = np.ndarray | None
_Values = Sequence[_Value]


def count_flops(jaxpr: Any, *, trained: Sequence[bool] | None = None) -> Flops:
    """Count the arithmetic of a traced program, and what it moves between host and device memory.

    Args:
        jaxpr: a closed jaxpr, as `jax.make_jaxpr(f)(*args)` or `jax.jit(f).trace(*args).jaxpr` return.
        trained: for each of its inputs whether its gradient is taken. With it, the products of the backward
            pass count too: one for each operand of a product that depends on such an input. Its other
            arithmetic and its transfers do not.

    Returns:
        The count. Equations whose results are never used are left out, as XLA leaves them out. Loops
        count body times trips; `while` loops whose trip count depends on the arguments are counted
        once, those of divided experts (`over` of `grouped_experts`) as often as an even routing takes,
        and named in `too_low`.
    """
    counter = _Counter()
    if trained is not None:
        counter.count_gradients(jaxpr, trained)
    return counter.run(jaxpr, [None] * len(jaxpr.in_avals))[0]


class _Counter:
    """Counts one program, and evaluates the integers in it that are known."""

    def __init__(self) -> None:
        self.steps = 0
        self._jaxprs = Jaxprs()
        self._runs: dict[Any, tuple[Flops, list[_Value]]] = {}
        self._factors: dict[tuple[int, ...], int] = {}
        self._path: tuple[int, ...] = ()  # of the current equation, through those that hold it
        self._loop = ""  # the place of the loop around it

    def count_gradients(self, jaxpr: Any, trained: Sequence[bool]) -> None:
        """From now on, products count with those of their gradients."""
        mark_products(self._jaxprs, jaxpr, trained, self._factors)

    def run(self, jaxpr: Any, values: _Values) -> tuple[Flops, list[_Value]]:
        """The cost and the known results of a jaxpr (open or closed), given what is known of its inputs."""
        self.steps += 1
        live = self._jaxprs.live(jaxpr)
        # Loops run the same program with the same integers again and again.
        place = self._path if self._factors else ()
        key = (
            id(jaxpr),
            place,
            self._loop,
            *(None if value is None else value.tobytes() for value in values),
        )
        if key not in self._runs:
            consts = [as_known(const) for const in getattr(jaxpr, "consts", ())]
            known: dict[Any, _Value] = dict(zip(live.constvars, consts, strict=False))
            known.update(zip(live.invars, values, strict=True))
            cost = Flops()
            for eqn in live.eqns:
                self.steps += 1
                outer, self._path = self._path, (*self._path, id(eqn))
                added, results = self._eqn(eqn, [_read(known, atom) for atom in eqn.invars])
                if factor := self._factors.get(self._path):
                    added = dataclasses.replace(added, matmul=added.matmul * factor)
                cost, self._path = cost + added, outer
                known.update(zip(eqn.outvars, results, strict=True))
            self._runs[key] = cost, [_read(known, atom) for atom in live.outvars]
        return self._runs[key]

    def _eqn(self, eqn: Any, values: list[_Value]) -> tuple[Flops, list[_Value]]:
        name, params = eqn.primitive.name, eqn.params
        unknown: list[_Value] = [None] * len(eqn.outvars)
        if name in ("scan", "while"):
            around, self._loop = self._loop, _place(eqn)
            cost, results, trips = (self._scan if name == "scan" else self._while)(eqn, values)
            own = () if trips is None else ((self._loop, around, 1, trips),)
            self._loop = around
            return cost + Flops(loops=own), results
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
        called = self._jaxprs.called(eqn)
        if called is not None:
            return self.run(called, values)
        nested = [] if name in _TINY_BODIES else list(jaxprs_in_params(params))
        if not nested:
            return leaf_cost(eqn), evaluate(eqn, values)
        cost = Flops(too_low=(f"what is inside {name!r}{_where(eqn)} is counted once",))
        for inner in nested:
            cost = cost + self.run(inner, [None] * len(getattr(inner, "jaxpr", inner).invars))[0]
        return cost, unknown

    def _kernel(self, eqn: Any, values: list[_Value]) -> Flops:
        """A Pallas kernel: its body times the steps of its grid."""
        grid, inner = eqn.params["grid_mapping"].grid, eqn.params["jaxpr"]
        body, _ = self.run(inner, [None] * len(inner.invars))
        if not all(isinstance(size, int) for size in grid):
            reason = f"a kernel with a dynamic grid{_where(eqn)} is counted once"
            return body + Flops(too_low=(reason,))
        steps = math.prod(grid)
        # The second argument of JAX's splash attention is its table of blocks, zero where nothing is visible.
        # All its matrix products are in the branch for the other blocks.
        if (eqn.params.get("name") or "").startswith("splash_") and values[1] is not None:
            steps = steps // values[1].size * np.count_nonzero(values[1])
            reason = "what a splash kernel does on the first and last block of a row counts on every block"
            body = dataclasses.replace(body, too_high=(reason,))
        return body * int(steps)

    def _cond(self, eqn: Any, values: list[_Value]) -> tuple[Flops, list[_Value]]:
        branches, (index, *operands) = eqn.params["branches"], values
        if index is not None:
            return self.run(branches[min(max(int(index), 0), len(branches) - 1)], operands)
        runs = [self.run(branch, operands) for branch in branches]
        counts = [cost.counts for cost, _ in runs]
        matmul, elementwise, *_ = max(counts)
        from_host, to_host = (max(count[direction] for count in counts) for direction in (2, 3))
        most = Flops(matmul, elementwise, from_host, to_host)
        results = [
            first if all(_same(first, other) for other in others) else None
            for first, *others in zip(*(result for _, result in runs), strict=True)
        ]
        if any(found != most.counts for found in counts):
            reason = f"a conditional that depends on data{_where(eqn)} counts its most expensive branch"
            most = most + Flops(too_high=(reason,))
        for cost, _ in runs:
            most = most + Flops(too_low=cost.too_low, too_high=cost.too_high, loops=cost.loops)
        return most, results

    def _scan(self, eqn: Any, values: list[_Value]) -> tuple[Flops, list[_Value], int]:
        """The cost, the known results, and the trips."""
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        num_consts, num_carry = scan_parts(eqn)
        consts, carry, xs = (
            values[:num_consts],
            values[num_consts:][:num_carry],
            values[num_consts + num_carry :],
        )
        no_ys: list[_Value] = [None] * (len(eqn.outvars) - num_carry)
        if length == 0:
            return Flops(), [*carry, *no_ys], 0
        order = range(length)[::-1] if eqn.params["reverse"] else range(length)
        slices = ([None if x is None else x[row] for x in xs] for row in order)
        first = next(slices)
        each, fixed, strides = self._any_trip(body, consts, carry, first)
        if strides is not None:
            return each * length, [*_after(carry, strides, length), *no_ys], length
        state, total, stacked = carry, Flops(), []
        for own in itertools.chain([first], slices):
            if self.steps > _MAX_STEPS:
                return each * length, [*fixed, *no_ys], length
            cost, results = self.run(body, [*consts, *state, *own])
            state, total = results[:num_carry], total + cost
            stacked.append(results[num_carry:])
        rows = stacked[::-1] if eqn.params["reverse"] else stacked
        return total, [*state, *(_stack(ys) for ys in zip(*rows, strict=True))], length

    def _while(self, eqn: Any, values: list[_Value]) -> tuple[Flops, list[_Value], int | None]:
        """The cost, the known results, and the trips; None where they are not known."""
        params = eqn.params
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        cond_consts, consts, state = values[:first], values[first:second], values[second:]
        each, fixed, strides = self._any_trip(params["body_jaxpr"], consts, state, [])
        test, _ = self.run(params["cond_jaxpr"], [*cond_consts, *fixed])
        expected = trips_expected(str(eqn.source_info.name_stack))
        counted = "once" if expected is None else f"{expected} times"
        reason = f"a while loop{_where(eqn)} whose trip count is not known in advance is counted {counted}"
        cost = (each + test) * (1 if expected is None else expected)
        unknown = cost + Flops(too_low=(reason,)), fixed, None
        if strides is not None:
            starts = [*cond_consts, *state], [*cond_consts, *_after(state, strides, 1)]
            trips = _strided_trips(self._jaxprs.live(params["cond_jaxpr"]), *starts)
            if trips == _ENDLESS:
                return unknown
            if trips is not None:
                return each * trips + test * (trips + 1), _after(state, strides, trips), trips
        total, trips = Flops(), 0
        while self.steps <= _MAX_STEPS:
            (goes_on,) = self.run(params["cond_jaxpr"], [*cond_consts, *state])[1]
            if goes_on is None:
                return unknown
            if not goes_on:
                return total + test * (trips + 1), state, trips
            cost, state = self.run(params["body_jaxpr"], [*consts, *state])
            total, trips = total + cost, trips + 1
        return unknown

    def _any_trip(
        self, body: Any, consts: _Values, carry: _Values, slices: _Values
    ) -> tuple[Flops, list[_Value], _Values | None]:
        """What holds for every trip of a loop.

        Returns:
            The cost without what changes from trip to trip; the carry that does not change; and what each
            trip adds to the carry, None where the cost or the known integers change in any other way.
        """
        inner = getattr(body, "jaxpr", body)
        carried = inner.invars[len(consts) :][: len(carry)]
        pairs = zip(carry, inner.outvars, carried, strict=False)
        fixed = [value if out is var else None for value, out, var in pairs]
        each, _ = self.run(body, [*consts, *fixed, *[None] * len(slices)])
        first, results = self.run(body, [*consts, *carry, *slices])
        added = {eqn.outvars[0]: eqn.invars for eqn in inner.eqns if eqn.primitive.name == "add"}
        strides: list[_Value] = []
        strided = first == each and all(ys is None for ys in results[len(carry) :])
        for value, result, out, var in zip(carry, results, inner.outvars, carried, strict=False):
            operands = added.get(out, [])
            adds_literal = any(x is var for x in operands) and any(hasattr(x, "val") for x in operands)
            if value is not None and result is not None:
                strided &= out is var or adds_literal
                strides.append(result.astype(np.int64) - value)
            else:
                strided &= value is result
                strides.append(None)
        return each, fixed, strides if strided else None


def _after(carry: _Values, strides: _Values, trips: int) -> list[_Value]:
    """The carry after that many trips, each of which adds the same."""
    return [
        None if value is None or stride is None else value.astype(np.int64) + trips * stride
        for value, stride in zip(carry, strides, strict=True)
    ]


def _strided_trips(test: Any, first: _Values, second: _Values) -> int | None:
    """How often a loop runs, from the inputs of its test before the first two trips.

    None where the test is not a single inequality of known integers; `_ENDLESS` if the loop does not end.
    """
    name = test.eqns[0].primitive.name if len(test.eqns) == 1 else ""
    if name not in ("lt", "le", "gt", "ge"):
        return None
    sides = [
        _read(dict(zip(test.invars, values, strict=True)), atom)
        for values in (first, second)
        for atom in test.eqns[0].invars
    ]
    if any(side is None for side in sides):
        return None
    left, right, next_left, next_right = (int(side) for side in sides if side is not None)
    sign = 1 if name in ("lt", "le") else -1
    # The loop runs while the distance is positive.
    distance = sign * (right - left) + (name in ("le", "ge"))
    approach = sign * (next_left - left - (next_right - right))
    if distance <= 0:
        return 0
    return -(-distance // approach) if approach > 0 else _ENDLESS


def _read(known: dict[Any, _Value], atom: Any) -> _Value:
    return as_known(atom.val) if hasattr(atom, "val") else known.get(atom)


def _same(first: _Value, second: _Value) -> bool:
    return first is not None and second is not None and np.array_equal(first, second)


def _stack(rows: Sequence[_Value]) -> _Value:
    if any(row is None for row in rows):
        return None
    return as_known(np.stack([row for row in rows if row is not None]))


def _place(eqn: Any) -> str:
    """The line in the source that an equation comes from, as `file:line`."""
    return source_info_util.summarize(eqn.source_info).split(" (")[0].rsplit(":", 1)[0]


def _where(eqn: Any) -> str:
    place = source_info_util.summarize(eqn.source_info)
    return f" ({place.rpartition('/')[2]})"


# Their jaxprs combine two elements, which `leaf_cost` counts.
_TINY_BODIES = frozenset(
    "reduce reduce_window scatter scatter-add scatter-mul scatter-min scatter-max scatter_sub argmax sort "
    "select_and_gather_add select_and_scatter_add reduce_precision custom_lin "
    "call_hi_primitive_linearized".split()
)
