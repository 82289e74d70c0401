"""Evaluates a traced function, with a deposit at every place where a weight meets
data.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from .._activity import CALLS, CHECKPOINTS, is_differentiable, program_of, programs_in
from .._hijax import primitive_of
from .._memory_spaces import is_on_host, on_several_devices, platform
from .._noted import Notes, noting
from .._sweep.gradient import merge, pick
from .._sweep.primitive import Rule, Sweep, sweep_of
from .._sweep.rules import Linear
from ..ops._expert_blocks import InStack
from ..ops.cross_entropy import CrossEntropyCall
from ..ops.grouped_experts import ExpertsCall
from ._traced import equations_of, trace
from ._weights import (
    Along,
    UnsupportedLeafError,
    Value,
    bind,
    deposit,
    equation_without_rules,
    of_weights,
    settled,
    tangents_of,
)

# A jaxpr, open or closed, to arrays
Evaluate: TypeAlias = Callable[[Any, Sequence[Value]], list[Any]]

_WITHOUT_DERIVATIVE = ("custom_vjp_call", "pallas_call", "custom_partitioning")


@dataclasses.dataclass(frozen=True, eq=False)
class Interpreter:
    """Evaluates programs in which these calls are noted.

    `at_loop` may give the results of a loop in its way, from its equation and operands;
    else it gives None.
    """

    notes: Notes
    at_loop: Callable[[Any, list[Value]], list[Any] | None] = lambda *_: None

    def evaluate(
        self, jaxpr: Any, inputs: Sequence[Value], consts: Sequence[Any] = ()
    ) -> list[Value]:
        """The results of an open jaxpr, from those that are its inputs."""
        values = dict(zip(jaxpr.constvars, map(Value, consts), strict=True))
        values |= dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            if isinstance(atom, Literal):
                return Value(jnp.asarray(atom.val, jnp.result_type(atom.aval)))
            return values[atom]

        for equation in jaxpr.eqns:
            found = self._step(equation, [read(atom) for atom in equation.invars])
            values |= dict(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def arrays(self, program: Any, inputs: Sequence[Value]) -> list[Any]:
        """The results of a jaxpr, open or closed, as arrays; weights that are results
        have deposits too.
        """
        jaxpr = getattr(program, "jaxpr", program)
        consts = getattr(program, "consts", ())
        return [settled(value) for value in self.evaluate(jaxpr, inputs, consts)]

    def _step(self, equation: Any, operands: list[Value]) -> list[Value]:
        name = equation.primitive.name
        rule = self.notes.rule_of(equation)
        depends = any(value.depends for value in operands)
        if (
            is_loop(equation)
            and (found := self.at_loop(equation, operands)) is not None
        ):
            return [Value(array, (), True) for array in found]
        has_alongs = any(value.alongs for value in operands)
        # A call is entered, so that a weight is met as late as can be: by the one
        # equation that uses it. So is a checkpoint of weights alone: what it computes
        # is the same for all examples, and a recomputation of it for each would be a
        # waste.
        if rule is None and (
            name in CALLS or name in CHECKPOINTS and has_alongs and not depends
        ):
            inner = program_of(equation)
            return self.evaluate(
                getattr(inner, "jaxpr", inner), operands, getattr(inner, "consts", ())
            )
        # Nothing that is scored goes in, so there is nothing to deposit.
        if not has_alongs:
            return [
                Value(array, (), depends) for array in bind(equation, _arrays(operands))
            ]
        # Weights alone: the direction goes through the equation with them (forward
        # mode), and is deposited where its result meets data. A cast or a scaled
        # adapter is so scored by the array that the model has.
        if not depends:
            self._check_derivative(equation, operands)
            return of_weights(equation, operands)
        return [Value(array, (), True) for array in self._met(equation, rule, operands)]

    def _met(self, equation: Any, rule: Any, operands: list[Value]) -> Sequence[Any]:
        if equation.primitive.name in CHECKPOINTS:
            return self._checkpointed(equation, operands)
        if is_loop(equation):
            return looped(equation, operands, self.arrays)
        if equation.primitive.name == "shard_map":
            return self._divided(equation, operands)
        # These are a fold's backward pass, which is in the program where the loss
        # itself takes a gradient. They have rules for reverse mode alone.
        if isinstance(primitive_of(equation), (Rule, Linear)):
            raise UnsupportedLeafError(
                f"{_paths(operands)}: the loss takes the gradient of a fold that uses"
                " it. Give this fold remat=True, or use norms=True."
            )
        if isinstance(rule, ExpertsCall):
            return [self._experts(rule, operands)]
        if isinstance(rule, CrossEntropyCall) and [
            len(one.alongs) for one in operands[:3]
        ] == [0, 1, 0]:
            return _cross_entropy(rule, operands)
        # A noted call is replaced by what it computes, without its own backward rule:
        # forward mode, which finds tangents, can't pass that.
        self._check_derivative(equation, operands)
        return self._deposited(
            equation if rule is None else equation_without_rules(equation), operands
        )

    def _deposited(self, equation: Any, operands: list[Value]) -> list[Any]:
        given = _arrays(operands)
        arrays = bind(equation, given)
        # Integers and keys have no cotangent with which a tangent could be multiplied.
        real = [is_differentiable(jnp.result_type(array)) for array in arrays]
        met = pick(arrays, real)
        for at, value in enumerate(operands):
            for along in value.alongs:
                met = deposit(
                    met,
                    along,
                    lambda own, at=at: pick(
                        tangents_of(equation, given, {at: own}), real
                    ),
                )
        return merge(arrays, met, real)

    def _check_derivative(self, equation: Any, operands: list[Value]) -> None:
        # What is noted has a rule of this library for its derivative.
        if self.notes.rule_of(equation) is not None:
            return
        inner = [
            one for program in programs_in(equation) for one in equations_of(program)
        ]
        names = [one.primitive.name for one in (equation, *inner)]
        found = next((name for name in names if name in _WITHOUT_DERIVATIVE), None)
        if found is not None:
            raise UnsupportedLeafError(
                f"{_paths(operands)} goes into `{found}`, which has no derivative along"
                " a direction. Use norms=True, or give it no direction."
            )

    def _checkpointed(self, equation: Any, operands: list[Value]) -> list[Any]:
        def run(arrays: list[Any]) -> list[Any]:
            # Weights are closed over, not arguments: they and their directions are no
            # residuals of the checkpoint, and deposits are within it, at what the
            # backward pass computes again.
            left = iter(arrays)
            given = [
                value if value.alongs else Value(next(left), (), value.depends)
                for value in operands
            ]
            return self.arrays(program_of(equation), given)

        options = {name: equation.params[name] for name in ("policy", "prevent_cse")}
        return jax.checkpoint(run, **options)(
            [value.array for value in operands if not value.alongs]
        )

    def _divided(self, equation: Any, operands: list[Value]) -> list[Any]:
        params = equation.params
        pairs = zip(params["in_specs"], operands, strict=True)
        # A direction is divided as its weight is. A probe is whole on every device, so
        # its cotangent, the score, is summed over the devices by shard_map itself.
        extra = [
            spec
            for own, value in pairs
            for _ in value.alongs
            for spec in (own, PartitionSpec())
        ]
        run = jax.shard_map(
            lambda arrays, extra: self.arrays(
                params["jaxpr"], _inside(operands, arrays, extra)
            ),
            in_specs=(list(params["in_specs"]), extra),
            out_specs=list(params["out_specs"]),
            mesh=params["mesh"],
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        return list(run(_arrays(operands), _extra(operands)))

    def _experts(self, call: ExpertsCall, operands: list[Value]) -> Any:
        """The result of grouped experts.

        The rows of each block are evaluated one by one, under `jax.vmap`, with a probe
        for each pair of token and expert, which adds to that of its example.
        """
        x, choices, gates = map(settled, operands[:3])
        weights = operands[3:]
        alongs = _alongs_of(operands[3:])
        count = len(weights)
        in_stack = [
            value.array if isinstance(value.array, InStack) else None
            for value in weights
        ]
        # The cotangent of a broadcast is a sum: the scores of an example's tokens, in
        # whatever blocks their experts are, add up in its probe.
        probes = [jnp.broadcast_to(along.probe, choices.shape) for along in alongs]

        def expert(arrays: Sequence[Any], rows: Any, gates_and_probes: Any) -> Any:
            def apply(own: Sequence[Any], row: Any, gate: Any) -> Any:
                return call.expert(call.rebuild(own), row[None], gate[None])[0]

            def one(row: Any, gate: Any, probes: Sequence[Any]) -> Any:
                # An expert is traced for one row of one example, which is the only way
                # to tell apart what examples in a block add to its matrices.
                notes = Notes()
                with noting(notes):
                    traced = trace(apply, arrays[:count], row, gate)
                extra = itertools.chain(*zip(arrays[count:], probes, strict=True))
                given = [
                    *_inside(weights, traced.inputs[:count], extra),
                    *_data(traced.inputs[count:]),
                ]
                return Interpreter(notes).arrays(traced.closed, given)[0]

            return jax.vmap(one)(rows, *gates_and_probes)

        # Names of saved values and kernels are of the expert as it was written; that
        # with deposits has neither.
        options = {
            "expert": expert,
            "saved": None,
            "rebuild": lambda arrays: arrays,
            "kernels": None,
        }
        arrays = [*_arrays(weights), *(along.direction for along in alongs)]
        read = [*in_stack, *[None] * len(alongs)]
        return dataclasses.replace(call, **options).run(
            x, choices, (gates, probes), arrays, read
        )


def is_loop(equation: Any) -> bool:
    return equation.primitive.name == "scan" or isinstance(
        primitive_of(equation), Sweep
    )


def sliced_places(equation: Any) -> Iterable[int]:
    """The numbers of the operands of a loop of which each turn has a slice."""
    every = range(len(equation.invars))
    sweep = primitive_of(equation)
    if sweep is None:
        # A `jax.lax.scan` takes constants, then the carry, then what it slices.
        return every[_unstacked_of_scan(equation)[1] :]
    return jax.tree.leaves(sweep.in_tree.unflatten(every)[1])


def looped(equation: Any, operands: list[Value], evaluate: Evaluate) -> list[Any]:
    """The results of a loop over layers, or any `jax.lax.scan`, whose body is evaluated
    by `evaluate`.
    """
    sweep = primitive_of(equation)
    return (
        _scanned(equation, operands, evaluate)
        if sweep is None
        else _swept(sweep, operands, evaluate)
    )


def _scanned(equation: Any, operands: list[Value], evaluate: Evaluate) -> list[Any]:
    params = equation.params
    consts, carried = _unstacked_of_scan(equation)
    # Constants keep one probe for all turns, whose cotangents a scan adds up; what is
    # sliced has one for each turn.
    shared = operands[:consts]
    xs = [*map(_in_rows, operands[carried:])]

    def body(carry: list[Any], x: Any) -> tuple[list[Any], list[Any]]:
        given = [*shared, *_data(carry), *_inside(xs, *x)]
        found = evaluate(params["jaxpr"], given)
        return found[: len(carry)], found[len(carry) :]

    options = {name: params[name] for name in ("reverse", "unroll", "length")}
    # A carry changes from turn to turn: a weight in it meets data before the loop.
    init = [*map(settled, operands[consts:carried])]
    carry, ys = lax.scan(body, init, (_arrays(xs), _extra(xs)), **options)
    return [*carry, *ys]


def _swept(sweep: Sweep, operands: list[Value], evaluate: Evaluate) -> list[Any]:
    """A sweep over layers with deposits in them, under the same policy."""
    init, xs, shared = sweep.in_tree.unflatten(operands)
    kinds = []
    stacks = []
    commons = []
    for kind, own, common in zip(sweep.spec.kinds, xs, shared, strict=True):
        own = [*map(_in_rows, own)]
        # The number of each layer in its stack, with which experts find their rows in
        # it.
        rows = jnp.arange(sweep.spec.rows(kind), dtype=jnp.int32)
        stacks.append([*_arrays(own), *_extra(own), rows])
        whole = [*map(_is_of_experts, own)]  # no others: what is noted is sliced
        layer = _layer_of(kind, common, own, whole, evaluate)
        arrays = [*_arrays(common), *_extra(common)]
        # Whole stacks come first, and behind them directions, probes and the numbers of
        # the rows, of which a layer has its slice.
        unsliced = (*whole, *[False] * (1 + len(_extra(own))))
        kind, arrays = dataclasses.replace(kind, unsliced=unsliced).with_layer(
            layer, arrays
        )
        kinds.append(kind)
        commons.append(arrays)
    spec = dataclasses.replace(sweep.spec, kinds=tuple(kinds))
    return jax.tree.leaves(sweep_of(spec, [*map(settled, init)], stacks, commons))


def _is_of_experts(value: Value) -> bool:
    """Whether a stack may be matrices of experts that are not scored, which are read
    where they are.
    """
    # There a layer's slice is a copy in any case.
    is_copied = (
        platform() == "tpu"
        or is_on_host(value.array)
        or on_several_devices(value.array)
    )
    return value.array.ndim == 4 and not (value.alongs or value.depends or is_copied)


def _layer_of(
    kind: Any, common: list[Value], own: list[Value], whole: Any, evaluate: Evaluate
) -> Any:
    """A closed jaxpr of a layer with deposits: `(shared, extra, carry, x, extra, row)
    -> (carry, y)`.
    """
    types = [var.aval for var in kind.jaxpr.invars]
    ends = len(common), len(common) + kind.carries

    def layer(
        shared: Any, more: Any, carry: Any, x: Any, extra: Any, row: Any
    ) -> list[Any]:
        x = merge(x, [InStack.of(stack, row) for stack in pick(x, whole)], whole)
        given = [*_inside(common, shared, more), *_data(carry), *_inside(own, x, extra)]
        return evaluate(kind.jaxpr, given)

    more = [jax.typeof(array) for array in _extra(common)]
    extra = [jax.eval_shape(lambda rows: rows[0], array) for array in _extra(own)]
    x = merge(
        types[ends[1] :], [jax.typeof(value.array) for value in pick(own, whole)], whole
    )
    row = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.make_jaxpr(layer)(
        types[: ends[0]], more, types[ends[0] : ends[1]], x, extra, row
    )


def _unstacked_of_scan(equation: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many these and the carry, in
    whichever JAX.
    """
    # Newer versions of JAX have other parameters of `scan`, so the shapes tell: what is
    # sliced has one dimension more outside than within, and what is stacked too.
    inner = equation.params["jaxpr"].jaxpr
    carried, both = (
        sum(
            one.aval.shape == other.aval.shape for one, other in zip(*pair, strict=True)
        )
        for pair in ((equation.outvars, inner.outvars), (equation.invars, inner.invars))
    )
    return both - carried, both


