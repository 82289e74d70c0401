"""A sweep over layers on lists of arrays, its equivalent scan, and the sweep of its tangents."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._activity import active_carry, active_outputs
from .._compat import without_constants
from .._placement import on_device
from .._remat import NOTHING, Kept, Remat
from .._static import PyTree
from .._trips import known_branches, known_trips
from .gradient import LayerPullback, Mask, Perturbed, merge, pick, with_part
from .kinds import Kind, Pattern
from .rules import primal_of
from .slots import Arrays, Carry, T, entry_at
from .store import Index, at_least_one, empty_stack, read_ahead, read_layer, write, zeros_of

Checkpoint = Callable[[Callable], Callable]


@dataclass(frozen=True)
class SweepSpec:
    """A sweep, or a plain scan, over layers that are numbered as they run.

    The schedule covers the layers after the first ones, which it numbers from zero. `unsliced` says for which
    of the stacks a layer takes the whole; `pattern` is None for one kind; if it `stops`, a carry begins with
    a bool that says that the layers after it change nothing.
    """

    kinds: tuple[Kind, ...]
    remat: Remat
    reverse: bool = False
    unroll: int | bool = 1
    unsliced: Mask = ()
    pattern: Pattern | None = None
    stops: bool = False
    _unrolls_all: bool = field(init=False, repr=False)  # of equal specs one is compiled, and True == 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "_unrolls_all", self.unroll is True)

    @property
    def length(self) -> int:
        """The number of layers."""
        return self.remat.length

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
        """`run(kind, row, state)` for the layer with this number; `row` is its place in its kind's stacks.

        `parts` have all numbers that the loop around calls it for: by default the schedule's layers.

        `run` is traced once for each kind with layers, in a loop of its own that runs once or not at all.
        There XLA updates the state in place; the branches of a conditional copy stacks (GPUs) and carries
        (TPUs).
        """
        if self.pattern is None:
            return run(self.kinds[0], self.layer_index(number), state)
        kinds, rows = self._order.kinds, self.pattern.rows[:: -1 if self.reverse else 1]
        if isinstance(number, int):
            return run(self.kinds[kinds[number]], int(rows[number]), state)
        kind, row = entry_at(np.asarray(kinds, np.int32), number), entry_at(rows, number)
        before, every = self._order.before, parts or [range(self.remat.first_layers, self.length)]
        counts = np.sum([before[part.stop] - before[part.start] for part in every], 0).tolist()
        for k in sorted({*kinds}):
            trips = (kind == k).astype(np.int32)
            # Without the counter, which is 0, XLA for TPUs reads the weights of all kinds ahead of the loops.
            with known_trips(counts[k], sum(counts)):
                state = lax.fori_loop(
                    0, trips, lambda i, state, k=k: run(self.kinds[k], row + i, state), state
                )
        return state

    def rows(self, kind: Kind) -> int:
        """The number of layers of this kind."""
        return self.length if self.pattern is None else int(self.pattern.before[-1, kind.number])

    @functools.cached_property
    def _order(self) -> Pattern:
        assert self.pattern is not None
        return self.pattern.reversed() if self.reverse else self.pattern

    def entry(self, kind: Kind, number: Index, first: Index) -> Any:
        """How many layers of this kind have numbers from `first` to before `number`."""
        if self.pattern is None:
            return number - first
        table = self._order.before[:, kind.number]
        return entry_at(table, number) - entry_at(table, first)

    def inputs(self, kind: Kind, xs: Arrays, row: Index, fetched: Arrays | tuple[()] = ()) -> Arrays:
        """The own inputs of the layer at a row, with those that have been fetched from the host."""
        return read_layer(xs[kind.xs], row, self.unsliced[kind.xs], fetched)

    def fetch(self, xs: Arrays, number: Index) -> Arrays:
        """The inputs of a layer that are read ahead from the host, if it is known that it runs."""
        if self.pattern or self.stops:
            return []
        return read_ahead(xs, self.layer_index(number))

    def plain(
        self, checkpoint: Checkpoint | None, init: Carry, xs: Arrays, shared: Arrays
    ) -> tuple[Carry, Arrays]:
        """Scan plainly over layers, one at a time, each `checkpoint`ed."""
        layers = [checkpoint(kind.layer) if checkpoint else kind.layer for kind in self.kinds]
        whole, sliced = [*map(at_least_one, xs)], [not is_ for is_ in self.unsliced]
        options: Any = {"reverse": self.reverse, "unroll": self.unroll}
        if self.pattern is not None:
            return self._plain_pattern(self.pattern, layers, init, xs, shared, options)
        return lax.scan(
            lambda carry, x: layers[0](shared, carry, merge(whole, on_device(x), sliced)),
            init,
            pick(xs, sliced),
            length=self.length,
            **options,
        )

    def _plain_pattern(
        self,
        pattern: Pattern,
        layers: Sequence[Callable],
        init: Carry,
        xs: Arrays,
        shared: Arrays,
        options: dict[str, Any],
    ) -> tuple[Carry, Arrays]:
        """The same over several kinds. Costs a copy of each stack with an entry for every layer."""
        kinds, entries, sliced = self.kinds, list(xs), [not is_ for is_ in self.unsliced]
        for kind in kinds:
            rows = np.minimum(pattern.before[:-1, kind.number], max(self.rows(kind) - 1, 0))
            part = zip(map(at_least_one, xs[kind.xs]), sliced[kind.xs], strict=True)
            entries[kind.xs] = [on_device(leaf)[rows] if is_ else leaf for leaf, is_ in part]
        empty = [zeros_of(type_) for kind in kinds for type_ in kind.output_types]

        def step(carry: Carry, at: tuple[PyTree, Arrays]) -> tuple[Carry, Arrays]:
            x = merge(entries, at[1], sliced)

            def run(kind: Kind, carry: Carry) -> tuple[Carry, Arrays]:
                carry, y = layers[kind.number](shared, carry, x[kind.xs])
                return carry, with_part(empty, kind.ys, y)

            with known_branches(pattern.before[-1].tolist()):
                return lax.switch(at[0], [functools.partial(run, kind) for kind in kinds], carry)

        numbers = jnp.asarray(pattern.kinds, jnp.int32)
        carry, ys = lax.scan(step, init, (numbers, pick(entries, sliced)), length=self.length, **options)
        for kind in kinds:
            rows = np.asarray(pattern.layers_of(kind.number), np.int32)
            ys[kind.ys] = [leaf[rows] for leaf in ys[kind.ys]]
        return carry, ys

    def reference(self, init: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays]:
        """Do the same by the plain checkpointed scan, which has all derivatives."""
        return self.plain(self.remat.kept.checkpoint, init, xs, shared)

    def perturbed(
        self, init: Sequence[bool], xs: Sequence[bool], shared: Sequence[bool], ys: Sequence[bool]
    ) -> Perturbed:
        """Which leaves are differentiated, given which inputs are."""
        layers = [(kind.jaxpr, kind.pick_shared(shared), xs[kind.xs]) for kind in self.kinds]
        return Perturbed(tuple(init), tuple(active_carry(layers, init)), tuple(xs), tuple(shared), tuple(ys))

    def active_outputs(self, perturbed: Perturbed) -> Mask:
        """Which of the stacked outputs have a tangent."""

        def of(kind: Kind) -> list[bool]:
            inputs = [*kind.pick_shared(perturbed.shared), *perturbed.carry, *perturbed.xs[kind.xs]]
            return active_outputs(kind.jaxpr, inputs)[kind.carries :]

        return tuple(is_ for kind in self.kinds for is_ in of(kind))

    @property
    def carry_types(self) -> list[Any]:
        """The types of the leaves of every carry, those of the traced layer."""
        kind = self.kinds[0]
        return [var.aval for var in kind.jaxpr.invars[len(kind.shared) :][: kind.carries]]

    def pullbacks(self, perturbed: Perturbed, kept: Kept, xs: Arrays, shared: Arrays) -> list[LayerPullback]:
        """The pullback of a layer of each kind, which keeps that of its internals."""

        def of(kind: Kind) -> LayerPullback:
            perturbed_part = perturbed.of_part(kind.xs, kind.ys)
            pullback = LayerPullback(kind.layer, perturbed_part, evaluate=kind.evaluated.layer)
            if kept == NOTHING:
                return pullback
            x = jax.eval_shape(lambda: self.inputs(kind, [*map(at_least_one, xs)], 0))
            # By types alone: the forward and the reverse sweep must find the same residuals.
            return pullback.with_residuals(shared, self.carry_types, x, kept.checkpoint)

        return [of(kind) for kind in self.kinds]

    def room(self, pullbacks: Sequence[LayerPullback], parts: Iterable[range]) -> list[Arrays]:
        """Buffers of each kind for what its layers save, of one of these ranges of numbers at a time."""

        def most(kind: Kind) -> int:
            return max(
                min(1, self.rows(kind)), *(int(self.entry(kind, part.stop, part.start)) for part in parts)
            )

        return [
            empty_stack(pullback.residuals.types if pullback.residuals else [], most(kind))
            for kind, pullback in zip(self.kinds, pullbacks, strict=True)
        ]

    def saved(
        self, saved: list[Arrays], kind: Kind, number: Index, first: Index, new: Arrays
    ) -> list[Arrays]:
        """The buffers with what the layer with this number saved, `first` being the range's first number."""
        entry = self.entry(kind, number, first)
        return [
            write(buffers, entry, new) if k == kind.number else buffers for k, buffers in enumerate(saved)
        ]


def by_rules(spec: SweepSpec, perturbed: Perturbed) -> SweepSpec:
    """The sweep for derivatives of its gradient: a `jax.custom_vjp` has no jvp, and its rule has."""

    def of(kind: Kind) -> Kind:
        mask = [*kind.pick_shared(perturbed.shared), *perturbed.carry, *perturbed.xs[kind.xs]]
        jaxpr, constants = without_constants(primal_of(kind.jaxpr, mask))
        return replace(kind, by_rules=replace(kind, jaxpr=jaxpr, constants=tuple(constants)))

    return replace(spec, kinds=tuple(map(of, spec.kinds)))
