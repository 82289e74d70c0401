"""A sweep over layers as data, with what its loops have in common.

A `SweepSpec` says everything about a sweep but its arrays: the traced layer of each
kind, which kind comes where, the policy, and how loops are executed. It is static, a
parameter of the sweep's primitives; two are equal if their fields are, jaxprs being the
same object. `forward.py` and `reverse.py` are loops over its layers, written with its
methods:

    at       run one layer, of whichever kind it is
    repeat   a loop over layers or runs
    run      the same, which ends early where layers may stop
    inputs   a layer's weights and other own inputs, read from their stacks
    fetch    the same for the layer that comes next, where that has to wait for it
    plain    all layers as one `lax.scan`: for the values of layers of one kind,
             for policies that cut nothing, and for derivatives of derivatives

*Perturbed* leaves have a cotangent in this sweep; *nonzero* and *active* are JAX's
words for the inputs and outputs of one call that have a tangent. A *held* leaf of a
carry has slots in checkpoints (`held_leaves`); a layer that a run *holds* has its input
in a slot (`Program.held_layers`).

Arrays are lists of leaves here (`slots.Arrays`), never trees; what differs by kind is a
list with an entry for each kind (`slots.OfKinds`). Layers have up to three numbers:

    number   in the order in which they run, from 0; used wherever not said otherwise
    index    on the layers' axis: the same, or counted from the end if `reverse`
    row      in the stacks of the layer's kind
"""

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from equinox.internal import unvmap_all
from jax import lax
from jaxtyping import Array

from .. import _xla_hints as xla_hints
from .._activity import active_carry, bytes_of
from .._memory_spaces import on_device
from .._names import named
from .._remat import EVERYTHING, NOTHING, Kept, Remat
from .._schedule import Program
from .._static import PyTree
from .._trips import known_branches, known_trips
from .gradient import (
    LayerPullback,
    LayerTypes,
    Perturbed,
    merge,
    pick,
    scatter_leaves,
)
from .kinds import Kind, Pattern
from .rules import ruled
from .slots import Arrays, Carry, Mask, OfKinds, entry_at, types_of
from .store import (
    Index,
    at_least_one,
    empty_stack,
    entry_types,
    on_all_devices,
    read,
    read_layer,
    write,
    zeros_of,
)

T = TypeVar("T")
# By what layers may stop, so that those after change nothing: the first leaf of a carry
# is a bool that says so ("until"), or the number of layers that are still to run, known
# before the first one ("count").
Stops: TypeAlias = Literal["", "until", "count"]


class _StoppingLoop(NamedTuple):
    """The state of a loop over layers that may stop."""

    # How many trips came before.
    trip: Index
    # Whether the next layer, and all after it, change nothing.
    is_over: Array
    # That of the loop that the caller describes.
    state: Any


class Scheduled(NamedTuple):
    """How the layers of a schedule are reversed."""

    # What is executed.
    program: Program
    # The vector-Jacobian product of a layer, for each kind.
    pullbacks: list[LayerPullback]
    # Whether internals of a segment are saved before its layers are visited.
    saves: bool
    # Which leaves of their input carry visits read beside these; over all leaves.
    is_read: Mask


