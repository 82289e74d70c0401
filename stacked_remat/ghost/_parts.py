"""Parts of a program that compute on rows of their own: stacks, grouped experts, `shard_map`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import haliax as hax
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from .._block_seq import BlockSeq
from .._noted import Notes, noting
from .._scan.marks import is_named, raw_array
from ..ops.cross_entropy import CrossEntropyCall
from ..ops.grouped_experts import ExpertsCall
from ._causes import fix_of_layers
from ._deposit import deposit, spread_over_rows
from ._per_device import Division
from ._rows import of_outputs
from ._stacks import PlacedBlock, StackCall, leaves_with_paths, prefix_of
from ._traced import arrays_of, resized, trace, with_arrays
from ._units import Flow, Rows, Units, agreed, known_rows, of_input
from ._values import UnsupportedLeafError, Value, lost_in, paths_of, plain_rows
from ._weights import Applied, Leaf, Tangent, bind, leaves_of, tangent_of


class _Program(Protocol):
    """What is needed of `_interpret.Program`."""

    @property
    def units(self) -> Units: ...

    @property
    def notes(self) -> Notes: ...

    def evaluate(
        self,
        inputs: Sequence[Any],
        leaves: dict[int, Leaf],
        data: Sequence[int] = (),
        *,
        consts: Sequence[Any] | None = None,
        rows: Mapping[int, Rows] | None = None,
        carried: Sequence[Rows] = (),
    ) -> list[Any]: ...

    def settled(self, value: Value) -> Value | None: ...

    def check_rows(
        self, equation: Any, rows: Rows, leaves: Sequence[Leaf], operands: Sequence[Value]
    ) -> None: ...

    def of(self, jaxpr: Any, other: Any, units: Units, notes: Notes) -> "_Program": ...


def _handed_on(operands: Sequence[Value], in_stack: bool = False) -> dict[int, Leaf]:
    """For each operand that depends on a weight, the weight as if it were the operand itself."""
    found: dict[int, Leaf] = {}
    for at, value in enumerate(operands):
        if value.node is not None:
            leaf, *more = leaves_of([value.node])
            if more:
                raise UnsupportedLeafError(
                    f"{paths_of([value])} together make one array that a stack, grouped experts, or a "
                    "function that runs on each device, are given. Hand them over apart and combine them "
                    "there (adapters: make them arrays of the layers), or give all but one no direction."
                )
            check_apart(leaf, in_stack)
            direction = jax.lax.stop_gradient(tangent_of(value.node, leaf))
            found[at] = dataclasses.replace(leaf, array=value.array, direction=direction)
    return found


def check_apart(leaf: Leaf, in_stack: bool = False, place: str = "", nodes: Sequence[Any] = ()) -> None:
    """Whether a weight of a stack is used in its stack, and any other outside of one.

    Args:
        leaf: the weight.
        in_stack: whether it is used in a stack.
        place: where it is used otherwise, for the error.
        nodes: what is used there; what was done to the weight before tells the cause.
    """
    if not leaf.in_stack or in_stack:
        return
    of_leaf = [node for node in nodes if isinstance(node, Applied) and leaf in leaves_of([node])]
    mixed = next(filter(None, (_by_layer(node, len(leaf.probe)).mixed for node in of_leaf)), "")
    cause = (
        f". Before, {mixed} combines the layers or changes their order. {fix_of_layers(mixed)} Where "
        "jax.vmap or a derivative in the loss does so, fold the stack with remat=True."
    )
    raise UnsupportedLeafError(
        f"{leaf.path} is used apart from fold and scan of its stack{place and ', in '}{place}, where its "
        f"layers have no scores of their own{cause if mixed else _APART} Do that, give the array no "
        'direction, or use granularity="block" or "total".'
    )


_APART = (
    ". In a penalty on all weights, leave it out of per_example_loss (its gradient is the same for all "
    "examples); in jax.vmap or jax.lax.map over examples, call the stack on the whole batch, with jax.vmap "
    "within its layers, or fold it with remat=True; in a derivative that the loss takes through it, use "
    "remat=True, or compute the derivative before if it is a constant."
)


def is_scored(equation: Any, operands: Sequence[Value]) -> bool:
    """Whether a call of a stack has arrays of the stack that are scored."""
    return any(value.node is not None for value in operands[: equation.params["call"].sizes[0]])


def scored_stack(program: _Program, equation: Any, twin: Any, operands: list[Value]) -> list[Any]:
    """The results of a call of a stack, with deposits in its layers."""
    call = equation.params["call"]
    of_stack, of_init, _ = call.sizes
    operands = [
        value if at < of_stack or value.node is None else program.settled(value) or value
        for at, value in enumerate(operands)
    ]
    if carried := [value for value in operands[of_stack : of_stack + of_init] if value.node is not None]:
        raise UnsupportedLeafError(
            f"{paths_of(carried)} is what a stack begins with, without an axis of examples. Give each "
            "example its own: jnp.broadcast_to(x, (len(tokens), *x.shape)), or x.broadcast_axis(Batch)."
        )
    shared = {at + of_stack: leaf for at, leaf in _handed_on(operands[of_stack:]).items()}
    rows = _check_given(program, call, twin, operands)
    arrays = [value.array for value in operands]
    stack, *_ = with_arrays(call.given, arrays)
    directions, probes, names = {}, {}, {}
    entries = [*leaves_with_paths(stack)]
    for at, leaf in _handed_on(operands[:of_stack], in_stack=True).items():
        path, array = entries[at]
        _check_by_layer(stack, array, operands[at], leaf)
        names[path] = leaf.path
        directions[path] = hax.named(leaf.direction, array.axes) if is_named(array) else leaf.direction
        probes[path] = leaf.probe
    others = None if twin is None else twin.params["call"].layers
    by_place = {
        place: {path.removeprefix(prefix_of(stack, place)): name for path, name in names.items()}
        for place in call.layers
    }
    layer = _ScoredLayer(program, call, others, arrays, rows, shared, by_place)
    return call.evaluate(arrays, layer, directions, probes)


def _check_given(program: _Program, call: StackCall, twin: Any, operands: Sequence[Value]) -> dict[int, Rows]:
    """Whether the rows of what a stack is given are those that the sizes tell, as its layers take them.

    Returns:
        By operand the rows of which the sizes do not tell all.
    """
    larger = twin.invars if twin is not None and program.units.sizes else ()
    found: dict[int, Rows] = {}
    for at, (value, var) in enumerate(zip(operands, larger, strict=False)):  # else no weight meets data
        sized = of_input(jnp.shape(value.array), var.aval.shape, program.units)
        known = known_rows(sized, value.rows)
        if known != sized:
            found[at] = known
        if value.node is None and jnp.issubdtype(value.array.dtype, jnp.inexact):
            if any(dim and agreed(dim, own) is None for own, dim in zip(value.rows, sized, strict=True)):
                raise UnsupportedLeafError(
                    f"The stack of {paths_of(operands)} is given an array, and it can't be told which rows "
                    f"of it are of which example{lost_in([value])}. Keep the axis of examples apart, and do "
                    "before what mixes their data alone, as mixup does, or use "
                    'granularity="block" or "total".'
                )
    return found


def _check_by_layer(stack: Any, array: Any, value: Value, leaf: Leaf) -> None:
    """Whether each layer of an array that a stack is given depends on no other layer of the weight."""
    size, is_stacked = leaf.probe.shape[0], not isinstance(stack, BlockSeq)
    shared = is_named(array) and all(axis.name != stack.Layers.name for axis in array.axes)
    is_known = shared or size == 1 or not is_stacked
    found = Flow((((size, 0),),)) if is_known else _by_layer(value.node, size)
    has_others = is_stacked and not shared and raw_array(array).shape[0] != size
    if leaf.in_stack != is_stacked or has_others or not _is_by_layer(found, size):
        raise UnsupportedLeafError(
            f"{leaf.path} is combined across the layers of a stack before the stack is folded"
            f"{found.mixed and ', in '}{found.mixed}, so that its layers have no scores of their own. "
            f'{fix_of_layers(found.mixed)} Do that, or use granularity="block" or "total".'
        )


def _by_layer(node: Any, size: int) -> Flow:
    """Which dimension of a value that depends on a weight of a stack holds its layers."""
    known: dict[int, Flow] = {}

    def flow(operand: Any) -> Flow:
        if id(operand) not in known:
            if isinstance(operand, Applied):
                equation, units = operand.equation, Units((size,), (1,))
                found = of_outputs(equation, equation, [flow(one) for one in operand.operands], units)
                known[id(operand)] = found[operand.index]
            else:
                rows = plain_rows(operand.array if isinstance(operand, Leaf) else operand)
                rows = (((size, 0),), *rows[1:]) if rows[:1] == (((size, None),),) else rows
                known[id(operand)] = Flow(rows, isinstance(operand, Leaf))
        return known[id(operand)]

    return flow(node)


def _is_by_layer(flow: Flow, size: int) -> bool:
    return not flow.mixed and flow.rows[:1] == (((size, 0),),)


def taken_layers(equation: Any, operands: Sequence[Value], arrays: Sequence[Any]) -> list[Leaf] | None:
    """The weights that some layers of an array of a stack are; None where the equation takes none."""
    params, all_layers = equation.params, as_layers(operands[0])
    if all_layers is None or equation.primitive.name not in _TAKING:
        return None
    is_single = 0 in (params.get("axis"), *params.get("dimensions", ()))
    if is_single:
        probes = list(all_layers.probe)
    elif equation.primitive.name == "slice":
        strides = params["strides"] or (1,)
        probes = [all_layers.probe[params["start_indices"][0] : params["limit_indices"][0] : strides[0]]]
    else:
        return None
    along = bind(equation, [all_layers.direction])
    return [
        Leaf(all_layers.path, array, direction, probe, in_stack=not is_single)
        for array, direction, probe in zip(arrays, along, probes, strict=True)
    ]


def as_layers(value: Value) -> Leaf | None:
    """A value that has the layers of one array of a stack in front, as if it were this array; or None."""
    if value.node is None:
        return None
    leaf, *more = leaves_of([value.node])
    size = len(leaf.probe)
    if more or not leaf.in_stack or leaf.is_shared or not _is_by_layer(_by_layer(value.node, size), size):
        return None
    direction = jax.lax.stop_gradient(tangent_of(value.node, leaf))
    return dataclasses.replace(leaf, array=value.array, direction=direction)


_TAKING = ("slice", "squeeze", "unstack")


@dataclasses.dataclass(frozen=True, eq=False)
class _ScoredLayer:
    """The layer that a call traced, of a `PlacedBlock`, with deposits where weights meet data.

    Attributes:
        program: with the call.
        call: see there.
        others: the layers of the second trace.
        operands: of the call.
        rows: of operands, where the sizes do not tell them.
        shared: those that are scored, and that all layers share.
        names: by place and path in the layer, what users see.
    """

    program: _Program
    call: StackCall
    others: Any
    operands: Sequence[Any]
    rows: dict[int, Rows]
    shared: dict[int, Leaf]
    names: dict[Any, dict[str, str]]

    def __call__(self, one: PlacedBlock, carry: Any, /, *args: Any, **kwargs: Any) -> Any:
        traced, other = self.call.layers[one.place], self.others and self.others[one.place].jaxpr
        paths, names = [path for path, _ in leaves_with_paths(one.block)], self.names[one.place]
        inputs = arrays_of((one.block, carry, args, kwargs))
        leaves = {
            at: Leaf(names[path], inputs[at], raw_array(one.direction[path]), one.probes[path])
            for at, path in enumerate(paths)
            if path in one.direction
        }
        consts = self.call.captured(self.operands)[one.place]
        rows = self._take_shared([*consts, *inputs], one.place, leaves)
        own = self.program.of(traced.jaxpr, other, self.program.units, traced.notes)
        known = [rows.get(traced.of_block + at, ()) for at in range(traced.of_carry)]
        data = range(len(paths), len(inputs))
        found = own.evaluate(inputs, leaves, data, consts=consts, rows=rows, carried=known)
        return traced.rebuild(found)

    def _take_shared(self, arrays: Sequence[Any], place: Any, leaves: dict[int, Leaf]) -> dict[int, Rows]:
        """The rows of a layer's inputs, by their numbers; scored ones that layers share go to `leaves`."""
        numbers, found = self.call.operands_of(place), {}
        left = {at: leaf for at, leaf in self.shared.items() if at < sum(self.call.sizes)}
        of_consts = len(self.call.layers[place].jaxpr.consts)
        for at, (array, number) in enumerate(zip(arrays, numbers, strict=True), -of_consts):
            if number is None or jnp.ndim(array) != jnp.ndim(self.operands[number]):
                continue
            left.pop(number, None)
            if number in self.rows:
                found[at] = self.rows[number]
            if number in self.shared:
                leaves[at] = dataclasses.replace(self.shared[number], array=array)
        if left:
            raise UnsupportedLeafError(
                f"{', '.join(leaf.path for leaf in left.values())} is an argument of a stack, each of whose "
                "layers takes a part of it. Mark it stacked_remat.shared(array) if each takes all of it, or "
                'make it an array of the layers, or use granularity="block" or "total".'
            )
        return found


