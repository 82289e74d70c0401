"""The sweep over layers as a JAX primitive, with all its rules.

`Sweep` runs the layers. In reverse mode it becomes two `Rule`s: the forward sweep that keeps checkpoints,
and the reverse sweep from these. In forward mode the tangent of each is a `Linear`, of the same loops.
`jax.vmap` maps the layers, so that gradients of what a batch shares are summed within each layer.

Two nested scans under `jax.checkpoint` would keep as few carries as a sweep, but slice a segment of weights
into a new buffer and stack a segment of gradients before copying it out. A sweep reads the stack by layer
number in the innermost loop, and its gradient buffers are loop carries that are updated in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, unmapped_aval
from jax.interpreters import batching
from jax.interpreters.partial_eval import dce_jaxpr

from .._activity import is_differentiable
from .._compat import batch_jaxpr, is_concrete
from .._placement import is_on_host
from .._static import PyTree, Static
from .forward import forward, primal
from .gradient import Mask, Perturbed, merge, pick, write_gradients, write_tangents
from .reverse import pull_back
from .rules import (
    Bound,
    Differentiable,
    as_arrays,
    compiled,
    floats,
    is_zero,
    mapped,
    moved,
    not_mapped,
    primal_of,
    tangent_of,
    types_of,
)
from .slots import Arrays, Carry, Checkpoints
from .spec import Checkpoint, SweepSpec, by_rules
from .trace import TracedLayer, kinds_of, without_passed_on


def run_layers(
    traced: Sequence[TracedLayer],
    unsliced: Sequence[Sequence[bool]],
    init: Sequence[PyTree],
    stacks: Sequence[Arrays],
    *,
    plain: Checkpoint | None = None,
    **fields: Any,
) -> tuple[Any, list[PyTree]]:
    """The last carry, and the outputs of each kind; with `plain`, a checkpoint of each layer, no sweep."""
    traced, carry_tree = [layer._replace(init=[*init]) for layer in traced], traced[0].carry_tree
    traced, passed_on = without_passed_on(traced)
    stacks, masks = list(stacks), [tuple(mask) for mask in unsliced]
    if plain is None:
        for k, (layer, part) in enumerate(zip(traced, stacks, strict=True)):
            traced[k], read = _without_unread(layer, part)
            stacks[k], masks[k] = pick(part, read), tuple(pick(masks[k], read))
    kinds, shared = kinds_of(traced)
    spec, xs = SweepSpec(kinds, unsliced=sum(masks, ()), **fields), sum(stacks, [])
    if plain is None:
        carry, ys = sweep_of(spec, traced[0].init, xs, shared)
    else:
        carry, ys = plain_scan(spec, plain, traced[0].init, xs, shared)
    outputs = [layer.output(ys[kind.ys]) for layer, kind in zip(traced, kinds, strict=True)]
    carry = merge(init, carry, [not is_ for is_ in passed_on])
    return jax.tree.unflatten(carry_tree, carry), outputs


def _without_unread(traced: TracedLayer, stacks: Arrays) -> tuple[TracedLayer, list[bool]]:
    """A layer without the host's arrays that it does not use, which need not travel; which it still takes."""
    jaxpr, others = traced.jaxpr, len(traced.jaxpr.invars) - len(stacks)
    kept = [True] * others + [not is_on_host(stack) for stack in stacks]
    if all(kept):
        return traced, kept[others:]
    jaxpr, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=kept)
    return traced._replace(jaxpr=jaxpr), used[others:]


