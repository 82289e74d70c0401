"""Experts block by block, on any platform: each block has rows of one expert.

Trip counts are those of the routing that needs most blocks, about rows / block + experts, so they are static.
A block gathers its tokens, applies its expert and adds the result to its tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis
from jax import lax
from jaxtyping import Array, Bool, Int

from .._placement import is_on_host, platform, to_device
from .._scan.marks import LayerStack, is_array, is_named, raw_array
from .._sweep.store import zeros_after
from ._expert_loop import ExpertLoop, Inputs, add_at, like_inputs, masked, perturbed_part, sums_of
from .per_device import free_axis_mapping

_LEAST_HALF = 32  # rows; with fewer a CPU's time is not that of the rows


class BlockPlan(NamedTuple):
    """The blocks; the leading axes are iterations of the loop, and blocks in an iteration."""

    expert: Int[Array, "iteration block"]
    pair: Int[Array, "iteration block row"]  # (token, choice)
    token: Int[Array, "iteration block row"]
    real: Bool[Array, "iteration block row"]  # False for padding rows of an expert's last block


def block_plans(choices: Int[Array, "token choice"], experts: int) -> list[BlockPlan]:
    """The blocks; on a CPU also some of half as many rows, an expert's last one if its rows fit."""
    size, at_once = sizes_of_blocks(choices.size, experts)
    flat = choices.reshape(-1).astype(jnp.int32)
    # Out-of-range choices are sorted last and not counted.
    flat = jnp.where((flat < 0) | (flat >= experts), experts, flat)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.zeros(experts, jnp.int32).at[flat].add(1)
    ends = jnp.cumsum(counts)
    half = size // 2 if _skips_padding(at_once) and size >= 2 * _LEAST_HALF else 0
    whole = -(-(counts - half) // size)  # a block of `size` has more rows than half
    most = min(flat.size // (half + 1), (flat.size + experts * (size - half - 1)) // size)
    parts = [(size, most, ends - counts, whole)]
    if half:
        rest = counts - whole * size  # at most half
        parts.append((half, min(flat.size, experts), ends - rest, (rest > 0).astype(jnp.int32)))
    return [_blocks(order, ends, at_once, choices.shape[1], *part) for part in parts if part[1] > 0]


def _blocks(
    order: Array, ends: Array, at_once: int, choices: int, size: int, most: int, firsts: Array, blocks: Array
) -> BlockPlan:
    """At most so many blocks of a size: `blocks` of each expert, of its rows in `order` from `firsts` on."""
    last_block = jnp.cumsum(blocks)
    iterations = -(-most // at_once)
    at_once = -(-most // iterations)  # as even as can be: a block of padding reads an expert too
    number = jnp.arange(iterations * at_once, dtype=jnp.int32)
    # Padding repeats a row of its expert: zero times what is computed of it is zero where that is finite.
    # Where there are no blocks it is any row, and dropped.
    block = jnp.maximum(jnp.minimum(number, last_block[-1] - 1), 0)
    ended = jnp.sum(
        last_block[None, :] <= block[:, None], axis=1, dtype=jnp.int32
    )  # experts before the block
    expert = jnp.minimum(ended, len(ends) - 1)
    first_row = firsts[expert] + (block - (last_block - blocks)[expert]) * size
    row = first_row[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
    real = (row < ends[expert][:, None]) & (number < last_block[-1])[:, None]
    pair = order[jnp.maximum(jnp.minimum(row, ends[expert][:, None] - 1), 0)]
    shape = (iterations, at_once)
    return BlockPlan(
        expert.reshape(shape),
        pair.reshape(*shape, size),
        (pair // choices).reshape(*shape, size),
        real.reshape(*shape, size),
    )


def sizes_of_blocks(pairs: int, experts: int) -> tuple[int, int]:
    """The rows of a block, and the blocks of an iteration: on a CPU, where batched products are slow, one."""
    # A CPU skips blocks that are all padding, so that devices that send each other data within an expert must
    # have the same choices.
    size, padding, at_once = (8, 2, 1) if platform() == "cpu" else (8, 8, 8)
    while size < 256 and size * 2 * padding * experts <= pairs:
        size *= 2
    return size, at_once


class InStack(eqx.Module):
    """An array of weights, `[expert, ...]`, that is read where it is, in the stack of all layers."""

    stack: Array  # `[layer and expert, ...]`
    first: Int[Array, ""]  # of this layer's experts
    experts: int = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.experts, *self.stack.shape[1:]

    @property
    def dtype(self) -> Any:
        return self.stack.dtype


def of_layer(weights: Any, Experts: Axis) -> tuple[Any, list[InStack | None] | None]:
    """A layer's weights, and for each array of a `LayerStack` where it is in the stack of all layers.

    None where the experts are not the next axis, or where the layer has another dtype than the stack; for
    TPUs too, where XLA would pad whole stacks of narrow matrices, but for what is on the host.
    """
    if not isinstance(weights, LayerStack):
        return weights, None
    stack, layer = weights, weights.layer

    def of(leaf: Any, own: Any) -> InStack | None:
        array = raw_array(leaf)
        moved = is_named(leaf) and leaf.axes[1].name != Experts.name
        if moved or array.dtype != raw_array(own).dtype or (platform() == "tpu" and not is_on_host(array)):
            return None
        return InStack(array.reshape(-1, *array.shape[2:]), stack.layer_index * Experts.size, Experts.size)

    leaves, owns = (jax.tree.leaves(tree, is_leaf=is_named) for tree in (stack.stack, layer))
    pairs = [pair for pair in zip(leaves, owns, strict=True) if is_named(pair[0]) or is_array(pair[0])]
    return layer, [of(*pair) for pair in pairs]


class BlockLoop(ExpertLoop):
    """The loop over blocks, of rows `[block, row, ...]` in an iteration; what is saved is `[pair, ...]`."""

    def call(self, fn: Callable[..., Any], at: BlockPlan, weights: tuple[Array, ...], *rows: Any) -> Any:
        def of_block(weights: tuple[Array, ...], *rows: Any) -> Any:
            return fn(self.rebuild(weights), *rows)

        with free_axis_mapping():
            if at.expert.shape[0] > 1:
                return jax.vmap(of_block)(weights, *rows)
            # A single block has no batch axis: XLA for CPUs transposes its weights there.
            found = of_block(*jax.tree.map(lambda leaf: leaf[0], (weights, *rows)))
            return jax.tree.map(lambda leaf: leaf[None], found)

    def forward(self, inputs: Inputs, plan: list[BlockPlan]) -> tuple[Array, Any]:
        pairs = jax.tree.leaves(inputs.gates)[0].size

        def rows_of(at: BlockPlan) -> tuple[Array, Any]:
            own = _gathered(inputs, at)
            kept = self.keep(own, at)
            return self.apply(own, kept, at), kept

        def iteration(state: tuple[Array, list[Array]], at: BlockPlan) -> tuple[Array, list[Array]]:
            out, kept = state
            rows, new = rows_of(at)
            token, pair = (_dropped(index, at.real) for index in (at.token, at.pair))
            written = zip(kept, jax.tree.leaves(new), strict=True)
            return add_at(out, token, rows), [old.at[pair].set(own, mode="drop") for old, own in written]

        of_rows, of_kept = jax.eval_shape(rows_of, BlockPlan(*(leaf[0] for leaf in plan[0])))
        out = jax.ShapeDtypeStruct((len(inputs.x), of_rows.shape[-1]), jnp.float32)
        kept = [jax.ShapeDtypeStruct((pairs, *one.shape[2:]), one.dtype) for one in jax.tree.leaves(of_kept)]
        out, kept = _over_plans(plan, iteration, zeros_after((inputs.x, plan), (out, kept)))
        return out.astype(inputs.x.dtype), kept

    def backward(
        self, perturbed: Inputs, inputs: Inputs, plan: list[BlockPlan], kept: Any, ct: Array
    ) -> Inputs:
        def iteration(gradients: Inputs, at: BlockPlan) -> Inputs:
            own = _gathered(inputs, at)
            # Its axes may have the number of rows, so it has another structure in each plan.
            structure = jax.tree.structure(jax.eval_shape(self.keep, own, at))
            own_kept = jax.tree.unflatten(structure, [_rows(every, at.pair) for every in kept])
            of_rows = masked(_rows(ct, at.token), at.real)
            new = self.gradients(perturbed, own, own_kept, at, of_rows)
            token, pair = (_dropped(index, at.real) for index in (at.token, at.pair))
            expert = _dropped(at.expert, jnp.any(at.real, axis=1))
            places = Inputs(token, jax.tree.map(lambda _: pair, inputs.gates), (expert,) * len(own.weights))
            return jax.tree.map(add_at, gradients, perturbed_part(places, perturbed), new)

        flat = inputs._replace(gates=jax.tree.map(lambda leaf: leaf.reshape(-1), inputs.gates))
        start = zeros_after((inputs.x, plan, ct), sums_of(perturbed, flat))
        return like_inputs(_over_plans(plan, iteration, start), perturbed_part(inputs, perturbed))


def _gathered(inputs: Inputs, at: BlockPlan) -> Inputs:
    """The inputs of the blocks of one iteration."""
    own = tuple(_experts(array, at.expert) for array in inputs.weights)
    gates = jax.tree.map(lambda leaf: _rows(leaf.reshape(-1), at.pair), inputs.gates)
    return Inputs(_rows(inputs.x, at.token), gates, own)


def _skips_padding(at_once: int) -> bool:
    return at_once == 1 and platform() == "cpu"  # GPUs copy what a conditional has


def _over_plans(plans: list[BlockPlan], iteration: Callable[[Any, BlockPlan], Any], state: Any) -> Any:
    """The state after an iteration for the blocks of all plans."""

    def unless_padding(state: Any, at: BlockPlan) -> Any:
        return lax.cond(_any_real(at.real), iteration, lambda state, _: state, state, at)

    for plan in plans:
        run = unless_padding if _skips_padding(plan.expert.shape[1]) else iteration
        state, _ = lax.scan(lambda state, at, run=run: (run(state, at), None), state, plan)
    return state


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
        return _experts(array.stack, array.first + numbers)
    if not is_on_host(array):
        return _rows(array, numbers)
    entries = [lax.dynamic_index_in_dim(array, number, keepdims=False) for number in numbers]
    return jnp.stack([to_device(entry) for entry in entries])


def _rows(array: Array, index: Array) -> Array:
    # All are in range. Where they may not be, XLA for CPUs compares and selects for every element.
    return array.at[index].get(mode="promise_in_bounds")


def _dropped(index: Array, real: Array) -> Array:
    """The index, beyond every array where it is not real: what is written there is dropped."""
    return jnp.where(real, index, jnp.iinfo(index.dtype).max)
