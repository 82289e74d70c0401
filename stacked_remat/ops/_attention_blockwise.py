"""Exact attention in blocks of queries and keys, in plain JAX, on any device.

The softmax is accumulated online (Milakov & Gimelshein 2018) and the backward pass recomputes the scores from
the log-sum-exp (Dao et al. 2022, "FlashAttention"), so that no array is of size sequence x sequence. Blocks
that causality, the window or the documents mask out are not computed.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

Query = Float[Array, "batch row kv_heads group head_dim"]
Key = Float[Array, "batch position kv_heads head_dim"]
LogSumExp = Float[Array, "batch row kv_heads group"]
Documents = Int[Array, "batch position"]
Rows = Int[Array, " row"]
"""The position of each query, ascending. None in its place: queries of all positions, in order."""
Sinks = Float[Array, "kv_heads group"]

_NEVER = -1e30  # finite, so that differences of two of them are not NaN


@dataclass(frozen=True)
class Blocks:
    """The static arguments of a call.

    Attributes:
        scale: factor of the scores.
        size: positions in a block of queries, and of keys.
        window: how many positions a query sees, its own included; None for all before it.
    """

    scale: float
    size: int
    window: int | None = None


def blockwise_attention(
    query: Query,
    key: Key,
    value: Key,
    documents: Documents | None,
    blocks: Blocks,
    sinks: Sinks | None = None,
    rows: Rows | None = None,
) -> Query:
    """Causal grouped-query attention; documents are integers, and positions see only their own document.

    The exponential of a head's sink is added to the sum of the exponentials of its scores.

    Names for remat policies: `attention_output`, and `attention_lse`, the log-sum-exp of each row of scores
    in float32. With both saved, the backward pass of a checkpointed layer does not recompute attention.

    Returns:
        Like `query`, in its dtype. Sums are in float32.

    Cost: forward `2 * heads * position**2 * head_dim` FLOPs (half of the square), backward 2.5 times that,
    less where documents or the window skip blocks. Memory: the results, the log-sum-exp, one block of scores,
    and in the backward pass the gradient of `query` in float32.
    """
    length = query.shape[1]
    size = min(blocks.size, length)
    # Padding comes last, so causality hides it.
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)) + ((0, 0),) * (x.ndim - 2)) for x in (query, key, value)
    )
    if rows is not None:
        rows = jnp.pad(rows, (0, -length % size), mode="edge")
    if documents is not None:
        documents = jnp.pad(documents, ((0, 0), (0, key.shape[1] - documents.shape[1])), mode="edge")
    blocks = Blocks(blocks.scale, size, blocks.window)
    # Named outside of the custom derivative, whose forward rule `JAX_REMAT3` does not look into.
    at = _Places.of(documents, rows)
    output, lse = _forward(*lax.stop_gradient((query, key, value, sinks)), at, blocks)
    # With one axis after that of positions: with several, XLA copied the stack of saved outputs into another
    # layout, 20 GiB at 65,536 tokens of 48 layers.
    output = checkpoint_name(output.reshape(*output.shape[:2], -1), "attention_output").reshape(output.shape)
    lse = checkpoint_name(lse.reshape(*lse.shape[:2], -1), "attention_lse").reshape(lse.shape)
    attended: Any = _with_derivative(_Attended(query, key, value, sinks, at, output, lse), blocks)
    return attended[:, :length]


class _Places(NamedTuple):
    """Where queries and keys are.

    Attributes:
        rows: the positions of the queries; None for all, in order.
        of_query: the documents of the queries, `[batch, row]`.
        of_key: the documents of the keys.
    """

    rows: Rows | None
    of_query: Int[Array, "batch row"] | None
    of_key: Documents | None

    @staticmethod
    def of(documents: Documents | None, rows: Rows | None) -> "_Places":
        own = documents if documents is None or rows is None else jnp.take(documents, rows, axis=1)
        return _Places(rows, own, documents)


class _Attended(NamedTuple):
    """The inputs and results of attention, which its backward pass needs."""

    query: Query
    key: Key
    value: Key
    sinks: Sinks | None
    at: _Places
    output: Query
    lse: LogSumExp


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _with_derivative(attended: _Attended, blocks: Blocks) -> Query:
    """`attended.output`, with the derivative of attention."""
    return attended.output


def _forward_rule(attended: _Attended, blocks: Blocks) -> tuple[Query, _Attended]:
    return attended.output, attended


def _backward_rule(blocks: Blocks, attended: _Attended, cotangent: Query) -> tuple[Any]:
    nothing: Any = None
    query, key, value, sinks = _once_only(blocks, attended, cotangent)
    return (_Attended(query, key, value, sinks, nothing, nothing, nothing),)


_with_derivative.defvjp(_forward_rule, _backward_rule)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _once_only(blocks: Blocks, attended: _Attended, cotangent: Query) -> tuple[Query, Key, Key, Sinks | None]:
    """The backward pass. Its derivative is an error: it would treat the output as a constant."""
    return _backward(attended, cotangent, blocks)


@_once_only.defjvp
def _refuse(blocks: Blocks, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "The blockwise attention backend has first derivatives only. For derivatives of gradients (Hessians, "
        "Hessian-vector products, gradient penalties) call causal_attention with backend='exact'."
    )


def _forward(
    query: Query,
    key: Key,
    value: Key,
    sinks: Sinks | None,
    at: _Places,
    blocks: Blocks,
) -> tuple[Query, LogSumExp]:
    size, count = blocks.size, query.shape[1] // blocks.size
    first, last = _key_blocks(at, count, key.shape[1] // size, blocks)

    def query_block(_: None, i: Array) -> tuple[None, tuple[Array, Array]]:
        q = _block(query, i, size)

        def key_block(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            highest, total, sums = state
            scores = _scores(q, _block(key, j, size), at, i, j, blocks)
            new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - new_highest[..., None])
            shrink = jnp.exp(highest - new_highest)
            v = _block(value, j, size)
            new = _einsum("bkgqs,bskd->bkgqd", weights.astype(v.dtype), v)
            return (
                new_highest,
                total * shrink + jnp.sum(weights, axis=-1),
                sums * shrink[..., None] + new,
            )

        shape = (q.shape[0], *q.shape[2:4], size)
        # A sink is a score that every query sees, of a value of zero.
        start = (
            jnp.full(shape, _NEVER if sinks is None else sinks[:, :, None], jnp.float32),
            jnp.full(shape, 0 if sinks is None else 1, jnp.float32),
            jnp.zeros((*shape, q.shape[-1]), jnp.float32),
        )
        highest, total, sums = lax.fori_loop(first[i], last[i] + 1, key_block, start)
        output = jnp.moveaxis(sums / total[..., None], 3, 1).astype(query.dtype)
        return None, (output, jnp.moveaxis(highest + jnp.log(total), 3, 1))

    _, (output, lse) = lax.scan(query_block, None, jnp.arange(count, dtype=jnp.int32))
    return _unblock(output), _unblock(lse)


def _backward(attended: _Attended, cotangent: Query, blocks: Blocks) -> tuple[Query, Key, Key, Sinks | None]:
    query, key, value, sinks, at, output, lse = attended
    size, count = blocks.size, key.shape[1] // blocks.size
    first, last = _query_blocks(at, query.shape[1] // size, count, blocks)
    # The gradient of the softmax's normalisation, for each row.
    kept = jnp.sum(cotangent.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)

    def key_block(query_gradient: Array, j: Array) -> tuple[Array, tuple[Array, Array]]:
        k, v = _block(key, j, size), _block(value, j, size)

        def query_block(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            query_gradient, key_gradient, value_gradient = state
            q, ct = _block(query, i, size), _block(cotangent, i, size)
            scores = _scores(q, k, at, i, j, blocks)
            weights = jnp.exp(scores - jnp.moveaxis(_block(lse, i, size), 1, 3)[..., None])
            value_gradient += _einsum("bkgqs,bqkgd->bskd", weights.astype(ct.dtype), ct)
            of_weights = _einsum("bqkgd,bskd->bkgqs", ct, v)
            of_scores = weights * (of_weights - jnp.moveaxis(_block(kept, i, size), 1, 3)[..., None])
            of_scores = (of_scores * blocks.scale).astype(q.dtype)
            key_gradient += _einsum("bkgqs,bqkgd->bskd", of_scores, q)
            new = _einsum("bkgqs,bskd->bqkgd", of_scores, k)
            old = _block(query_gradient, i, size)
            query_gradient = lax.dynamic_update_slice_in_dim(query_gradient, old + new, i * size, 1)
            return query_gradient, key_gradient, value_gradient

        zeros = jnp.zeros(k.shape, jnp.float32)
        query_gradient, of_key, of_value = lax.fori_loop(
            first[j], last[j] + 1, query_block, (query_gradient, zeros, zeros)
        )
        return query_gradient, (of_key.astype(key.dtype), of_value.astype(value.dtype))

    start = jnp.zeros(query.shape, jnp.float32)
    query_gradient, (of_key, of_value) = lax.scan(key_block, start, jnp.arange(count, dtype=jnp.int32))
    of_sinks = None
    if sinks is not None:
        weights = jnp.exp(sinks.astype(jnp.float32)[None, None] - lse)
        of_sinks = -jnp.sum(weights * kept, axis=(0, 1)).astype(sinks.dtype)
    return query_gradient.astype(query.dtype), _unblock(of_key), _unblock(of_value), of_sinks


def _scores(q: Array, k: Array, at: _Places, i: Array, j: Array, blocks: Blocks) -> Array:
    """Scores of a block, `[batch, kv_heads, group, query, key]`, in float32, masked."""
    scores = _einsum("bqkgd,bskd->bkgqs", q, k) * blocks.scale
    if at.rows is None:
        row = i * blocks.size + jnp.arange(blocks.size, dtype=jnp.int32)[:, None]
    else:
        row = _block(at.rows[None], i, blocks.size)[0][:, None]
    column = j * blocks.size + jnp.arange(blocks.size, dtype=jnp.int32)[None, :]
    visible = row >= column
    if blocks.window is not None:
        visible &= row - column < blocks.window
    visible = visible[None]
    if at.of_query is not None and at.of_key is not None:
        own, other = _block(at.of_query, i, blocks.size), _block(at.of_key, j, blocks.size)
        visible = visible & (own[:, :, None] == other[:, None, :])
    return jnp.where(visible[:, None, None], scores, _NEVER)


def _overlap(at: _Places, queries: int, keys: int, blocks: Blocks) -> Any:
    """Whether any query of a block (row) sees any key of a block (column).

    Without documents and rows it is a NumPy array, so that trip counts are known while tracing.
    """
    rows: Any = np.arange(queries * blocks.size) if at.rows is None else at.rows
    nearest, farthest = rows[:: blocks.size, None], rows[blocks.size - 1 :: blocks.size, None]
    column = np.arange(keys)[None, :] * blocks.size
    seen = farthest >= column
    if blocks.window is not None:
        seen &= nearest - (column + blocks.size - 1) < blocks.window
    if at.of_query is None or at.of_key is None:
        return seen
    own, other = (x.reshape(len(x), -1, blocks.size) for x in (at.of_query, at.of_key))
    # Documents are compared by range, which is exact where they are contiguous and in order.
    meet = (jnp.min(own, -1)[:, :, None] <= jnp.max(other, -1)[:, None, :]) & (
        jnp.min(other, -1)[:, None, :] <= jnp.max(own, -1)[:, :, None]
    )
    return jnp.any(meet, axis=0) & seen


Range = tuple[Int[Array, " block"], Int[Array, " block"]]


def _key_blocks(at: _Places, queries: int, keys: int, blocks: Blocks) -> Range:
    """The first and the last block of keys that each block of queries sees."""
    return _range(_overlap(at, queries, keys, blocks))


def _query_blocks(at: _Places, queries: int, keys: int, blocks: Blocks) -> Range:
    """The first and the last block of queries that see each block of keys; the last is -1 where none does."""
    return _range(_overlap(at, queries, keys, blocks).T)


def _range(seen: Any) -> Range:
    where = np.where if isinstance(seen, np.ndarray) else jnp.where
    last = where(seen.any(axis=1), seen.shape[1] - 1 - seen[:, ::-1].argmax(axis=1), -1)
    return jnp.asarray(seen.argmax(axis=1), jnp.int32), jnp.asarray(last, jnp.int32)


def _block(x: Array, i: Array, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, i * size, size, axis=1)


def _unblock(x: Array) -> Array:
    """`[blocks, batch, size, ...]` to `[batch, blocks * size, ...]`."""
    moved = jnp.moveaxis(x, 0, 1)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])


def _einsum(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
