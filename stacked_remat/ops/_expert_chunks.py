"""Experts by grouped products: chunks of tokens, whose pairs are sorted by expert and computed all at once.

A chunk gathers the rows of its (token, expert) pairs, the first expert's first, evaluates the expert's
program on them with a grouped product for each of its products with weights, and gathers the results of each
token's pairs for its sum. Choices out of range are of the last expert, and masked.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from .._sweep.store import zeros_after
from ._expert_loop import ExpertLoop, Inputs, masked
from ._grouped_product import Kernels
from ._program_of_row import Groups, RowProgram

_MOST_BYTES = 2**27  # of the rows of a chunk


class ChunkPlan(NamedTuple):
    """Where the pairs of each chunk of tokens are.

    Attributes:
        pair: the (token, choice) pair of each row of the chunk.
        row: the row of each pair.
        expert: the expert of each row, the first one's first.
        sizes: how many rows each expert has.
        real: False for rows of choices that are out of range, and for padding.
    """

    pair: Int[Array, "chunk row"]
    row: Int[Array, "chunk token choice"]
    expert: Int[Array, "chunk row"]
    sizes: Int[Array, "chunk expert"]
    real: Bool[Array, "chunk row"]


def chunks_of(pairs: int, row_bytes: int) -> int:
    """How many chunks there are, for so many pairs with rows of so many bytes."""
    return max(1, -(-pairs * row_bytes // _MOST_BYTES))


def chunk_plan(choices: Int[Array, "token choice"], experts: int, chunks: int, rows_of: int) -> ChunkPlan:
    """The plan for tokens in `chunks` chunks, whose rows come in multiples of `rows_of`."""
    cut = _cut(choices.astype(jnp.int32), chunks, fill=-1)
    flat = cut.reshape(chunks, -1)
    flat = jnp.where((flat < 0) | (flat >= experts), experts, flat)
    order = jnp.argsort(flat, axis=1, stable=True).astype(jnp.int32)
    padding = ((0, 0), (0, -flat.shape[1] % rows_of))
    chosen = jnp.pad(jnp.take_along_axis(flat, order, axis=1), padding, constant_values=experts)
    expert = jnp.minimum(chosen, experts - 1)
    chunk = jnp.arange(chunks, dtype=jnp.int32)[:, None]
    return ChunkPlan(
        jnp.pad(order, padding),
        jnp.argsort(order, axis=1).astype(jnp.int32).reshape(cut.shape),
        expert,
        jnp.zeros((chunks, experts), jnp.int32).at[chunk, expert].add(1),
        chosen < experts,
    )


@dataclass(frozen=True, eq=False)
class ChunkLoop(ExpertLoop):
    """The loop over chunks of tokens, whose rows are `[row, ...]` in an iteration.

    Attributes:
        kernels: what computes grouped products.
    """

    kernels: Kernels

    def apply(self, inputs: Inputs, kept: Any, at: ChunkPlan) -> Array:
        """See `ExpertLoop.apply`."""
        return rows_of_experts(self, inputs, kept, Groups(at.sizes, at.expert))

    def keep(self, inputs: Inputs, at: ChunkPlan) -> Any:
        """See `ExpertLoop.keep`."""
        if self.saved is None:
            return None
        saved = self.saved
        program = RowProgram(self.kernels, Groups(at.sizes, at.expert))
        return program(lambda own, rows: saved(self.rebuild(own), rows), inputs.weights, (inputs.x,))

    def gather(self, inputs: Inputs, at: ChunkPlan) -> Inputs:
        """The rows of a chunk with their gates, and all experts."""
        rows = jnp.take(inputs.x, at.pair // at.row.shape[1], axis=0, mode="clip")
        gates = jax.tree.map(lambda leaf: jnp.take(leaf.reshape(-1), at.pair, mode="clip"), inputs.gates)
        return Inputs(masked(rows, at.real), gates, inputs.weights)

    def of_tokens(self, rows: Array, at: ChunkPlan) -> Array:
        """The sum of the rows of each token of a chunk, in float32."""
        pairs = masked(_of_pairs(rows, at), _of_pairs(at.real, at))
        return jnp.sum(pairs, axis=1, dtype=jnp.float32)

    def forward(self, inputs: Inputs, plan: ChunkPlan) -> tuple[Array, Any]:
        """The sums of all tokens; also what is saved, `[chunk, row, ...]`."""

        def chunk(_: None, part: tuple[Any, ChunkPlan]) -> tuple[None, Any]:
            (x, gates), at = part
            own = self.gather(Inputs(x, gates, inputs.weights), at)
            kept = self.keep(own, at)
            return None, (self.of_tokens(self.apply(own, kept, at), at).astype(x.dtype), kept)

        parts = jax.tree.map(lambda leaf: _cut(leaf, plan.row.shape[0]), (inputs.x, inputs.gates))
        _, (out, kept) = lax.scan(chunk, None, (parts, plan))
        return _joined(out, inputs.x.shape[0]), kept

    def backward(self, perturbed: Inputs, inputs: Inputs, plan: ChunkPlan, kept: Any, ct: Array) -> Inputs:
        """The cotangents of what is perturbed, `None` for the rest."""

        def chunk(of_weights: Any, part: Any) -> tuple[Any, Any]:
            x, gates, ct, kept, at = part
            own = self.gather(Inputs(x, gates, inputs.weights), at)
            of_rows = masked(jnp.take(ct, at.pair // at.row.shape[1], axis=0, mode="clip"), at.real)
            new = self.iteration_backward(perturbed, own, kept, at, of_rows)
            of_weights = jax.tree.map(
                lambda old, some: old + some.astype(jnp.float32), of_weights, new.weights
            )
            real = _of_pairs(at.real, at)
            of_gates = jax.tree.map(lambda leaf: masked(_of_pairs(leaf, at), real), new.gates)
            of_x = None if new.x is None else self.of_tokens(new.x, at).astype(x.dtype)
            return of_weights, (of_x, of_gates)

        wanted = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32),
            eqx.filter(inputs.weights, perturbed.weights),
        )
        start = zeros_after((inputs.x, plan, ct), wanted)
        parts = jax.tree.map(lambda leaf: _cut(leaf, plan.row.shape[0]), (inputs.x, inputs.gates, ct))
        of_weights, of_tokens = lax.scan(chunk, start, (*parts, kept, plan))
        of_x, of_gates = jax.tree.map(lambda leaf: _joined(leaf, inputs.x.shape[0]), of_tokens)
        of_weights = jax.tree.map(
            lambda new, old: new.astype(old.dtype), of_weights, eqx.filter(inputs.weights, perturbed.weights)
        )
        return Inputs(of_x, of_gates, of_weights)


def rows_of_experts(loop: ChunkLoop, inputs: Inputs, kept: Any, groups: Groups) -> Array:
    """The rows that the loop's expert makes of those of `inputs`, sorted by expert."""
    more = () if loop.saved is None else (kept,)

    def expert(own: Any, *rows: Any) -> Array:
        return loop.expert(loop.rebuild(own), *rows)

    return RowProgram(loop.kernels, groups)(expert, inputs.weights, (inputs.x, inputs.gates, *more))


def _of_pairs(rows: Array, at: ChunkPlan) -> Array:
    """What is of each row, `[token, choice, ...]`."""
    return jnp.take(rows, at.row, axis=0, mode="clip")


def _cut(x: Array, chunks: int, fill: int = 0) -> Array:
    """`[token, ...]` as `[chunk, token, ...]`, padded where it does not divide."""
    size = -(-x.shape[0] // chunks)
    padding = [(0, chunks * size - x.shape[0]), *[(0, 0)] * (x.ndim - 1)]
    return jnp.pad(x, padding, constant_values=fill).reshape(chunks, size, *x.shape[1:])


def _joined(x: Array, count: int) -> Array:
    return x.reshape(-1, *x.shape[2:])[:count]
