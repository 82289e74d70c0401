"""Experts by grouped products: chunks of tokens, whose pairs are sorted by expert and computed all at once.

A chunk gathers the rows of its (token, expert) pairs, the first expert's first, applies the expert to all of
them with linear maps that are grouped products, and gathers the results of each token's pairs for its sum.
Choices out of range come last and are of no expert: what is computed for their rows is not defined, and taken
by nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from .._sweep.store import zeros_after
from ._expert_loop import ExpertLoop, Inputs, perturbed_part
from ._grouped_linear import GroupedLinear, Groups, Kernels, rows_of_pairs, rows_of_tokens, sum_of_rows
from .per_device import free_axis_mapping

_CHUNK_BYTES = 2**27  # of its widest rows, which it has several times


def chunks_of(pairs: int, x: Array, weights: Sequence[Array]) -> int:
    """How many chunks there are, by the widest rows: tokens, or what a matrix makes of them."""
    widest = max(x.shape[1], *(size for array in weights if array.ndim > 2 for size in array.shape[1:]), 0)
    return max(1, -(-pairs * widest * x.dtype.itemsize // _CHUNK_BYTES))


def chunk_plan(choices: Int[Array, "token choice"], experts: int, chunks: int, rows_of: int) -> Groups:
    """The plan for tokens in `chunks` chunks, whose rows come in multiples of `rows_of`."""
    cut = _cut(choices.astype(jnp.int32), chunks, fill=-1)
    flat = cut.reshape(chunks, -1)
    flat = jnp.where((flat < 0) | (flat >= experts), experts, flat)
    order = jnp.argsort(flat, axis=1, stable=True).astype(jnp.int32)
    padding = ((0, 0), (0, -flat.shape[1] % rows_of))
    chosen = jnp.pad(jnp.take_along_axis(flat, order, axis=1), padding, constant_values=experts)
    chunk = jnp.arange(chunks, dtype=jnp.int32)[:, None]
    return Groups(
        jnp.pad(order, padding),
        jnp.argsort(order, axis=1).astype(jnp.int32).reshape(cut.shape),
        chosen,
        jnp.zeros((chunks, experts), jnp.int32).at[chunk, chosen].add(1, mode="drop"),
        chosen < experts,
    )


@dataclass(frozen=True, eq=False)
class ChunkLoop(ExpertLoop):
    """The loop over chunks of tokens. Its inputs in an iteration are those of the chunk's tokens.

    Attributes:
        rebuild: makes the tree of all experts' weights from their arrays.
        kernels: what computes grouped products.
        experts: the name of the experts' axis.
    """

    kernels: Kernels
    experts: str

    def apply(self, inputs: Inputs, kept: Any, at: Groups) -> Array:
        """The sums of the chunk's tokens; see `ExpertLoop.apply`."""
        gates = jax.tree.map(lambda leaf: rows_of_pairs(leaf, at), inputs.gates)
        more = () if self.saved is None else (kept,)
        return sum_of_rows(self._of_rows(self.expert, inputs, at, gates, *more), at)

    def keep(self, inputs: Inputs, at: Groups) -> Any:
        """See `ExpertLoop.keep`."""
        return None if self.saved is None else self._of_rows(self.saved, inputs, at)

    def _of_rows(self, fn: Any, inputs: Inputs, at: Groups, *args: Any) -> Any:
        weights, linear = self.rebuild(inputs.weights), GroupedLinear(self.kernels, at, self.experts)
        with free_axis_mapping():
            return fn(weights, rows_of_tokens(inputs.x, at), *args, linear=linear)

    def forward(self, inputs: Inputs, plan: Groups) -> tuple[Array, Any]:
        """The sums of all tokens; also what is saved, `[chunk, row, ...]`."""

        def chunk(_: None, part: tuple[Any, Groups]) -> tuple[None, Any]:
            (x, gates), at = part
            own = Inputs(x, gates, inputs.weights)
            kept = self.keep(own, at)
            return None, (self.apply(own, kept, at).astype(x.dtype), kept)

        parts = jax.tree.map(lambda leaf: _cut(leaf, plan.row.shape[0]), (inputs.x, inputs.gates))
        _, (out, kept) = lax.scan(chunk, None, (parts, plan))
        return _joined(out, inputs.x.shape[0]), kept

    def backward(self, perturbed: Inputs, inputs: Inputs, plan: Groups, kept: Any, ct: Array) -> Inputs:
        """The cotangents of what is perturbed, `None` for the rest."""
        trained = perturbed_part(inputs, perturbed).weights

        def chunk(of_weights: Any, part: Any) -> tuple[Any, Any]:
            x, gates, ct, kept, at = part
            new = self.iteration_backward(perturbed, Inputs(x, gates, inputs.weights), kept, at, ct)
            of_weights = jax.tree.map(
                lambda old, some: old + some.astype(jnp.float32), of_weights, new.weights
            )
            return of_weights, (new.x, new.gates)

        wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), trained)
        start = zeros_after((inputs.x, plan, ct), wanted)
        parts = jax.tree.map(lambda leaf: _cut(leaf, plan.row.shape[0]), (inputs.x, inputs.gates, ct))
        of_weights, of_tokens = lax.scan(chunk, start, (*parts, kept, plan))
        of_x, of_gates = jax.tree.map(lambda leaf: _joined(leaf, inputs.x.shape[0]), of_tokens)
        of_weights = jax.tree.map(lambda new, old: new.astype(old.dtype), of_weights, trained)
        return Inputs(of_x, of_gates, of_weights)


def _cut(x: Array, chunks: int, fill: int = 0) -> Array:
    """`[token, ...]` as `[chunk, token, ...]`, padded where it does not divide."""
    size = -(-x.shape[0] // chunks)
    padding = [(0, chunks * size - x.shape[0]), *[(0, 0)] * (x.ndim - 1)]
    return jnp.pad(x, padding, constant_values=fill).reshape(chunks, size, *x.shape[1:])


def _joined(x: Array, count: int) -> Array:
    return x.reshape(-1, *x.shape[2:])[:count]
