"""The two loops of a checkpointed sweep: forward over the layers, and back with a visitor.

Layers are numbered in the order in which the forward sweep runs them. Carries are lists of arrays. Everything here is
forward computation; what makes it a derivative is the visitor.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ._placement import to_device, to_host
from ._schedule import Run, Schedule

__all__ = [
    "Carry",
    "Kept",
    "Layer",
    "Replay",
    "Visitor",
    "forward_sweep",
    "forward_sweep_on_host",
    "reverse_sweep",
]

Carry = list[Array]
State = Any
_T = TypeVar("_T")


class Kept(NamedTuple):
    """Layer inputs that the forward sweep hands to the reverse sweep.

    Attributes:
        slots: one buffer per carry leaf, `(schedule.slots, ...)`: boundaries and the segment being walked share it.
        boundaries: the first input of each segment, `(segments, ...)` on the host; `None` if they are in `slots`.
    """

    slots: Carry
    boundaries: Carry | None

    def first(self) -> Carry:
        """The input of the first layer."""
        if self.boundaries is None:
            return [leaf[0] for leaf in self.slots]
        return to_device([leaf[0] for leaf in self.boundaries])

    def cotangent_of_first(self, cotangent: Carry) -> "Kept":
        """The cotangent that this has as a function of `first()` alone."""

        def place(stacked: Array, first: Array) -> Array | None:
            if first.dtype == jax.dtypes.float0:
                return None
            return jnp.zeros_like(stacked).at[0].set(first)

        if self.boundaries is None:
            return Kept([place(*pair) for pair in zip(self.slots, cotangent, strict=True)], None)
        boundaries = to_device(self.boundaries)
        return Kept([], to_host([place(*pair) for pair in zip(boundaries, cotangent, strict=True)]))


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

    The default one writes gradients (`_sweep_gradient.py`). Others may fetch the layer's weights from elsewhere, update them on the
    spot, or gather statistics: `state` is theirs, a pytree of arrays of fixed shapes that XLA updates in place.
    """

    def __call__(self, layer: Layer, cotangent: Carry, state: State) -> tuple[Carry, State]:
        """Takes the cotangent of the layer's output carry, returns that of its input carry."""
        ...


class Replay(NamedTuple):
    """How a segment's layers are run again.

    Attributes:
        advance: `(index, carry) -> carry`.
        save: `(index, carry) -> (carry, saved)`, if something is to be kept for each layer of the segment being
            walked; the saved arrays take one buffer with room for the longest walk.
    """

    advance: Callable[[Any, Carry], Carry]
    save: Callable[[Any, Carry], tuple[Carry, Any]] | None = None


def forward_sweep(
    step: Callable[[Any, Carry], tuple[Carry, _T]],
    carry: Carry,
    schedule: Schedule,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Carry, _T, Kept]:
    """Runs all layers, each writing its input to the slot that the schedule names.

    Args:
        step: `(index, carry) -> (carry, output)`.
        carry: the input of the first layer.
        schedule: the cut.
        reverse: whether the outputs are stacked in the opposite order, as `lax.scan` does.
        unroll: layers per loop iteration.

    Returns:
        The final carry, the stacked outputs, the kept carries.
    """

    def visit(state: tuple[Carry, Carry], at: tuple[Array, Array]) -> tuple[tuple[Carry, Carry], _T]:
        slots, carry = state
        index, slot = at
        slots = _write(slots, slot, carry)
        carry, output = step(index, carry)
        return (slots, carry), output

    order = np.arange(schedule.length, dtype=np.int32)
    table = np.asarray(schedule.forward, np.int32)
    if reverse:
        order, table = order[::-1], table[::-1]
    start = (_room(carry, schedule.slots), carry)
    (slots, carry), outputs = lax.scan(visit, start, (order, table), reverse=reverse, unroll=unroll)
    return carry, outputs, Kept(slots, None)


