"""A layer's vector-Jacobian product, and the default visitor, which writes every
layer's gradient in place.

A layer is `layer(shared, carry, x) -> (carry, y)` on lists of arrays. Inputs that are
not differentiated are constants of its pullback.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from .._activity import active_outputs, forwarded_inputs
from .._barriers import barrier_on
from .._compat import trace_context, without_constants
from .._remat import Kept
from .._static import PyTree
from .kinds import Kind
from .slots import Arrays, Carry, Mask
from .store import Index, apart_from_transfers, write, zeros_like

Checkpoint: TypeAlias = Callable[[Callable], Callable]
LayerInputs: TypeAlias = tuple[Arrays, Carry, Arrays]  # `shared`, `carry`, `x`
LayerTypes: TypeAlias = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Perturbed:
    """Which leaves are differentiated: `carry` between layers, `ys` of each kind that
    have a cotangent.
    """

    init: Mask
    carry: Mask
    xs: tuple[Mask, ...]
    shared: tuple[Mask, ...]
    ys: tuple[Mask, ...] = ()

    @property
    def inputs(self) -> Mask:
        """The leaves of a sweep's inputs `(init, xs, shared)`."""
        return tuple(jax.tree.leaves((self.init, self.xs, self.shared)))

    @property
    def outputs(self) -> Mask:
        """The leaves of what a sweep returns, `(carry, ys)`."""
        return tuple(jax.tree.leaves((self.carry, self.ys)))

    def of_layer(self, kind: Kind) -> tuple[Mask, Mask, Mask]:
        """The leaves of the inputs of one layer."""
        return self.shared[kind.number], self.carry, self.xs[kind.number]


class Residuals(NamedTuple):
    """What a pullback reads, the leaves of `pullback`: `forward` computes all, `rest`
    what is not saved.
    """

    forward: Jaxpr
    rest: Jaxpr
    constants: Arrays
    pullback: Callable
    is_saved: Mask
    reads: Mask  # which leaves of the carry `rest` reads; all if it has effects
    all_reads: (
        Mask  # which leaves of the carry `rest` reads, or what is saved depends on
    )
    types: list[ShapedArray]  # of what is saved


class LayerCotangents(NamedTuple):
    """What the `vjp` of a `LayerVisit` returns."""

    carry: PyTree
    layer: PyTree
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]


@dataclass(frozen=True)
class LayerVisit:
    """One layer, as a visitor of the reverse sweep is given it.

    Attributes:
        layer_index: its index on the axis, a traced integer: `blocks[layer_index]`,
            whatever the policy.
        layer: the layer.
        carry: its input.
        args: its further arguments: slices of those that are split, and the shared
            ones.
        kwargs: its keyword arguments.
        cotangent: of its output carry; with `scan_vjp` a pair, of carry and output.
        layer_state: its entry of the layers' state.
        kind: the name of its kind, of a `StackedPattern`; `None` where layers are of
            one kind.
        vjp: `vjp()` gives the vector-Jacobian products with `cotangent`: a named tuple
            of `carry`, `layer`, `args` and `kwargs`, trees like these with `None` for
            leaves without a gradient. It costs one evaluation of the layer, unless all
            its internals were saved, and its transpose; XLA removes what is not used.
            Call it once: each call runs the layer again.
    """

    layer_index: Any
    layer: PyTree
    carry: PyTree
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    cotangent: PyTree
    layer_state: PyTree
    kind: str | None
    vjp: Callable[..., LayerCotangents]


