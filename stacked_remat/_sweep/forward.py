"""The forward loops of a checkpointed sweep: run the layers, keep what the policy says.

Run alone (`primal`), a sweep is a scan over layers. Before a reverse sweep (`forward`)
it also leaves checkpoints, from which `reverse.py` makes every layer's input again:

    layers   0 1 2 | 3 4 5 6 7 8 9
             first |  schedule
    kept     every | the inputs of the
             input | layers in `Program.stays`

- of the *first layers* (`Remat.first_layers`) each input, and residuals;
- of the layers under the *schedule* the inputs that stay in its slots, or the first
  input of each segment on the host or on disk.

There are two ways to keep just the inputs that stay, and which one is faster depends on
the platform (`_run_scheduled`): to write the input of every layer, most of them to be
overwritten, or to loop over stretches from one input that stays to the next, with a
loop over layers in it, and to write the first input of each. Both are one loop over
stretches (`_run_stretches`), those of the first way having one layer each.

Weights are read from their stacks by layer number, within the innermost loop: no
segment's weights are copied. What comes from the host, and what is gathered from other
devices, is read one layer ahead, beside the layer that runs. Layers are numbered as
they run; `primitive.py` calls this file.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax

from .. import _xla_hints as xla_hints
from .._memory_spaces import has_host_arrays, to_host
from .._schedule import Schedule
from . import disk
from .ahead import at_ahead, fetch_kinds
from .gradient import LayerPullback, Perturbed
from .kinds import Kind
from .slots import (
    Arrays,
    Carry,
    Checkpoints,
    Column,
    OfKinds,
    entry_at,
)
from .spec import SweepSpec
from .store import (
    Index,
    empty_stack,
    on_mesh,
    with_tangents,
)


class ForwardState(NamedTuple):
    """The state of all loops over layers."""

    # The input of the layer that runs next.
    carry: Carry
    # Outputs of each kind, stacked over all layers of the kind; zeros for those that
    # are still to run.
    ys: OfKinds
    # What is read ahead for the layer that runs next (`SweepSpec.fetch`); of several
    # kinds a list for each, for the next layer of the kind.
    fetched: Any
    # How many layers have run; None if none may stop.
    ran: Index | None
    # The held leaves of the inputs that are kept, stacked, or the ticket of their file;
    # [] where none are, and while a scan stacks them on the host.
    inputs: Carry = []
    # Saved residuals of each kind, stacked over the first layers; [] where none are
    # saved.
    residuals: OfKinds = []


# Runs the layer with a number.
Step: TypeAlias = Callable[[Index, ForwardState], ForwardState]


def primal(
    spec: SweepSpec, init: Carry, xs: OfKinds, shared: OfKinds
) -> tuple[Carry, OfKinds]:
    """Run all layers and keep nothing: the last carry, and the outputs of each kind."""
    # One scan, unless layers are of several kinds, may stop, or are read ahead.
    ahead = spec.gathers_apart()
    reads_ahead = has_host_arrays(xs) or ahead.gathers
    if not spec.length or not (spec.pattern or spec.stops or reads_ahead):
        return spec.plain(False, init, xs, shared)
    spec = ahead
    step = _forward_step(spec, xs, shared, range(spec.length))
    state = spec.run(spec.length, step, _start(spec, init, xs))
    return state.carry, state.ys


def _start(spec: SweepSpec, init: Carry, xs: OfKinds) -> ForwardState:
    """The state before the first layer."""
    ys = []
    for kind in spec.kinds:
        ys.append(empty_stack(kind.output_types, spec.rows(kind)))
    ran = jnp.int32(0) if spec.stops else None
    fetched = spec.fetch(xs, 0)
    if spec.pattern:
        fetched = fetch_kinds(spec, xs, [0] * len(spec.kinds))
    return ForwardState(init, ys, fetched, ran)


def _forward_step(
    spec: SweepSpec,
    xs: OfKinds,
    shared: OfKinds,
    layers: range,
    pullbacks: Sequence[LayerPullback] = (),
) -> Step:
    """The step of a loop over these layers.

    With `pullbacks`, one for each kind, it saves their residuals.
    """

    def run_layer(
        number: Index,
        kind: Kind,
        row: Index,
        state: ForwardState,
        fetched: Arrays,
        ahead: Arrays,
    ) -> ForwardState:
        residuals = state.residuals
        x = spec.inputs(kind, xs, row, fetched)
        inputs = shared[kind.number], state.carry, x
        gathered = spec.gathers_in(kind, xs, ahead)
        if pullbacks:
            (carry, y), saved = pullbacks[kind.number].save(inputs, gathered)
            entry = spec.entry(kind, number, layers.start)
            residuals = kind.write(residuals, entry, saved)
        else:
            carry, y = kind.values(*inputs, gathered)
        ys = kind.write(state.ys, row, y)
        return state._replace(carry=carry, ys=ys, residuals=residuals)

    def step(number: Index, state: ForwardState) -> ForwardState:
        if spec.pattern:
            return _step_of_kinds(spec, xs, layers, run_layer, number, state)
        fetched, number = xla_hints.copy_fetched(state.fetched, number)
        ahead: Arrays = []
        if fetched:
            # The last layer reads itself again: a loop's carry has one shape.
            last = spec.length - 1
            ahead = spec.fetch(xs, jnp.minimum(number + 1, last))

        def run(kind: Kind, row: Index, state: ForwardState) -> ForwardState:
            return run_layer(number, kind, row, state, fetched, ahead)

        ran = None if state.ran is None else state.ran + 1
        state = state._replace(fetched=ahead, ran=ran)
        return spec.at(number, run, state, [layers])

    return step


def _step_of_kinds(
    spec: SweepSpec,
    xs: OfKinds,
    layers: range,
    run_layer: Callable[..., ForwardState],
    number: Index,
    state: ForwardState,
) -> ForwardState:
    """One step of a loop over layers of several kinds."""

    def following(kind: Kind, place: Index) -> Index:
        return jnp.minimum(place + 1, spec.rows(kind) - 1)

    def run(
        kind: Kind, row: Index, state: ForwardState, own: Arrays, ahead: Arrays
    ) -> ForwardState:
        return run_layer(number, kind, row, state, own, ahead)

    fetched, state = state.fetched, state._replace(fetched=[])
    state, fetched = at_ahead(
        spec, number, run, state, [layers], fetched, following, lambda _: xs
    )
    return state._replace(fetched=fetched)


def forward(
    spec: SweepSpec, perturbed: Perturbed, init: Carry, xs: OfKinds, shared: OfKinds
) -> tuple[Carry, OfKinds, Checkpoints]:
    """Run all layers, and keep the policy's checkpoints for the reverse sweep."""
    spec = spec.gathers_apart()
    remat = spec.remat
    # What a user gives may be Python numbers.
    init = [on_mesh(jnp.asarray(leaf)) for leaf in init]
    state = _start(spec, init, xs)
    first_inputs = None
    residuals: OfKinds = []
    if remat.first_layers:
        state = _run_first(spec, perturbed, xs, shared, state)
        first_inputs = state.inputs
        residuals = state.residuals
        # The schedule's layers save nothing on the way forward: their residuals live
        # while a segment is reversed.
        state = state._replace(inputs=[], residuals=[])
    if remat.schedule is not None:
        state = _run_scheduled(spec, remat.schedule, perturbed, xs, shared, state)
    # The first input is also in a slot, or the first of `first_layers`, unless these
    # are empty or not on the device.
    is_on_device = remat.carries not in ("host", "disk")
    if remat.schedule is not None and remat.first_layers:
        # Then only the schedule's inputs are elsewhere.
        is_on_device = True
    # Layers that stop may have run none that writes it.
    slot_has_first = spec.length > 0 and not spec.stops and is_on_device
    origin = None if slot_has_first else spec.of_held(init)
    checkpoints = Checkpoints(state.inputs, first_inputs, residuals, origin, state.ran)
    return state.carry, state.ys, checkpoints


