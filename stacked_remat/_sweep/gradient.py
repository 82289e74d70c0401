"""A layer's vector-Jacobian product, and the visitor of gradients, for `jax.grad`.

A layer is `layer(shared, carry, x) -> (carry, y)` on lists of arrays: what all layers
share, the carry, and its own inputs (weights and slices of scanned arguments). Leaves
that are not differentiated are constants of its pullback, so that they cost nothing:
no gradient, and no product of a transpose.

What a reverse sweep does at a layer, once it has the layer's input:

    visit = LeafVisit(pullback, ...)    computes nothing yet
    visit.vjp()                         `jax.vjp` of the layer, and the transpose
    write_gradients(visit, state)       adds what is of shared inputs to a sum, writes
                                        the layer's own gradients to its row

A pullback without `Residuals` runs the layer for that. With them, the part of the
forward computation that the policy saves (`Kept`) has already run, in a replay or, for
first layers, in the forward sweep, and `LayerPullback` splits the layer in two jaxprs,
found by tracing `jax.vjp` once:

    forward   shared, carry, x -> the layer's results, and all that its pullback reads
    rest      shared, carry, x -> only what is read and not saved; often nothing

The gradients of a stack are a loop carry, as large as the stack, of which each visit
overwrites one row; so the memory of one layer's gradients is all that a visit adds.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from .. import _xla_hints as xla_hints
from .._activity import active_outputs, forwarded_inputs
from .._compat import trace_context, without_constants
from .._remat import Kept
from .._static import PyTree
from .gathers import run_beside_gathers
from .kinds import Kind
from .slots import Arrays, Carry, Mask, inverted, types_of
from .store import Index, write, zeros_like, zeros_of

# Wraps a layer, as `jax.checkpoint` does with a policy.
Checkpoint: TypeAlias = Callable[[Callable], Callable]
LayerInputs: TypeAlias = tuple[Arrays, Carry, Arrays]  # `shared`, `carry`, `x`
LayerTypes: TypeAlias = tuple[tuple[Any, ...], ...]  # of the leaves of `LayerInputs`


@dataclass(frozen=True)
class Perturbed:
    """Which leaves of a sweep's inputs and outputs are differentiated."""

    # Of the first carry.
    init: Mask
    # Of the carries between layers, the last one too: those of `init`, and those that
    # depend on another perturbed input in some layer.
    carry: Mask
    # Of the layers' own inputs, for each kind.
    xs: tuple[Mask, ...]
    # Of what layers share, for each kind.
    shared: tuple[Mask, ...]
    # Of the outputs, those that have a cotangent, for each kind; () where there are no
    # cotangents.
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
        number = kind.number
        return self.shared[number], self.carry, self.xs[number]


class Residuals(NamedTuple):
    """What a layer's pullback reads, the leaves of the function that `jax.vjp` returns;
    which of them are saved, and jaxprs that compute them.

    The jaxprs take `constants`, then the leaves of `LayerInputs`.
    """

    # Returns the layer's carry and output, then all residuals.
    forward: Jaxpr
    # Returns the residuals that are not saved.
    rest: Jaxpr
    # What both jaxprs close over.
    constants: Arrays
    # The tree of which residuals are the leaves; with them it is the pullback.
    pullback: Any
    # Which residuals are saved.
    is_saved: Mask
    # Which leaves of the carry `rest` reads.
    reads: Mask
    # Which leaves of the carry `rest` reads, or saved residuals depend on.
    all_reads: Mask
    # Of the residuals that are saved.
    types: list[ShapedArray]

    @property
    def on_host(self) -> bool:
        """Whether any is saved on the host, by the layer itself."""
        return any(type_.memory_space == jax.memory.Space.Host for type_ in self.types)


# Asks `with_refs` for a cotangent as a value; any leaf that is not a reference does.
_VALUE = 0


