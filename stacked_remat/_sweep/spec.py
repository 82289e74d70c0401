"""A sweep on lists of arrays: its forward loop, its reverse loop, and the scan that it stands for."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr
from jaxtyping import Array

from .._schedule import Schedule
from .activity import active_carry
from .forward import forward_sweep, forward_sweep_on_host
from .gradient import Gradients, LayerPullback, Wanted, pick
from .reverse import Layer, Replay, reverse_sweep
from .slots import Carry, Kept, KeptHead, read, repeat, room, write

Arrays = list[Array]
Mask = Sequence[bool]


@dataclass(frozen=True)
class Head:
    """The layers that run first, whose inputs and residuals are kept and which are not replayed.

    Attributes:
        length: how many.
        checkpoint: which residuals they keep.
    """

    length: int
    checkpoint: Callable[[Callable], Callable]


@dataclass(frozen=True)
class Problem:
    """Everything about a sweep that is not an array.

    Layers are numbered as they run. The schedule is that of the layers after the head, which it numbers from
    zero.

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
    head: Head | None = None

    @property
    def before(self) -> int:
        """The number of layers that run before the schedule's."""
        return 0 if self.head is None else self.head.length

    @property
    def length(self) -> int:
        """The number of layers."""
        return self.before + self.schedule.length

    def layer(self, shared: Arrays, carry: Carry, x: Arrays) -> tuple[Carry, Arrays]:
        """Run one layer."""
        outputs = eval_jaxpr(self.jaxpr, shared, *carry, *x)
        return outputs[: self.carries], outputs[self.carries :]

    def entry(self, index: Any) -> Any:
        """Say where the layer that runs as number `index` stands in stacked arrays."""
        return self.length - 1 - index if self.reverse else index

    def take(self, stacked: Array, index: Any) -> Array:
        """Read the part of a stacked array that belongs to layer `index`."""
        return lax.dynamic_index_in_dim(stacked, self.entry(index), keepdims=False)

    def put(self, stacked: Array, index: Any, entry: Array) -> Array:
        """Replace the part of a stacked array that belongs to layer `index`."""
        return lax.dynamic_update_index_in_dim(stacked, entry, self.entry(index), 0)

    def inputs(self, shared: Arrays, xs: Arrays, index: Any, carry: Carry) -> tuple[Arrays, Carry, Arrays]:
        """Collect what layer `index` takes, as `layer` takes it."""
        return shared, carry, [self.take(leaf, index) for leaf in xs]

    def plain(self, layer: Callable, init: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays]:
        """Scan plainly over `layer`."""
        return lax.scan(
            lambda carry, x: layer(shared, carry, x),
            init,
            xs,
            length=self.length,
            reverse=self.reverse,
            unroll=self.unroll,
        )

    def reference(self, init: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays]:
        """Do the same by the plain checkpointed scan, which has all derivatives."""
        return self.plain(self.checkpoint(self.layer), init, xs, shared)

    def forward(self, wanted: Wanted, init: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays, Kept]:
        """Sweep forward."""
        if self.head is None:
            return self._forward_scheduled(init, xs, shared)
        pullback = self._pullback(wanted, self.head.checkpoint, init, xs, shared)

        def layer(carry: Carry, index: Any) -> tuple[Carry, tuple[Arrays, Carry, Arrays]]:
            (new_carry, y), saved = pullback.save(*self.inputs(shared, xs, index, carry))
            return new_carry, (y, carry, saved)

        carry, (head_ys, carries, saved) = lax.scan(layer, init, jnp.arange(self.before), unroll=self.unroll)
        carry, ys, kept = self._forward_scheduled(carry, xs, shared)
        if self.reverse:
            ys = [lax.concatenate([late, early[::-1]], 0) for early, late in zip(head_ys, ys, strict=True)]
        else:
            ys = [lax.concatenate(pair, 0) for pair in zip(head_ys, ys, strict=True)]
        return carry, ys, kept._replace(head=KeptHead(carries, saved), origin=None)

    def _forward_scheduled(self, carry: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays, Kept]:
        length = self.schedule.length

        def step(index: Any, carry: Carry) -> tuple[Carry, Arrays]:
            return self.layer(*self.inputs(shared, xs, index + self.before, carry))

        def write_output(index: Any, ys: Arrays, y: Arrays) -> Arrays:
            return write(ys, length - 1 - index if self.reverse else index, y)

        if not self.on_host:
            return forward_sweep(step, carry, self.schedule, reverse=self.reverse, unroll=self.unroll)
        _, y = jax.eval_shape(functools.partial(step, 0), carry)
        return forward_sweep_on_host(
            step, carry, room(y, length), self.schedule, write_output=write_output, unroll=self.unroll
        )

    def wanted(self, init: Mask, xs: Mask, shared: Mask, ys: Mask) -> Wanted:
        """Say what to differentiate when these leaves are."""
        carry = active_carry(self.jaxpr, shared, init, xs)
        return Wanted(tuple(init), tuple(carry), tuple(xs), tuple(shared), tuple(ys))

    def pullback(
        self, wanted: Wanted, kept: Kept, xs: Arrays, shared: Arrays, carry_ct: Carry, ys_ct: Arrays
    ) -> tuple[Carry, Arrays, Arrays]:
        """Sweep back to the cotangents of the wanted leaves of init, xs and shared."""
        visitor, replay = self._visitor(wanted, self.checkpoint, kept, xs, shared, ys_ct, self.before)
        state = visitor.init()
        carry_ct, state = reverse_sweep(
            replay, visitor, kept, carry_ct, state, self.schedule, unroll=self.unroll
        )
        if self.head is not None:
            visitor, _ = self._visitor(wanted, self.head.checkpoint, kept, xs, shared, ys_ct, 0)
            carry_ct, state = self._visit_head(visitor, kept, carry_ct, state)
        shared_ct, xs_ct = state
        of_init = [want for want, active in zip(wanted.init, wanted.carry, strict=True) if active]
        return pick(carry_ct, of_init), xs_ct, shared_ct

    def _pullback(
        self, wanted: Wanted, checkpoint: Callable, carry: Carry, xs: Arrays, shared: Arrays
    ) -> LayerPullback:
        pullback = LayerPullback(self.layer, wanted, checkpoint)
        if checkpoint is jax.checkpoint:
            return pullback
        example = jax.eval_shape(lambda: (carry, [leaf[0] for leaf in xs]))
        return pullback.with_residuals(shared, *example)

    def _visitor(
        self,
        wanted: Wanted,
        checkpoint: Callable,
        kept: Kept,
        xs: Arrays,
        shared: Arrays,
        ys_ct: Arrays,
        before: int,
    ) -> tuple[Gradients, Replay]:
        """Make the visitor of the layers from number `before` on, and what runs them again."""
        pullback = self._pullback(wanted, checkpoint, kept.first(), xs, shared)

        def save(index: Any, carry: Carry) -> tuple[Carry, Arrays]:
            if pullback.saves_on_host:
                raise ValueError(
                    "With layers that are cut, save_block_internals keeps internals on the device while a "
                    "segment is replayed, and here some are moved to the host: by a policy of JAX that "
                    "offloads, or by a fold inside the layer. Use one that does not offload, and "
                    'save_carries="offload" beside it.'
                )
            (carry, _), saved = pullback.save(*self.inputs(shared, xs, index + before, carry))
            return carry, saved

        replay = Replay(
            advance=lambda index, carry: self.layer(*self.inputs(shared, xs, index + before, carry))[0],
            save=save if pullback.saved else None,
        )
        visitor = Gradients(
            pullback,
            shared,
            take=lambda stacked, index: self.take(stacked, index + before),
            put=lambda stacked, index, entry: self.put(stacked, index + before, entry),
            xs=xs,
            ys_cotangent=ys_ct,
        )
        return visitor, replay

    def _visit_head(self, visitor: Gradients, kept: Kept, carry_ct: Carry, state: Any) -> tuple[Carry, Any]:
        assert kept.head is not None
        carries, saved = kept.head

        def visit(k: Any, state: tuple[Carry, Any]) -> tuple[Carry, Any]:
            index = self.before - 1 - k
            return visitor(Layer(index, read(carries, index), read(saved, index)), *state)

        # A loop of the kind that the other visits are in: programs within a layer are shared by loops of one
        # kind.
        visits = self.schedule.segments if self.on_host else [run.visits for run in self.schedule.runs]
        is_static = self.unroll is True or len({*visits}) == 1
        trips = self.before if is_static else jnp.int32(self.before)
        return repeat(trips, visit, (carry_ct, state), self.unroll, self.before)
