"""The sweep over layers as a JAX primitive, with all its rules.

Why a primitive. Two nested scans under `jax.checkpoint` would keep as few carries as a
sweep, but slice a segment of weights into a new buffer and stack a segment of gradients
before copying it out. A sweep reads the stack by layer number in the innermost loop,
and its gradient buffers are loop carries that are updated in place. JAX's own rules
for loops would undo that: they stack what a loop reads, and have no transpose of loops
with trip counts that are data. So the loops are within primitives of
`jax.experimental.hijax`, whose rules give other sweeps:

    Sweep     init, xs, shared -> carry, ys
      reverse mode   Rule(forward)      the same, and checkpoints
                     Rule(backward)     checkpoints, cotangents -> cotangents
      forward mode   Linear -> Rule(tangent_of ...)     the same loops, of pairs
      jax.vmap       Sweep of mapped layers, so that gradients of what a batch shares
                     are summed within each layer

How a gradient gets to the loops:

    jax.grad: Sweep.__call__ -> JAX -> Sweep.vjp_fwd -> sweep_forward
                  -> Rule -> forward.forward
              JAX -> LowPrimitive.vjp_bwd -> Sweep.input_cotangents -> sweep_backward
                  -> Rule -> reverse.backward

A `Rule` is any function of arrays with a *reference*: another way to compute it, which
JAX can differentiate in reverse mode. It traces the function when it is made, for the
types of its results, and runs that trace when it is lowered. For sweeps the reference
is a checkpointed `lax.scan` (`SweepSpec.plain`). Second derivatives in forward mode
(`jvp` of `grad`) so go through the sweep's own loops; those in reverse mode (`grad` of
`grad`) through that scan.

`run_layers` is what `_scan/layers.py` calls. `rules.py` has what all these primitives
share, `programs.py` how they run outside of `jax.jit`.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, unmapped_aval
from jax.interpreters import batching

from .._activity import active_outputs
from .._compat import batch_jaxpr, is_eager, nothing_is_traced
from .._memory_spaces import has_host_arrays
from .._static import PyTree, Static
from . import disk
from .forward import forward, primal
from .gradient import Perturbed, merge, pick, scatter_leaves
from .programs import jitted, run, traced_program
from .reverse import backward
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
from .slots import Arrays, Carry, Checkpoints, Mask, OfKinds, inverted, types_of
from .spec import SweepSpec
from .trace import TracedLayers, has_refs, weak_as, without_passed_on


def run_layers(
    traced: TracedLayers, spec: SweepSpec, init: Carry, stacks: OfKinds
) -> tuple[Any, list[PyTree]]:
    """Run traced layers of each kind from one first carry.

    Args:
        traced: the layers.
        spec: the loop or the sweep over them.
        init: the leaves of the first carry.
        stacks: the layers' own inputs.

    Returns:
        The last carry and a list of the outputs of each kind, as trees.
    """
    # Leaves of the carry that all layers pass on unchanged need no loop.
    layers, passed_on = without_passed_on(traced._replace(init=[*init]))
    spec = replace(spec, kinds=layers.kinds)
    run_all = loop_of if spec.remat.form == "loop" else sweep_of
    carry, ys = run_all(spec, layers.init, stacks, layers.shared)
    carry = [*map(weak_as, carry, spec.carry_types)]
    outputs = [*map(layers.output, layers.kinds, ys)]
    carry = merge(init, carry, inverted(passed_on))
    return jax.tree.unflatten(layers.carry_tree, carry), outputs


class Sweep(Differentiable):
    """`(init, xs, shared) -> (carry, ys)` by the layers of a `SweepSpec`.

    The spec is its only parameter, so that sweeps of equal specs are one program.
    """

    spec: SweepSpec

    def __init__(self, spec: SweepSpec, *args: PyTree) -> None:
        self.in_avals = jax.tree.map(jax.typeof, args)
        ys = []
        for kind in spec.kinds:
            rows = spec.rows(kind)
            ys.append([unmapped_aval(rows, 0, type_) for type_ in kind.output_types])
        self.out_aval = (self.in_avals[0], ys)
        # `super().__init__` makes parameters attributes, and JAX compares by them.
        self.params = {"spec": spec}
        self.programs = tuple(kind.jaxpr for kind in spec.kinds)
        self.effects = frozenset()
        for jaxpr in self.programs:
            self.effects |= jaxpr.effects
        super().__init__()

    def expand(self, init: Carry, xs: OfKinds, shared: OfKinds) -> PyTree:
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
        """The perturbed leaves where the inputs in the mask are differentiated.

        `outputs` says which outputs have a cotangent, by default all that can.
        """
        has_ct = floats(self.out_aval) if outputs is None else outputs
        _, ys = self.out_tree.unflatten(has_ct)
        return self.spec.perturbed(*self.in_tree.unflatten(nonzero), ys=ys)

    def _with_layers(
        self, layers: Sequence[ClosedJaxpr], init: Carry, xs: PyTree, shared: PyTree
    ) -> PyTree:
        """Run other layers on the same inputs."""
        kinds = []
        shared_by_kind = []
        for kind, layer, leaves in zip(self.spec.kinds, layers, shared, strict=True):
            kind, leaves = kind.with_layer(layer, leaves)
            kinds.append(kind)
            shared_by_kind.append(leaves)
        spec = replace(self.spec, kinds=tuple(kinds))
        return sweep_of(spec, init, xs, shared_by_kind)

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
        """The results, and what `input_cotangents` needs: checkpoints, all inputs but
        the carry, and how the reverse sweep is to read them.
        """
        mask = self._nonzero(self.in_tree.flatten_up_to(nonzero))
        perturbed = self._perturbed(mask)
        spec, perturbed, shared = differentiated(self.spec, perturbed, shared)
        spec = for_reverse(spec, perturbed, xs, shared)
        carry, ys, checkpoints = sweep_forward(spec, perturbed, init, xs, shared)
        # The first carry is the first checkpoint; it is not kept twice.
        how = Static((mask, spec, perturbed))
        return (carry, self._weak(ys)), (checkpoints, xs, shared, how)

    def input_cotangents(self, residuals: PyTree, cotangents: PyTree) -> PyTree:
        checkpoints, xs, shared, how = residuals
        mask, spec, saved_for = how.value
        has_ct = self._has_cotangent(cotangents)
        # Only now it is known which outputs have no cotangent.
        fewer = replace(saved_for, ys=self._perturbed(mask, has_ct).ys)
        perturbed = fewer if serves(spec, saved_for, fewer, xs, shared) else saved_for
        carry_ct, ys_ct = cotangents
        # Zeros where the sweep takes a cotangent and JAX has none.
        carry_ct = as_arrays(pick(carry_ct, perturbed.carry))
        ys_ct = [*map(as_arrays, map(pick, ys_ct, perturbed.ys))]
        inputs = checkpoints, xs, shared, carry_ct, ys_ct
        input_cts = sweep_backward(spec, perturbed, *inputs)
        return self.in_tree.unflatten(scatter_leaves(input_cts, mask))

    def batch(self, axis: Any, args: PyTree, dims: PyTree) -> PyTree:
        # Not `jax.vmap` of the loops: their buffers for gradients would be as many as
        # examples, also of weights that all examples share.
        if not_mapped(self, axis, dims):
            return self(*args), jax.tree.map(lambda _: None, self.out_aval)
        init, xs, shared = args
        init_dims, xs_dims, shared_dims = dims
        layers, carry_mapped, ys_mapped = _mapped_layers(self.spec, axis, *dims)
        # All arrays get their batch axis where a mapped layer takes it: first, in a
        # layer's entry. Stacks that are sliced have it after the layers' axis.
        new_init = []
        for leaf, is_mapped, dim in zip(init, carry_mapped, init_dims, strict=True):
            if is_mapped and dim is None:
                axis_on_mesh = axis.explicit_mesh_axis
                new_init.append(batching.broadcast(leaf, axis.size, 0, axis_on_mesh))
            else:
                new_init.append(moved(leaf, dim))
        new_xs = []
        for kind, stacks, of_kind in zip(self.spec.kinds, xs, xs_dims, strict=True):
            batch_axes = [0 if whole else 1 for whole in kind.unsliced]
            new_xs.append([*map(moved, stacks, of_kind, batch_axes)])
        new_shared = []
        for leaves, of_kind in zip(shared, shared_dims, strict=True):
            new_shared.append([*map(moved, leaves, of_kind)])
        results = self._with_layers(layers, new_init, new_xs, new_shared)
        ys_dims = [_dims_of(of_kind, 1) for of_kind in ys_mapped]
        return results, (_dims_of(carry_mapped, 0), ys_dims)

    def active(self, nonzero: Mask) -> Mask:
        perturbed = self._perturbed(nonzero)
        active = [*perturbed.carry]
        for kind in self.spec.kinds:
            inputs = sum(perturbed.of_layer(kind), ())
            active += active_outputs(kind.jaxpr, inputs)[kind.carries :]
        return tuple(active)

    def tangent(self, nonzero: Mask, primals: PyTree, tangents: Arrays) -> Arrays:
        return tangents_by(
            Bound("sweep", primal, (self.spec,)),
            Bound("sweep", SweepSpec.plain, (self.spec, True)),
            nonzero,
            self.active(nonzero),
            primals,
            tangents,
        )


def sweep_of(
    spec: SweepSpec, init: Carry, xs: OfKinds, shared: OfKinds
) -> tuple[Carry, OfKinds]:
    """Run the layers of a sweep: the last carry, and the stacked outputs of each
    kind.
    """
    return Sweep(spec, init, xs, shared)(init, xs, shared)


def loop_of(
    spec: SweepSpec, init: Carry, xs: OfKinds, shared: OfKinds
) -> tuple[Carry, OfKinds]:
    """Run the layers of a loop, with results as of `sweep_of`."""
    args = init, xs, shared
    loop = Bound("scan", SweepSpec.plain, (spec, True))
    # A primitive has cotangents for all inputs on the host, which JAX makes on the
    # device where a layer doesn't read one. And outside of `jax.jit` its derivative
    # keeps its arguments alone.
    is_primitive = is_eager() or has_host_arrays(args)
    if not is_primitive or _closes_over_traced(spec):
        return loop(*args)
    if has_refs(args):
        return jitted(loop)(*args)
    return Rule(loop, loop, *args)(*args)


def _closes_over_traced(spec: SweepSpec) -> bool:
    """Whether rules of a layer close over traced values, which can't be constants of a
    compiled program.
    """
    if nothing_is_traced():
        return False
    for kind in spec.kinds:
        if ruled(kind.jaxpr, floats(types_of(kind.jaxpr.invars))).closures:
            return True
    return False


def _mapped_layers(
    spec: SweepSpec, axis: Any, of_init: PyTree, of_xs: PyTree, of_shared: PyTree
) -> tuple[list[ClosedJaxpr], list[bool], list[list[bool]]]:
    """Layers of a whole batch, of each kind; which leaves of the carry and, for each
    kind, of the outputs are mapped.

    Where a layer makes a leaf of the carry mapped, all layers take it mapped: found by
    mapping the layers again until no further leaf is.
    """
    carry_mapped = _are_mapped(of_init)
    # Ends, since each time but the last a leaf more is mapped.
    while True:
        layers = []
        outputs_mapped = []
        for kind, x_dims, shared_dims in zip(spec.kinds, of_xs, of_shared, strict=True):
            inputs_mapped = [
                *_are_mapped(shared_dims),
                *carry_mapped,
                *_are_mapped(x_dims),
            ]
            must_be = [*carry_mapped, *[False] * len(kind.output_types)]
            closed = ClosedJaxpr(kind.jaxpr, ())
            layer, is_mapped = batch_jaxpr(closed, axis, inputs_mapped, must_be)
            layers.append(layer)
            outputs_mapped.append(is_mapped)
        count = len(carry_mapped)
        grown = carry_mapped
        ys_mapped = []
        for is_mapped in outputs_mapped:
            grown = [*map(operator.or_, grown, is_mapped[:count])]
            ys_mapped.append(is_mapped[count:])
        if grown == carry_mapped:
            return layers, grown, ys_mapped
        carry_mapped = grown


def _are_mapped(dims: PyTree) -> list[bool]:
    return [dim is not None for dim in dims]


def _dims_of(is_mapped: Sequence[bool], axis: int) -> list[int | None]:
    return [axis if is_ else None for is_ in is_mapped]


class Rule(Differentiable):
    """`fn`, with the reverse mode of `reference`: loops whose trip counts are data have
    no transpose.

    Both return arrays of the same types, and know no array but their arguments. Where
    `fn` returns checkpoints, `reference` fills in the first carry alone: it is all that
    the reference of a reverse sweep reads.
    """

    fn: Bound
    reference: Bound

    def __init__(self, fn: Bound, reference: Bound, *args: PyTree) -> None:
        self._program = jitted(fn)
        self.in_avals = jax.tree.map(jax.typeof, args)
        self.out_aval, closed = _results(fn, *args)
        self.effects = closed.effects
        self.programs = (closed.jaxpr,)
        self.params = {"fn": fn, "reference": reference}
        super().__init__()

    def expand(self, *args: PyTree) -> PyTree:
        results = run(self._program, *args)
        # Outside of `jax.jit` the reverse sweep runs later, or never: the files live
        # as long as their tickets.
        if _writes_files(self.fn):
            _, _, checkpoints = results
            disk.keep_until_garbage(checkpoints.inputs)
        return results

    def primal(self, nonzero: Mask, args: PyTree) -> PyTree:
        if self.fn != self.reference or not any(nonzero):
            return self(*args)  # a sweep's own layers have the rules already
        by_rules = Bound(self.fn.name, primal_by_rules, (self.fn, nonzero))
        return Rule(by_rules, by_rules, *args)(*args)

    def cotangents(
        self, nonzero: Mask, has_ct: Mask, args: PyTree, cts: Arrays
    ) -> Arrays:
        back = Bound("cotangents", cotangents_of, (self.reference, nonzero, has_ct))
        if is_eager():
            # A primitive again, which is compiled as one program.
            back = Rule(back, back, args, cts)
        return back(args, cts)

    def batch(self, axis: Any, args: PyTree, dims: PyTree) -> PyTree:
        if not_mapped(self, axis, dims):
            return self(*args), self.out_tree.unflatten(
                [None] * self.out_tree.num_leaves
            )
        # Dimensions as a hashable value, since a `Bound` is compared by it.
        flat = Static((tuple(self.in_tree.flatten_up_to(dims)), self.in_tree))
        fn = Bound("mapped", _mapped, (self.fn, axis, flat))
        reference = Bound("mapped", _mapped, (self.reference, axis, flat))
        out_dims = self.out_tree.unflatten([0] * self.out_tree.num_leaves)
        return Rule(fn, reference, *args)(*args), out_dims

    def active(self, nonzero: Mask) -> Mask:
        # All that can: which results depend on which inputs is in the loops.
        is_float = floats(self.out_aval)
        return is_float if any(nonzero) else (False,) * len(is_float)

    def tangent(self, nonzero: Mask, primals: PyTree, tangents: Arrays) -> Arrays:
        fn = _for_tangents(self.fn)
        active = self.active(nonzero)
        return tangents_by(fn, self.reference, nonzero, active, primals, tangents)


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
    tangent = Bound("tangent", tangent_of, (fn, nonzero, active))
    by_reference = Bound("tangent", tangent_of, (reference, nonzero, active))
    return Rule(tangent, by_reference, primals, tangents)(primals, tangents)


def _mapped(fn: Callable, axis: Any, flat: Static, *args: PyTree) -> PyTree:
    dims, tree = flat.value
    return mapped(fn, axis, tree.unflatten(dims))(*args)


def _for_tangents(fn: Bound) -> Bound:
    """A function of a sweep, or one that calls it, for its derivatives in forward mode
    alone.
    """
    first, *rest = fn.bound
    # `_mapped` is bound to a `Bound`, the loops to their spec.
    if fn.fn is _mapped:
        return replace(fn, bound=(_for_tangents(first), *rest))
    if fn.fn in (forward, backward):
        return replace(fn, bound=(for_forward_mode(first), *rest))
    return fn


def _writes_files(fn: Bound) -> bool:
    """Whether a function is a forward sweep, or a mapped one, with carries on disk."""
    first, *_ = fn.bound
    if fn.fn is _mapped:
        return _writes_files(first)
    return fn.fn is forward and first.remat.carries == "disk"


def _results(fn: Bound, *args: PyTree) -> tuple[PyTree, ClosedJaxpr]:
    """The types of what a function returns, and its jaxpr."""
    program = traced_program(jitted(fn), *args)
    types = jax.tree.unflatten(program.out_tree, program.jaxpr.out_avals)
    return types, program.jaxpr


def _forward_reference(spec: SweepSpec, perturbed: Perturbed, *args: PyTree) -> PyTree:
    """The forward sweep by the plain scan, with the first carry as the only
    checkpoint.
    """
    init, *_ = args
    # As the forward pass of a gradient: custom rules compute it, and their code is
    # differentiated.
    plain = functools.partial(spec.plain, True)
    run, part = of_part(plain, args, perturbed.inputs)
    results, _ = jax.vjp(run, part)
    # The checkpoints that the sweep would return, by their types.
    sweep = Bound("sweep_forward", forward, (spec, perturbed))
    (*result_types, checkpoint_types), _ = _results(sweep, *args)
    structure = jax.tree.structure(tuple(result_types))
    carry, ys = jax.tree.unflatten(structure, results)
    return carry, ys, checkpoint_types.from_first(spec.of_held(init))


def sweep_forward(
    spec: SweepSpec, perturbed: Perturbed, *args: PyTree
) -> tuple[Carry, OfKinds, Checkpoints]:
    """`forward.forward(spec, perturbed, *args)` as a primitive: sweep forward from
    `init, xs, shared`, and keep what the policy says.
    """
    loops = Bound("sweep_forward", forward, (spec, perturbed))
    reference = Bound("sweep_forward", _forward_reference, (spec, perturbed))
    return Rule(loops, reference, *args)(*args)


def _backward_reference(
    spec: SweepSpec, perturbed: Perturbed, checkpoints: Checkpoints, *rest: PyTree
) -> Arrays:
    """The reverse sweep by the plain scan's pullback, from the first carry."""
    xs, shared, carry_ct, ys_ct = rest
    args = spec.whole(checkpoints.first_carry()), xs, shared
    plain = functools.partial(spec.plain, True)
    run, part = of_part(plain, args, perturbed.inputs, perturbed.outputs)
    _, pullback = jax.vjp(run, part)
    (input_cts,) = pullback(jax.tree.leaves((carry_ct, ys_ct)))
    return input_cts


def sweep_backward(spec: SweepSpec, perturbed: Perturbed, *args: PyTree) -> Arrays:
    """`reverse.backward(spec, perturbed, *args)` as a primitive: the cotangents of the
    perturbed inputs, in order, from `checkpoints, xs, shared, carry_ct, ys_ct`.
    """
    loops = Bound("sweep_backward", backward, (spec, perturbed))
    reference = Bound("sweep_backward", _backward_reference, (spec, perturbed))
    return Rule(loops, reference, *args)(*args)
