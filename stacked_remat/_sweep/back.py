"""The reverse sweep of a `SweepSpec`: every layer visited once, from the last to the first."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from equinox.internal import unvmap_max
from jax import lax

from .._placement import has_host_arrays, platform
from .._remat import Kept
from .gradient import (
    LayerPullback,
    LeafVisit,
    LeafVisitor,
    Perturbed,
    pick,
    scatter_leaves,
    write_gradients,
    zero_gradients,
)
from .kinds import Kind
from .reverse import Replay, ReplayedLayer, reverse_sweep
from .slots import Arrays, Carry, Checkpoints, TripsOf, repeat
from .spec import SweepSpec
from .store import read


def pull_back(
    spec: SweepSpec,
    perturbed: Perturbed,
    checkpoints: Checkpoints,
    xs: Arrays,
    shared: Arrays,
    carry_ct: Carry,
    ys_ct: Arrays,
    visitor: LeafVisitor = write_gradients,
) -> tuple[Carry, Arrays, Arrays]:
    """Sweep back to the cotangents of the perturbed leaves of init, xs and shared."""
    carry_ct, (shared_ct, xs_ct) = sweep_back(
        spec,
        perturbed,
        checkpoints,
        shared,
        carry_ct,
        ys_ct,
        visitor,
        zero_gradients(perturbed, shared, xs),
        xs_in=lambda state: xs,
    )
    of_init = [given for given, active in zip(perturbed.init, perturbed.carry, strict=True) if active]
    return pick(carry_ct, of_init), pick(xs_ct, perturbed.xs), shared_ct


def sweep_back(
    spec: SweepSpec,
    perturbed: Perturbed,
    checkpoints: Checkpoints,
    shared: Arrays,
    carry_ct: Carry,
    ys_ct: Arrays,
    visitor: LeafVisitor,
    state: Any,
    *,
    xs_in: Callable[[Any], Arrays],
) -> tuple[Carry, Any]:
    """Visit every layer, from the last to the first.

    Args:
        perturbed: the same as for the forward sweep.
        checkpoints: what the forward sweep kept.
        shared: inputs that all layers share.
        carry_ct: cotangents of the perturbed leaves of the last carry.
        ys_ct: stacked cotangents of the perturbed outputs.
        visitor: returns the cotangents of the perturbed leaves of the layer's input carry, and its state.
            It is traced once for each kind.
        state: the visitor's first state.
        xs_in: the layers' own inputs, stacked, in a state of the visitor, which may replace entries of
            layers that it visits.

    Returns:
        The cotangents of the perturbed leaves of the carry that goes into the first layer, and the state.
    """
    every_y_ct = scatter_leaves(ys_ct, perturbed.ys)

    def pullbacks_of(kept: Kept) -> list[LayerPullback]:
        return spec.pullbacks(perturbed, kept, checkpoints.first(), xs_in(state), shared)

    remat = spec.remat
    if remat.schedule is not None:
        pullbacks = pullbacks_of(remat.kept)
        visit = _visitor(spec, pullbacks, shared, every_y_ct, visitor, xs_in, remat.first_layers)
        replay = _replay(spec, pullbacks, shared, xs_in, remat.first_layers)
        carry_ct, state = reverse_sweep(
            replay, visit, checkpoints, carry_ct, state, remat.schedule, unroll=spec.unroll
        )
    if remat.first_layers:
        pullbacks = pullbacks_of(remat.first_kept)
        visit = _visitor(spec, pullbacks, shared, every_y_ct, visitor, xs_in, 0)
        carry_ct, state = _visit_first(spec, visit, checkpoints, carry_ct, state)
    return carry_ct, state


def _visitor(
    spec: SweepSpec,
    pullbacks: Sequence[LayerPullback],
    shared: Arrays,
    ys_ct: Sequence[Any],
    visitor: LeafVisitor,
    xs_in: Callable[[Any], Arrays],
    first: int,
) -> Callable:
    """Adapt a `LeafVisitor` to the reverse loop over layers whose numbers begin at `first`."""
    stop = spec.length if first == spec.remat.first_layers else spec.remat.first_layers
    numbers = range(first, stop)

    def visit(layer: ReplayedLayer, carry_ct: Carry, state: Any) -> tuple[Carry, Any]:
        number = layer.index + first

        def run(kind: Kind, row: Any, loop: tuple[Carry, Any]) -> tuple[Carry, Any]:
            carry_ct, state = loop
            pullback, saved = pullbacks[kind.number], None
            if layer.saved is not None:
                saved = read(layer.saved[kind.number], spec.entry(kind, number, layer.bottom + first))
            y_ct = read(pick(ys_ct[kind.ys], pullback.perturbed.ys), row)
            carry, cotangents = layer.carry, (carry_ct, y_ct)
            if spec.remat.boundaries_on_host and platform() == "cuda":
                # For GPUs XLA keeps a layer's internals twice where its carry comes from the host.
                carry, cotangents = lax.optimization_barrier((carry, cotangents))
            leaves = LeafVisit(
                spec.layer_index(number),
                kind,
                row,
                shared,
                carry,
                spec.inputs(kind, xs_in(state), row, layer.fetched),
                spec.unsliced[kind.xs],
                cotangents,
                saved,
                pullback,
                writes_to_host=has_host_arrays(state),
            )
            return visitor(leaves, state)

        return spec.at(number, run, (carry_ct, state), numbers)

    return visit


def _replay(
    spec: SweepSpec,
    pullbacks: Sequence[LayerPullback],
    shared: Arrays,
    xs_in: Callable[[Any], Arrays],
    first: int,
) -> Replay:
    """How the reverse loop runs layers again whose numbers begin at `first`."""

    def fetch(state: Any, index: Any) -> Arrays:
        return spec.fetch(xs_in(state), index + first)

    def advance(state: Any, index: Any, carry: Carry, fetched: Arrays, indices: Iterable[int]) -> Carry:
        def run(kind: Kind, row: Any, carry: Carry) -> Carry:
            return kind.evaluated.layer(shared, carry, spec.inputs(kind, xs_in(state), row, fetched))[0]

        return spec.at(index + first, run, carry, (k + first for k in indices))

    def save(
        state: Any, index: Any, bottom: Any, carry: Carry, saved: list[Arrays], fetched: Arrays
    ) -> tuple[Carry, list[Arrays]]:
        def run(kind: Kind, row: Any, loop: Any) -> Any:
            x = spec.inputs(kind, xs_in(state), row, fetched)
            (carry, _), new = pullbacks[kind.number].save(shared, loop[0], x)
            return carry, spec.saved(loop[1], kind, index + first, bottom + first, new)

        return spec.at(index + first, run, (carry, saved))

    def room(parts: Iterable[range]) -> list[Arrays]:
        _check_saved_on_device(pullbacks)
        return spec.room(pullbacks, [range(part.start + first, part.stop + first) for part in parts])

    saves = any(pullback.residuals for pullback in pullbacks)
    return Replay(fetch, advance, save if saves else None, room)


def _visit_first(
    spec: SweepSpec, visit: Callable, checkpoints: Checkpoints, carry_ct: Carry, state: Any
) -> tuple[Carry, Any]:
    assert checkpoints.first_layers is not None
    carries, residuals, ran = checkpoints.first_layers

    def one(k: Any, loop: tuple[Carry, Any]) -> tuple[Carry, Any]:
        number = last - 1 - k
        layer = ReplayedLayer(number, 0, read(carries, number), residuals, [])
        return visit(layer, *loop)

    schedule = spec.remat.schedule
    last = trips = first = spec.remat.first_layers
    if ran is not None:
        last = unvmap_max(ran)
        trips = TripsOf(None, last)
    elif schedule is not None and spec.unroll is not True:
        # Use the same kind of loop as the other visits, so inner programs compile once.
        on_host = spec.remat.boundaries_on_host
        visits = schedule.segments if on_host else [run.visits for run in schedule.runs]
        if len({*visits}) > 1:
            trips = TripsOf(np.asarray([first]), jnp.int32(first))
    return repeat(trips, one, (carry_ct, state), spec.unroll, first)


def _check_saved_on_device(pullbacks: Iterable[LayerPullback]) -> None:
    if any(pullback.residuals and pullback.residuals.on_host for pullback in pullbacks):
        raise ValueError(
            "With layers that are cut, save_block_internals keeps internals on the device while a segment is "
            "replayed, and here some are moved to the host: by a policy of JAX that offloads, or by a fold "
            'inside the layer. Use one that does not offload, and save_carries="offload" beside it.'
        )
