"""Attention and its derivative by any kernel that gives the log-sum-exp of the scores
beside the output.

The derivative needs these two alone (Dao et al. 2022, "FlashAttention"), so they carry
names for remat policies, and sinks are exact without the kernel's knowing them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from .._names import named
from .per_device import align_varying_axes

Query = Float[Array, "batch row kv_heads group head_dim"]
Key = Float[Array, "batch position kv_heads head_dim"]
Value = Float[Array, "batch position kv_heads value_dim"]
Output = Float[Array, "batch row kv_heads group value_dim"]
LogSumExp = Float[Array, "batch row kv_heads group"]
Documents = Int[Array, "batch position"]
Sinks = Float[Array, "kv_heads group"]


class Sight(NamedTuple):
    """Which keys queries see: from where their document begins to their own
    position.
    """

    # Positions of queries, ascending; None for all, in order
    rows: Int[Array, " row"] | None = None
    # Of queries' documents; None for one document
    starts: Int[Array, "batch row"] | None = None
    # Likewise of keys; None where `starts` is
    of_keys: Int[Array, "batch position"] | None = None

    @staticmethod
    def of(
        documents: Documents | None, rows: Int[Array, " row"] | None = None
    ) -> "Sight":
        """A document is a number that consecutive positions have."""
        if documents is None:
            return Sight(rows)
        position = jnp.arange(documents.shape[1], dtype=jnp.int32)
        is_first = jnp.ones_like(documents[:, :1], bool)
        is_other = documents[:, 1:] != documents[:, :-1]
        begins = jnp.concatenate([is_first, is_other], axis=1)
        # The latest position at or before each that begins a document
        starts = lax.cummax(jnp.where(begins, position[None], 0), axis=1)
        if rows is None:
            return Sight(None, starts, starts)
        return Sight(rows, jnp.take(starts, rows, axis=1), starts)

    def last(self, length: int) -> Any:
        """The last key that each query sees, `[row]`; a NumPy array where it is known
        while tracing.
        """
        return np.arange(length, dtype=np.int32) if self.rows is None else self.rows

    def first(self, length: int, window: int | None) -> Any:
        """The first, `[batch or 1, row]`; likewise, and None where that is the first of
        all.
        """
        if window is None:
            return self.starts
        first = (self.last(length) - (window - 1)).clip(0)[None]
        return first if self.starts is None else jnp.maximum(self.starts, first)

    def blocks_seen(
        self, rows: int, columns: int, size: int, window: int | None
    ) -> Any:
        """Whether any query of a block (row) sees any key of a block (column).

        Without documents and rows it is a NumPy array, so that trip counts are known
        while tracing.
        """
        column = np.arange(0, columns, size, dtype=np.int32)[None]
        # Positions ascend, so the last query of a block sees the last key of all.
        last = self.last(rows)[size - 1 :: size, None]
        seen = last >= column
        first = self.first(rows, window)
        if first is not None:
            # Of any query of the block, in any sequence of the batch
            of_blocks = first.reshape(len(first), -1, size)
            earliest = of_blocks.min((0, 2))[:, None]
            seen = (earliest < column + size) & seen
        return seen


class Ranges(NamedTuple):
    """Consecutive blocks, for each of some others."""

    first: Int[Array, " block"]
    last: Int[Array, " block"]  # -1 where there are none
    total: int | None  # None if it depends on data

    @staticmethod
    def of(seen: Any) -> "Ranges":
        """The blocks (columns) that each block (row) sees."""
        is_known = isinstance(seen, np.ndarray)  # while tracing
        where = np.where if is_known else jnp.where
        first = seen.argmax(axis=1)
        from_the_end = seen[:, ::-1].argmax(axis=1)
        last = seen.shape[1] - 1 - from_the_end
        last = where(seen.any(axis=1), last, -1)
        total = int((last + 1 - first).sum()) if is_known else None
        return Ranges(
            jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32), total
        )


@dataclass(frozen=True)
class Blocks:
    scale: float  # of the scores, before the softcap
    # positions in a block of queries, and of keys, for kernels that do not choose it
    size: int
    # Positions that a query sees, its own included; None for all before it
    window: int | None = None
    # Whether heads come before positions within blocks, so that products have the order
    # of scores: XLA for CPUs otherwise transposes scores. Others copy blocks for it.
    heads_first: bool = False
    # Equal ones of the queries; strip i is in part i of as many of all positions
    strips: int = 1
    # Scores are within plus and minus this, by `soft_capped`; None for any
    softcap: float | None = None


class Attended(NamedTuple):
    """The inputs and results of attention, which its backward pass needs."""

    query: Query
    key: Key
    value: Value
    sinks: Sinks | None
    sight: Sight
    output: Output
    lse: LogSumExp


@dataclass(frozen=True)
class Kernel:
    """An implementation of attention without sinks.

    `forward` gives the output, in the dtype of the query, and the log-sum-exp of each
    row of scores, in float32. `backward` gives the gradients of query, key and value,
    like these, from weights that are the exponentials of scores less `lse`, whatever
    else than scores of these keys that sums up.
    """

    forward: Callable[[Query, Key, Value, Sight, Blocks], tuple[Output, LogSumExp]]
    backward: Callable[[Attended, Output, Blocks], tuple[Query, Key, Value]]


def attend_by(
    kernel: Kernel,
    query: Query,
    key: Key,
    value: Value,
    sight: Sight,
    blocks: Blocks,
    sinks: Sinks | None = None,
) -> Output:
    """Attention by a kernel, in the dtype of `query`; see `causal_attention`."""
    given = query, key, value, sight, sinks
    query, key, value, sight, sinks = align_varying_axes("causal_attention", given)
    # Named outside of the custom derivative, whose forward rule `JAX_REMAT3` does not
    # look into.
    arrays = lax.stop_gradient((query, key, value))
    output, lse = kernel.forward(*arrays, sight, blocks)
    if sinks is not None:
        own = lax.stop_gradient(sinks).astype(jnp.float32)[None, None]
        total = jnp.logaddexp(lse, own)
        # The share of the weights that keys have, the sinks having the rest
        share = jnp.exp(lse - total)[..., None]
        output = (output.astype(jnp.float32) * share).astype(query.dtype)
        lse = total
    # With one axis after that of positions: with several, XLA copied the stack of saved
    # outputs into another layout, 20 GiB at 65,536 tokens of 48 layers.
    output = named(output.reshape(*output.shape[:2], -1), "attention_output").reshape(
        output.shape
    )
    lse = named(lse.reshape(*lse.shape[:2], -1), "attention_lse").reshape(lse.shape)
    return _with_derivative(
        Attended(query, key, value, sinks, sight, output, lse), kernel, blocks
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _with_derivative(attended: Attended, kernel: Kernel, blocks: Blocks) -> Output:
    """`attended.output`, with the derivative of attention."""
    return attended.output


def _forward_rule(
    attended: Attended, kernel: Kernel, blocks: Blocks
) -> tuple[Output, Attended]:
    return attended.output, attended


def _backward_rule(
    kernel: Kernel, blocks: Blocks, attended: Attended, cotangent: Output
) -> tuple[Any]:
    of_inputs = _once_only(kernel, blocks, attended, cotangent)
    return (Attended(*of_inputs, *(None,) * 3),)  # pyright: ignore[reportArgumentType]


_with_derivative.defvjp(_forward_rule, _backward_rule)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _once_only(
    kernel: Kernel, blocks: Blocks, attended: Attended, cotangent: Output
) -> tuple[Query, Key, Value, Sinks | None]:
    """The backward pass. Its derivative is an error: it would treat the output as a
    constant.
    """
    of_sinks = None
    if attended.sinks is not None:
        # What a sink weighs in each row; it has no value, so the rest is less by it.
        sinks = attended.sinks.astype(jnp.float32)[None, None]
        weights = jnp.exp(sinks - attended.lse)
        of_sinks = -jnp.sum(
            weights * of_normalisation(attended, cotangent), axis=(0, 1)
        )
        of_sinks = of_sinks.astype(attended.sinks.dtype)
    return *kernel.backward(attended, cotangent, blocks), of_sinks


@_once_only.defjvp
def _refuse(kernel: Kernel, blocks: Blocks, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "This attention backend has first derivatives only. For derivatives of"
        " gradients (Hessians, Hessian-vector products, gradient penalties) call"
        " causal_attention with backend='exact'."
    )


def of_normalisation(attended: Attended, cotangent: Output) -> LogSumExp:
    """The gradient of the softmax's normalisation, for each row."""
    return jnp.sum(
        cotangent.astype(jnp.float32) * attended.output.astype(jnp.float32), axis=-1
    )


