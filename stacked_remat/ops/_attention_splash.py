"""Attention with JAX's splash kernels for TPUs (`jax.experimental.pallas.ops.tpu.splash_attention`).

They compute in blocks (Dao et al. 2022) and skip those that a table masks out. This file has the choice of
block sizes, the mask, and the order of axes that they need.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Bool, Int

from .._trips import known_blocks
from ._attention_blockwise import Documents, Key, Query, Sinks

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

    Attributes:
        position: number of positions in a sequence; no block may span two sequences.
        window: how many positions a position sees, itself included; None for all before it.
        sequences: how many are concatenated; none sees another.
    """

    position: int
    window: int | None
    sequences: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.sequences * self.position, self.sequences * self.position

    @property
    def q_sequence(self) -> Int[np.ndarray, " position"]:
        """The numbers of the rows; if not None, the kernels use `mask_function`."""
        return np.arange(self.shape[0], dtype=np.int32)

    def mask_function(self, row: Int[Array, "*block"], column: Int[Array, "*block"]) -> Bool[Array, "*block"]:
        """Whether a row sees a column; called in the kernel, on blocks of one sequence."""
        visible = row >= column
        return visible if self.window is None else visible & (row - column < self.window)

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "1 2"]:
        """Two entries for a block: (any entry is visible, all are)."""
        rows, columns = index
        if rows.start // self.position != columns.start // self.position:
            return np.array([[False, False]])
        nearest, farthest = rows.start - (columns.stop - 1), rows.stop - 1 - columns.start
        window = self.position if self.window is None else self.window
        # Every distance between these two occurs in the block.
        some = farthest >= 0 and nearest < window
        return np.array([[some, nearest >= 0 and farthest < window]])


def splash_block_size(position: int, sequences: int, window: int | None, row_bytes: int) -> int | str:
    """Positions in a block of queries and of keys, or why no size is possible.

    Args:
        position: number of positions in a sequence.
        sequences: how many sequences have their own document boundaries.
        window: how many positions a position sees; None for all before it.
        row_bytes: bytes of one position of one head.
    """
    if position % LANES:
        return f"it takes sequences that are a multiple of {LANES} positions, not {position}"
    large = _LARGE_BLOCK if row_bytes <= _LARGE_ROW else _BLOCK
    for most in (_BLOCK, large):
        size = max(size for size in range(LANES, min(position, most) + 1, LANES) if position % size == 0)
        count = position // size
        width = count if window is None else min(count, -(-(window - 1) // size) + 1)
        if sequences * count * width <= _TABLE:
            return size
    return (
        f"its table of {sequences * count} x {width} blocks of {size} positions does not fit a TPU's scalar "
        f"memory, which holds {_TABLE}"
    )


def splash_attention(
    query: Query,
    key: Key,
    value: Key,
    documents: Documents | None,
    scale: float,
    window: int | None,
    block_size: int,
    *,
    sinks: Sinks | None = None,
    interpret: bool = False,
) -> Query:
    """Causal grouped-query attention; documents are integers, and positions see only their own document.

    The output and the log-sum-exp are both named `attention_output`, because the kernels take one name. With
    it saved, the backward pass of a checkpointed layer does not recompute attention.

    Args:
        query: this and the others as in `_attention_blockwise.py`.
        block_size: from `splash_block_size`.
        sinks: are rounded to the dtype of `query`, in which JAX 0.10 returns their gradient.
        interpret: whether to interpret the kernels on the CPU, for tests.

    Returns:
        Like `query`, in its dtype. Sums are in float32; matrix products of float32 have JAX's default
        precision, which on a TPU is that of bfloat16 unless `jax.default_matmul_precision` says otherwise.

    Cost: `2 * heads * position**2 * head_dim` FLOPs forward and 3.5 times that backward, which computes
    scores twice; less for a window, but documents skip no blocks. Memory: the results, a copy of each array
    with heads first, and while a gradient's forward kernel runs, 128 copies of one key head's log-sum-exp.
    """
    batch, position, kv_heads, group, head_dim = query.shape
    # A kernel takes one key head of one sequence, and one vector of documents. Without documents the batch
    # becomes more heads; with documents it becomes a longer sequence. lax.map over heads takes less memory
    # than jax.vmap, under which JAX_REMAT3 finds no names.
    sequences = 1 if documents is None else batch
    length = sequences * position

    def heads_first(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(-1, length, *x.shape[2:]), 2, 1).reshape(-1, length, *x.shape[3:])

    segments = None
    if documents is not None:
        ids = documents.reshape(-1).astype(jnp.int32)
        segments = splash.SegmentIds(ids, ids)
    kernel = _kernel(CausalWindow(position, window, sequences), group, block_size, interpret)

    def attend(head: tuple[Array, Array, Array, Array | None]) -> Array:
        query, key, value, sinks = head
        # The kernels take no scale, so queries are scaled, and rounded once more.
        queries = jnp.moveaxis(query * scale, 1, 0)
        with known_blocks(int(np.count_nonzero(kernel.fwd_mask_info.block_mask))):
            return jnp.moveaxis(kernel(queries, key, value, segments, sinks=sinks), 0, 1)

    if sinks is not None:
        sinks = jnp.tile(sinks.astype(query.dtype), (batch // sequences, 1))
    attended = jax.lax.map(attend, (heads_first(query), heads_first(key), heads_first(value), sinks))
    attended = attended.reshape(batch // sequences, kv_heads, length, group, head_dim)
    return jnp.moveaxis(attended, 1, 2).reshape(query.shape)


@functools.lru_cache(maxsize=64)
def _kernel(mask: CausalWindow, group: int, size: int, interpret: bool) -> Callable[..., Array]:
    sizes = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    # The tables are cached beyond the trace that first needs them, so they must not be tracers.
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mqa(
            splash.MultiHeadMask([mask] * group),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name="attention_output",
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)
