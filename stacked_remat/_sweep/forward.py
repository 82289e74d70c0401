"""The forward loops of a checkpointed sweep: they run the layers and keep what the
schedule says.

Layers are numbered in the order in which they run.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._placement import has_host_arrays, platform, to_host
from .._static import PyTree
from .gradient import LayerPullback, Perturbed
from .kinds import Kind
from .slots import Carry, Checkpoints, Index, OfKinds, entry_at, slots_for, trip_count
from .spec import SweepSpec
from .store import empty_stack, on_mesh, read_before_writes, settle, write

Step = Callable[[Index, PyTree], PyTree]


def primal(
    spec: SweepSpec, init: Carry, xs: OfKinds, shared: OfKinds
) -> tuple[Carry, OfKinds]:
    """Run all layers, with nothing kept."""
    if not spec.length or not (spec.pattern or spec.stops or has_host_arrays(xs)):
        return spec.plain(None, init, xs, shared)
    step = _forward_step(spec, xs, shared, [range(spec.length)])
    (carry, ys, *_), _ = spec.run(spec.length, step, _start(spec, init, xs))
    return carry, ys


def _start(spec: SweepSpec, init: Carry, xs: OfKinds) -> PyTree:
    """The first state of a forward loop: carry, outputs, residuals, and what is read
    ahead from the host.
    """
    ys = [empty_stack(kind.output_types, spec.rows(kind)) for kind in spec.kinds]
    return init, ys, [], spec.fetch(xs, 0)


def _forward_step(
    spec: SweepSpec,
    xs: OfKinds,
    shared: OfKinds,
    parts: Sequence[range] = (),
    pullbacks: Sequence[LayerPullback] = (),
    start: int = 0,
) -> Step:
    """A forward loop's step from layer `start` on; keeps residuals of pullbacks.
    `parts` as in `spec.at`.
    """

    def step(k: Index, state: PyTree) -> PyTree:
        *state, fetched = state
        fetched, number = settle(fetched, k + start)
        ahead = fetched and spec.fetch(xs, jnp.minimum(number + 1, spec.length - 1))

        def run(kind: Kind, row: Index, state: PyTree) -> PyTree:
            (carry, ys, residuals, ahead), own = state, shared[kind.number]
            x = spec.inputs(kind, xs, row, fetched)
            if pullbacks:
                (carry, y), new = pullbacks[kind.number].save((own, carry, x))
                residuals = kind.write(residuals, spec.entry(kind, number, 0), new)
            else:
                carry, y = kind.values(own, carry, x)
            if spec.remat.boundaries_on_host:
                # Or XLA reads while the output is written, and not while the step runs.
                ahead, (y, ys) = read_before_writes(ahead, (y, ys), "tpu")
            return carry, kind.write(ys, row, y), residuals, ahead

        return spec.at(number, run, (*state, ahead), parts)

    return step


def forward(
    spec: SweepSpec, perturbed: Perturbed, init: Carry, xs: OfKinds, shared: OfKinds
) -> tuple[Carry, OfKinds, Checkpoints]:
    init = [on_mesh(jnp.asarray(leaf)) for leaf in init]  # which may be Python numbers
    first, schedule, on_host = (
        spec.remat.first_layers,
        spec.remat.schedule,
        spec.remat.carries == "host",
    )
    state, kept = (
        _start(spec, init, xs),
        Checkpoints([], ran=jnp.int32(0) if spec.stops else None),
    )
    if first:
        pullbacks = spec.pullbacks(perturbed, spec.remat.first_kept, xs, shared)
        step = _forward_step(spec, xs, shared, [range(first)], pullbacks)
        carries = empty_stack(spec.of_held(init), first, on_host and schedule is None)

        def layer(number: Index, loop: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
            *state, carries = loop
            carries = write(carries, number, spec.of_held(state[0]))
            return *step(number, state), carries

        (carry, ys, _, fetched), residuals = (
            state,
            spec.residual_buffers(pullbacks, [range(first)]),
        )
        loop = carry, ys, residuals, fetched, carries
        (*state, residuals, fetched, carries), ran = spec.run(first, layer, loop)
        state, kept = (
            (*state, [], fetched),
            Checkpoints([], None, carries, residuals, ran=ran),
        )
    if schedule is not None:
        step = _forward_step(spec, xs, shared, start=first)
        pullbacks = (
            [] if on_host else spec.pullbacks(perturbed, spec.remat.kept, xs, shared)
        )
        state, kept = _in_parts(spec, step, pullbacks, state, kept)
    if not spec.length or spec.stops or (on_host and (schedule is None or not first)):
        kept = kept._replace(origin=spec.of_held(init))
    carry, ys, *_ = state
    return carry, ys, kept


def _in_parts(
    spec: SweepSpec,
    step: Step,
    pullbacks: Sequence[LayerPullback],
    state: PyTree,
    kept: Checkpoints,
) -> tuple[PyTree, Checkpoints]:
    """Run the schedule's layers; the inputs that stay (`state[0]`) go to slots, or to
    the host.
    """
    schedule = spec.remat.schedule
    assert schedule is not None
    if spec.remat.boundaries_on_host:
        starts = np.cumsum((0, *schedule.segments[:-1]), dtype=np.int32)
        return _by_segments(spec, step, starts, state, kept)
    slot_of, (saves, is_read) = (
        np.asarray(schedule.forward, np.int32),
        spec.kept_in_segment(pullbacks),
    )
    slots = slots_for(
        spec.of_held(state[0]), schedule.slots, spec.of_held(is_read), schedule.sources
    )
    starts = np.flatnonzero(np.diff(slot_of, append=-1)).astype(np.int32)
    if (
        saves or schedule.runs[0].replays
    ):  # then the last segment runs again, from its first layer
        starts = starts[: schedule.sources]
    if (
        spec.stops
        or not all(is_read)
        or (_writes_take_long(spec) and not spec.unrolled)
    ):
        return _by_segments(spec, step, starts, state, kept._replace(slots=slots))

    def layer(
        loop: tuple[Carry, PyTree], step_of: tuple[Index, Index]
    ) -> tuple[PyTree, None]:
        (slots, state), (number, slot) = loop, step_of
        return (write(slots, slot, spec.of_held(state[0])), step(number, state)), None

    # All inputs are written: loops in a loop take a GPU more time, and a TPU more
    # memory.
    steps = jnp.arange(schedule.length), jnp.asarray(slot_of)
    (slots, state), _ = lax.scan(layer, (slots, state), steps, unroll=spec.unrolled)
    return state, kept._replace(slots=slots)


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


def _by_segments(
    spec: SweepSpec, step: Step, starts: np.ndarray, state: PyTree, kept: Checkpoints
) -> tuple[PyTree, Checkpoints]:
    """Run segment by segment; the input of the first layer of each stays."""
    schedule, slots, on_host = (
        spec.remat.schedule,
        kept.slots,
        spec.remat.boundaries_on_host,
    )
    assert schedule is not None
    sizes = np.diff(starts, append=schedule.length).astype(np.int32)

    def part(number: Index, loop: PyTree) -> PyTree:
        *state, slots, ran = loop
        first, trips = entry_at(starts, number), trip_count(sizes, number)
        slots = slots if on_host else write(slots, number, spec.of_held(state[0]))
        if trips == 1:
            return *step(first, tuple(state)), slots, ran if ran is None else ran + 1
        state, more = spec.run(
            trips, lambda k, state: step(first + k, state), tuple(state)
        )
        return *state, slots, ran if more is None else ran + more

    loop, boundaries = (*state, slots, kept.ran), None
    if on_host:  # a scan stacks there without a buffer on the device first
        numbers = jnp.arange(len(starts))
        loop, boundaries = lax.scan(
            lambda loop, k: (part(k, loop), to_host(spec.of_held(loop[0]))),
            loop,
            numbers,
        )
    else:
        loop, _ = spec.run(len(starts), part, loop)
    *state, slots, ran = loop
    return tuple(state), kept._replace(slots=slots, boundaries=boundaries, ran=ran)
