"""A sweep over layers on lists of arrays, its equivalent scan, and the sweep of its
tangents.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from equinox.internal import unvmap_all
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array

from .._activity import active_carry, bytes_of, has_rules, surely_read
from .._compat import without_constants
from .._placement import on_device, platform
from .._remat import EVERYTHING, NOTHING, Kept, Remat
from .._schedule import equal, shrinking
from .._static import PyTree
from .._trips import known_branches, known_trips
from .gradient import (
    Checkpoint,
    LayerPullback,
    LayerTypes,
    Perturbed,
    Residuals,
    merge,
    pick,
)
from .kinds import Kind, Pattern
from .programs import found_in
from .rules import ruled, without_closures
from .slots import Arrays, Carry, Mask, OfKinds, TripsOf, entry_at
from .store import (
    Index,
    at_least_one,
    empty_stack,
    on_all_devices,
    read_ahead,
    read_layer,
    zeros_of,
)

T = TypeVar("T")


@dataclass(frozen=True)
class SweepSpec:
    """A sweep, or a plain scan, over layers that are numbered as they run.

    The schedule covers the layers after the first ones, which it numbers from zero.
    `pattern` is None for one kind; if it `stops`, a carry begins with a bool that says
    that the layers after it change nothing. Checkpoints have the leaves of carries that
    are `held`: None for all, which a user's visitor may read. Of stacks, of what layers
    share, and of outputs it has lists for each kind.
    """

    kinds: tuple[Kind, ...]
    remat: Remat
    reverse: bool = False
    unroll: int = 1
    pattern: Pattern | None = None
    stops: bool = False
    held: Mask | None = None

    @property
    def length(self) -> int:
        return self.remat.length

    @property
    def unrolled(self) -> bool:
        """Whether loops of a sweep are: several layers an iteration take it more memory
        and more time.
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
        parts: Sequence[range] = (),
    ) -> T:
        """`run(kind, row, state)` for the layer with this number; `row` is its place in
        its kind's stacks.

        `parts` have all numbers that the loop around calls it for: by default the
        schedule's layers.

        `run` is traced once for each kind with layers, in a loop of its own that runs
        once or not at all. There XLA updates the state in place; the branches of a
        conditional copy stacks (GPUs) and carries (TPUs).
        """
        if self.pattern is None:
            return run(self.kinds[0], self.layer_index(number), state)
        kinds, rows = self._order.kinds, self.pattern.rows[:: -1 if self.reverse else 1]
        if isinstance(number, int):
            return run(self.kinds[kinds[number]], int(rows[number]), state)
        kind, row = (
            entry_at(np.asarray(kinds, np.int32), number),
            entry_at(rows, number),
        )
        before, every = (
            self._order.before,
            parts or [range(self.remat.first_layers, self.length)],
        )
        counts = np.sum(
            [before[part.stop] - before[part.start] for part in every], 0
        ).tolist()
        for k in sorted({*kinds}):
            trips = (kind == k).astype(np.int32)
            # Without the counter, which is 0, XLA for TPUs reads the weights of all
            # kinds ahead of the loops.
            with known_trips(counts[k], sum(counts)):
                state = lax.fori_loop(
                    0,
                    trips,
                    lambda i, state, k=k: run(self.kinds[k], row + i, state),
                    state,
                )
        return state

    def repeat(
        self, trips: int | TripsOf, body: Callable[[Index, T], T], state: T
    ) -> T:
        """Run `for k in range(trips): state = body(k, state)`."""
        if self.unrolled and isinstance(trips, int):
            for k in range(trips):
                state = body(k, state)
            return state

        def one(k: Index, state: T) -> T:
            return body(lax.convert_element_type(k, jnp.int32), state)

        table, number = trips if isinstance(trips, TripsOf) else (None, trips)
        total, entered = (None, 1) if table is None else (int(table.sum()), len(table))
        with known_trips(total, entered):
            return lax.fori_loop(0, number, one, state)

    def run(
        self, trips: int | TripsOf, layer: Callable[[Index, T], T], state: T
    ) -> tuple[T, Index | None]:
        """`repeat` a layer, if it `stops` until all carries begin with True; how many
        ran, None for all.

        On all devices as many, since steps and their derivatives may be collective.
        """
        if not self.stops:
            return self.repeat(trips, layer, state), None
        most = trips.number if isinstance(trips, TripsOf) else trips

        def is_over(state: PyTree) -> Array:
            return unvmap_all(on_all_devices(state[0][0]))

        def one(loop: tuple[Index, Array, T]) -> tuple[Index, Array, T]:
            k, _, state = loop
            state = layer(k, state)
            return k + 1, is_over(state), state

        start = jnp.int32(0), is_over(state), state
        ran, _, state = lax.while_loop(
            lambda loop: (loop[0] < most) & ~loop[1], one, start
        )
        return state, ran

    def rows(self, kind: Kind) -> int:
        """The number of layers of this kind."""
        return (
            self.length
            if self.pattern is None
            else int(self.pattern.before[-1, kind.number])
        )

    @functools.cached_property
    def _order(self) -> Pattern:
        assert self.pattern is not None
        return replace(
            self.pattern, kinds=self.pattern.kinds[:: -1 if self.reverse else 1]
        )

    def entry(self, kind: Kind, number: Index, first: Index) -> Any:
        """How many layers of this kind have numbers from `first` to before `number`."""
        if self.pattern is None:
            return number - first
        table = self._order.before[:, kind.number]
        return entry_at(table, number) - entry_at(table, first)

    def inputs(
        self, kind: Kind, xs: OfKinds, row: Index, fetched: Sequence[Array] = ()
    ) -> Arrays:
        """The own inputs of the layer at a row, with those that have been fetched from
        the host.
        """
        is_ahead = kind.read_entries if fetched else ()
        return read_layer(xs[kind.number], row, kind.unsliced, fetched, is_ahead)

    def fetch(self, xs: OfKinds, number: Index) -> Arrays:
        """The inputs of a layer that are read ahead from the host, if it is known that
        it runs.
        """
        if self.pattern or self.stops:
            return []
        return read_ahead(xs[0], self.layer_index(number), self.kinds[0].read_entries)

    def plain(
        self, checkpoint: Checkpoint | None, init: Carry, xs: OfKinds, shared: OfKinds
    ) -> tuple[Carry, OfKinds]:
        """Scan plainly over layers, one at a time, each `checkpoint`ed.

        Of several kinds, it costs a copy of each stack with an entry for every layer.
        """
        sliced = [[not is_ for is_ in kind.unsliced] for kind in self.kinds]
        numbers, entries, pattern = None, [*map(pick, xs, sliced)], self.pattern
        if pattern is not None:
            numbers = jnp.asarray(pattern.kinds, jnp.int32)
            entries = [
                self._for_every_layer(kind, entries[kind.number]) for kind in self.kinds
            ]
        empty = [[*map(zeros_of, kind.output_types)] for kind in self.kinds]

        def of(kind: Kind, whole: Arrays) -> Callable[..., tuple[Carry, OfKinds]]:
            layer, k = checkpoint(kind.layer) if checkpoint else kind.layer, kind.number

            def run(carry: Carry, entries: OfKinds) -> tuple[Carry, OfKinds]:
                carry, y = layer(
                    shared[k], carry, merge(whole, on_device(entries[k]), sliced[k])
                )
                return carry, [*empty[:k], y, *empty[k + 1 :]]

            return run

        layers = [
            of(kind, [*map(at_least_one, xs[kind.number])]) for kind in self.kinds
        ]

        def step(carry: Carry, at: tuple[PyTree, OfKinds]) -> tuple[Carry, OfKinds]:
            if pattern is None:
                return layers[0](carry, at[1])
            with known_branches(pattern.before[-1].tolist()):
                return lax.switch(at[0], layers, carry, at[1])

        # In the known part of a scan that jax.checkpoint differentiates, JAX (0.10.2,
        # 0.12) can't unroll steps with primitives of hijax, such as tiles.
        unroll = 1 if any(kind.jaxpr.is_high for kind in self.kinds) else self.unroll
        # JAX takes a symbolic length from an array alone.
        length = None if jax.tree.leaves((numbers, entries)) else self.length
        options: Any = {
            "length": length,
            "reverse": self.reverse,
            "unroll": unroll,
        }
        carry, ys = lax.scan(step, init, (numbers, entries), **options)
        if pattern is not None:
            rows = [
                np.asarray(pattern.layers_of(kind.number), np.int32)
                for kind in self.kinds
            ]
            ys = [[leaf[own] for leaf in y] for y, own in zip(ys, rows, strict=True)]
        return carry, ys

    def _for_every_layer(self, kind: Kind, stacks: Arrays) -> Arrays:
        assert self.pattern is not None
        rows = np.minimum(
            self.pattern.before[:-1, kind.number], max(self.rows(kind) - 1, 0)
        )
        return [on_device(at_least_one(stack))[rows] for stack in stacks]

    def reference(
        self, init: Carry, xs: OfKinds, shared: OfKinds
    ) -> tuple[Carry, OfKinds]:
        """Do the same by the plain checkpointed scan, which has all derivatives."""
        return self.plain(self.remat.kept.checkpoint, init, xs, shared)

    def perturbed(
        self, init: Sequence[bool], xs: PyTree, shared: PyTree, ys: PyTree
    ) -> Perturbed:
        """Which leaves are differentiated, given which inputs are."""
        layers = [*zip((kind.jaxpr for kind in self.kinds), shared, xs, strict=True)]
        own = (tuple(map(tuple, masks)) for masks in (xs, shared, ys))
        carry = active_carry(
            layers, init, lambda jaxpr, nonzero: ruled(jaxpr, nonzero).active
        )
        return Perturbed(tuple(init), tuple(carry), *own)

    @property
    def carry_types(self) -> list[Any]:
        """The types of the leaves of every carry, those of the traced layer."""
        return [
            var.aval for var in self.kinds[0].jaxpr.outvars[: self.kinds[0].carries]
        ]

    def pullbacks(
        self, perturbed: Perturbed, kept: Kept, xs: OfKinds, shared: OfKinds
    ) -> list[LayerPullback]:
        """The pullback of a layer of each kind, which keeps that of its internals."""
        found = [LayerPullback(kind, perturbed) for kind in self.kinds]
        if kept == NOTHING:
            return found
        # Whether the layers stop chooses inputs: those are read again, as others are.
        flags, types = int(self.stops), self._input_types(xs, shared)
        return [
            pullback.with_residuals(own, kept, flags)
            for pullback, own in zip(found, types, strict=True)
        ]

    def _input_types(self, xs: OfKinds, shared: OfKinds) -> list[LayerTypes]:
        """The types of the inputs of a layer of each kind."""

        def of(kind: Kind) -> LayerTypes:
            x = jax.eval_shape(
                lambda: self.inputs(kind, [[*map(at_least_one, own)] for own in xs], 0)
            )
            # By types alone, so that the forward and the reverse sweep find the same
            # residuals.
            return (
                tuple(map(jax.typeof, shared[kind.number])),
                tuple(self.carry_types),
                tuple(x),
            )

        return [of(kind) for kind in self.kinds]

    def kept_in_segment(self, pullbacks: Sequence[LayerPullback]) -> tuple[bool, Mask]:
        """Whether internals are kept while a segment is reversed; which leaves of its
        carries visits read.
        """
        every, saved = (
            (True,) * self.kinds[0].carries,
            [each.residuals for each in pullbacks],
        )
        read = zip(*(each.reads if each else every for each in saved), strict=True)
        return any(saved), every if self.held is None else tuple(map(any, read))

    def for_reverse(
        self, perturbed: Perturbed, xs: OfKinds, shared: OfKinds
    ) -> "SweepSpec":
        """The sweep that holds the leaves of carries that pullbacks or replays read,
        and no others.

        A leaf that they do not read is an output buffer that steps write to, or a sum
        that they add to: nothing but the final carry depends on its value.
        """
        if self._surely_holds_all():
            return replace(self, held=(True,) * len(self.carry_types))
        pairs = zip(self.kinds, self._input_types(xs, shared), strict=True)
        flags = int(self.stops)
        residuals = [
            LayerPullback(kind, perturbed).residuals_of(own, EVERYTHING, flags)
            for kind, own in pairs
        ]
        held = [*map(any, zip(*(own.all_reads for own in residuals), strict=True))]
        before = None
        while held != before:
            before = held
            for kind in self.kinds:
                # Replays compute the leaves that are held, from all that these depend
                # on.
                outputs = [*held, *[False] * len(kind.output_types)]
                _, is_read = dce_jaxpr(kind.values_jaxpr or kind.jaxpr, outputs)
                held = [*map(operator.or_, held, kind.carry_of(is_read))]
        spec = replace(self, held=tuple(held))
        return replace(spec, remat=spec._remat_for(residuals))

    def _surely_holds_all(self) -> bool:
        """Whether pullbacks read all leaves and so much that `_remat_for` changes
        nothing; costs no trace.
        """
        has_size = self.carry_has_known_size()
        size = self.carry_bytes() if has_size else 0
        for kind in self.kinds:
            inputs = [False] * len(kind.jaxpr.invars)
            last = len(inputs) - len(kind.unsliced)
            inputs[last - kind.carries : last] = [True] * kind.carries
            is_read, read = surely_read(kind.jaxpr, inputs)
            if all(kind.carry_of(is_read)) and (not has_size or 2 * read > size):
                return True
        return False

    def carry_bytes(self) -> int:
        return sum(map(bytes_of, self.carry_types))

    def carry_has_known_size(self) -> bool:
        """Whether no dimension of the carry is symbolic, as `jax.export` has them."""
        return all(
            isinstance(size, int) for type_ in self.carry_types for size in type_.shape
        )

    def _remat_for(self, residuals: Sequence[Residuals]) -> Remat:
        """The policy, or for `"nested"` one that takes as much memory and evaluates
        each layer once less.

        Of N layers, `shrinking` holds √(2N) carries. Where the internals of a layer
        take r <= 1/2 of the memory of a carry, k segments whose internals are kept
        while they are reversed take k + r N / k carries: 2√(rN) <= √(2N) for k = √(rN).
        """
        remat, length = self.remat, self.length
        is_nested = length > 1 and remat == Remat(length, schedule=shrinking(length))
        if not is_nested or len(residuals) > 1 or not self.carry_has_known_size():
            return remat
        (found,) = residuals
        is_kept = map(operator.and_, found.reads, self.held or ())
        internals = [*found.types, *pick(self.carry_types, [*is_kept])]
        size = sum(map(bytes_of, internals))
        carry = sum(map(bytes_of, self.of_held(self.carry_types)))
        on_host = any(
            type_.memory_space == jax.memory.Space.Host for type_ in found.types
        )
        if on_host or not found.types or 2 * size > carry:
            return remat
        longest = math.ceil(math.sqrt(length * carry / size))
        in_order = _IN_ORDER // max(map(bytes_of, internals))
        if (
            platform() == "cpu" and longest // 2 <= in_order < longest
        ):  # up to a quarter more memory
            longest = in_order
        return replace(
            remat, kept=EVERYTHING, schedule=equal(length, math.ceil(length / longest))
        )

    def of_held(self, carry: Sequence[T]) -> list[T]:
        """The leaves of a carry that are held."""
        return [*carry] if self.held is None else pick(carry, self.held)

    def whole(self, held: Carry) -> Carry:
        """A carry with these leaves, and zeros for those that are not held, which
        nothing reads.
        """
        if self.held is None or all(self.held):
            return held
        return merge([*map(zeros_of, self.carry_types)], held, self.held)

    def serves(
        self, kept_for: Perturbed, perturbed: Perturbed, xs: OfKinds, shared: OfKinds
    ) -> bool:
        """Whether checkpoints kept for `kept_for` suffice for `perturbed`, which has
        fewer outputs.
        """
        remat = self.remat
        if kept_for == perturbed or remat.first_layers:
            return kept_for == perturbed
        if remat.kept == NOTHING or remat.schedule is None or remat.boundaries_on_host:
            return True
        pullbacks = (
            self.pullbacks(each, remat.kept, xs, shared)
            for each in (kept_for, perturbed)
        )
        (saves, is_read), (saves_too, read) = map(self.kept_in_segment, pullbacks)
        return saves == saves_too and not any(pick(read, [not is_ for is_ in is_read]))

    def residual_buffers(
        self, pullbacks: Sequence[LayerPullback], parts: Sequence[range]
    ) -> OfKinds:
        """Buffers of each kind for what its layers save, of one of these ranges of
        numbers at a time.
        """

        def of(pullback: LayerPullback) -> Arrays:
            kind, residuals = pullback.kind, pullback.residuals
            counts = [int(self.entry(kind, part.stop, part.start)) for part in parts]
            return empty_stack(
                residuals.types if residuals else [],
                max(min(1, self.rows(kind)), *counts),
            )

        return [*map(of, pullbacks)]