class Sweep(Differentiable):
    """`(init, xs, shared) -> (carry, ys)` by the layers of a `SweepSpec`."""

    spec: SweepSpec

    def __init__(self, spec: SweepSpec, *args: PyTree) -> None:
        self.in_avals = types_of(args)
        ys: list[Any] = []
        for kind in spec.kinds:
            ys += [unmapped_aval(spec.rows(kind), 0, type_) for type_ in kind.output_types]
        self.out_aval = (self.in_avals[0], ys)
        self.params = {"spec": spec}
        self.effects = frozenset().union(*(kind.jaxpr.effects for kind in spec.kinds))
        super().__init__()

    def expand(self, init: Carry, xs: Arrays, shared: Arrays) -> PyTree:
        return compiled(Bound("sweep", primal, (self.spec,)))(init, xs, shared)

    def dce(self, used: PyTree, *live: Any) -> PyTree:
        return (True, True, self) if self.effects else super().dce(used, *live)

    def _perturbed(self, nonzero: Mask) -> tuple[Perturbed, list[Mask]]:
        masks = [tuple(part) for part in self.in_tree.unflatten(nonzero)]
        every_y = [is_differentiable(type_.dtype) for type_ in self.out_aval[1]]
        return self.spec.perturbed(*masks, ys=every_y), masks

    def primal(self, nonzero: Mask, args: PyTree) -> PyTree:
        perturbed, (init, xs, shared) = self._perturbed(nonzero)[0], args
        kinds, shared = [], [*shared]
        for kind in self.spec.kinds:
            own = [*kind.pick_shared(perturbed.shared), *perturbed.carry, *perturbed.xs[kind.xs]]
            kinds.append(kind.with_layer(primal_of(kind.jaxpr, own), shared))
        return sweep_of(replace(self.spec, kinds=tuple(kinds)), init, xs, shared)

    def vjp_fwd(self, nonzero: PyTree, init: Carry, xs: Arrays, shared: Arrays) -> PyTree:
        perturbed, masks = self._perturbed(self._nonzero(self.in_tree.flatten_up_to(nonzero)))
        carry, ys, checkpoints = sweep_forward(self.spec, perturbed, init, xs, shared)
        return (carry, ys), (checkpoints, xs, shared, Static(tuple(masks)))

    def vjp_bwd(self, residuals: PyTree, cotangents: PyTree, *sums: PyTree) -> None:
        checkpoints, xs, shared, masks = residuals
        carry_ct, ys_ct = cotangents
        # The first layers' residuals were kept for the cotangents of all outputs.
        keeps_all = self.spec.remat.first_layers > 0
        has_ct = [
            is_ and (keeps_all or not is_zero(ct))
            for is_, ct in zip(floats(self.out_aval[1]), ys_ct, strict=True)
        ]
        perturbed = self.spec.perturbed(*masks.value, ys=has_ct)
        carry_ct, ys_ct = as_arrays(pick(carry_ct, perturbed.carry)), as_arrays(pick(ys_ct, has_ct))
        found = sweep_backward(self.spec, perturbed, checkpoints, xs, shared, carry_ct, ys_ct)
        for part, mask, cts in zip(sums, masks.value, found, strict=True):
            for total, ct in zip(pick(part, mask), cts, strict=True):
                total.accum(ct)

    def batch(self, axis: Any, args: PyTree, dims: PyTree) -> PyTree:
        (init, xs, shared), (of_init, of_xs, of_shared) = args, dims
        if not_mapped(self, axis, dims):
            return self(*args), jax.tree.map(lambda _: None, self.out_aval)
        init, shared = moved(init, of_init, 0), moved(shared, of_shared, 0)
        xs = [
            leaf if dim is None else jnp.moveaxis(leaf, dim, int(not whole))
            for leaf, dim, whole in zip(xs, of_xs, self.spec.unsliced, strict=True)
        ]
        masks = ([dim is not None for dim in part] for part in (of_init, of_xs, of_shared))
        layers, of_carry, of_ys = _mapped_layers(self.spec, axis, *masks)
        kinds = [kind.with_layer(layer, shared) for kind, layer in zip(self.spec.kinds, layers, strict=True)]
        spec = replace(self.spec, kinds=tuple(kinds))
        init = [
            batching.broadcast(leaf, axis.size, 0, axis.explicit_mesh_axis) if is_ and dim is None else leaf
            for leaf, is_, dim in zip(init, of_carry, of_init, strict=True)
        ]
        found = sweep_of(spec, init, xs, shared)
        return found, ([0 if is_ else None for is_ in of_carry], [1 if is_ else None for is_ in of_ys])

    def active(self, nonzero: Mask) -> Mask:
        perturbed, _ = self._perturbed(nonzero)
        return (*perturbed.carry, *self.spec.active_outputs(perturbed))

    def tangent(self, nonzero: Mask, primals: PyTree, tangents: Arrays) -> Arrays:
        fn, reference = (Bound("sweep", run, (self.spec,)) for run in (primal, SweepSpec.reference))
        return _tangents(fn, reference, nonzero, self.active(nonzero), primals, tangents)


