"""Causal grouped-query attention on named axes, of whole sequences and of new queries
to a cache.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, AxisSelector, NamedArray

from .._memory_spaces import platform
from .._messages import axes_text
from .._noted import DERIVATIVE_OF_RESULT, noted
from ._attention_backends import (
    BACKENDS,
    AttentionCall,
    attend_by_definition,
    exact_attention,
)
from ._attention_rule import (
    Blocks,
    Key,
    Output,
    Query,
    Sight,
    Value,
    attend_by,
    attend_in_context,
)
from ._backends import choose_backend, devices_left_to_the_compiler
from ._named import FLOATS, INTEGERS, check_named, named_as, resolved_axis
from .per_device import mesh_axes, per_device
from .softcap import check_softcap

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
    softcap: float | None = None,
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
        value: like `key`, but for the axis of a head's coordinates, which may have
            another size or name than `HeadDim`.
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
        softcap: scaled scores become `softcap * tanh(scores / softcap)`, a Python
            number (Gemma Team 2024, "Gemma 2"), before sinks and masks; None for no
            cap.
        backend: `"auto"` for the first of `"cudnn"`, `"tokamax"`, `"splash"` and
            `"blockwise"` that supports the call, or one of these or `"exact"` by name.

    Returns:
        Like `query`, in its axis order and dtype, with the coordinates of `value` in
        place of `HeadDim`. Scores and sums are in float32.

    Raises:
        ValueError: an argument does not fit, or the backend does not support the call.
        NotImplementedError: a derivative of the gradient, except for `"exact"`.

    Cost: `heads * Pos**2 * (HeadDim + ValueDim)` FLOPs forward, 2.5 times that
    backward, with `"splash"` and `"tokamax"` 3.5 times, less where documents or the
    window skip blocks (backward with `"tokamax"` where all are short); `"cudnn"` pads
    the narrower of keys and values. Memory proportional to `Pos`. `"exact"`: twice
    that, and `heads * Pos**2`.

    On several devices: if Haliax's axis mapping (`haliax.axis_mapping`) maps batch
    axes, `KVHeads` or `Pos` to axes of the mesh in use (`jax.set_mesh`), each device
    computes its own part; likewise inside `jax.shard_map(..., check_vma=False)`.
    Otherwise the compiler partitions the work, which splash and tokamax do not support.
    Where `Pos` is divided (context parallelism), each device gathers all keys and
    values, and the devices exchange queries, so that each has as many to see; all
    backends but cuDNN do that.
    """
    check_named("key", key, FLOATS, ())
    Pos, KVHeads, HeadDim = (
        resolved_axis(selector, "key", key) for selector in (Pos, KVHeads, HeadDim)
    )
    batch = tuple(axis for axis in key.axes if axis not in (Pos, KVHeads, HeadDim))
    check_named("key", key, FLOATS, (Pos, KVHeads, HeadDim), batch)
    check_named("query", query, FLOATS, key.axes)
    ValueDim = _value_axis(query, key, value, HeadDim)
    out = _with_values(query.axes, HeadDim, ValueDim)
    if documents is not None:
        check_named("documents", documents, INTEGERS, (Pos,), batch)
    if sinks is not None:
        heads = [axis for axis in query.axes if axis not in key.axes]
        check_named("sinks", sinks, FLOATS, (KVHeads, *heads), ())
    _check_options(window, scale, softcap)
    # Kernels have no grid for nothing.
    if query.size == 0 or ValueDim.size == 0:
        return hax.zeros(out, query.dtype)
    factor = HeadDim.size**-0.5 if scale is None else float(scale)
    if window is not None:
        # A wider one is the same, and tables of kernels are sized by it.
        window = min(int(window), Pos.size)
    if softcap is not None:
        softcap = float(softcap)
    # Of the device that the program is for, which may not be attached
    on_cpu = platform() == "cpu"
    size = _BLOCKS[on_cpu]
    blocks = Blocks(factor, size, window, heads_first=on_cpu, softcap=softcap)
    # By name: on a device the axes have the sizes of its part.
    names = Pos.name, KVHeads.name, HeadDim.name, ValueDim.name

    def of_all(*arguments: Any) -> NamedArray:
        attend = functools.partial(
            _attend, names=names, blocks=blocks, backend=backend, context=mesh_axes(Pos)
        )
        return per_device(attend, *arguments, over=(*batch, KVHeads, Pos), out=out)

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
    softcap: float | None = None,
) -> NamedArray:
    """Softmax attention to the slots of a cache up to each query's position; slot i
    holds position i.

    Equals `causal_attention` on the whole sequence, for the query's position; `window`,
    `sinks`, `scale`, `softcap` and what comes back are as there. It is the definition
    on any device: reading the cache is the limit. Slots after that position may hold
    anything finite.

    Args:
        query: `[..., KVHeads, HeadsPerKV..., HeadDim]` in any order; several positions
            have an axis of their own. Query heads along axes that `key` lacks share a
            key head.
        key: `[..., KVHeads, Slot, HeadDim]` in any order; `query` has all its axes but
            `Slot`.
        value: like `key`, but for the axis of a head's coordinates, which may have
            another size or name than `HeadDim`.
        Slot: the axis of positions in the cache, or its name.
        HeadDim: the axis that is contracted, or its name.
        positions: integers over some axes of `query`: the position of each query. Its
            key and value are in the cache already.

    Raises:
        ValueError: an argument does not fit.

    Cost: `2 * heads * Slot * (HeadDim + ValueDim)` FLOPs per query, masked slots
    included, and one read of the cache; memory for `heads * Slot` scores per query.
    Fastest where `key` and `value` end in `Slot` and a head's coordinates.
    """
    check_named("key", key, FLOATS, ())
    Slot, HeadDim = (
        resolved_axis(selector, "key", key) for selector in (Slot, HeadDim)
    )
    if any(axis.name == Slot.name for axis in query.axes):
        raise ValueError(
            f"query has the axis {Slot.name!r} of the cache's slots; rename its own"
            f" axis of positions, as in query.rename({{{Slot.name!r}:"
            " 'query_position'})."
        )
    check_named("key", key, FLOATS, (Slot, HeadDim))
    check_named("query", query, FLOATS, [axis for axis in key.axes if axis != Slot])
    ValueDim = _value_axis(query, key, value, HeadDim)
    own = [axis for axis in query.axes if axis != HeadDim]
    check_named("positions", positions, INTEGERS, (), own)
    if sinks is not None:
        check_named("sinks", sinks, FLOATS, (), own)
    _check_options(window, scale, softcap)
    last = positions.astype(jnp.int32)
    first = None
    if window is not None:
        # Before slot 0 nothing is hidden.
        first = last - (min(window, Slot.size) - 1)
    return attend_by_definition(
        query,
        key,
        value,
        Slot,
        HeadDim,
        out=_with_values(query.axes, HeadDim, ValueDim),
        last=last,
        first=first,
        scale=HeadDim.size**-0.5 if scale is None else scale,
        softcap=softcap,
        sinks=sinks,
    )