@dataclass(frozen=True)
class LayerPullback:
    """The vector-Jacobian product of a layer of one kind."""

    # The kind, with the layer's jaxpr.
    kind: Kind
    # The leaves that have cotangents.
    perturbed: Perturbed
    # What is saved before a visit; None if the visit runs the whole layer.
    residuals: Residuals | None = None

    def _linearize(
        self, inputs: LayerInputs, checkpoint: Checkpoint = lambda run: run
    ) -> tuple[tuple[Carry, Arrays], Any]:
        """The layer's carry and output, and its pullback: from the cotangents of the
        perturbed results to those of the perturbed leaves of `inputs`.
        """
        masks = self.perturbed.of_layer(self.kind)
        result_masks = self.perturbed.carry, self.perturbed.ys[self.kind.number]

        def run(*inputs: Arrays) -> tuple[tuple[Arrays, ...], tuple[Carry, Arrays]]:
            results = self.kind.layer(*inputs)
            return tuple(map(pick, results, result_masks)), results

        def differentiated(*parts: Arrays) -> tuple[PyTree, PyTree]:
            return checkpoint(run)(*map(merge, inputs, parts, masks))

        parts = map(pick, inputs, masks)
        _, pullback, results = jax.vjp(differentiated, *parts, has_aux=True)
        return results, pullback

    def traced(
        self, inputs: Any, checkpoint: Checkpoint = lambda run: run
    ) -> tuple[ClosedJaxpr, Any]:
        """`_linearize` as a jaxpr of the layer's results and then the residuals that
        the pullback reads, and the tree of which these are the leaves.

        `inputs` are arrays or their types.
        """
        structure: Any = None

        def forward(shared: Arrays, carry: Carry, x: Arrays) -> Arrays:
            nonlocal structure
            results, pullback = self._linearize((shared, carry, x), checkpoint)
            leaves, structure = jax.tree.flatten(pullback)
            return [*sum(results, []), *leaves]

        return jax.make_jaxpr(forward)(*map(list, inputs)), structure

    def _pullback_alone(self, inputs: LayerInputs, ahead: Sequence[Any]) -> Any:
        """The pullback of `_linearize`, without what only the layer's results need; it
        reads gathered weights once those in `ahead` are there, unless the layer
        exchanges rows.

        In a derivative of the visit JAX could not lower the tangents of results where a
        `jax.custom_vjp` computes these, though nothing reads them.
        """
        closed, structure = self.traced(inputs)
        results = len(closed.jaxpr.outvars) - structure.num_leaves
        is_read = [False] * results + [True] * structure.num_leaves
        jaxpr, _ = dce_jaxpr(closed.jaxpr, is_read, instantiate=True)
        leaves = eval_jaxpr(jaxpr, closed.consts, *sum(inputs, []))
        # Where devices exchange rows, XLA runs products of weights beside that. Gathers
        # that had to come before these would be first in a visit, beside nothing.
        if ahead and not self.kind.exchanges_out_of_loops:
            leaves = _after_gathers(jaxpr, leaves, ahead)
        return jax.tree.unflatten(structure, leaves)

    def save(
        self, inputs: LayerInputs, ahead: Sequence[Any]
    ) -> tuple[tuple[Carry, Arrays], Arrays]:
        """Run the layer; returns its carry and output, and the residuals that are
        saved. `ahead` is what is gathered meanwhile for the next layer.
        """
        residuals = self.residuals
        if residuals is None:
            return self.kind.values(*inputs, ahead), []
        arrays = [*residuals.constants, *sum(inputs, [])]
        outputs = run_beside_gathers(residuals.forward, arrays, ahead)
        carries = self.kind.carries
        results = len(outputs) - len(residuals.is_saved)
        saved = pick(outputs[results:], residuals.is_saved)
        return (outputs[:carries], outputs[carries:results]), saved

    def save_again(
        self, inputs: LayerInputs, ahead: Sequence[Any]
    ) -> tuple[Carry, Arrays]:
        """`save` in a replay: returns the carry and the residuals. What only outputs
        need is left out, as in `Kind.replayed`.
        """
        residuals = self.residuals
        if residuals is None:
            return self.kind.replayed(*inputs, ahead), []
        carries = self.kind.carries
        saved = len(residuals.is_saved)
        outputs = len(residuals.forward.outvars) - carries - saved
        is_needed = [True] * carries + [False] * outputs + [*residuals.is_saved]
        jaxpr, _ = dce_jaxpr(residuals.forward, is_needed, instantiate=True)
        arrays = [*residuals.constants, *sum(inputs, [])]
        results = run_beside_gathers(jaxpr, arrays, ahead)
        return results[:carries], results[carries:]

    def __call__(
        self,
        inputs: LayerInputs,
        saved: Arrays,
        cotangents: PyTree,
        totals: Sequence[PyTree] = (),
        ahead: Sequence[Any] = (),
    ) -> LayerInputs:
        """The cotangents of the perturbed leaves; those of `x` are added to `totals` in
        place.

        Args:
            inputs: of the layer.
            saved: the residuals that `save` returned; [] if there are none.
            cotangents: of the perturbed leaves of carry and output.
            totals: for each perturbed leaf of `x` the array to add its cotangent to, or
                None; () for none.
            ahead: for each leaf of `x` what is gathered meanwhile for the layer that is
                visited next, or None; () for none.
        """
        residuals = self.residuals
        if residuals is None and (self.kind.in_forward_mode or ahead):
            pullback = self._pullback_alone(inputs, ahead)
            if ahead and self.kind.ends_with_exchange:
                cotangents = xla_hints.exchange_after_gathers(cotangents, ahead)
        elif residuals is None:
            _, pullback = self._linearize(inputs)
        else:
            computed = eval_jaxpr(
                residuals.rest, (), *residuals.constants, *sum(inputs, [])
            )
            leaves = scatter_leaves(saved, residuals.is_saved)
            leaves = merge(leaves, computed, inverted(residuals.is_saved))
            pullback = jax.tree.unflatten(residuals.pullback, leaves)
        return self._transposed(pullback, cotangents, totals)

    @property
    def cotangent_types(self) -> tuple[list[Any], list[Any]]:
        """The types of the cotangents of the perturbed leaves of carry and output."""
        kind = self.kind
        types = [type_.to_ct_aval() for type_ in types_of(kind.jaxpr.outvars)]
        of_carry = pick(types[: kind.carries], self.perturbed.carry)
        y_mask = self.perturbed.ys[kind.number]
        of_output = pick(types[kind.carries :], y_mask)
        return of_carry, of_output

    @property
    def jaxpr(self) -> ClosedJaxpr:
        """The product as a jaxpr of `(inputs, cotangents)`."""
        inputs = self.kind.split(types_of(self.kind.jaxpr.invars))

        def product(inputs: LayerInputs, cotangents: PyTree) -> LayerInputs:
            return self(inputs, [], cotangents)

        return jax.make_jaxpr(product)(inputs, self.cotangent_types)

    def _transposed(
        self, pullback: Any, cotangents: PyTree, totals: Sequence[PyTree]
    ) -> LayerInputs:
        """Call the pullback; cotangents that have a total are added to it in place.

        To those of stacks that layers take whole each layer adds. As a value such a
        cotangent would be zeros of the whole stack, with what this layer reads of it.
        """
        if not jax.tree.leaves(totals):  # None is no leaf
            return pullback(cotangents)
        refs = [None if total is None else jax.new_ref(total) for total in totals]
        shared_mask, carry_mask, _ = self.perturbed.of_layer(self.kind)
        requests = (
            [_VALUE] * sum(shared_mask),
            [_VALUE] * sum(carry_mask),
            [_VALUE if ref is None else ref for ref in refs],
        )
        x_ct = []
        try:
            of_shared, of_carry, of_x = pullback.with_refs(*requests)(cotangents)
        except TypeError:
            # JAX (0.10.2, 0.12) cannot transpose a static slice into a reference.
            of_shared, of_carry, of_x = pullback(cotangents)
            for ct, total in zip(of_x, totals, strict=True):
                x_ct.append(ct if total is None else lax.add(total, ct))
        else:
            for ct, ref in zip(of_x, refs, strict=True):
                x_ct.append(ct if ref is None else jax.freeze(ref))
        return of_shared, of_carry, x_ct

    def with_residuals(
        self, types: LayerTypes, kept: Kept, flags: int = 0
    ) -> "LayerPullback":
        """Save what is kept, but for inputs and what depends on `x`, `shared` and
        `flags` alone.

        `flags` is the number of leaves, the first of the carry, that say whether layers
        stop.
        """
        residuals = self.residuals_of(types, kept, flags)
        return replace(self, residuals=residuals if residuals.types else None)

    def residuals_of(self, types: LayerTypes, kept: Kept, flags: int = 0) -> Residuals:
        """What the pullback reads, with these types of inputs, and what of it is saved;
        traces the layer.
        """
        # With barriers on tangents other residuals would be found than without them.
        plain = replace(self, kind=replace(self.kind, in_forward_mode=False))
        # In the backward pass JAX sets an abstract mesh, even one without axes; set
        # here, both sweeps have one key.
        with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
            key = plain.kind.jaxpr, plain.perturbed, types, kept, flags, trace_context()
            known = plain.kind.residuals
            if key not in known:
                known[key] = _residuals(plain, types, kept, flags)
            return known[key]


