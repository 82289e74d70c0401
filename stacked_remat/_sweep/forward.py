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
from .gradient import LayerPullback, Perturbed
from .kinds import Kind
from .slots import Carry, Checkpoints, Index, OfKinds, entry_at, trip_count
from .spec import SweepSpec
from .store import empty_stack, on_mesh, read_before_writes, settle, write

Step = Callable[[Index, PyTree], PyTree]


def primal(spec: SweepSpec, init: Carry, xs: OfKinds, shared: OfKinds) -> tuple[Carry, OfKinds]:
    """Run all layers, with nothing kept."""
    if not spec.length or not (spec.pattern or spec.stops or has_host_arrays(xs)):
        return spec.plain(None, init, xs, shared)
    step = _forward_step(spec, xs, shared, [range(spec.length)])
    (carry, ys, *_), _ = spec.run(spec.length, step, _start(spec, init, xs))
    return carry, ys


def _start(spec: SweepSpec, init: Carry, xs: OfKinds) -> PyTree:
    """The first state of a forward loop: carry, outputs, residuals, and what is read ahead from the host."""
    ys = [empty_stack(kind.output_types, spec.rows(kind)) for kind in spec.kinds]
    return init, ys, [], spec.fetch(xs, 0)


def _forward_step(
    spec: SweepSpec,
    xs: OfKinds,
    shared: OfKinds,
    parts: Sequence[range] = (),
    pullbacks: Sequence[LayerPullback] = (),
) -> Step:
    """A step of a forward loop, which keeps the residuals of pullbacks; `parts` as in `SweepSpec.at`."""

    def step(number: Index, state: PyTree) -> PyTree:
        *state, fetched = state
        fetched, number = settle(fetched, number)
        ahead = spec.fetch(xs, jnp.minimum(number + 1, spec.length - 1))

        def run(kind: Kind, row: Index, state: PyTree) -> PyTree:
            (carry, ys, residuals, ahead), own = state, shared[kind.number]
            x = spec.inputs(kind, xs, row, fetched)
            if pullbacks:
                (carry, y), new = pullbacks[kind.number].save((own, carry, x))
                residuals = kind.write(residuals, spec.entry(kind, number, 0), new)
            else:
                carry, y = kind.evaluated.layer(own, carry, x)
            if spec.remat.boundaries_on_host and platform() == "tpu":
                # Or XLA reads while the output is written, and not while the step runs.
                ahead, (y, ys) = read_before_writes(ahead, (y, ys))
            return carry, kind.write(ys, row, y), residuals, ahead

        return spec.at(number, run, (*state, ahead), parts)

    return step


def forward(
    spec: SweepSpec, perturbed: Perturbed, init: Carry, xs: OfKinds, shared: OfKinds
) -> tuple[Carry, OfKinds, Checkpoints]:
    init = [on_mesh(jnp.asarray(leaf)) for leaf in init]  # which may be Python numbers
    first, schedule, on_host = spec.remat.first_layers, spec.remat.schedule, spec.remat.carries == "host"
    state, kept = _start(spec, init, xs), Checkpoints([], ran=jnp.int32(0) if spec.stops else None)
    if first:
        pullbacks = spec.pullbacks(perturbed, spec.remat.first_kept, xs, shared)
        step = _forward_step(spec, xs, shared, [range(first)], pullbacks)
        carries = empty_stack(init, first, on_host and schedule is None)

        def layer(number: Index, loop: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
            *state, carries = loop
            carries = write(carries, number, state[0])
            return *step(number, state), carries

        (carry, ys, _, fetched), residuals = state, spec.room(pullbacks, [range(first)])
        loop = carry, ys, residuals, fetched, carries
        (*state, residuals, fetched, carries), ran = spec.run(first, layer, loop)
        state, kept = (*state, [], fetched), Checkpoints([], None, carries, residuals, ran=ran)
    if schedule is not None:
        step = _forward_step(spec, xs, shared)
        run = _segments_on_host if on_host else _layers_in_slots
        state, kept = run(spec, schedule, lambda k, state: step(k + first, state), state, kept)
    if not spec.length or spec.stops or (on_host and (schedule is None or not first)):
        kept = kept._replace(origin=init)
    carry, ys, *_ = state
    return carry, ys, kept


def _layers_in_slots(
    spec: SweepSpec, schedule: Schedule, step: Step, state: PyTree, kept: Checkpoints
) -> tuple[PyTree, Checkpoints]:
    """Run `step(number, state)` for all layers; its input, `state[0]`, goes to the schedule's slot."""
    slot_of = np.asarray(schedule.forward, np.int32)
    slots = empty_stack(state[0], schedule.slots)

    def layer(slots: Carry, state: PyTree, number: Index, slot: Index) -> tuple[Carry, PyTree]:
        return write(slots, slot, state[0]), step(number, state)

    if not spec.stops:  # a scan over the table: where a loop looks it up, XLA for TPUs holds more
        at = jnp.arange(schedule.length), jnp.asarray(slot_of)
        (slots, state), _ = lax.scan(
            lambda loop, at: (layer(*loop, *at), None), (slots, state), at, unroll=spec.unrolled
        )
        return state, kept._replace(slots=slots)

    def one(number: Index, loop: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        *state, slots = loop  # the carry, which says whether to stop, is first
        slots, state = layer(slots, tuple(state), number, entry_at(slot_of, number))
        return (*state, slots)

    (*state, slots), ran = spec.run(schedule.length, one, (*state, slots))
    return tuple(state), kept._replace(slots=slots, ran=kept.ran + ran)


def _segments_on_host(
    spec: SweepSpec, schedule: Schedule, step: Step, state: PyTree, kept: Checkpoints
) -> tuple[PyTree, Checkpoints]:
    """As `_layers_in_slots`, with each segment's first input on the host and nothing else kept."""
    # A scan stacks what is on the host without a buffer on the device first.
    starts = jnp.asarray(np.cumsum((0, *schedule.segments[:-1])), jnp.int32)
    sizes = np.asarray(schedule.segments, np.int32)

    def segment(state: PyTree, at: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        boundary = to_host(state[0])
        trips = trip_count(sizes, at[1])
        state = spec.repeat(trips, lambda k, state: step(at[0] + k, state), state)
        return state, boundary

    state, boundaries = lax.scan(segment, state, (starts, jnp.arange(len(starts))))
    return state, kept._replace(boundaries=boundaries)
