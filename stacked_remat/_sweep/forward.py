"""The forward loops of a checkpointed sweep: run the layers, keep what the policy says.

Run alone (`primal`), a sweep is a scan over layers. Before a reverse sweep (`forward`)
it also leaves checkpoints, from which `reverse.py` makes every layer's input again:

    layers   0 1 2 | 3 4 5 6 7 8 9
             first |  schedule
    kept     every | the inputs that
             input | `Schedule.forward` leaves

- of the *first layers* (`Remat.first_layers`) each input, and residuals;
- of the layers under the *schedule* the inputs that stay in its slots, or, offloaded,
  the first input of each segment on the host.

An input stays if no later layer writes to its slot. There are two ways to keep just
these, and which one is faster depends on the platform (`_run_scheduled`): a loop over
layers that writes every input, most of them to be overwritten, or a loop over stretches
from one input that stays to the next (`_by_segments`) with a loop over layers in it,
that writes at the start of each. Stretches need not be segments of the schedule.

Weights are read from their stacks by layer number, within the innermost loop: no
segment's weights are copied. Stacks on the host are read one layer ahead, so that the
transfer overlaps the layer that runs. Layers are numbered as they run; `primitive.py`
calls this file.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._placement import has_host_arrays, platform, to_host
from .._schedule import Schedule
from .gradient import LayerPullback, Perturbed
from .kinds import Kind
from .slots import (
    Arrays,
    Carry,
    Checkpoints,
    OfKinds,
    entry_at,
    slots_for,
    trip_count,
)
from .spec import SweepSpec
from .store import (
    Index,
    empty_stack,
    on_mesh,
    read_before_writes,
    settle,
    with_tangents,
    write,
)


class ForwardState(NamedTuple):
    """The state of a loop over layers."""

    # The input of the layer that runs next.
    carry: Carry
    # Outputs of each kind, stacked over all layers of the kind; zeros for those that
    # are still to run.
    ys: OfKinds
    # Saved residuals of each kind, stacked over the first layers; [] where none are
    # saved.
    residuals: OfKinds
    # What the layer that runs next reads of stacks on the host.
    fetched: Arrays


# Runs the layer that a loop over layers reaches in its trip `k`.
Step: TypeAlias = Callable[[Index, ForwardState], ForwardState]


def primal(
    spec: SweepSpec, init: Carry, xs: OfKinds, shared: OfKinds
) -> tuple[Carry, OfKinds]:
    """Run all layers and keep nothing: the last carry, and the outputs of each kind."""
    if not spec.length or not (spec.pattern or spec.stops or has_host_arrays(xs)):
        return spec.plain(None, init, xs, shared)
    step = _forward_step(spec, xs, shared, [range(spec.length)])
    state, _ = spec.run(spec.length, step, _start(spec, init, xs))
    return state.carry, state.ys


def _start(spec: SweepSpec, init: Carry, xs: OfKinds) -> ForwardState:
    """The state before the first layer."""
    ys = []
    for kind in spec.kinds:
        ys.append(empty_stack(kind.output_types, spec.rows(kind)))
    return ForwardState(init, ys, [], spec.fetch(xs, 0))


def _forward_step(
    spec: SweepSpec,
    xs: OfKinds,
    shared: OfKinds,
    parts: Sequence[range] = (),
    pullbacks: Sequence[LayerPullback] = (),
    start: int = 0,
) -> Step:
    """The step of a loop over the layers from `start` on, numbered from there.

    With `pullbacks`, one for each kind, it saves their residuals. `parts` as in
    `SweepSpec.at`.
    """

    def step(k: Index, state: ForwardState) -> ForwardState:
        fetched, number = settle(state.fetched, k + start)
        # The last layer reads itself again: a loop's carry has one shape.
        ahead = fetched and spec.fetch(xs, jnp.minimum(number + 1, spec.length - 1))

        def run(kind: Kind, row: Index, state: ForwardState) -> ForwardState:
            ahead, ys, residuals = state.fetched, state.ys, state.residuals
            inputs = (
                shared[kind.number],
                state.carry,
                spec.inputs(kind, xs, row, fetched),
            )
            if pullbacks:
                (carry, y), saved = pullbacks[kind.number].save(inputs)
                residuals = kind.write(residuals, spec.entry(kind, number, 0), saved)
            else:
                carry, y = kind.values(*inputs)
            if spec.remat.boundaries_on_host:
                # Or XLA reads while the output is written, and not while the step runs.
                ahead, (y, ys) = read_before_writes(ahead, (y, ys), "tpu")
            return ForwardState(carry, kind.write(ys, row, y), residuals, ahead)

        return spec.at(number, run, state._replace(fetched=ahead), parts)

    return step


def forward(
    spec: SweepSpec, perturbed: Perturbed, init: Carry, xs: OfKinds, shared: OfKinds
) -> tuple[Carry, OfKinds, Checkpoints]:
    """Run all layers, and keep the policy's checkpoints for the reverse sweep."""
    remat = spec.remat
    # What a user gives may be Python numbers.
    init = [on_mesh(jnp.asarray(leaf)) for leaf in init]
    state = _start(spec, init, xs)
    checkpoints = Checkpoints([], ran=jnp.int32(0) if spec.stops else None)
    if remat.first_layers:
        state, checkpoints = _run_first(spec, perturbed, xs, shared, state, checkpoints)
    if remat.schedule is not None:
        step = _forward_step(spec, xs, shared, start=remat.first_layers)
        if remat.boundaries_on_host:
            starts = np.cumsum((0, *remat.schedule.segments[:-1]), dtype=np.int32)
            state, checkpoints = _by_segments(spec, step, starts, state, checkpoints)
        else:
            pullbacks = spec.pullbacks(perturbed, remat.kept, xs, shared)
            state, checkpoints = _run_scheduled(
                spec, remat.schedule, step, pullbacks, state, checkpoints
            )
    # The first input is also in a slot, or the first of `first_layers`, unless these
    # are empty or on the host. Layers that stop may have run none that writes it.
    only_on_host = remat.carries == "host" and not (
        remat.schedule is not None and remat.first_layers
    )
    if not spec.length or spec.stops or only_on_host:
        checkpoints = checkpoints._replace(origin=spec.of_held(init))
    return state.carry, state.ys, checkpoints