def scored_experts(program: _Program, call: ExpertsCall, equation: Any, operands: list[Value]) -> Any:
    """The result of grouped experts.

    Each block of rows is evaluated with deposits, and a probe for each row, which the pairs of tokens and
    experts add to the probe of their example.
    """
    x, choices, gates, *weights = operands
    leaves = _handed_on(weights)
    program.check_rows(equation, x.rows[:1], list(leaves.values()), operands)
    probes = [
        jnp.broadcast_to(spread_over_rows(leaf.probe, x.rows[0], program.units)[:, None], choices.array.shape)
        for leaf in leaves.values()
    ]

    def expert(arrays: Sequence[Any], rows: Any, gates_and_probes: Any) -> Any:
        gates, of_rows = gates_and_probes
        own, directions = list(arrays[: len(weights)]), arrays[len(weights) :]
        of_block = {
            at: Leaf(leaf.path, own[at], along, probe)
            for (at, leaf), along, probe in zip(leaves.items(), directions, of_rows, strict=True)
        }
        return _one_expert(program, call, own, rows, gates, of_block)

    scored = dataclasses.replace(call, expert=expert, saved=None, rebuild=lambda arrays: arrays, kernels=None)
    arrays = [*(one.array for one in weights), *(leaf.direction for leaf in leaves.values())]
    return scored.run(x.array, choices.array, (gates.array, probes), arrays)


