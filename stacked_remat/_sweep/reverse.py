"""The reverse loop of a checkpointed sweep: it replays segments and calls a visitor for every layer.

Everything here is forward computation; what makes it a derivative is the visitor.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._placement import to_device
from .._schedule import Run, Schedule
from .slots import Carry, Kept, entry_at, read, repeat, room, trip_count, write

State = Any


class Layer(NamedTuple):
    """What a visitor is told about the layer that it visits.

    Attributes:
        index: its number in the order of the forward sweep, a traced integer.
        carry: its input.
        saved: what the replay of its segment kept for it (`Replay.save`), or `None`.
    """

    index: Any
    carry: Carry
    saved: Any


class Visitor(Protocol):
    """Called for every layer, from the last to the first, once each, inside a rolled loop.

    The default one writes gradients (`_sweep_gradient.py`). Others may fetch the layer's weights from
    elsewhere, update them on the spot, or gather statistics: `state` is theirs, a pytree of arrays of fixed
    shapes that XLA updates in place.
    """

    def __call__(self, layer: Layer, cotangent: Carry, state: State) -> tuple[Carry, State]:
        """Turn the cotangent of the layer's output carry into that of its input carry."""
        ...


class Replay(NamedTuple):
    """How a segment's layers are run again.

    Attributes:
        advance: `(index, carry) -> carry`.
        save: `(index, carry) -> (carry, saved)`, if something is to be kept for each layer of the segment
            being walked; the saved arrays take one buffer with room for the longest walk.
    """

    advance: Callable[[Any, Carry], Carry]
    save: Callable[[Any, Carry], tuple[Carry, Any]] | None = None