@dataclass(frozen=True)
class LayerPullback:
    """The vector-Jacobian product of a layer of this kind."""

    kind: Kind
    perturbed: Perturbed
    residuals: Residuals | None = None

    def _linearize(
        self, inputs: LayerInputs, checkpoint: Checkpoint = lambda run: run
    ) -> tuple[tuple[Carry, Arrays], Any]:
        masks = self.perturbed.of_layer(self.kind)
        outputs = self.perturbed.carry, self.perturbed.ys[self.kind.number]

        def run(*every: Arrays) -> tuple[tuple[Arrays, ...], tuple[Carry, Arrays]]:
            results = self.kind.layer(*every)
            return tuple(map(pick, results, outputs)), results

        def differentiated(*parts: Arrays) -> tuple[PyTree, PyTree]:
            return checkpoint(run)(*map(merge, inputs, parts, masks))

        _, pullback, results = jax.vjp(
            differentiated, *map(pick, inputs, masks), has_aux=True
        )
        return results, pullback

    def save(self, inputs: LayerInputs) -> tuple[tuple[Carry, Arrays], Arrays]:
        """Run the layer; returns its carry and output, and the residuals that are
        saved.
        """
        if self.residuals is None:
            return self.kind.values(*inputs), []
        outputs = eval_jaxpr(
            self.residuals.forward, (), *self.residuals.constants, *sum(inputs, [])
        )
        carries, results = (
            self.kind.carries,
            len(outputs) - len(self.residuals.is_saved),
        )
        saved = pick(outputs[results:], self.residuals.is_saved)
        return (outputs[:carries], outputs[carries:results]), saved

    def __call__(
        self,
        inputs: LayerInputs,
        saved: Arrays,
        cotangents: PyTree,
        totals: Sequence[PyTree] = (),
    ) -> LayerInputs:
        """The cotangents of the perturbed leaves; those of `x` are added to `totals` in
        place.
        """
        if self.residuals is None:
            return self._transposed(self._linearize(inputs)[1], cotangents, totals)
        others = eval_jaxpr(
            self.residuals.rest, (), *self.residuals.constants, *sum(inputs, [])
        )
        of_rest, of_saved = iter(others), iter(saved)
        leaves = [next(of_saved if is_ else of_rest) for is_ in self.residuals.is_saved]
        return self._transposed(
            jax.tree.unflatten(self.residuals.pullback, leaves), cotangents, totals
        )

    def visit(
        self,
        index: Index,
        inputs: LayerInputs,
        saved: Arrays,
        cotangents: PyTree,
        *,
        apart: bool = False,
    ) -> LayerVisit:
        """A visit of a layer, with lists of arrays: `layer` its own, `args` what layers
        share.
        """
        shared, carry, x = inputs

        def vjp(totals: Sequence[PyTree] = ()) -> LayerCotangents:
            compute = functools.partial(self, inputs, saved, cotangents, totals)
            of_shared, of_carry, of_x = (
                apart_from_transfers(compute) if apart else compute()
            )
            return LayerCotangents(of_carry, of_x, (*of_shared,), {})

        return LayerVisit(index, x, carry, (*shared,), {}, cotangents, None, None, vjp)

    @property
    def jaxpr(self) -> ClosedJaxpr:
        """The product as a jaxpr of `(inputs, cotangents)`."""
        shared, carry = len(self.perturbed.shared[self.kind.number]), self.kind.carries
        types = [var.aval for var in self.kind.jaxpr.invars]
        inputs = types[:shared], types[shared : shared + carry], types[shared + carry :]
        carry_ct, y_ct = (
            [var.aval.to_ct_aval() for var in pick(outputs, mask)]
            for outputs, mask in (
                (self.kind.jaxpr.outvars[:carry], self.perturbed.carry),
                (self.kind.jaxpr.outvars[carry:], self.perturbed.ys[self.kind.number]),
            )
        )
        return jax.make_jaxpr(lambda *given: self(given[:3], [], given[3:]))(
            *inputs, carry_ct, y_ct
        )

    def _transposed(
        self, pullback: Callable, cotangents: PyTree, totals: Sequence[PyTree]
    ) -> PyTree:
        if all(total is None for total in totals):
            return pullback(cotangents)
        refs = [None if total is None else jax.new_ref(total) for total in totals]
        of_shared, of_carry = (
            [_VALUE] * sum(mask) for mask in self.perturbed.of_layer(self.kind)[:2]
        )
        of_x = [_VALUE if ref is None else ref for ref in refs]
        try:
            of_shared, of_carry, of_x = pullback.with_refs(of_shared, of_carry, of_x)(
                cotangents
            )
        except (
            TypeError
        ):  # JAX (0.10.2, 0.12) cannot transpose a static slice into a reference
            of_shared, of_carry, of_x = pullback(cotangents)
            pairs = zip(of_x, totals, strict=True)
            return (
                of_shared,
                of_carry,
                [ct if total is None else lax.add(total, ct) for ct, total in pairs],
            )
        of_x = [
            ct if ref is None else jax.freeze(ref)
            for ct, ref in zip(of_x, refs, strict=True)
        ]
        return of_shared, of_carry, of_x

    def with_residuals(
        self, types: LayerTypes, kept: Kept, flags: int = 0
    ) -> "LayerPullback":
        """Save what is kept, but for inputs and what depends on `x`, `shared` and
        `flags` alone.

        These are the first leaves of the carry, so many.
        """
        residuals = self.residuals_of(types, kept, flags)
        return replace(self, residuals=residuals if residuals.types else None)

    def residuals_of(self, types: LayerTypes, kept: Kept, flags: int = 0) -> Residuals:
        """What the pullback reads, with these types of inputs, and what of it is saved;
        traces the layer.
        """
        # With barriers on tangents other residuals would be found than without them.
        plain = replace(self, kind=replace(self.kind, in_forward_mode=False))
        # JAX sets the mesh, which may have no axes, in the reverse sweep alone.
        with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
            key = plain.kind.jaxpr, plain.perturbed, types, kept, flags, trace_context()
            known = plain.kind.residuals
            if key not in known:
                known[key] = _residuals(plain, types, kept, flags)
            return known[key]


