"""Attention with JAX's splash kernels for TPUs (`jax.experimental.pallas.ops.tpu.splash_attention`).

They compute in blocks (Dao et al. 2022) and skip those that a table masks out. This file has the choice of
block sizes, the mask, and the order of axes that they need.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Bool, Int

from .._compat import splash_gradients
from .._trips import known_products
from ._attention_rule import Attended, Blocks, Kernel, Key, LogSumExp, Query, Sight

LANES = 128
"""The width of a TPU's vector registers; block sizes are multiples of it."""

_BLOCK = 512  # its scores and sums fit the vector memory of a v5e, v5p and v6e for heads up to 512 wide
_LARGE_BLOCK, _LARGE_ROW = 1024, 512  # a larger block fits if a position of a head has at most so many bytes
_TABLE = 512 * 512  # entries of the table of blocks, at three bytes, in a scalar memory of one MiB


@dataclass(frozen=True)
class CausalWindow(splash.Mask):
    """The mask of the splash kernels: by block on the host, by entry in the kernel.

    JAX's own masks evaluate every entry on the host, which takes half a minute at 65,536 positions. JAX only
    asks whether any and whether all entries of a block are visible, so two entries represent it.

    """

    position: int  # number of positions
    window: int | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.position, self.position

    @property
    def q_sequence(self) -> Int[np.ndarray, " position"]:
        """The numbers of the rows; if not None, the kernels use `mask_function`."""
        return np.arange(self.shape[0], dtype=np.int32)

    def mask_function(self, row: Int[Array, "*block"], column: Int[Array, "*block"]) -> Bool[Array, "*block"]:
        """Whether a row sees a column; called in the kernel."""
        visible = row >= column
        return visible if self.window is None else visible & (row - column < self.window)

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "1 2"]:
        """Two entries for a block: (any entry is visible, all are)."""
        rows, columns = index
        nearest, farthest = rows.start - (columns.stop - 1), rows.stop - 1 - columns.start
        window = self.position if self.window is None else self.window
        # Every distance between these two occurs in the block.
        some = farthest >= 0 and nearest < window
        return np.array([[some, nearest >= 0 and farthest < window]])


def splash_block_size(position: int, window: int | None, row_bytes: int) -> int | str:
    """Positions in a block of queries and of keys, or why no size is possible.

    `row_bytes` are those of one position of one head.
    """
    if position % LANES:
        return f"it takes sequences that are a multiple of {LANES} positions, not {position}"
    large = _LARGE_BLOCK if row_bytes <= _LARGE_ROW else _BLOCK
    for most in (_BLOCK, large):
        size = max(size for size in range(LANES, min(position, most) + 1, LANES) if position % size == 0)
        count = position // size
        width = count if window is None else min(count, -(-(window - 1) // size) + 1)
        if count * width <= _TABLE:
            return size
    return (
        f"its table of {count} x {width} blocks of {size} positions does not fit a TPU's scalar memory, "
        f"which holds {_TABLE}"
    )


def splash_kernel(block_size: int | None = None, interpret: bool = False) -> Kernel:
    """The kernels, or for tests their interpretation on the CPU; by default in blocks of `splash_block_size`.

    Documents are told apart by where they begin. Matrix products of float32 have JAX's default precision,
    which on a TPU is that of bfloat16 unless `jax.default_matmul_precision` says otherwise.

    Cost: `2 * heads * position**2 * head_dim` FLOPs forward and 3.5 times that backward, which computes
    scores twice; less for a window, but documents skip no blocks. Memory: the results, a copy of each array
    with heads first, and while a forward kernel runs, 128 copies of one key head's log-sum-exp.
    """
    options = {"block_size": block_size, "interpret": interpret}
    return Kernel(functools.partial(_forward, **options), functools.partial(_backward, **options))


def _of_heads(fn: Callable[..., tuple[Array, ...]], sight: Sight, *arrays: Array) -> list[Array]:
    """`fn` of the documents and each key head of a sequence; arrays are `[batch, position, kv_heads, ...]`.

    lax.map over heads takes less memory than jax.vmap.
    """

    def of_sequence(sequence: tuple[Any, tuple[Array, ...]]) -> tuple[Array, ...]:
        starts, heads = sequence
        segments = None if starts is None else splash.SegmentIds(starts, starts)
        return lax.map(lambda head: fn(segments, *head), heads)

    heads_first = tuple(jnp.moveaxis(x, 2, 1) for x in arrays)
    return [jnp.moveaxis(x, 1, 2) for x in lax.map(of_sequence, (sight.starts, heads_first))]


def _forward(
    query: Query, key: Key, value: Key, sight: Sight, blocks: Blocks, **options: Any
) -> tuple[Query, LogSumExp]:
    kernel, products = _kernel_for(query, blocks, **options)

    def attend(segments: Any, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        # The kernels take no scale, so queries are scaled, and rounded once more.
        queries = jnp.moveaxis(query * blocks.scale, 1, 0)
        with known_products(2 * products * len(queries)):
            output, (lse,) = kernel(queries, key, value, segments)
        return jnp.moveaxis(output, 0, 1), lse.T

    output, lse = _of_heads(attend, sight, query, key, value)
    return output, lse


def _backward(attended: Attended, cotangent: Query, blocks: Blocks, **options: Any) -> tuple[Query, Key, Key]:
    query, key, value, _, sight, output, lse = attended
    kernel, products = _kernel_for(query, blocks, **options)

    def gradients(segments: Any, query: Array, key: Array, value: Array, *of_rows: Array) -> Any:
        queries, output, cotangent = (jnp.moveaxis(x, 1, 0) for x in (query * blocks.scale, *of_rows[:2]))
        residuals = queries, key, value, segments, None, output, of_rows[2].T
        # Scores again and two products in each of two kernels, and one more in one.
        with known_products(7 * products * len(queries) // 2):
            of_query, of_key, of_value = splash_gradients(kernel, residuals, cotangent)
        return jnp.moveaxis(of_query, 0, 1) * blocks.scale, of_key, of_value

    of_query, of_key, of_value = _of_heads(gradients, sight, query, key, value, output, cotangent, lse)
    return of_query, of_key, of_value


def _kernel_for(query: Query, blocks: Blocks, block_size: int | None, interpret: bool) -> tuple[Any, int]:
    """The kernel of one key head, and the FLOPs of a matrix product of all its visible blocks."""
    _, position, _, group, head_dim = query.shape
    size = block_size or splash_block_size(position, blocks.window, head_dim * query.dtype.itemsize)
    assert isinstance(size, int), size
    kernel = _kernel(CausalWindow(position, blocks.window), group, size, interpret)
    return kernel, 2 * int(np.count_nonzero(kernel.fwd_mask_info.block_mask)) * size**2 * head_dim


@functools.lru_cache(maxsize=64)
def _kernel(mask: CausalWindow, group: int, size: int, interpret: bool) -> Any:
    names = "block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"
    sizes = splash.BlockSizes(**dict.fromkeys(names, size))
    # The tables are cached beyond the trace that first needs them, so they must not be tracers.
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mqa(
            splash.MultiHeadMask([mask] * group),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            save_residuals=True,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)
