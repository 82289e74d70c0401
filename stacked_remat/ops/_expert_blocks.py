"""Experts block by block, on any platform: each block has rows of one expert.

There are at most rows / block + experts blocks, and at most one per row, for any routing, so trip counts are
static. A block gathers its tokens, applies its expert and adds the result to its tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from .._placement import is_on_host, platform, to_device
from .._sweep.store import empty_stack, zeros_after
from ._expert_loop import ExpertLoop, Inputs, InStack, perturbed_part, trained_sliced
from .per_device import free_axis_mapping


class BlockPlan(NamedTuple):
    """The blocks; the leading axes are iterations of the loop, and blocks in an iteration.

    Attributes:
        expert: the block's expert.
        pair: the (token, choice) pair of each row.
        token: the token of that pair.
        real: False for padding rows of an expert's last block.
    """

    expert: Int[Array, "iteration block"]
    pair: Int[Array, "iteration block row"]
    token: Int[Array, "iteration block row"]
    real: Bool[Array, "iteration block row"]


def block_plan(choices: Int[Array, "token choice"], experts: int, size: int, at_once: int) -> BlockPlan:
    flat = choices.reshape(-1).astype(jnp.int32)
    # Out-of-range choices are sorted last and not counted.
    flat = jnp.where((flat < 0) | (flat >= experts), experts, flat)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.zeros(experts, jnp.int32).at[flat].add(1)
    ends = jnp.cumsum(counts)
    last_block = jnp.cumsum(-(-counts // size))
    # Only the last block of an expert has padding, and every block has at least one row.
    most = min(flat.size, flat.size // size + experts)
    iterations = -(-most // at_once)
    at_once = -(-most // iterations)  # as even as can be: a block of padding reads an expert too
    number = jnp.arange(iterations * at_once, dtype=jnp.int32)
    # Padding repeats a row of its expert: zero times what is computed of it is zero where that is finite.
    block = jnp.maximum(jnp.minimum(number, last_block[-1] - 1), 0)
    ended = jnp.sum(
        last_block[None, :] <= block[:, None], axis=1, dtype=jnp.int32
    )  # experts before the block
    expert = jnp.minimum(ended, experts - 1)
    within = block - (last_block - -(-counts // size))[expert]
    first_row = (ends - counts)[expert] + within * size
    row = first_row[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
    real = (row < ends[expert][:, None]) & (number < last_block[-1])[:, None]
    pair = order[jnp.maximum(jnp.minimum(row, ends[expert][:, None] - 1), 0)]
    shape = (iterations, at_once)
    return BlockPlan(
        expert.reshape(shape),
        pair.reshape(*shape, size),
        (pair // choices.shape[1]).reshape(*shape, size),
        real.reshape(*shape, size),
    )


def default_block_size(pairs: int, experts: int) -> int:
    # A CPU skips blocks that are all padding.
    size, padding = 8, 2 if platform() == "cpu" else 8
    while size < 256 and size * 2 * padding * experts <= pairs:
        size *= 2
    return size


class BlockLoop(ExpertLoop):
    """The loop over blocks, whose rows are `[block, row, ...]` in an iteration."""

    def apply(self, inputs: Inputs, kept: Any, at: BlockPlan) -> Array:
        """See `ExpertLoop.apply`; `[block, row, ...]`."""

        def of_block(inputs: Inputs, kept: Any) -> Array:
            more = () if self.saved is None else (kept,)
            return self.expert(self.rebuild(inputs.weights), inputs.x, inputs.gates, *more)

        with free_axis_mapping():
            return _over_blocks(of_block, inputs, kept)

    def keep(self, inputs: Inputs, at: BlockPlan) -> Any:
        """The saved part of the experts, `[block, row, ...]`; None where nothing is saved."""
        if self.saved is None:
            return None
        saved = self.saved
        with free_axis_mapping():
            return _over_blocks(lambda own, rows: saved(self.rebuild(own), rows), inputs.weights, inputs.x)

    def gather(self, inputs: Inputs, at: BlockPlan) -> Inputs:
        """The inputs of the blocks of one iteration."""
        own = tuple(_experts(array, at.expert) for array in inputs.weights)
        gates = jax.tree.map(lambda leaf: _rows(leaf.reshape(-1), at.pair), inputs.gates)
        return Inputs(_rows(inputs.x, at.token), gates, own)

    def forward(self, inputs: Inputs, plan: BlockPlan) -> tuple[Array, Any]:
        """Add every block's rows to its tokens; also what is saved, `[iteration, block, row, ...]`."""

        def rows_of(at: BlockPlan) -> tuple[Array, Any]:
            own = self.gather(inputs, at)
            kept = self.keep(own, at)
            return self.apply(own, kept, at), kept

        def iteration(out: Array, at_and_kept: tuple[BlockPlan, None]) -> tuple[Array, Any]:
            at, _ = at_and_kept
            rows, kept = rows_of(at)
            rows = jnp.where(at.real[..., None], rows, 0).astype(jnp.float32)
            return out.at[at.token].add(rows), kept

        shape, _ = jax.eval_shape(rows_of, BlockPlan(*(leaf[0] for leaf in plan)))
        start = zeros_after(
            (inputs.x, plan), jax.ShapeDtypeStruct((inputs.x.shape[0], shape.shape[-1]), jnp.float32)
        )
        out, kept = _over_iterations(iteration, start, plan, None)
        return out.astype(inputs.x.dtype), kept

    def backward(self, perturbed: Inputs, inputs: Inputs, plan: BlockPlan, kept: Any, ct: Array) -> Inputs:
        """The cotangents of what is perturbed, `None` for the rest."""

        def iteration(gradients: Inputs, at_and_kept: tuple[BlockPlan, Any]) -> tuple[Inputs, None]:
            at, kept = at_and_kept
            of_result = jnp.where(at.real[..., None], _rows(ct, at.token), 0)
            new = self.iteration_backward(perturbed, self.gather(inputs, at), kept, at, of_result)
            new = new._replace(gates=jax.tree.map(lambda leaf: jnp.where(at.real, leaf, 0), new.gates))
            pairs = jax.tree.map(lambda _: at.pair, inputs.gates)
            places = Inputs(at.token, pairs, (at.expert,) * len(inputs.weights))
            return jax.tree.map(_add_at, gradients, perturbed_part(places, perturbed), new), None

        wanted = perturbed_part(trained_sliced(inputs, perturbed), perturbed)
        flat = wanted._replace(gates=jax.tree.map(lambda leaf: leaf.reshape(-1), wanted.gates))
        sums = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), flat)
        start = zeros_after((inputs.x, plan, ct), sums)
        gradients, _ = _over_iterations(iteration, start, plan, kept)
        return jax.tree.map(lambda new, old: new.reshape(old.shape).astype(old.dtype), gradients, wanted)


