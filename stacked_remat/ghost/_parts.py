"""Parts of a program that compute on rows of their own: grouped experts, and what each device computes."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from .._noted import Notes, noting
from ..ops.grouped_experts import ExpertsCall
from ._deposit import spread_over_rows
from ._rows import Rows, Units
from ._traced import trace
from ._values import UnsupportedLeafError, Value, paths_of
from ._weights import Leaf, leaves_of, tangent_of


class _Program(Protocol):
    """What is needed of `_interpret.Program`."""

    @property
    def units(self) -> Units: ...

    @property
    def notes(self) -> Notes: ...

    def evaluate(
        self, inputs: Sequence[Any], leaves: dict[int, Leaf], data: Sequence[int] = ()
    ) -> list[Any]: ...

    def check_rows(self, equation: Any, rows: Rows, leaves: Sequence[Leaf]) -> None: ...

    def of(self, jaxpr: Any, other: Any, units: Units, notes: Notes) -> "_Program": ...


def _handed_on(operands: Sequence[Value]) -> dict[int, Leaf]:
    """For each operand that depends on a weight, the weight as if it were the operand itself."""
    found: dict[int, Leaf] = {}
    for at, value in enumerate(operands):
        if value.node is not None:
            leaf, *more = leaves_of([value.node])
            if more:
                raise UnsupportedLeafError(
                    f"{paths_of([value])} together make one array that grouped experts, or a function that "
                    "runs on each device, are given. Hand them over apart, or give all but one no direction."
                )
            direction = jax.lax.stop_gradient(tangent_of(value.node, leaf))
            found[at] = Leaf(leaf.path, value.array, direction, leaf.probe)
    return found


def scored_experts(program: _Program, call: ExpertsCall, equation: Any, operands: list[Value]) -> Any:
    """The result of grouped experts.

    Each block of rows is evaluated with deposits, and a probe for each row, which the pairs of tokens and
    experts add to the probe of their example.
    """
    x, choices, gates, *weights = operands
    leaves = _handed_on(weights)
    program.check_rows(equation, x.rows[:1], list(leaves.values()))
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

    scored = dataclasses.replace(call, expert=expert, saved=None, rebuild=lambda arrays: arrays)
    arrays = [*(one.array for one in weights), *(leaf.direction for leaf in leaves.values())]
    return scored.run(x.array, choices.array, (gates.array, probes), arrays)


def _one_expert(
    program: _Program, call: ExpertsCall, own: list[Any], rows: Any, gates: Any, leaves: dict[int, Leaf]
) -> Any:
    units = Units((rows.shape[0],), (3,))

    def apply(own: list[Any], rows: Any, gates: Any) -> Any:
        return call.expert(call.rebuild(own), rows, gates)

    def grown(array: Any) -> Any:
        return jax.ShapeDtypeStruct((3 * array.shape[0], *array.shape[1:]), array.dtype)

    notes = Notes()
    with noting(Notes()):
        other, _, _ = trace(apply, own, grown(rows), grown(gates))
    with noting(notes):
        closed, inputs, rebuild = trace(apply, own, rows, gates)
    return rebuild(program.of(closed, other, units, notes).evaluate(inputs, leaves))


def scored_per_device(program: _Program, equation: Any, twin: Any, operands: list[Value]) -> list[Any]:
    """The results of a `jax.shard_map`, with deposits in what each device computes."""
    params, specs = equation.params, equation.params["in_specs"]
    leaves = _handed_on(operands)
    entries = _entries_of_units(program.units, operands, specs)
    mesh = params["mesh"].shape
    parts = [_parts(entry, mesh) for entry in entries]
    sizes = tuple(size // part for size, part in zip(program.units.sizes, parts, strict=True))
    moved = _names_in(params["jaxpr"]) & {"ppermute", "all_to_all", "ragged_all_to_all"}
    if (
        sizes == (1,) and not moved
    ):  # all rows of a device are of its one example, and reshapes may lose a size of 1
        twin, sizes = None, ()
    local = program.of(
        _closed(params["jaxpr"]),
        None if twin is None else _closed(twin.params["jaxpr"]),
        Units(sizes, program.units.growth[: len(sizes)]),
        program.notes,
    )
    data = [at for at in range(len(operands)) if at not in leaves]

    def own(arrays: list[Any], directions: list[Any], probes: list[Any]) -> list[Any]:
        given = {
            at: Leaf(leaf.path, arrays[at], along, probe)
            for (at, leaf), along, probe in zip(leaves.items(), directions, probes, strict=True)
        }
        return local.evaluate(arrays, given, [at for at in data if operands[at].depends])

    probes = [leaf.probe.reshape(program.units.sizes or (1,)) for leaf in leaves.values()]
    run = jax.shard_map(
        own,
        in_specs=(list(specs), [specs[at] for at in leaves], [PartitionSpec(*entries)] * len(probes)),
        out_specs=list(params["out_specs"]),
        mesh=params["mesh"],
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return run([value.array for value in operands], [leaf.direction for leaf in leaves.values()], probes)


def _entries_of_units(units: Units, operands: Sequence[Value], specs: Sequence[Any]) -> list[Any]:
    """For each unit the axes of the mesh that divide it, as an entry of a `PartitionSpec`."""
    found: list[Any] = [None] * len(units.sizes)
    for value, spec in zip(operands, specs, strict=True):
        for dim, entry in zip(value.rows, spec, strict=False):
            if dim is not None and len(dim) == 1 and dim[0][1] is not None and entry is not None:
                found[dim[0][1]] = entry
    return found


def _parts(entry: Any, mesh: Any) -> int:
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    count = 1
    for name in names:
        count *= mesh[name]
    return count


def _names_in(jaxpr: Any) -> set[str]:
    return {equation.primitive.name for equation in jaxpr.eqns}.union(
        *(_names_in(inner) for equation in jaxpr.eqns for inner in jaxprs_in_params(equation.params))
    )


def _closed(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, "consts") else jax.extend.core.ClosedJaxpr(jaxpr, ())
