"""Experts applied to the tokens that chose them, and to no others.

The (token, expert) pairs are sorted by expert and walked in blocks of rows that belong to one expert each: at
most rows / block + experts of them and at most one a row, whatever the routing, so that no token is dropped.
A block gathers its tokens, applies its expert and adds the result back. Memory grows with the tokens, not
with tokens x experts, and every loop has a trip count that is known in advance.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from haliax import Axis
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from .._scan.layer_axis import SplitTree, is_array, is_named, is_split, split_tree
from .per_device import free_axis_mapping

Rows = Float[Array, "row embed"]
Expert: TypeAlias = Callable[..., Rows]
"""(weights of one expert, rows, gates of the rows) to rows that are weighed by their gates.

With `saved` there is a fourth argument, what that gave.
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
) -> Float[Array, "token out"]:
    """The sum over each token's chosen experts, weighed by their gates.

    Equals

    ```python
    rows = [sum(expert(weights[Experts, e], x[t : t + 1], gates[t, c : c + 1])
                for c, e in enumerate(choices[t])) for t in range(len(x))]
    jnp.concatenate(rows)
    ```

    Args:
        expert: applies one expert to some rows and weighs them. It may not close over traced values. Weigh
            before the last linear map, `(hidden * gate) @ down`: then the gates' gradient does not need that
            map's output, and the backward pass leaves its recomputation out. Adapters go with the weights:
            whatever the tree holds for an expert is handed over.
        weights: a tree whose named arrays have the axis `Experts` and whose plain arrays have it first.
        Experts: the axis of the experts.
        x: tokens.
        choices: the experts of each token; none twice for one token. A number that is no expert's chooses
            nothing.
        gates: their factors.
        saved: the part of `expert` that the backward pass is not to compute again: for a gated MLP one of the
            two maps of its rows. Its result for every pair is kept from the forward to the backward pass, and
            `expert` takes it as a fourth argument. It is worth its memory where the layer is not recomputed
            anyway. Like `expert`, it may not close over traced values.
        block_size: rows in a block. By default a power of two between 8 and 256 that lets padding cost at
            most an eighth, where there are rows enough.
        blocks_at_once: blocks that one turn of the loop computes side by side.

    Returns:
        In the dtype of `x`; sums are in float32.

    Raises:
        ValueError: arrays among the weights without the axis, shapes that do not fit, choices that are no
            integers.

    Cost: with `n` pairs, `expert` on at most `n + experts * block_size` rows (and `blocks_at_once` blocks
    more), once forward, and once and its two products backward; what is not differentiated costs neither
    arithmetic nor memory. In products of a gated MLP weighed before its last map, padding (a sixteenth at
    65,536 tokens of 8 among 128 experts) left out:

    | | forward | backward, trained | backward, frozen | in all, by what takes no product twice |
    |---|---|---|---|---|
    | without `saved` | 3 | 8 | 5 | 11 / 9 and 8 / 6 |
    | one of the first two maps saved | 3 | 7 | 4 | 10 / 9 and 7 / 6 |
    | either, in a layer that is recomputed | 3 | 8 | 5 | 11 / 12 and 8 / 9 |

    Memory beside the arguments: the result and the gradients in float32, five integers a pair, a few blocks,
    and what is saved. Inside `jax.shard_map` it takes `check_vma=False`.
    """
    split = _split(weights, Experts)
    _check_tokens(x, choices, gates)
    if block_size is None:
        block_size = _block_size(choices.size, Experts.size)
    for what, number in (("block_size", block_size), ("blocks_at_once", blocks_at_once)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{what} is a whole number of at least 1; got {number!r}.")
    count = x.shape[0]
    if count == 0:
        x, choices, gates = (jnp.zeros((1, *some.shape[1:]), some.dtype) for some in (x, choices, gates))
    plan = _plan(choices, Experts.size, block_size, blocks_at_once)
    return _differentiable(_Walk(expert, saved, split.rebuild))(x, gates, split.arrays, plan)[:count]


class _Plan(NamedTuple):
    """What each block does; the leading axes are turns of the loop, and blocks in a turn.

    Attributes:
        expert: its expert.
        pair: which (token, choice) pair each of its rows is.
        token: the token of that pair.
        real: whether the row is one; the last block of an expert may have fewer.
    """

    expert: Int[Array, "turn block"]
    pair: Int[Array, "turn block row"]
    token: Int[Array, "turn block row"]
    real: Bool[Array, "turn block row"]


def _plan(choices: Int[Array, "token choice"], experts: int, size: int, at_once: int) -> _Plan:
    flat = choices.reshape(-1).astype(jnp.int32)
    # Beyond the last expert they come last, and into nobody's count.
    flat = jnp.where((flat < 0) | (flat >= experts), experts, flat)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.zeros(experts, jnp.int32).at[flat].add(1)
    ends = jnp.cumsum(counts)
    last_block = jnp.cumsum(-(-counts // size))
    # Only the last block of an expert has rows to spare, and every block has a row.
    most = min(flat.size, flat.size // size + experts)
    turns = -(-most // at_once)
    block = jnp.arange(turns * at_once, dtype=jnp.int32)
    ended = jnp.sum(
        last_block[None, :] <= block[:, None], axis=1, dtype=jnp.int32
    )  # experts before the block
    expert = jnp.minimum(ended, experts - 1)
    within = block - (last_block - -(-counts // size))[expert]
    first_row = (ends - counts)[expert] + within * size
    row = first_row[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
    real = (row < ends[expert][:, None]) & (block < last_block[-1])[:, None]
    pair = order[jnp.minimum(row, flat.size - 1)]
    shape = (turns, at_once)
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


@dataclass(frozen=True)
class _Walk:
    """The loop over blocks, on raw arrays.

    Attributes:
        expert: see `grouped_experts`.
        saved: see there.
        rebuild: makes one expert's tree of weights from a slice of each array.
    """

    expert: Expert
    saved: Saved | None
    rebuild: Callable[[Any], Any]

    def apply(self, arrays: list[Array], rows: Array, gates: Array, kept: Any) -> Array:
        """Apply the experts of the blocks of one turn, `[block, ...]` each; `kept` is what `keep` gives."""

        def of_block(own: list[Array], rows: Array, gates: Array, kept: Any) -> Array:
            more = () if self.saved is None else (kept,)
            return self.expert(self.rebuild(own), rows, gates, *more)

        with free_axis_mapping():
            return jax.vmap(of_block)(arrays, rows, gates, kept)

    def keep(self, arrays: list[Array], rows: Array) -> Any:
        """The part of the experts that is saved, `[block, row, ...]`; None where nothing is."""
        if self.saved is None:
            return None
        saved = self.saved
        with free_axis_mapping():
            return jax.vmap(lambda own, rows: saved(self.rebuild(own), rows))(arrays, rows)

    def both(self, arrays: list[Array], rows: Array, gates: Array) -> tuple[Array, Any]:
        """Apply the experts, and what of them is saved."""
        kept = self.keep(arrays, rows)
        return self.apply(arrays, rows, gates, kept), kept

    def inputs(self, x: Array, gates: Array, arrays: list[Array], at: _Plan) -> tuple[Any, Array, Array]:
        """Gather what the blocks of one turn take."""
        own = [jnp.take(array, at.expert, axis=0) for array in arrays]
        return own, jnp.take(x, at.token, axis=0), jnp.take(gates.reshape(-1), at.pair)

    def forward(self, x: Array, gates: Array, arrays: list[Array], plan: _Plan) -> tuple[Array, Any]:
        """Add every block's rows to its tokens; what is saved comes beside it, `[turn, block, row, ...]`."""

        def turn(out: Array, at: _Plan) -> tuple[Array, Any]:
            rows, kept = self.both(*self.inputs(x, gates, arrays, at))
            rows = jnp.where(at.real[..., None], rows, 0).astype(jnp.float32)
            return out.at[at.token].add(rows), kept

        shapes, _ = jax.eval_shape(self.both, *jax.eval_shape(self.inputs, x, gates, arrays, _first(plan)))
        start = jnp.zeros((x.shape[0], shapes.shape[-1]), jnp.float32)
        out, kept = lax.scan(turn, start, plan)
        return out.astype(x.dtype), kept

    def backward(
        self,
        wanted: "_Wanted",
        x: Array,
        gates: Array,
        arrays: list[Array],
        plan: _Plan,
        kept: Any,
        ct: Array,
    ) -> tuple[Array | None, Array | None, list[Array | None]]:
        """The cotangents of what is wanted, `None` for the rest."""

        def turn(gradients: tuple[Any, Any, Any], at_and_kept: tuple[_Plan, Any]) -> tuple[Any, None]:
            at, kept = at_and_kept
            inputs = self.inputs(x, gates, arrays, at)
            of_result = jnp.where(at.real[..., None], jnp.take(ct, at.token, axis=0), 0)
            of_rows, of_factors, of_own = self.turn_backward(wanted, inputs, kept, of_result)
            x_gradient, gate_gradient, array_gradients = gradients
            if of_rows is not None:
                x_gradient = x_gradient.at[at.token].add(of_rows.astype(jnp.float32))
            if of_factors is not None:
                real = jnp.where(at.real, of_factors, 0).astype(jnp.float32)
                gate_gradient = gate_gradient.at[at.pair].add(real)
            array_gradients = [
                None if new is None else old.at[at.expert].add(new.astype(jnp.float32))
                for old, new in zip(array_gradients, of_own, strict=True)
            ]
            return (x_gradient, gate_gradient, array_gradients), None

        start = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, jnp.float32), wanted.pick(x, gates.reshape(-1), arrays)
        )
        (of_x, of_gates, of_arrays), _ = lax.scan(turn, start, (plan, kept))
        return (
            None if of_x is None else of_x.astype(x.dtype),
            None if of_gates is None else of_gates.reshape(gates.shape).astype(gates.dtype),
            [
                None if new is None else new.astype(old.dtype)
                for old, new in zip(arrays, of_arrays, strict=True)
            ],
        )

    def turn_backward(
        self, wanted: "_Wanted", inputs: tuple[list[Array], Array, Array], kept: Any, of_result: Array
    ) -> tuple[Array | None, Array | None, list[Array | None]]:
        """The cotangents of what is wanted of the inputs of one turn, from that of its rows."""
        own, rows, factors = inputs

        def merged(part: tuple[Any, Any, list[Any]]) -> tuple[list[Array], Array, Array]:
            some_rows, some_factors, some = part
            return (
                [a if b is None else b for a, b in zip(own, some, strict=True)],
                rows if some_rows is None else some_rows,
                factors if some_factors is None else some_factors,
            )

        part = wanted.pick(rows, factors, own)
        result, pullback = jax.vjp(lambda part, kept: self.apply(*merged(part), kept), part, kept)
        of_part, of_kept = pullback(of_result.astype(result.dtype))
        if self.saved is not None:
            # A linear map's pullback does not read its result, so that this computes nothing again.
            _, pullback = jax.vjp(lambda part: self.keep(*merged(part)[:2]), part)
            of_part = jax.tree.map(jnp.add, of_part, *pullback(of_kept))
        return of_part


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """What is differentiated: the tokens, the gates, and which arrays of weights."""

    x: bool
    gates: bool
    arrays: tuple[bool, ...]

    def pick(self, x: Any, gates: Any, arrays: list[Any]) -> tuple[Any, Any, list[Any]]:
        """Put `None` for what is not wanted."""
        some = [array if want else None for array, want in zip(arrays, self.arrays, strict=True)]
        return x if self.x else None, gates if self.gates else None, some


def _differentiable(walk: _Walk) -> Callable[[Array, Array, list[Array], _Plan], Array]:
    @jax.custom_vjp
    def run(x: Array, gates: Array, arrays: list[Array], plan: _Plan) -> Array:
        return walk.forward(x, gates, arrays, plan)[0]

    def forward(x: Any, gates: Any, arrays: Any, plan: Any) -> tuple[Array, Any]:
        def differentiated(leaf: Any) -> bool:
            return leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.inexact)

        wanted = _Wanted(differentiated(x), differentiated(gates), tuple(map(differentiated, arrays)))
        plan = _Plan(*(leaf.value for leaf in plan))
        values = (x.value, gates.value, [leaf.value for leaf in arrays])
        out, kept = walk.forward(*values, plan)
        return out, (wanted, *values, plan, kept)

    def backward(residuals: Any, cotangent: Any) -> tuple[Any, Any, Any, None]:
        wanted, x, gates, arrays, plan, kept = residuals
        if isinstance(cotangent, SymbolicZero):
            return None, None, [None] * len(arrays), None
        return *walk.backward(wanted, x, gates, arrays, plan, kept, cotangent), None

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _check_tokens(x: Any, choices: Any, gates: Any) -> None:
    for what, some in (("x", x), ("choices", choices), ("gates", gates)):
        if is_named(some) or some.ndim != 2 or (some.shape[1] == 0):
            raise ValueError(f"{what} is a plain array with a row for each token; got one of {some.shape}.")
    if choices.shape != gates.shape or choices.shape[0] != x.shape[0]:
        raise ValueError(
            f"choices {choices.shape} and gates {gates.shape} must be alike, with a row for each of the "
            f"{x.shape[0]} tokens."
        )
    if not jnp.issubdtype(choices.dtype, jnp.integer):
        raise ValueError(f"choices are integers; these are {choices.dtype}.")


def _split(weights: Any, Experts: Axis) -> SplitTree:
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights, is_leaf=is_named):
        if is_array(leaf) and not is_named(leaf) and leaf.shape[:1] != (Experts.size,):
            raise ValueError(
                f"weights{jax.tree_util.keystr(path)} has the shape {leaf.shape}; the first axis of a plain "
                f"array is that of the {Experts.size} experts."
            )
        if (is_named(leaf) or is_array(leaf)) and not is_split(leaf, Experts):
            raise ValueError(
                f"weights{jax.tree_util.keystr(path)} has no axis `{Experts.name}`: every array among the "
                "weights belongs to one expert. Broadcast it, or close over it as a Python value."
            )
    return split_tree(weights, Experts, what="grouped_experts")


def _first(plan: _Plan) -> _Plan:
    return _Plan(*(leaf[0] for leaf in plan))