def _value_axis(
    query: NamedArray, key: NamedArray, value: NamedArray, HeadDim: Axis
) -> Axis:
    """The axis that `value` has in place of `HeadDim` of `key`."""
    shared = [axis for axis in key.axes if axis != HeadDim]
    check_named("value", value, FLOATS, shared)
    own = [axis for axis in value.axes if axis not in shared]
    if len(own) != 1:
        raise ValueError(
            f"`value` has {axes_text(value.axes)}; it must have {axes_text(shared)} and"
            " one axis of a head's coordinates, of any size."
        )
    (ValueDim,) = own
    if ValueDim.name in {axis.name for axis in query.axes} - {HeadDim.name}:
        raise ValueError(
            f"`value` has the axis {axes_text(own)}, whose name is that of an axis of"
            f" query heads. Rename it, as to {HeadDim.name!r}."
        )
    return ValueDim


def _with_values(
    axes: Sequence[Axis], HeadDim: Axis, ValueDim: Axis
) -> tuple[Axis, ...]:
    return tuple(ValueDim if axis == HeadDim else axis for axis in axes)


def _attend(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    documents: NamedArray | None,
    sinks: NamedArray | None,
    *,
    names: tuple[str, str, str, str],
    blocks: Blocks,
    backend: str,
    context: tuple[str, ...],
) -> NamedArray:
    """Attention of one device's positions, which the axes `context` of the mesh divide,
    if there are any.
    """
    *key_names, value_name = names
    own = Row, KVHeads, HeadDim = tuple(key.resolve_axis(name) for name in key_names)
    ValueDim = value.resolve_axis(value_name)
    batch = tuple(axis for axis in key.axes if axis not in own)
    # Of the query heads that share a key head
    group = tuple(axis for axis in query.axes if axis not in (*own, *batch))
    size = math.prod(axis.size for axis in batch)
    groups = math.prod(axis.size for axis in group)
    dtype = query.dtype
    if not dtype == key.dtype == value.dtype:
        # No kernel of half precision mixes dtypes.
        dtype = jnp.dtype(jnp.float32)
    call = AttentionCall(
        dtype=dtype,
        devices=devices_left_to_the_compiler(query.array),
        position=Row.size,
        head_dim=HeadDim.size,
        value_dim=ValueDim.size,
        has_documents=documents is not None,
        blocks=blocks,
        among=math.prod(map(jax.lax.axis_size, context)),
    )
    kind = "" if blocks.window is None else f"window {blocks.window}"
    kernel = choose_backend("attention", BACKENDS, backend, call, kind)
    # The order of kernels: `[batch, row, kv_heads, group, width]`
    heads = (*batch, Row, KVHeads, *group)
    out = (*heads, ValueDim)
    shape = (size, Row.size, KVHeads.size)

    def flat(x: NamedArray | None, axes: Sequence[Axis], *shape: int) -> Any:
        if x is None:
            return None
        named = x.broadcast_to(axes).rearrange(axes)
        return named.array.reshape(shape)

    query_array = flat(query, (*heads, HeadDim), *shape, groups, HeadDim.size)
    key_array = flat(key, (*batch, *own), *shape, HeadDim.size)
    value_axes = (*batch, Row, KVHeads, ValueDim)
    value_array = flat(value, value_axes, *shape, ValueDim.size)
    document_array = flat(documents, (*batch, Row), size, Row.size)
    sink_array = flat(sinks, (KVHeads, *group), KVHeads.size, groups)

    def attend(
        query: Query, key: Key, value: Value, sight: Sight, strips: int = 1
    ) -> Output:
        if kernel is None:
            return exact_attention(query, key, value, sight, blocks, sink_array)
        options = dataclasses.replace(blocks, strips=strips)
        return attend_by(kernel, query, key, value, sight, options, sink_array)

    arrays = query_array, key_array, value_array
    if context:
        attended = attend_in_context(attend, *arrays, document_array, context)
    else:
        attended = attend(*arrays, Sight.of(document_array))
    return named_as(attended, out).rearrange(
        _with_values(query.axes, HeadDim, ValueDim)
    )


def _check_options(window: Any, scale: Any, softcap: Any) -> None:
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
    check_softcap(softcap, "scores")
