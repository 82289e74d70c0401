"""Implementations of causal attention, and which calls each supports."""

from dataclasses import dataclass

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from .._names import named
from ._attention_blockwise import BLOCKWISE
from ._attention_rule import (
    Attended,
    Blocks,
    Kernel,
    Key,
    LogSumExp,
    Query,
    Sight,
    Sinks,
    strips_among,
)
from ._attention_splash import splash_block_size, splash_kernel
from ._backends import HALVES, Backend, Call
from ._cudnn import cudnn_attention, cudnn_attention_gradients, cudnn_is_installed
from ._tokamax import ATTENTION, why_not_tokamax


@dataclass(frozen=True, kw_only=True)
class AttentionCall(Call):
    """See `Call`; positions are those of one device."""

    position: int
    head_dim: int
    has_documents: bool
    blocks: Blocks
    among: int = 1  # devices over which positions are divided


def attend_by_definition(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    Slot: Axis,
    HeadDim: Axis,
    *,
    last: NamedArray,
    first: NamedArray | None,
    scale: float,
    sinks: NamedArray | None,
) -> NamedArray:
    """Attention of queries to keys along `Slot` from `first` to `last`, with all scores
    in memory at once.

    Both are int32 over axes of `query`; `first` is None for the beginning.
    """
    slots = hax.arange(Slot, dtype=jnp.int32)
    visible = last.broadcast_axis(Slot) >= slots
    if first is not None:
        visible = visible & (first.broadcast_axis(Slot) <= slots)
    scores = (
        hax.dot(query, key, axis=HeadDim, preferred_element_type=jnp.float32) * scale
    )
    scores = hax.where(visible, scores, float(jnp.finfo(jnp.float32).min))
    weights = hnn.softmax(scores, axis=Slot)
    if sinks is not None:
        weights *= hnn.sigmoid(
            hnn.logsumexp(scores, axis=Slot) - sinks.astype(jnp.float32)
        )
    weights = weights.astype(value.dtype)
    attended = hax.dot(weights, value, axis=Slot, preferred_element_type=jnp.float32)
    return attended.rearrange(query.axes).astype(query.dtype)


def exact_attention(
    query: Query,
    key: Key,
    value: Key,
    sight: Sight,
    blocks: Blocks,
    sinks: Sinks | None = None,
) -> Query:
    """By the definition; the reference for the kernels."""
    named_query = hax.named(query, ("batch", "row", "kv_heads", "group", "head_dim"))
    Batch, Row, *_, HeadDim = named_query.axes
    named_key, named_value = (
        hax.named(x, ("batch", "slot", "kv_heads", "head_dim")) for x in (key, value)
    )
    first = sight.first(Row.size, blocks.window)
    if first is not None:
        first = hax.named(jnp.broadcast_to(first, (Batch.size, Row.size)), (Batch, Row))
    attended = attend_by_definition(
        named_query,
        named_key,
        named_value,
        named_key.resolve_axis("slot"),
        HeadDim,
        last=hax.named(jnp.asarray(sight.last(Row.size)), Row),
        first=first,
        scale=blocks.scale,
        sinks=None if sinks is None else hax.named(sinks, ("kv_heads", "group")),
    )
    return named(attended.array, "attention_output")


def _cudnn_forward(
    query: Query, key: Key, value: Key, sight: Sight, blocks: Blocks
) -> tuple[Query, LogSumExp]:
    one = query.reshape(*query.shape[:2], -1, query.shape[-1])
    output, lse = cudnn_attention(one, key, value, blocks.scale, blocks.window)
    return output.reshape(query.shape), jnp.moveaxis(lse, 1, 2).reshape(
        query.shape[:-1]
    )


def _cudnn_backward(
    attended: Attended, cotangent: Query, blocks: Blocks
) -> tuple[Query, Key, Key]:
    query, key, value, _, _, output, lse = attended
    one, output, cotangent = (
        x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (query, output, cotangent)
    )
    lse = jnp.moveaxis(lse.reshape(one.shape[:-1]), 2, 1)
    found = cudnn_attention_gradients(
        (one, key, value), (output, lse), cotangent, blocks.scale, blocks.window
    )
    return found[0].reshape(query.shape), found[1], found[2]


def _why_not_width(call: AttentionCall, widest: int) -> str | None:
    if call.head_dim > widest or call.head_dim % 8:
        return (
            f"it takes head widths that are multiples of 8 up to {widest}, not"
            f" {call.head_dim}"
        )
    return None


def _why_not_cudnn(call: AttentionCall) -> str | None:
    # 256 on GPUs from Hopper on. JAX too asks the attached GPU, even in a compilation
    # for another.
    capability = float(getattr(jax.local_devices()[0], "compute_capability", "0"))
    if reason := _why_not_width(call, 256 if capability >= 9.0 else 128):
        return reason
    if 0 < capability < 8.0:
        return (
            "its kernels are for GPUs of compute capability 8.0 and later, not"
            f" {capability}"
        )
    if call.has_documents:
        return (
            "it has no document boundaries: its statistics would take memory for"
            " documents x positions"
        )
    if call.among > 1:
        return (
            "the axis of positions is divided over devices, and its queries start at"
            " the first position"
        )
    if not cudnn_is_installed():
        return "JAX finds no cuDNN here (pip install nvidia-cudnn-cu13)"
    return None


def _why_not_tokamax(call: AttentionCall) -> str | None:
    # Backward it computes 64 queries at a time; the weights of those that are missing
    # overflow in float16.
    if (
        call.dtype == jnp.float16
        and call.position // strips_among(call.among, call.position) % 64
    ):
        return (
            "in float16 a strip of queries must be a multiple of 64 positions, of"
            f" {call.position} here"
        )
    return _why_not_width(call, 256) or why_not_tokamax(
        "its kernels", {9.0: "Hopper", 10.0: "Blackwell"}
    )


def _why_not_splash(call: AttentionCall) -> str | None:
    if call.head_dim > 512:
        return (
            "its blocks fit a TPU's vector memory for heads up to 512 wide, not"
            f" {call.head_dim}"
        )
    strip = call.position // strips_among(call.among, call.position)
    sizes = strip, call.position, call.among * call.position, call.blocks.window
    size = splash_block_size(*sizes, call.head_dim * call.dtype.itemsize)
    return size if isinstance(size, str) else None


BACKENDS: dict[str, Backend[Kernel | None]] = {
    "cudnn": Backend(
        Kernel(_cudnn_forward, _cudnn_backward),
        "cuda",
        HALVES,
        _why_not_cudnn,
        is_partitioned=True,
    ),
    "tokamax": Backend(ATTENTION, "cuda", HALVES, _why_not_tokamax),
    "splash": Backend(
        splash_kernel(), "tpu", (jnp.bfloat16, jnp.float32), _why_not_splash
    ),
    "blockwise": Backend(BLOCKWISE),
    "exact": Backend(None),  # the definition, with all scores in memory at once
}
"""By name, in the order in which `"auto"` tries them."""