def sweep_of(spec: SweepSpec, init: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays]:
    """Run the layers of a sweep: the last carry, and the stacked outputs of all kinds."""
    return Sweep(spec, init, xs, shared)(init, xs, shared)


def plain_scan(
    spec: SweepSpec, checkpoint: Checkpoint, init: Carry, xs: Arrays, shared: Arrays
) -> tuple[Carry, Arrays]:
    """Run the layers of a plain scan, each checkpointed; compiled once where nothing is traced."""
    run = Bound("scan", SweepSpec.plain, (spec, checkpoint))
    is_eager = all(map(is_concrete, (*init, *xs, *shared)))
    return (compiled(run) if is_eager else run)(init, xs, shared)


def _mapped_layers(
    spec: SweepSpec, axis: Any, of_init: Sequence[bool], of_xs: Sequence[bool], of_shared: Sequence[bool]
) -> tuple[list[ClosedJaxpr], Sequence[bool], list[bool]]:
    """Layers of a whole batch, of each kind; which leaves of their carries and outputs are mapped."""
    of_carry = of_init
    while True:
        layers, found = [], []
        for kind in spec.kinds:
            is_mapped = [*kind.pick_shared(of_shared), *of_carry, *of_xs[kind.xs]]
            must_be = [*of_carry, *[False] * len(kind.output_types)]
            closed, outputs = batch_jaxpr(ClosedJaxpr(kind.jaxpr, ()), axis, is_mapped, must_be)
            layers.append(closed)
            found.append(outputs)
        grown = [
            any(column)
            for column in zip(of_carry, *(outputs[: len(of_carry)] for outputs in found), strict=True)
        ]
        if grown == [*of_carry]:
            of_ys = [is_ for outputs in found for is_ in outputs[len(grown) :]]
            return layers, grown, of_ys
        of_carry = grown


class Rule(Differentiable):
    """`fn`, with the reverse mode of `reference`: loops whose trip counts are data have no transpose."""

    fn: Bound
    reference: Bound

    def __init__(self, fn: Bound, reference: Bound, types: PyTree, out_types: PyTree, effects: Any) -> None:
        self.in_avals, self.out_aval, self.effects = types, out_types, effects
        self.params = {"fn": fn, "reference": reference}
        super().__init__()

    @staticmethod
    def of(fn: Bound, reference: Bound, *args: PyTree) -> "Rule":
        """The rule for arguments like these."""
        return Rule(fn, reference, types_of(args), *_results(fn, *args))

    def expand(self, *args: PyTree) -> PyTree:
        return compiled(self.fn)(*args)

    def batch(self, axis: Any, args: PyTree, dims: PyTree) -> PyTree:
        if not_mapped(self, axis, dims):
            return self(*args), self.out_tree.unflatten([None] * self.out_tree.num_leaves)
        flat = Static((tuple(self.in_tree.flatten_up_to(dims)), self.in_tree))
        rule = Rule.of(
            *(Bound("mapped", _mapped, (fn, axis, flat)) for fn in (self.fn, self.reference)), *args
        )
        return rule(*args), self.out_tree.unflatten([0] * self.out_tree.num_leaves)

    def active(self, nonzero: Mask) -> Mask:
        return tuple(any(nonzero) and is_ for is_ in floats(self.out_aval))

    def tangent(self, nonzero: Mask, primals: PyTree, tangents: Arrays) -> Arrays:
        of = nonzero, self.active(nonzero)
        return _tangents(_for_tangents(self.fn), self.reference, *of, primals, tangents)


def _results(fn: Bound, *args: PyTree) -> tuple[PyTree, Any]:
    """The types of what a function returns, and its effects."""
    closed, found = jax.make_jaxpr(compiled(fn), return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(found), closed.out_avals), closed.effects


