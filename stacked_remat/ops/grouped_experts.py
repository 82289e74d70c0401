"""Applies each expert of a mixture to the tokens that chose it.

The (token, expert) pairs are sorted by expert and cut into blocks of rows of one expert each. There are at
most rows / block + experts blocks, and at most one per row, for any routing, so no token is dropped and
trip counts are static. A block gathers its tokens, applies its expert and adds the result to its tokens.
Memory grows with tokens, not with tokens x experts.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from .._compat import as_residual, of_residual
from .._noted import noted
from .._placement import is_on_host, to_device
from .._scan.arguments import Caller
from .._scan.layer_axis import TreeLayout, split_tree
from .._scan.marks import is_array, is_named, is_split
from .._sweep.store import zeros_after
from ._expert_exchange import Exchange
from .per_device import divided_alike, free_axis_mapping

Rows = Float[Array, "row embed"]
Expert: TypeAlias = Callable[..., Rows]
"""(weights of one expert, rows, gates of the rows) to rows multiplied by their gates.

With `saved` there is a fourth argument, its result.
"""
Saved: TypeAlias = Callable[[Any, Rows], Any]
"""(weights of one expert, rows) to arrays `[row, ...]`."""


def grouped_experts(
    expert: Expert,
    weights: Any,
    Experts: Axis,
    x: Float[Array, "token embed"],
    choices: Int[Array, "token choice"],
    gates: Float[Array, "token choice"],
    *,
    saved: Saved | None = None,
    block_size: int | None = None,
    blocks_at_once: int = 8,
    over: Sequence[str] = (),
) -> Float[Array, "token out"]:
    """The sum over each token's chosen experts, weighted by their gates.

    Equals

    ```python
    rows = [sum(expert(weights[Experts, e], x[t : t + 1], gates[t, c : c + 1])
                for c, e in enumerate(choices[t])) for t in range(len(x))]
    jnp.concatenate(rows)
    ```

    Args:
        expert: applies one expert to some rows and multiplies them by their gates. It may not close over
            traced values. Multiply before the last linear map, `(hidden * gate) @ down`: then the gradient
            of the gates does not need that map's output, and the backward pass does not recompute it.
            Adapters can be part of the weights.
        weights: a tree whose named arrays have the axis `Experts` and whose plain arrays have it first. Of
            those in host memory only the blocks' experts come to the device; they have no gradient.
        Experts: the axis of the experts.
        x: tokens.
        choices: the experts of each token; none twice for one token. An out-of-range number chooses no
            expert.
        gates: their factors.
        saved: the part of `expert` that the backward pass does not recompute: for a gated MLP one of its
            first two maps. Its result for every pair is kept for the backward pass, and `expert` takes it as
            a fourth argument. It helps only if the layer itself is not recomputed. Like `expert`, it
            may not close over traced values.
        block_size: rows in a block. By default a power of two between 8 and 256 for which padding is at most
            an eighth, if there are enough rows.
        blocks_at_once: blocks that one iteration of the loop computes together.
        over: inside `jax.shard_map`, the axes of the mesh over which the experts are divided, in order.
            `weights` then have this device's part of `Experts`, `choices` are numbers of all, and tokens go
            to the devices of their experts and back. Nothing is `saved` then.

    Returns:
        In the dtype of `x`; sums are in float32.

    Raises:
        ValueError: an array of weights lacks the axis, shapes do not match, or choices are not integers; the
            gradient of weights in host memory.

    Cost: with `n` pairs, `expert` on at most `n + experts * block_size` rows (and `blocks_at_once` more
    blocks), once forward, and once and its two products backward; inputs that are not differentiated cost
    neither arithmetic nor memory. In products of a gated MLP with gates before its last map, without padding
    (a sixteenth at 65,536 tokens of 8 among 128 experts):

    | | forward | backward, trained | backward, frozen | total / without recomputation, trained and frozen |
    |---|---|---|---|---|
    | without `saved` | 3 | 8 | 5 | 11 / 9 and 8 / 6 |
    | one of the first two maps saved | 3 | 7 | 4 | 10 / 9 and 7 / 6 |
    | either, in a layer that is recomputed | 3 | 8 | 5 | 11 / 12 and 8 / 9 |

    Memory beside the arguments: the result and the gradients in float32, five integers per pair, a few
    blocks, and what is saved.

    With `over`, each pair's row of `x` is sent to its expert and a result comes back; in the backward pass it
    is sent again with its cotangent, and a cotangent comes back. Padding adds about an eighth to an even
    routing. Memory: up to 0.5 GiB for the rows of a round. Weights stay where they are.
    """
    exchange = None
    if over:
        exchange = Exchange.of(over, choices.size, x.shape[1] * x.dtype.itemsize)
        Experts, saved = Experts.resize(Experts.size // exchange.devices), None
    layout, arrays, shared = _split(weights, Experts)
    _check_tokens(x, choices, gates)
    if block_size is None:
        block_size = _block_size(choices.size if exchange is None else exchange.rows, Experts.size)
    for what, number in (("block_size", block_size), ("blocks_at_once", blocks_at_once)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{what} must be an int, at least 1; got {number!r}.")
    rebuild = functools.partial(layout.layer, shared=shared)
    x, choices, gates, arrays = divided_alike("grouped_experts", (x, choices, gates, arrays))
    call = ExpertsCall(expert, saved, rebuild, Experts.size, block_size, blocks_at_once)
    if exchange is not None:
        return exchange.run(call.run, x, choices, gates, arrays, Experts.size)
    return noted(call, call.run)(x, choices, gates, arrays)


@dataclass(frozen=True, eq=False)
class ExpertsCall:
    """A call of `grouped_experts`, on raw arrays.

    Attributes:
        expert: see `grouped_experts`.
        saved: see there.
        rebuild: makes one expert's tree of weights from a slice of each array.
        experts: how many there are.
        block_size: see there.
        blocks_at_once: see there.
    """

    expert: Expert
    saved: Saved | None
    rebuild: Callable[[Any], Any]
    experts: int
    block_size: int
    blocks_at_once: int

    def run(self, x: Array, choices: Array, gates: Any, arrays: Sequence[Array]) -> Array:
        """The result; `gates` may be a tree of factors, of which the expert gets those of its rows."""
        count = x.shape[0]
        if count == 0:
            x, choices, gates = jax.tree.map(
                lambda some: jnp.zeros((1, *some.shape[1:]), some.dtype), (x, choices, gates)
            )
        plan = _plan(choices, self.experts, self.block_size, self.blocks_at_once)
        loop = _BlockLoop(self.expert, self.saved, self.rebuild)
        out: Any = _apply_experts(loop, cast(Any, _Inputs(x, gates, tuple(arrays))), plan)
        return out[:count]


class _Plan(NamedTuple):
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


def _plan(choices: Int[Array, "token choice"], experts: int, size: int, at_once: int) -> _Plan:
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
    block = jnp.arange(iterations * at_once, dtype=jnp.int32)
    ended = jnp.sum(
        last_block[None, :] <= block[:, None], axis=1, dtype=jnp.int32
    )  # experts before the block
    expert = jnp.minimum(ended, experts - 1)
    within = block - (last_block - -(-counts // size))[expert]
    first_row = (ends - counts)[expert] + within * size
    row = first_row[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
    real = (row < ends[expert][:, None]) & (block < last_block[-1])[:, None]
    pair = order[jnp.minimum(row, flat.size - 1)]
    shape = (iterations, at_once)
    return _Plan(
        expert.reshape(shape),
        pair.reshape(*shape, size),
        (pair // choices.shape[1]).reshape(*shape, size),
        real.reshape(*shape, size),
    )


def _block_size(pairs: int, experts: int) -> int:
    size = 8
    while size < 256 and size * 2 * 8 * experts <= pairs:
        size *= 2
    return size


class _Inputs(NamedTuple):
    """What is differentiated: of all tokens, or of the blocks of one iteration."""

    x: Array
    gates: Any
    weights: tuple[Array, ...]


@dataclass(frozen=True, eq=False)  # hashed by identity: an expert need not be hashable
class _BlockLoop:
    """The loop over blocks, on raw arrays.

    Attributes:
        expert: see `grouped_experts`.
        saved: see there.
        rebuild: makes one expert's tree of weights from a slice of each array.
    """

    expert: Expert
    saved: Saved | None
    rebuild: Callable[[Any], Any]

    def apply(self, inputs: _Inputs, kept: Any) -> Array:
        """Apply the experts of the blocks of one iteration, `[block, ...]` each; `kept` comes from `keep`."""

        def of_block(inputs: _Inputs, kept: Any) -> Array:
            more = () if self.saved is None else (kept,)
            return self.expert(self.rebuild(inputs.weights), inputs.x, inputs.gates, *more)

        with free_axis_mapping():
            return jax.vmap(of_block)(inputs, kept)

    def keep(self, inputs: _Inputs) -> Any:
        """The saved part of the experts, `[block, row, ...]`; None where nothing is saved."""
        if self.saved is None:
            return None
        saved = self.saved
        with free_axis_mapping():
            return jax.vmap(lambda own, rows: saved(self.rebuild(own), rows))(inputs.weights, inputs.x)

    def gather(self, inputs: _Inputs, at: _Plan) -> _Inputs:
        """The inputs of the blocks of one iteration."""
        own = tuple(_experts(array, at.expert) for array in inputs.weights)
        gates = jax.tree.map(lambda leaf: jnp.take(leaf.reshape(-1), at.pair), inputs.gates)
        return _Inputs(jnp.take(inputs.x, at.token, axis=0), gates, own)

    def forward(self, inputs: _Inputs, plan: _Plan) -> tuple[Array, Any]:
        """Add every block's rows to its tokens; also what is saved, `[iteration, block, row, ...]`."""

        def rows_of(at: _Plan) -> tuple[Array, Any]:
            own = self.gather(inputs, at)
            kept = self.keep(own)
            return self.apply(own, kept), kept

        def iteration(out: Array, at: _Plan) -> tuple[Array, Any]:
            rows, kept = rows_of(at)
            rows = jnp.where(at.real[..., None], rows, 0).astype(jnp.float32)
            return out.at[at.token].add(rows), kept

        shape, _ = jax.eval_shape(rows_of, _Plan(*(leaf[0] for leaf in plan)))
        start = zeros_after(
            (inputs.x, plan), jax.ShapeDtypeStruct((inputs.x.shape[0], shape.shape[-1]), jnp.float32)
        )
        out, kept = lax.scan(iteration, start, plan)
        return out.astype(inputs.x.dtype), kept

    def backward(self, perturbed: _Inputs, inputs: _Inputs, plan: _Plan, kept: Any, ct: Array) -> _Inputs:
        """The cotangents of what is perturbed, `None` for the rest."""

        def iteration(gradients: _Inputs, at_and_kept: tuple[_Plan, Any]) -> tuple[_Inputs, None]:
            at, kept = at_and_kept
            of_result = jnp.where(at.real[..., None], jnp.take(ct, at.token, axis=0), 0)
            new = self.iteration_backward(perturbed, self.gather(inputs, at), kept, of_result)
            new = new._replace(gates=jax.tree.map(lambda leaf: jnp.where(at.real, leaf, 0), new.gates))
            pairs = jax.tree.map(lambda _: at.pair, inputs.gates)
            places = _Inputs(at.token, pairs, (at.expert,) * len(inputs.weights))
            return jax.tree.map(_add_at, gradients, eqx.filter(places, perturbed), new), None

        flat = inputs._replace(gates=jax.tree.map(lambda leaf: leaf.reshape(-1), inputs.gates))
        wanted = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), eqx.filter(flat, perturbed)
        )
        start = zeros_after((inputs.x, plan, ct), wanted)
        gradients, _ = lax.scan(iteration, start, (plan, kept))
        return jax.tree.map(
            lambda new, old: new.reshape(old.shape).astype(old.dtype),
            gradients,
            eqx.filter(inputs, perturbed),
        )

    def iteration_backward(self, perturbed: _Inputs, inputs: _Inputs, kept: Any, of_result: Array) -> _Inputs:
        """The cotangents of the perturbed inputs of one iteration, from that of its rows."""
        part, constant = eqx.partition(inputs, perturbed)
        result, pullback = jax.vjp(
            lambda part, kept: self.apply(eqx.combine(part, constant), kept), part, kept
        )
        of_part, of_kept = pullback(of_result.astype(result.dtype))
        if self.saved is not None:
            # The pullback of a linear map does not read its result, so this recomputes nothing.
            _, pullback = jax.vjp(lambda part: self.keep(eqx.combine(part, constant)), part)
            of_part = jax.tree.map(jnp.add, of_part, *pullback(of_kept))
        return of_part


