"""One step of a loop without a bound, as a jaxpr, and what transformations make of it.

The carry of the loop begins with a bool, whether it runs on: a step takes it and
returns the next one. So there is no condition beside the step, and the loop, its
derivatives and its mapped forms are all of one kind:

    step    consts, (runs, *carry) -> (runs, *carry)
    loop    while any(runs): carry = step(consts, carry)

    with_tangents    the step for a carry and its tangents: forward mode
    mapped           the step for a batch, whose examples may stop apart: `jax.vmap`
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from .._activity import active_carry
from .._compat import batch_jaxpr, without_constants
from .._sweep.gradient import merge, pick
from .._sweep.rules import of_part, ruled
from .._sweep.slots import Arrays, Mask, types_of
from .._sweep.store import zeros_of


class Differentiated(NamedTuple):
    """Which constants and which leaves of the carry have tangents, or cotangents."""

    consts: Mask
    # What depends on one of these is one of them
    carry: Mask

    @property
    def inputs(self) -> Mask:
        return (*self.consts, *self.carry)


@dataclass(frozen=True)
class Step:
    """A step `(consts, carry) -> carry` on flat lists of arrays.

    Attributes:
        jaxpr: the step, without constants of its own. The first leaf of the carry is
            whether the loop runs on.
        kept: which leaves of the carry a reversal needs, the first among them. Others
            are only added to or written to (`written.py`).
        max_carries: how many carries are kept at a time.
        stops_apart: whether the step is of a batch whose examples stop apart, or of a
            `jax.shard_map` whose devices do. It then changes nothing in one that is
            done.
    """

    jaxpr: Jaxpr
    kept: Mask
    max_carries: int
    stops_apart: bool = False

    @property
    def consts(self) -> int:
        """The number of constants."""
        return len(self.jaxpr.invars) - len(self.kept)

    @property
    def types(self) -> tuple[list[Any], list[Any]]:
        """The types of the constants and of the carry."""
        types = types_of(self.jaxpr.invars)
        return types[: self.consts], types[self.consts :]

    def __call__(self, consts: Arrays, carry: Arrays) -> Arrays:
        return eval_jaxpr(self.jaxpr, (), *consts, *carry)

    def whole(self, kept: Arrays) -> Arrays:
        """A carry with zeros for the leaves that are not kept: what a step makes of the
        kept ones, and its derivatives, don't depend on them.
        """
        _, carry_types = self.types
        unknown = []
        for type_, is_kept in zip(carry_types, self.kept, strict=True):
            unknown.append(None if is_kept else zeros_of(type_))
        return merge(unknown, kept, self.kept)

    def advance(self, consts: Arrays, kept: Arrays) -> Arrays:
        """The kept leaves after a step, from those before it."""
        jaxpr, used = dce_jaxpr(self.jaxpr, self.kept)
        inputs = [*consts, *self.whole(kept)]
        return eval_jaxpr(jaxpr, (), *pick(inputs, used))

    def pull_back(
        self, of: Differentiated, consts: Arrays, kept: Arrays, cotangents: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The cotangents of the differentiated constants and leaves before a step, from
        those of the leaves after it.
        """
        inputs = [*consts, *self.whole(kept)]
        step, part = of_part(self._of_inputs, (inputs,), of.inputs, of.carry)
        _, pullback = jax.vjp(step, part)
        (found,) = pullback(cotangents)
        count = sum(of.consts)
        return found[:count], found[count:]

    def _of_inputs(self, inputs: Arrays) -> Arrays:
        return eval_jaxpr(self.jaxpr, (), *inputs)

    def differentiated(self, consts: Mask, carry: Mask) -> Differentiated:
        """Which leaves have tangents, where these constants and leaves of the first
        carry have.
        """
        found = active_carry(
            [(self.jaxpr, consts, ())],
            carry,
            # As JAX finds it: a step may refuse to differentiate what has no tangent.
            lambda jaxpr, nonzero: ruled(jaxpr, nonzero).active,
        )
        return Differentiated(consts, tuple(found))

    def with_tangents(self, of: Differentiated) -> tuple["Step", Arrays]:
        """The step for `[*consts, *tangents], [*carry, *tangents]`; and constants that
        it takes before these.
        """
        consts_types, carry_types = self.types
        types = (
            consts_types,
            _tangent_types(consts_types, of.consts),
            carry_types,
            _tangent_types(carry_types, of.carry),
        )

        def run(
            consts: Arrays, consts_dot: Arrays, carry: Arrays, carry_dot: Arrays
        ) -> Arrays:
            inputs = [*consts, *carry]
            step, part = of_part(self._of_inputs, (inputs,), of.inputs)
            results, tangents = jax.jvp(step, (part,), ([*consts_dot, *carry_dot],))
            return [*results, *pick(tangents, of.carry)]

        jaxpr, constants = without_constants(jax.make_jaxpr(run)(*types))
        # A leaf that is only added to or written to has such a tangent.
        kept = (*self.kept, *pick(self.kept, of.carry))
        return replace(self, jaxpr=jaxpr, kept=kept), constants

    def mapped(self, axis: Any, consts: Mask, carry: Mask) -> tuple["Step", Mask]:
        """The step for a batch, where these constants and leaves of the carry have its
        axis, as the first; and which leaves of the carry have it.

        If its examples stop apart, and those of `self` do not, it takes the kept leaves
        of the first carry as further constants, after the others.
        """
        # A leaf that a step makes mapped is so from the beginning.
        while True:
            closed, found = batch_jaxpr(self._closed, axis, (*consts, *carry), carry)
            if tuple(found) == carry:
                break
            carry = tuple(found)
        runs_is_mapped = carry[0]
        if not runs_is_mapped or self.stops_apart:
            jaxpr, constants = without_constants(closed)
            assert not constants, "batching rules made constants"
            return replace(self, jaxpr=jaxpr), carry
        stopping = self.stopping()
        every = (True,) * len(carry)
        first = (True,) * sum(self.kept)
        closed, _ = batch_jaxpr(
            stopping._closed, axis, (*consts, *first, *every), every
        )
        return replace(stopping, jaxpr=without_constants(closed)[0]), every

    @property
    def _closed(self) -> ClosedJaxpr:
        return ClosedJaxpr(self.jaxpr, ())

    def stopping(self) -> "Step":
        """The step that changes nothing once the loop is over. It takes the kept leaves
        of the first carry as further constants, after the others.
        """

        def run(consts: Arrays, first: Arrays, carry: Arrays) -> Arrays:
            def choose(if_running: Any, otherwise: Any) -> Any:
                return jax.tree.map(
                    lambda new, old: jnp.where(carry[0], new, old),
                    if_running,
                    otherwise,
                )

            # A step of an example that is done starts from its first carry, from which
            # it has a derivative; from the last it may divide by zero, and the zero
            # cotangent of its result would become NaN.
            known = choose(pick(carry, self.kept), [*map(lax.stop_gradient, first)])
            results = self(consts, merge(carry, known, self.kept))
            return choose(results, carry)

        consts_types, carry_types = self.types
        first_types = pick(carry_types, self.kept)
        closed = jax.make_jaxpr(run)(consts_types, first_types, carry_types)
        return replace(self, jaxpr=without_constants(closed)[0], stops_apart=True)


def _tangent_types(types: Sequence[Any], mask: Mask) -> list[Any]:
    return [type_.to_tangent_aval() for type_ in pick(types, mask)]
