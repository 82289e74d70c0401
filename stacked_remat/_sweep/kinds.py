"""Layers of several kinds in one sweep: what those of a kind are given, and which layer
is of which kind.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.interpreters.partial_eval import dce_jaxpr

from .._compat import without_constants
from .slots import Arrays, Carry, Mask, OfKinds
from .store import Index, write

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """Layers of one kind, `jaxpr` being `(shared, carry, x) -> (carry, y)`.

    Of the stacks in `x` it takes those that are `unsliced` whole.
    """

    number: int
    jaxpr: Jaxpr
    carries: int
    unsliced: Mask
    # What computes the values of a sweep that is differentiated, if not `jaxpr`: the
    # forward rules of `jax.custom_vjp`s are in it, which may give other values than the
    # functions.
    values_jaxpr: Jaxpr | None = None
    # Derivatives of its derivatives are computed, in forward mode
    in_forward_mode: bool = False
    # What the forward sweep finds to save, for the reverse sweep, which must find the
    # same. It lives with the trace of the layer.
    residuals: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def output_types(self) -> list[Any]:
        return [out.aval for out in self.jaxpr.outvars[self.carries :]]

    @property
    def sliced(self) -> Mask:
        """Of which stacks in `x` it takes an entry."""
        return tuple(not whole for whole in self.unsliced)

    @functools.cached_property
    def read_entries(self) -> Mask:
        """Of which stacks in `x` it reads the layer's entry: they are sliced, and it
        uses that.
        """
        _, is_read = dce_jaxpr(self.jaxpr, [True] * len(self.jaxpr.outvars))
        of_x = is_read[len(is_read) - len(self.unsliced) :]
        return tuple(
            read and not whole for read, whole in zip(of_x, self.unsliced, strict=True)
        )

    def carry_of(self, inputs: Sequence[T]) -> Sequence[T]:
        """Those of a layer's inputs, or of what is known of each, that are its
        carry.
        """
        last = len(inputs) - len(self.unsliced)
        return inputs[last - self.carries : last]

    def with_layer(self, closed: ClosedJaxpr, shared: Arrays) -> "tuple[Kind, Arrays]":
        """The kind with another layer, and what that shares: its constants first."""
        jaxpr, constants = without_constants(closed)
        return replace(self, jaxpr=jaxpr), [*constants, *shared]

    def layer(self, shared: Arrays, carry: Carry, x: Arrays) -> tuple[Carry, Arrays]:
        """The layer, for derivatives."""
        evaluate = _eval_with_barriers if self.in_forward_mode else eval_jaxpr
        outputs = evaluate(self.jaxpr, (), *shared, *carry, *x)
        return outputs[: self.carries], outputs[self.carries :]

    def values(self, shared: Arrays, carry: Carry, x: Arrays) -> tuple[Carry, Arrays]:
        """What the layer returns, and not for derivatives."""
        outputs = eval_jaxpr(self.values_jaxpr or self.jaxpr, (), *shared, *carry, *x)
        return outputs[: self.carries], outputs[self.carries :]

    def write(self, stacks: OfKinds, row: Index, entry: Arrays) -> OfKinds:
        """The stacks of all kinds, with this entry in those of this kind."""
        return [
            write(own, row, entry) if k == self.number else own
            for k, own in enumerate(stacks)
        ]


def _eval_with_barriers(jaxpr: Jaxpr, _: tuple[()], *inputs: Any) -> list[Any]:
    """`eval_jaxpr`, where the tangent of a product, a sum of two, is there before what
    reads it.

    Otherwise XLA for GPUs holds the parts of all such sums at once.
    """
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        before_reads = (
            _barrier if equation.primitive.name == "dot_general" else lambda x: x
        )
        own = [*{var: None for var in equation.invars if isinstance(var, Var)}]
        one = jaxpr.replace(invars=own, eqns=[equation], outvars=equation.outvars)
        found = eval_jaxpr(one, (), *(before_reads(known[var]) for var in own))
        known |= zip(equation.outvars, map(before_reads, found), strict=True)
    return [known[out] if isinstance(out, Var) else out.val for out in jaxpr.outvars]


@jax.custom_jvp
def _barrier(x: Any) -> Any:
    return x


_barrier.defjvp(
    lambda primals, tangents: (_barrier(*primals), lax.optimization_barrier(*tangents))
)


@dataclass(frozen=True)
class Pattern:
    """The number of each layer's kind among these names, in alphabetical order; a kind
    may have no layers.
    """

    kinds: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, layers: Iterable[str], kinds: Iterable[str]) -> "Pattern":
        names = sorted(kinds)
        return cls(tuple(map(names.index, layers)), tuple(names))

    def layers_of(self, kind: int) -> list[int]:
        return [index for index, other in enumerate(self.kinds) if other == kind]

    @functools.cached_property
    def before(self) -> np.ndarray:
        """How many layers of each kind come before each layer: `[layer, kind]`, and one
        row for the end.
        """
        is_kind = np.asarray(self.kinds, np.int32)[:, None] == np.arange(
            len(self.names)
        )
        return np.pad(np.cumsum(is_kind, 0, dtype=np.int32), ((1, 0), (0, 0)))

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The place of each layer in the stacks of its kind."""
        return self.before[np.arange(len(self.kinds)), [*self.kinds]]