def forward_sweep_on_host(
    step: Callable[[Any, Carry], tuple[Carry, _T]],
    carry: Carry,
    outputs: _T,
    schedule: Schedule,
    *,
    write_output: Callable[[Any, _T, _T], _T],
    unroll: int | bool = 1,
) -> tuple[Carry, _T, Kept]:
    """As `forward_sweep`, but each segment's first input goes to a buffer on the host and nothing else is kept.

    `outputs` are the buffers that `write_output(index, outputs, output)` fills.
    """
    # A scan stacks what is on the host without making room on the device first.
    starts = np.cumsum((0, *schedule.segments[:-1]), dtype=np.int32)
    sizes = np.asarray(schedule.segments, np.int32)

    def segment(state: tuple[Carry, _T], at: tuple[Array, Array]) -> tuple[tuple[Carry, _T], Carry]:
        boundary = to_host(state[0])

        def layer(k: Any, state: tuple[Carry, _T]) -> tuple[Carry, _T]:
            carry, outputs = state
            index = at[0] + k
            carry, output = step(index, carry)
            return carry, write_output(index, outputs, output)

        trips = _trips(sizes, at[1])
        return _repeat(trips, layer, state, unroll, max(schedule.segments)), boundary

    (carry, outputs), boundaries = lax.scan(segment, (carry, outputs), (starts, np.arange(len(starts))))
    return carry, outputs, Kept([], boundaries)


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
    """Visits the layers from the last to the first.

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
        return _reverse_from_host(replay, visitor, kept.boundaries, cotangent, state, schedule, unroll)
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
    _, _, cotangent, state = _repeat(len(runs), run, state, unroll is True, len(runs))
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
        carry = replay.advance(_at(plan.start, r) + k, carry)
        return _write(slots, _at(plan.writes, _at(plan.first_write, r) + k), carry), carry

    carry = _read(slots, _at(plan.slot, r))
    most = int(plan.advances.max())
    return _repeat(_trips(plan.advances, r), layer, (slots, carry), unroll, most)[0] if most else slots


def _save(
    replay: Replay, slots: Carry, saved: Any, plan: _Plan, r: Any, unroll: int | bool
) -> tuple[Carry, Any]:
    if replay.save is None:
        return slots, saved
    save = replay.save
    visits = _at(plan.visits, r)
    bottom, bottom_slot = _at(plan.top, r) - visits + 1, _at(plan.top_slot, r) - visits + 1

    def layer(k: Any, state: Any) -> Any:
        slots, saved, carry = state
        slots = _write(slots, bottom_slot + k, carry)
        carry, new = save(bottom + k, carry)
        return slots, _write(saved, k, new), carry

    state = (slots, saved, _read(slots, bottom_slot))
    slots, saved, _ = _repeat(_trips(plan.visits, r), layer, state, unroll, plan.most_visits)
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
        held = None if saved is None else _read(saved, _at(plan.visits, r) - 1 - k)
        at = Layer(_at(plan.top, r) - k, _read(slots, _at(plan.top_slot, r) - k), held)
        return visitor(at, cotangent, visited)

    return _repeat(_trips(plan.visits, r), layer, (cotangent, state), unroll, plan.most_visits)


def _reverse_from_host(
    replay: Replay,
    visitor: Visitor,
    boundaries: Carry,
    cotangent: Carry,
    state: State,
    schedule: Schedule,
    unroll: int | bool,
) -> tuple[Carry, State]:
    """One run per segment: its boundary is fetched to slot 0, its own inputs fill the slots above."""
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
        slots = _write(slots, 0, to_device(boundary))
        slots = _advance(replay, slots, plan, r, unroll)
        slots, saved = _save(replay, slots, saved, plan, r, unroll)
        cotangent, visited = _visit(visitor, slots, saved, cotangent, visited, plan, r, unroll)
        return (slots, saved, cotangent, visited), None

    slots = [jnp.zeros((most, *leaf.shape[1:]), leaf.dtype) for leaf in boundaries]
    state = (slots, _saved_room(replay, slots, most), cotangent, state)
    (_, _, cotangent, state), _ = lax.scan(run, state, (np.arange(len(runs)), boundaries), reverse=True)
    return cotangent, state


def _saved_room(replay: Replay, slots: Carry, size: int) -> Any:
    if replay.save is None:
        return None
    _, saved = jax.eval_shape(replay.save, 0, _read(slots, 0))
    return jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), saved)


def _repeat(trips: Any, body: Callable[[Any, _T], _T], state: _T, unroll: int | bool, most: int) -> _T:
    """`for k in range(trips): state = body(k, state)`, with `trips` static or traced and at most `most`."""
    if unroll is True and not isinstance(trips, jax.Array):
        for k in range(trips):
            state = body(k, state)
        return state

    def one(k: Any, state: _T) -> _T:
        return body(lax.convert_element_type(k, jnp.int32), state)

    if isinstance(trips, int):
        return lax.fori_loop(0, trips, one, state, unroll=max(1, min(int(unroll), trips)))
    step = most if unroll is True else max(1, min(int(unroll), most))
    if step == 1:
        return lax.fori_loop(0, trips, one, state)

    def several(block: Any, state: _T) -> _T:
        for k in range(step):
            state = one(block * step + k, state)
        return state

    state = lax.fori_loop(0, trips // step, several, state)
    return lax.fori_loop(trips // step * step, trips, one, state)


def _trips(table: np.ndarray, r: Any) -> Any:
    """A trip count: static if all runs agree."""
    return int(table[0]) if (table == table[0]).all() else _at(table, r)


def _at(table: np.ndarray, r: Any) -> Any:
    """An entry of a table: static if the index is."""
    return int(table[r]) if isinstance(r, int) else jnp.asarray(table)[r]


def _room(carry: Carry, size: int) -> Carry:
    return [jnp.broadcast_to(leaf, (size, *leaf.shape)) for leaf in carry]


def _read(stacked: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), stacked)


def _write(stacked: Any, index: Any, entry: Any) -> Any:
    return jax.tree.map(
        lambda leaf, new: lax.dynamic_update_index_in_dim(leaf, new, index, 0), stacked, entry
    )
