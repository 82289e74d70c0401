"""The reverse loops of a checkpointed sweep: they replay segments and visit every
layer, from the last on.

Everything here is forward computation; the visitor is what makes it a derivative.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from equinox.internal import unvmap_max
from jax import lax

from .._barriers import barrier_on
from .._placement import has_host_arrays, to_device
from .._remat import Kept
from .._schedule import Run, Schedule
from .._static import PyTree
from .gradient import (
    LayerPullback,
    Perturbed,
    merge,
    pick,
    write_gradients,
    write_tangents,
    zero_gradients,
)
from .kinds import Kind
from .slots import (
    Arrays,
    Carry,
    Checkpoints,
    Mask,
    OfKinds,
    TripsOf,
    entry_at,
    slots_for,
    trip_count,
)
from .spec import SweepSpec
from .store import Index, read, read_before_writes, settle, write

# Called for every layer, from the last to the first, with a `LayerVisit`, its kind, its
# row in the stacks of that kind, and the visitor's state. Returns the cotangents of the
# layer's perturbed carry, and the state.
LeafVisitor: TypeAlias = Callable[[Any, Kind, Index, Any], tuple[Carry, PyTree]]


def pull_back(
    spec: SweepSpec,
    perturbed: Perturbed,
    checkpoints: Checkpoints,
    xs: OfKinds,
    shared: OfKinds,
    carry_ct: Carry,
    ys_ct: OfKinds,
) -> Arrays:
    """Sweep back to the cotangents of the perturbed leaves of init, xs and shared."""
    visitor = functools.partial(
        write_tangents if spec.kinds[0].in_forward_mode else write_gradients, perturbed
    )
    state = zero_gradients(perturbed, shared, xs)
    swept = functools.partial(
        sweep_back, spec, perturbed, checkpoints, shared, carry_ct, ys_ct
    )
    carry_ct, gradients = swept(visitor, state, xs_in=lambda state: xs)
    shared_ct, xs_ct = zip(*gradients, strict=True)
    return jax.tree.leaves(
        (pick(carry_ct, pick(perturbed.init, perturbed.carry)), xs_ct, shared_ct)
    )


def sweep_back(
    spec: SweepSpec,
    perturbed: Perturbed,
    checkpoints: Checkpoints,
    shared: OfKinds,
    carry_ct: Carry,
    ys_ct: OfKinds,
    visitor: LeafVisitor,
    state: PyTree,
    *,
    xs_in: Callable[[Any], OfKinds],
) -> tuple[Carry, PyTree]:
    """Visit every layer that ran, from the last on; `xs_in` finds their inputs in the
    visitor's state.
    """
    remat = spec.remat

    def layers(first: int, stop: int, kept: Kept) -> _Layers:
        pullbacks = spec.pullbacks(perturbed, kept, xs_in(state), shared)
        saves, is_read = spec.kept_in_segment(pullbacks)
        return _Layers(
            spec,
            range(first, stop),
            pullbacks,
            saves,
            is_read,
            shared,
            ys_ct,
            visitor,
            xs_in,
        )

    if remat.schedule is not None:
        scheduled = layers(remat.first_layers, spec.length, remat.kept)
        carry_ct, state = _visit_scheduled(
            scheduled, checkpoints, carry_ct, state, remat.schedule
        )
    if remat.first_layers:
        first = layers(0, remat.first_layers, remat.first_kept)
        carry_ct, state = _visit_first(first, checkpoints, carry_ct, state)
    return carry_ct, state


@dataclass(frozen=True)
class _Layers:
    """How the layers with these numbers are run again and visited."""

    spec: SweepSpec
    numbers: range
    pullbacks: list[LayerPullback]
    saves: bool
    is_read: Mask
    shared: OfKinds
    ys_ct: OfKinds
    visitor: LeafVisitor
    xs_in: Callable[[Any], OfKinds]

    def fetch(self, state: PyTree, number: Index) -> Arrays:
        """What a layer reads from the host; called one layer ahead."""
        return self.spec.fetch(self.xs_in(state), number)

    def replay(
        self,
        state: PyTree,
        number: Index,
        loop: tuple[Carry, PyTree],
        fetched: Arrays,
        parts: Sequence[range] = (),
        bottom: Index | None = None,
    ) -> tuple[Carry, PyTree]:
        """Run a layer of `parts` again, from and to the leaves of its carry that are
        held.

        It keeps the residuals of the layers from `bottom` on, if that is given.
        """
        spec = self.spec

        def run(
            kind: Kind, row: Index, loop: tuple[Carry, PyTree]
        ) -> tuple[Carry, PyTree]:
            (held, saved), shared = loop, self.shared[kind.number]
            carry, x = (
                spec.whole(held),
                spec.inputs(kind, self.xs_in(state), row, fetched),
            )
            if bottom is None:
                return spec.of_held(kind.values(shared, carry, x)[0]), saved
            (carry, _), new = self.pullbacks[kind.number].save((shared, carry, x))
            return spec.of_held(carry), kind.write(
                saved, spec.entry(kind, number, bottom), new
            )

        return spec.at(number, run, loop, parts)

    def visit(
        self,
        number: Index,
        bottom: Index,
        carry: Carry,
        saved: PyTree,
        fetched: Arrays,
        loop: PyTree,
    ) -> tuple[Carry, PyTree]:
        """Call the visitor for a layer; `saved` has the residuals of the layers from
        `bottom` on, if any.
        """
        spec = self.spec
        carry = spec.whole(carry)

        def run(
            kind: Kind, row: Index, loop: tuple[Carry, PyTree]
        ) -> tuple[Carry, PyTree]:
            (carry_ct, state), own, given, shared = (
                loop,
                [],
                carry,
                self.shared[kind.number],
            )
            if saved is not None:
                own = read(saved[kind.number], spec.entry(kind, number, bottom))
            cotangents = carry_ct, read(self.ys_ct[kind.number], row)
            if spec.remat.boundaries_on_host:
                # For GPUs XLA keeps a layer's internals twice where its carry comes
                # from the host.
                given, cotangents = barrier_on(("cuda",), (given, cotangents))
            index, x = (
                spec.layer_index(number),
                spec.inputs(kind, self.xs_in(state), row, fetched),
            )
            inputs, pullback = (shared, given, x), self.pullbacks[kind.number]
            visit = pullback.visit(
                index, inputs, own, cotangents, apart=has_host_arrays(state)
            )
            return self.visitor(visit, kind, row, state)

        return spec.at(number, run, loop, [self.numbers])


class _Loop(NamedTuple):
    """The state of the loop over runs."""

    slots: Carry
    saved: PyTree
    fetched: Arrays
    cotangent: Carry
    state: PyTree


def _visit_scheduled(
    layers: _Layers,
    checkpoints: Checkpoints,
    cotangent: Carry,
    state: PyTree,
    schedule: Schedule,
) -> tuple[Carry, PyTree]:
    boundaries = checkpoints.boundaries
    types = [
        type_
        for each in layers.pullbacks
        if each.residuals
        for type_ in each.residuals.types
    ]
    if any(type_.memory_space == jax.memory.Space.Host for type_ in types):
        raise ValueError(
            "With layers that are cut, save_block_internals keeps internals on the"
            " device while a segment is replayed, and here some are moved to the host:"
            " by a policy of JAX that offloads, or by a fold inside the layer. Use one"
            ' that does not offload, and save_carries="offload" beside it.'
        )
    runs = schedule.runs if boundaries is None else _one_run_per_segment(schedule)
    plan = _Plan(runs, layers.numbers.start, layers.saves, checkpoints.ran)
    first: Index = int(plan.first[0])
    fetched = layers.fetch(state, first)
    if fetched:
        # Without the barrier XLA reads the first layer before the forward sweep, and
        # holds it meanwhile. JAX's own would make the number vary over the devices of a
        # `jax.shard_map` as the cotangent does, and so the layer.
        first, cotangent = barrier_on(("cuda", "tpu"), (jnp.int32(first), cotangent))
        fetched = layers.fetch(state, first)

    def run(r: Index, loop: _Loop) -> _Loop:
        loop = _advance(layers, plan, r, loop)
        if loop.saved is not None:
            loop = _save(layers, plan, r, loop)
        return _visit(layers, plan, r, loop)

    saved = (
        layers.spec.residual_buffers(layers.pullbacks, plan.visited)
        if layers.saves
        else None
    )
    if boundaries is None:
        loop = _Loop(checkpoints.slots, saved, fetched, cotangent, state)
        before, left = plan.skipped, len(runs) - plan.skipped
        trips = left if isinstance(left, int) else TripsOf(None, left)
        loop = layers.spec.repeat(trips, lambda r, loop: run(before + r, loop), loop)
        return loop.cotangent, loop.state

    def fetch_and_run(loop: _Loop, at: tuple[PyTree, Carry]) -> tuple[_Loop, None]:
        r, boundary = at
        return (
            run(r, loop._replace(slots=write(loop.slots, 0, to_device(boundary)))),
            None,
        )

    spec = layers.spec
    slots = slots_for(
        spec.of_held(spec.carry_types),
        plan.most_visits,
        spec.of_held(layers.is_read),
        1,
    )
    loop = _Loop(slots, saved, fetched, cotangent, state)
    # The boundaries are stacked in the order of the forward sweep
    in_order = jnp.arange(len(runs))[::-1]
    loop, _ = lax.scan(fetch_and_run, loop, (in_order, boundaries), reverse=True)
    return loop.cotangent, loop.state


def _one_run_per_segment(schedule: Schedule) -> tuple[Run, ...]:
    """The runs where boundaries are on the host: each is fetched to slot 0, its segment
    fills the others.
    """
    starts = np.cumsum((0, *schedule.segments[:-1]))
    return tuple(
        Run(int(start), 0, tuple(range(start + 1, start + size)), size)
        for start, size in zip(starts[::-1], schedule.segments[::-1], strict=True)
    )


class _Plan:
    """The runs of a schedule from layer `first` on: tables by run, or by input that
    replays keep.
    """

    def __init__(
        self, runs: tuple[Run, ...], first: int, saving: bool, ran: Index | None
    ):
        def table(entries: Iterable[int]) -> np.ndarray:
            return np.asarray([*entries], np.int32)

        self.start = table(first + run.start for run in runs)
        self.slot = table(run.slot for run in runs)
        # A saving replay runs the layers to be visited itself, up to the last one.
        self.advances: Any = table(
            max(0, run.replays - run.visits + 1) if saving else run.replays
            for run in runs
        )
        rows = zip(self.start.tolist(), self.advances.tolist(), strict=True)
        self.advanced = [range(start, start + count) for start, count in rows]
        self.kept_from = table(
            itertools.accumulate((len(run.holds) for run in runs[:-1]), initial=0)
        )
        self.kept = table([first + layer for run in runs for layer in run.holds] or [0])
        self.keeps_all = len(self.kept) >= sum(run.replays for run in runs)
        self.top = table(first + run.top for run in runs)
        self.visits: Any = table(run.visits for run in runs)
        self.most_advances, self.most_visits = (
            int(self.advances.max()),
            int(self.visits.max()),
        )
        self.bottom = self.top - self.visits + 1
        self.visited = [*map(range, self.bottom.tolist(), (self.top + 1).tolist())]
        self.bottom_slot = table(run.top_slot - run.visits + 1 for run in runs)
        # The layers that a run reads first and, in its last visit, fetches for the next
        # run.
        self.first = np.where(
            self.advances > 0, self.start, self.bottom if saving else self.top
        )
        self.next_first = np.append(self.first[1:], self.top[-1:])
        self.skipped: Any = 0  # runs before the first of a layer that ran
        if ran is not None:
            ran = unvmap_max(ran)
            self.skipped = jnp.argmax(np.minimum(self.start, self.bottom) < ran).astype(
                jnp.int32
            )
            # The first input that a replay keeps; if that layer did not run, the replay
            # is of no use.
            first_kept = table(
                first + (run.holds[0] if run.holds else run.start) for run in runs
            )
            left = jnp.clip(ran - 1 - self.start, 0, self.advances)
            self.advances = jnp.where(first_kept < ran, left, 0)
            self.visits = jnp.clip(ran - self.bottom, 0, self.visits)


def _advance(layers: _Layers, plan: _Plan, r: Index, loop: _Loop) -> _Loop:
    slot = entry_at(plan.slot, r)

    def layer(k: Index, inner: tuple[Carry, Carry, Arrays, Index | None]) -> PyTree:
        slots, carry, fetched, written = inner  # how many of the inputs that it keeps
        fetched, index = settle(fetched, entry_at(plan.start, r) + k)
        ahead = fetched and layers.fetch(loop.state, index + 1)
        carry, _ = layers.replay(
            loop.state, index, (carry, None), fetched, plan.advanced
        )
        slots = write(slots, slot + 1 + (k if written is None else written), carry)
        if written is not None:
            is_kept = (
                entry_at(plan.kept, entry_at(plan.kept_from, r) + written) == index + 1
            )
            written += lax.convert_element_type(is_kept, jnp.int32)
        return slots, carry, ahead, written

    if not plan.most_advances:
        return loop
    inner = (
        loop.slots,
        read(loop.slots, slot),
        loop.fetched,
        None if plan.keeps_all else jnp.int32(0),
    )
    trips = trip_count(plan.advances, r)
    slots, _, fetched, _ = layers.spec.repeat(trips, layer, inner)
    return loop._replace(slots=slots, fetched=fetched)


def _save(layers: _Layers, plan: _Plan, r: Index, loop: _Loop) -> _Loop:
    bottom, bottom_slot, top = (
        entry_at(t, r) for t in (plan.bottom, plan.bottom_slot, plan.top)
    )
    is_read = layers.spec.of_held(layers.is_read)

    def layer(k: Index, inner: Any) -> PyTree:
        slots, saved, carry, fetched = inner
        fetched, index = settle(fetched, bottom + k)
        ahead = fetched and layers.fetch(loop.state, jnp.minimum(index + 1, top))
        slots = merge(
            slots,
            write(pick(slots, is_read), bottom_slot + k, pick(carry, is_read)),
            is_read,
        )
        carry, saved = layers.replay(
            loop.state, index, (carry, saved), fetched, bottom=bottom
        )
        return slots, saved, carry, ahead

    inner = (loop.slots, loop.saved, read(loop.slots, bottom_slot), loop.fetched)
    trips = trip_count(plan.visits, r)
    slots, saved, _, fetched = layers.spec.repeat(trips, layer, inner)
    return loop._replace(slots=slots, saved=saved, fetched=fetched)


def _visit(layers: _Layers, plan: _Plan, r: Index, loop: _Loop) -> _Loop:
    trips, bottom = trip_count(plan.visits, r), entry_at(plan.bottom, r)
    visits = trips.number if isinstance(trips, TripsOf) else trips

    def layer(k: Index, inner: tuple[Arrays, Carry, Any]) -> tuple[Arrays, Carry, Any]:
        (fetched, cotangent, state), place = inner, visits - 1 - k
        fetched, index = settle(fetched, bottom + place)
        below = (
            jnp.where(place == 0, entry_at(plan.next_first, r), index - 1)
            if fetched
            else 0
        )
        ahead = layers.fetch(state, below)
        ahead, state = read_before_writes(ahead, state, "cuda")
        carry = read(loop.slots, entry_at(plan.bottom_slot, r) + place)
        return ahead, *layers.visit(
            index, bottom, carry, loop.saved, fetched, (cotangent, state)
        )

    fetched, cotangent, state = layers.spec.repeat(
        trips, layer, (loop.fetched, loop.cotangent, loop.state)
    )
    return loop._replace(fetched=fetched, cotangent=cotangent, state=state)


def _visit_first(
    layers: _Layers, checkpoints: Checkpoints, carry_ct: Carry, state: PyTree
) -> tuple[Carry, PyTree]:
    carries, count = checkpoints.first_layers or [], len(layers.numbers)
    plan = _Plan((Run(0, 0, tuple(range(1, count)), count),), 0, False, checkpoints.ran)
    loop = _Loop(
        carries, checkpoints.residuals, layers.fetch(state, count - 1), carry_ct, state
    )
    return _visit(layers, plan, 0, loop)[-2:]
