"""Implementations of causal attention, and which calls each supports."""

from collections.abc import Sequence
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
    Output,
    Query,
    Sight,
    Sinks,
    Value,
    flatten_heads,
    strips_among,
)
from ._attention_splash import splash_block_size, splash_kernel
from ._backends import HALVES, Backend, Call
from ._cudnn import cudnn_attention, cudnn_attention_gradients, cudnn_is_installed
from ._padding import pad_axis
from ._tokamax import ATTENTION, why_not_tokamax
from .softcap import soft_capped


@dataclass(frozen=True, kw_only=True)
class AttentionCall(Call):
    """See `Call`; positions are those of one device."""

    position: int
    head_dim: int  # of queries and keys
    value_dim: int
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
    out: Sequence[Axis],
    last: NamedArray,
    first: NamedArray | None,
    scale: float,
    softcap: float | None,
    sinks: NamedArray | None,
) -> NamedArray:
    """Attention of queries to keys along `Slot` from `first` to `last`, with all scores
    in memory at once.

    Both are int32 over axes of `query`; `first` is None for the beginning. The result
    has the axes `out`.
    """
    slots = hax.arange(Slot, dtype=jnp.int32)
    visible = last.broadcast_axis(Slot) >= slots
    if first is not None:
        visible = visible & (first.broadcast_axis(Slot) <= slots)
    scores = (
        hax.dot(query, key, axis=HeadDim, preferred_element_type=jnp.float32) * scale
    )
    scores = soft_capped(scores, softcap)
    scores = hax.where(visible, scores, float(jnp.finfo(jnp.float32).min))
    weights = hnn.softmax(scores, axis=Slot)
    if sinks is not None:
        weights *= hnn.sigmoid(
            hnn.logsumexp(scores, axis=Slot) - sinks.astype(jnp.float32)
        )
    weights = weights.astype(value.dtype)
    attended = hax.dot(weights, value, axis=Slot, preferred_element_type=jnp.float32)
    return attended.rearrange(out).astype(query.dtype)


def exact_attention(
    query: Query,
    key: Key,
    value: Value,
    sight: Sight,
    blocks: Blocks,
    sinks: Sinks | None = None,
) -> Output:
    """By the definition; the reference for the kernels."""
    named_query = hax.named(query, ("batch", "row", "kv_heads", "group", "head_dim"))
    Batch, Row, KVHeads, Group, HeadDim = named_query.axes
    named_key, named_value = (
        hax.named(x, ("batch", "slot", "kv_heads", "head_dim")) for x in (key, value)
    )
    ValueDim = named_value.resolve_axis("head_dim")
    first = sight.first(Row.size, blocks.window)
    if first is not None:
        first = jnp.broadcast_to(first, (Batch.size, Row.size))
        first = hax.named(first, (Batch, Row))
    attended = attend_by_definition(
        named_query,
        named_key,
        named_value,
        named_key.resolve_axis("slot"),
        HeadDim,
        out=(Batch, Row, KVHeads, Group, ValueDim),
        last=hax.named(jnp.asarray(sight.last(Row.size)), Row),
        first=first,
        scale=blocks.scale,
        softcap=blocks.softcap,
        sinks=None if sinks is None else hax.named(sinks, ("kv_heads", "group")),
    )
    return named(attended.array, "attention_output")


def _cudnn_forward(
    query: Query, key: Key, value: Value, sight: Sight, blocks: Blocks
) -> tuple[Output, LogSumExp]:
    width = max(key.shape[-1], value.shape[-1])
    # cuDNN has kernels for values of another width than keys, from Hopper on, for which
    # JAX (0.10.2, 0.12) checks the attached GPU, which may be none.
    queries = pad_axis(flatten_heads(query), -1, width)
    keys, values = (pad_axis(x, -1, width) for x in (key, value))
    output, lse = cudnn_attention(queries, keys, values, blocks.scale, blocks.window)
    heads = query.shape[:-1]
    value_dim = value.shape[-1]
    output = output[..., :value_dim].reshape(*heads, value_dim)
    lse = jnp.moveaxis(lse, 1, 2).reshape(heads)
    return output, lse


def _cudnn_backward(
    attended: Attended, cotangent: Output, blocks: Blocks
) -> tuple[Query, Key, Value]:
    query, key, value, _, _, output, lse = attended
    width = max(key.shape[-1], value.shape[-1])
    arrays = *map(flatten_heads, (query, output, cotangent)), key, value
    queries, output, cotangent, keys, values = (pad_axis(x, -1, width) for x in arrays)
    lse = jnp.moveaxis(lse.reshape(queries.shape[:-1]), 2, 1)
    of_query, of_key, of_value = cudnn_attention_gradients(
        (queries, keys, values),
        (output, lse),
        cotangent,
        blocks.scale,
        blocks.window,
    )
    head_dim = key.shape[-1]
    value_dim = value.shape[-1]
    of_query = of_query[..., :head_dim].reshape(query.shape)
    return of_query, of_key[..., :head_dim], of_value[..., :value_dim]


def _why_not_width(call: AttentionCall, widest: int) -> str | None:
    for width in (call.head_dim, call.value_dim):
        if width > widest or width % 8:
            return (
                f"it takes head widths that are multiples of 8 up to {widest}, not"
                f" {width}"
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
    if call.blocks.softcap is not None:
        return "it has no softcap of the scores"
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
    widest = max(call.head_dim, call.value_dim)
    if widest > 512:
        return (
            "its blocks fit a TPU's vector memory for heads up to 512 wide, not"
            f" {widest}"
        )
    strip = call.position // strips_among(call.among, call.position)
    sizes = strip, call.position, call.among * call.position, call.blocks.window
    size = splash_block_size(*sizes, widest * call.dtype.itemsize)
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