def _run_first(
    spec: SweepSpec,
    perturbed: Perturbed,
    xs: OfKinds,
    shared: OfKinds,
    state: ForwardState,
) -> ForwardState:
    """Run the layers before the schedule, and keep the input and residuals of each."""
    remat = spec.remat
    count = remat.first_layers
    pullbacks = spec.pullbacks(perturbed, remat.first_kept, xs, shared)
    step = _forward_step(spec, xs, shared, range(count), pullbacks)
    # With a schedule, offloading is of its boundaries.
    on_host = remat.carries == "host" and remat.schedule is None
    inputs = empty_stack(spec.of_held(state.carry), count, on_host)
    residuals = spec.residual_buffers(pullbacks, [range(count)])
    buffers = inputs, residuals
    inputs, residuals = with_tangents(buffers, (state.carry, xs, shared))
    state = state._replace(inputs=inputs, residuals=residuals)
    return _run_stretches(spec, step, range(count + 1), range(count), state)


def _run_scheduled(
    spec: SweepSpec,
    schedule: Schedule,
    perturbed: Perturbed,
    xs: OfKinds,
    shared: OfKinds,
    state: ForwardState,
) -> ForwardState:
    """Run the schedule's layers, and keep inputs in slots on the device, on the host or
    on disk.
    """
    layers = schedule.layers
    step = _forward_step(spec, xs, shared, layers)
    program, _, _, is_read = spec.scheduled(perturbed, xs, shared)
    if spec.remat.boundaries_off_device:
        bounds = (*program.stays, layers.stop)
        if spec.remat.carries == "disk":
            ticket = disk.open_file(spec.remat.folder, (state.carry, xs, shared))
            state = state._replace(inputs=[ticket])
        return _run_stretches(spec, step, bounds, None, state)
    state = state._replace(inputs=spec.slots_for(state.carry, program, is_read))
    # A leaf that no visit reads has slots for the sources of replays alone, so that not
    # every input can be written.
    writes_few = spec.stops or not all(is_read)
    if not writes_few and not spec.unrolled:
        writes_few = xla_hints.write_takes_long(spec.carry_bytes())
    if writes_few:
        bounds = (*program.stays, layers.stop)
        slots = range(len(program.stays))
    else:
        # All inputs are written: loops in a loop take a GPU more time, and a TPU more
        # memory.
        bounds = range(layers.start, layers.stop + 1)
        slots = program.input_slots
    return _run_stretches(spec, step, bounds, slots, state)


