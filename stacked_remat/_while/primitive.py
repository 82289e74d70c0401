"""A loop without a bound as JAX primitives, whose derivatives are such loops again.

    Loop        consts, init -> carry
    Forward     consts, init -> carry, checkpoints
    Backward    checkpoints, consts, cotangents -> cotangents

    reverse mode    Loop is Forward, then Backward
    forward mode    each is itself, of the step for a carry and its tangents
    jax.vmap        each is itself, of the step for a batch

That forward mode of `Backward` is a `Backward`: let a loop map `x` to `f(x)`, and let
`F(x, v) = f(x), f'(x) v` be the loop with tangents. `Backward` computes `f'(x)^T w`.
Its derivative along `v` and `u`, those of `x` and `w`, is

    f'(x)^T u + (d/dx f'(x) v)^T w,

the part of the pullback of `F` for `x`, at the cotangents `u` and `w`: again a reversal
of a loop from its kept carries, which `Forward` of `F` makes. Reverse mode of
`Backward` is the derivative by `x` and `w` of the number `w^T f'(x) v`, where `v` are
the cotangents of its results: the pullback of `F`, too. So derivatives of any order and
any mode take loops of this file with as many kept carries, each with its tangents.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import batching

from .._activity import is_differentiable
from .._static import PyTree, Static
from .._sweep.gradient import merge, pick, scatter_leaves
from .._sweep.programs import jitted, run, traced_program
from .._sweep.rules import Bound, Differentiable, as_arrays, moved, not_mapped
from .._sweep.slots import Arrays, Mask
from .._sweep.store import zeros_of
from . import sweeps
from .kept_carries import Kept
from .step import Differentiated, Step
from .sweeps import Checkpoints


class _OfStep(Differentiable):
    """What a function of this step computes, as a primitive."""

    step: Step

    def __init__(self, fn: Bound, params: dict[str, Any], *args: PyTree) -> None:
        self._program = jitted(fn)
        program = traced_program(self._program, *args)
        self.in_avals = jax.tree.map(jax.typeof, args)
        self.out_aval = jax.tree.unflatten(program.out_tree, program.jaxpr.out_avals)
        self.effects = program.jaxpr.effects
        self.programs = (program.jaxpr.jaxpr,)
        self.params = params
        super().__init__()

    def expand(self, *args: PyTree) -> PyTree:
        return run(self._program, *args)

    def _unmapped(self, args: PyTree) -> tuple[PyTree, PyTree]:
        """The result of a batching rule without a mapped input."""
        return self(*args), self.out_tree.unflatten([None] * self.out_tree.num_leaves)


class _FromStart(_OfStep):
    """A primitive that takes the constants and the first carry."""

    def differentiated(self, nonzero: Mask) -> Differentiated:
        """Which leaves have tangents, given which inputs have."""
        count = self.step.consts
        return self.step.differentiated(nonzero[:count], nonzero[count:])

    def with_tangents(
        self, nonzero: Mask, primals: PyTree, tangents: Arrays
    ) -> tuple[Step, Arrays, Arrays]:
        """The step with tangents, its constants and its first carry."""
        consts, init = primals
        of = self.differentiated(nonzero)
        step, constants = self.step.with_tangents(of)
        count = sum(of.consts)
        consts_dot, given = tangents[:count], tangents[count:]
        has_dot = nonzero[len(consts) :]
        init_dot = _filled(init, given, has_dot, of.carry)
        return step, [*constants, *consts, *consts_dot], [*init, *init_dot]

    def mapped(self, axis: Any, args: PyTree, dims: PyTree) -> Any:
        """The step of a batch, its constants, its first carry, and which leaves of the
        carry have the axis of the batch.
        """
        consts, init = args
        consts_dims, init_dims = dims
        step, is_mapped = self.step.mapped(
            axis, _are_mapped(consts_dims), _are_mapped(init_dims)
        )
        consts = [*map(moved, consts, consts_dims)]
        init = _moved_to(axis, init, init_dims, is_mapped)
        if step.stops_apart and not self.step.stops_apart:
            consts += map(lax.stop_gradient, pick(init, step.kept))
        return step, consts, init, is_mapped


class Loop(_FromStart):
    """`(consts, init) -> carry`: run steps until none of a batch runs on."""

    def __init__(self, step: Step, *args: PyTree) -> None:
        fn = Bound("while_loop", sweeps.run, (step,))
        super().__init__(fn, {"step": step}, *args)

    def vjp_fwd(self, nonzero: PyTree, consts: Arrays, init: Arrays) -> PyTree:
        mask = self._nonzero(self.in_tree.flatten_up_to(nonzero))
        carry, checkpoints = Forward(self.step, consts, init)(consts, init)
        return carry, (checkpoints, consts, Static((mask, self.differentiated(mask))))

    def input_cotangents(self, residuals: PyTree, cotangents: PyTree) -> PyTree:
        checkpoints, consts, how = residuals
        mask, of = how.value
        # Zeros where the reversal takes a cotangent and JAX has none
        inputs = checkpoints, consts, as_arrays(pick(cotangents, of.carry))
        consts_cts, carry_cts = Backward(self.step, of, 0, *inputs)(*inputs)
        # The reversal has those of all differentiated leaves, also where the first
        # carry has no tangent.
        init_nonzero = mask[len(consts) :]
        init_cts = pick(scatter_leaves(carry_cts, of.carry), init_nonzero)
        return self.in_tree.unflatten(scatter_leaves([*consts_cts, *init_cts], mask))

    def active(self, nonzero: Mask) -> Mask:
        return self.differentiated(nonzero).carry

    def tangent(self, nonzero: Mask, primals: PyTree, tangents: Arrays) -> Arrays:
        step, *args = self.with_tangents(nonzero, primals, tangents)
        return Loop(step, *args)(*args)[len(self.step.kept) :]

    def batch(self, axis: Any, args: PyTree, dims: PyTree) -> PyTree:
        if not_mapped(self, axis, dims):
            return self._unmapped(args)
        step, consts, init, is_mapped = self.mapped(axis, args, dims)
        return Loop(step, consts, init)(consts, init), _dims(is_mapped, 0)

    def followed(
        self, operands: Sequence[frozenset[int]]
    ) -> tuple[list[frozenset[int]], frozenset[int]]:
        """As `_followed` of `written.py`: leaves that this loop doesn't read go through
        it.
        """
        count = self.step.consts
        read = frozenset[int]().union(*operands[:count])
        results = []
        for leaves, is_kept in zip(operands[count:], self.step.kept, strict=True):
            read |= leaves if is_kept else frozenset()
            results.append(frozenset() if is_kept else leaves)
        return results, read


class Forward(_FromStart):
    """`(consts, init) -> (carry, checkpoints)`: the loop, with kept carries."""

    def __init__(self, step: Step, *args: PyTree) -> None:
        fn = Bound("while_loop_forward", sweeps.forward, (step,))
        super().__init__(fn, {"step": step}, *args)

    def reference(self, consts: Arrays, init: Arrays) -> PyTree:
        """The last carry, and checkpoints with the first carry alone: all that the
        derivative of `Backward` reads.
        """
        carry = Loop(self.step, consts, init)(consts, init)
        _, types = self.out_aval
        slots = []
        for leaf, type_ in zip(pick(init, self.step.kept), types.slots, strict=True):
            if is_differentiable(leaf.dtype):
                slots.append(zeros_of(type_).at[0].set(leaf))
            else:
                slots.append(jnp.broadcast_to(leaf, type_.shape))
        kept = Kept.at_start(self.step.max_carries)
        return carry, Checkpoints(slots, kept, jnp.int32(0))

    def active(self, nonzero: Mask) -> Mask:
        carry = self.differentiated(nonzero).carry
        # The steps of checkpoints, their slots, and how many ran
        integers = (False, False, False)
        return (*carry, *pick(carry, self.step.kept), *integers)

    def tangent(self, nonzero: Mask, primals: PyTree, tangents: Arrays) -> Arrays:
        step, *args = self.with_tangents(nonzero, primals, tangents)
        carry, checkpoints = Forward(step, *args)(*args)
        own = self.step.kept
        return [*carry[len(own) :], *checkpoints.slots[sum(own) :]]

    def batch(self, axis: Any, args: PyTree, dims: PyTree) -> PyTree:
        if not_mapped(self, axis, dims):
            return self._unmapped(args)
        step, consts, init, is_mapped = self.mapped(axis, args, dims)
        # After the axis of slots
        slots = _dims(pick(is_mapped, step.kept), 1)
        # Which carries are kept, and how many steps ran, is the same for the batch.
        dims = [*_dims(is_mapped, 0), *slots, None, None, None]
        results = Forward(step, consts, init)(consts, init)
        return results, self.out_tree.unflatten(dims)


class Backward(_OfStep):
    """`(checkpoints, consts, cotangents) -> (of consts, of init)`: the reversal.

    `ct_axes` says how many axes the cotangents have in front that nothing else has.
    """

    of: Differentiated
    ct_axes: int

    def __init__(
        self, step: Step, of: Differentiated, ct_axes: int, *args: PyTree
    ) -> None:
        fn = Bound("while_loop_backward", sweeps.backward, (step, of, ct_axes))
        params = {"step": step, "of": of, "ct_axes": ct_axes}
        super().__init__(fn, params, *args)

    def _again(self, step: Step, of: Differentiated, ct_axes: int, *args: Any) -> Any:
        return Backward(step, of, ct_axes, *args)(*args)

    def _divided(self, mask: Mask) -> tuple[Mask, Mask, Mask]:
        """A mask of all inputs for the slots, the constants and the cotangents."""
        slots = sum(self.step.kept)
        cotangents = len(mask) - sum(self.of.carry)
        consts = cotangents - self.step.consts
        return mask[:slots], mask[consts:cotangents], mask[cotangents:]

    def active(self, nonzero: Mask) -> Mask:
        return (any(nonzero),) * self.out_tree.num_leaves

    def tangent(self, nonzero: Mask, primals: PyTree, tangents: Arrays) -> Arrays:
        checkpoints, consts, cts = primals
        slots_nonzero, consts_nonzero, cts_nonzero = self._divided(nonzero)
        slots_dot, others_dot = _split(tangents, sum(slots_nonzero))
        consts_dot, cts_dot = _split(others_dot, sum(consts_nonzero))
        # The loop with tangents, its constants and its kept carries
        kept = self.step.kept
        carry_nonzero = merge([False] * len(kept), slots_nonzero, kept)
        with_dot = self.step.differentiated(consts_nonzero, tuple(carry_nonzero))
        step, constants = self.step.with_tangents(with_dot)
        new_consts = [*constants, *consts, *consts_dot]
        wanted = pick(with_dot.carry, kept)
        slots_dot = _filled(checkpoints.slots, slots_dot, slots_nonzero, wanted)
        new_checkpoints = checkpoints._replace(slots=[*checkpoints.slots, *slots_dot])
        # Its pullback, at the tangents of the cotangents for the carry, and at the
        # cotangents for the tangents of the carry
        cts_dot = _filled(cts, cts_dot, cts_nonzero, (True,) * len(cts))
        new_cts = [*cts_dot, *self._of_leaves(with_dot.carry, cts)]
        before = (False,) * len(constants)
        after = (False,) * len(consts_dot)
        of = Differentiated(
            (*before, *self.of.consts, *after),
            (*self.of.carry, *[True] * sum(with_dot.carry)),
        )
        args = new_checkpoints, new_consts, new_cts
        consts_cts, carry_cts = self._again(step, of, self.ct_axes, *args)
        return [*consts_cts, *carry_cts[: len(cts)]]

    def _of_leaves(self, wanted: Mask, cts: Arrays) -> Arrays:
        """The cotangents of these leaves of the carry, zeros where it has none."""
        _, types = self.step.types
        batch = cts[0].shape[: self.ct_axes]
        by_leaf = scatter_leaves(cts, self.of.carry)
        results = []
        for type_, ct in pick([*zip(types, by_leaf, strict=True)], wanted):
            results.append(zeros_of(type_.to_ct_aval(), batch) if ct is None else ct)
        return results

    def cotangents(
        self, nonzero: Mask, has_ct: Mask, args: PyTree, cts: Arrays
    ) -> Arrays:
        checkpoints, consts, own_cts = args
        slots_nonzero, consts_nonzero, cts_nonzero = self._divided(nonzero)
        # The cotangents of the results are directions, in which the loop is
        # differentiated.
        given = iter(cts)
        directions = []
        for has, type_ in zip(has_ct, self.out_avals_flat, strict=True):
            directions.append(next(given) if has else zeros_of(type_))

        def tangents(slots_part: Arrays, consts_part: Arrays) -> Arrays:
            slots = merge(checkpoints.slots, slots_part, slots_nonzero)
            every_const = merge(consts, consts_part, consts_nonzero)
            return self._tangents_of_carry(slots, every_const, directions)

        parts = pick(checkpoints.slots, slots_nonzero), pick(consts, consts_nonzero)
        found, pullback = jax.vjp(tangents, *parts)
        slots_cts, consts_cts = pullback(own_cts)
        return [*slots_cts, *consts_cts, *pick(found, cts_nonzero)]

    def _tangents_of_carry(
        self, slots: Arrays, consts: Arrays, directions: Arrays
    ) -> Arrays:
        """The tangents of the last carry along directions of what is differentiated."""
        init = self.step.whole([leaf[0] for leaf in slots])
        inputs = [*consts, *init]

        def last_carry(part: Arrays) -> Arrays:
            args = _split(merge(inputs, part, self.of.inputs), len(consts))
            return pick(Loop(self.step, *args)(*args), self.of.carry)

        def tangents_along(directions: Arrays) -> Arrays:
            part = pick(inputs, self.of.inputs)
            _, tangents = jax.jvp(last_carry, (part,), (directions,))
            return tangents

        for _ in range(self.ct_axes):
            tangents_along = jax.vmap(tangents_along)
        return tangents_along(directions)

    def batch(self, axis: Any, args: PyTree, dims: PyTree) -> PyTree:
        if not_mapped(self, axis, dims):
            return self._unmapped(args)
        checkpoints, consts, cts = args
        checkpoints_dims, consts_dims, cts_dims = dims
        slots_dims = checkpoints_dims.slots
        every_ct = (True,) * len(cts)
        if not any(_are_mapped([*slots_dims, *consts_dims])):
            # One loop is reversed for several cotangents.
            cts = _moved_to(axis, cts, cts_dims, every_ct)
            args = checkpoints, consts, cts
            results = self._again(self.step, self.of, self.ct_axes + 1, *args)
            return results, self._dims(0)
        own, of = self.step, self.of
        # There is a cotangent for each example of what is differentiated, and zeros are
        # made for each of what is not kept.
        carry_mapped = merge([True] * len(own.kept), _are_mapped(slots_dims), own.kept)
        carry_mapped = _either(carry_mapped, of.carry)
        consts_mapped = _either(_are_mapped(consts_dims), of.consts)
        step, carry_mapped = own.mapped(axis, consts_mapped, carry_mapped)
        consts = _moved_to(axis, consts, consts_dims, consts_mapped)
        slots_mapped = pick(carry_mapped, own.kept)
        # After the axis of slots
        slots = _moved_to(axis, checkpoints.slots, slots_dims, slots_mapped, 1)
        checkpoints = checkpoints._replace(slots=slots)
        if step.stops_apart and not own.stops_apart:
            consts += checkpoints.first
        further = (False,) * (step.consts - own.consts)
        of = Differentiated((*of.consts, *further), of.carry)
        cts = _moved_to(axis, cts, cts_dims, every_ct, self.ct_axes)
        args = checkpoints, consts, cts
        results = self._again(step, of, self.ct_axes, *args)
        return results, self._dims(self.ct_axes)

    def _dims(self, dim: int) -> PyTree:
        return self.out_tree.unflatten([dim] * self.out_tree.num_leaves)


def _split(leaves: Sequence[Any], count: int) -> tuple[Any, Any]:
    return leaves[:count], leaves[count:]


def _filled(
    primals: Sequence[Any], given: Arrays, has: Sequence[bool], wanted: Sequence[bool]
) -> Arrays:
    """Tangents of the primals in the mask `wanted`: those that are given, for the
    primals in `has`, and zeros.
    """
    tangents = []
    by_leaf = scatter_leaves(given, has)
    for primal, tangent in pick([*zip(primals, by_leaf, strict=True)], wanted):
        if tangent is None:
            tangent = zeros_of(jax.typeof(primal).to_tangent_aval())
        tangents.append(tangent)
    return tangents


def _are_mapped(dims: Sequence[int | None]) -> Mask:
    return tuple(dim is not None for dim in dims)


def _either(first: Sequence[bool], second: Sequence[bool]) -> Mask:
    return tuple(a or b for a, b in zip(first, second, strict=True))


def _dims(is_mapped: Sequence[bool], dim: int) -> list[int | None]:
    return [dim if is_ else None for is_ in is_mapped]


def _moved_to(
    axis: Any,
    leaves: Sequence[Any],
    dims: Sequence[int | None],
    is_mapped: Sequence[bool],
    to: int = 0,
) -> Arrays:
    """The leaves with the axis of a batch at this place, where they are to have it."""
    results = []
    for leaf, dim, is_ in zip(leaves, dims, is_mapped, strict=True):
        if is_ and dim is None:
            results.append(
                batching.broadcast(leaf, axis.size, to, axis.explicit_mesh_axis)
            )
        else:
            results.append(moved(leaf, dim, to))
    return results