def _over_iterations(
    iteration: Callable[..., tuple[Any, Any]], start: Any, plan: BlockPlan, kept: Any
) -> tuple[Any, Any]:
    """`lax.scan` of an iteration over the blocks and what was kept of them.

    On a CPU an iteration whose one block is all padding is skipped, and its result is zeros. GPUs copy the
    state of a conditional.
    """
    if platform() != "cpu" or plan.expert.shape[1] > 1:
        return lax.scan(iteration, start, (plan, kept))

    def unless_padding(state: Any, x: tuple[BlockPlan, Any]) -> tuple[Any, Any]:
        _, result = jax.eval_shape(iteration, state, x)

        def skip(state: Any, _: Any) -> tuple[Any, Any]:
            return state, jax.tree.map(lambda zeros: zeros[0], empty_stack(result, 1))

        return lax.cond(_any_real(x[0].real), iteration, skip, state, x)

    return lax.scan(unless_padding, start, (plan, kept))


@jax.custom_batching.custom_vmap
def _any_real(real: Array) -> Array:
    return jnp.any(real)


@_any_real.def_vmap
def _in_any_example(size: int, batched: Any, real: Array) -> tuple[Array, bool]:
    # With an answer for each example, both branches would run and all state be copied.
    del size, batched
    return _any_real(jnp.any(real, axis=0)), False


def _experts(array: Array | InStack, numbers: Array) -> Array:
    """The entries of an array at these numbers, on the device; from the host no others are moved."""
    if isinstance(array, InStack):
        return _rows(array.stack, array.first + numbers)
    if not is_on_host(array):
        return _rows(array, numbers)
    entries = [lax.dynamic_index_in_dim(array, number, keepdims=False) for number in numbers]
    return jnp.stack([to_device(entry) for entry in entries])


def _over_blocks(fun: Callable[..., Any], *args: Any) -> Any:
    """`jax.vmap(fun)(*args)`. A single block has no batch axis: XLA for CPUs transposes its weights there."""
    if len(jax.tree.leaves(args)[0]) > 1:
        return jax.vmap(fun)(*args)
    return jax.tree.map(lambda leaf: leaf[None], fun(*jax.tree.map(lambda leaf: leaf[0], args)))


def _rows(array: Array, index: Array) -> Array:
    # All are in range. Where they may not be, XLA for CPUs compares and selects for every element.
    return array.at[index].get(mode="promise_in_bounds")


def _add_at(old: Array, index: Array, new: Array) -> Array:
    return old.at[index].add(new.astype(jnp.float32))
