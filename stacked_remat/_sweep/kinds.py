"""Layers of several kinds in one sweep: what those of a kind are given, and which layer is of which kind."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._compat import without_constants
from .._static import PyTree
from .slots import Arrays, Carry

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

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The place of each layer in the stacks of its kind."""
        return self.before[np.arange(len(self.kinds)), [*self.kinds]]

    def reversed(self) -> "Pattern":
        """The same layers from the last to the first."""
        return replace(self, kinds=self.kinds[::-1])
