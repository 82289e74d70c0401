"""The reverse loop of a checkpointed sweep: it replays segments and calls a visitor for every layer.

Everything here is forward computation; the visitor is what makes it a derivative.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._placement import to_device
from .._schedule import Run, Schedule
from .slots import Carry, Checkpoints, entry_at, repeat, trip_count
from .store import empty_stack, read, write

State: TypeAlias = Any


class ReplayedLayer(NamedTuple):
    """The layer that the reverse loop visits.

    Attributes:
        index: its number in the order of the forward sweep, a traced integer.
        carry: its input.
        saved: what the replay of its segment kept (`Replay.save`), or `None`.
    """

    index: Any
    carry: Carry
    saved: Any


# Called once for every layer, from the last to the first, inside a rolled loop. Takes the layer, the
# cotangent of its output and a state of its own, a tree of arrays of fixed shapes that XLA updates in place;
# returns the cotangent of the layer's input, and the state.
ReplayVisitor: TypeAlias = Callable[[ReplayedLayer, Carry, State], tuple[Carry, State]]


class Replay(NamedTuple):
    """How a segment's layers are run again, given the visitor's state, which may hold the layers.

    Attributes:
        advance: `(state, index, carry) -> carry`.
        save: `(state, index, carry) -> (carry, saved)`, if something is kept for each layer of the segment
            being reversed; the saved arrays take one buffer, as long as the longest run of visits.
    """

    advance: Callable[[State, Any, Carry], Carry]
    save: Callable[[State, Any, Carry], tuple[Carry, Any]] | None = None


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
    """Visit the layers from the last to the first.

    Every loop is rolled, whatever the length; trip counts are static where the schedule is uniform.

    Args:
        replay: how layers are run again.
        visitor: called for each layer.
        checkpoints: the carries that the forward sweep kept.
        cotangent: of the final carry.
        state: the visitor's.
        schedule: the cut that the forward sweep used.
        unroll: layers per iteration of the innermost loops.

    Returns:
        The cotangent of the first layer's input, and the visitor's state.
    """
    boundaries = checkpoints.boundaries
    runs = schedule.runs if boundaries is None else _one_run_per_segment(schedule)
    plan = _Plan(runs, saving=replay.save is not None)

    def run(r: Any, slots: Carry, saved: Any, cotangent: Carry, state: State) -> tuple[Any, ...]:
        slots = _advance(replay, slots, state, plan, r, unroll)
        slots, saved = _save(replay, slots, saved, state, plan, r, unroll)
        return slots, saved, *_visit(visitor, slots, saved, cotangent, state, plan, r, unroll)

    if boundaries is None:
        loop = (checkpoints.slots, _empty_saved(replay, state, checkpoints.slots, plan), cotangent, state)
        loop = repeat(len(runs), lambda r, loop: run(r, *loop), loop, unroll is True, len(runs))
        return loop[2:]

    def fetch_and_run(loop: tuple[Any, ...], at: tuple[Any, Carry]) -> tuple[tuple[Any, ...], None]:
        r, boundary = at
        return run(r, write(loop[0], 0, to_device(boundary)), *loop[1:]), None

    slots = empty_stack(checkpoints.first_scheduled(), plan.most_visits)
    loop = (slots, _empty_saved(replay, state, slots, plan), cotangent, state)
    loop, _ = lax.scan(fetch_and_run, loop, (jnp.arange(len(runs)), boundaries), reverse=True)
    return loop[2:]


def _one_run_per_segment(schedule: Schedule) -> tuple[Run, ...]:
    """The runs where boundaries are on the host: each is fetched to slot 0, its segment fills the others."""
    starts = np.cumsum((0, *schedule.segments[:-1]))
    return tuple(
        Run(int(start), 0, tuple(range(1, size)), size)
        for start, size in zip(starts, schedule.segments, strict=True)
    )


class _Plan:
    """The runs of a schedule as tables, one entry per run except for `writes`."""

    def __init__(self, runs: tuple[Run, ...], saving: bool):
        def table(entries: Iterable[int]) -> np.ndarray:
            return np.asarray([*entries], np.int32)

        self.start = table(run.start for run in runs)
        self.slot = table(run.slot for run in runs)
        # A saving replay runs the layers to be visited itself, up to the last one.
        self.advances = table(max(0, run.replays - run.visits + 1) if saving else run.replays for run in runs)
        self.first_write = table(itertools.accumulate((run.replays for run in runs[:-1]), initial=0))
        self.writes = table([slot for run in runs for slot in run.writes] or [0])
        self.top = table(run.top for run in runs)
        self.top_slot = table(run.top_slot for run in runs)
        self.visits = table(run.visits for run in runs)
        self.most_visits = int(self.visits.max())


def _advance(replay: Replay, slots: Carry, state: State, plan: _Plan, r: Any, unroll: int | bool) -> Carry:
    def layer(k: Any, loop: tuple[Carry, Carry]) -> tuple[Carry, Carry]:
        slots, carry = loop
        carry = replay.advance(state, entry_at(plan.start, r) + k, carry)
        return write(slots, entry_at(plan.writes, entry_at(plan.first_write, r) + k), carry), carry

    carry = read(slots, entry_at(plan.slot, r))
    most = int(plan.advances.max())
    return repeat(trip_count(plan.advances, r), layer, (slots, carry), unroll, most)[0] if most else slots


def _save(
    replay: Replay, slots: Carry, saved: Any, state: State, plan: _Plan, r: Any, unroll: int | bool
) -> tuple[Carry, Any]:
    if replay.save is None:
        return slots, saved
    save = replay.save
    visits = entry_at(plan.visits, r)
    bottom, bottom_slot = entry_at(plan.top, r) - visits + 1, entry_at(plan.top_slot, r) - visits + 1

    def layer(k: Any, loop: Any) -> Any:
        slots, saved, carry = loop
        slots = write(slots, bottom_slot + k, carry)
        carry, new = save(state, bottom + k, carry)
        return slots, write(saved, k, new), carry

    loop = (slots, saved, read(slots, bottom_slot))
    slots, saved, _ = repeat(trip_count(plan.visits, r), layer, loop, unroll, plan.most_visits)
    return slots, saved


def _visit(
    visitor: ReplayVisitor,
    slots: Carry,
    saved: Any,
    cotangent: Carry,
    state: State,
    plan: _Plan,
    r: Any,
    unroll: int | bool,
) -> tuple[Carry, State]:
    def layer(k: Any, loop: tuple[Carry, State]) -> tuple[Carry, State]:
        kept = None if saved is None else read(saved, entry_at(plan.visits, r) - 1 - k)
        carry = read(slots, entry_at(plan.top_slot, r) - k)
        return visitor(ReplayedLayer(entry_at(plan.top, r) - k, carry, kept), *loop)

    return repeat(trip_count(plan.visits, r), layer, (cotangent, state), unroll, plan.most_visits)


def _empty_saved(replay: Replay, state: State, slots: Carry, plan: _Plan) -> Any:
    if replay.save is None:
        return None
    save = replay.save
    saved = jax.eval_shape(lambda slots: save(state, 0, read(slots, 0))[1], slots)
    return empty_stack(saved, plan.most_visits)
