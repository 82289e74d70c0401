"""Causal grouped-query attention on named axes, of whole sequences and of new queries
to a cache.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, AxisSelector, NamedArray

from .._noted import DERIVATIVE_OF_RESULT, noted
from .._placement import platform
from ._attention_backends import (
    BACKENDS,
    AttentionCall,
    attend_by_definition,
    exact_attention,
)
from ._attention_rule import Blocks, Key, Query, Sight, attend_by, attend_in_context
from ._backends import choose_backend, devices_left_to_the_compiler
from ._named import FLOATS, INTEGERS, check_named
from .per_device import mesh_axes, per_device

_BLOCKS = (512, 256)
"""Positions in a block of the loop, and on a CPU, so that scores stay in its caches."""


def causal_attention(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    Pos: AxisSelector,
    KVHeads: AxisSelector,
    HeadDim: AxisSelector,
    *,
    documents: NamedArray | None = None,
    window: int | None = None,
    sinks: NamedArray | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> NamedArray:
    """Softmax attention of every position to itself and those before it (Ainslie et al.
    2023 for groups).

    Names for remat policies: `attention_output` and `attention_lse` (float32, a number
    per head and position), which `"exact"` lacks. With both saved, the backward pass of
    a checkpointed layer does not recompute attention.

    Args:
        query: `[..., Pos, KVHeads, HeadsPerKV..., HeadDim]` in any order: the axes that
            `key` lacks are query heads that share a key head.
        key: `[..., Pos, KVHeads, HeadDim]`.
        value: like `key`.
        Pos: the axis of positions, or its name.
        KVHeads: the axis of key and value heads, or its name.
        HeadDim: the axis that is contracted, or its name.
        documents: integers `[..., Pos]`; consecutive positions with the same are a
            document, and a position sees no other. None for one document.
        window: how many positions a query sees, itself included; None for all before
            it.
        sinks: a number for each query head, `[KVHeads, HeadsPerKV...]`, whose
            exponential is added to the sum of those of the scores (Xiao et al. 2023,
            "attention sinks", with a learnt score and no value).
        scale: factor of the scores, a Python number; `HeadDim.size ** -0.5` if not
            given. Multiply `query` by a factor that is learnt.
        backend: `"auto"` for the first of `"cudnn"`, `"tokamax"`, `"splash"` and
            `"blockwise"` that supports the call, or one of these or `"exact"` by name.

    Returns:
        Like `query`, in its axis order and dtype. Scores and sums are in float32.

    Raises:
        ValueError: an argument does not fit, or the backend does not support the call.
        NotImplementedError: a derivative of the gradient, except for `"exact"`.

    Cost: `2 * heads * Pos**2 * HeadDim` FLOPs forward, 2.5 times that backward, with
    `"splash"` and `"tokamax"` 3.5 times, less where documents or the window skip blocks
    (backward with `"tokamax"` where all are short); memory proportional to `Pos`.
    `"exact"`: twice that, and `heads * Pos**2`.

    On several devices: if Haliax's axis mapping (`haliax.axis_mapping`) maps batch
    axes, `KVHeads` or `Pos` to axes of the mesh in use (`jax.set_mesh`), each device
    computes its own part; likewise inside `jax.shard_map(..., check_vma=False)`.
    Otherwise the compiler partitions the work, which splash and tokamax do not support.
    Where `Pos` is divided (context parallelism), each device gathers all keys and
    values, and the devices exchange queries, so that each has as many to see; all
    backends but cuDNN do that.
    """
    check_named("key", key, FLOATS, ())
    named = (
        one if isinstance(one, Axis) else key.resolve_axis(one)
        for one in (Pos, KVHeads, HeadDim)
    )
    Pos, KVHeads, HeadDim = named
    batch = tuple(axis for axis in key.axes if axis not in (Pos, KVHeads, HeadDim))
    check_named("key", key, FLOATS, (Pos, KVHeads, HeadDim), batch)
    check_named("value", value, FLOATS, key.axes, ())
    check_named("query", query, FLOATS, key.axes)
    if documents is not None:
        check_named("documents", documents, INTEGERS, (Pos,), batch)
    if sinks is not None:
        heads = [axis for axis in query.axes if axis not in key.axes]
        check_named("sinks", sinks, FLOATS, (KVHeads, *heads), ())
    _check_options(window, scale)
    if query.size == 0:
        return query
    factor = HeadDim.size**-0.5 if scale is None else float(scale)
    window = None if window is None else min(int(window), Pos.size)
    blocks = Blocks(
        factor, _BLOCKS[platform() == "cpu"], window, heads_first=platform() == "cpu"
    )
    names = Pos.name, KVHeads.name, HeadDim.name

    def of_all(*arguments: Any) -> NamedArray:
        attend = functools.partial(
            _attend, names=names, blocks=blocks, backend=backend, context=mesh_axes(Pos)
        )
        return per_device(
            attend, *arguments, over=(*batch, KVHeads, Pos), out=query.axes
        )

    return noted(DERIVATIVE_OF_RESULT, of_all)(query, key, value, documents, sinks)


def decode_attention(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    Slot: AxisSelector,
    HeadDim: AxisSelector,
    *,
    positions: NamedArray,
    window: int | None = None,
    sinks: NamedArray | None = None,
    scale: float | None = None,
) -> NamedArray:
    """Softmax attention to the slots of a cache up to each query's position; slot i
    holds position i.

    Equals `causal_attention` on the whole sequence, for the query's position; `window`,
    `sinks`, `scale` and what comes back are as there. It is the definition on any
    device: reading the cache is the limit. Slots after that position may hold anything
    finite.

    Args:
        query: `[..., KVHeads, HeadsPerKV..., HeadDim]` in any order; several positions
            have an axis of their own. Query heads along axes that `key` lacks share a
            key head.
        key: `[..., KVHeads, Slot, HeadDim]` in any order; `query` has all its axes but
            `Slot`.
        value: like `key`.
        Slot: the axis of positions in the cache, or its name.
        HeadDim: the axis that is contracted, or its name.
        positions: integers over some axes of `query`: the position of each query. Its
            key and value are in the cache already.

    Raises:
        ValueError: an argument does not fit.

    Cost: `4 * heads * Slot * HeadDim` FLOPs per query, masked slots included, and one
    read of the cache; memory for `heads * Slot` scores per query. Fastest where `key`
    and `value` end in `Slot, HeadDim`.
    """
    check_named("key", key, FLOATS, ())
    Slot, HeadDim = (
        one if isinstance(one, Axis) else key.resolve_axis(one)
        for one in (Slot, HeadDim)
    )
    if any(axis.name == Slot.name for axis in query.axes):
        raise ValueError(
            f"query has the axis {Slot.name!r} of the cache's slots; rename its own"
            f" axis of positions, as in query.rename({{{Slot.name!r}:"
            " 'query_position'})."
        )
    check_named("key", key, FLOATS, (Slot, HeadDim))
    check_named("value", value, FLOATS, key.axes, ())
    check_named("query", query, FLOATS, [axis for axis in key.axes if axis != Slot])
    own = [axis for axis in query.axes if axis != HeadDim]
    check_named("positions", positions, INTEGERS, (), own)
    if sinks is not None:
        check_named("sinks", sinks, FLOATS, (), own)
    _check_options(window, scale)
    last = positions.astype(jnp.int32)
    return attend_by_definition(
        query,
        key,
        value,
        Slot,
        HeadDim,
        last=last,
        first=None if window is None else last - (min(window, Slot.size) - 1),
        scale=HeadDim.size**-0.5 if scale is None else scale,
        sinks=sinks,
    )


def _attend(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    documents: NamedArray | None,
    sinks: NamedArray | None,
    *,
    names: tuple[str, str, str],
    blocks: Blocks,
    backend: str,
    context: tuple[str, ...],
) -> NamedArray:
    """Attention of one device's positions, which the axes `context` of the mesh divide,
    if there are any.
    """
    own = Row, KVHeads, HeadDim = tuple(key.resolve_axis(name) for name in names)
    batch = tuple(axis for axis in key.axes if axis not in own)
    group = tuple(axis for axis in query.axes if axis not in (*own, *batch))
    size, groups = (math.prod(axis.size for axis in axes) for axes in (batch, group))
    call = AttentionCall(
        dtype=(
            query.dtype
            if query.dtype == key.dtype == value.dtype
            else jnp.dtype(jnp.float32)
        ),
        devices=devices_left_to_the_compiler(query.array),
        position=Row.size,
        head_dim=HeadDim.size,
        has_documents=documents is not None,
        blocks=blocks,
        among=math.prod(map(jax.lax.axis_size, context)),
    )
    kind = "" if blocks.window is None else f"window {blocks.window}"
    kernel = choose_backend("attention", BACKENDS, backend, call, kind)
    whole, shape = (
        (*batch, Row, KVHeads, *group, HeadDim),
        (size, Row.size, KVHeads.size),
    )

    def flat(x: NamedArray | None, axes: Sequence[Axis], *shape: int) -> Any:
        return (
            None
            if x is None
            else x.broadcast_to(axes).rearrange(axes).array.reshape(shape)
        )

    query_array = flat(query, whole, *shape, groups, HeadDim.size)
    key_array, value_array = (
        flat(x, (*batch, *own), *shape, HeadDim.size) for x in (key, value)
    )
    document_array = flat(documents, (*batch, Row), size, Row.size)
    sink_array = flat(sinks, (KVHeads, *group), KVHeads.size, groups)

    def attend(
        query: Query, key: Key, value: Key, sight: Sight, strips: int = 1
    ) -> Query:
        if kernel is None:
            return exact_attention(query, key, value, sight, blocks, sink_array)
        options = dataclasses.replace(blocks, strips=strips)
        return attend_by(kernel, query, key, value, sight, options, sink_array)

    arrays = query_array, key_array, value_array
    if context:
        attended = attend_in_context(attend, *arrays, document_array, context)
    else:
        attended = attend(*arrays, Sight.of(document_array))
    return NamedArray(attended.reshape([axis.size for axis in whole]), whole).rearrange(
        query.axes
    )


def _check_options(window: Any, scale: Any) -> None:
    if window is not None and (
        window is True or not isinstance(window, int | np.integer) or window < 1
    ):
        raise ValueError(
            f"window must be a number of positions, at least 1; got {window!r}."
        )
    if scale is not None and not isinstance(scale, int | float | np.number):
        raise ValueError(
            "scale must be a number; multiply query by one that is learnt. Got"
            f" {scale!r}."
        )