@dataclass(frozen=True)
class SweepSpec:
    """A sweep, or a plain scan, over layers."""

    # The layer of each kind; `kinds[k].number` is `k`. All take one carry.
    kinds: tuple[Kind, ...]
    # The policy. Its schedule covers the layers after the first ones.
    remat: Remat
    # Whether the last layer on the axis runs first.
    reverse: bool
    # How many layers an iteration of the plain scan has. Loops of a sweep are unrolled
    # all or not at all.
    unroll: int
    # The kind of each layer on the axis; None for one kind.
    pattern: Pattern | None
    # By what layers may stop; "" if all run.
    stops: Stops
    # Which leaves of a carry have slots. `for_reverse` finds them for gradients alone.
    # None if a user's visitor may read any leaf of the input: all are held then, and
    # written for visits too.
    held_leaves: Mask | None = None
    # The name of the carries that a loop moves to the host, one by one; "" if it moves
    # none.
    carry_name: str = ""

    @property
    def length(self) -> int:
        return self.remat.length

    @property
    def unrolled(self) -> bool:
        """Whether loops of a sweep are unrolled, all of their trips: several layers an
        iteration would take more memory and more time.
        """
        return self.unroll >= self.length > 1

    def layer_index(self, number: Index) -> Any:
        """The index on the axis of the layer that runs as `number`."""
        return self.length - 1 - number if self.reverse else number

    def at(
        self,
        number: Index,
        run: Callable[[Kind, Index, T], T],
        state: T,
        parts: Sequence[range],
    ) -> T:
        """`run(kind, row, state)` for the layer with this number; `row` is its place in
        its kind's stacks.

        `parts` have all numbers that the loop around calls it for, by which its name
        says how often it runs each kind, for counts of FLOPs (`_trips.py`).

        Of several kinds, where the number is traced, `run` is traced once for each kind
        with layers.
        """
        if self.pattern is None:
            return run(self.kinds[0], self.layer_index(number), state)
        kinds = self._order.kinds
        rows = self.pattern.rows[:: -1 if self.reverse else 1].tolist()
        kind = entry_at(kinds, number)
        row = entry_at(rows, number)
        if isinstance(kind, int):
            return run(self.kinds[kind], row, state)
        counts = self._counts(parts)
        for k in sorted({*kinds}):
            run_kind = functools.partial(run, self.kinds[k])
            with known_trips(counts[k], sum(counts)):
                state = xla_hints.run_if(kind == k, run_kind, row, state)
        return state

    def _counts(self, parts: Sequence[range]) -> list[int]:
        """How many layers of each kind have numbers in `parts`."""
        before = self._order.before
        counts = np.zeros_like(before[0])
        for part in parts:
            counts += before[part.stop] - before[part.start]
        return counts.tolist()

    def repeat(
        self,
        trips: Index,
        body: Callable[[Index, T], T],
        state: T,
        column: Any = None,
    ) -> T:
        """Run `for k in range(trips): state = body(k, state)`.

        Of a loop with an int for its trips JAX makes a scan, whose trips XLA knows. For
        others, an entry of a column of integers or at most that, the loop's name says
        how often it runs in all, for counts of FLOPs (`_trips.py`); the column has no
        other use.
        """
        if isinstance(trips, int):
            column = None
            if self.unrolled:
                for k in range(trips):
                    state = body(k, state)
                return state

        def trip(k: Index, state: T) -> T:
            # The counter may be an int64 (`jax_enable_x64`); columns are int32.
            return body(lax.convert_element_type(k, jnp.int32), state)

        is_known = isinstance(column, Sequence)
        with known_trips(sum(column), len(column)) if is_known else nullcontext():
            return lax.fori_loop(0, trips, trip, state)

    def run(
        self,
        trips: Index,
        layer: Callable[[Index, T], T],
        state: T,
        column: Any = None,
    ) -> T:
        """`repeat` a layer; if the sweep `stops`, until `state.carry` says so.

        With `until`, on all devices, and for all examples of a `jax.vmap`, after as
        many: steps and their derivatives may be collective. A count is the caller's,
        who gives one to all devices that a collective of a layer has.
        """
        if not self.stops:
            return self.repeat(trips, layer, state, column)
        if self.stops == "count":
            # The layers of all trips, of which the first ones are left.
            if isinstance(trips, int):
                column = (trips,)
            loop: Any = state
            trips = jnp.minimum(trips, loop.carry[0])
            return self.repeat(trips, layer, state, column)

        def is_over(state: PyTree) -> Array:
            return unvmap_all(on_all_devices(state.carry[0]))

        def goes_on(loop: _StoppingLoop) -> Array:
            return (loop.trip < trips) & ~loop.is_over

        def trip(loop: _StoppingLoop) -> _StoppingLoop:
            state = layer(loop.trip, loop.state)
            return _StoppingLoop(loop.trip + 1, is_over(state), state)

        loop = _StoppingLoop(jnp.int32(0), is_over(state), state)
        return lax.while_loop(goes_on, trip, loop).state

    def rows(self, kind: Kind) -> int:
        """The number of layers of this kind."""
        if self.pattern is None:
            return self.length
        return int(self.pattern.before[-1, kind.number])

    @functools.cached_property
    def _order(self) -> Pattern:
        """The pattern by layer number instead of index."""
        assert self.pattern is not None
        if not self.reverse:
            return self.pattern
        return replace(self.pattern, kinds=self.pattern.kinds[::-1])

    @property
    def layers_before(self) -> np.ndarray:
        """How many layers of each kind run before each layer, `[number, kind]`."""
        return self._order.before

    def entry(self, kind: Kind, number: Index, first: Index) -> Any:
        """How many layers of this kind have numbers from `first` to before `number`."""
        if self.pattern is None:
            return number - first
        before = self._order.before[:, kind.number].tolist()
        return entry_at(before, number) - entry_at(before, first)

    def inputs(
        self, kind: Kind, xs: OfKinds, row: Index, fetched: Sequence[Array] = ()
    ) -> Arrays:
        """The own inputs of the layer at a row: entries of stacks, or whole stacks
        where `kind.unsliced`. `fetched` are those that `fetch` has read.
        """
        stacks = xs[kind.number]
        is_ahead = self._is_ahead(kind, stacks)
        x = read_layer(stacks, row, kind.unsliced, fetched, is_ahead)
        return x if fetched else kind.gathered(x)

    def stored(self, kind: Kind, xs: OfKinds, row: Index, x: Arrays) -> Arrays:
        """The own inputs `x` of the layer at a row as they are in its stacks."""
        if not kind.gathers:
            return x
        stacks = xs[kind.number]
        is_gathered = [gather is not None for gather in kind.gathers]
        return merge(x, read(pick(stacks, is_gathered), row), is_gathered)

    def fetch(self, xs: OfKinds, number: Index) -> Arrays:
        """The inputs of a layer of the only kind that are read ahead: in the carry of a
        loop they are transferred or gathered while the iteration before computes.

        Empty where nothing is on the host or gathered, and where it isn't known
        beforehand whether a layer runs next (`until`).
        """
        if self.pattern or self.stops == "until":
            return []
        return self.fetch_row(self.kinds[0], xs, self.layer_index(number))

    def fetch_row(self, kind: Kind, xs: OfKinds, row: Index) -> Arrays:
        """The inputs of the layer at a row that are read ahead."""
        stacks = xs[kind.number]
        is_ahead = self._is_ahead(kind, stacks)
        entries = read(pick(stacks, is_ahead), row)
        return pick(kind.gathered(scatter_leaves(entries, is_ahead)), is_ahead)

    def _is_ahead(self, kind: Kind, stacks: Arrays) -> list[bool]:
        """Of several kinds, loops read ahead what is gathered alone: transfers from the
        host begin in any loop.
        """
        is_ahead = kind.is_ahead(stacks)
        if not self.pattern:
            return is_ahead
        is_gathered = [bool(gather) for gather in kind.gathers or [None] * len(stacks)]
        return [*map(operator.and_, is_ahead, is_gathered)]

    def gathers_in(self, kind: Kind, xs: OfKinds, fetched: Arrays) -> Sequence[Any]:
        """For each own input of a layer what `fetch` has gathered, or None; () if
        nothing.
        """
        if not kind.gathers or not fetched:
            return ()
        return scatter_leaves(fetched, self._is_ahead(kind, xs[kind.number]))

    @property
    def gathers(self) -> bool:
        """Whether the loops gather what layers take; see `gathers_apart`."""
        return any(kind.gathers for kind in self.kinds)

    def gathers_apart(self) -> "SweepSpec":
        """The sweep for loops that gather what their layers take."""
        kinds = [kind.gathers_apart() for kind in self.kinds]
        return replace(self, kinds=tuple(kinds))

    def plain(
        self, recomputes: bool, init: Carry, xs: OfKinds, shared: OfKinds
    ) -> tuple[Carry, OfKinds]:
        """Scan plainly over layers, one at a time, with all derivatives. If it
        `recomputes`, each layer is under `jax.checkpoint`, as the policy says.

        Of several kinds, it costs a copy of each stack with an entry for every layer.
        """
        pattern = self.pattern
        no_outputs = [[*map(zeros_of, kind.output_types)] for kind in self.kinds]

        def branch(kind: Kind) -> Callable[..., tuple[Carry, OfKinds]]:
            """A step of the scan that runs a layer of this kind."""
            k = kind.number
            layer = self._checkpointed(kind.layer) if recomputes else kind.layer
            whole_stacks = [*map(at_least_one, xs[k])]

            def run(carry: Carry, entries: OfKinds) -> tuple[Carry, OfKinds]:
                x = merge(whole_stacks, on_device(entries[k]), kind.sliced)
                carry, y = layer(shared[k], carry, x)
                # All branches return outputs of all kinds; those of others are dropped.
                outputs = [*no_outputs]
                outputs[k] = y
                return carry, outputs

            return run

        branches = [*map(branch, self.kinds)]

        def step(
            carry: Carry, at: tuple[Array | None, OfKinds]
        ) -> tuple[Carry, OfKinds]:
            kind_number, entries = at
            if pattern is None:
                return branches[0](carry, entries)
            with known_branches(pattern.before[-1].tolist()):
                return lax.switch(kind_number, branches, carry, entries)

        kind_numbers = None
        entries = []
        for kind in self.kinds:
            entries.append(pick(xs[kind.number], kind.sliced))
        if pattern is not None:
            kind_numbers = jnp.asarray(pattern.kinds, jnp.int32)
            entries = [*map(self._for_every_layer, self.kinds, entries)]
        carry, ys = lax.scan(
            step,
            init,
            (kind_numbers, entries),
            # JAX takes a symbolic length from an array alone.
            None if jax.tree.leaves((kind_numbers, entries)) else self.length,
            self.reverse,
            self.unroll,
        )
        if pattern is not None:
            for k, y in enumerate(ys):
                layers_of_kind = np.asarray(pattern.layers_of(k), np.int32)
                ys[k] = [leaf[layers_of_kind] for leaf in y]
        return carry, ys

    def _for_every_layer(self, kind: Kind, stacks: Arrays) -> Arrays:
        """The sliced stacks of a kind with an entry for every layer on the axis: of a
        layer of another kind any entry, which nothing reads.
        """
        assert self.pattern is not None
        before = self.pattern.before[:-1, kind.number]
        expanded = []
        for stack in stacks:
            entries = on_device(at_least_one(stack))
            expanded.append(entries.at[before].get(mode="clip"))
        return expanded

    def _checkpointed(self, layer: Callable) -> Callable:
        """A layer of a plain scan under `jax.checkpoint`, as the policy says."""
        kept = self.remat.kept
        if kept == EVERYTHING:
            return layer

        def run(shared: Arrays, carry: Carry, x: Arrays) -> tuple[Carry, Arrays]:
            if self.carry_name:
                carry = [named(leaf, self.carry_name) for leaf in carry]
            return layer(shared, carry, x)

        # A loop over a symbolic number of layers (`jax.export`) stays one.
        is_symbolic = not isinstance(self.length, int | np.integer)
        prevent_cse = xla_hints.needs_checkpoint_barriers(
            is_rolled=is_symbolic or self.unroll < self.length,
            offloads_carry=bool(self.carry_name),
        )
        policy = kept.policy(self.carry_name)
        return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)

    def perturbed(
        self, init: Sequence[bool], xs: PyTree, shared: PyTree, ys: PyTree
    ) -> Perturbed:
        """Which leaves are differentiated, given which inputs are."""
        jaxprs = [kind.jaxpr for kind in self.kinds]
        is_carry = active_carry(
            [*zip(jaxprs, shared, xs, strict=True)],
            init,
            # Custom rules may make more outputs depend on an input than values do.
            lambda jaxpr, nonzero: ruled(jaxpr, nonzero).active,
        )
        of_kinds = (tuple(map(tuple, masks)) for masks in (xs, shared, ys))
        return Perturbed(tuple(init), tuple(is_carry), *of_kinds)

    @property
    def carry_types(self) -> list[Any]:
        """The types of the leaves of every carry, those of the traced layer."""
        kind = self.kinds[0]
        return types_of(kind.jaxpr.outvars[: kind.carries])

    def pullbacks(
        self, perturbed: Perturbed, kept: Kept, xs: OfKinds, shared: OfKinds
    ) -> list[LayerPullback]:
        """The pullback of a layer of each kind, which saves the residuals that are
        `kept`.
        """
        pullbacks = [LayerPullback(kind, perturbed) for kind in self.kinds]
        if kept == NOTHING:
            return pullbacks
        # With `until`, the first leaf of the carry chooses between the first step's
        # inputs and this step's. What depends on it and on inputs alone is computed
        # again.
        flags = int(self.stops == "until")
        for k, types in enumerate(self.input_types(xs, shared)):
            pullbacks[k] = pullbacks[k].with_residuals(types, kept, flags)
        return pullbacks

    def input_types(self, xs: OfKinds, shared: OfKinds) -> list[LayerTypes]:
        """The types of the inputs of a layer of each kind, also of one without layers:
        all kinds are traced.
        """
        types = []
        for kind in self.kinds:
            shared_types = tuple(map(jax.typeof, shared[kind.number]))
            x_types = kind.gathered_types(entry_types(xs[kind.number], kind.unsliced))
            types.append((shared_types, tuple(self.carry_types), x_types))
        return types

    def scheduled(
        self, perturbed: Perturbed, xs: OfKinds, shared: OfKinds
    ) -> Scheduled:
        """How the layers of the schedule are reversed. Both sweeps find it here, the
        same if the masks are, or if `reverse_spec.serves` says so.
        """
        remat = self.remat
        assert remat.schedule is not None
        pullbacks = self.pullbacks(perturbed, remat.kept, xs, shared)
        saves, is_read = self.saves_and_reads(pullbacks)
        program = remat.schedule.program(saves=saves)
        return Scheduled(program, pullbacks, saves, is_read)

    def saves_and_reads(self, pullbacks: Sequence[LayerPullback]) -> tuple[bool, Mask]:
        """Whether internals are kept while a segment is reversed; which leaves of its
        carries visits read beside these, over all leaves.
        """
        carries = self.kinds[0].carries
        # A user's visitor, for which nothing is held back, may read any leaf.
        saves = False
        is_read = (self.held_leaves is None,) * carries
        for pullback in pullbacks:
            residuals = pullback.residuals
            reads = residuals.reads if residuals else (True,) * carries
            saves = saves or residuals is not None
            is_read = tuple(map(operator.or_, is_read, reads))
        return saves, is_read

    def carry_bytes(self) -> int | None:
        """The bytes of a carry; None if a dimension is symbolic, as `jax.export` has
        them.
        """
        for type_ in self.carry_types:
            if not all(isinstance(size, int) for size in type_.shape):
                return None
        return sum(map(bytes_of, self.carry_types))

    def of_held(self, carry: Sequence[T]) -> list[T]:
        """The leaves of a carry that are held."""
        return [*carry] if self.held_leaves is None else pick(carry, self.held_leaves)

    def whole(self, held: Carry) -> Carry:
        """A carry with these leaves, and zeros for those that are not held, which
        nothing reads.
        """
        if self.held_leaves is None or all(self.held_leaves):
            return held
        return merge([*map(zeros_of, self.carry_types)], held, self.held_leaves)

    def slots_for(
        self, carry: Sequence[Any], program: Program, is_read: Sequence[bool]
    ) -> Carry:
        """Slots for a program, of the held leaves of a carry like this; of leaves that
        visits don't read, for the sources of replays alone.
        """
        slots = []
        leaves = self.of_held(carry)
        masks = self.of_held(is_read)
        for leaf, reads in zip(leaves, masks, strict=True):
            size = program.slots if reads else program.sources
            slots.append(empty_stack(leaf, size))
        return slots

    # Each leaf of a slot has the dtype of the carry's: slots are written and read as
    # they are. All loops do that here; `Checkpoints` finds the first carry by itself.

    def write_slot(self, slots: Carry, place: Index, held: Carry) -> Carry:
        """Slots with these held leaves of a carry in one of them."""
        return write(slots, place, held)

    def read_slot(self, slots: Carry, place: Index) -> Carry:
        """The held leaves of the carry in a slot."""
        return read(slots, place)

    def residual_buffers(
        self, pullbacks: Sequence[LayerPullback], parts: Sequence[range]
    ) -> OfKinds:
        """Buffers of each kind for what its layers save, of one of these ranges of
        numbers at a time.
        """
        buffers = []
        for pullback in pullbacks:
            kind = pullback.kind
            residuals = pullback.residuals
            counts = [self.entry(kind, part.stop, part.start) for part in parts]
            # One entry at least, if there are layers of this kind: a loop that never
            # runs for it is traced too.
            size = max(min(1, self.rows(kind)), *counts)
            buffers.append(empty_stack(residuals.types if residuals else [], size))
        return buffers
