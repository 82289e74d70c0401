"""Evaluates a traced function, with a deposit at every place where a weight meets data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from .._activity import CALLS, CHECKPOINTS, program_of, programs_in
from .._noted import Notes
from ..ops.cross_entropy import CrossEntropyCall
from ..ops.grouped_experts import ExpertsCall
from ._causes import fix_of
from ._deposit import deposit
from ._parts import (
    as_layers,
    check_apart,
    is_of_head,
    is_scored,
    scored_cross_entropy,
    scored_experts,
    scored_per_device,
    scored_stack,
    taken_layers,
)
from ._rows import of_constants, of_outputs, paired, unstacked_of_scan, where
from ._stacks import evaluates_stack, stack_p
from ._units import EXAMPLE, POSITION, Rows, Units, agreed, counted, has_examples, has_units, of_input
from ._values import UnsupportedLeafError, Value, constant, lost_in, paths_of, plain_rows
from ._weights import Applied, Leaf, Tangent, bind, leaves_of

_WITHOUT_DERIVATIVE = ("custom_vjp_call", "pallas_call", "while", "custom_partitioning")


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function and its second trace.

    Attributes:
        jaxpr: closed.
        other: its jaxpr with more examples, None where nothing is known of it.
        units: of the scores.
        notes: the rules of noted calls.
    """

    jaxpr: Any
    other: Any
    units: Units
    notes: Notes

    def evaluate(
        self,
        inputs: Sequence[Any],
        leaves: dict[int, Leaf],
        data: Sequence[int] = (),
        checked: int | None = None,
        adds_up: bool = False,
        consts: Sequence[Any] | None = None,
        rows: Mapping[int, Rows] | None = None,
        carried: Sequence[Rows] = (),
    ) -> list[Any]:
        """The results.

        Args:
            inputs: arrays, as the jaxpr takes them.
            leaves: those of the inputs that are scored, by their numbers; constants have negative ones.
            data: inputs that depend on the examples, where there is only one.
            checked: how many of the results are part of the loss, all by default.
            adds_up: whether the scores of the next result are to add up to its gradient.
            consts: in the place of the jaxpr's constants; they may depend on the examples.
            rows: of inputs of which they are known; the sizes tell those of others.
            carried: of the carry, which the first results have too; empty where the sizes tell them.

        Raises:
            UnsupportedLeafError: a weight reaches such a result and never meets data of examples, so that
                its score would be lost.
        """
        jaxpr, other = self.jaxpr.jaxpr, self.other and self.other.jaxpr
        of_consts = self._constants(self.jaxpr, other) if consts is None else []
        inputs = [*(self.jaxpr.consts if consts is None else consts), *inputs]
        others = [None] * len(inputs) if other is None else [*other.constvars, *other.invars]
        given = []
        for at, (array, larger) in enumerate(zip(inputs, others, strict=True), -len(jaxpr.constvars)):
            own = plain_rows(array)
            if larger is not None:
                own = of_input(jnp.shape(array), larger.aval.shape, self.units)
            own = (rows or {}).get(at) or own
            if at < 0 and of_consts:
                given.append(of_consts[at])
            elif at in leaves:
                given.append(Value(array, own, leaves[at]))
            else:
                given.append(Value(array, own, depends=self._depends(own, at in data)))
        found = self._run(jaxpr, other, given)
        if any(value.node is not None for value in found[:checked]):
            raise UnsupportedLeafError(
                f"{paths_of(found[:checked])} goes into a result of the loss function or of a layer without "
                "meeting data in which the axis of examples is known. Call stacks on the whole batch, not in "
                "jax.vmap, jax.lax.map or a loop over the examples, keep that axis apart within layers, add "
                'weight penalties outside of layers, or use granularity="block" or "total".'
            )
        if adds_up and checked is not None and found[checked].node is not None:
            raise UnsupportedLeafError(
                f"{paths_of(found[checked : checked + 1])} goes into the scalar of coupled=True without data "
                "of examples, as in a penalty on weights. The gradient of that is in `gradients` and in no "
                "example's score, so they do not add up as check expects: leave check out, or add the "
                "gradient of the penalty after grad_dot."
            )
        if checked is None and self.other is not None:
            self._check_results([*leaves.values()], found, carried)
        return [value.array for value in found]

    def _constants(self, closed: Any, other: Any) -> list[Value]:
        """The constants of a program, of which the other is the same in the second trace, or None."""
        if other is None or len(other.constvars) != len(closed.consts):
            return [*map(constant, closed.consts)]
        flows = of_constants(closed.consts, closed.jaxpr, other, self.units)
        return [
            Value(array, flow.rows, None, self._depends(flow.rows, False), flow.numbers)
            for array, flow in zip(closed.consts, flows, strict=True)
        ]

    def _depends(self, rows: Rows, is_data: bool) -> bool:
        """Whether an input counts as data: tables of the model may have positions too."""
        return (not self.units.sizes or has_units(rows)) if is_data else has_examples(rows)

    def _check_results(self, leaves: Sequence[Leaf], found: Sequence[Value], carry: Sequence[Rows]) -> None:
        """Whether a layer's results have the rows that its caller takes them to have."""
        for at, (value, var) in enumerate(zip(found, self.other.jaxpr.outvars, strict=True)):
            sized = of_input(jnp.shape(value.array), var.aval.shape, self.units)
            wanted = carry[at] if at < len(carry) and carry[at] else sized
            pairs = zip(wanted, value.rows, strict=True)
            if any(dim and (own is None or own != agreed(dim, own)) for dim, own in pairs):
                raise UnsupportedLeafError(
                    f"The layer of {', '.join(leaf.path for leaf in leaves)} has a result, and it can't be "
                    f"told which rows of it are of which example{lost_in([value])}. Keep the axis of "
                    'examples apart, or use granularity="block" or "total".'
                )

    def of(self, jaxpr: Any, other: Any, units: Units, notes: Notes) -> "Program":
        """Another program: a part of this one."""
        return Program(jaxpr, other, units, notes)

    def _called(self, inner: Any, other: Any, operands: Sequence[Value]) -> list[Value]:
        """The results of a closed jaxpr in the program."""
        return self._run(inner.jaxpr, other, [*self._constants(inner, other), *operands])

    def _run(self, jaxpr: Any, other: Any, inputs: Sequence[Value]) -> list[Value]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

        def read(atom: Any) -> Value:
            if isinstance(atom, Literal):
                return constant(jnp.asarray(atom.val, jnp.result_type(atom.aval)))
            return values[atom]

        for equation, twin in paired(jaxpr.eqns, () if other is None else other.eqns):
            operands = [read(atom) for atom in equation.invars]
            values |= dict(zip(equation.outvars, self._step(equation, twin, operands), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _step(self, equation: Any, twin: Any, operands: list[Value]) -> list[Value]:
        name, rule = equation.primitive.name, self.notes.rule_of(equation)
        if equation.primitive is stack_p and is_scored(equation, operands):
            arrays = scored_stack(self, equation, twin, operands)
            found = self._results(equation, twin, operands, arrays)
            return [dataclasses.replace(value, depends=True) for value in found]
        weighted = any(value.node is not None for value in operands)
        if name in CALLS and rule is None and (weighted or _is_alike(equation, twin)):
            inner, other = _called(equation), _called(twin) if twin else None
            return self._called(inner, other and other.jaxpr, operands)
        if name in CHECKPOINTS and weighted:
            return self._checkpointed(equation, twin, operands)
        if not weighted:
            return self._results(equation, twin, operands, bind(equation, [v.array for v in operands]))
        if evaluates_stack(equation) or (name == "scan" and any(map(as_layers, operands))):
            return self._looped(equation, twin, operands)
        met = [value for value in operands if value.node is None and self._is_data(value)]
        if not met:
            return self._of_weights(equation, twin, operands)
        if isinstance(rule, ExpertsCall):
            return self._results(equation, twin, operands, [scored_experts(self, rule, equation, operands)])
        if isinstance(rule, CrossEntropyCall) and is_of_head(operands):
            (flow,) = of_outputs(equation, twin, [value.flow for value in operands], self.units)
            losses = scored_cross_entropy(self, rule, equation, operands, flow.rows)
            return self._results(equation, twin, operands, [losses])
        if name == "shard_map":
            return self._results(equation, twin, operands, scored_per_device(self, equation, twin, operands))
        return self._meeting(equation, twin, operands)

    def _is_data(self, value: Value) -> bool:
        return has_examples(value.rows) if EXAMPLE in self.units.growing else value.depends

    def _results(self, equation: Any, twin: Any, operands: list[Value], arrays: Sequence[Any]) -> list[Value]:
        depends = any(value.depends for value in operands)
        flows = of_outputs(equation, twin, [value.flow for value in operands], self.units)
        lost = next((value.lost for value in operands if value.lost), "") or where(equation)
        return [
            Value(
                array,
                flow.rows,
                None,
                depends or has_examples(flow.rows),
                flow.numbers,
                lost if None in flow.rows else "",
            )
            for array, flow in zip(arrays, flows, strict=True)
        ]

    def _of_weights(self, equation: Any, twin: Any, operands: list[Value]) -> list[Value]:
        """The results of an equation on weights and on values that are the same for all examples."""
        self._check_derivative(equation, operands)
        arrays = bind(equation, [value.array for value in operands])
        nodes = tuple(value.operand for value in operands)
        found = self._results(equation, twin, operands, arrays)
        if layers := taken_layers(equation, operands, arrays):
            return [dataclasses.replace(value, node=leaf) for value, leaf in zip(found, layers, strict=True)]
        return [
            dataclasses.replace(value, node=Applied(equation, nodes, index))
            if jnp.issubdtype(value.array.dtype, jnp.inexact)
            else value
            for index, value in enumerate(found)
        ]

    def _meeting(self, equation: Any, twin: Any, operands: list[Value]) -> list[Value]:
        nodes = [value.operand for value in operands]
        leaves = leaves_of([node for node in nodes if isinstance(node, Leaf | Applied)])
        for leaf in leaves:
            check_apart(leaf, place=where(equation), nodes=nodes)
        self._check_derivative(equation, operands)
        noted = self.notes.rule_of(equation) is not None
        found = self._results(equation, twin, operands, bind(equation, [v.array for v in operands]))
        of_weights = [
            index
            for index, (value, var) in enumerate(zip(found, equation.outvars, strict=True))
            if jnp.issubdtype(value.array.dtype, jnp.inexact) and type(var).__name__ != "DropVar"
        ]
        for index in of_weights:
            self.check_rows(equation, found[index].rows, leaves, operands)
        arrays, rows = [found[at].array for at in of_weights], [found[at].rows for at in of_weights]
        for leaf in leaves:
            tangent = Tangent.of(equation, nodes, leaf, of_weights, inline_custom=noted)
            arrays = deposit(arrays, rows, self.units, leaf.probe, tangent)
        for index, array in zip(of_weights, arrays, strict=True):
            found[index] = dataclasses.replace(found[index], array=array, depends=True)
        return found

    def settled(self, value: Value) -> Value | None:
        """A value of weights alone that each example has, such as queries, as data; None for any other."""
        counts = sorted(unit for dim in value.rows for unit in counted(dim))
        if None in value.rows or counts != self.units.growing or not isinstance(value.node, Applied):
            return None
        equation, array = value.node.equation, value.array
        for leaf in leaves_of([value.node]):
            check_apart(leaf, place=where(equation))
            tangent = Tangent.of(equation, value.node.operands, leaf, [value.node.index], inline_custom=False)
            (array,) = deposit([array], [value.rows], self.units, leaf.probe, tangent)
        return Value(array, value.rows, depends=True)

    def _checkpointed(self, equation: Any, twin: Any, operands: list[Value]) -> list[Value]:
        """A `jax.checkpoint` around the same function with its deposits."""
        inner, other = _called(equation), _called(twin) if twin else None
        kept: list[Value] = []

        def run(arrays: list[Any]) -> list[Any]:
            given = iter(arrays)
            values = [
                value if value.node is not None
                else dataclasses.replace(value, array=next(given))
                for value in operands
            ]  # fmt: skip
            kept[:] = self._called(inner, other and other.jaxpr, values)
            return [value.array for value in kept]

        arrays = [value.array for value in operands if value.node is None]
        policy, prevent_cse = equation.params["policy"], equation.params["prevent_cse"]
        found = jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)(arrays)
        if any(value.node is not None for value in kept):
            run(arrays)
            return kept
        return [dataclasses.replace(value, array=array) for value, array in zip(kept, found, strict=True)]

    def _looped(self, equation: Any, twin: Any, operands: list[Value]) -> list[Value]:
        """A `jax.lax.scan` around the same function with its deposits, in stacks or in layers."""
        params, length = equation.params, equation.params.get("length")
        error = UnsupportedLeafError(
            f"{paths_of(operands)} is folded within `{equation.primitive.name}`, and it can't be told there "
            "which rows are of which example. Call the stack on the whole batch, not in a loop over the axis "
            "of examples nor in a branch, and do not let a loop change its weights, or use "
            'granularity="block" or "total".'
        )
        is_alike = not self.units.sizes or (twin is not None and length == twin.params.get("length"))
        if equation.primitive.name != "scan" or not is_alike:
            raise error
        inner, other = params["jaxpr"], twin and twin.params["jaxpr"].jaxpr
        consts, carried = unstacked_of_scan(equation)
        first, xs = operands[:consts], operands[consts + carried :]
        layers = [as_layers(value) for value in xs]
        weighted = [leaf is None and value.node is not None for leaf, value in zip(layers, xs, strict=True)]
        if any(weighted) or any(value.node is not None for value in operands[consts : consts + carried]):
            raise error
        flows = of_outputs(equation, twin, [value.flow for value in operands], self.units)

        def body(carry: Any, slices: Any) -> tuple[list[Any], list[Any]]:
            of_carry = [
                Value(array, flow.rows, depends=True) for array, flow in zip(carry, flows, strict=False)
            ]
            of_turn = [
                Value(array, value.rows[1:], leaf and Leaf(leaf.path, array, *own), value.depends)
                for value, leaf, (array, *own) in zip(xs, layers, slices, strict=True)
            ]
            found = self._called(inner, other, [*first, *of_carry, *of_turn])
            if any(value.node is not None for value in found):
                raise error
            arrays = [value.array for value in found]
            return arrays[:carried], arrays[carried:]

        carry = [value.array for value in operands[consts : consts + carried]]
        options = {"reverse": params["reverse"], "unroll": params["unroll"], "length": length}
        pairs = zip(layers, xs, strict=True)
        slices = [(leaf.array, leaf.direction, leaf.probe) if leaf else (x.array,) for leaf, x in pairs]
        carry, each = jax.lax.scan(body, carry, slices, **options)
        return self._results(equation, twin, operands, [*carry, *each])

    def _check_derivative(self, equation: Any, operands: Sequence[Value]) -> None:
        if self.notes.rule_of(equation) is not None:
            return
        names = _names_in(equation)
        if equation.primitive is stack_p:
            plain = jax.make_jaxpr(equation.params["call"].plain)(*(value.array for value in operands))
            names = set().union(*map(_names_in, plain.jaxpr.eqns))
        found = next((name for name in names if name in _WITHOUT_DERIVATIVE), None)
        if found is None:
            return
        raise UnsupportedLeafError(
            f"{paths_of(operands)} goes into `{found}`, which has no derivative along a direction. Use "
            'granularity="block" or "total", or give it no direction.'
        )

    def check_rows(
        self, equation: Any, rows: Rows, leaves: Sequence[Leaf], operands: Sequence[Value]
    ) -> None:
        """Whether each row of a result belongs to one example, and position, and it is known to which."""
        units = [unit for dim in rows for unit in counted(dim)]
        unclear = any(dim is None for dim in rows) and self.units.sizes
        if not unclear and sorted(units) == self.units.growing:
            return
        paths = ", ".join(leaf.path for leaf in leaves)
        what, fix = "example", _OF_EXAMPLES
        if POSITION in self.units.growing:
            what, fix = "example and position", _OF_POSITIONS
        if POSITION not in self.units.growing and equation.primitive.name.startswith("ragged_dot"):
            fix = f"{fix_of(where(equation))} {fix}"
        raise UnsupportedLeafError(
            f"{paths} meets data in {where(equation)}, and it can't be told which rows of the result are of "
            f"which {what}{lost_in(operands)}. {fix}"
        )


_OF_EXAMPLES = (
    "Keep the axis of examples apart, and do before what mixes their data alone, as mixup does, or use "
    'granularity="block" or "total".'
)
_OF_POSITIONS = (
    "Keep the axes of examples and positions apart: attention is followed where it is of products or sums; "
    "positions that are sorted, chosen by index, shifted or convolved are not. Without per_token, or with "
    "examples that are rows, only the axis of examples counts."
)


def _called(equation: Any) -> Any:
    """The closed jaxpr of an equation that only calls it."""
    inner = program_of(equation)
    return inner if hasattr(inner, "consts") else _Open(inner)


def _is_alike(equation: Any, twin: Any) -> bool:
    """Whether two calls have the same equations, apart from sizes."""
    if twin is None:
        return False
    inner, other = _called(equation).jaxpr, _called(twin).jaxpr
    return [eqn.primitive for eqn in inner.eqns] == [eqn.primitive for eqn in other.eqns]


@dataclasses.dataclass(frozen=True, eq=False)
class _Open:
    """A jaxpr without constants, as if it were closed."""

    jaxpr: Any
    consts: tuple[()] = ()


def _names_in(equation: Any) -> set[str]:
    inner = [eqn for jaxpr in programs_in(equation) for eqn in jaxpr.eqns]
    return {equation.primitive.name}.union(*(_names_in(eqn) for eqn in inner))
