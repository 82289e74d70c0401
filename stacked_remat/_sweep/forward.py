"""The forward loops of a checkpointed sweep: they run the layers and keep what the schedule says.

Layers are numbered in the order in which they run.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._placement import has_host_arrays, platform, to_host
from .._schedule import Schedule
from .._static import PyTree
from .gradient import Perturbed
from .kinds import Kind
from .slots import (
    Arrays,
    Carry,
    Checkpoints,
    FirstLayersSaved,
    Index,
    entry_at,
    repeat,
    run_layers,
    trip_count,
)
from .spec import SweepSpec
from .store import empty_stack, on_mesh, read_before_writes, settle, write


def primal(
    spec: SweepSpec, init: Carry, xs: list[Arrays], shared: list[Arrays]
) -> tuple[Carry, list[Arrays]]:
    """Run all layers, with nothing kept."""
    if not spec.length or not (spec.pattern or spec.stops or has_host_arrays(xs)):
        return spec.plain(None, init, xs, shared)
    state = (init, _outputs(spec), spec.fetch(xs, 0))
    step = _forward_step(spec, xs, shared, [range(spec.length)])
    (carry, ys, _), _ = run_layers(spec.length, step, state, spec.unroll, spec.stops)
    return carry, ys


def _outputs(spec: SweepSpec) -> list[Arrays]:
    return [empty_stack(kind.output_types, spec.rows(kind)) for kind in spec.kinds]


def _forward_step(
    spec: SweepSpec, xs: list[Arrays], shared: list[Arrays], parts: Sequence[range] = ()
) -> Callable[[PyTree, PyTree], PyTree]:
    """A step of a forward loop on `(carry, outputs, what was read ahead)`; `parts` as in `SweepSpec.at`."""

    def step(number: Index, state: PyTree) -> PyTree:
        carry, ys, fetched = state
        fetched, number = settle(fetched, number)
        ahead = spec.fetch(xs, jnp.minimum(number + 1, spec.length - 1))

        def run(kind: Kind, row: Index, state: PyTree) -> PyTree:
            carry, ys, ahead = state
            x = spec.inputs(kind, xs, row, fetched)
            carry, y = kind.evaluated.layer(shared[kind.number], carry, x)
            if spec.remat.boundaries_on_host and platform() == "tpu":
                # Or XLA reads while the output is written, and not while the step runs.
                ahead, (y, ys) = read_before_writes(ahead, (y, ys))
            return carry, kind.write(ys, row, y), ahead

        return spec.at(number, run, (carry, ys, ahead), parts)

    return step


def forward(
    spec: SweepSpec, perturbed: Perturbed, init: Carry, xs: list[Arrays], shared: list[Arrays]
) -> tuple[Carry, list[Arrays], Checkpoints]:
    """Sweep forward."""
    init = [on_mesh(jnp.asarray(leaf)) for leaf in init]  # which may be Python numbers
    carry, ys, saved = init, _outputs(spec), None
    if spec.remat.first_layers:
        carry, ys, saved = _forward_first(spec, perturbed, carry, ys, xs, shared)
    (carry, ys), checkpoints = _forward_scheduled(spec, carry, ys, xs, shared)
    if saved is not None:
        checkpoints = checkpoints._replace(first_layers=saved, origin=init if _on_host(spec) else None)
    return carry, ys, checkpoints


def _on_host(spec: SweepSpec) -> bool:
    """Whether the inputs of the first layers are kept on the host: where no others are cut."""
    return spec.remat.carries == "host" and spec.remat.schedule is None


def _forward_first(
    spec: SweepSpec,
    perturbed: Perturbed,
    carry: Carry,
    ys: list[Arrays],
    xs: list[Arrays],
    shared: list[Arrays],
) -> tuple[Carry, list[Arrays], FirstLayersSaved]:
    length = spec.remat.first_layers
    pullbacks = spec.pullbacks(perturbed, spec.remat.first_kept, xs, shared)
    residuals = spec.room(pullbacks, [range(length)])

    def layer(number: Index, state: PyTree) -> PyTree:
        carry, ys, saved = state
        carries = write(saved.carries, number, carry)

        def run(kind: Kind, row: Index, state: PyTree) -> PyTree:
            carry, ys, residuals = state
            x = spec.inputs(kind, xs, row)
            (carry, y), new = pullbacks[kind.number].save(shared[kind.number], carry, x)
            return carry, kind.write(ys, row, y), kind.write(residuals, spec.entry(kind, number, 0), new)

        carry, ys, residuals = spec.at(number, run, (carry, ys, saved.residuals), [range(length)])
        return carry, ys, FirstLayersSaved(carries, residuals)

    state = (carry, ys, FirstLayersSaved(empty_stack(carry, length, _on_host(spec)), residuals))
    (carry, ys, saved), ran = run_layers(length, layer, state, spec.unroll, spec.stops)
    return carry, ys, saved._replace(ran=ran)


def _forward_scheduled(
    spec: SweepSpec, carry: Carry, ys: list[Arrays], xs: list[Arrays], shared: list[Arrays]
) -> tuple[tuple[Carry, list[Arrays]], Checkpoints]:
    first, schedule = spec.remat.first_layers, spec.remat.schedule
    if schedule is None:
        return (carry, ys), Checkpoints([], None, origin=carry)
    run = _forward_step(spec, xs, shared)
    loop = _segments_on_host if spec.remat.boundaries_on_host else _layers_in_slots
    state = (carry, ys, spec.fetch(xs, first))
    (carry, ys, _), checkpoints = loop(spec, schedule, lambda k, state: run(k + first, state), state)
    return (carry, ys), checkpoints


def _layers_in_slots(
    spec: SweepSpec, schedule: Schedule, step: Callable[[Index, PyTree], PyTree], state: PyTree
) -> tuple[PyTree, Checkpoints]:
    """Run `step(number, state)` for all layers; its input, `state[0]`, goes to the schedule's slot."""
    slot_of = np.asarray(schedule.forward, np.int32)
    slots = empty_stack(state[0], schedule.slots)

    def layer(slots: Carry, state: PyTree, number: Index, slot: Index) -> tuple[Carry, PyTree]:
        return write(slots, slot, state[0]), step(number, state)

    if not spec.stops:  # a scan over the table: where a loop looks it up, XLA for TPUs holds more
        at = jnp.arange(schedule.length), jnp.asarray(slot_of)
        (slots, state), _ = lax.scan(
            lambda loop, at: (layer(*loop, *at), None), (slots, state), at, unroll=spec.unroll
        )
        return state, Checkpoints(slots, None)

    def one(number: Index, loop: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        *state, slots = loop  # the carry, which says whether to stop, is first
        slots, state = layer(slots, tuple(state), number, entry_at(slot_of, number))
        return (*state, slots)

    (*state, slots), ran = run_layers(schedule.length, one, (*state, slots), spec.unroll, True)
    return tuple(state), Checkpoints(slots, None, ran=ran)


def _segments_on_host(
    spec: SweepSpec, schedule: Schedule, step: Callable[[Index, PyTree], PyTree], state: PyTree
) -> tuple[PyTree, Checkpoints]:
    """As `_layers_in_slots`, with each segment's first input on the host and nothing else kept."""
    # A scan stacks what is on the host without a buffer on the device first.
    starts = jnp.asarray(np.cumsum((0, *schedule.segments[:-1])), jnp.int32)
    sizes = np.asarray(schedule.segments, np.int32)

    def segment(state: PyTree, at: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        boundary = to_host(state[0])
        trips = trip_count(sizes, at[1])
        state = repeat(trips, lambda k, state: step(at[0] + k, state), state, spec.unroll, max(sizes))
        return state, boundary

    final, boundaries = lax.scan(segment, state, (starts, jnp.arange(len(starts))))
    return final, Checkpoints([], boundaries, origin=state[0])
