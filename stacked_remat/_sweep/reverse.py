"""The reverse loops of a checkpointed sweep: replay layers, and visit them from the
last to the first.

The backward pass of N layers needs the input of each of them, the last one first. The
forward sweep (`forward.py`) has left a few of these in numbered slots. The reverse
sweep makes the others again from those, and hands every layer, with its input and the
cotangent of its output, to a *visitor*. Nothing here is a derivative: a visitor that
applies the layer's vector-Jacobian product and writes the gradient of its weights
(`write_gradients`) makes the sweep a gradient, and one that writes new weights makes it
an optimizer step.

A `Program` (`_schedule.py`) says what is made again when, in *runs*. A run is one
iteration of the outer loop here:

    1. read the input of layer `start` from a slot
    2. replay: run layers forward from there, and write the inputs that the run holds
       to the slots above (`_advance`; `_save` where the layers' residuals are kept)
    3. visit as many layers as have their inputs at the top of the slots (`_visit`)

`_schedule.py` draws the runs of six layers in three slots. All numbers that differ from
run to run are columns of integers in the program, looked up by the number of the run,
so that what is compiled has one loop over runs whatever the number of layers: compile
time does not grow with depth. Slots, saved residuals and the visitor's state are
carries of these loops (`_Loop`), which XLA updates in place.

Where a layer may end the sweep (`SweepSpec.stops`), how many layers ran is data. Trip
counts are then clipped to the layers that did (`trips_of` in `trips.py`).

Layers are numbered here as they run; `SweepSpec.layer_index` gives the index on the
axis. `primitive.py` calls `backward` for gradients, and `_scan/sweep_back.py`
`visit_layers` for a user's visitor.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from .. import _xla_hints as xla_hints
from .._memory_spaces import has_host_arrays, to_device
from .._schedule import Program, equal
from .._static import PyTree
from . import disk
from .ahead import KindOrder, Phase, at_ahead, fetch_kinds
from .gradient import (
    LayerInputs,
    LayerPullback,
    LeafVisit,
    Perturbed,
    check_saved_on_device,
    merge,
    pick,
    write_gradients,
    write_tangents,
    zero_gradients,
)
from .kinds import Kind
from .slots import Arrays, Carry, Checkpoints, Column, Mask, OfKinds, entry_at
from .spec import SweepSpec
from .store import Index, read, with_tangents
from .trips import Trips, trips_of

T = TypeVar("T")
# Called for every layer, from the last to the first, with the visitor's state. Returns
# the cotangents of the perturbed leaves of the layer's input carry, and the state.
LeafVisitor: TypeAlias = Callable[[LeafVisit, Any], tuple[Carry, PyTree]]


def backward(
    spec: SweepSpec,
    perturbed: Perturbed,
    checkpoints: Checkpoints,
    xs: OfKinds,
    shared: OfKinds,
    carry_ct: Carry,
    ys_ct: OfKinds,
) -> Arrays:
    """Sweep back to the cotangents of the perturbed leaves of init, xs and shared.

    `carry_ct` has the cotangents of the perturbed leaves of the last carry, `ys_ct`
    those of the perturbed outputs, stacked over the layers of each kind.
    """
    in_forward_mode = spec.kinds[0].in_forward_mode
    visitor = write_tangents if in_forward_mode else write_gradients
    carry_ct, gradients = visit_layers(
        spec,
        perturbed,
        checkpoints,
        shared,
        carry_ct,
        ys_ct,
        visitor,
        with_tangents(
            zero_gradients(perturbed, shared, xs),
            (checkpoints, xs, shared, carry_ct, ys_ct),
        ),
        # This visitor changes no layer, so all are read where the forward sweep did.
        xs_in=lambda gradients: xs,
    )
    shared_ct, xs_ct = zip(*gradients, strict=True)
    # A leaf of the carry may be perturbed by the layers alone; init has no cotangent
    # there.
    init_ct = pick(carry_ct, pick(perturbed.init, perturbed.carry))
    return jax.tree.leaves((init_ct, xs_ct, shared_ct))


def visit_layers(
    spec: SweepSpec,
    perturbed: Perturbed,
    checkpoints: Checkpoints,
    shared: OfKinds,
    carry_ct: Carry,
    ys_ct: OfKinds,
    visitor: LeafVisitor,
    state: PyTree,
    *,
    xs_in: Callable[[Any], OfKinds],
) -> tuple[Carry, PyTree]:
    """Visit every layer that ran, from the last on.

    `xs_in` finds the layers' own inputs in the visitor's state. A visitor that updates
    weights has them there: if replays read a copy outside of the state, the stack would
    be in memory twice.

    Returns the cotangents of the perturbed leaves of the first carry, and the state.
    """
    remat = spec.remat
    spec = spec.gathers_apart()

    def layers_of(
        program: Program, pullbacks: list[LayerPullback], saves: bool, is_read: Mask
    ) -> _Layers:
        return _Layers(
            spec,
            program=program,
            trips=trips_of(program, checkpoints.ran),
            pullbacks=pullbacks,
            saves=saves,
            is_read=is_read,
            shared=shared,
            ys_ct=ys_ct,
            visitor=visitor,
            xs_in=xs_in,
        )

    if remat.schedule is not None:
        layers = layers_of(*spec.scheduled(perturbed, xs_in(state), shared))
        loop = _visit_scheduled(layers, checkpoints.inputs, carry_ct, state)
        carry_ct = loop.cotangent
        state = loop.state
    if remat.first_layers:
        # As a schedule that cuts into single layers: one run without a replay. The
        # forward sweep has saved what is kept.
        program = equal(remat.first_layers, remat.first_layers).program()
        pullbacks = spec.pullbacks(perturbed, remat.first_kept, xs_in(state), shared)
        layers = layers_of(program, pullbacks, *spec.saves_and_reads(pullbacks))
        fetched = layers.first_fetched(state, entry_at(layers.trips.runs_first, 0))
        inputs = checkpoints.first_inputs or []
        loop = _Loop(inputs, checkpoints.residuals, fetched, carry_ct, state)
        loop = _visit(layers, 0, loop)
        carry_ct = loop.cotangent
        state = loop.state
    return carry_ct, state


@dataclass(frozen=True)
class _Layers:
    """How the layers of a program are replayed and visited."""

    # The whole sweep.
    spec: SweepSpec
    # What is executed.
    program: Program
    trips: Trips
    # The vector-Jacobian product of a layer, for each kind.
    pullbacks: list[LayerPullback]
    # Whether a run saves the residuals of the layers that it visits.
    saves: bool
    # Whether a visit reads a leaf of the layer's input carry itself, beside residuals
    # that a run saved; over all leaves of a carry, held or not.
    is_read: Mask
    # What all layers share, for each kind.
    shared: OfKinds
    # The cotangents of the perturbed outputs, stacked, for each kind.
    ys_ct: OfKinds
    # Called for each layer.
    visitor: LeafVisitor
    # Finds the stacks of the layers' own inputs in the visitor's state.
    xs_in: Callable[[Any], OfKinds]

    def at_most(self, column: Column) -> Column | None:
        """A column of trips for counts of FLOPs; None where data decide how many
        there are.
        """
        return None if self.spec.stops == "until" else column

    def copied(self, fetched: Any, number: Index) -> tuple[Arrays, Any]:
        """`copy_fetched` for layers of one kind; of several, `at_ahead` does it."""
        if self.spec.pattern:
            return [], number
        return xla_hints.copy_fetched(fetched, number)

    def fetch(self, state: PyTree, number: Index) -> Arrays:
        """What is read ahead for a layer."""
        return self.spec.fetch(self.xs_in(state), number)

    def inputs(
        self, kind: Kind, row: Index, held: Carry, fetched: Arrays, state: PyTree
    ) -> LayerInputs:
        """What a layer takes, given the leaves of its carry that checkpoints hold."""
        x = self.spec.inputs(kind, self.xs_in(state), row, fetched)
        return self.shared[kind.number], self.spec.whole(held), x

    @functools.cached_property
    def kind_orders(self) -> list[KindOrder]:
        """The order of the layers of each kind, where there are several."""
        before = self.spec.layers_before
        return [
            KindOrder.of(self.program, before[:, k]) for k in range(before.shape[1])
        ]

    def first_fetched(self, state: PyTree, number: Index) -> Any:
        """What is read ahead for the first run, which begins with a layer; of several
        kinds for the first of each.
        """
        if not self.spec.pattern:
            return self.fetch(state, number)
        # Zero, and known only once the number is: nothing is gathered before.
        after = number - entry_at(self.trips.runs_first, 0)
        places = [order.first[0] + after for order in self.kind_orders]
        return fetch_kinds(self.spec, self.xs_in(state), places)

    def at(
        self,
        phase: Phase,
        number: Index,
        r: Index,
        run: Callable[[Kind, Index, T, Arrays, Arrays], T],
        part: T,
        fetched: Any,
        ahead: Arrays,
        loop: "_Loop",
    ) -> tuple[T, Any]:
        """`run(kind, row, part, fetched, ahead)` for a layer, and what is read ahead
        then.

        Of layers of one kind, `fetched` was read ahead for this one, and `ahead` for
        the next. Of several both are left out: `at_ahead` takes what the loop has for
        each kind, and reads for the next of the kind that runs.
        """
        parts = self.program.replayed if phase == "replay" else self.program.visited
        if not self.spec.pattern:

            def run_only(kind: Kind, row: Index, part: T) -> T:
                return run(kind, row, part, fetched, ahead)

            return self.spec.at(number, run_only, part, parts), ahead

        def following(kind: Kind, place: Index) -> Index:
            return self.kind_orders[kind.number].next(phase, r, place)

        def xs_in(part: Any) -> OfKinds:
            # Visits change the visitor's state, which is the second of their part.
            return self.xs_in(part[1] if phase == "visit" else loop.state)

        return at_ahead(
            self.spec, number, run, part, parts, loop.fetched, following, xs_in
        )

    def replay(
        self, number: Index, r: Index, loop: "_Loop", fetched: Arrays, ahead: Arrays
    ) -> tuple[Carry, Any]:
        """Run layer `number` again, from the carry of the loop; returns its carry, and
        what is read ahead then.
        """

        def run(
            kind: Kind, row: Index, held: Carry, fetched: Arrays, ahead: Arrays
        ) -> Carry:
            inputs = self.inputs(kind, row, held, fetched, loop.state)
            gathered = self.spec.gathers_in(kind, self.xs_in(loop.state), ahead)
            return self.spec.of_held(kind.replayed(*inputs, gathered))

        return self.at("replay", number, r, run, loop.carry, fetched, ahead, loop)

    def save(
        self, number: Index, r: Index, loop: "_Loop", fetched: Arrays, ahead: Arrays
    ) -> tuple[tuple[Carry, OfKinds], Any]:
        """The same, and write the layer's residuals to the buffers of the loop, whose
        first entry is that of the lowest layer of the run; returns these too.
        """
        bottom = entry_at(self.program.bottom, r)

        def run(
            kind: Kind,
            row: Index,
            part: tuple[Carry, Any],
            fetched: Arrays,
            ahead: Arrays,
        ) -> tuple[Carry, Any]:
            held, saved = part
            inputs = self.inputs(kind, row, held, fetched, loop.state)
            gathered = self.spec.gathers_in(kind, self.xs_in(loop.state), ahead)
            carry, residuals = self.pullbacks[kind.number].save_again(inputs, gathered)
            entry = self.spec.entry(kind, number, bottom)
            return self.spec.of_held(carry), kind.write(saved, entry, residuals)

        part = loop.carry, loop.saved
        return self.at("save", number, r, run, part, fetched, ahead, loop)

    def visit(
        self, number: Index, r: Index, held: Carry, loop: "_Loop", fetched: Arrays
    ) -> tuple[tuple[Carry, PyTree], Any]:
        """Call the visitor for layer `number`, whose input carry has the leaves `held`.

        Takes the cotangent of the layer's output carry and the visitor's state from the
        loop, and what is read ahead for the next layer; returns that of its input and
        the new state, and what is read ahead then. The first entry of saved residuals
        is that of the lowest layer of the run.
        """
        spec = self.spec
        bottom = entry_at(self.program.bottom, r)

        def run(
            kind: Kind,
            row: Index,
            part: tuple[Carry, PyTree],
            fetched: Arrays,
            ahead: Arrays,
        ) -> tuple[Carry, PyTree]:
            carry_ct, state = part
            shared, carry, x = self.inputs(kind, row, held, fetched, state)
            residuals = []
            if loop.saved is not None:
                entry = spec.entry(kind, number, bottom)
                residuals = read(loop.saved[kind.number], entry)
            cotangents = carry_ct, read(self.ys_ct[kind.number], row)
            if spec.remat.boundaries_off_device:
                carry, cotangents = xla_hints.visit_after_carry_and_cotangents(
                    carry, cotangents
                )
            visit = LeafVisit(
                self.pullbacks[kind.number],
                index=spec.layer_index(number),
                row=row,
                inputs=(shared, carry, x),
                x=spec.stored(kind, self.xs_in(state), row, x),
                saved=residuals,
                cotangents=cotangents,
                ahead=spec.gathers_in(kind, self.xs_in(state), ahead),
                writes_to_host=has_host_arrays(state),
            )
            return self.visitor(visit, state)

        part = loop.cotangent, loop.state
        return self.at("visit", number, r, run, part, fetched, loop.fetched, loop)


class _Loop(NamedTuple):
    """The state of all loops of a reverse sweep."""

    # The held leaves of carries, each stacked over the slots. A leaf that only replays
    # read has the lowest slots alone (`Program.sources`).
    slots: Carry
    # Residuals of the layers that the run visits, stacked for each kind; None if visits
    # compute them.
    saved: OfKinds | None
    # What is read ahead for the layer that runs or is visited next; of several kinds a
    # list for each, for the next layer of the kind.
    fetched: Any
    # Of the perturbed leaves of the carry that the last visited layer took.
    cotangent: Carry
    # The visitor's.
    state: PyTree
    # In a replay the held leaves of the next layer's input; else [].
    carry: Carry = []
    # In a replay, how many of the inputs that it holds are written; None where it holds
    # all.
    written: Index | None = None


def _visit_scheduled(
    layers: _Layers, inputs: Carry, cotangent: Carry, state: PyTree
) -> _Loop:
    """Visit the layers that a schedule covers, from the inputs that are kept of
    them.
    """
    check_saved_on_device(layers.pullbacks)
    spec = layers.spec
    program = layers.program
    first = entry_at(layers.trips.runs_first, 0)
    fetched = layers.first_fetched(state, first)
    if jax.tree.leaves(fetched):
        first, cotangent = xla_hints.read_after(first, cotangent)
        fetched = layers.first_fetched(state, first)
    saved = None
    if layers.saves:
        saved = spec.residual_buffers(layers.pullbacks, program.visited)
    if not spec.remat.boundaries_off_device:
        loop = _Loop(inputs, saved, fetched, cotangent, state)
        return _loop_over_runs(layers, loop)
    slots = spec.slots_for(spec.carry_types, program, layers.is_read)
    loop = _Loop(slots, saved, fetched, cotangent, state)
    return _loop_over_boundaries(layers, inputs, loop)


def _loop_over_runs(layers: _Layers, loop: _Loop) -> _Loop:
    """Execute the runs with all inputs in slots on the device."""
    runs = len(layers.program.start)
    skipped = layers.trips.skipped
    left = runs if skipped is None else runs - skipped
    return _execute(layers, skipped, left, loop, layers.at_most((runs,)))


def _loop_over_boundaries(layers: _Layers, boundaries: Carry, loop: _Loop) -> _Loop:
    """Execute the runs with the first input of each segment on the host or on disk.

    In a scan over those on the host: a loop that reads them by the number of the run
    takes a carry more on TPUs (v5p, nested and offloaded, 2.25 -> 2.50 GiB).
    """
    spec = layers.spec
    is_on_disk = spec.remat.carries == "disk"
    runs = layers.program.runs_of_segments
    first_runs = [0, *itertools.accumulate(runs)]

    def fetch_and_run(loop: _Loop, at: tuple[Index, Any]) -> tuple[_Loop, None]:
        place, boundary = at
        if is_on_disk:
            (ticket,) = boundaries
            boundary = disk.read(ticket, boundary, spec.of_held(spec.carry_types))
        slots = spec.write_slot(loop.slots, 0, to_device(boundary))
        loop = loop._replace(slots=slots)
        if max(runs) == 1:
            return _run(layers, place, loop), None
        first = entry_at(first_runs, place)
        return _execute(layers, first, entry_at(runs, place), loop, runs), None

    # Boundaries are stacked in the order of the forward sweep, runs of segments in that
    # of the reverse sweep.
    numbers = jnp.arange(len(runs))[::-1]
    stacked = numbers[::-1] if is_on_disk else boundaries
    loop, _ = lax.scan(fetch_and_run, loop, (numbers, stacked), reverse=True)
    return loop


def _execute(
    layers: _Layers, first: Index | None, count: Index, loop: _Loop, at_most: Any
) -> _Loop:
    """Execute so many runs, from the first one on (None for run 0)."""

    def run(k: Index, loop: _Loop) -> _Loop:
        return _run(layers, k if first is None else first + k, loop)

    return layers.spec.repeat(count, run, loop, at_most)


def _run(layers: _Layers, r: Index, loop: _Loop) -> _Loop:
    loop = _advance(layers, r, loop)
    if layers.saves:
        loop = _save(layers, r, loop)
    return _visit(layers, r, loop)


def _repeat(
    layers: _Layers,
    column: Literal["advances", "visits"],
    r: Index,
    layer: Callable[[Index, _Loop], _Loop],
    loop: _Loop,
    changed: Sequence[str],
) -> _Loop:
    """Run `layer` as often as this column says for run `r`, in a loop that carries the
    fields that are changed alone: JAX takes longer to trace more.
    """

    def body(k: Index, fields: dict[str, Any]) -> dict[str, Any]:
        new = layer(k, loop._replace(**fields))
        return {name: getattr(new, name) for name in changed}

    fields = {name: getattr(loop, name) for name in changed}
    trips = entry_at(getattr(layers.trips, column), r)
    at_most = layers.at_most(getattr(layers.program, column))
    return loop._replace(**layers.spec.repeat(trips, body, fields, at_most))


def _advance(layers: _Layers, r: Index, loop: _Loop) -> _Loop:
    """Run the layers of the replay again, and write the inputs that the run holds to
    slots.

    Where residuals are saved it advances to the lowest layer that is visited; `_save`
    runs that one and all above it, the top one too.
    """
    program = layers.program
    if not any(program.advances):
        return loop
    slot = entry_at(program.slot, r)

    def after(k: Index, number: Index) -> Index:
        """The layer that runs or is visited next."""
        trips = layers.trips
        if trips.skipped is None:
            return number + 1
        # A run may visit nothing, and only make inputs for later ones.
        is_last = k == entry_at(trips.advances, r) - 1
        leaves_run = is_last & (entry_at(trips.visits, r) == 0)
        return jnp.where(leaves_run, entry_at(trips.runs_first, r + 1), number + 1)

    def layer(k: Index, loop: _Loop) -> _Loop:
        number = entry_at(program.start, r) + k
        fetched, number = layers.copied(loop.fetched, number)
        ahead = fetched and layers.fetch(loop.state, after(k, number))
        carry, ahead = layers.replay(number, r, loop, fetched, ahead)
        # Every input is written, where the next one that is held goes: the following
        # one overwrites it if it is not. A branch that writes some would copy slots.
        written = loop.written
        above = k if written is None else written
        slots = layers.spec.write_slot(loop.slots, slot + 1 + above, carry)
        if written is not None:
            place = entry_at(program.held_from, r) + written
            is_held = entry_at(program.held_layers, place) == number + 1
            written += lax.convert_element_type(is_held, jnp.int32)
        return loop._replace(slots=slots, fetched=ahead, carry=carry, written=written)

    written = None if program.holds_all else jnp.int32(0)
    start = layers.spec.read_slot(loop.slots, slot)
    loop = loop._replace(carry=start, written=written)
    changed = ("slots", "fetched", "carry", "written")
    loop = _repeat(layers, "advances", r, layer, loop, changed)
    return loop._replace(carry=[], written=None)


def _save(layers: _Layers, r: Index, loop: _Loop) -> _Loop:
    """Run the layers to visit, from the lowest, and save what their visits read."""
    bottom = entry_at(layers.program.bottom, r)
    bottom_slot = entry_at(layers.program.bottom_slot, r)
    visits = entry_at(layers.trips.visits, r)
    is_read = layers.spec.of_held(layers.is_read)

    def layer(k: Index, loop: _Loop) -> _Loop:
        fetched, number = layers.copied(loop.fetched, bottom + k)
        ahead: Arrays = []
        if fetched:
            # The layer after the top one is not needed: the first visit is of the top.
            top = bottom + visits - 1
            ahead = layers.fetch(loop.state, jnp.minimum(number + 1, top))
        # Leaves that visits don't read beside the residuals have no slots here.
        read_slots = layers.spec.write_slot(
            pick(loop.slots, is_read), bottom_slot + k, pick(loop.carry, is_read)
        )
        slots = merge(loop.slots, read_slots, is_read)
        (carry, saved), ahead = layers.save(number, r, loop, fetched, ahead)
        return loop._replace(slots=slots, saved=saved, fetched=ahead, carry=carry)

    loop = loop._replace(carry=layers.spec.read_slot(loop.slots, bottom_slot))
    changed = ("slots", "saved", "fetched", "carry")
    loop = _repeat(layers, "visits", r, layer, loop, changed)
    return loop._replace(carry=[])


def _visit(layers: _Layers, r: Index, loop: _Loop) -> _Loop:
    """Visit the layers from the top of the slots down."""
    program = layers.program
    spec = layers.spec
    visits = entry_at(layers.trips.visits, r)
    bottom = entry_at(program.bottom, r)

    def layer(k: Index, loop: _Loop) -> _Loop:
        # Counted from below: where layers stopped, the visits begin under the top.
        place = visits - 1 - k
        fetched, number = layers.copied(loop.fetched, bottom + place)
        slot = entry_at(program.bottom_slot, r) + place
        held = spec.read_slot(loop.slots, slot)
        below: Index = 0
        if fetched:
            next_first = entry_at(layers.trips.runs_first, r + 1)
            below = jnp.where(place == 0, next_first, number - 1)
            if spec.gathers and spec.remat.boundaries_off_device:
                below, held = xla_hints.read_after(below, held)
        if not spec.pattern:
            ahead = layers.fetch(loop.state, below)
            ahead, state = xla_hints.read_before_updates(ahead, loop.state)
            loop = loop._replace(fetched=ahead, state=state)
        part, ahead = layers.visit(number, r, held, loop, fetched)
        cotangent, state = part
        return loop._replace(fetched=ahead, cotangent=cotangent, state=state)

    changed = ("fetched", "cotangent", "state")
    return _repeat(layers, "visits", r, layer, loop, changed)
