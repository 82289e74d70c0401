"""Layers of several kinds in one sweep: what those of a kind are given, and which layer
is of which kind.

A stack of one class of layers has one `Kind`: the layer as a jaxpr. A `StackedPattern`
(attention, attention, experts, attention, ...) has several, each with its own stacks of
weights, and a `Pattern` that says which layer is of which kind. All kinds take and
return the same carry.

    index   0  1  2  3  4
    kind    a  a  b  a  b
    row     0  1  0  2  1         in the stacks of the layer's kind

A jaxpr here has no constants: what the layer closes over is the first of what layers
share, so that JAX sees it as arguments of the sweep.
"""

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from .. import _xla_hints as xla_hints
from .._compat import without_constants
from .._memory_spaces import is_on_host
from .gathers import (
    Gather,
    exchanges_out_of_loops,
    gathered,
    gathers_of,
    last_exchange,
    run_beside_gathers,
    scattered,
    without_gathers,
)
from .programs import found_in
from .slots import Arrays, Carry, Mask, OfKinds, inverted, types_of
from .store import Index, write

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """Layers of one kind."""

    # The kind's place in all lists with an entry for each kind.
    number: int
    # `(shared, carry, x) -> (carry, y)`, on leaves, without constants: what all layers
    # share, the carry, and the layer's own inputs.
    jaxpr: Jaxpr
    # The number of leaves of the carry.
    carries: int
    # Which of the stacks for `x` it takes whole, instead of the layer's entry.
    unsliced: Mask
    # What computes the values of a sweep that is differentiated, if not `jaxpr`: the
    # forward rules of `jax.custom_vjp`s are in it, which may give other values than the
    # functions. None if there are no such rules.
    values_jaxpr: Jaxpr | None = None
    # Whether derivatives of its derivatives are computed, in forward mode.
    in_forward_mode: bool = False
    # For each leaf of `x` how it is gathered before `jaxpr` takes it; None for one that
    # isn't, and () where the jaxprs gather by themselves.
    gathers: tuple[Gather | None, ...] = ()
    # What the forward sweep finds to save, for the reverse sweep, which must find the
    # same. It lives with the trace of the layer.
    residuals: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def output_types(self) -> list[Any]:
        """The types of the leaves of `y`, of one layer."""
        return types_of(self.jaxpr.outvars[self.carries :])

    @property
    def sliced(self) -> Mask:
        """Of which stacks in `x` it takes an entry."""
        return tuple(inverted(self.unsliced))

    @functools.cached_property
    def read_entries(self) -> Mask:
        """Of which stacks in `x` it reads the layer's entry: they are sliced, and it
        uses that. Others need not be brought from the host.
        """
        is_used = [True] * len(self.jaxpr.outvars)
        _, is_read = dce_jaxpr(self.jaxpr, is_used)
        _, _, x_is_read = self.split(is_read)
        return tuple(map(operator.and_, x_is_read, self.sliced))

    def split(
        self, inputs: Sequence[T]
    ) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """`shared`, `carry` and `x` of a layer's inputs, or of what is known of
        each.
        """
        stop = len(inputs) - len(self.unsliced)
        start = stop - self.carries
        return inputs[:start], inputs[start:stop], inputs[stop:]

    def gathers_apart(self) -> "Kind":
        """The kind for loops that gather what their layers take; itself if layers
        gather nothing.
        """
        gathers, jaxpr, values = found_in(
            self.jaxpr, ("gathers", self.values_jaxpr), self._split_gathers
        )
        if not any(gathers):
            return self
        return replace(self, gathers=gathers, jaxpr=jaxpr, values_jaxpr=values)

    def _split_gathers(self) -> tuple[tuple[Gather | None, ...], Jaxpr, Jaxpr | None]:
        jaxpr = self.jaxpr
        values = self.values_jaxpr
        gathers = gathers_of(jaxpr, self.split(jaxpr.invars)[2])
        if values is not None:
            in_values = gathers_of(values, self.split(values.invars)[2])
            # A rule may gather what the layer doesn't, or the other way round.
            for place, pair in enumerate(zip(gathers, in_values, strict=True)):
                if None in pair:
                    gathers[place] = in_values[place] = None
            values = without_gathers(values, in_values)
        return tuple(gathers), without_gathers(jaxpr, gathers), values

    def is_ahead(self, stacks: Arrays) -> list[bool]:
        """Which entries of these stacks loops read a layer ahead, so that nothing waits
        for them: those that come from the host, and those that are gathered.
        """
        mask = []
        for stack, is_read, gather in zip(
            stacks, self.read_entries, self._all_gathers, strict=True
        ):
            mask.append(is_read and (gather is not None or is_on_host(stack)))
        return mask

    def gathered(self, x: Sequence[Any]) -> list[Any]:
        """Entries of stacks as `jaxpr` takes them; None for those that are None."""
        return [*map(gathered, x, self._all_gathers)]

    def gathered_types(self, types: Sequence[Any]) -> tuple[Any, ...]:
        """The types of what `gathered` returns."""
        whole = []
        for type_, gather in zip(types, self._all_gathers, strict=True):
            whole.append(type_ if gather is None else gather.outvars[0].aval)
        return tuple(whole)

    def scattered(self, x_ct: Arrays, is_perturbed: Sequence[bool]) -> Arrays:
        """The cotangents of perturbed entries of stacks, from those of what they are
        gathered to.
        """
        gathers = itertools.compress(self._all_gathers, is_perturbed)
        return [*map(scattered, x_ct, gathers)]

    @property
    def _all_gathers(self) -> Sequence[Gather | None]:
        return self.gathers or (None,) * len(self.unsliced)

    def with_layer(self, closed: ClosedJaxpr, shared: Arrays) -> "tuple[Kind, Arrays]":
        """The kind with another layer, and what that shares: its constants first."""
        jaxpr, constants = without_constants(closed)
        return replace(self, jaxpr=jaxpr), [*constants, *shared]

    def layer(self, shared: Arrays, carry: Carry, x: Arrays) -> tuple[Carry, Arrays]:
        """The layer, for derivatives."""
        evaluate = eval_jaxpr
        if self.in_forward_mode:
            evaluate = xla_hints.eval_product_tangents_apart
        outputs = evaluate(self.jaxpr, (), *shared, *carry, *x)
        return outputs[: self.carries], outputs[self.carries :]

    def values(
        self, shared: Arrays, carry: Carry, x: Arrays, ahead: Sequence[Any]
    ) -> tuple[Carry, Arrays]:
        """The layer's results, where they are not differentiated. `ahead` is what is
        gathered meanwhile for the next layer.
        """
        jaxpr = self.values_jaxpr or self.jaxpr
        outputs = run_beside_gathers(jaxpr, [*shared, *carry, *x], ahead)
        return outputs[: self.carries], outputs[self.carries :]

    def replayed(
        self, shared: Arrays, carry: Carry, x: Arrays, ahead: Sequence[Any]
    ) -> Carry:
        """The carry that the layer returns; what only its outputs need is left out.

        In a derivative of a replay, JAX could not lower the tangents of outputs where a
        `jax.custom_vjp` computes these, though nothing reads them.
        """
        return run_beside_gathers(self._carry_jaxpr, [*shared, *carry, *x], ahead)

    @functools.cached_property
    def ends_with_exchange(self) -> bool:
        """Whether the layer ends with an exchange of rows; `last_exchange`."""
        return last_exchange(self.jaxpr) is not None

    @functools.cached_property
    def exchanges_out_of_loops(self) -> bool:
        """Whether the layer exchanges rows, other than in a loop of its own."""
        return exchanges_out_of_loops(self.jaxpr)

    @functools.cached_property
    def _carry_jaxpr(self) -> Jaxpr:
        jaxpr = self.values_jaxpr or self.jaxpr
        outputs = len(jaxpr.outvars) - self.carries
        is_needed = [True] * self.carries + [False] * outputs
        carry_jaxpr, _ = dce_jaxpr(jaxpr, is_needed, instantiate=True)
        return carry_jaxpr

    def write(self, stacks: OfKinds, row: Index, entry: Arrays) -> OfKinds:
        """The stacks of all kinds, with this entry in those of this kind."""
        written = [*stacks]
        written[self.number] = write(stacks[self.number], row, entry)
        return written


@dataclass(frozen=True)
class Pattern:
    """Which layer is of which kind."""

    # For each layer, in the order of the axis, the number of its kind.
    kinds: tuple[int, ...]
    # Of the kinds, in alphabetical order; a kind may have no layers.
    names: tuple[str, ...]

    @classmethod
    def of(cls, layers: Iterable[str], kinds: Iterable[str]) -> "Pattern":
        names = sorted(kinds)
        return cls(tuple(map(names.index, layers)), tuple(names))

    def layers_of(self, kind: int) -> list[int]:
        """The indices of the layers of a kind."""
        return [index for index, other in enumerate(self.kinds) if other == kind]

    @functools.cached_property
    def before(self) -> np.ndarray:
        """How many layers of each kind come before each layer: `[layer, kind]`, and one
        row for the end.
        """
        number_of_kinds = len(self.names)
        before = np.zeros((len(self.kinds) + 1, number_of_kinds), np.int32)
        for layer, kind in enumerate(self.kinds):
            before[layer + 1] = before[layer]
            before[layer + 1, kind] += 1
        return before

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The place of each layer in the stacks of its kind."""
        layers = np.arange(len(self.kinds))
        return self.before[layers, [*self.kinds]]