def _tangents(
    fn: Bound, reference: Bound, nonzero: Mask, active: Mask, primals: PyTree, tangents: Arrays
) -> Arrays:
    """The tangents of the active outputs of `fn`, by its loops; in reverse mode by those of `reference`."""
    both = (Bound("tangent", tangent_of, (run, nonzero, active)) for run in (fn, reference))
    return Rule.of(*both, primals, tangents)(primals, tangents)


def _mapped(fn: Callable, axis: Any, flat: Static, *args: PyTree) -> PyTree:
    dims, tree = flat.value
    return mapped(fn, axis, tree.unflatten(dims))(*args)


def _for_tangents(fn: Bound) -> Bound:
    """A function of a sweep, or one that calls it, for its derivatives in forward mode alone."""
    first, *rest = fn.bound
    if fn.fn is _mapped:
        return replace(fn, bound=(_for_tangents(first), *rest))
    if fn.fn is forward:
        return replace(fn, bound=(by_rules(first, *rest), *rest))
    if fn.fn is pull_back:
        return replace(fn, bound=(by_rules(first, rest[0]), rest[0], write_tangents))
    return fn


def _of_part(spec: SweepSpec, masks: Sequence[Mask], args: Sequence[Arrays]) -> tuple[PyTree, ...]:
    """The plain scan as a function of the inputs in the masks, and these."""

    def run(*parts: Arrays) -> tuple[Carry, Arrays]:
        return spec.reference(*(merge(*triple) for triple in zip(args, parts, masks, strict=True)))

    return run, *(pick(arg, mask) for arg, mask in zip(args, masks, strict=True))


def _forward_reference(
    spec: SweepSpec, perturbed: Perturbed, *args: Arrays
) -> tuple[Carry, Arrays, Checkpoints]:
    """The forward sweep by the plain scan, with the first carry as the only checkpoint."""
    # As the forward pass of a gradient: custom rules compute it, and their code is differentiated.
    masks = perturbed.init, perturbed.xs, perturbed.shared
    carry, ys = jax.vjp(*_of_part(spec, masks, args))[0]
    types, _ = _results(Bound("sweep_forward", forward, (spec, perturbed)), *args)
    return carry, ys, types[2].from_first(args[0])


def sweep_forward(spec: SweepSpec, perturbed: Perturbed, *args: Arrays) -> tuple[Carry, Arrays, Checkpoints]:
    """Sweep forward from `init, xs, shared`, and keep what the schedule says."""
    both = (Bound("sweep_forward", run, (spec, perturbed)) for run in (forward, _forward_reference))
    return Rule.of(*both, *args)(*args)


def _backward_reference(
    spec: SweepSpec,
    perturbed: Perturbed,
    checkpoints: Checkpoints,
    xs: Arrays,
    shared: Arrays,
    carry_ct: Carry,
    ys_ct: Arrays,
) -> tuple[Carry, Arrays, Arrays]:
    """The reverse sweep by the plain scan's pullback, from the first carry."""
    masks = perturbed.init, perturbed.xs, perturbed.shared
    run, *parts = _of_part(spec, masks, (checkpoints.first(), xs, shared))

    def with_ct(*parts: Arrays) -> tuple[Carry, Arrays]:
        carry, ys = run(*parts)
        return pick(carry, perturbed.carry), pick(ys, perturbed.ys)

    _, pullback = jax.vjp(with_ct, *parts)
    return pullback((carry_ct, ys_ct))


def sweep_backward(
    spec: SweepSpec, perturbed: Perturbed, checkpoints: Checkpoints, *rest: PyTree
) -> tuple[Carry, Arrays, Arrays]:
    """Sweep back to the cotangents of the perturbed inputs, from `xs, shared, carry_ct, ys_ct`."""
    fn = Bound("sweep_backward", pull_back, (spec, perturbed, write_gradients))
    reference = Bound("sweep_backward", _backward_reference, (spec, perturbed))
    return Rule.of(fn, reference, checkpoints, *rest)(checkpoints, *rest)