class _FirstLoop(NamedTuple):
    """The state of the loop over the first layers."""

    state: ForwardState
    # The held leaves of inputs, stacked over these layers.
    inputs: Carry

    @property
    def carry(self) -> Carry:
        return self.state.carry


def _run_first(
    spec: SweepSpec,
    perturbed: Perturbed,
    xs: OfKinds,
    shared: OfKinds,
    state: ForwardState,
    checkpoints: Checkpoints,
) -> tuple[ForwardState, Checkpoints]:
    """Run the layers before the schedule, and keep the input and residuals of each."""
    remat, count = spec.remat, spec.remat.first_layers
    pullbacks = spec.pullbacks(perturbed, remat.first_kept, xs, shared)
    step = _forward_step(spec, xs, shared, [range(count)], pullbacks)
    # With a schedule, offloading is of its boundaries.
    on_host = remat.carries == "host" and remat.schedule is None
    inputs = empty_stack(spec.of_held(state.carry), count, on_host)

    def layer(number: Index, loop: _FirstLoop) -> _FirstLoop:
        inputs = write(loop.inputs, number, spec.of_held(loop.carry))
        return _FirstLoop(step(number, loop.state), inputs)

    residuals = spec.residual_buffers(pullbacks, [range(count)])
    inputs_and_residuals = with_tangents((inputs, residuals), (state.carry, xs, shared))
    inputs, residuals = inputs_and_residuals
    loop = _FirstLoop(state._replace(residuals=residuals), inputs)
    loop, ran = spec.run(count, layer, loop)
    checkpoints = checkpoints._replace(
        first_layers=loop.inputs, residuals=loop.state.residuals, ran=ran
    )
    # The schedule's layers save nothing on the way forward: their residuals live while
    # a segment is reversed.
    return loop.state._replace(residuals=[]), checkpoints


