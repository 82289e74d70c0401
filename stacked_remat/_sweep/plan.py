"""The runs of a schedule as tables of integers, for the loops of a reverse sweep.

A `Run` of a `Schedule` is a few numbers: where a replay starts, how many layers it
runs, how many are then visited. `reverse.py` executes all runs in one loop, whose body
finds the numbers of run `r` in these tables (`slots.entry_at`, `slots.trip_count`).

Where a layer may end the sweep (`SweepSpec.stops`), how many layers ran is data. The
tables are then clipped to the layers that did: some become traced arrays.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from equinox.internal import unvmap_max

from .._schedule import Run, Schedule
from .store import Index


def one_run_per_segment(schedule: Schedule) -> tuple[Run, ...]:
    """The runs where boundaries are on the host: the first input of a segment is
    fetched to slot 0; its other inputs fill the slots above.
    """
    runs = []
    stop = schedule.length
    for size in reversed(schedule.segments):
        start = stop - size
        runs.append(Run(start, 0, tuple(range(start + 1, stop)), size))
        stop = start
    return tuple(runs)


class Plan:
    """Tables with an entry for each run, in the order of the reverse sweep.

    Layers have their numbers in the sweep: those in the schedule, plus the number of
    layers before it. A *saving* plan keeps the residuals of the layers to visit: a
    replay (`advances`) stops before the lowest of these, from where they run once more
    to be saved.

        layer   start              bottom                top
        slot    slot               bottom_slot           bottom_slot + visits - 1
                |--- advances ---->|<------ visits ------|

    In a plan that doesn't save, `advances` go on up to `top`. `bottom` may be less than
    `start`, where layers whose inputs earlier runs left in slots are visited too.

    Attributes:
        start: the layer whose input the replay reads.
        slot: where it reads it.
        advances: how many layers it runs; a traced array where layers may stop, else
            an `np.ndarray`.
        advanced: the numbers of these layers, if none stops: a `range` for each run.
        kept: the layers whose inputs replays hold; those of all runs in one table.
        kept_from: where those of a run begin in `kept`.
        keeps_all: whether replays hold every input that they make: then the slot of an
            input is found from the layer's number.
        top: the layer that is visited first, if none stops.
        bottom: the layer that is visited last.
        bottom_slot: the slot of its input.
        visits: how many layers are visited; traced where layers may stop.
        visited: their numbers, if none stops: a `range` for each run.
        most_advances: the greatest entry of `advances`, if none stops.
        most_visits: the greatest entry of `visits`, if none stops.
        first: the layer that the run executes first, for a replay or a visit.
        next_first: `first` of the next run: the last visit of a run reads it from the
            host. The last run has no next one, and reads any layer.
        skipped: how many runs come before the first one with a layer that ran; traced
            where layers may stop, else 0.
    """

    def __init__(
        self, runs: tuple[Run, ...], offset: int, saving: bool, ran: Index | None
    ):
        """Tables of `runs`, with `offset` layers before the schedule's.

        `ran` is the number of layers that ran, None for all.
        """
        rows = []
        held_layers = []
        for run in runs:
            first_kept = run.holds[0] if run.holds else run.start
            slots = run.slot, run.top_slot
            rows.append((run.start, run.top, *slots, run.visits, first_kept))
            held_layers += run.holds
        columns = np.asarray(rows, np.int32).T
        start, top, self.slot, top_slot, visits, first_kept = columns
        self.start = start + offset
        self.top = top + offset
        self.visits: Any = visits
        self.bottom = self.top - visits + 1
        self.bottom_slot = top_slot - visits + 1
        replays = top - start
        self.advances: Any = replays
        if saving:
            self.advances = np.maximum(0, self.bottom - self.start)
        self.advanced = _ranges(self.start, self.start + self.advances)
        self.visited = _ranges(self.bottom, self.top + 1)
        self.most_advances = int(self.advances.max())
        self.most_visits = int(visits.max())

        # A run holds one input in each slot between those of `start` and `top`.
        held_counts = top_slot - self.slot
        self.kept_from = np.cumsum(held_counts, dtype=np.int32) - held_counts
        # One entry at least: loops that never run are traced too, and look one up.
        self.kept = np.asarray(held_layers or [0], np.int32) + offset
        self.keeps_all = len(self.kept) >= replays.sum()

        self.first = np.where(
            self.advances > 0, self.start, self.bottom if saving else self.top
        )
        self.next_first = np.append(self.first[1:], self.top[-1:])
        self.skipped: Any = 0
        if ran is not None:
            self._stop_before(ran, first_kept + offset)

    def _stop_before(self, ran: Index, first_kept: np.ndarray) -> None:
        """Leave out the layers from number `ran` on, which did not run.

        `first_kept` is a table of the first inputs that replays hold: `start` where a
        run holds none.
        """
        # Under `jax.vmap` the loops take as many trips for all examples, the most.
        ran = unvmap_max(ran)
        has_layer = np.minimum(self.start, self.bottom) < ran
        self.skipped = jnp.argmax(has_layer).astype(jnp.int32)
        # The last layer that ran is visited, not replayed.
        advances = jnp.clip(ran - 1 - self.start, 0, self.advances)
        # If the layer of the first input that it holds did not run, a replay is of no
        # use.
        self.advances = jnp.where(first_kept < ran, advances, 0)
        self.visits = jnp.clip(ran - self.bottom, 0, self.visits)


def _ranges(firsts: np.ndarray, stops: np.ndarray) -> list[range]:
    return [*map(range, firsts.tolist(), stops.tolist())]