def _one_expert(
    program: _Program, call: ExpertsCall, own: list[Any], rows: Any, gates: Any, leaves: dict[int, Leaf]
) -> Any:
    units = Units((rows.shape[0],), (3,))

    def apply(own: list[Any], rows: Any, gates: Any) -> Any:
        return call.expert(call.rebuild(own), rows, gates)

    def grown(array: Any) -> Any:
        return resized(array, 0, 3 * array.shape[0])

    notes = Notes()
    with noting(Notes()):
        other, _, _ = trace(apply, own, grown(rows), grown(gates))
    with noting(notes):
        closed, inputs, rebuild = trace(apply, own, rows, gates)
    return rebuild(program.of(closed, other, units, notes).evaluate(inputs, leaves))


def is_of_head(operands: Sequence[Value]) -> bool:
    """Whether of the operands of a cross entropy only the head depends on weights, and on one of them."""
    weighted = [at for at, value in enumerate(operands) if value.node is not None]
    return weighted == [1] and len(leaves_of([operands[1].node])) == 1


def scored_cross_entropy(
    program: _Program, call: CrossEntropyCall, equation: Any, operands: list[Value], rows: Rows
) -> Any:
    """The losses. Their derivative along the direction of the head is found from the same logits."""
    leaf = _handed_on(operands)[1]
    program.check_rows(equation, rows, [leaf], operands)
    losses, derivative = call.along([value.array for value in operands], leaf.direction)
    (losses,) = deposit([losses], [rows], program.units, leaf.probe, Tangent.known([derivative]))
    return losses