def _cross_entropy(call: CrossEntropyCall, operands: list[Value]) -> list[Any]:
    """The losses. Their derivative along the direction of the head is found from the
    same logits.
    """
    # The head's part of the logits along its direction is computed chunk by chunk with
    # the logits, which are never whole in memory.
    (along,) = operands[1].alongs
    losses, derivative = call.along(_arrays(operands), along.direction)
    return deposit([losses], along, lambda _: [derivative])


def _arrays(values: Sequence[Value]) -> list[Any]:
    return [value.own for value in values]


def _alongs_of(values: Sequence[Value]) -> list[Along]:
    return [along for value in values for along in value.alongs]


def _paths(values: Sequence[Value]) -> str:
    return ", ".join(dict.fromkeys(along.path for along in _alongs_of(values)))


def _data(arrays: Sequence[Any]) -> list[Value]:
    return [Value(array, depends=True) for array in arrays]


def _in_rows(value: Value) -> Value:
    """A value that has a layer, or what a turn of a loop takes, in each row, with a
    probe for each.
    """
    alongs = [
        (
            along
            if along.probe.ndim
            else Along(
                along.path,
                along.direction,
                jnp.broadcast_to(along.probe, (len(value.array),)),
            )
        )
        for along in value.alongs
    ]
    return Value(value.own, tuple(alongs), value.depends)


def _extra(values: Sequence[Value]) -> list[Any]:
    """Directions and probes, which a layer takes behind its inputs."""
    return [
        array
        for along in _alongs_of(values)
        for array in (along.direction, along.probe)
    ]


def _inside(
    values: Sequence[Value], arrays: Sequence[Any], extra: Iterable[Any]
) -> list[Value]:
    """The values in a layer, from its inputs and its directions and probes."""
    left = iter(extra)
    found = []
    for value, array in zip(values, arrays, strict=True):
        own = [
            dataclasses.replace(along, direction=next(left), probe=next(left))
            for along in value.alongs
        ]
        found.append(Value(array, tuple(own), value.depends))
    return found
