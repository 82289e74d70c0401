"""Experts block by block, on any platform: each block has rows of one expert.

Trip counts are those of the routing that needs most blocks, about rows / block +
experts, so they are static. A block gathers its tokens, applies its expert and adds the
result to its tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis
from jax import lax
from jaxtyping import Array, Bool, Int

from .. import LayerStack
from .._memory_spaces import is_on_host, platform, to_device
from .._static import is_array, is_named, raw_array
from .._sweep.store import zeros_after
from ._expert_loop import ExpertLoop, Inputs, add_at, masked, rows_at, sorted_pairs
from .per_device import free_axis_mapping


class BlockPlan(NamedTuple):
    """The blocks; the leading axes are iterations of the loop, and blocks in an
    iteration.
    """

    expert: Int[Array, "iteration block"]
    pair: Int[Array, "iteration block row"]  # (token, choice)
    # False for padding rows of an expert's last block
    real: Bool[Array, "iteration block row"]


def block_plan(choices: Int[Array, "token choice"], experts: int) -> BlockPlan:
    """The blocks of a routing: those of the first expert, then of the next.

    The pairs of an expert are consecutive in `order`. Block `b` of all has the expert
    before whose last block it is, and begins so many rows after the expert's first row
    as there are rows in the expert's earlier blocks.
    """
    size, at_once = sizes_of_blocks(choices.size, experts)
    _, order, counts = sorted_pairs(choices, experts)
    ends = jnp.cumsum(counts)  # of each expert's rows
    blocks = -(-counts // size)
    last_block = jnp.cumsum(blocks)
    # Each expert's last block may have one row, but every block has one.
    most_by_size = (choices.size + experts * (size - 1)) // size
    most = min(choices.size, most_by_size)
    iterations = -(-most // at_once)
    # As even as can be: a block of padding reads an expert too
    at_once = -(-most // iterations)
    number = jnp.arange(iterations * at_once, dtype=jnp.int32)
    # Padding repeats a row of its expert: zero times what is computed of it is zero
    # where that is finite. Where there are no blocks it is any row, and dropped.
    block = jnp.maximum(jnp.minimum(number, last_block[-1] - 1), 0)
    experts_before = last_block[None, :] <= block[:, None]
    before = jnp.sum(experts_before, axis=1, dtype=jnp.int32)
    expert = jnp.minimum(before, experts - 1)
    first_block = (last_block - blocks)[expert]
    begin = (ends - counts)[expert]
    first_row = begin + (block - first_block) * size
    within = jnp.arange(size, dtype=jnp.int32)[None, :]
    row = first_row[:, None] + within
    end = ends[expert][:, None]
    has_block = (number < last_block[-1])[:, None]
    real = (row < end) & has_block
    # Padding repeats the expert's last row.
    own_row = jnp.minimum(row, end - 1)
    pair = order[jnp.maximum(own_row, 0)]
    shape = (iterations, at_once)
    expert = expert.reshape(shape)
    pair = pair.reshape(*shape, size)
    real = real.reshape(*shape, size)
    return BlockPlan(expert, pair, real)


def sizes_of_blocks(pairs: int, experts: int) -> tuple[int, int]:
    """The rows of a block, and the blocks of an iteration: on a CPU, where batched
    products are slow, one.
    """
    # A CPU skips blocks that are all padding, so that devices that send each other data
    # within an expert must have the same choices.
    on_cpu = platform() == "cpu"
    size = 8
    while size < 256:
        # Padding is half a block of each expert in the mean, so larger blocks need so
        # many of each.
        blocks_of_each = min(4, size // 4) if on_cpu else 8
        if 2 * size * blocks_of_each * experts > pairs:
            break
        size *= 2
    return size, 1 if on_cpu else 8


class InStack(eqx.Module):
    """An array of weights, `[expert, ...]`, that is read where it is, in the stack of
    all layers.
    """

    stack: Array  # `[layer and expert, ...]`
    first: Int[Array, ""]  # of this layer's experts
    experts: int = eqx.field(static=True)

    @staticmethod
    def of(stack: Array, layer: Any) -> "InStack":
        """That of a layer, in a stack `[layer, expert, ...]`."""
        layers, experts, *shape = stack.shape
        # A view: XLA copies nothing to merge the two leading dimensions.
        merged = stack.reshape(layers * experts, *shape)
        return InStack(merged, layer * experts, experts)

    @property
    def own(self) -> Array:
        return lax.dynamic_slice_in_dim(self.stack, self.first, self.experts)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.experts, *self.stack.shape[1:]

    @property
    def dtype(self) -> Any:
        return self.stack.dtype


def of_layer(weights: Any, Experts: Axis) -> tuple[Any, list[InStack | None] | None]:
    """A layer's weights, and for each array of a `LayerStack` where it is in the stack
    of all layers.

    None where the experts are not the next axis, or where the layer has another dtype
    than the stack; for TPUs too, where XLA would pad whole stacks of narrow matrices,
    but for what is on the host.
    """
    if not isinstance(weights, LayerStack):
        return weights, None
    stack = weights
    layer = weights.layer

    def of(leaf: Any, own: Any) -> InStack | None:
        array = raw_array(leaf)
        moved = is_named(leaf) and leaf.axes[1].name != Experts.name
        is_cast = array.dtype != raw_array(own).dtype
        is_padded = platform() == "tpu" and not is_on_host(array)
        if moved or is_cast or is_padded:
            return None
        return InStack.of(array, stack.layer_index)

    leaves = jax.tree.leaves(stack.stack, is_leaf=is_named)
    owns = jax.tree.leaves(layer, is_leaf=is_named)
    places = []
    for leaf, own in zip(leaves, owns, strict=True):
        if is_named(leaf) or is_array(leaf):
            places.append(of(leaf, own))
    return layer, places


class BlockLoop(ExpertLoop):
    """The loop over blocks, of rows `[block, row, ...]` in an iteration; what is saved
    is `[pair, ...]`.
    """

    def call(
        self,
        fn: Callable[..., Any],
        at: BlockPlan,
        weights: tuple[Array, ...],
        *rows: Any,
    ) -> Any:
        def of_block(weights: tuple[Array, ...], *rows: Any) -> Any:
            return fn(self.rebuild(weights), *rows)

        with free_axis_mapping():
            if at.expert.shape[0] > 1:
                return jax.vmap(of_block)(weights, *rows)
            # A single block has no batch axis: XLA for CPUs transposes its weights
            # there.
            given = weights, *rows
            of_one = jax.tree.map(lambda leaf: leaf.squeeze(0), given)
            found = of_block(*of_one)
            return jax.tree.map(lambda leaf: leaf[None], found)

    def forward(self, inputs: Inputs, plan: BlockPlan) -> tuple[Array, Any]:
        pairs = jax.tree.leaves(inputs.gates)[0].size

        def rows_of(at: BlockPlan) -> tuple[Array, Any]:
            own = _inputs_of(inputs, at)
            kept = self.keep(own, at)
            return self.apply(own, kept, at), kept

        def iteration(
            state: tuple[Array, list[Array]], at: BlockPlan
        ) -> tuple[Array, list[Array]]:
            out, kept = state
            rows, new = rows_of(at)
            pair = _dropped(at.pair, at.real)
            written = []
            for old, own in zip(kept, jax.tree.leaves(new), strict=True):
                written.append(old.at[pair].set(own, mode="drop"))
            token = _dropped(inputs.tokens(at.pair), at.real)
            return add_at(out, token, rows), written

        first = BlockPlan(*(leaf[0] for leaf in plan))
        of_rows, of_kept = jax.eval_shape(rows_of, first)
        shape = len(inputs.x), of_rows.shape[-1]
        out = jax.ShapeDtypeStruct(shape, jnp.float32)
        kept = []
        for one in jax.tree.leaves(of_kept):
            # Without the axes of blocks and their rows
            _, _, *own_shape = one.shape
            kept.append(jax.ShapeDtypeStruct((pairs, *own_shape), one.dtype))
        start = zeros_after((inputs.x, plan), (out, kept))
        out, kept = _over_blocks(plan, iteration, start)
        return out.astype(inputs.x.dtype), kept

    def backward(
        self,
        perturbed: Inputs,
        inputs: Inputs,
        ct: Array,
        sums: Inputs,
        plan: BlockPlan,
        kept: Any,
    ) -> Inputs:
        def iteration(sums: Inputs, at: BlockPlan) -> Inputs:
            own = _inputs_of(inputs, at)
            token = inputs.tokens(at.pair)
            structure = jax.tree.structure(jax.eval_shape(self.keep, own, at))
            rows = [rows_at(every, at.pair) for every in kept]
            own_kept = jax.tree.unflatten(structure, rows)
            own_ct = masked(rows_at(ct, token), at.real)
            new = self.gradients(perturbed, own, own_kept, at, own_ct)
            # Where each gradient is added
            token = _dropped(token, at.real)
            pair = _dropped(at.pair, at.real)
            expert = _dropped(at.expert, jnp.any(at.real, axis=1))
            of_gates = jax.tree.map(lambda _: pair, inputs.gates)
            of_weights = (expert,) * len(own.weights)
            places = Inputs(token, of_gates, of_weights)
            return jax.tree.map(add_at, sums, places.part(perturbed), new)

        return _over_blocks(plan, iteration, sums)


def _inputs_of(inputs: Inputs, at: BlockPlan) -> Inputs:
    weights = tuple(_experts(array, at.expert) for array in inputs.weights)
    return inputs.at(at.pair, weights)


def _over_blocks(
    plan: BlockPlan, iteration: Callable[[Any, BlockPlan], Any], state: Any
) -> Any:
    # GPUs copy what a conditional has.
    skips_padding = plan.expert.shape[1] == 1 and platform() == "cpu"

    def step(state: Any, at: BlockPlan) -> tuple[Any, None]:
        if not skips_padding:
            return iteration(state, at), None
        is_used = _any_real(at.real)
        state = lax.cond(is_used, iteration, lambda state, _: state, state, at)
        return state, None

    state, _ = lax.scan(step, state, plan)
    return state


@jax.custom_batching.custom_vmap
def _any_real(real: Array) -> Array:
    return jnp.any(real)


@_any_real.def_vmap
def _in_any_example(_size: int, _batched: Any, real: Array) -> tuple[Array, bool]:
    # With an answer for each example, both branches would run and all state be copied.
    return _any_real(jnp.any(real, axis=0)), False


def _experts(array: Array | InStack, numbers: Array) -> Array:
    """The entries of an array at these numbers, on the device; from the host no others
    are moved.
    """
    if isinstance(array, InStack):
        return _experts(array.stack, array.first + numbers)
    if not is_on_host(array):
        return rows_at(array, numbers)
    entries = []
    for number in numbers:
        entry = lax.dynamic_index_in_dim(array, number, keepdims=False)
        entries.append(to_device(entry))
    return jnp.stack(entries)


def _dropped(index: Array, real: Array) -> Array:
    """The index, beyond every array where it is not real: what is written there is
    dropped.
    """
    return jnp.where(real, index, jnp.iinfo(index.dtype).max)
