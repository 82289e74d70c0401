"""Attention in blocks of queries and keys, in plain JAX, on any device.

The softmax is accumulated online (Milakov & Gimelshein 2018) and the backward pass
recomputes the scores from the log-sum-exp, so that no array is of size sequence x
sequence. Blocks that causality, the window or the documents mask out are not computed.
Memory: the results, one block of scores, and in the backward pass the gradient of the
queries in float32.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._sweep.store import varying_alike
from .._trips import known_trips
from ._attention_rule import (
    Attended,
    Blocks,
    Kernel,
    Key,
    LogSumExp,
    Output,
    Query,
    Ranges,
    Sight,
    Value,
    of_normalisation,
    soft_capped,
)

_NEVER = -1e30  # finite, so that differences of two of them are not NaN


class _Cut(NamedTuple):
    """Queries and keys in blocks, the last padded; causality hides the padding of
    keys.
    """

    blocks: Blocks  # no longer than the queries
    sight: Sight
    queries: int  # number of blocks
    keys: int

    @staticmethod
    def of(query: Query, key: Key, sight: Sight, blocks: Blocks) -> "_Cut":
        size = min(blocks.size, query.shape[1])
        padded = Sight(*(x if x is None else _padded(x, size, "edge") for x in sight))
        queries, keys = (-(-x.shape[1] // size) for x in (query, key))
        return _Cut(dataclasses.replace(blocks, size=size), padded, queries, keys)

    @property
    def axes(self) -> tuple[str, str]:
        """Of a block of queries, and of keys."""
        return ("bkgqd", "bksd") if self.blocks.heads_first else ("bqkgd", "bskd")

    def padded(self, *arrays: Array) -> list[Array]:
        return [_padded(x, self.blocks.size) for x in arrays]

    def cut(self, x: Array, i: Array) -> Array:
        """Block `i` of queries or keys, with these axes."""
        block = _block(x, i, self.blocks.size)
        return jnp.moveaxis(block, 1, -2) if self.blocks.heads_first else block

    def of_scores(self, x: LogSumExp, i: Array) -> Array:
        """Block `i` of numbers of rows, `[batch, kv_heads, group, row]`."""
        return jnp.moveaxis(_block(x, i, self.blocks.size), 1, 3)

    def scores(self, q: Array, k: Array, keys_first: bool = False) -> Array:
        """Scores of a block, in float32: `[batch, kv_heads, group, query, key]`.

        With `keys_first` the keys come before the group: XLA for CPUs need not
        transpose them backward.
        """
        result = "bksgq" if keys_first else "bkgqs"
        scores = _einsum(f"{','.join(self.axes)}->{result}", q, k) * self.blocks.scale
        return soft_capped(scores, self.blocks.softcap)

    def masked(
        self, scores: Array, i: Array, j: Array, keys_first: bool = False
    ) -> Array:
        """`scores` where queries of block `i` see keys of block `j`, and `_NEVER`
        elsewhere.
        """
        size, (rows, starts, _) = self.blocks.size, self.sight
        within = jnp.arange(size, dtype=jnp.int32)
        row = (i * size + within if rows is None else _block(rows, i, size))[:, None]
        column = (j * size + within)[None, :]
        visible = row >= column
        if self.blocks.window is not None:
            visible &= row - column < self.blocks.window
        visible = visible[None]
        if starts is not None:
            visible = visible & (_block(starts, i, size)[:, :, None] <= column[None])
        visible = (
            jnp.swapaxes(visible, 1, 2)[:, None, :, None]
            if keys_first
            else visible[:, None, None]
        )
        return jnp.where(visible, scores, _NEVER)

    def seen(self) -> Any:
        """See `Sight.blocks_seen`."""
        size = self.blocks.size
        return self.sight.blocks_seen(
            self.queries * size, self.keys * size, size, self.blocks.window
        )


def _over(
    ranges: Ranges, i: Array, body: Callable[[Array, Any], Any], state: Any
) -> Any:
    """The state after `body` for the blocks of block `i`."""
    with known_trips(ranges.total, len(ranges.first)):
        return lax.fori_loop(ranges.first[i], ranges.last[i] + 1, body, state)


def _forward(
    query: Query, key: Key, value: Value, sight: Sight, blocks: Blocks
) -> tuple[Output, LogSumExp]:
    length, cut = query.shape[1], _Cut.of(query, key, sight, blocks)
    query, key, value = cut.padded(query, key, value)
    ranges, (_, column) = Ranges.of(cut.seen()), cut.axes
    shape = (query.shape[0], *query.shape[2:4], cut.blocks.size)

    def query_block(_: None, i: Array) -> tuple[None, tuple[Array, Array]]:
        q = cut.cut(query, i)

        def key_block(
            j: Array, state: tuple[Array, Array, Array]
        ) -> tuple[Array, Array, Array]:
            highest, total, sums = state
            scores = cut.masked(cut.scores(q, cut.cut(key, j)), i, j)
            new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - new_highest[..., None])
            shrink = jnp.exp(highest - new_highest)
            v = cut.cut(value, j)
            new = _einsum(f"bkgqs,{column}->bkgqd", weights.astype(v.dtype), v)
            return (
                new_highest,
                total * shrink + jnp.sum(weights, axis=-1),
                sums * shrink[..., None] + new,
            )

        zeros = jnp.zeros(shape, jnp.float32)
        start = (
            jnp.full(shape, _NEVER, jnp.float32),
            zeros,
            jnp.zeros((*shape, value.shape[-1]), jnp.float32),
        )
        _, start = varying_alike((q, start))
        highest, total, sums = _over(ranges, i, key_block, start)
        output = jnp.moveaxis(sums / total[..., None], 3, 1).astype(query.dtype)
        return None, (output, jnp.moveaxis(highest + jnp.log(total), 3, 1))

    _, (output, lse) = lax.scan(
        query_block, None, jnp.arange(cut.queries, dtype=jnp.int32)
    )
    return _unblock(output)[:, :length], _unblock(lse)[:, :length]


def _backward(
    attended: Attended, cotangent: Output, blocks: Blocks
) -> tuple[Query, Key, Value]:
    query, key, value, _, sight, _, lse = attended
    rows, columns, cut = (
        query.shape[1],
        key.shape[1],
        _Cut.of(query, key, sight, blocks),
    )
    kept, ct = cut.padded(of_normalisation(attended, cotangent), cotangent)
    query, key, value = cut.padded(query, key, value)
    lse = _padded(lse, cut.blocks.size, constant_values=np.inf)  # weights are zero
    ranges = Ranges.of(cut.seen().T)
    size, (row, column) = cut.blocks.size, cut.axes

    def key_block(query_gradient: Array, j: Array) -> tuple[Array, tuple[Array, Array]]:
        k, v = cut.cut(key, j), cut.cut(value, j)

        def query_block(
            i: Array, state: tuple[Array, Array, Array]
        ) -> tuple[Array, Array, Array]:
            query_gradient, key_gradient, value_gradient = state
            q, c = cut.cut(query, i), cut.cut(ct, i)
            scores = cut.scores(q, k, keys_first=True)
            visible = cut.masked(scores, i, j, keys_first=True)
            weights = jnp.exp(visible - cut.of_scores(lse, i)[:, :, None])
            value_gradient += _einsum(
                f"bksgq,{row}->{column}", weights.astype(c.dtype), c
            )
            of_weights = _einsum(f"{row},{column}->bksgq", c, v)
            of_scores = weights * (of_weights - cut.of_scores(kept, i)[:, :, None])
            if blocks.softcap is not None:
                of_scores *= 1 - jnp.square(scores / blocks.softcap)
            of_scores = (of_scores * blocks.scale).astype(q.dtype)
            key_gradient += _einsum(f"bksgq,{row}->{column}", of_scores, q)
            new = jnp.transpose(
                _einsum(f"{column},bksgq->bkdgq", k, of_scores), (0, 4, 1, 3, 2)
            )
            new += _block(query_gradient, i, size)
            query_gradient = lax.dynamic_update_slice_in_dim(
                query_gradient, new, i * size, axis=1
            )
            return query_gradient, key_gradient, value_gradient

        _, zeros = varying_alike((k, [jnp.zeros(x.shape, jnp.float32) for x in (k, v)]))
        query_gradient, *found = _over(ranges, j, query_block, (query_gradient, *zeros))
        if blocks.heads_first:
            found = [jnp.moveaxis(block, -2, 1) for block in found]
        of_key, of_value = (x.astype(key.dtype) for x in found)
        return query_gradient, (of_key, of_value)

    _, start = varying_alike((query, jnp.zeros(query.shape, jnp.float32)))
    of_query, of_keys = lax.scan(
        key_block, start, jnp.arange(cut.keys, dtype=jnp.int32)
    )
    of_key, of_value = (_unblock(x)[:, :columns] for x in of_keys)
    return of_query[:, :rows].astype(query.dtype), of_key, of_value


BLOCKWISE = Kernel(_forward, _backward)


def _padded(x: Array, size: int, mode: str = "constant", **options: Any) -> Array:
    """Positions, the first axis of vectors and the second of others, to a multiple of
    `size`.
    """
    axis = min(1, x.ndim - 1)
    widths = [(0, -x.shape[axis] % size if axis == own else 0) for own in range(x.ndim)]
    return jnp.pad(x, widths, mode, **options)


def _block(x: Array, i: Array, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, i * size, size, axis=min(1, x.ndim - 1))


def _unblock(x: Array) -> Array:
    """`[blocks, batch, size, ...]` to `[batch, blocks * size, ...]`."""
    moved = jnp.moveaxis(x, 0, 1)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])


def _einsum(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