def _after_gathers(jaxpr: Jaxpr, leaves: list[Any], ahead: Sequence[Any]) -> list[Any]:
    """The outputs `leaves` of a jaxpr, where those that depend on gathered weights
    alone are there once these weights of the next layer are gathered.

    The last inputs of the jaxpr are weights, with `ahead` for them.
    """
    variables = len(jaxpr.constvars) + len(jaxpr.invars)
    others = variables - len(ahead)
    is_gathered = [leaf is not None for leaf in ahead]

    def depend(on: Sequence[bool]) -> list[bool]:
        return active_outputs(jaxpr, on, counts=lambda _: True)

    is_data = depend([*[True] * others, *inverted(is_gathered)])
    waits_for: list[list[Any]] = [[] for _ in leaves]
    for place, next_weight in enumerate(ahead):
        on = [place == other - others for other in range(variables)]
        if next_weight is not None:
            for leaf_waits_for in itertools.compress(waits_for, depend(on)):
                leaf_waits_for.append(next_weight)
    after = []
    for leaf, depends_on_data, gathered in zip(leaves, is_data, waits_for, strict=True):
        if gathered and not depends_on_data:
            leaf = xla_hints.weight_after_gathers(leaf, gathered)
        after.append(leaf)
    return after


def _residuals(
    pullback: LayerPullback, types: LayerTypes, kept: Kept, flags: int
) -> Residuals:
    closed, structure = pullback.traced(types, kept.checkpoint)
    jaxpr, constants = without_constants(closed)
    results = len(jaxpr.outvars) - structure.num_leaves
    shared, carry, x = map(len, types)
    before_carry = [False] * (len(constants) + shared)
    after_carry = [False] * x
    is_carry = [*before_carry, *[True] * carry, *after_carry]
    # What depends on weights alone is made again: saved casts or transposes of weights
    # would fill a buffer with a segment of weights.
    carry_is_data = [False] * flags + [True] * (carry - flags)
    is_data = [*before_carry, *carry_is_data, *after_carry]
    depends = active_outputs(jaxpr, is_data, counts=lambda _: True)[results:]
    sources = forwarded_inputs(jaxpr)[results:]
    # Inputs are not saved twice: the carry is in a slot, the others in their stacks.
    is_saved = tuple(
        is_ and source is None for is_, source in zip(depends, sources, strict=True)
    )
    unsaved = [False] * results + inverted(is_saved)
    rest, _ = dce_jaxpr(jaxpr, unsaved, instantiate=True)
    all_residuals = [False] * results + [True] * len(is_saved)
    _, reads = dce_jaxpr(jaxpr, unsaved)
    _, all_reads = dce_jaxpr(jaxpr, all_residuals)
    saved_types = types_of(pick(jaxpr.outvars[results:], is_saved))
    return Residuals(
        jaxpr,
        rest,
        constants,
        structure,
        is_saved,
        tuple(pick(reads, is_carry)),
        tuple(pick(all_reads, is_carry)),
        saved_types,
    )


