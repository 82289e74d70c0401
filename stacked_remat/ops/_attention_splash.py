"""Attention with JAX's splash kernels for TPUs
(`jax.experimental.pallas.ops.tpu.splash_attention`).

They compute in blocks (Dao et al. 2022), of which tables say the visible ones. This
file has the choice of block sizes, the tables, and the order of axes that the kernels
need.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
    splash_attention_mask_info as splash_masks,
)
from jaxtyping import Array, Bool, Int

from .._trips import known_products
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
)

LANES = 128  # the width of a TPU's vector registers; block sizes are multiples of it

# its scores and sums fit the vector memory of a v5e, v5p and v6e for heads up to 512
# wide
_BLOCK = 512
# A larger block fits if a position of a head has at most so many bytes
_LARGE_BLOCK = 1024
_LARGE_ROW = 512
# Entries of a table of blocks, at three bytes, in a scalar memory of one MiB
_TABLE = 512 * 512


@dataclass(frozen=True)
class _Visible:
    """Whether a row sees a column, in the kernel; a function would be traced again in
    every call.
    """

    window: int | None

    def __call__(
        self, row: Int[Array, "*block"], column: Int[Array, "*block"]
    ) -> Bool[Array, "*block"]:
        visible = row >= column
        return (
            visible if self.window is None else visible & (row - column < self.window)
        )


def splash_block_size(
    strip: int, rows: int, columns: int, window: int | None, row_bytes: int
) -> int | str:
    """Positions in a block of queries and of keys, or why no size is possible.

    Queries are `rows`, in strips of consecutive positions; keys are `columns`.
    `row_bytes` are those of one position of one head.
    """
    if strip % LANES:
        return f"it takes a multiple of {LANES} consecutive positions, not {strip}"
    large = _LARGE_BLOCK if row_bytes <= _LARGE_ROW else _BLOCK
    for most in (_BLOCK, large):
        size = max(
            size
            for size in range(LANES, min(strip, most) + 1, LANES)
            if strip % size == 0
        )
        count = columns // size
        width = most_seen(rows // size, size, window)
        if count * width <= _TABLE:
            return size
    return (
        f"its table of {count} x {width} blocks of {size} positions does not fit a"
        f" TPU's scalar memory, which holds {_TABLE}"
    )


def most_seen(blocks: int, size: int, window: int | None) -> int:
    """Of so many blocks of queries, how many see a block of keys at most; and the other
    way round.
    """
    if window is None:
        return blocks
    # Its own block, and those of the positions before its first one
    return min(blocks, -(-(window - 1) // size) + 1)


def splash_kernel(interpret: bool = False) -> Kernel:
    """The kernels, or for tests their interpretation on the CPU, in blocks of
    `Blocks.size`.

    Matrix products of float32 have JAX's default precision, which on a TPU is that of
    bfloat16 unless `jax.default_matmul_precision` says otherwise.

    Cost: `heads * position**2 * (head_dim + value_dim)` FLOPs forward and 3.5 times
    that backward, which computes scores twice, for values as wide as keys; less for a
    window and documents. Memory: the
    results, a copy of each array with heads first, and while a forward kernel runs, 128
    copies of one key head's log-sum-exp.
    """
    rules: Any = [
        functools.partial(rule, interpret=interpret) for rule in (_forward, _backward)
    ]
    return Kernel(*rules)


def _of_heads(
    fn: Callable[..., tuple[Array, ...]],
    sight: Sight,
    blocks: Blocks,
    interpret: bool,
    query: Query,
    *others: Array,
) -> list[Array]:
    """`fn` of the kernel, the FLOPs of a coordinate, the documents and each key head,
    for each sequence.

    Arrays are `[batch, position, kv_heads, ...]`. lax.map over heads takes less memory
    than jax.vmap.
    """

    def of_sequence(sequence: tuple[Any, tuple[Array, ...]]) -> tuple[Array, ...]:
        (starts, of_keys), heads = sequence
        own = sight._replace(starts=None if starts is None else starts[None])
        key, value, *_ = others
        kernel, flops = _kernel_for(query, key, value, own, blocks, interpret)
        segments = None if starts is None else splash.SegmentIds(starts, of_keys)
        return lax.map(lambda head: fn(kernel, flops, segments, *head), heads)

    heads_first = tuple(jnp.moveaxis(x, 2, 1) for x in (query, *others))
    return [
        jnp.moveaxis(x, 1, 2)
        for x in lax.map(of_sequence, ((sight.starts, sight.of_keys), heads_first))
    ]


def _forward(
    query: Query, key: Key, value: Value, sight: Sight, blocks: Blocks, interpret: bool
) -> tuple[Output, LogSumExp]:
    def attend(
        kernel: Any,
        flops: int,
        segments: Any,
        query: Array,
        key: Array,
        value: Array,
    ) -> Any:
        # The kernels take no scale, so queries are scaled, and rounded once more.
        queries = jnp.moveaxis(query * blocks.scale, 1, 0)
        width = key.shape[-1] + value.shape[-1]
        with known_products(flops * width):
            output, (lse,) = kernel(queries, key, value, segments)
        return jnp.moveaxis(output, 0, 1), lse.T

    output, lse = _of_heads(attend, sight, blocks, interpret, query, key, value)
    return output, lse


def _backward(
    attended: Attended, cotangent: Output, blocks: Blocks, interpret: bool
) -> tuple[Query, Key, Value]:
    def gradients(kernel: Any, flops: int, segments: Any, *head: Array) -> Any:
        query, key, value, output, cotangent, lse = head
        queries, output, cotangent = (
            jnp.moveaxis(x, 1, 0) for x in (query * blocks.scale, output, cotangent)
        )
        residuals = queries, key, value, segments, None, output, lse.T
        # Each of two kernels computes the scores again, the gradient of weights, and
        # that of queries, or of keys and values. Half of it all is noted for each.
        widths = 4 * key.shape[-1] + 3 * value.shape[-1]
        with known_products(flops * widths // 2):
            of_query, of_key, of_value = splash_gradients(kernel, residuals, cotangent)
        return jnp.moveaxis(of_query, 0, 1) * blocks.scale, of_key, of_value

    query, key, value, _, sight, output, lse = attended
    of_query, of_key, of_value = _of_heads(
        gradients, sight, blocks, interpret, query, key, value, output, cotangent, lse
    )
    return of_query, of_key, of_value


def splash_gradients(
    kernel: Any, residuals: tuple[Any, ...], cotangent: Array
) -> Sequence[Array]:
    """The gradients of query, key and value, the first of `residuals`; output and
    log-sum-exp are last.

    The rule of JAX's kernel (0.10.2, 0.12), which is private: as a `jax.custom_vjp`
    JAX would call it only for residuals that the kernel kept itself.
    """
    tables = kernel.dq_mask_info, kernel.dkv_mask_info
    backward: Any = splash._splash_attention_bwd
    return backward(**kernel.kwargs, res=(*residuals, *tables), do=cotangent)[3:6]


def _kernel_for(
    query: Query, key: Key, value: Value, sight: Sight, blocks: Blocks, interpret: bool
) -> tuple[Any, int]:
    """The kernel of a key head, and the FLOPs of one coordinate in a product of its
    blocks, without what documents skip.
    """
    _, rows, _, group, _ = query.shape
    columns = key.shape[1]
    widest = max(key.shape[-1], value.shape[-1])
    sizes = (
        rows // blocks.strips,
        rows,
        columns,
        blocks.window,
        widest * query.dtype.itemsize,
    )
    size = blocks.size if interpret else splash_block_size(*sizes)
    assert isinstance(size, int), size
    seen = sight.blocks_seen(rows, columns, size, blocks.window)
    # Most that a block of queries sees, and that see a block of keys
    most_keys = most_seen(columns // size, size, blocks.window)
    most_queries = most_seen(rows // size, size, blocks.window)
    of_queries = table(Ranges.of(seen), most_keys)
    of_keys = table(Ranges.of(seen.T), most_queries)
    position = jnp.arange(rows, dtype=jnp.int32) if sight.rows is None else sight.rows
    rows_of, columns_of = (
        splash_masks.MaskInfo(block[None], None, is_computed[None], None, position)  # pyright: ignore[reportArgumentType]
        for block, is_computed in (of_queries, (of_keys[0].T, of_keys[1].T))
    )
    names = (
        "block_q",
        "block_kv",
        "block_q_dkv",
        "block_kv_dkv",
        "block_q_dq",
        "block_kv_dq",
    )
    kernel = splash.SplashAttentionKernel(
        rows_of,
        rows_of,
        columns_of,
        is_mqa=True,
        block_sizes=splash.BlockSizes(**dict.fromkeys(names, size)),
        save_residuals=True,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=blocks.softcap,
        residual_checkpoint_name=None,
        mask_function=_Visible(blocks.window),
        interpret=interpret,
    )
    # Queries of several devices have as many to see.
    total = Ranges.of(Sight().blocks_seen(columns, columns, size, blocks.window)).total
    assert total is not None
    pairs = size**2 * total * rows // columns
    return kernel, 2 * group * pairs


def table(ranges: Ranges, width: int) -> tuple[Array, Array]:
    """The block that a kernel reads at each of `width` steps of a block, the last ones
    in ascending order.

    And whether it is computed: before these, the first one is read, and waits.
    """
    before_last = jnp.arange(1 - width, 1, dtype=jnp.int32)[None]
    step = ranges.last[:, None] + before_last
    first = ranges.first[:, None]
    block = jnp.maximum(step, first).astype(jnp.int16)
    is_computed = (step >= first).astype(jnp.int8)
    return block, is_computed