def _residuals(
    pullback: LayerPullback, types: LayerTypes, kept: Kept, flags: int
) -> Residuals:
    structure: list[Any] = []

    def forward(*inputs: Any) -> Arrays:
        results, found = pullback._linearize(inputs, kept.checkpoint)
        leaves, tree = jax.tree.flatten(found)
        structure[:] = [tree]
        return [*results[0], *results[1], *leaves]

    jaxpr, constants = without_constants(jax.make_jaxpr(forward)(*map(list, types)))
    first = len(jaxpr.outvars) - structure[0].num_leaves
    shared, carry, x = map(len, types)
    is_carry = [False] * (len(constants) + shared) + [True] * carry + [False] * x
    is_data = (
        [False] * (len(constants) + shared + flags)
        + [True] * (carry - flags)
        + [False] * x
    )
    depends = active_outputs(jaxpr, is_data, counts=lambda _: True)[first:]
    # Saved casts or transposes of weights would fill a buffer with a segment of
    # weights.
    sources = forwarded_inputs(jaxpr)[first:]
    is_saved = tuple(
        is_ and source is None for is_, source in zip(depends, sources, strict=True)
    )
    unsaved = [False] * first + [not is_ for is_ in is_saved]
    rest, _ = dce_jaxpr(jaxpr, unsaved, instantiate=True)
    every = [False] * first + [True] * len(is_saved)
    reads, all_reads = (
        tuple(pick(dce_jaxpr(jaxpr, used)[1], is_carry)) for used in (unsaved, every)
    )
    saved = [out.aval for out in pick(jaxpr.outvars[first:], is_saved)]
    return Residuals(
        jaxpr, rest, constants, structure[0], is_saved, reads, all_reads, saved
    )


# asks `with_refs` for a cotangent as a value; any leaf that is not a reference does
_VALUE = 0


def zero_gradients(
    perturbed: Perturbed, shared: Sequence[Arrays], xs: Sequence[Arrays]
) -> list[Any]:
    """The first state of `write_gradients`: gradients of what layers share and of their
    own, of each kind.
    """
    of_shared = (
        [*map(jnp.zeros_like, pick(*each))]
        for each in zip(shared, perturbed.shared, strict=True)
    )
    of_xs = (
        [*map(zeros_like, pick(*each))] for each in zip(xs, perturbed.xs, strict=True)
    )
    return [*zip(of_shared, of_xs, strict=True)]


def write_gradients(
    perturbed: Perturbed, visit: LayerVisit, kind: Kind, row: Index, state: list[Any]
) -> tuple[Carry, list[Any]]:
    """The default visitor: sums the gradients of shared inputs, and writes each layer's
    own in place.

    To those of stacks that layers take whole the gradients are added.
    """
    number = kind.number
    shared_gradient, gradient = state[number]
    unsliced = pick(kind.unsliced, perturbed.xs[number])
    sliced = [not is_ for is_ in unsliced]
    totals = [
        total if is_ else None for total, is_ in zip(gradient, unsliced, strict=True)
    ]
    of_carry, of_x, of_shared, _ = visit.vjp(totals=totals)
    of_sliced = pick(of_x, sliced)
    # Without the barrier XLA for TPUs holds a layer's internals until its gradients are
    # in their stacks.
    of_sliced = barrier_on(("tpu",), of_sliced)
    shared_gradient = [
        lax.add(old, new) for old, new in zip(shared_gradient, of_shared, strict=True)
    ]
    written = merge(of_x, write(pick(gradient, sliced), row, of_sliced), sliced)
    return of_carry, [*state[:number], (shared_gradient, written), *state[number + 1 :]]


def write_tangents(
    perturbed: Perturbed, visit: LayerVisit, *at: Any
) -> tuple[Carry, list[Any]]:
    """`write_gradients` for derivatives of the gradients, whose own values nothing
    reads.
    """
    carry_ct, new = write_gradients(perturbed, visit, *at)
    return carry_ct, _unread(at[-1], new)


@jax.custom_jvp
def _unread(old: PyTree, new: PyTree) -> PyTree:
    """`old`, with derivatives of `new`: XLA removes what loops pass on, and no sums
    that nothing reads.
    """
    # Mapped where either is
    return jax.tree.map(functools.partial(lax.select_n, False), old, new)


_unread.defjvp(lambda primals, tangents: (_unread(*primals), tangents[1]))


def pick(leaves: Sequence[PyTree], mask: Sequence[bool]) -> list[PyTree]:
    """Select the leaves in the mask."""
    return [leaf for leaf, chosen in zip(leaves, mask, strict=True) if chosen]


def merge(
    leaves: Sequence[PyTree], part: Sequence[PyTree], mask: Sequence[bool]
) -> list[PyTree]:
    """Replace the leaves in the mask by those of `part`."""
    replacements = iter(part)
    return [
        next(replacements) if chosen else leaf
        for leaf, chosen in zip(leaves, mask, strict=True)
    ]


def scatter_leaves(part: Sequence[PyTree], mask: Sequence[bool]) -> list[PyTree]:
    """Invert `pick`, with `None` for leaves that are not in the mask."""
    return merge([None] * len(mask), part, mask)
