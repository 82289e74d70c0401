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

import jax
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
)
from ._padding import multiple_above, pad_axis
from .softcap import soft_capped

# The score of a key that is not seen: finite, so that differences of two are not NaN
_NEVER = -1e30


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
        # Queries of padding see what the last one does, so their sums are finite.
        padded = jax.tree.map(lambda x: _padded(x, size, repeat_last=True), sight)
        queries = -(-query.shape[1] // size)
        keys = -(-key.shape[1] // size)
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
        if self.blocks.heads_first:
            return jnp.moveaxis(block, 1, -2)
        return block

    def of_scores(self, x: LogSumExp, i: Array) -> Array:
        """Block `i` of numbers of rows, `[batch, kv_heads, group, row]`."""
        block = _block(x, i, self.blocks.size)
        return jnp.moveaxis(block, 1, 3)

    def scores(self, q: Array, k: Array, keys_first: bool = False) -> Array:
        """Scores of a block, in float32: `[batch, kv_heads, group, query, key]`.

        With `keys_first` the keys come before the group: XLA for CPUs need not
        transpose them backward.
        """
        of_query, of_key = self.axes
        of_scores = "bksgq" if keys_first else "bkgqs"
        products = _einsum(f"{of_query},{of_key}->{of_scores}", q, k)
        return soft_capped(products * self.blocks.scale, self.blocks.softcap)

    def masked(
        self, scores: Array, i: Array, j: Array, keys_first: bool = False
    ) -> Array:
        """`scores` where queries of block `i` see keys of block `j`, and `_NEVER`
        elsewhere.
        """
        size = self.blocks.size
        rows, starts, _ = self.sight
        within = jnp.arange(size, dtype=jnp.int32)
        positions = i * size + within
        if rows is not None:
            positions = _block(rows, i, size)
        row = positions[:, None]
        column = (j * size + within)[None, :]
        visible = row >= column
        if self.blocks.window is not None:
            visible &= row - column < self.blocks.window
        visible = visible[None]  # [batch or 1, query, key]
        if starts is not None:
            begin = _block(starts, i, size)[:, :, None]
            visible = visible & (begin <= column[None])
        # To the axes of scores: heads, and heads of a group, see the same.
        if keys_first:
            visible = jnp.swapaxes(visible, 1, 2)[:, None, :, None]
        else:
            visible = visible[:, None, None]
        return jnp.where(visible, scores, _NEVER)

    def seen(self) -> Any:
        """See `Sight.blocks_seen`."""
        size = self.blocks.size
        rows = self.queries * size
        columns = self.keys * size
        return self.sight.blocks_seen(rows, columns, size, self.blocks.window)


def _over(
    ranges: Ranges, i: Array, body: Callable[[Array, Any], Any], state: Any
) -> Any:
    """The state after `body` for the blocks of block `i`."""
    first = ranges.first[i]
    end = ranges.last[i] + 1
    with known_trips(ranges.total, len(ranges.first)):
        return lax.fori_loop(first, end, body, state)


def _forward(
    query: Query, key: Key, value: Value, sight: Sight, blocks: Blocks
) -> tuple[Output, LogSumExp]:
    batch, length, kv_heads, group, _ = query.shape
    cut = _Cut.of(query, key, sight, blocks)
    query, key, value = cut.padded(query, key, value)
    ranges = Ranges.of(cut.seen())
    _, of_value = cut.axes
    shape = (batch, kv_heads, group, cut.blocks.size)

    def query_block(_: None, i: Array) -> tuple[None, tuple[Array, Array]]:
        q = cut.cut(query, i)

        def key_block(
            j: Array, state: tuple[Array, Array, Array]
        ) -> tuple[Array, Array, Array]:
            # Of each query, of the keys so far: the highest score, and the sums of the
            # weights, and of the values times these, relative to that score.
            highest, total, sums = state
            scores = cut.scores(q, cut.cut(key, j))
            scores = cut.masked(scores, i, j)
            new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - new_highest[..., None])
            # What earlier sums are multiplied by to be relative to the new one
            shrink = jnp.exp(highest - new_highest)
            v = cut.cut(value, j)
            new = _einsum(f"bkgqs,{of_value}->bkgqd", weights.astype(v.dtype), v)
            total = total * shrink + jnp.sum(weights, axis=-1)
            sums = sums * shrink[..., None] + new
            return new_highest, total, sums

        highest = jnp.full(shape, _NEVER, jnp.float32)
        total = jnp.zeros(shape, jnp.float32)
        sums = jnp.zeros((*shape, value.shape[-1]), jnp.float32)
        _, start = varying_alike((q, (highest, total, sums)))
        highest, total, sums = _over(ranges, i, key_block, start)
        output = jnp.moveaxis(sums / total[..., None], 3, 1)
        lse = jnp.moveaxis(highest + jnp.log(total), 3, 1)
        return None, (output.astype(query.dtype), lse)

    numbers = jnp.arange(cut.queries, dtype=jnp.int32)
    _, (output, lse) = lax.scan(query_block, None, numbers)
    return _unblock(output)[:, :length], _unblock(lse)[:, :length]


def _backward(
    attended: Attended, cotangent: Output, blocks: Blocks
) -> tuple[Query, Key, Value]:
    """Key block by key block, so that the gradients of keys and values are complete
    after their block; that of the queries is carried.
    """
    query, key, value, _, sight, _, lse = attended
    rows = query.shape[1]
    columns = key.shape[1]
    cut = _Cut.of(query, key, sight, blocks)
    size = cut.blocks.size
    kept, ct = cut.padded(of_normalisation(attended, cotangent), cotangent)
    query, key, value = cut.padded(query, key, value)
    # Infinite, so that the weights of queries of padding are zero
    lse = _padded(lse, size, np.inf)
    ranges = Ranges.of(cut.seen().T)
    row, column = cut.axes

    def key_block(query_gradient: Array, j: Array) -> tuple[Array, tuple[Array, Array]]:
        k = cut.cut(key, j)
        v = cut.cut(value, j)

        def query_block(
            i: Array, state: tuple[Array, Array, Array]
        ) -> tuple[Array, Array, Array]:
            query_gradient, key_gradient, value_gradient = state
            q = cut.cut(query, i)
            c = cut.cut(ct, i)
            scores = cut.scores(q, k, keys_first=True)
            visible = cut.masked(scores, i, j, keys_first=True)
            own_lse = cut.of_scores(lse, i)[:, :, None]
            weights = jnp.exp(visible - own_lse)
            value_gradient += _einsum(
                f"bksgq,{row}->{column}", weights.astype(c.dtype), c
            )
            of_weights = _einsum(f"{row},{column}->bksgq", c, v)
            own_kept = cut.of_scores(kept, i)[:, :, None]
            of_scores = weights * (of_weights - own_kept)
            if blocks.softcap is not None:
                # By scores before the mask, whose numbers have no finite square
                of_scores *= 1 - jnp.square(scores / blocks.softcap)
            of_scores = (of_scores * blocks.scale).astype(q.dtype)
            key_gradient += _einsum(f"bksgq,{row}->{column}", of_scores, q)
            new = _einsum(f"{column},bksgq->bkdgq", k, of_scores)
            new = jnp.transpose(new, (0, 4, 1, 3, 2))
            new += _block(query_gradient, i, size)
            query_gradient = lax.dynamic_update_slice_in_dim(
                query_gradient, new, i * size, axis=1
            )
            return query_gradient, key_gradient, value_gradient

        key_gradient = jnp.zeros(k.shape, jnp.float32)
        value_gradient = jnp.zeros(v.shape, jnp.float32)
        _, zeros = varying_alike((k, (key_gradient, value_gradient)))
        state = _over(ranges, j, query_block, (query_gradient, *zeros))
        query_gradient, key_gradient, value_gradient = state
        if blocks.heads_first:
            key_gradient = jnp.moveaxis(key_gradient, -2, 1)
            value_gradient = jnp.moveaxis(value_gradient, -2, 1)
        of_key = key_gradient.astype(key.dtype)
        of_value = value_gradient.astype(value.dtype)
        return query_gradient, (of_key, of_value)

    zeros = jnp.zeros(query.shape, jnp.float32)
    _, start = varying_alike((query, zeros))
    numbers = jnp.arange(cut.keys, dtype=jnp.int32)
    of_query, of_keys = lax.scan(key_block, start, numbers)
    of_query = of_query[:, :rows].astype(query.dtype)
    of_key, of_value = map(_unblock, of_keys)
    return of_query, of_key[:, :columns], of_value[:, :columns]


BLOCKWISE = Kernel(_forward, _backward)


def _padded(x: Array, size: int, fill: float = 0, **options: Any) -> Array:
    """Positions, the first axis of vectors and the second of others, to a multiple of
    `size`.
    """
    axis = _axis_of_positions(x)
    whole = multiple_above(x.shape[axis], size)
    return pad_axis(x, axis, whole, fill, **options)


def _block(x: Array, i: Array, size: int) -> Array:
    axis = _axis_of_positions(x)
    return lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _axis_of_positions(x: Array) -> int:
    return min(1, x.ndim - 1)


def _unblock(x: Array) -> Array:
    """`[blocks, batch, size, ...]` to `[batch, blocks * size, ...]`."""
    moved = jnp.moveaxis(x, 0, 1)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])


def _einsum(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
