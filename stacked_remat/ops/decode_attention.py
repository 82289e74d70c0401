"""Attention of new queries to the keys and values of a cache, on named axes.

One query takes so little arithmetic that reading the cache is the limit, so one plain implementation serves
every device.
"""

import haliax as hax
import haliax.nn as hnn
import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray, axis_name

from .._messages import axes_text
from .attention import check_axes


def decode_attention(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    Slot: AxisSelector,
    HeadDim: Axis,
    *,
    positions: NamedArray,
    window: int | None = None,
    sinks: NamedArray | None = None,
    scale: float | None = None,
) -> NamedArray:
    """Softmax attention to the slots of a cache up to each query's position; slot i holds position i.

    Equals `causal_attention` on the whole sequence, for the query's position. Slots after that position may
    hold anything finite.

    Args:
        query: `[..., KVHeads, HeadsPerKV..., HeadDim]` in any order; several positions have an axis of their
            own. Query heads along axes that `key` lacks share a key head.
        key: `[..., KVHeads, Slot, HeadDim]` in any order; `query` has all its axes but `Slot`.
        value: like `key`.
        Slot: the axis of positions in the cache.
        HeadDim: the axis that is contracted.
        positions: integers over some axes of `query`: the position of each query. Its key and value are in
            the cache already.
        window: how many slots a query sees, its own included; None for all up to it.
        sinks: a number for each query head, over axes of `query`; see `causal_attention`.
        scale: factor of the scores; `HeadDim.size ** -0.5` if not given.

    Returns:
        Like `query`, in its axis order and dtype. Scores and sums are in float32.

    Raises:
        ValueError: axes do not match, positions are not integers, or the window is below one.

    Cost: `4 * heads * Slot * HeadDim` FLOPs per query, masked slots included, and one read of the cache;
    memory for `heads * Slot` scores per query. Fastest where `key` and `value` end in `Slot, HeadDim`.
    """
    slot = axis_name(Slot)
    if window is not None and window < 1:
        raise ValueError(f"window must be a number of slots, at least 1; got {window}.")
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions must be integers; got {positions.dtype}.")
    if any(axis.name == slot for axis in query.axes):
        raise ValueError(
            f"query has the axis {slot!r} of the cache's slots; rename its own axis of positions, as in "
            f"query.rename({{{slot!r}: 'query_position'}})."
        )
    check_axes(query, key, value, {HeadDim.name}, {slot, HeadDim.name})
    for what, given in (("positions", positions), ("sinks", sinks)):
        if given is not None and not set(given.axes) <= set(query.axes) - {HeadDim}:
            raise ValueError(
                f"{what} have {axes_text(given.axes)}; they may have the axes of query, "
                f"{axes_text(query.axes)}, but not {HeadDim.name}."
            )
    slots = hax.arange(key.resolve_axis(slot))
    distance = positions.broadcast_axis(slots.axes[0]) - slots
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    scores = hax.dot(query, key, axis=HeadDim, preferred_element_type=jnp.float32)
    scores = scores * (HeadDim.size**-0.5 if scale is None else scale)
    scores = hax.where(visible, scores, float(jnp.finfo(jnp.float32).min))
    weights = hnn.softmax(scores, axis=slots.axes[0])
    if sinks is not None:
        total = hnn.logsumexp(scores, axis=slots.axes[0])
        weights = weights * hnn.sigmoid(total - sinks.astype(jnp.float32))
    weights = weights.astype(value.dtype)
    attended = hax.dot(weights, value, axis=slots.axes[0], preferred_element_type=jnp.float32)
    return attended.rearrange(query.axes).astype(query.dtype)