def _experts(array: Array, numbers: Array) -> Array:
    """The entries of an array at these numbers, on the device; from the host no others are moved."""
    if not is_on_host(array):
        return jnp.take(array, numbers, axis=0)
    entries = [lax.dynamic_index_in_dim(array, number, keepdims=False) for number in numbers]
    return jnp.stack([to_device(entry) for entry in entries])


def _add_at(old: Array, index: Array, new: Array) -> Array:
    return old.at[index].add(new.astype(jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply_experts(loop: _BlockLoop, inputs: _Inputs, plan: _Plan) -> Array:
    return loop.forward(inputs, plan)[0]


def _forward_rule(loop: _BlockLoop, inputs: Any, plan: Any) -> tuple[Array, Any]:
    perturbed = jax.tree.map(
        lambda leaf: leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.inexact), inputs
    )
    inputs, plan = jax.tree.map(lambda leaf: leaf.value, (inputs, plan))
    out, kept = loop.forward(inputs, plan)
    return out, (as_residual(tuple(jax.tree.leaves(perturbed))), inputs, plan, kept)


def _backward_rule(loop: _BlockLoop, residuals: Any, cotangent: Any) -> tuple[Any, None]:
    differentiated, inputs, plan, kept = residuals
    perturbed = jax.tree.unflatten(jax.tree.structure(inputs), of_residual(differentiated))
    if isinstance(cotangent, SymbolicZero):
        return None, None
    of_weights = zip(perturbed.weights, inputs.weights, strict=True)
    if any(trained and is_on_host(array) for trained, array in of_weights):
        raise ValueError(
            "grouped_experts has no gradient of weights in host memory. Move them to the device first: "
            "jax.device_put(weights, jax.memory.Space.Device), or freeze them: "
            "jax.lax.stop_gradient(weights)."
        )
    return loop.backward(perturbed, inputs, plan, kept, cotangent), None


_apply_experts.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _check_tokens(x: Any, choices: Any, gates: Any) -> None:
    for what, some in (("x", x), ("choices", choices), ("gates", gates)):
        if is_named(some) or some.ndim != 2 or (some.shape[1] == 0):
            raise ValueError(
                f"{what} must be a plain array with a row for each token; got the shape {some.shape}."
            )
    if choices.shape != gates.shape or choices.shape[0] != x.shape[0]:
        raise ValueError(
            f"choices {choices.shape} and gates {gates.shape} must have the same shape, with a row for "
            f"each of the {x.shape[0]} tokens."
        )
    if not jnp.issubdtype(choices.dtype, jnp.integer):
        raise ValueError(f"choices must be integers; got {choices.dtype}.")


def _split(weights: Any, Experts: Axis) -> tuple[TreeLayout, list[Array], list[Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights, is_leaf=is_named):
        if is_array(leaf) and not is_named(leaf) and leaf.shape[:1] != (Experts.size,):
            raise ValueError(
                f"weights{jax.tree_util.keystr(path)} has the shape {leaf.shape}; the first axis of a plain "
                f"array must be the {Experts.size} experts."
            )
        if (is_named(leaf) or is_array(leaf)) and not is_split(leaf, Experts):
            raise ValueError(
                f"weights{jax.tree_util.keystr(path)} has no axis `{Experts.name}`, which every array of the "
                "weights must have. Broadcast it, or close over it as a Python value."
            )
    return split_tree(weights, Experts, Caller("grouped_experts"))
