"""Which layer of a kind runs next, for sweeps that gather its weights ahead.

Layers of several kinds have weights of several shapes, and what a loop carries has one.
So each kind has what its own next layer gathers, which is gathered while a layer of
this kind runs; all in the branch of the kind, as a collective in a conditional runs
beside nothing outside of it. It costs one gathered layer of each kind.

In a reverse sweep the next layer of a kind is found from the program: columns, with an
entry for each run, of *places*: the numbers of layers among those of the kind, in the
order in which they run.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np

from .. import _xla_hints as xla_hints
from .._schedule import Program
from .kinds import Kind
from .slots import Arrays, Column, OfKinds, entry_at
from .spec import SweepSpec
from .store import Index

T = TypeVar("T")

# What a run does, one after the other; `reverse.py`.
Phase: TypeAlias = Literal["replay", "save", "visit"]


class KindOrder(NamedTuple):
    """The places of one kind's layers in the runs of a program."""

    # Where the replays end, and the visits begin and end: from below.
    replay_stop: Column
    visit_start: Column
    visit_stop: Column
    # What runs first in each run, or in later ones; one entry more, which is read ahead
    # for nothing after the last run.
    first: Column
    # What runs next after the replay.
    after_replay: Column

    @classmethod
    def of(cls, program: Program, before: np.ndarray) -> "KindOrder":
        """`before[number]` is how many layers of the kind run before a layer."""
        start, bottom = np.asarray(program.start), np.asarray(program.bottom)
        replay_start = before[start]
        replay_stop = before[start + np.asarray(program.advances)]
        visit_start = before[bottom]
        visit_stop = before[bottom + np.asarray(program.visits)]

        # Where internals are saved, that comes before visits, and goes up.
        top = np.maximum(visit_stop - 1, 0)
        first_after_replay = visit_start if program.saves else top
        first = [0]
        after_replay = []
        for run in reversed(range(len(start))):
            next_run = first[-1]
            has_visits = visit_stop[run] > visit_start[run]
            after = int(first_after_replay[run]) if has_visits else next_run
            after_replay.append(after)
            replays = replay_stop[run] > replay_start[run]
            first.append(int(replay_start[run]) if replays else after)
        return cls(
            replay_stop.tolist(),
            visit_start.tolist(),
            visit_stop.tolist(),
            first[::-1],
            after_replay[::-1],
        )

    def next(self, phase: Phase, r: Index, place: Index) -> Any:
        """The place of the layer that runs after the one at `place`, in run `r`."""
        if phase == "replay":
            goes_on = place + 1 < entry_at(self.replay_stop, r)
            return jnp.where(goes_on, place + 1, entry_at(self.after_replay, r))
        if phase == "save":
            # The highest that was saved is visited first.
            return jnp.minimum(place + 1, entry_at(self.visit_stop, r) - 1)
        goes_on = place - 1 >= entry_at(self.visit_start, r)
        return jnp.where(goes_on, place - 1, entry_at(self.first, r + 1))


def fetch_kinds(spec: SweepSpec, xs: OfKinds, places: Sequence[Index]) -> OfKinds:
    """What is read ahead for a layer of each kind, at a place."""
    fetched = []
    for kind, place in zip(spec.kinds, places, strict=True):
        fetched.append(_fetch(spec, kind, xs, place))
    return fetched


def at_ahead(
    spec: SweepSpec,
    number: Index,
    run: Callable[[Kind, Index, T, Arrays, Arrays], T],
    state: T,
    parts: Sequence[range],
    fetched: OfKinds,
    following: Callable[[Kind, Index], Index],
    xs_in: Callable[[T], OfKinds],
) -> tuple[T, OfKinds]:
    """`SweepSpec.at`, where kinds have what is read ahead.

    Args:
        run: also takes what was read ahead for the layer, and what is read for the next
            of its kind.
        fetched: what each kind has.
        following: the place of the next layer of a kind, from that of one.
        xs_in: finds the layers' own inputs in the state.

    Returns:
        The state, and what each kind has then.
    """

    def run_kind(kind: Kind, row: Index, both: tuple[T, OfKinds]) -> tuple[T, OfKinds]:
        state, fetched = both
        own, row = xla_hints.copy_fetched(fetched[kind.number], row)
        ahead: Arrays = []
        if own:
            place = following(kind, _mirrored(spec, kind, row))
            ahead = _fetch(spec, kind, xs_in(state), place)
        fetched = [*fetched]
        fetched[kind.number] = ahead
        return run(kind, row, state, own, ahead), fetched

    return spec.at(number, run_kind, (state, fetched), parts)


def _fetch(spec: SweepSpec, kind: Kind, xs: OfKinds, place: Index) -> Arrays:
    if not spec.rows(kind):
        return []
    return spec.fetch_row(kind, xs, _mirrored(spec, kind, place))


def _mirrored(spec: SweepSpec, kind: Kind, index: Index) -> Any:
    """The place of a layer among those of its kind, from its row, or its row from its
    place: one from the other end, where the sweep goes from the last layer to the
    first.
    """
    return spec.rows(kind) - 1 - index if spec.reverse else index