def flatten_heads(x: Array) -> Array:
    """`[batch, row, kv_heads, group, width]` with all heads along one axis."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def attend_in_context(
    attend: Callable[[Query, Key, Value, Sight, int], Output],
    query: Query,
    key: Key,
    value: Value,
    documents: Documents | None,
    context: tuple[str, ...],
) -> Output:
    """Attention of one device's positions to those of all devices along `context`
    (context parallelism).

    Every device gathers all keys and values: with grouped queries they are small, and
    they exist for one layer at a time. Late positions see more keys than early ones, so
    the devices exchange strips of queries first: each gets an equal part of every
    device's positions (Brandon et al. 2023, "Striped Attention").

    The axes `context` of the mesh divide positions. `attend` gets the number of strips
    last.
    """
    length = query.shape[1]
    device = lax.axis_index(context)
    devices = lax.axis_size(context)
    gather = functools.partial(lax.all_gather, axis_name=context, axis=1, tiled=True)
    key, value, documents = jax.tree.map(gather, (key, value, documents))
    strips = strips_among(devices, length)
    if strips == 1:
        rows = device * length + jnp.arange(length, dtype=jnp.int32)
        return attend(query, key, value, Sight.of(documents, rows), 1)
    # Strip j of device i becomes strip i of device j; done twice, nothing has changed.
    exchange = functools.partial(
        lax.all_to_all, axis_name=context, split_axis=1, concat_axis=1, tiled=True
    )
    strip = length // strips
    starts = jnp.arange(devices, dtype=jnp.int32) * length + device * strip
    within = jnp.arange(strip, dtype=jnp.int32)
    rows = (starts[:, None] + within[None, :]).reshape(-1)
    return exchange(
        attend(exchange(query), key, value, Sight.of(documents, rows), strips)
    )


def strips_among(devices: int, positions: int) -> int:
    """In how many strips a device has its positions; one where strips would be
    uneven.
    """
    return 1 if positions % devices else devices
