"""How far the runs of a reverse sweep go, where layers may stop.

A `Program` has a trip count for each loop of each run. Where fewer layers ran, the
loops end earlier, and the runs of layers that did not run are skipped.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from equinox.internal import unvmap_max
from jax import lax

from .._schedule import Program
from .store import Index


class Trips(NamedTuple):
    """How far the runs of a program go: columns of it, or arrays where layers may
    stop.
    """

    advances: Any
    visits: Any
    # The layer that each run executes first; of a run without layers, that of the next.
    runs_first: Any
    # How many runs come before the first one with a layer that ran; None if all ran.
    skipped: Index | None


def trips_of(program: Program, ran: Index | None) -> Trips:
    """The trips where `ran` layers ran; None for all."""
    if ran is None:
        return Trips(program.advances, program.visits, program.runs_first, None)
    # Under `jax.vmap` the loops take as many trips for all examples, the most.
    ran = unvmap_max(ran)
    columns = program.start, program.advances, program.bottom, program.visits
    start, advances, bottom, visits = np.asarray(columns, np.int32)
    has_layer = np.minimum(start, bottom) < ran
    # The last layer that ran is visited, not replayed.
    advances = jnp.clip(ran - 1 - start, 0, advances)
    # If the layer of the first input that it holds did not run, a replay is of no use.
    held = np.asarray((*program.held_layers, 0), np.int32)
    first_held = held[np.asarray(program.held_from)]
    advances = jnp.where(first_held < ran, advances, 0)
    visits = jnp.clip(ran - bottom, 0, visits)
    skipped = jnp.argmax(has_layer).astype(jnp.int32)

    first_visit = bottom + visits - 1
    # Where residuals are saved, `_save` runs the lowest layer first.
    after_replay = bottom if program.saves else first_visit
    first = jnp.where(advances > 0, start, after_replay)
    last_run = len(start) - 1
    is_run = (advances > 0) | (visits > 0)
    next_run = lax.cummin(
        jnp.where(is_run, np.arange(len(start)), last_run), reverse=True
    )
    # One more for the last run, as in `Program.runs_first`.
    first = jnp.maximum(first, 0)[jnp.append(next_run, last_run)]
    return Trips(advances, visits, first, skipped)
