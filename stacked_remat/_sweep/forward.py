"""The forward loop of a checkpointed sweep: it runs the layers and keeps what the schedule says.

Layers are numbered in the order in which this loop runs them.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._placement import platform, to_host
from .._schedule import Schedule
from .slots import Arrays, Carry, Checkpoints, T, repeat, trip_count
from .store import empty_stack, read_before_writes, settle, write


def forward_sweep(
    step: Callable[[Any, Carry, Arrays], tuple[Carry, T]],
    carry: Carry,
    schedule: Schedule,
    fetch: Callable[[Any], Arrays],
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Carry, T, Checkpoints]:
    """Run all layers, each writing its input to the slot that the schedule names.

    Args:
        step: `(index, carry, fetched) -> (carry, output)`.
        carry: the input of the first layer.
        schedule: the cut.
        fetch: `index -> fetched`, what a layer reads from the host. It is called one layer ahead.
        reverse: whether the outputs are stacked in the opposite order, as `lax.scan` does.
        unroll: layers per loop iteration.

    Returns:
        The final carry, the stacked outputs, the kept carries.
    """
    last = schedule.length - 1

    def visit(state: tuple[Carry, Carry, Arrays], at: tuple[Array, Array]) -> tuple[Any, T]:
        slots, carry, fetched = state
        index, slot = at
        fetched, index = settle(fetched, index)
        ahead = fetch(jnp.minimum(index + 1, last))
        slots = write(slots, slot, carry)
        carry, output = step(index, carry, fetched)
        return (slots, carry, ahead), output

    order = np.arange(schedule.length, dtype=np.int32)
    table = np.asarray(schedule.forward, np.int32)
    if reverse:
        order, table = order[::-1], table[::-1]
    start = (empty_stack(carry, schedule.slots), carry, fetch(0))
    (slots, carry, _), outputs = lax.scan(
        visit, start, (jnp.asarray(order), jnp.asarray(table)), reverse=reverse, unroll=unroll
    )
    return carry, outputs, Checkpoints(slots, None)


def forward_sweep_on_host(
    step: Callable[[Any, Carry, Arrays], tuple[Carry, T]],
    carry: Carry,
    outputs: T,
    schedule: Schedule,
    fetch: Callable[[Any], Arrays],
    *,
    write_output: Callable[[Any, T, T], T],
    unroll: int | bool = 1,
) -> tuple[Carry, T, Checkpoints]:
    """Like `forward_sweep`, with each segment's first input in a buffer on the host and nothing else kept.

    `outputs` are the buffers that `write_output(index, outputs, output)` fills.
    """
    # A scan stacks what is on the host without a buffer on the device first.
    starts = jnp.asarray(np.cumsum((0, *schedule.segments[:-1])), jnp.int32)
    sizes = np.asarray(schedule.segments, np.int32)

    last = schedule.length - 1

    def segment(
        state: tuple[Carry, T, Arrays], at: tuple[Array, Array]
    ) -> tuple[tuple[Carry, T, Arrays], Carry]:
        boundary = to_host(state[0])

        def layer(k: Any, state: tuple[Carry, T, Arrays]) -> tuple[Carry, T, Arrays]:
            carry, outputs, fetched = state
            fetched, index = settle(fetched, at[0] + k)
            ahead = fetch(jnp.minimum(index + 1, last))
            carry, output = step(index, carry, fetched)
            if platform() == "tpu":  # or XLA reads while the output is written, and not while the step runs
                ahead, (output, outputs) = read_before_writes(ahead, (output, outputs))
            return carry, write_output(index, outputs, output), ahead

        trips = trip_count(sizes, at[1])
        return repeat(trips, layer, state, unroll, max(schedule.segments)), boundary

    state = (carry, outputs, fetch(0))
    (final, outputs, _), boundaries = lax.scan(segment, state, (starts, jnp.arange(len(starts))))
    return final, outputs, Checkpoints([], boundaries, origin=carry)