def scored_per_device(program: _Program, equation: Any, twin: Any, operands: list[Value]) -> list[Any]:
    """The results of a `jax.shard_map`, with deposits in what each device computes."""
    params, specs = equation.params, equation.params["in_specs"]
    leaves = _handed_on(operands)
    division = Division(program.units, equation, [value.rows for value in operands])
    units, given_rows = division.units, division.given
    data = [at for at in range(len(operands)) if at not in leaves]
    if division.has_one_example:
        twin, units, given_rows = None, Units((), ()), []  # reshapes may lose the size of 1
    other = None if twin is None else _closed(twin.params["jaxpr"])
    local = program.of(_closed(params["jaxpr"]), other, units, program.notes)

    def own(arrays: list[Any], directions: list[Any], probes: list[Any]) -> list[Any]:
        given = {
            at: Leaf(leaf.path, arrays[at], along, probe)
            for (at, leaf), along, probe in zip(leaves.items(), directions, probes, strict=True)
        }
        of_data = [at for at in data if operands[at].depends]
        return local.evaluate(arrays, given, of_data, rows=dict(enumerate(given_rows)))

    probes = [leaf.probe.reshape(program.units.sizes or (1,)) for leaf in leaves.values()]
    run = jax.shard_map(
        own,
        in_specs=(
            list(specs),
            [specs[at] for at in leaves],
            [PartitionSpec(*division.entries)] * len(probes),
        ),
        out_specs=list(params["out_specs"]),
        mesh=params["mesh"],
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return run([value.array for value in operands], [leaf.direction for leaf in leaves.values()], probes)


def _closed(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())