def _run_scheduled(
    spec: SweepSpec,
    schedule: Schedule,
    step: Step,
    pullbacks: Sequence[LayerPullback],
    state: ForwardState,
    checkpoints: Checkpoints,
) -> tuple[ForwardState, Checkpoints]:
    """Run the schedule's layers, and keep inputs in slots on the device."""
    slot_of = np.asarray(schedule.forward, np.int32)
    saves, is_read = spec.kept_in_segment(pullbacks)
    slots = slots_for(
        spec.of_held(state.carry),
        schedule.slots,
        spec.of_held(is_read),
        schedule.sources,
    )
    checkpoints = checkpoints._replace(slots=slots)
    # The layers whose inputs stay: those before a change of slot, and the last.
    starts = np.flatnonzero(np.diff(slot_of, append=-1)).astype(np.int32)
    if saves or schedule.runs[0].replays:
        # The last segment runs again from its first layer, so no further input of it
        # is needed.
        starts = starts[: schedule.sources]
    # A leaf that no visit reads has slots for the sources of replays alone, so that not
    # every input can be written.
    if (
        spec.stops
        or not all(is_read)
        or (_writes_take_long(spec) and not spec.unrolled)
    ):
        return _by_segments(spec, step, starts, state, checkpoints)

    def layer(
        loop: tuple[Carry, ForwardState], step_of: tuple[Index, Index]
    ) -> tuple[tuple[Carry, ForwardState], None]:
        slots, state = loop
        number, slot = step_of
        slots = write(slots, slot, spec.of_held(state.carry))
        return (slots, step(number, state)), None

    # All inputs are written: loops in a loop take a GPU more time, and a TPU more
    # memory.
    steps = jnp.arange(schedule.length), jnp.asarray(slot_of)
    (slots, state), _ = lax.scan(layer, (slots, state), steps, unroll=spec.unrolled)
    return state, checkpoints._replace(slots=slots)


_SMALL_CARRY = 2**20  # bytes


def _writes_take_long(spec: SweepSpec) -> bool:
    """Whether the write of a carry takes as long as a step: on a CPU, of a small one.

    The tracing platform decides, since `lax.platform_dependent` would trace all layers
    twice (a transformer block: 1.17 -> 1.34 of the time of `lax.scan`). So large
    carries, which GPUs and TPUs have, are written alike everywhere: what is exported
    from a CPU suits them.
    """
    return (
        platform() == "cpu"
        and spec.carry_has_known_size()
        and spec.carry_bytes() <= _SMALL_CARRY
    )


class _SegmentLoop(NamedTuple):
    """The state of the loop over segments."""

    state: ForwardState
    # The held leaves of inputs, stacked over slots; [] where boundaries are on the
    # host.
    slots: Carry
    # How many layers have run; None if none may stop.
    ran: Index | None

    @property
    def carry(self) -> Carry:
        return self.state.carry


def _by_segments(
    spec: SweepSpec,
    step: Step,
    starts: np.ndarray,
    state: ForwardState,
    checkpoints: Checkpoints,
) -> tuple[ForwardState, Checkpoints]:
    """Run segment by segment, from the layers `starts`; the first input of each stays:
    in the slot of the segment's number, or on the host.
    """
    schedule, on_host = spec.remat.schedule, spec.remat.boundaries_on_host
    assert schedule is not None
    sizes = np.diff(starts, append=schedule.length).astype(np.int32)

    def segment(number: Index, loop: _SegmentLoop) -> _SegmentLoop:
        first, trips = entry_at(starts, number), trip_count(sizes, number)
        state, slots, ran = loop
        if not on_host:
            slots = write(slots, number, spec.of_held(state.carry))
        ran_here: Any = 1
        if trips == 1:
            # Where layers may stop, the loop over segments has just seen that they go
            # on.
            state = step(first, state)
        else:
            state, ran_here = spec.run(
                trips, lambda k, state: step(first + k, state), state
            )
        return _SegmentLoop(state, slots, None if ran is None else ran + ran_here)

    loop = _SegmentLoop(state, checkpoints.slots, checkpoints.ran)
    boundaries = None
    if on_host:

        def offloaded(loop: _SegmentLoop, number: Index) -> tuple[_SegmentLoop, Carry]:
            return segment(number, loop), to_host(spec.of_held(loop.carry))

        # A scan stacks its outputs on the host without a buffer on the device first.
        loop, boundaries = lax.scan(offloaded, loop, jnp.arange(len(starts)))
    else:
        loop, _ = spec.run(len(starts), segment, loop)
    return loop.state, checkpoints._replace(
        slots=loop.slots, boundaries=boundaries, ran=loop.ran
    )
