"""Evaluates a traced function, with a deposit at every place where a weight meets data."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from .._activity import CALLS, CHECKPOINTS, expansion, program_of, programs_in
from .._noted import Notes, noting
from .._sweep.gradient import merge, pick
from .._sweep.primitive import Rule, Sweep, sweep_of
from .._sweep.rules import Linear
from ..ops.cross_entropy import CrossEntropyCall
from ..ops.grouped_experts import ExpertsCall
from ._layerwise import MIXED, layers_of
from ._traced import trace, type_of
from ._weights import (
    Along,
    Call,
    Result,
    UnsupportedLeafError,
    Value,
    Weight,
    bind,
    deposit,
    deposited,
    directions_of,
    equation_without_rules,
    settled,
    tangents_of,
    with_derivatives_of,
)

_WITHOUT_DERIVATIVE = ("custom_vjp_call", "pallas_call", "custom_partitioning")


@dataclasses.dataclass(frozen=True, eq=False)
class Interpreter:
    """Evaluates programs in which these calls are noted."""

    notes: Notes

    def evaluate(self, jaxpr: Any, inputs: Sequence[Value], consts: Sequence[Any] = ()) -> list[Value]:
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
        """The results of a jaxpr, open or closed, as arrays; weights that are results have deposits too."""
        jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
        return [settled(value) for value in self.evaluate(jaxpr, inputs, consts)]

    def _step(self, equation: Any, operands: list[Value]) -> list[Value]:
        name, rule = equation.primitive.name, self.notes.rule_of(equation)
        depends = any(value.depends for value in operands)
        if all(value.node is None for value in operands):
            return [Value(array, None, depends) for array in bind(equation, _arrays(operands))]
        if name in CALLS and rule is None:
            inner = program_of(equation)
            return self.evaluate(getattr(inner, "jaxpr", inner), operands, getattr(inner, "consts", ()))
        if not depends:
            return self._of_weights(equation, operands)
        return [Value(array, None, True) for array in self._met(equation, rule, operands)]

    def _met(self, equation: Any, rule: Any, operands: list[Value]) -> Sequence[Any]:
        """The results of an equation on weights and data, with deposits."""
        if equation.primitive.name in CHECKPOINTS:
            return self._checkpointed(equation, operands)
        if equation.primitive.name == "scan":
            return self._scanned(equation, operands)
        if equation.primitive.name == "shard_map":
            return self._divided(equation, operands)
        match equation.params.get("_prim"):
            case Sweep() as sweep:
                return self._swept(sweep, operands)
            case Rule() as rule_of_sweep:
                return self._by_reference(rule_of_sweep, equation, operands)
            case Linear():
                return self.arrays(expansion(equation), operands)
        alongs = _alongs_of(operands)
        of_one_layer = all(along.layers is None for along in alongs)
        if isinstance(rule, ExpertsCall) and of_one_layer:
            return [self._experts(rule, operands)]
        is_head = [value.node is not None for value in operands[:3]] == [False, True, False]
        if isinstance(rule, CrossEntropyCall) and is_head and of_one_layer and len(alongs) == 1:
            return _cross_entropy(rule, operands)
        self._check_derivative(equation, operands)
        differentiable = equation if rule is None else equation_without_rules(equation)
        call = Call(differentiable, tuple(value.operand for value in operands))
        arrays = bind(equation, _arrays(operands))
        real = [at for at, array in enumerate(arrays) if _is_real(array)]
        met = deposited([arrays[at] for at in real], [Result(call, at) for at in real])
        for at, array in zip(real, met, strict=True):
            arrays[at] = array
        return arrays

    def _of_weights(self, equation: Any, operands: list[Value]) -> list[Value]:
        """The results of an equation on weights and on values that are the same for all examples."""
        self._check_derivative(equation, operands)
        arrays = bind(equation, _arrays(operands))
        if layers := _taken_layers(equation, operands[0], arrays):
            return [Value(array, leaf) for array, leaf in zip(arrays, layers, strict=True)]
        call = Call(equation, tuple(value.operand for value in operands))
        return [
            Value(array, Result(call, at) if _is_real(array) else None) for at, array in enumerate(arrays)
        ]

    def _check_derivative(self, equation: Any, operands: list[Value]) -> None:
        if self.notes.rule_of(equation) is not None:
            return
        found = next((name for name in _names_in(equation) if name in _WITHOUT_DERIVATIVE), None)
        if found is not None:
            paths = ", ".join(along.path for along in _alongs_of(operands))
            raise UnsupportedLeafError(
                f"{paths} goes into `{found}`, which has no derivative along a direction. Use norms=True, or "
                "give it no direction."
            )

    def _checkpointed(self, equation: Any, operands: list[Value]) -> list[Any]:
        """A `jax.checkpoint` around the same function with its deposits."""
        options = {name: equation.params[name] for name in ("policy", "prevent_cse")}
        return self._recomputed(program_of(equation), operands, **options)

    def _recomputed(self, program: Any, operands: list[Value], **options: Any) -> list[Any]:
        def run(arrays: list[Any]) -> list[Any]:
            left = iter(arrays)
            given = [value if value.node else value.of(next(left)) for value in operands]
            return self.arrays(program, given)

        return jax.checkpoint(run, **options)([value.array for value in operands if not value.node])

    def _by_reference(self, rule: Rule, equation: Any, operands: list[Value]) -> list[Any]:
        """A half of the gradient of a sweep, with deposits in the plain scan that reverse mode takes for it.

        In reverse mode the second half depends on checkpoints of the first only by the first carry; the
        half's own tangents are those with all checkpoints held fixed.
        """
        arrays, gives = bind(equation, _arrays(operands)), rule.gives  # the rest has no cotangents
        found = self._recomputed(expansion(equation, rule.reference), operands)
        return merge(arrays, with_derivatives_of(pick(found, gives), pick(arrays, gives)), gives)

    def _divided(self, equation: Any, operands: list[Value]) -> list[Any]:
        """A `jax.shard_map` with deposits in what each device computes."""
        part, params = _Part(operands, [*map(_shared, operands)]), equation.params
        pairs = zip(params["in_specs"], part.alongs, strict=True)
        extra = [spec for own, alongs in pairs for _ in alongs for spec in (own, PartitionSpec())]
        run = jax.shard_map(
            lambda arrays, extra: self.arrays(params["jaxpr"], part.inside(arrays, extra)),
            in_specs=(list(params["in_specs"]), extra),
            out_specs=list(params["out_specs"]),
            mesh=params["mesh"],
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        return list(run(_arrays(operands), part.extra))

    def _scanned(self, equation: Any, operands: list[Value]) -> list[Any]:
        """A `jax.lax.scan` with deposits in its body."""
        params = equation.params
        consts, carried = _unstacked_of_scan(equation)
        shared = _Part(operands[:consts], [*map(_shared, operands[:consts])])
        xs = _Part(operands[carried:], [*map(_by_layer, operands[carried:])])

        def body(carry: list[Any], x: Any) -> tuple[list[Any], list[Any]]:
            given = [*shared.inside(_arrays(shared.values), shared.extra), *_data(carry), *xs.inside(*x)]
            found = self.arrays(params["jaxpr"], given)
            return found[: len(carry)], found[len(carry) :]

        options = {name: params[name] for name in ("reverse", "unroll", "length")}
        init = [*map(settled, operands[consts:carried])]
        carry, ys = lax.scan(body, init, (_arrays(xs.values), xs.extra), **options)
        return [*carry, *ys]

    def _swept(self, sweep: Sweep, operands: list[Value]) -> list[Any]:
        """A sweep over layers with deposits in them, under the same policy."""
        spec = sweep.spec
        init, xs, shared = sweep.in_tree.unflatten(operands)
        every_shared = _arrays(shared)
        kinds, stacks, unsliced = [], [], []
        for kind in spec.kinds:
            own = _Part(xs[kind.xs], [*map(_by_layer, xs[kind.xs])])
            of_kind = kind.pick_shared(shared)
            common = _Part(of_kind, [*map(_shared, of_kind)])
            places = range(len(every_shared), len(every_shared) + len(common.extra))
            every_shared += common.extra
            first = len(stacks)
            stacks += [*_arrays(own.values), *own.extra]
            unsliced += [*spec.unsliced[kind.xs], *[False] * len(own.extra)]
            given = {"shared": (*kind.shared, *places), "xs": slice(first, len(stacks))}
            layer = self._layer_of(kind, common, own)
            kinds.append(dataclasses.replace(kind, **given).with_layer(layer, every_shared))
        spec = dataclasses.replace(spec, kinds=tuple(kinds), unsliced=tuple(unsliced))
        carry, ys = sweep_of(spec, [*map(settled, init)], stacks, every_shared)
        return [*carry, *ys]

    def _layer_of(self, kind: Any, common: "_Part", own: "_Part") -> Any:
        """A closed jaxpr of a layer with deposits: `(shared, extra, carry, x, extra) -> (carry, y)`."""
        types = [var.aval for var in kind.jaxpr.invars]
        ends = len(common.values), len(common.values) + kind.carries

        def layer(shared: Any, more: Any, carry: Any, x: Any, extra: Any) -> list[Any]:
            given = [*common.inside(shared, more), *_data(carry), *own.inside(x, extra)]
            return self.arrays(kind.jaxpr, given)

        more = [jax.typeof(array) for array in common.extra]
        extra = [type_of(array, array.shape[1:]) for array in own.extra]
        given = types[: ends[0]], more, types[ends[0] : ends[1]], types[ends[1] :], extra
        return jax.make_jaxpr(layer)(*given)

    def _experts(self, call: ExpertsCall, operands: list[Value]) -> Any:
        """The result of grouped experts.

        The rows of each block are evaluated one by one, under `jax.vmap`, with a probe for each pair of token
        and expert, which adds to that of its example.
        """
        x, choices, gates = map(settled, operands[:3])
        part = _Part(operands[3:], [*map(_shared, operands[3:])])
        count, every = len(part.values), [*itertools.chain(*part.alongs)]
        probes = [jnp.broadcast_to(along.probe, choices.shape) for along in every]

        def expert(arrays: Sequence[Any], rows: Any, gates_and_probes: Any) -> Any:
            def apply(own: Sequence[Any], row: Any, gate: Any) -> Any:
                return call.expert(call.rebuild(own), row[None], gate[None])[0]

            def one(row: Any, gate: Any, probes: Sequence[Any]) -> Any:
                notes = Notes()
                with noting(notes):
                    traced = trace(apply, arrays[:count], row, gate)
                extra = itertools.chain(*zip(arrays[count:], probes, strict=True))
                given = [*part.inside(traced.inputs[:count], [*extra]), *_data(traced.inputs[count:])]
                return Interpreter(notes).arrays(traced.closed, given)[0]

            return jax.vmap(one)(rows, *gates_and_probes)

        options = {"expert": expert, "saved": None, "rebuild": lambda arrays: arrays, "kernels": None}
        arrays = [*_arrays(part.values), *(along.direction for along in every)]
        return dataclasses.replace(call, **options).run(x, choices, (gates, probes), arrays)


def _unstacked_of_scan(equation: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many these and the carry, in whichever JAX."""
    inner = equation.params["jaxpr"].jaxpr
    carried, both = (
        sum(one.aval.shape == other.aval.shape for one, other in zip(*pair, strict=True))
        for pair in ((equation.outvars, inner.outvars), (equation.invars, inner.invars))
    )
    return both - carried, both