def _run_stretches(
    spec: SweepSpec,
    step: Step,
    bounds: Column,
    slots: Column | None,
    state: ForwardState,
) -> ForwardState:
    """Run layers in stretches, and keep the first input of each: in its slot, or on the
    host or on disk where there are no slots.

    `bounds` are the first layers of the stretches, and the end of the last.
    """
    sizes = [stop - start for start, stop in itertools.pairwise(bounds)]

    def stretch(place: Index, state: ForwardState) -> ForwardState:
        first = entry_at(bounds, place)
        if slots is not None:
            held = spec.of_held(state.carry)
            inputs = spec.write_slot(state.inputs, entry_at(slots, place), held)
            state = state._replace(inputs=inputs)
        # Where layers may stop, the loop over stretches has just seen that they go on;
        # the scans below have not.
        goes_on = not spec.stops or slots is not None
        if max(sizes) == 1 and goes_on:
            return step(first, state)

        def layer(k: Index, state: ForwardState) -> ForwardState:
            return step(first + k, state)

        return spec.run(entry_at(sizes, place), layer, state, sizes)

    def offloaded(state: ForwardState, place: Index) -> tuple[ForwardState, Carry]:
        return stretch(place, state), to_host(spec.of_held(state.carry))

    def written(state: ForwardState, place: Index) -> tuple[ForwardState, None]:
        (ticket,) = state.inputs
        ticket = disk.write(ticket, place, spec.of_held(state.carry))
        return stretch(place, state._replace(inputs=[ticket])), None

    if slots is None:
        places = jnp.arange(len(sizes))
        if spec.remat.carries == "disk":
            # Unrolled, all carries might be in memory until they are written.
            return lax.scan(written, state, places)[0]
        # A scan stacks its outputs on the host without a buffer on the device first.
        state, inputs = lax.scan(offloaded, state, places)
        return state._replace(inputs=inputs)
    return spec.run(len(sizes), stretch, state)