_IN_ORDER = 512
"""In bytes: XLA for CPUs (jaxlib 0.10.2) runs a loop's operations one after the other
if none reads or writes a larger array. Otherwise it gives them to threads, and loops
over 200 scalars took four times as long."""


def differentiated(
    spec: SweepSpec, perturbed: Perturbed, shared: OfKinds
) -> tuple[SweepSpec, Perturbed, OfKinds]:
    """A sweep whose leaves in the masks are differentiated: custom rules compute its
    values.

    What they close over comes first in what layers share.
    """
    kinds, masks, inputs = [], [], []
    for kind, mask, own in zip(spec.kinds, perturbed.shared, shared, strict=True):
        nonzero = sum(perturbed.of_layer(kind), ())
        active = (*perturbed.carry, *perturbed.ys[kind.number])
        layer, values, constants = kind.jaxpr, None, []
        if has_rules(kind.jaxpr):
            find = functools.partial(_differentiated, kind.jaxpr, nonzero, active)
            layer, values, constants = found_in(
                kind.jaxpr, ("differentiated", nonzero, active), find
            )
        kinds.append(replace(kind, jaxpr=layer, values_jaxpr=values))
        masks.append((*[False] * len(constants), *mask))
        inputs.append([*constants, *own])
    return (
        replace(spec, kinds=tuple(kinds)),
        replace(perturbed, shared=tuple(masks)),
        inputs,
    )


def _differentiated(
    jaxpr: Jaxpr, nonzero: Mask, active: Mask
) -> tuple[Jaxpr, Jaxpr, Arrays]:
    """A layer's jaxpr for derivatives and that for values, and the constants that both
    take first.
    """
    values, _, closures = ruled(jaxpr, nonzero)
    either = ClosedJaxpr(jaxpr, ()), values
    layer, of_rules = without_closures(jaxpr, nonzero, active) if closures else either
    variables = [*layer.jaxpr.constvars, *of_rules.jaxpr.constvars]
    constants = [*layer.consts, *of_rules.consts]
    both = (closed.jaxpr.replace(constvars=variables) for closed in (layer, of_rules))
    of_layer, of_values = (
        without_constants(ClosedJaxpr(own, constants))[0] for own in both
    )
    return of_layer, of_values, constants


def for_forward_mode(spec: SweepSpec) -> SweepSpec:
    """The sweep for derivatives of its gradient, in forward mode."""
    return replace(
        spec, kinds=tuple(replace(kind, in_forward_mode=True) for kind in spec.kinds)
    )
