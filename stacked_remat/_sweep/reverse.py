"""The reverse loop of a checkpointed sweep: it replays segments and calls a visitor for every layer.

Everything here is forward computation; the visitor is what makes it a derivative.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from equinox.internal import unvmap_max
from jax import lax

from .._placement import platform, to_device
from .._schedule import Run, Schedule
from .slots import Arrays, Carry, Checkpoints, TripsOf, entry_at, repeat, trip_count
from .store import empty_stack, read, read_before_writes, settle, write

State: TypeAlias = Any


class ReplayedLayer(NamedTuple):
    """The layer that the reverse loop visits.

    Attributes:
        index: its number in the order of the forward sweep, a traced integer.
        bottom: that of the first layer whose saved arrays are in `saved`.
        carry: its input.
        saved: the buffers that the replay of its segment filled (`Replay.save`), or `None`.
        fetched: what `Replay.fetch` gave for it.
    """

    index: Any
    bottom: Any
    carry: Carry
    saved: Any
    fetched: Arrays


# Called once for every layer, from the last to the first, inside a rolled loop. Takes the layer, the
# cotangent of its output and a state of its own, a tree of arrays of fixed shapes that XLA updates in place;
# returns the cotangent of the layer's input, and the state.
ReplayVisitor: TypeAlias = Callable[[ReplayedLayer, Carry, State], tuple[Carry, State]]


class Replay(NamedTuple):
    """How a segment's layers are run again, given the visitor's state, which may hold the layers.

    Attributes:
        fetch: `(state, index) -> fetched`, what a layer reads from the host. It is called one layer ahead.
        advance: `(state, index, carry, fetched, indices) -> carry`; `indices` are all that are run again so.
        save: `(state, index, bottom, carry, saved, fetched) -> (carry, saved)`, if something is kept for each
            layer of the segment being reversed, whose first layer is `bottom`.
        room: `ranges -> saved`, the buffers that `save` fills, for any one of these ranges of layers.
    """

    fetch: Callable[[State, Any], Arrays]
    advance: Callable[[State, Any, Carry, Arrays, Iterable[int]], Carry]
    save: Callable[[State, Any, Any, Carry, Any, Arrays], tuple[Carry, Any]] | None = None
    room: Callable[[list[range]], Any] = lambda ranges: None


def reverse_sweep(
    replay: Replay,
    visitor: ReplayVisitor,
    checkpoints: Checkpoints,
    cotangent: Carry,
    state: State,
    schedule: Schedule,
    *,
    unroll: int | bool = 1,
) -> tuple[Carry, State]:
    """Visit the layers that ran, from the last to the first: the first input's cotangent and the state.

    Every loop is rolled, whatever the length; trip counts are static where the schedule is uniform.
    """
    boundaries = checkpoints.boundaries
    runs = schedule.runs if boundaries is None else _one_run_per_segment(schedule)
    plan = _Plan(runs, replay.save is not None, checkpoints.ran)
    first: Any = int(plan.first[0])
    if jax.eval_shape(lambda: replay.fetch(state, first)):
        # Without the barrier XLA reads the first layer before the forward sweep, and holds it meanwhile.
        first, cotangent = lax.optimization_barrier((jnp.int32(first), cotangent))
    fetched = replay.fetch(state, first)

    def run(
        r: Any, slots: Carry, saved: Any, fetched: Arrays, cotangent: Carry, state: State
    ) -> tuple[Any, ...]:
        slots, fetched = _advance(replay, slots, fetched, state, plan, r, unroll)
        slots, saved, fetched = _save(replay, slots, saved, fetched, state, plan, r, unroll)
        loop = (fetched, cotangent, state)
        return slots, saved, *_visit(replay, visitor, slots, saved, loop, plan, r, unroll)

    ranges = [range(run.top - run.visits + 1, run.top + 1) for run in runs]
    saved = None if replay.save is None else replay.room(ranges)
    if boundaries is None:
        loop = (checkpoints.slots, saved, fetched, cotangent, state)
        before, left = plan.skipped, len(runs) - plan.skipped
        trips = left if isinstance(left, int) else TripsOf(None, left)
        loop = repeat(trips, lambda r, loop: run(before + r, *loop), loop, unroll is True, len(runs))
        return loop[3:]

    def fetch_and_run(loop: tuple[Any, ...], at: tuple[Any, Carry]) -> tuple[tuple[Any, ...], None]:
        r, boundary = at
        return run(r, write(loop[0], 0, to_device(boundary)), *loop[1:]), None

    slots = empty_stack(checkpoints.first_scheduled(), plan.most_visits)
    loop = (slots, saved, fetched, cotangent, state)
    in_order = jnp.arange(len(runs))[::-1]  # the boundaries are stacked in the order of the forward sweep
    loop, _ = lax.scan(fetch_and_run, loop, (in_order, boundaries), reverse=True)
    return loop[3:]


def _one_run_per_segment(schedule: Schedule) -> tuple[Run, ...]:
    """The runs where boundaries are on the host: each is fetched to slot 0, its segment fills the others."""
    starts = np.cumsum((0, *schedule.segments[:-1]))
    return tuple(
        Run(int(start), 0, tuple(range(1, size)), size)
        for start, size in zip(starts[::-1], schedule.segments[::-1], strict=True)
    )


class _Plan:
    """The runs of a schedule as tables, one entry per run except for `writes`."""

    def __init__(self, runs: tuple[Run, ...], saving: bool, ran: Any):
        def table(entries: Iterable[int]) -> np.ndarray:
            return np.asarray([*entries], np.int32)

        self.start = table(run.start for run in runs)
        self.slot = table(run.slot for run in runs)
        # A saving replay runs the layers to be visited itself, up to the last one.
        self.advances: Any = table(
            max(0, run.replays - run.visits + 1) if saving else run.replays for run in runs
        )
        rows = zip(self.start, self.advances, strict=True)
        self.advanced = [int(start) + k for start, count in rows for k in range(count)]
        self.first_write = table(itertools.accumulate((run.replays for run in runs[:-1]), initial=0))
        self.writes = table([slot for run in runs for slot in run.writes] or [0])
        self.top = table(run.top for run in runs)
        self.visits: Any = table(run.visits for run in runs)
        self.most_advances, self.most_visits = int(self.advances.max()), int(self.visits.max())
        self.bottom = self.top - self.visits + 1
        self.bottom_slot = table(run.top_slot - run.visits + 1 for run in runs)
        # The layers that a run reads first and, in its last visit, fetches for the next run.
        self.first = np.where(self.advances > 0, self.start, self.bottom if saving else self.top)
        self.next_first = np.append(self.first[1:], self.top[-1:])
        self.skipped: Any = 0  # runs before the first of a layer that ran
        if ran is not None:
            ran = unvmap_max(ran)
            self.skipped = jnp.argmax(np.minimum(self.start, self.bottom) < ran).astype(jnp.int32)
            # The first input that a replay keeps; if that layer did not run, the replay is of no use.
            kept = self.start + table(run.writes.count(run.writes[0]) if run.writes else 0 for run in runs)
            left = jnp.clip(ran - 1 - self.start, 0, self.advances)
            self.advances = jnp.where(kept < ran, left, 0)
            self.visits = jnp.clip(ran - self.bottom, 0, self.visits)


def _advance(
    replay: Replay, slots: Carry, fetched: Arrays, state: State, plan: _Plan, r: Any, unroll: int | bool
) -> tuple[Carry, Arrays]:
    def layer(k: Any, loop: tuple[Carry, Carry, Arrays]) -> tuple[Carry, Carry, Arrays]:
        slots, carry, fetched = loop
        fetched, index = settle(fetched, entry_at(plan.start, r) + k)
        ahead = replay.fetch(state, index + 1)
        carry = replay.advance(state, index, carry, fetched, plan.advanced)
        return write(slots, entry_at(plan.writes, entry_at(plan.first_write, r) + k), carry), carry, ahead

    if not plan.most_advances:
        return slots, fetched
    loop = (slots, read(slots, entry_at(plan.slot, r)), fetched)
    slots, _, fetched = repeat(trip_count(plan.advances, r), layer, loop, unroll, plan.most_advances)
    return slots, fetched


def _save(
    replay: Replay,
    slots: Carry,
    saved: Any,
    fetched: Arrays,
    state: State,
    plan: _Plan,
    r: Any,
    unroll: int | bool,
) -> tuple[Carry, Any, Arrays]:
    if replay.save is None:
        return slots, saved, fetched
    save = replay.save
    bottom, bottom_slot, top = (entry_at(t, r) for t in (plan.bottom, plan.bottom_slot, plan.top))

    def layer(k: Any, loop: Any) -> Any:
        slots, saved, carry, fetched = loop
        fetched, index = settle(fetched, bottom + k)
        ahead = replay.fetch(state, jnp.minimum(index + 1, top))
        slots = write(slots, bottom_slot + k, carry)
        carry, saved = save(state, index, bottom, carry, saved, fetched)
        return slots, saved, carry, ahead

    loop = (slots, saved, read(slots, bottom_slot), fetched)
    slots, saved, _, fetched = repeat(trip_count(plan.visits, r), layer, loop, unroll, plan.most_visits)
    return slots, saved, fetched


def _visit(
    replay: Replay,
    visitor: ReplayVisitor,
    slots: Carry,
    saved: Any,
    loop: tuple[Arrays, Carry, State],
    plan: _Plan,
    r: Any,
    unroll: int | bool,
) -> tuple[Arrays, Carry, State]:
    trips, bottom = trip_count(plan.visits, r), entry_at(plan.bottom, r)
    visits = trips.number if isinstance(trips, TripsOf) else trips

    def layer(k: Any, loop: tuple[Arrays, Carry, State]) -> tuple[Arrays, Carry, State]:
        fetched, cotangent, state = loop
        fetched, index = settle(fetched, bottom + visits - 1 - k)
        ahead = replay.fetch(state, jnp.where(k == visits - 1, entry_at(plan.next_first, r), index - 1))
        if platform() == "cuda":
            ahead, state = read_before_writes(ahead, state)
        carry = read(slots, entry_at(plan.bottom_slot, r) + visits - 1 - k)
        return ahead, *visitor(ReplayedLayer(index, bottom, carry, saved, fetched), cotangent, state)

    return repeat(trips, layer, loop, unroll, plan.most_visits)