def _cross_entropy(call: CrossEntropyCall, operands: list[Value]) -> list[Any]:
    """The losses. Their derivative along the direction of the head is found from the same logits."""
    (along,) = _shared(operands[1])
    losses, derivative = call.along(_arrays(operands), along.direction)
    return deposit([losses], along, lambda _: [derivative])


def _arrays(values: Sequence[Value]) -> list[Any]:
    return [value.array for value in values]


def _alongs_of(values: Sequence[Value]) -> list[Along]:
    return [along for _, along in directions_of([value.node for value in values if value.node])]


def _data(arrays: Sequence[Any]) -> list[Value]:
    return [Value(array, depends=True) for array in arrays]


def _is_real(array: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(array), jnp.inexact)


def _names_in(equation: Any) -> set[str]:
    inner = [eqn for jaxpr in programs_in(equation) for eqn in jaxpr.eqns]
    return {equation.primitive.name}.union(*(_names_in(eqn) for eqn in inner))


def _handed_on(value: Value, fits: Callable[[int], bool]) -> list[Along]:
    """The directions of a value, of its own shape; none for data.

    A direction of layers that are in no dimension that fits is one for each of its layers instead.
    """

    def own(along: Along, layers: int | None) -> Along:
        (tangent,) = tangents_of([value.node], weight, along.direction)
        return dataclasses.replace(along, direction=lax.stop_gradient(tangent), layers=layers)

    found: list[Along] = []
    for weight, along in directions_of([value.node] if value.node else []):
        layers = layers_of(value.node, weight, along.layers)
        is_one = layers is None or fits(layers)
        found += [own(along, layers)] if is_one else [own(layer, None) for layer in along.split()]
    return found


