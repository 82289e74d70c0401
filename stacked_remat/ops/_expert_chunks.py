"""Experts by grouped products: chunks of tokens, whose pairs are sorted by expert and computed all at once.

A chunk gathers the rows of its (token, expert) pairs, the first expert's first, applies the expert to all of
them with linear maps that are grouped products, and gathers the results of each token's pairs for its sum.
Choices out of range come last and are of no expert: what is computed for their rows is not defined, and taken
by nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from .._sweep.store import zeros_after
from ._expert_loop import ExpertLoop, Inputs, like_inputs, perturbed_part, sums_of
from ._grouped_linear import GroupedLinear, Groups, Kernels, rows_of_tokens, sum_of_rows
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
    """The loop over chunks of tokens; experts take the rows and the weights of all experts, and `linear`."""

    kernels: Kernels
    experts: str  # the name of their axis

    def call(self, fn: Callable[..., Any], at: Groups, weights: tuple[Array, ...], *rows: Any) -> Any:
        """See `ExpertLoop.call`."""
        with free_axis_mapping():
            return fn(self.rebuild(weights), *rows, linear=GroupedLinear(self.kernels, at, self.experts))

    def _cut(self, plan: Groups, *arrays: Any) -> Any:
        return jax.tree.map(lambda leaf: _cut(leaf, plan.row.shape[0]), arrays)

    def forward(self, inputs: Inputs, plan: Groups) -> tuple[Array, Any]:
        """The sums of all tokens; also what is saved, `[chunk, row, ...]`."""

        def chunk(_: None, part: Any) -> tuple[None, Any]:
            (x, gates), at = part
            own = _rows(x, gates, inputs.weights, at)
            kept = self.keep(own, at)
            return None, (sum_of_rows(self.apply(own, kept, at), at).astype(x.dtype), kept)

        _, (out, kept) = lax.scan(chunk, None, (self._cut(plan, inputs.x, inputs.gates), plan))
        return _joined(out, inputs.x.shape[0]), kept

    def backward(self, perturbed: Inputs, inputs: Inputs, plan: Groups, kept: Any, ct: Array) -> Inputs:
        """The cotangents of what is perturbed, `None` for the rest."""

        def chunk(of_weights: Any, part: Any) -> tuple[Any, Any]:
            (x, gates, ct), kept, at = part
            own = _rows(x, gates, inputs.weights, at)
            new = self.gradients(perturbed, own, kept, at, rows_of_tokens(ct, at))
            of_x = None if new.x is None else sum_of_rows(new.x, at)
            of_gates = jax.tree.map(lambda rows: sum_of_rows(rows, at.of_pairs), new.gates)
            of_weights = jax.tree.map(
                lambda old, some: old + some.astype(jnp.float32), of_weights, new.weights
            )
            return of_weights, (of_x, of_gates)

        start = zeros_after((inputs.x, plan, ct), sums_of(perturbed, inputs).weights)
        parts = self._cut(plan, inputs.x, inputs.gates, ct)
        of_weights, (of_x, of_gates) = lax.scan(chunk, start, (parts, kept, plan))
        tokens, choices = inputs.x.shape[0], plan.row.shape[2]
        of_gates = jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:1], -1, choices), of_gates)
        of_x, of_gates = jax.tree.map(lambda leaf: _joined(leaf, tokens), (of_x, of_gates))
        return like_inputs(Inputs(of_x, of_gates, of_weights), perturbed_part(inputs, perturbed))


def _rows(x: Array, gates: Any, weights: tuple[Array, ...], at: Groups) -> Inputs:
    of_pairs = jax.tree.map(lambda leaf: rows_of_tokens(leaf.reshape(-1), at.of_pairs), gates)
    return Inputs(rows_of_tokens(x, at), of_pairs, weights)


def _cut(x: Array, chunks: int, fill: int = 0) -> Array:
    """`[token, ...]` as `[chunk, token, ...]`, padded where it does not divide."""
    size = -(-x.shape[0] // chunks)
    padding = [(0, chunks * size - x.shape[0]), *[(0, 0)] * (x.ndim - 1)]
    return jnp.pad(x, padding, constant_values=fill).reshape(chunks, size, *x.shape[1:])


def _joined(x: Array, count: int) -> Array:
    return x.reshape(-1, *x.shape[2:])[:count]
