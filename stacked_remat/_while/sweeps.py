"""The loops of a `while_loop`: forward, forward with kept carries, and back.

Slots are arrays with one entry for each kept carry, which are written in place. The
entries of slots, and when they are written, are the same for all examples of a batch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._static import PyTree
from .._sweep.gradient import pick
from .._sweep.slots import Arrays
from .._sweep.store import on_all_devices, zeros_of
from .kept_carries import Kept, split, to_drop
from .step import Differentiated, Step


class Checkpoints(NamedTuple):
    """What the forward pass keeps for the reverse pass."""

    # The kept leaves of the carries, stacked over slots. Slot 0 has the first carry.
    slots: Arrays
    kept: Kept
    # How many steps ran
    steps: Array

    @property
    def first(self) -> Arrays:
        return [leaf[0] for leaf in self.slots]


def run(step: Step, consts: Arrays, init: Arrays) -> Arrays:
    """The last carry."""
    return lax.while_loop(_runs, lambda carry: step(consts, carry), init)


def _runs(carry: Arrays) -> Array:
    """Whether any example on any device runs on."""
    return ~on_all_devices(~jnp.any(carry[0]))


class _Forward(NamedTuple):
    """The state of `forward`."""

    carry: Arrays
    checkpoints: Checkpoints


def forward(step: Step, consts: Arrays, init: Arrays) -> tuple[Arrays, Checkpoints]:
    """The last carry, and the carries that a reversal starts from."""
    count = step.max_carries
    slots = []
    for leaf in pick(init, step.kept):
        slots.append(jnp.broadcast_to(leaf, (count, *leaf.shape)))
    at_start = Checkpoints(slots, Kept.at_start(count), jnp.int32(0))

    def keep_and_step(state: _Forward) -> _Forward:
        slots, kept, number = state.checkpoints
        dropped, is_kept = to_drop(kept, number)
        carry = pick(state.carry, step.kept)
        slots = _written(slots, kept.slot[dropped], carry, is_kept)
        kept = _chosen(is_kept, kept.replaced(dropped, number), kept)
        checkpoints = Checkpoints(slots, kept, number + 1)
        return _Forward(step(consts, state.carry), checkpoints)

    def runs(state: _Forward) -> Array:
        return _runs(state.carry)

    last = lax.while_loop(runs, keep_and_step, _Forward(init, at_start))
    return last.carry, last.checkpoints


class _Position(NamedTuple):
    """Where the reverse pass is, between two visits."""

    slots: Arrays
    kept: Kept
    # The entry of the last kept carry that is still needed
    top: Array


class _Backward(NamedTuple):
    """The state of `backward`."""

    # How many steps are still to visit
    left: Array
    position: _Position
    # The cotangents of the differentiated leaves of the carry after these steps
    carry: Arrays
    # Sums of those of the differentiated constants, over the steps that were visited
    consts: Arrays


def backward(
    step: Step,
    of: Differentiated,
    ct_axes: int,
    checkpoints: Checkpoints,
    consts: Arrays,
    cotangents: Arrays,
) -> tuple[Arrays, Arrays]:
    """The cotangents of the differentiated constants and leaves of the first carry,
    from those of the last.

    Args:
        step: of the loop.
        of: what is differentiated.
        ct_axes: how many axes in front the cotangents have that nothing else has.
        checkpoints: those of `forward`.
        consts: those of the loop.
        cotangents: those of the leaves of the carry in `of`.
    """
    pull_back = _with_axes_in_front(step, of, ct_axes)
    sums = []
    for const in pick(consts, of.consts):
        batch = cotangents[0].shape[:ct_axes]
        type_ = jax.typeof(const).to_ct_aval()
        sums.append(zeros_of(type_, batch))

    def visit(state: _Backward) -> _Backward:
        last = state.left - 1
        position, carry = _advanced(step, consts, state.position, last)
        of_consts, of_carry = pull_back(consts, carry, state.carry)
        # The slot of the carry that was visited is free now.
        is_visited = position.kept.steps[position.top] == last
        top = jnp.where(is_visited, position.top - 1, position.top)
        position = position._replace(top=top)
        total = [*map(jnp.add, state.consts, of_consts)]
        return _Backward(last, position, of_carry, total)

    top = jnp.int32(step.max_carries - 1)
    position = _Position(checkpoints.slots, checkpoints.kept, top)
    start = _Backward(checkpoints.steps, position, cotangents, sums)
    end = lax.while_loop(lambda state: state.left > 0, visit, start)
    return end.consts, end.carry


def _with_axes_in_front(step: Step, of: Differentiated, ct_axes: int) -> Any:
    """`step.pull_back(of, consts, carry, cotangents)` with axes of the cotangents."""

    def pull_back(
        consts: Arrays, carry: Arrays, cotangents: Arrays
    ) -> tuple[Arrays, Arrays]:
        return step.pull_back(of, consts, carry, cotangents)

    for _ in range(ct_axes):
        pull_back = jax.vmap(pull_back, in_axes=(None, None, 0))
    return pull_back


class _Advance(NamedTuple):
    """The state of `_advanced`."""

    position: _Position
    # The step whose input `carry` is, of which the leaves are there that are kept
    number: Array
    carry: Arrays
    # At which step the next carry is kept
    next_kept: Array


def _advanced(
    step: Step, consts: Arrays, position: _Position, to: Array
) -> tuple[_Position, Arrays]:
    """The input carry of step `to`, made from the last kept one; others are kept on the
    way.
    """
    slots, kept, top = position
    source = kept.slot[top]
    carry = [lax.dynamic_index_in_dim(leaf, source, keepdims=False) for leaf in slots]
    number = kept.steps[top]
    start = _Advance(position, number, carry, _next_kept(step, number, to, top))

    def advance(state: _Advance) -> _Advance:
        carry = step.advance(consts, state.carry)
        number = state.number + 1
        is_kept = number == state.next_kept
        slots, kept, top = state.position
        top = jnp.where(is_kept, top + 1, top)
        slots = _written(slots, kept.slot[top], carry, is_kept)
        steps = _written(kept.steps, top, number, is_kept)
        next_kept = _next_kept(step, number, to, top)
        return _Advance(
            _Position(slots, kept._replace(steps=steps), top),
            number,
            carry,
            jnp.where(is_kept, next_kept, state.next_kept),
        )

    end = lax.while_loop(lambda state: state.number < to, advance, start)
    return end.position, end.carry


def _next_kept(step: Step, number: Array, to: Array, top: Array) -> Array:
    """At which step the next carry is kept, if the input of step `number` is the one at
    the top and that of `to` is to be made; -1 if none is.
    """
    if step.max_carries == 1:
        return jnp.int32(-1)
    length = to + 1 - number
    free = step.max_carries - top
    # The input of `to` itself is visited at once.
    is_of_use = (free > 1) & (length > 2)
    free = jnp.maximum(free, 2)
    cut = number + split(length, free, step.max_carries)
    return jnp.where(is_of_use, cut, -1)


def _written(slots: PyTree, slot: Array, carry: PyTree, is_kept: Array) -> PyTree:
    """The slots with a carry in one of them, if it is kept."""

    def written(stack: Array, leaf: Array) -> Array:
        # Chosen within the slot, so that nothing else is copied
        before = lax.dynamic_index_in_dim(stack, slot, keepdims=False)
        entry = jnp.where(is_kept, leaf, before)
        return lax.dynamic_update_index_in_dim(stack, entry, slot, axis=0)

    return jax.tree.map(written, slots, carry)


def _chosen(condition: Array, if_true: PyTree, if_false: PyTree) -> PyTree:
    return jax.tree.map(
        lambda new, old: jnp.where(condition, new, old), if_true, if_false
    )
