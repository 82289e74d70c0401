"""Layers of several kinds in one sweep: what those of a kind are given, and which layer is of which kind."""

import functools
from collections.abc import Iterable, Sequence
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
    """Layers of one kind, `jaxpr` being `(shared, carry, x) -> (carry, y)`.

    Of all that layers share, all stacks and all outputs, `shared`, `xs` and `ys` are theirs. `by_rules`
    is for values alone: a layer with the forward rules of `jax.custom_vjp`s, which takes `constants` first.
    """

    number: int
    jaxpr: Jaxpr
    shared: tuple[int, ...]
    xs: slice = field(hash=False)  # a slice has no hash before Python 3.12
    ys: slice = field(hash=False)
    by_rules: "Kind | None" = None
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
        outputs = eval_jaxpr(self.jaxpr, (), *self.constants, *self.pick_shared(shared), *carry, *x)
        return outputs[: self.carries], outputs[self.carries :]

    @property
    def evaluated(self) -> "Kind":
        """The same, whose `layer` is for values and not for derivatives."""
        return self.by_rules or self


@dataclass(frozen=True)
class Pattern:
    """The number of each layer's kind among these names, in alphabetical order; a kind may have no layers."""

    kinds: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, layers: Iterable[str], kinds: Iterable[str]) -> "Pattern":
        """The pattern of layers of these kinds."""
        names = sorted(kinds)
        return cls(tuple(map(names.index, layers)), tuple(names))

    def layers_of(self, kind: int) -> list[int]:
        """The indices of the layers of a kind."""
        return [index for index, other in enumerate(self.kinds) if other == kind]

    @functools.cached_property
    def before(self) -> np.ndarray:
        """How many layers of each kind come before each layer: `[layer, kind]`, and one row for the end."""
        is_kind = np.asarray(self.kinds, np.int32)[:, None] == np.arange(len(self.names))
        return np.pad(np.cumsum(is_kind, 0, dtype=np.int32), ((1, 0), (0, 0)))

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The place of each layer in the stacks of its kind."""
        return self.before[np.arange(len(self.kinds)), [*self.kinds]]

    def reversed(self) -> "Pattern":
        """The same layers from the last to the first."""
        return replace(self, kinds=self.kinds[::-1])