def reverse_sweep(
    replay: Replay,
    visitor: Visitor,
    kept: Kept,
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
        visitor: what is done at each layer.
        kept: the carries that the forward sweep kept.
        cotangent: of the final carry.
        state: the visitor's.
        schedule: the cut that the forward sweep used.
        unroll: layers per iteration of the innermost loops.

    Returns:
        The cotangent of the first layer's input, and the visitor's state.
    """
    if kept.boundaries is not None:
        return _reverse_from_host(replay, visitor, kept, cotangent, state, schedule, unroll)
    runs = schedule.runs
    plan = _Plan.of(runs, saving=replay.save is not None)
    saved = _saved_room(replay, kept.slots, plan.most_visits)

    def run(r: Any, state: Any) -> Any:
        slots, saved, cotangent, visited = state
        slots = _advance(replay, slots, plan, r, unroll)
        slots, saved = _save(replay, slots, saved, plan, r, unroll)
        cotangent, visited = _visit(visitor, slots, saved, cotangent, visited, plan, r, unroll)
        return slots, saved, cotangent, visited

    state = (kept.slots, saved, cotangent, state)
    _, _, cotangent, state = repeat(len(runs), run, state, unroll is True, len(runs))
    return cotangent, state


class _Plan(NamedTuple):
    """The runs of a schedule as tables, one entry per run save for `writes`."""

    start: np.ndarray
    slot: np.ndarray
    advances: np.ndarray
    first_write: np.ndarray
    writes: np.ndarray
    top: np.ndarray
    top_slot: np.ndarray
    visits: np.ndarray

    @classmethod
    def of(cls, runs: tuple[Run, ...], saving: bool) -> "_Plan":
        # A saving replay runs the layers to be visited itself, up to the last one.
        advances = [max(0, run.replays - run.visits + 1) if saving else run.replays for run in runs]
        writes = [slot for run in runs for slot in run.writes]
        columns = (
            [run.start for run in runs],
            [run.slot for run in runs],
            advances,
            np.cumsum([0, *(run.replays for run in runs[:-1])]),
            writes or [0],
            [run.top for run in runs],
            [run.top_slot for run in runs],
            [run.visits for run in runs],
        )
        return cls(*(np.asarray(column, np.int32) for column in columns))

    @property
    def most_visits(self) -> int:
        return int(self.visits.max())


def _advance(replay: Replay, slots: Carry, plan: _Plan, r: Any, unroll: int | bool) -> Carry:
    def layer(k: Any, state: tuple[Carry, Carry]) -> tuple[Carry, Carry]:
        slots, carry = state
        carry = replay.advance(entry_at(plan.start, r) + k, carry)
        return write(slots, entry_at(plan.writes, entry_at(plan.first_write, r) + k), carry), carry

    carry = read(slots, entry_at(plan.slot, r))
    most = int(plan.advances.max())
    return repeat(trip_count(plan.advances, r), layer, (slots, carry), unroll, most)[0] if most else slots


def _save(
    replay: Replay, slots: Carry, saved: Any, plan: _Plan, r: Any, unroll: int | bool
) -> tuple[Carry, Any]:
    if replay.save is None:
        return slots, saved
    save = replay.save
    visits = entry_at(plan.visits, r)
    bottom, bottom_slot = entry_at(plan.top, r) - visits + 1, entry_at(plan.top_slot, r) - visits + 1

    def layer(k: Any, state: Any) -> Any:
        slots, saved, carry = state
        slots = write(slots, bottom_slot + k, carry)
        carry, new = save(bottom + k, carry)
        return slots, write(saved, k, new), carry

    state = (slots, saved, read(slots, bottom_slot))
    slots, saved, _ = repeat(trip_count(plan.visits, r), layer, state, unroll, plan.most_visits)
    return slots, saved


def _visit(
    visitor: Visitor,
    slots: Carry,
    saved: Any,
    cotangent: Carry,
    state: State,
    plan: _Plan,
    r: Any,
    unroll: int | bool,
) -> tuple[Carry, State]:
    def layer(k: Any, state: Any) -> Any:
        cotangent, visited = state
        held = None if saved is None else read(saved, entry_at(plan.visits, r) - 1 - k)
        at = Layer(entry_at(plan.top, r) - k, read(slots, entry_at(plan.top_slot, r) - k), held)
        return visitor(at, cotangent, visited)

    return repeat(trip_count(plan.visits, r), layer, (cotangent, state), unroll, plan.most_visits)


def _reverse_from_host(
    replay: Replay,
    visitor: Visitor,
    kept: Kept,
    cotangent: Carry,
    state: State,
    schedule: Schedule,
    unroll: int | bool,
) -> tuple[Carry, State]:
    """Make one run per segment: its boundary is fetched to slot 0, its own inputs fill the slots above."""
    starts = np.cumsum((0, *schedule.segments[:-1]))
    runs = tuple(
        Run(int(start), 0, tuple(range(1, size)), size)
        for start, size in zip(starts, schedule.segments, strict=True)
    )
    plan = _Plan.of(runs, saving=replay.save is not None)
    most = plan.most_visits

    def run(state: Any, at: tuple[Any, Carry]) -> tuple[Any, None]:
        slots, saved, cotangent, visited = state
        r, boundary = at
        slots = write(slots, 0, to_device(boundary))
        slots = _advance(replay, slots, plan, r, unroll)
        slots, saved = _save(replay, slots, saved, plan, r, unroll)
        cotangent, visited = _visit(visitor, slots, saved, cotangent, visited, plan, r, unroll)
        return (slots, saved, cotangent, visited), None

    slots, boundaries = room(kept.first_scheduled(), most), kept.boundaries or []
    state = (slots, _saved_room(replay, slots, most), cotangent, state)
    (_, _, cotangent, state), _ = lax.scan(run, state, (jnp.arange(len(runs)), boundaries), reverse=True)
    return cotangent, state


def _saved_room(replay: Replay, slots: Carry, size: int) -> Any:
    if replay.save is None:
        return None
    save = replay.save
    return room(jax.eval_shape(lambda slots: save(0, read(slots, 0))[1], slots), size)
