"""A sweep on lists of arrays: its forward loop, its reverse loop, and the scan that it stands for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr
from jaxtyping import Array

from ._schedule import Schedule
from ._sweep_activity import active_carry
from ._sweep_forward import forward_sweep, forward_sweep_on_host
from ._sweep_gradient import Gradients, LayerPullback, Wanted, pick
from ._sweep_reverse import Replay, reverse_sweep
from ._sweep_slots import Carry, Kept, room

Arrays = list[Array]
Mask = Sequence[bool]


@dataclass(frozen=True)
class Problem:
    """Everything about a sweep that is not an array.

    Attributes:
        jaxpr: one layer, `(carry, x) -> (carry, y)` in leaves; its constants are the shared inputs.
        carries: number of carry leaves.
        schedule: see `sweep`, like the rest.
    """

    jaxpr: Jaxpr
    carries: int
    schedule: Schedule
    reverse: bool
    unroll: int | bool
    checkpoint: Callable[[Callable], Callable]
    on_host: bool

    def layer(self, shared: Arrays, carry: Carry, x: Arrays) -> tuple[Carry, Arrays]:
        """Run one layer."""
        outputs = eval_jaxpr(self.jaxpr, shared, *carry, *x)
        return outputs[: self.carries], outputs[self.carries :]

    def entry(self, index: Any) -> Any:
        """Say where the layer that runs as number `index` stands in stacked arrays."""
        return self.schedule.length - 1 - index if self.reverse else index

    def take(self, stacked: Array, index: Any) -> Array:
        """Read the part of a stacked array that belongs to layer `index`."""
        return lax.dynamic_index_in_dim(stacked, self.entry(index), keepdims=False)

    def put(self, stacked: Array, index: Any, entry: Array) -> Array:
        """Replace the part of a stacked array that belongs to layer `index`."""
        return lax.dynamic_update_index_in_dim(stacked, entry, self.entry(index), 0)

    def plain(self, layer: Callable, init: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays]:
        """Scan plainly over `layer`."""
        return lax.scan(
            lambda carry, x: layer(shared, carry, x),
            init,
            xs,
            length=self.schedule.length,
            reverse=self.reverse,
            unroll=self.unroll,
        )

    def reference(self, init: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays]:
        """Do the same by the plain checkpointed scan, which has all derivatives."""
        return self.plain(self.checkpoint(self.layer), init, xs, shared)

    def forward(self, init: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays, Kept]:
        """Sweep forward."""

        def step(index: Any, carry: Carry) -> tuple[Carry, Arrays]:
            return self.layer(shared, carry, [self.take(leaf, index) for leaf in xs])

        if not self.on_host:
            return forward_sweep(step, init, self.schedule, reverse=self.reverse, unroll=self.unroll)
        # XLA drops this evaluation: nothing reads the values.
        _, y = step(0, init) if len(self.jaxpr.outvars) > self.carries else (init, [])
        return forward_sweep_on_host(
            step,
            init,
            room(y, self.schedule.length),
            self.schedule,
            write_output=lambda index, ys, y: [self.put(a, index, b) for a, b in zip(ys, y, strict=True)],
            unroll=self.unroll,
        )

    def wanted(self, init: Mask, xs: Mask, shared: Mask, ys: Mask) -> Wanted:
        """Say what to differentiate when these leaves are."""
        carry = active_carry(self.jaxpr, shared, init, xs)
        return Wanted(tuple(init), tuple(carry), tuple(xs), tuple(shared), tuple(ys))

    def pullback(
        self, wanted: Wanted, kept: Kept, xs: Arrays, shared: Arrays, carry_ct: Carry, ys_ct: Arrays
    ) -> tuple[Carry, Arrays, Arrays]:
        """Sweep back to the cotangents of the wanted leaves of init, xs and shared."""
        pullback = LayerPullback(self.layer, wanted, self.checkpoint)
        if self.checkpoint is not jax.checkpoint:
            example = jax.eval_shape(lambda: (kept.first(), [leaf[0] for leaf in xs]))
            pullback = pullback.with_residuals(shared, *example)
        visitor = Gradients(pullback, shared, self.take, self.put, xs, ys_ct)

        def inputs(index: Any, carry: Carry) -> tuple[Arrays, Carry, Arrays]:
            return shared, carry, [self.take(leaf, index) for leaf in xs]

        replay = Replay(
            advance=lambda index, carry: self.layer(*inputs(index, carry))[0],
            save=(lambda index, carry: pullback.save(*inputs(index, carry))) if pullback.saved else None,
        )
        carry_ct, (shared_ct, xs_ct) = reverse_sweep(
            replay, visitor, kept, carry_ct, visitor.init(), self.schedule, unroll=self.unroll
        )
        return (
            pick(carry_ct, [want for want, active in zip(wanted.init, wanted.carry, strict=True) if active]),
            xs_ct,
            shared_ct,
        )
