"""The default visitor of the reverse sweep: each layer's gradient, written in place.

A layer is `layer(shared, carry, x) -> (carry, y)` on lists of arrays. Only what is differentiated is
computed: other inputs are constants of each layer's pullback.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._placement import platform
from .activity import active_outputs, named_inputs
from .reverse import Layer
from .slots import Carry

Arrays = list[Array]
LayerFn = Callable[[Arrays, Carry, Arrays], tuple[Carry, Arrays]]


@dataclass(frozen=True)
class Wanted:
    """Which leaves a reverse sweep differentiates.

    Attributes:
        init: leaves of the first carry.
        carry: leaves of the carry between layers that have a cotangent; `init` is among them.
        xs: leaves of the layers' own inputs.
        shared: leaves of the inputs that all layers share.
        ys: leaves of the stacked outputs that have a cotangent.
    """

    init: tuple[bool, ...]
    carry: tuple[bool, ...]
    xs: tuple[bool, ...]
    shared: tuple[bool, ...]
    ys: tuple[bool, ...] = ()


@dataclass(frozen=True)
class LayerPullback:
    """One layer's vector-Jacobian product, from its inputs and, if any, its saved residuals.

    Attributes:
        layer: the layer.
        wanted: what is differentiated.
        checkpoint: how the layer is checkpointed when residuals are saved.
        saved: which leaves of the pullback are saved by the replay; none: the layer is run again.
        saves_on_host: whether some of these are in host memory.
    """

    layer: LayerFn
    wanted: Wanted
    checkpoint: Callable[[Callable], Callable]
    saved: tuple[int, ...] = ()
    saves_on_host: bool = False

    def _linearize(self, shared: Arrays, carry: Carry, x: Arrays) -> tuple[tuple[Carry, Arrays], Any]:
        wanted = self.wanted

        def run(shared: Arrays, carry: Carry, x: Arrays) -> tuple[tuple[Carry, Arrays], tuple[Carry, Arrays]]:
            carry, y = self.layer(shared, carry, x)
            return (pick(carry, wanted.carry), pick(y, wanted.ys)), (carry, y)

        run = self.checkpoint(run) if self.saved else run

        def differentiated(shared_part: Arrays, carry_part: Carry, x_part: Arrays) -> tuple[Any, Any]:
            return run(
                merge(shared, shared_part, wanted.shared),
                merge(carry, carry_part, wanted.carry),
                merge(x, x_part, wanted.xs),
            )

        parts = pick(shared, wanted.shared), pick(carry, wanted.carry), pick(x, wanted.xs)
        _, pullback, results = jax.vjp(differentiated, *parts, has_aux=True)
        return results, pullback

    def save(self, shared: Arrays, carry: Carry, x: Arrays) -> tuple[tuple[Carry, Arrays], Arrays]:
        """Run the layer; returns its carry and output, and its residuals."""
        results, pullback = self._linearize(shared, carry, x)
        leaves = jax.tree.leaves(pullback)
        return results, [leaves[i] for i in self.saved]

    def __call__(
        self, shared: Arrays, carry: Carry, x: Arrays, saved: Arrays | None, cotangents: tuple[Carry, Arrays]
    ) -> tuple[Arrays, Carry, Arrays]:
        """Compute the cotangents of the wanted leaves of `shared`, `carry` and `x`."""
        _, pullback = self._linearize(shared, carry, x)
        if self.saved:
            # What computed the replaced leaves is now unused, and XLA removes it.
            leaves, treedef = jax.tree.flatten(pullback)
            for i, leaf in zip(self.saved, saved or (), strict=True):
                leaves[i] = leaf
            pullback = jax.tree.unflatten(treedef, leaves)
        return pullback(cotangents)

    def with_residuals(self, shared: Arrays, carry: Carry, x: Arrays) -> "LayerPullback":
        """Set `saved` to the residuals that the checkpoint keeps.

        Not saved are the layer's inputs, which are at hand, and what comes from `x` and `shared` alone: it is
        made again, for a cast or a transpose of weights would fill a buffer with a segment of them.
        """
        probe = LayerPullback(self.layer, self.wanted, self.checkpoint, saved=(-1,))

        def residuals(shared: Arrays, carry: Carry, x: Arrays) -> Arrays:
            return jax.tree.leaves(probe._linearize(shared, carry, x)[1])

        jaxpr = jax.make_jaxpr(residuals)(shared, carry, x).jaxpr
        of_carry = [
            *(False for _ in (*jaxpr.constvars, *shared)),
            *(True for _ in carry),
            *(False for _ in x),
        ]
        depends = active_outputs(jaxpr, of_carry, counts=lambda _: True)
        at_hand = named_inputs(jaxpr)
        saved = [
            i
            for i, (out, needed) in enumerate(zip(jaxpr.outvars, depends, strict=True))
            if needed and out not in at_hand
        ]
        on_host = any(
            getattr(jaxpr.outvars[i].aval, "memory_space", None) == jax.memory.Space.Host for i in saved
        )
        return LayerPullback(self.layer, self.wanted, self.checkpoint, tuple(saved), on_host)


@dataclass(frozen=True)
class Gradients:
    """Visitor that accumulates shared gradients and writes each layer's own into stacked buffers.

    Its state is `(shared gradients, stacked gradients)`, one array per wanted leaf.

    Attributes:
        pullback: of one layer.
        shared: inputs that all layers share.
        take: `(array stacked over layers, index) -> entry`.
        put: `(stacked, index, entry) -> stacked`, in place.
        xs: the stacked inputs.
        ys_cotangent: cotangents of the wanted stacked outputs.
    """

    pullback: LayerPullback
    shared: Arrays
    take: Callable[[Array, Any], Array]
    put: Callable[[Array, Any, Array], Array]
    xs: Arrays
    ys_cotangent: Arrays

    def init(self) -> tuple[Arrays, Arrays]:
        """Make zero gradients."""
        wanted = self.pullback.wanted
        zeros = [jnp.zeros_like(leaf) for leaf in pick(self.shared, wanted.shared)]
        return zeros, [jnp.zeros_like(leaf) for leaf in pick(self.xs, wanted.xs)]

    def __call__(self, layer: Layer, cotangent: Carry, state: Any) -> tuple[Carry, Any]:
        shared_gradient, gradient = state
        x = [self.take(leaf, layer.index) for leaf in self.xs]
        y_cotangent = [self.take(leaf, layer.index) for leaf in self.ys_cotangent]
        of_shared, of_carry, of_x = self.pullback(
            self.shared, layer.carry, x, layer.saved, (cotangent, y_cotangent)
        )
        if platform() == "tpu":
            # Without the barrier XLA holds a layer's internals until its gradients are in their stacks.
            of_x = lax.optimization_barrier(of_x)
        shared_gradient = [lax.add(old, new) for old, new in zip(shared_gradient, of_shared, strict=True)]
        gradient = [self.put(old, layer.index, new) for old, new in zip(gradient, of_x, strict=True)]
        return of_carry, (shared_gradient, gradient)


def pick(leaves: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """Select the leaves that are wanted."""
    return [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]


def merge(leaves: Sequence[Any], part: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """Replace the wanted ones of `leaves` by those of `part`."""
    chosen = iter(part)
    return [next(chosen) if want else leaf for leaf, want in zip(leaves, wanted, strict=True)]


def spread(part: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """Invert `pick`, with `None` for what was not wanted."""
    return merge([None] * len(wanted), part, wanted)
