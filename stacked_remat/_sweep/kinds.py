"""Layers of several kinds in one sweep: what those of a kind are given, and which layer is of which kind."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._compat import without_constants
from .._static import PyTree
from .._trips import known_trips
from .slots import Arrays, Carry, entry_at
from .store import Index

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """Layers of one kind.

    Attributes:
        number: its place among the kinds.
        jaxpr: one layer, `(shared, carry, x) -> (carry, y)` on lists of arrays.
        shared: which of the inputs that all layers share it reads.
        xs: which of the stacks hold its layers' own inputs, an entry for each layer of this kind.
        ys: which of the stacked outputs are theirs.
        by_rules: one layer for values alone, with the forward rules of `jax.custom_vjp`s in their place, for
            derivatives of a gradient; None where it is `jaxpr`.
        constants: what these rules close over, the first inputs of `by_rules`.
    """

    number: int
    jaxpr: Jaxpr
    shared: tuple[int, ...]
    xs: slice = field(hash=False)  # a slice has no hash before Python 3.12
    ys: slice = field(hash=False)
    by_rules: Jaxpr | None = None
    constants: tuple[PyTree, ...] = field(default=(), compare=False)

    @property
    def carries(self) -> int:
        """The number of carry leaves."""
        return len(self.jaxpr.outvars) - (self.ys.stop - self.ys.start)

    @property
    def output_types(self) -> list[Any]:
        """The types of a layer's outputs."""
        return [out.aval for out in self.jaxpr.outvars[self.carries :]]

    def with_layer(self, closed: ClosedJaxpr, shared: list[PyTree]) -> "Kind":
        """The kind with another layer on the same inputs, whose constants are put behind the shared ones."""
        jaxpr, constants = without_constants(closed)
        places = range(len(shared), len(shared) + len(constants))
        shared += constants
        return replace(self, jaxpr=jaxpr, shared=(*places, *self.shared))

    def pick_shared(self, shared: Sequence[T]) -> list[T]:
        """What it reads of the shared inputs."""
        return [shared[i] for i in self.shared]

    def layer(self, shared: Arrays, carry: Carry, x: Arrays) -> tuple[Carry, Arrays]:
        """Run one layer."""
        return self.layer_of(self.pick_shared(shared), carry, x)

    @property
    def evaluated(self) -> "Kind":
        """The same, whose `layer` is for values and not for derivatives."""
        return self if self.by_rules is None else replace(self, jaxpr=self.by_rules, by_rules=None)

    def layer_of(self, given: Arrays, carry: Carry, x: Arrays) -> tuple[Carry, Arrays]:
        """Run one layer on what it reads of the shared inputs."""
        constants = self.constants if self.by_rules is None else ()
        outputs = eval_jaxpr(self.jaxpr, (), *constants, *given, *carry, *x)
        return outputs[: self.carries], outputs[self.carries :]


@dataclass(frozen=True)
class Pattern:
    """Which layer is of which kind.

    Attributes:
        kinds: the number of each layer's kind, by the layer's index on the axis.
        count: how many kinds there are. Some may have no layers.
    """

    kinds: tuple[int, ...]
    count: int

    def layers_of(self, kind: int) -> list[int]:
        """The indices of the layers of a kind."""
        return [index for index, other in enumerate(self.kinds) if other == kind]

    @functools.cached_property
    def before(self) -> np.ndarray:
        """How many layers of each kind come before each layer: `[layer, kind]`, and one row for the end."""
        is_kind = np.asarray(self.kinds, np.int32)[:, None] == np.arange(self.count)
        return np.concatenate([np.zeros((1, self.count), np.int32), np.cumsum(is_kind, 0, dtype=np.int32)])

    def counts(self, indices: Iterable[int]) -> list[int]:
        """How many of the layers at these indices are of each kind."""
        kinds = np.asarray([self.kinds[index] for index in indices], np.int32)
        return np.bincount(kinds, minlength=self.count).tolist()

    def at(
        self, index: Index, run: Callable[[int, Index, T], T], state: T, indices: Callable[[], Iterable[int]]
    ) -> T:
        """`run(kind, row, state)` for the layer at `index`, its kind and its row in the stacks of that kind.

        `indices` are all that it is called for by the loop around.

        `run` is traced once for each kind with layers, in a loop of its own that runs once or not at all.
        There XLA updates the state in place; the branches of a conditional copy stacks (GPUs) and carries
        (TPUs).
        """
        if isinstance(index, int):
            kind = self.kinds[index]
            return run(kind, int(self.before[index, kind]), state)
        kinds, rows = np.asarray(self.kinds, np.int32), self.before[np.arange(len(self.kinds)), [*self.kinds]]
        kind, row = entry_at(kinds, index), entry_at(rows, index)
        counts = self.counts(indices())
        for k in sorted({*self.kinds}):
            trips = (kind == k).astype(np.int32)
            # Without the counter, which is 0, XLA for TPUs reads the weights of all kinds ahead of the loops.
            with known_trips(counts[k], sum(counts)):
                state = lax.fori_loop(0, trips, lambda i, state, k=k: run(k, row + i, state), state)
        return state
