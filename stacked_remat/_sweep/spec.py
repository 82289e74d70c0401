"""A sweep over layers on lists of arrays: its forward loop, its reverse loop, and the equivalent scan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr

from .._activity import active_carry
from .._placement import has_host_arrays, on_device, platform
from .._schedule import Schedule, equal
from .forward import forward_sweep, forward_sweep_on_host
from .gradient import (
    LayerPullback,
    LeafVisit,
    LeafVisitor,
    Mask,
    Perturbed,
    merge,
    pick,
    write_gradients,
    zero_gradients,
)
from .reverse import Replay, ReplayedLayer, reverse_sweep
from .slots import Arrays, Carry, Checkpoints, FirstLayersSaved, repeat
from .store import (
    at_least_one,
    empty_stack,
    empty_stack_on_host,
    read,
    read_ahead,
    read_layer,
    settle,
    write,
)

Checkpoint = Callable[[Callable], Callable]


@dataclass(frozen=True)
class FirstLayers:
    """The layers that run first, whose inputs and residuals are kept, and which are not replayed.

    Attributes:
        length: how many.
        checkpoint: which residuals they keep.
    """

    length: int
    checkpoint: Checkpoint


@dataclass(frozen=True)
class SweepSpec:
    """Static description of a sweep.

    Layers are numbered as they run. The schedule covers the layers after the first ones, which it numbers
    from zero.

    Attributes:
        jaxpr: one layer, `(shared, carry, x) -> (carry, y)` in leaves; its constants come first among what is
            shared.
        carries: number of carry leaves.
        schedule: of the layers after the first ones; `None` if there are no others.
        checkpoint, boundaries, first_layers, reverse, unroll: as in `sweep`.
        unsliced: for which of `xs` a layer takes the whole stack.
        read_length: how many layers are read together. Where it is above 1, such a segment takes the place of
            a layer: the schedule counts segments, and the layers of a segment are visited with it.
        keeps_in_segments: whether the carries within segments are kept; if not, a segment that is visited is
            run again first.
    """

    jaxpr: Jaxpr
    carries: int
    schedule: Schedule | None
    checkpoint: Checkpoint = jax.checkpoint
    boundaries: Literal["device", "host"] = "device"
    first_layers: FirstLayers | None = None
    reverse: bool = False
    unroll: int | bool = 1
    unsliced: Mask = ()
    read_length: int = 1
    keeps_in_segments: bool = False

    @property
    def on_host(self) -> bool:
        """Whether segments' first inputs are kept on the host."""
        return self.boundaries == "host"

    @property
    def first(self) -> int:
        """The number of layers that run before the schedule's."""
        return 0 if self.first_layers is None else self.first_layers.length

    @property
    def length(self) -> int:
        """The number of layers, or of segments of `read_length`."""
        return self.first + (0 if self.schedule is None else self.schedule.length)

    @property
    def segment(self) -> "SweepSpec":
        """The sweep over the layers of one segment, which are on the device then."""
        schedule = equal(self.read_length, self.read_length)
        return replace(
            self,
            schedule=schedule,
            checkpoint=jax.checkpoint,
            boundaries="device",
            first_layers=None,
            read_length=1,
            keeps_in_segments=False,
        )

    def layer(self, shared: Arrays, carry: Carry, x: Arrays) -> tuple[Carry, Arrays]:
        """Run one layer."""
        constants = len(self.jaxpr.constvars)
        outputs = eval_jaxpr(self.jaxpr, shared[:constants], *shared[constants:], *carry, *x)
        return outputs[: self.carries], outputs[self.carries :]

    def step(self, shared: Arrays, carry: Carry, x: Arrays) -> tuple[Carry, Arrays]:
        """Run what is read together: one layer, or a segment, whose inputs and outputs are stacked."""
        if self.read_length == 1:
            return self.layer(shared, carry, x)
        return self.segment.plain(self.layer, carry, x, shared)

    def layer_index(self, number: Any) -> Any:
        """The index on the axis of the layer that runs as `number`."""
        return self.length - 1 - number if self.reverse else number

    def run_step(
        self, shared: Arrays, xs: Arrays, number: Any, carry: Carry, fetched: Arrays
    ) -> tuple[Carry, Arrays]:
        """Run the step with this number, reading its own inputs but those that have been fetched."""
        return self.step(shared, carry, self.inputs(xs, self.layer_index(number), fetched))

    def inputs(self, xs: Arrays, index: Any, fetched: Arrays | tuple[()] = ()) -> Arrays:
        """The own inputs of the step at `index`, with those that have been fetched from the host."""
        return read_layer(xs, index, self.unsliced, fetched, self.read_length)

    def fetch(self, xs: Arrays, number: Any) -> Arrays:
        """The inputs of a step that are on the host, for `inputs`, if they are to be read ahead."""
        return read_ahead(xs, self.layer_index(number), self.read_length)

    def primal(self, init: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays]:
        """Run all layers, with nothing kept."""
        if not has_host_arrays(xs):
            return self.plain(self.layer, init, xs, shared)

        def body(loop: tuple[Carry, Arrays], number: Any) -> tuple[tuple[Carry, Arrays], Arrays]:
            carry, fetched = loop
            fetched, number = settle(fetched, number)
            ahead = self.fetch(xs, jnp.minimum(number + 1, self.length - 1))
            carry, y = self.run_step(shared, xs, number, carry, fetched)
            return (carry, ahead), y

        loop, numbers = (init, self.fetch(xs, 0)), jnp.arange(self.length)
        numbers = numbers[::-1] if self.reverse else numbers
        (carry, _), ys = lax.scan(body, loop, numbers, reverse=self.reverse, unroll=self.unroll)
        return carry, self._one_a_layer(ys)

    def _one_a_layer(self, ys: Arrays) -> Arrays:
        """The outputs of all layers, from those of the steps."""
        if self.read_length == 1:
            return ys
        return [leaf.reshape(len(leaf) * self.read_length, *leaf.shape[2:]) for leaf in ys]

    def plain(self, layer: Callable, init: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays]:
        """Scan plainly over `layer`, one at a time."""
        sliced = [not whole for whole in self.unsliced]
        return lax.scan(
            lambda carry, x: layer(shared, carry, merge([*map(at_least_one, xs)], on_device(x), sliced)),
            init,
            pick(xs, sliced),
            length=self.length * self.read_length,
            reverse=self.reverse,
            unroll=self.unroll,
        )

    def reference(self, init: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays]:
        """Do the same by the plain checkpointed scan, which has all derivatives."""
        return self.plain(self.checkpoint(self.layer), init, xs, shared)

    def forward(
        self, perturbed: Perturbed, init: Carry, xs: Arrays, shared: Arrays
    ) -> tuple[Carry, Arrays, Checkpoints]:
        """Sweep forward."""
        if self.first_layers is None:
            return self._forward_scheduled(init, xs, shared)
        pullback = self._pullback(perturbed, self.first_layers.checkpoint, init, xs, shared)

        def layer(carry: Carry, number: Any) -> tuple[Carry, tuple[Arrays, Carry, Arrays]]:
            x = self.inputs(xs, self.layer_index(number))
            (new_carry, y), residuals = pullback.save(shared, carry, x)
            return new_carry, (y, carry, residuals)

        carry, (first_ys, *saved) = lax.scan(layer, init, jnp.arange(self.first), unroll=self.unroll)
        carry, ys, checkpoints = self._forward_scheduled(carry, xs, shared)
        if self.reverse:
            ys = [lax.concatenate([late, early[::-1]], 0) for early, late in zip(first_ys, ys, strict=True)]
        else:
            ys = [lax.concatenate(pair, 0) for pair in zip(first_ys, ys, strict=True)]
        return carry, ys, checkpoints._replace(first_layers=FirstLayersSaved(*saved), origin=None)

    def _forward_scheduled(
        self, carry: Carry, xs: Arrays, shared: Arrays
    ) -> tuple[Carry, Arrays, Checkpoints]:
        def fetch(number: Any) -> Arrays:
            return self.fetch(xs, number + self.first)

        def step(number: Any, carry: Carry, fetched: Arrays) -> tuple[Carry, tuple[Arrays, Arrays | None]]:
            number = number + self.first
            if not self.keeps_in_segments:
                carry, y = self.run_step(shared, xs, number, carry, fetched)
                return carry, (y, None)
            x = self.inputs(xs, self.layer_index(number), fetched)
            carry, y, kept = self.segment._forward_scheduled(carry, x, shared)
            return carry, (y, [slots[1:] for slots in kept.slots])

        if self.schedule is None:
            avals: Any = [out.aval for out in self.jaxpr.outvars[self.carries :]]
            y = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
            return carry, empty_stack(y, 0), Checkpoints([], None, origin=carry)
        length = self.schedule.length

        def write_output(index: Any, outputs: Any, output: Any) -> Any:
            return write(outputs, length - 1 - index if self.reverse else index, output)

        if self.on_host:
            _, (y, kept) = jax.eval_shape(lambda carry: step(0, carry, fetch(0)), carry)
            buffers = empty_stack(y, length), empty_stack_on_host(kept, length)
            carry, (ys, kept), checkpoints = forward_sweep_on_host(
                step, carry, buffers, self.schedule, fetch, write_output=write_output, unroll=self.unroll
            )
        else:
            options: Any = {"reverse": self.reverse, "unroll": self.unroll}
            carry, (ys, kept), checkpoints = forward_sweep(step, carry, self.schedule, fetch, **options)
        return carry, self._one_a_layer(ys), checkpoints._replace(in_segments=kept)

    def perturbed(
        self, init: Sequence[bool], xs: Sequence[bool], shared: Sequence[bool], ys: Sequence[bool]
    ) -> Perturbed:
        """Which leaves are differentiated, given which inputs are."""
        carry = active_carry(self.jaxpr, shared, init, xs)
        return Perturbed(tuple(init), tuple(carry), tuple(xs), tuple(shared), tuple(ys))

    def pullback(
        self,
        perturbed: Perturbed,
        checkpoints: Checkpoints,
        xs: Arrays,
        shared: Arrays,
        carry_ct: Carry,
        ys_ct: Arrays,
    ) -> tuple[Carry, Arrays, Arrays]:
        """Sweep back to the cotangents of the perturbed leaves of init, xs and shared."""
        carry_ct, (shared_ct, xs_ct) = self.sweep_back(
            perturbed,
            checkpoints,
            shared,
            carry_ct,
            ys_ct,
            write_gradients,
            zero_gradients(perturbed, shared, xs),
            xs_in=lambda state: xs,
        )
        of_init = [given for given, active in zip(perturbed.init, perturbed.carry, strict=True) if active]
        return pick(carry_ct, of_init), xs_ct, shared_ct

    def sweep_back(
        self,
        perturbed: Perturbed,
        checkpoints: Checkpoints,
        shared: Arrays,
        carry_ct: Carry,
        ys_ct: Arrays,
        visitor: LeafVisitor,
        state: Any,
        *,
        xs_in: Callable[[Any], Arrays],
    ) -> tuple[Carry, Any]:
        """Visit every layer, from the last to the first.

        Args:
            perturbed: the same as for the forward sweep.
            checkpoints: what the forward sweep kept.
            shared: inputs that all layers share.
            carry_ct: cotangents of the perturbed leaves of the last carry.
            ys_ct: stacked cotangents of the perturbed outputs.
            visitor: returns the cotangents of the perturbed leaves of the layer's input carry, and its state.
            state: the visitor's first state.
            xs_in: the layers' own inputs, stacked, in a state of the visitor, which may replace entries of
                layers that it visits.

        Returns:
            The cotangents of the perturbed leaves of the carry that goes into the first layer, and the state.
        """
        if self.read_length > 1:
            visitor = self._of_segment(perturbed, visitor, checkpoints.in_segments)

        def part(checkpoint: Checkpoint, first: int) -> tuple[Callable, Replay]:
            pullback = self._pullback(perturbed, checkpoint, checkpoints.first(), xs_in(state), shared)
            return self._visitor(pullback, shared, ys_ct, visitor, xs_in, first)

        if self.schedule is not None:
            visit, replay = part(self.checkpoint, self.first)
            carry_ct, state = reverse_sweep(
                replay, visit, checkpoints, carry_ct, state, self.schedule, unroll=self.unroll
            )
        if self.first_layers is not None:
            visit, _ = part(self.first_layers.checkpoint, 0)
            carry_ct, state = self._visit_first(visit, checkpoints, carry_ct, state)
        return carry_ct, state

    def _of_segment(self, perturbed: Perturbed, visitor: LeafVisitor, kept: Carry | None) -> LeafVisitor:
        """A visitor of segments, which visits their layers; `kept` are the carries within segments."""
        sweep = self.segment

        def visit_segment(segment: LeafVisit, state: Any) -> tuple[Carry, Any]:
            first = segment.layer_index * self.read_length

            def visit(layer: LeafVisit, state: Any) -> tuple[Carry, Any]:
                return visitor(replace(layer, layer_index=first + layer.layer_index), state)

            x, shared = segment.x, segment.shared
            if kept is None:
                _, _, checkpoints = sweep.forward(perturbed, segment.carry, x, shared)
            else:
                others = read(kept, segment.layer_index)
                pairs = zip(segment.carry, others, strict=True)
                slots = [lax.concatenate([first[None], rest], 0) for first, rest in pairs]
                checkpoints = Checkpoints(slots, None)
            return sweep.sweep_back(
                perturbed, checkpoints, shared, *segment.cotangents, visit, state, xs_in=lambda _: x
            )

        return visit_segment

    def _pullback(
        self, perturbed: Perturbed, checkpoint: Checkpoint, carry: Carry, xs: Arrays, shared: Arrays
    ) -> LayerPullback:
        pullback = LayerPullback(self.step, perturbed, checkpoint)
        if checkpoint is jax.checkpoint:
            return pullback
        example = jax.eval_shape(lambda: (carry, self.inputs(xs, 0)))
        return pullback.with_residuals(shared, *example)

    def _visitor(
        self,
        pullback: LayerPullback,
        shared: Arrays,
        ys_ct: Arrays,
        visitor: LeafVisitor,
        xs_in: Callable[[Any], Arrays],
        first: int,
    ) -> tuple[Callable, Replay]:
        """Adapt a `LeafVisitor` to the reverse loop; also returns the `Replay`."""

        def visit(layer: ReplayedLayer, carry_ct: Carry, state: Any) -> tuple[Carry, Any]:
            index = self.layer_index(layer.index + first)
            x = self.inputs(xs_in(state), index, layer.fetched)
            y_ct = read(ys_ct, index, self.read_length)
            carry, cotangents = layer.carry, (carry_ct, y_ct)
            if self.on_host and platform() == "cuda":
                # For GPUs XLA keeps a layer's internals twice where its carry comes from the host.
                carry, cotangents = lax.optimization_barrier((carry, cotangents))
            leaves = LeafVisit(
                index,
                shared,
                carry,
                x,
                self.unsliced,
                cotangents,
                layer.saved,
                pullback,
                writes_to_host=has_host_arrays(state),
            )
            return visitor(leaves, state)

        def fetch(state: Any, index: Any) -> Arrays:
            return self.fetch(xs_in(state), index + first)

        def advance(state: Any, index: Any, carry: Carry, fetched: Arrays) -> Carry:
            return self.run_step(shared, xs_in(state), index + first, carry, fetched)[0]

        def save(state: Any, index: Any, carry: Carry, fetched: Arrays) -> tuple[Carry, Arrays]:
            if pullback.saves_on_host:
                raise ValueError(
                    "With layers that are cut, save_block_internals keeps internals on the device while a "
                    "segment is replayed, and here some are moved to the host: by a policy of JAX that "
                    "offloads, or by a fold inside the layer. Use one that does not offload, and "
                    'save_carries="offload" beside it.'
                )
            x = self.inputs(xs_in(state), self.layer_index(index + first), fetched)
            (carry, _), saved = pullback.save(shared, carry, x)
            return carry, saved

        return visit, Replay(fetch, advance, save if pullback.saved else None, self.read_length > 1)

    def _visit_first(
        self, visit: Callable, checkpoints: Checkpoints, carry_ct: Carry, state: Any
    ) -> tuple[Carry, Any]:
        assert checkpoints.first_layers is not None
        carries, residuals = checkpoints.first_layers

        def one(k: Any, loop: tuple[Carry, Any]) -> tuple[Carry, Any]:
            number = self.first - 1 - k
            layer = ReplayedLayer(number, read(carries, number), read(residuals, number), [])
            return visit(layer, *loop)

        # Use the same kind of loop as the other visits, so inner programs compile once.
        trips: Any = self.first
        if self.schedule is not None and self.unroll is not True:
            visits = self.schedule.segments if self.on_host else [run.visits for run in self.schedule.runs]
            trips = self.first if len({*visits}) == 1 else jnp.int32(self.first)
        return repeat(trips, one, (carry_ct, state), self.unroll, self.first)
