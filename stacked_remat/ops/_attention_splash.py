"""Attention by JAX's splash kernels for TPUs: Dao et al. 2022, with blocks skipped that a table rules out.

The kernels come with JAX (`jax.experimental.pallas.ops.tpu.splash_attention`). What is here: which block
sizes serve, the mask, and the order of axes that they want.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Bool, Int

from ._attention_blockwise import Documents, Key, Query

LANES = 128
"""Blocks are a multiple of it: so wide are a TPU's vector registers."""

_BLOCK = 512  # its scores and sums fit the vector memory of a v5e, v5p and v6e for heads up to 512 wide
_LARGE_BLOCK, _LARGE_ROW = 1024, 512  # and a block twice as long if a position of a head has so few bytes
_TABLE = 512 * 512  # entries of the table of blocks, at three bytes, in a scalar memory of one MiB


@dataclass(frozen=True)
class CausalWindow(splash.Mask):
    """What a position sees, as the splash kernels ask for it: by block on the host, by entry in the kernel.

    JAX's own masks evaluate every entry on the host, which at 65,536 positions takes half a minute. A block
    is only ever asked whether any and whether all of it is visible, so that two entries can stand for it.

    Attributes:
        position: number of positions in a sequence; no block may reach into two.
        window: how many positions a position sees, itself included; None for all before it.
        sequences: how many stand one after the other; none sees another.
    """

    position: int
    window: int | None
    sequences: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.sequences * self.position, self.sequences * self.position

    @property
    def q_sequence(self) -> Int[np.ndarray, " position"]:
        """The numbers of the rows; that it is there tells the kernels to use `mask_function`."""
        return np.arange(self.shape[0], dtype=np.int32)

    def mask_function(self, row: Int[Array, "*block"], column: Int[Array, "*block"]) -> Bool[Array, "*block"]:
        """Whether a row sees a column; runs inside the kernel, on blocks of one sequence."""
        visible = row >= column
        return visible if self.window is None else visible & (row - column < self.window)

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "1 2"]:
        """Two entries for a block: visible both if all of it is, one of them if some of it is."""
        rows, columns = index
        if rows.start // self.position != columns.start // self.position:
            return np.array([[False, False]])
        nearest, farthest = rows.start - (columns.stop - 1), rows.stop - 1 - columns.start
        window = self.position if self.window is None else self.window
        # All distances between these two occur in the block.
        some = farthest >= 0 and nearest < window
        return np.array([[some, nearest >= 0 and farthest < window]])


def splash_block_size(position: int, sequences: int, window: int | None, row_bytes: int) -> int | str:
    """Positions in a block of queries and of keys, or why there is no size that serves.

    Args:
        position: number of positions in a sequence.
        sequences: how many have boundaries of documents of their own.
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
    interpret: bool = False,
) -> Query:
    """Causal grouped-query attention; documents are integers, and positions see only their own document.

    The output and the log-sum-exp are both named `attention_output`: the kernels take one name for what their
    backward pass reads, so with that name saved it does not attend again.

    Args:
        query: as in `_attention_blockwise.py`, and so are the others.
        block_size: as `splash_block_size` gives it.
        interpret: whether to run the kernels on the CPU, an operation at a time, for tests.

    Returns:
        Like `query`, in its dtype. Sums are in float32; matrix products of float32 have JAX's default
        precision, which on a TPU is that of bfloat16 unless `jax.default_matmul_precision` says otherwise.

    Cost: `2 * heads * position**2 * head_dim` FLOPs forward and 3.5 times that backward, which computes
    scores twice; less for a window, but documents rule out no blocks. Memory: the results, a copy of each
    array with heads first, and while a gradient's forward kernel runs, for one key head, the log-sum-exp 128
    times over.
    """
    batch, position, kv_heads, group, head_dim = query.shape
    # A kernel takes one key head of one sequence. A batch without documents is more heads; with documents it
    # is a longer sequence, because a kernel has one vector of them. One head after the other, by lax.map,
    # takes less memory than jax.vmap, under which JAX_REMAT3 has no names.
    sequences = 1 if documents is None else batch
    length = sequences * position

    def heads_first(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(-1, length, *x.shape[2:]), 2, 1).reshape(-1, length, *x.shape[3:])

    segments = None
    if documents is not None:
        ids = documents.reshape(-1).astype(jnp.int32)
        segments = splash.SegmentIds(ids, ids)
    kernel = _kernel(CausalWindow(position, window, sequences), group, block_size, interpret)

    def attend(head: tuple[Array, Array, Array]) -> Array:
        query, key, value = head
        # The kernels know no scale, so the queries take it, and are rounded once more.
        return jnp.moveaxis(kernel(jnp.moveaxis(query * scale, 1, 0), key, value, segments), 0, 1)

    attended = jax.lax.map(attend, (heads_first(query), heads_first(key), heads_first(value)))
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
    # The tables outlive the trace in which they are first asked for, so they must not be its own.
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