class LeafVisit(NamedTuple):
    """One layer, as a visitor of a sweep is given it, on lists of arrays."""

    # The vector-Jacobian product of layers of its kind.
    pullback: LayerPullback
    # On the layers' axis; known where the loop is unrolled.
    index: Index
    # Its place in the stacks of its kind.
    row: Index
    # What goes into it: what layers share, its carry, and its own inputs.
    inputs: LayerInputs
    # Its own inputs as stacks have them, where `inputs` has them gathered.
    x: Arrays
    # Its residuals that are saved; [] if there are none.
    saved: Arrays
    # Of the perturbed leaves of its carry and of its output.
    cotangents: tuple[Carry, Arrays]
    # For each leaf of `x` what is gathered meanwhile for the next visit, or None; () if
    # nothing is.
    ahead: Sequence[Any]
    # Whether the visitor writes to the host.
    writes_to_host: bool

    def vjp(self, totals: Sequence[PyTree] = ()) -> LayerInputs:
        """The cotangents of the perturbed leaves of `inputs`. It runs the layer, unless
        its residuals are saved. `totals` as of `LayerPullback`.
        """
        compute = functools.partial(
            self.pullback,
            self.inputs,
            self.saved,
            self.cotangents,
            totals,
            self.ahead,
        )
        if self.writes_to_host:
            zeros = jax.tree.map(zeros_of, jax.eval_shape(compute))
            shared_ct, carry_ct, x_ct = xla_hints.apart_from_transfers(compute, zeros)
        else:
            shared_ct, carry_ct, x_ct = compute()
        kind = self.pullback.kind
        if kind.gathers:
            is_perturbed = self.pullback.perturbed.xs[kind.number]
            x_ct = kind.scattered(x_ct, is_perturbed)
            done = carry_ct, self.ahead
            x_ct = xla_hints.gradients_after_collectives(x_ct, done)
        return shared_ct, carry_ct, x_ct


