"""Implementations of causal attention, and which calls each supports."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .._compat import cudnn_is_installed
from ._attention_blockwise import BLOCKWISE
from ._attention_cudnn import CUDNN
from ._attention_rule import Blocks, Kernel, Key, Query, Sight, Sinks
from ._attention_splash import splash_block_size, splash_kernel
from ._attention_tokamax import TOKAMAX, why_not_tokamax
from ._backends import HALVES, Backend, Call


@dataclass(frozen=True, kw_only=True)
class AttentionCall(Call):
    """See `Call`; with `has_rows` queries are of some of `position` positions only."""

    position: int
    head_dim: int
    has_documents: bool
    blocks: Blocks
    has_rows: bool = False


def exact_attention(
    query: Query, key: Key, value: Key, sight: Sight, blocks: Blocks, sinks: Sinks | None = None
) -> Query:
    """The definition, with all scores in memory at once; the reference for the kernels."""
    scores = jnp.einsum("bqkgd,bskd->bkgqs", query, key, preferred_element_type=jnp.float32)
    column, length = jnp.arange(key.shape[1], dtype=jnp.int32)[None, None], query.shape[1]
    visible = jnp.asarray(sight.last(length))[None, :, None] >= column
    first = sight.first(length, blocks.window)
    if first is not None:
        visible = visible & (jnp.asarray(first)[:, :, None] <= column)
    lowest = float(jnp.finfo(jnp.float32).min)
    scores = jnp.where(visible[:, None, None], scores * blocks.scale, lowest)
    weights = jax.nn.softmax(scores, axis=-1)
    if sinks is not None:
        total = jax.nn.logsumexp(scores, axis=-1)
        weights *= jax.nn.sigmoid(total - sinks.astype(jnp.float32)[None, :, :, None])[..., None]
    weights = weights.astype(value.dtype)
    attended = jnp.einsum("bkgqs,bskd->bqkgd", weights, value, preferred_element_type=jnp.float32)
    return checkpoint_name(attended.astype(query.dtype), "attention_output")


def _why_not_width(call: AttentionCall, widest: int) -> str | None:
    if call.head_dim > widest or call.head_dim % 8:
        return f"it takes head widths that are multiples of 8 up to {widest}, not {call.head_dim}"
    return None


def _why_not_cudnn(call: AttentionCall) -> str | None:
    # 256 on GPUs from Hopper on. JAX too asks the attached GPU, even in a compilation for another.
    capability = float(getattr(jax.local_devices()[0], "compute_capability", "0"))
    if reason := _why_not_width(call, 256 if capability >= 9.0 else 128):
        return reason
    if call.has_documents:
        return "it has no document boundaries: its statistics would take memory for documents x positions"
    if call.has_rows:
        return "the axis of positions is divided over devices, and its queries start at the first position"
    if not cudnn_is_installed():
        return "JAX finds no cuDNN here (pip install nvidia-cudnn-cu13)"
    return None


def _why_not_splash(call: AttentionCall) -> str | None:
    if call.has_rows:
        return "the axis of positions is divided over devices, and its table of blocks is for all queries"
    if call.head_dim > 512:
        return f"its blocks fit a TPU's vector memory for heads up to 512 wide, not {call.head_dim}"
    size = splash_block_size(call.position, call.blocks.window, call.head_dim * call.dtype.itemsize)
    return size if isinstance(size, str) else None


BACKENDS: dict[str, Backend[Kernel | None]] = {
    "cudnn": Backend(CUDNN, "cuda", HALVES, _why_not_cudnn, is_partitioned=True),
    "tokamax": Backend(TOKAMAX, "cuda", HALVES, lambda call: _why_not_width(call, 256) or why_not_tokamax()),
    "splash": Backend(splash_kernel(), "tpu", (jnp.bfloat16, jnp.float32), _why_not_splash),
    "blockwise": Backend(BLOCKWISE),
    "exact": Backend(None),  # the definition, with all scores in memory at once
}
"""By name, in the order in which `"auto"` tries them."""
