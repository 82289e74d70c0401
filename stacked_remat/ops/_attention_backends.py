"""Implementations of causal attention, and which calls each supports."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .._compat import cudnn_is_installed
from ._attention_blockwise import Blocks, Documents, Key, Query, Rows, Sinks, blockwise_attention
from ._attention_splash import splash_attention, splash_block_size


@dataclass(frozen=True)
class AttentionCall:
    """What decides whether a backend supports a call.

    Attributes:
        platform: of the device that the program is for: `"cpu"`, `"cuda"` or `"tpu"`.
        dtype: of queries, keys and values.
        position: number of positions.
        head_dim: width of a head.
        has_documents: whether there are document boundaries.
        blocks: scale, block size and window.
        batch: number of sequences.
        devices: over how many the compiler partitions the program; 1 inside `jax.shard_map`.
        has_sinks: whether heads have sinks.
        has_rows: whether the queries are those of some positions only.
    """

    platform: str
    dtype: jnp.dtype
    position: int
    head_dim: int
    has_documents: bool
    blocks: Blocks
    batch: int = 1
    devices: int = 1
    has_sinks: bool = False
    has_rows: bool = False


@dataclass(frozen=True)
class Backend:
    """An implementation of causal grouped-query attention.

    Attributes:
        attend: computes it; the result is like the query, in its dtype.
        reason_against: why a call is not supported; None if it is.
        ring: whether keys and values are passed on rather than gathered where positions are divided over
            devices.
    """

    attend: Callable[[Query, Key, Key, Documents | None, Blocks, Sinks | None, Rows | None], Query]
    reason_against: Callable[[AttentionCall], str | None] = lambda call: None
    ring: bool = False


def exact_attention(
    query: Query,
    key: Key,
    value: Key,
    documents: Documents | None,
    blocks: Blocks,
    sinks: Sinks | None = None,
    rows: Rows | None = None,
) -> Query:
    """The definition, with all scores in memory at once; the reference for the other backends."""
    scores = jnp.einsum("bqkgd,bskd->bkgqs", query, key, preferred_element_type=jnp.float32)
    row = (jnp.arange(query.shape[1]) if rows is None else rows)[:, None]
    column = jnp.arange(key.shape[1])[None, :]
    visible = row >= column
    if blocks.window is not None:
        visible &= row - column < blocks.window
    visible = visible[None]
    if documents is not None:
        own = documents if rows is None else jnp.take(documents, rows, axis=1)
        visible = visible & (own[:, :, None] == documents[:, None, :])
    lowest = float(jnp.finfo(jnp.float32).min)
    scores = jnp.where(visible[:, None, None], scores * blocks.scale, lowest)
    weights = jax.nn.softmax(scores, axis=-1)
    if sinks is not None:
        total = jax.nn.logsumexp(scores, axis=-1)
        weights *= jax.nn.sigmoid(total - sinks.astype(jnp.float32)[None, :, :, None])[..., None]
    weights = weights.astype(value.dtype)
    attended = jnp.einsum("bkgqs,bskd->bqkgd", weights, value, preferred_element_type=jnp.float32)
    return checkpoint_name(attended.astype(query.dtype), "attention_output")


def _cudnn(
    query: Query,
    key: Key,
    value: Key,
    documents: Documents | None,
    blocks: Blocks,
    sinks: Sinks | None,
    rows: Rows | None,
) -> Query:
    batch, position, kv_heads, group, head_dim = query.shape
    attended = jax.nn.dot_product_attention(
        query.reshape(batch, position, kv_heads * group, head_dim),
        key,
        value,
        scale=blocks.scale,
        is_causal=True,
        implementation="cudnn",
    )
    return checkpoint_name(attended.reshape(query.shape), "attention_output")


def _against_cudnn(call: AttentionCall) -> str | None:
    if call.platform != "cuda":
        return f"it runs on NVIDIA GPUs, and the program is for {call.platform!r}"
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {call.dtype}"
    # 256 on GPUs from Hopper on. JAX too asks the attached GPU, even in a compilation for another.
    capability = float(getattr(jax.local_devices()[0], "compute_capability", "0"))
    widest = 256 if capability >= 9.0 else 128
    if call.head_dim > widest or call.head_dim % 8:
        return f"it takes head widths that are multiples of 8 up to {widest}, not {call.head_dim}"
    if call.has_documents:
        return "it has no document boundaries: a mask would take memory for position x position"
    if call.blocks.window is not None:
        return "windows are not supported"
    if call.has_rows:
        return "the axis of positions is divided over devices, and its queries start at the first position"
    if call.has_sinks:
        return "JAX's interface to it takes no sinks"
    if not cudnn_is_installed():
        return "JAX finds no cuDNN here (pip install nvidia-cudnn-cu13)"
    return None


def _splash(
    query: Query,
    key: Key,
    value: Key,
    documents: Documents | None,
    blocks: Blocks,
    sinks: Sinks | None,
    rows: Rows | None,
) -> Query:
    sequences = 1 if documents is None else query.shape[0]
    size = splash_block_size(query.shape[1], sequences, blocks.window, query.shape[-1] * query.dtype.itemsize)
    assert isinstance(size, int), size
    return splash_attention(query, key, value, documents, blocks.scale, blocks.window, size, sinks=sinks)


def _against_splash(call: AttentionCall) -> str | None:
    if call.platform != "tpu":
        return f"it runs on TPUs, and the program is for {call.platform!r}"
    if call.has_rows:
        return "the axis of positions is divided over devices, and its table of blocks is for all queries"
    if call.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 and float32, not {call.dtype}"
    if call.head_dim > 512:
        return f"its blocks fit a TPU's vector memory for heads up to 512 wide, not {call.head_dim}"
    if call.devices > 1:
        return (
            f"the compiler can't divide it among {call.devices} devices: call it inside "
            "jax.shard_map(..., check_vma=False)"
        )
    sequences = call.batch if call.has_documents else 1
    row_bytes = call.head_dim * call.dtype.itemsize
    size = splash_block_size(call.position, sequences, call.blocks.window, row_bytes)
    return size if isinstance(size, str) else None


BACKENDS: dict[str, Backend] = {
    "cudnn": Backend(_cudnn, _against_cudnn),  # NVIDIA's fused kernels
    "splash": Backend(_splash, _against_splash),  # JAX's kernels for TPUs
    "blockwise": Backend(blockwise_attention),
    "exact": Backend(exact_attention),
    "ring": Backend(blockwise_attention, ring=True),
}
"""By name, in the order in which `"auto"` tries them."""