def _by_layer(value: Value) -> list[Along]:
    """The directions of a value that has a layer, or what a turn of a loop takes, in each row."""
    length = len(value.array)
    found = _handed_on(value, lambda layers: layers == 0)
    rows = [jnp.broadcast_to(along.probe, (length,)) for along in found]
    return [
        dataclasses.replace(along, probe=row, layers=None) for along, row in zip(found, rows, strict=True)
    ]


def _shared(value: Value) -> list[Along]:
    """The directions of a value that every layer of a stack, or turn of a loop, takes whole."""
    return _handed_on(value, lambda layers: layers != MIXED)


def _taken_layers(equation: Any, value: Value, arrays: Sequence[Any]) -> list[Weight] | None:
    """The weights that some layers of an array of a stack are; None where the equation takes none."""
    params, name = equation.params, equation.primitive.name
    if name not in ("slice", "squeeze", "unstack") or value.node is None:
        return None
    if any(layers_of(value.node, weight, a.layers) != 0 for weight, a in directions_of([value.node])):
        return None
    if 0 in (params.get("axis"), *params.get("dimensions", ())):
        taken: list[Any] = [*range(len(value.array))]
    elif name == "slice":
        first, last, step = (params[key] for key in ("start_indices", "limit_indices", "strides"))
        taken = [slice(first[0], last[0], step and step[0])]
    else:
        return None
    pairs = [(along, bind(equation, [along.direction])) for along in _shared(value)]

    def weight(at: int, rows: Any) -> Weight:
        layers = 0 if isinstance(rows, slice) else None
        own = [Along(along.path, found[at], along.probe[rows], layers) for along, found in pairs]
        return Weight(arrays[at], tuple(own))

    return [weight(at, rows) for at, rows in enumerate(taken)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """Inputs of a layer, and the directions of each that depends on weights."""

    values: list[Value]
    alongs: list[list[Along]]

    @property
    def extra(self) -> list[Any]:
        """The directions and probes, which the layer takes behind its inputs."""
        every = itertools.chain(*self.alongs)
        return [array for along in every for array in (along.direction, along.probe)]

    def inside(self, arrays: Sequence[Any], extra: Sequence[Any]) -> list[Value]:
        """The values in a layer, from its inputs and its directions and probes."""
        left, found = iter(extra), []
        for value, alongs, array in zip(self.values, self.alongs, arrays, strict=True):
            own = [dataclasses.replace(along, direction=next(left), probe=next(left)) for along in alongs]
            found.append(Value(array, Weight(array, tuple(own)) if own else None, value.depends))
        return found
