"""Exact attention in blocks of queries and keys, in plain JAX, on any device.

The softmax is accumulated online (Milakov & Gimelshein 2018) and the backward pass recomputes the scores from
the log-sum-exp (Dao et al. 2022, "FlashAttention"), so that no array is of size sequence x sequence. Blocks
that causality, the window or the documents mask out are not computed.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from .._sweep.store import varying_alike
from .._trips import known_trips
from .per_device import divided_alike

Query = Float[Array, "batch row kv_heads group head_dim"]
Key = Float[Array, "batch position kv_heads head_dim"]
LogSumExp = Float[Array, "batch row kv_heads group"]
Documents = Int[Array, "batch position"]
Rows = Int[Array, " row"]
"""The position of each query, ascending. None in its place: queries of all positions, in order."""
Columns = Int[Array, " column"]
"""The position of each key, ascending. None in its place: keys of all positions, in order."""
Sinks = Float[Array, "kv_heads group"]

_NEVER = -1e30  # finite, so that differences of two of them are not NaN


@dataclass(frozen=True)
class Blocks:
    """The static arguments of a call.

    Attributes:
        scale: factor of the scores.
        size: positions in a block of queries, and of keys.
        window: how many positions a query sees, its own included; None for all before it.
        ring: axes of the mesh along which devices pass keys and values on until all queries have seen all
            (Liu et al. 2023, "Ring Attention"); empty where each device has all.
        heads_first: whether heads come before positions within blocks, so that products have the order of
            scores: XLA for CPUs otherwise transposes scores. Others copy blocks for it.
    """

    scale: float
    size: int
    window: int | None = None
    ring: tuple[str, ...] = ()
    heads_first: bool = False

    @property
    def row(self) -> str:
        """The axes of a block of queries."""
        return "bkgqd" if self.heads_first else "bqkgd"

    @property
    def column(self) -> str:
        """The axes of a block of keys."""
        return "bksd" if self.heads_first else "bskd"

    def cut(self, x: Array, i: Any) -> Array:
        """Block `i` of queries or keys, with these axes."""
        block = _block(x, i, self.size)
        return jnp.moveaxis(block, 1, -2) if self.heads_first else block

    def positions_first(self, block: Array) -> Array:
        """A block that `cut` may have made, with the axes of what it was cut from."""
        return jnp.moveaxis(block, -2, 1) if self.heads_first else block


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

    With `blocks.ring`, `key`, `value`, `documents` and `rows` are of this device's positions, as `query` is.

    Names for remat policies: `attention_output`, and `attention_lse`, the log-sum-exp of each row of scores
    in float32. With both saved, the backward pass of a checkpointed layer does not recompute attention.

    Returns:
        Like `query`, in its dtype. Sums are in float32.

    Cost: forward `2 * heads * position**2 * head_dim` FLOPs (half of the square), backward 2.5 times that,
    less where documents or the window skip blocks. Memory: the results, the log-sum-exp, one block of scores,
    and in the backward pass the gradient of `query` in float32. In a ring, also the keys and values that
    come next, the output in float32, and in the backward pass their gradients in float32.
    """
    given = query, key, value, documents, rows, sinks
    query, key, value, documents, rows, sinks = divided_alike("causal_attention", given)
    length = query.shape[1]
    size = min(blocks.size, length)
    # Padding comes last, so causality hides it.
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)) + ((0, 0),) * (x.ndim - 2)) for x in (query, key, value)
    )
    columns = None
    if rows is not None:
        if blocks.ring:
            columns = jnp.pad(rows, (0, -length % size), constant_values=np.iinfo(rows.dtype).max)
        rows = jnp.pad(rows, (0, -length % size), mode="edge")
    if documents is not None:
        documents = jnp.pad(documents, ((0, 0), (0, key.shape[1] - documents.shape[1])), mode="edge")
    blocks = dataclasses.replace(blocks, size=size)
    # Named outside of the custom derivative, whose forward rule `JAX_REMAT3` does not look into.
    at = _Places.of(documents, rows, columns)
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
        columns: those of the keys.
        of_query: the documents of the queries, `[batch, row]`.
        of_key: the documents of the keys.
    """

    rows: Rows | None
    columns: Columns | None
    of_query: Int[Array, "batch row"] | None
    of_key: Documents | None

    @staticmethod
    def of(documents: Documents | None, rows: Rows | None, columns: Columns | None = None) -> "_Places":
        own = documents
        if documents is not None and rows is not None and columns is None:
            own = jnp.take(documents, rows, axis=1)
        return _Places(rows, columns, own, documents)


class _Keys(NamedTuple):
    """What a device of a ring passes on."""

    key: Key
    value: Key
    columns: Columns | None
    documents: Documents | None


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
    if blocks.ring:
        return _forward_in_ring(query, key, value, sinks, at, blocks)
    size, count = blocks.size, query.shape[1] // blocks.size
    see = _SeeKeys.of(query, key, value, at, blocks)
    shape = (query.shape[0], *query.shape[2:4], size)

    def query_block(_: None, i: Array) -> tuple[None, tuple[Array, Array]]:
        # A sink is a score that every query sees, of a value of zero.
        output, lse = see(
            i,
            jnp.full(shape, _NEVER if sinks is None else sinks[:, :, None], jnp.float32),
            jnp.full(shape, 0 if sinks is None else 1, jnp.float32),
            jnp.zeros((*shape, query.shape[-1]), jnp.float32),
        )
        return None, (output.astype(query.dtype), lse)

    _, (output, lse) = lax.scan(query_block, None, jnp.arange(count, dtype=jnp.int32))
    return _unblock(output), _unblock(lse)


def _forward_in_ring(
    query: Query,
    key: Key,
    value: Key,
    sinks: Sinks | None,
    at: _Places,
    blocks: Blocks,
) -> tuple[Query, LogSumExp]:
    """The same of queries that see the keys of one device after the other."""
    size, count = blocks.size, query.shape[1] // blocks.size

    def turn(carry: tuple[_Keys, Array, Array], _: None) -> tuple[tuple[_Keys, Array, Array], None]:
        keys, output, lse = carry
        following = _passed_on(keys, blocks)
        of_turn = at._replace(columns=keys.columns, of_key=keys.documents)
        see = _SeeKeys.of(query, keys.key, keys.value, of_turn, blocks)

        def query_block(i: Array, seen: tuple[Array, Array]) -> tuple[Array, Array]:
            # What was seen before is one score, the log-sum-exp, of one value, the output.
            before, highest = (jnp.moveaxis(_block(x, i, size), 1, 3) for x in seen)
            new = see(i, highest, jnp.ones_like(highest), before)
            return jax.tree.map(lambda x, y: _with_block(x, i, y, size), seen, new)

        output, lse = lax.fori_loop(0, count, query_block, (output, lse))
        return (following, output, lse), None

    highest = jnp.float32(_NEVER) if sinks is None else sinks.astype(jnp.float32)
    start = (
        _Keys(key, value, at.columns, at.of_key),
        jnp.zeros(query.shape, jnp.float32),
        jnp.broadcast_to(highest, query.shape[:-1]),
    )
    (_, output, lse), _ = lax.scan(turn, start, None, length=lax.axis_size(blocks.ring))
    return output.astype(query.dtype), lse


class _Ranges(NamedTuple):
    """Consecutive blocks, for each of some others.

    Attributes:
        first: their first.
        last: their last.
        total: how many they are in all; None if that depends on data.
    """

    first: Int[Array, " block"]
    last: Int[Array, " block"]
    total: int | None

    def loop(self, i: Array, body: Callable[[Array, Any], Any], state: Any) -> Any:
        """`body` for the blocks of block `i`."""
        with known_trips(self.total, len(self.first)):
            return lax.fori_loop(self.first[i], self.last[i] + 1, body, state)


class _SeeKeys(NamedTuple):
    """What a block of queries sees of some keys.

    Attributes:
        query: all queries.
        key: the keys.
        value: their values.
        at: where they are.
        blocks: how they are cut.
        ranges: the blocks of keys for each block of queries.
    """

    query: Query
    key: Key
    value: Key
    at: _Places
    blocks: Blocks
    ranges: _Ranges

    @staticmethod
    def of(query: Query, key: Key, value: Key, at: _Places, blocks: Blocks) -> "_SeeKeys":
        queries, keys = (x.shape[1] // blocks.size for x in (query, key))
        return _SeeKeys(query, key, value, at, blocks, _ranges_of(_overlap(at, queries, keys, blocks)))

    def __call__(self, i: Array, highest: Array, total: Array, sums: Array) -> tuple[Array, Array]:
        """The output and the log-sum-exp of block `i`, `[batch, row, ...]` in float32.

        The arguments after `i` are of what was seen before: the highest score, `[batch, kv_heads, group,
        row]`, the sum of the exponentials of the scores less that, and that of these times the values.
        """
        q, column = self.blocks.cut(self.query, i), self.blocks.column

        def key_block(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            highest, total, sums = state
            scores = _scores(q, self.blocks.cut(self.key, j), self.at, i, j, self.blocks)
            new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - new_highest[..., None])
            shrink = jnp.exp(highest - new_highest)
            v = self.blocks.cut(self.value, j)
            new = _einsum(f"bkgqs,{column}->bkgqd", weights.astype(v.dtype), v)
            return (
                new_highest,
                total * shrink + jnp.sum(weights, axis=-1),
                sums * shrink[..., None] + new,
            )

        _, start = varying_alike((q, (highest, total, sums)))
        highest, total, sums = self.ranges.loop(i, key_block, start)
        return jnp.moveaxis(sums / total[..., None], 3, 1), jnp.moveaxis(highest + jnp.log(total), 3, 1)


def _passed_on(tree: Any, blocks: Blocks) -> Any:
    """What the device before in the ring has."""
    devices = lax.axis_size(blocks.ring)
    to_next = [(device, (device + 1) % devices) for device in range(devices)]
    return jax.tree.map(lambda x: lax.ppermute(x, blocks.ring, to_next), tree)


def _backward(attended: _Attended, cotangent: Query, blocks: Blocks) -> tuple[Query, Key, Key, Sinks | None]:
    query, key, value, sinks, at, output, lse = attended
    # The gradient of the softmax's normalisation, for each row.
    kept = jnp.sum(cotangent.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
    of_keys = functools.partial(_backward_of_keys, query, lse, cotangent, kept, at, blocks)
    _, start = varying_alike((query, jnp.zeros(query.shape, jnp.float32)))
    keys = _Keys(key, value, at.columns, at.of_key)
    if blocks.ring:
        # The gradients of keys go round with them.
        def turn(carry: tuple[_Keys, Array, Array, Array], _: None) -> tuple[Any, None]:
            keys, of_query, *of_keys_before = carry
            of_query, *new = of_keys(keys, of_query)
            moved = _passed_on((keys, *map(jnp.add, of_keys_before, new)), blocks)
            return (moved[0], of_query, *moved[1:]), None

        zeros = [jnp.zeros(x.shape, jnp.float32) for x in (key, value)]
        devices = lax.axis_size(blocks.ring)
        (_, of_query, of_key, of_value), _ = lax.scan(turn, (keys, start, *zeros), None, length=devices)
        of_key, of_value = of_key.astype(key.dtype), of_value.astype(value.dtype)
    else:
        of_query, of_key, of_value = of_keys(keys, start)
    of_sinks = None
    if sinks is not None:
        weights = jnp.exp(sinks.astype(jnp.float32)[None, None] - lse)
        of_sinks = -jnp.sum(weights * kept, axis=(0, 1)).astype(sinks.dtype)
    return of_query.astype(query.dtype), of_key, of_value, of_sinks


def _backward_of_keys(
    query: Query,
    lse: LogSumExp,
    cotangent: Query,
    kept: LogSumExp,
    at: _Places,
    blocks: Blocks,
    keys: _Keys,
    query_gradient: Query,
) -> tuple[Query, Key, Key]:
    """The gradients from the scores of these keys, that of the queries added to what is given.

    Those of keys and values are in float32 in a ring, and else in their dtype.
    """
    key, value = keys.key, keys.value
    at = at._replace(columns=keys.columns, of_key=keys.documents)
    size, count, row, column = blocks.size, key.shape[1] // blocks.size, blocks.row, blocks.column
    ranges = _ranges_of(_overlap(at, query.shape[1] // size, count, blocks).T)

    def key_block(query_gradient: Array, j: Array) -> tuple[Array, tuple[Array, Array]]:
        k, v = blocks.cut(key, j), blocks.cut(value, j)

        def query_block(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            query_gradient, key_gradient, value_gradient = state
            q, ct = blocks.cut(query, i), blocks.cut(cotangent, i)
            scores = _scores(q, k, at, i, j, blocks, keys_first=True)
            weights = jnp.exp(scores - jnp.moveaxis(_block(lse, i, size), 1, 3)[:, :, None])
            value_gradient += _einsum(f"bksgq,{row}->{column}", weights.astype(ct.dtype), ct)
            of_weights = _einsum(f"{row},{column}->bksgq", ct, v)
            of_scores = weights * (of_weights - jnp.moveaxis(_block(kept, i, size), 1, 3)[:, :, None])
            of_scores = (of_scores * blocks.scale).astype(q.dtype)
            key_gradient += _einsum(f"bksgq,{row}->{column}", of_scores, q)
            new = jnp.transpose(_einsum(f"{column},bksgq->bkdgq", k, of_scores), (0, 4, 1, 3, 2))
            old = _block(query_gradient, i, size)
            return _with_block(query_gradient, i, old + new, size), key_gradient, value_gradient

        _, zeros = varying_alike((k, jnp.zeros(k.shape, jnp.float32)))
        query_gradient, *found = ranges.loop(j, query_block, (query_gradient, zeros, zeros))
        found = map(blocks.positions_first, found)
        of_key, of_value = (x if blocks.ring else x.astype(key.dtype) for x in found)
        return query_gradient, (of_key, of_value)

    query_gradient, of_keys = lax.scan(key_block, query_gradient, jnp.arange(count, dtype=jnp.int32))
    of_key, of_value = map(_unblock, of_keys)
    return query_gradient, of_key, of_value


def _scores(
    q: Array, k: Array, at: _Places, i: Array, j: Array, blocks: Blocks, keys_first: bool = False
) -> Array:
    """Scores of a block, in float32, masked.

    They are `[batch, kv_heads, group, query, key]`, or `[batch, kv_heads, key, group, query]`, which XLA for
    CPUs need not transpose for the products of the backward pass.
    """
    axes = "bksgq" if keys_first else "bkgqs"
    scores = _einsum(f"{blocks.row},{blocks.column}->{axes}", q, k) * blocks.scale
    if at.rows is None:
        row = i * blocks.size + jnp.arange(blocks.size, dtype=jnp.int32)[:, None]
    else:
        row = _block(at.rows[None], i, blocks.size)[0][:, None]
    if at.columns is None:
        column = j * blocks.size + jnp.arange(blocks.size, dtype=jnp.int32)[None, :]
    else:
        column = _block(at.columns[None], j, blocks.size)
    visible = row >= column
    if blocks.window is not None:
        visible &= row - column < blocks.window
    visible = visible[None]
    if at.of_query is not None and at.of_key is not None:
        own, other = _block(at.of_query, i, blocks.size), _block(at.of_key, j, blocks.size)
        visible = visible & (own[:, :, None] == other[:, None, :])
    visible = jnp.swapaxes(visible, 1, 2)[:, None, :, None] if keys_first else visible[:, None, None]
    return jnp.where(visible, scores, _NEVER)


def _overlap(at: _Places, queries: int, keys: int, blocks: Blocks) -> Any:
    """Whether any query of a block (row) sees any key of a block (column).

    Without documents and rows it is a NumPy array, so that trip counts are known while tracing.
    """
    rows: Any = np.arange(queries * blocks.size) if at.rows is None else at.rows
    nearest, farthest = rows[:: blocks.size, None], rows[blocks.size - 1 :: blocks.size, None]
    columns: Any = np.arange(keys * blocks.size) if at.columns is None else at.columns
    seen = farthest >= columns[None, :: blocks.size]
    if blocks.window is not None:
        seen &= nearest - columns[None, blocks.size - 1 :: blocks.size] < blocks.window
    if at.of_query is None or at.of_key is None:
        return seen
    own, other = (x.reshape(len(x), -1, blocks.size) for x in (at.of_query, at.of_key))
    # Documents are compared by range, which is exact where they are contiguous and in order.
    meet = (jnp.min(own, -1)[:, :, None] <= jnp.max(other, -1)[:, None, :]) & (
        jnp.min(other, -1)[:, None, :] <= jnp.max(own, -1)[:, :, None]
    )
    return jnp.any(meet, axis=0) & seen


def _ranges_of(seen: Any) -> _Ranges:
    """The blocks (columns) that each block (row) sees; the last is -1 where it sees none."""
    where = np.where if isinstance(seen, np.ndarray) else jnp.where
    last = where(seen.any(axis=1), seen.shape[1] - 1 - seen[:, ::-1].argmax(axis=1), -1)
    first = seen.argmax(axis=1)
    total = int((last + 1 - first).sum()) if isinstance(seen, np.ndarray) else None
    return _Ranges(jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32), total)


def _block(x: Array, i: Array, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, i * size, size, axis=1)


def _with_block(x: Array, i: Array, new: Array, size: int) -> Array:
    return lax.dynamic_update_slice_in_dim(x, new, i * size, axis=1)


def _unblock(x: Array) -> Array:
    """`[blocks, batch, size, ...]` to `[batch, blocks * size, ...]`."""
    moved = jnp.moveaxis(x, 0, 1)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])


def _einsum(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
