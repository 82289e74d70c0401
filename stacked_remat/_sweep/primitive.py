"""The sweep over layers as a JAX primitive, with all its rules.

`Sweep` runs the layers. In reverse mode it becomes two `Rule`s: the forward sweep that
keeps checkpoints, and the reverse sweep from these. In forward mode the tangent of each
is a `Linear`, of the same loops. `jax.vmap` maps the layers, so that gradients of what
a batch shares are summed within each layer.

Two nested scans under `jax.checkpoint` would keep as few carries as a sweep, but slice
a segment of weights into a new buffer and stack a segment of gradients before copying
it out. A sweep reads the stack by layer number in the innermost loop, and its gradient
buffers are loop carries that are updated in place.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, unmapped_aval
from jax.interpreters import ad, batching

from .._activity import active_outputs
from .._compat import batch_jaxpr, is_eager, nothing_is_traced
from .._static import PyTree, Static
from .forward import forward, primal
from .gradient import Checkpoint, Perturbed, merge, pick
from .programs import jitted, run
from .reverse import pull_back
from .reverse_spec import differentiated, for_forward_mode, for_reverse, serves
from .rules import (
    Bound,
    Differentiable,
    as_arrays,
    cotangents_of,
    floats,
    mapped,
    moved,
    not_mapped,
    of_part,
    primal_by_rules,
    primal_of,
    ruled,
    tangent_of,
)
from .slots import Arrays, Carry, Checkpoints, Mask, OfKinds
from .spec import SweepSpec
from .trace import TracedLayer, has_refs, kinds_of, weak_as, without_passed_on


def run_layers(
    traced: Sequence[TracedLayer],
    unsliced: Sequence[Sequence[bool]],
    init: Sequence[PyTree],
    stacks: OfKinds,
    *,
    plain: Checkpoint | None = None,
    **fields: Any,
) -> tuple[Any, list[PyTree]]:
    """The last carry, and the outputs of each kind; with `plain`, a checkpoint of each
    layer, no sweep.
    """
    traced, carry_tree = (
        [layer._replace(init=[*init]) for layer in traced],
        traced[0].carry_tree,
    )
    traced, passed_on = without_passed_on(traced)
    spec, shared = (
        SweepSpec(kinds_of(traced, unsliced), **fields),
        [layer.shared for layer in traced],
    )
    scanned = sweep_of if plain is None else functools.partial(plain_scan, plain)
    carry, ys = scanned(spec, traced[0].init, stacks, shared)
    carry = [*map(weak_as, carry, (var.aval for var in traced[0].jaxpr.outvars))]
    outputs = [layer.output(own) for layer, own in zip(traced, ys, strict=True)]
    carry = merge(init, carry, [not is_ for is_ in passed_on])
    return jax.tree.unflatten(carry_tree, carry), outputs


class Sweep(Differentiable):
    """`(init, xs, shared) -> (carry, ys)` by the layers of a `SweepSpec`."""

    spec: SweepSpec

    def __init__(self, spec: SweepSpec, *args: PyTree) -> None:
        self.in_avals = jax.tree.map(jax.typeof, args)
        ys = [
            [unmapped_aval(spec.rows(kind), 0, type_) for type_ in kind.output_types]
            for kind in spec.kinds
        ]
        self.out_aval = (self.in_avals[0], ys)
        self.params = {"spec": spec}
        self.effects = frozenset().union(*(kind.jaxpr.effects for kind in spec.kinds))
        super().__init__()

    def expand(self, init: Carry, xs: Arrays, shared: Arrays) -> PyTree:
        carry, ys = run(self._program, init, xs, shared)
        return carry, self._weak(ys)

    @functools.cached_property
    def _program(self) -> Any:
        return jitted(Bound("sweep", primal, (self.spec,)))

    def _weak(self, ys: OfKinds) -> OfKinds:
        """Outputs of the weak types of a layer's, which the stacks that are written do
        not have.
        """
        return jax.tree.map(weak_as, ys, self.out_aval[1])

    def _perturbed(self, nonzero: Mask, outputs: Mask | None = None) -> Perturbed:
        _, ys = self.out_tree.unflatten(
            floats(self.out_aval) if outputs is None else outputs
        )
        return self.spec.perturbed(*self.in_tree.unflatten(nonzero), ys=ys)

    def _with_layers(
        self, closed: Sequence[ClosedJaxpr], init: Carry, xs: PyTree, shared: PyTree
    ) -> PyTree:
        """Run other layers on the same inputs."""
        pairs = zip(self.spec.kinds, closed, shared, strict=True)
        kinds, shared = zip(
            *(kind.with_layer(layer, own) for kind, layer, own in pairs), strict=True
        )
        return sweep_of(replace(self.spec, kinds=kinds), init, xs, [*shared])

    def primal(self, nonzero: Mask, args: PyTree) -> PyTree:
        perturbed = self._perturbed(nonzero)
        layers = [
            primal_of(kind.jaxpr, sum(perturbed.of_layer(kind), ()))
            for kind in self.spec.kinds
        ]
        return self._with_layers(layers, *args)

    def vjp_fwd(
        self, nonzero: PyTree, init: Carry, xs: PyTree, shared: PyTree
    ) -> PyTree:
        flags = self._nonzero(self.in_tree.flatten_up_to(nonzero))
        spec, perturbed, shared = differentiated(
            self.spec, self._perturbed(flags), shared
        )
        spec = for_reverse(spec, perturbed, xs, shared)
        carry, ys, checkpoints = sweep_forward(spec, perturbed, init, xs, shared)
        return (carry, self._weak(ys)), (
            checkpoints,
            xs,
            shared,
            Static((flags, spec, perturbed)),
        )

    def vjp_bwd(self, residuals: PyTree, cotangents: PyTree, *sums: PyTree) -> None:
        *kept, static = residuals
        nonzero, spec, every = static.value
        pairs = zip(
            floats(self.out_aval), self.out_tree.flatten_up_to(cotangents), strict=True
        )
        has_ct = tuple(is_ and not isinstance(ct, ad.Zero) for is_, ct in pairs)
        some = replace(every, ys=self._perturbed(nonzero, has_ct).ys)
        perturbed = some if serves(spec, every, some, *kept[1:]) else every
        carry_ct, ys_ct = cotangents
        ys_ct = [
            as_arrays(pick(*each)) for each in zip(ys_ct, perturbed.ys, strict=True)
        ]
        carry_ct = as_arrays(pick(carry_ct, perturbed.carry))
        self._add(
            sweep_backward(spec, perturbed, *kept, carry_ct, ys_ct), sums, nonzero
        )

    def batch(self, axis: Any, args: PyTree, dims: PyTree) -> PyTree:
        if not_mapped(self, axis, dims):
            return self(*args), jax.tree.map(lambda _: None, self.out_aval)
        (init, xs, shared), (of_init, of_xs, of_shared) = args, dims
        layers, of_carry, of_ys = _mapped_layers(self.spec, axis, *dims)
        init = [
            (
                batching.broadcast(leaf, axis.size, 0, axis.explicit_mesh_axis)
                if is_ and dim is None
                else moved(leaf, dim)
            )
            for leaf, is_, dim in zip(init, of_carry, of_init, strict=True)
        ]
        xs = [
            [*map(moved, stacks, own, [0 if whole else 1 for whole in kind.unsliced])]
            for kind, stacks, own in zip(self.spec.kinds, xs, of_xs, strict=True)
        ]
        shared = [[*map(moved, *each)] for each in zip(shared, of_shared, strict=True)]
        of_ys = [[1 if is_ else None for is_ in own] for own in of_ys]
        found = self._with_layers(layers, init, xs, shared)
        return found, ([0 if is_ else None for is_ in of_carry], of_ys)

    def active(self, nonzero: Mask) -> Mask:
        perturbed, found = self._perturbed(nonzero), []
        for kind in self.spec.kinds:
            found += active_outputs(kind.jaxpr, sum(perturbed.of_layer(kind), ()))[
                kind.carries :
            ]
        return (*perturbed.carry, *found)

    def tangent(self, nonzero: Mask, primals: PyTree, tangents: Arrays) -> Arrays:
        fn, reference = (
            Bound("sweep", run, (self.spec,)) for run in (primal, SweepSpec.reference)
        )
        return tangents_by(
            fn, reference, nonzero, self.active(nonzero), primals, tangents
        )


def sweep_of(
    spec: SweepSpec, init: Carry, xs: OfKinds, shared: OfKinds
) -> tuple[Carry, OfKinds]:
    """Run the layers of a sweep: the last carry, and the stacked outputs of each
    kind.
    """
    return Sweep(spec, init, xs, shared)(init, xs, shared)


def plain_scan(
    checkpoint: Checkpoint, spec: SweepSpec, *args: PyTree
) -> tuple[Carry, OfKinds]:
    """Run the layers of a plain scan, each checkpointed."""
    plain = Bound("scan", SweepSpec.plain, (spec, checkpoint))
    if not is_eager() or _closes_over_traced(spec):
        return plain(*args)
    if has_refs(args):
        return jitted(plain)(*args)
    return Rule(plain, plain, *args)(*args)


def _closes_over_traced(spec: SweepSpec) -> bool:
    """Whether rules of a layer close over traced values, which can't be constants of a
    compiled program.
    """
    jaxprs = [kind.jaxpr for kind in spec.kinds]
    return not nothing_is_traced() and any(
        ruled(jaxpr, floats([var.aval for var in jaxpr.invars])).closures
        for jaxpr in jaxprs
    )


def _mapped_layers(
    spec: SweepSpec, axis: Any, of_init: PyTree, of_xs: PyTree, of_shared: PyTree
) -> tuple[list[ClosedJaxpr], list[bool], list[list[bool]]]:
    """Layers of a whole batch, of each kind; which leaves of their carries and outputs
    are mapped.
    """
    of_carry = [dim is not None for dim in of_init]
    while True:
        layers, found = [], []
        for kind, of_x, own in zip(spec.kinds, of_xs, of_shared, strict=True):
            is_mapped, of_x = (
                [dim is not None for dim in dims] for dims in (own, of_x)
            )
            must_be = [*of_carry, *[False] * len(kind.output_types)]
            closed, outputs = batch_jaxpr(
                ClosedJaxpr(kind.jaxpr, ()),
                axis,
                [*is_mapped, *of_carry, *of_x],
                must_be,
            )
            layers.append(closed)
            found.append(outputs)
        count = len(of_carry)
        grown = [*map(any, zip(*(outputs[:count] for outputs in found), strict=True))]
        if grown == of_carry:
            return layers, grown, [outputs[count:] for outputs in found]
        of_carry = grown


class Rule(Differentiable):
    """`fn`, with the reverse mode of `reference`: loops whose trip counts are data have
    no transpose.
    """

    fn: Bound
    reference: Bound

    def __init__(self, fn: Bound, reference: Bound, *args: PyTree) -> None:
        self._program = jitted(fn)
        self.in_avals, (self.out_aval, self.effects) = (
            jax.tree.map(jax.typeof, args),
            _results(fn, *args),
        )
        self.params = {"fn": fn, "reference": reference}
        super().__init__()

    def expand(self, *args: PyTree) -> PyTree:
        return run(self._program, *args)

    def primal(self, nonzero: Mask, args: PyTree) -> PyTree:
        if self.fn != self.reference or not any(nonzero):
            return self(*args)  # a sweep's own layers have the rules already
        by_rules = Bound(self.fn.name, primal_by_rules, (self.fn, nonzero))
        return Rule(by_rules, by_rules, *args)(*args)

    def cotangents(
        self, nonzero: Mask, has_ct: Mask, args: PyTree, cts: Arrays
    ) -> Arrays:
        back = Bound("cotangents", cotangents_of, (self.reference, nonzero, has_ct))
        return Rule(back, back, args, cts)(args, cts) if is_eager() else back(args, cts)

    def batch(self, axis: Any, args: PyTree, dims: PyTree) -> PyTree:
        if not_mapped(self, axis, dims):
            return self(*args), self.out_tree.unflatten(
                [None] * self.out_tree.num_leaves
            )
        flat = Static((tuple(self.in_tree.flatten_up_to(dims)), self.in_tree))
        both = (
            Bound("mapped", _mapped, (fn, axis, flat))
            for fn in (self.fn, self.reference)
        )
        return Rule(*both, *args)(*args), self.out_tree.unflatten(
            [0] * self.out_tree.num_leaves
        )

    def active(self, nonzero: Mask) -> Mask:
        return tuple(any(nonzero) and is_ for is_ in floats(self.out_aval))

    def tangent(self, nonzero: Mask, primals: PyTree, tangents: Arrays) -> Arrays:
        of = nonzero, self.active(nonzero)
        return tangents_by(
            _for_tangents(self.fn), self.reference, *of, primals, tangents
        )


def _results(fn: Bound, *args: PyTree) -> tuple[PyTree, Any]:
    """The types of what a function returns, and its effects."""
    traced = jitted(fn).trace(*args)
    return (
        jax.tree.unflatten(traced.out_tree, traced.jaxpr.out_avals),
        traced.jaxpr.effects,
    )


def tangents_by(
    fn: Callable,
    reference: Callable,
    nonzero: Mask,
    active: Mask,
    primals: PyTree,
    tangents: Arrays,
) -> Arrays:
    """The tangents of the active outputs of `fn`, by its loops; in reverse mode by
    those of `reference`.
    """
    both = (
        Bound("tangent", tangent_of, (run, nonzero, active)) for run in (fn, reference)
    )
    return Rule(*both, primals, tangents)(primals, tangents)


def _mapped(fn: Callable, axis: Any, flat: Static, *args: PyTree) -> PyTree:
    dims, tree = flat.value
    return mapped(fn, axis, tree.unflatten(dims))(*args)


def _for_tangents(fn: Bound) -> Bound:
    """A function of a sweep, or one that calls it, for its derivatives in forward mode
    alone.
    """
    first, *rest = fn.bound
    if fn.fn is _mapped:
        return replace(fn, bound=(_for_tangents(first), *rest))
    return (
        replace(fn, bound=(for_forward_mode(first), *rest))
        if fn.fn in (forward, pull_back)
        else fn
    )


def _forward_reference(spec: SweepSpec, perturbed: Perturbed, *args: PyTree) -> PyTree:
    """The forward sweep by the plain scan, with the first carry as the only
    checkpoint.
    """
    # As the forward pass of a gradient: custom rules compute it, and their code is
    # differentiated.
    run, part = of_part(spec.reference, args, perturbed.inputs)
    types, _ = _results(Bound("sweep_forward", forward, (spec, perturbed)), *args)
    carry, ys = jax.tree.unflatten(jax.tree.structure(types[:2]), jax.vjp(run, part)[0])
    return carry, ys, types[2].from_first(spec.of_held(args[0]))


def sweep_forward(
    spec: SweepSpec, perturbed: Perturbed, *args: PyTree
) -> tuple[Carry, OfKinds, Checkpoints]:
    """Sweep forward from `init, xs, shared`, and keep what the schedule says."""
    both = (
        Bound("sweep_forward", run, (spec, perturbed))
        for run in (forward, _forward_reference)
    )
    return Rule(*both, *args)(*args)


def _backward_reference(
    spec: SweepSpec, perturbed: Perturbed, checkpoints: Checkpoints, *rest: PyTree
) -> Arrays:
    """The reverse sweep by the plain scan's pullback, from the first carry."""
    *args, carry_ct, ys_ct = spec.whole(checkpoints.first()), *rest
    _, pullback = jax.vjp(
        *of_part(spec.reference, args, perturbed.inputs, perturbed.outputs)
    )
    return pullback(jax.tree.leaves((carry_ct, ys_ct)))[0]


def sweep_backward(spec: SweepSpec, perturbed: Perturbed, *args: PyTree) -> Arrays:
    """The cotangents of the perturbed inputs, in order, from `checkpoints, xs, shared,
    carry_ct, ys_ct`.
    """
    both = (
        Bound("sweep_backward", run, (spec, perturbed))
        for run in (pull_back, _backward_reference)
    )
    return Rule(*both, *args)(*args)
