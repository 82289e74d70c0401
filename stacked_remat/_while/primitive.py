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
from .placement import Kept
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
        of_consts, of_init = Backward(self.step, of, 0, *inputs)(*inputs)
        init_cts = scatter_leaves(of_init, of.carry)
        wanted = pick(init_cts, mask[len(consts) :])
        return self.in_tree.unflatten(scatter_leaves([*of_consts, *wanted], mask))

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
        of_slots, of_consts, of_cts = self._divided(nonzero)
        slots_dot, given = _split(tangents, sum(of_slots))
        consts_dot, cts_dot = _split(given, sum(of_consts))
        own, of = self.step, self.of
        # Which leaves of the carry have tangents
        in_slots = merge([False] * len(own.kept), of_slots, own.kept)
        along = own.differentiated(of_consts, tuple(in_slots))
        step, constants = own.with_tangents(along)
        in_kept = pick(along.carry, own.kept)
        slots_dot = _filled(checkpoints.slots, slots_dot, of_slots, in_kept)
        new_checkpoints = checkpoints._replace(slots=[*checkpoints.slots, *slots_dot])
        # The pullback at the cotangents' tangents, for the carry, and at the
        # cotangents, for its tangents
        new_cts = _filled(cts, cts_dot, of_cts, (True,) * len(cts))
        by_leaf = scatter_leaves(cts, of.carry)
        _, carry_types = own.types
        leaves = [*zip(carry_types, by_leaf, strict=True)]
        for type_, ct in pick(leaves, along.carry):
            batch = cts[0].shape[: self.ct_axes]
            new_cts.append(zeros_of(type_.to_ct_aval(), batch) if ct is None else ct)
        others = (False,) * len(constants), (False,) * len(consts_dot)
        new_of = Differentiated(
            (*others[0], *of.consts, *others[1]),
            (*of.carry, *[True] * sum(along.carry)),
        )
        new_consts = [*constants, *consts, *consts_dot]
        args = new_checkpoints, new_consts, new_cts
        of_consts, of_carry = self._again(step, new_of, self.ct_axes, *args)
        return [*of_consts, *of_carry[: len(cts)]]

    def cotangents(
        self, nonzero: Mask, has_ct: Mask, args: PyTree, cts: Arrays
    ) -> Arrays:
        of = self.of
        # The cotangents of the results are directions, in which the loop is
        # differentiated.
        results = zip(has_ct, self.out_avals_flat, strict=True)
        given = iter(cts)
        directions = [next(given) if has else zeros_of(t) for has, t in results]

        def tangents(slots: Arrays, consts: Arrays) -> Arrays:
            init = self.step.whole([leaf[0] for leaf in slots])

            def last(part: Arrays) -> Arrays:
                leaves = merge([*consts, *init], part, of.inputs)
                inputs = _split(leaves, len(consts))
                return pick(Loop(self.step, *inputs)(*inputs), of.carry)

            def along(directions: Arrays) -> Arrays:
                return jax.jvp(
                    last, (pick([*consts, *init], of.inputs),), (directions,)
                )[1]

            for _ in range(self.ct_axes):
                along = jax.vmap(along)
            return along(directions)

        checkpoints, consts, own_cts = args
        in_slots, in_consts, in_cts = self._divided(nonzero)

        def of_part(slots: Arrays, consts_part: Arrays) -> Arrays:
            return tangents(
                merge(checkpoints.slots, slots, in_slots),
                merge(consts, consts_part, in_consts),
            )

        part = pick(checkpoints.slots, in_slots), pick(consts, in_consts)
        found, pullback = jax.vjp(of_part, *part)
        of_slots, of_consts = pullback(own_cts)
        return [*of_slots, *of_consts, *pick(found, in_cts)]

    def batch(self, axis: Any, args: PyTree, dims: PyTree) -> PyTree:
        if not_mapped(self, axis, dims):
            return self._unmapped(args)
        checkpoints, consts, cts = args
        checkpoints_dims, consts_dims, cts_dims = dims
        slots_dims = checkpoints_dims.slots
        every = (True,) * len(cts)
        only_cts = not any(_are_mapped([*slots_dims, *consts_dims]))
        if only_cts:
            cts = _moved_to(axis, cts, cts_dims, every)
            args = checkpoints, consts, cts
            results = self._again(self.step, self.of, self.ct_axes + 1, *args)
            return results, self._dims(0)
        own, of = self.step, self.of
        # There is a cotangent for each example of what is differentiated, and zeros are
        # made for each of what is not kept.
        in_slots = merge([True] * len(own.kept), _are_mapped(slots_dims), own.kept)
        is_mapped = _either(in_slots, of.carry)
        consts_mapped = _either(_are_mapped(consts_dims), of.consts)
        step, is_mapped = own.mapped(axis, consts_mapped, is_mapped)
        consts = _moved_to(axis, consts, consts_dims, consts_mapped)
        of_kept = pick(is_mapped, own.kept)
        slots = _moved_to(axis, checkpoints.slots, slots_dims, of_kept, 1)
        checkpoints = checkpoints._replace(slots=slots)
        if step.stops_apart and not own.stops_apart:
            consts += checkpoints.first
        others = (False,) * (step.consts - own.consts)
        of = Differentiated((*of.consts, *others), of.carry)
        cts = _moved_to(axis, cts, cts_dims, every, self.ct_axes)
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