class Gradients(NamedTuple):
    """The gradients of the layers of a kind that were visited so far, of perturbed
    leaves.
    """

    shared: Arrays  # of what layers share, summed
    stacks: Arrays  # of their own inputs; zeros for layers that are still to visit


def zero_gradients(
    perturbed: Perturbed, shared: Sequence[Arrays], xs: Sequence[Arrays]
) -> list[Gradients]:
    """The first state of `write_gradients`, for each kind."""
    state = []
    masks = zip(perturbed.shared, perturbed.xs, strict=True)
    for (shared_mask, x_mask), leaves, stacks in zip(masks, shared, xs, strict=True):
        of_shared = [*map(jnp.zeros_like, pick(leaves, shared_mask))]
        # In the memory of the stack: on the host for weights on the host.
        of_stacks = [*map(zeros_like, pick(stacks, x_mask))]
        state.append(Gradients(of_shared, of_stacks))
    return state


def write_gradients(
    visit: LeafVisit, state: list[Gradients]
) -> tuple[Carry, list[Gradients]]:
    """The visitor of gradients, for `jax.grad`: sums those of shared inputs, and writes
    each layer's own in place.

    To those of stacks that layers take whole the gradients are added.
    """
    kind = visit.pullback.kind
    is_perturbed = visit.pullback.perturbed.xs[kind.number]
    is_whole = pick(kind.unsliced, is_perturbed)
    is_sliced = inverted(is_whole)
    sums, stacks = state[kind.number]
    totals = scatter_leaves(pick(stacks, is_whole), is_whole)
    shared_ct, carry_ct, x_ct = visit.vjp(totals)
    entries = xla_hints.gradients_before_writes(pick(x_ct, is_sliced))
    sums = [*map(lax.add, sums, shared_ct)]
    written = write(pick(stacks, is_sliced), visit.row, entries)
    state = [*state]
    state[kind.number] = Gradients(sums, merge(x_ct, written, is_sliced))
    return carry_ct, state


def write_tangents(
    visit: LeafVisit, state: list[Gradients]
) -> tuple[Carry, list[Gradients]]:
    """`write_gradients` for derivatives of the gradients, whose own values nothing
    reads.

    A loop of JAX's forward mode carries values and tangents together.
    """
    carry_ct, new = write_gradients(visit, state)
    return carry_ct, xla_hints.unread(state, new)


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


def check_saved_on_device(pullbacks: Sequence[LayerPullback]) -> None:
    """Refuse residuals that the layer itself moves to the host."""
    for pullback in pullbacks:
        if pullback.residuals and pullback.residuals.on_host:
            raise ValueError(
                "With layers that are cut, save_block_internals keeps internals on the"
                " device while a segment is replayed, and here some are moved to the"
                " host: by a policy of JAX that offloads, or by a fold inside the"
                " layer. Use one that does not offload, and"
                ' save_carries="offload" beside it.'
            )
