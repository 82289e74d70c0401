"""Attention of new queries to keys and values that a cache holds, on named axes.

One query position of a sequence takes so little arithmetic that the plain form is limited by reading the
cache: there is one way to compute it, on every device.
"""

import haliax as hax
import haliax.nn as hnn
import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray, axis_name


def decode_attention(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    Slot: AxisSelector,
    HeadDim: Axis,
    *,
    positions: NamedArray,
    window: int | None = None,
    scale: float | None = None,
) -> NamedArray:
    """Softmax attention to the slots of a cache up to a position, where slot i holds what stands at i.

    With the keys of a whole sequence in the slots, a query at position i gets what `causal_attention` gives
    it. Slots after its position may hold anything finite: what a longer sequence left there, or zeros.

    Args:
        query: `[..., KVHeads, HeadsPerKV..., HeadDim]` in any order; it may have several positions under an
            axis of their own. Axes that `key` lacks share its heads.
        key: `[..., KVHeads, Slot, HeadDim]` in any order; the axes before `Slot` are those of `query` too.
        value: like `key`.
        Slot: the axis of positions in the cache.
        HeadDim: the axis that is contracted.
        positions: integers over some axes of `query`: where each query stands. Its own key and value are in
            the cache already.
        window: how many slots a query sees, its own included; None for all up to it.
        scale: factor of the scores; `HeadDim.size ** -0.5` if not given.

    Returns:
        Like `query`, in its axis order and dtype. Scores and sums are in float32.

    Raises:
        ValueError: axes that do not fit, positions that are not integers, a window below one.

    Cost: `4 * heads * Slot * HeadDim` FLOPs a query, masked slots among them, and one reading of the cache;
    memory for `heads * Slot` scores a query. Fastest where `key` and `value` end in `Slot, HeadDim`.
    """
    _check(query, key, value, axis_name(Slot), HeadDim, positions, window)
    slots = hax.arange(key.resolve_axis(axis_name(Slot)))
    distance = positions.broadcast_axis(slots.axes[0]) - slots
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    scores = hax.dot(query, key, axis=HeadDim, preferred_element_type=jnp.float32)
    scores = scores * (HeadDim.size**-0.5 if scale is None else scale)
    scores = hax.where(visible, scores, float(jnp.finfo(jnp.float32).min))
    weights = hnn.softmax(scores, axis=slots.axes[0]).astype(value.dtype)
    attended = hax.dot(weights, value, axis=slots.axes[0], preferred_element_type=jnp.float32)
    return attended.rearrange(query.axes).astype(query.dtype)


def _check(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    slot: str,
    HeadDim: Axis,
    positions: NamedArray,
    window: int | None,
) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window is a number of slots and at least 1; got {window}.")
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions are integers; these are {positions.dtype}.")
    for what, x, own in (("query", query, {HeadDim.name}), ("key", key, {slot, HeadDim.name})):
        if missing := own - {axis.name for axis in x.axes}:
            raise ValueError(f"{what} lacks the axes {sorted(missing)}; it has {_axes(x)}.")
    if set(key.axes) != set(value.axes):
        raise ValueError(f"key has {_axes(key)} and value has {_axes(value)}; they must be alike.")
    if any(axis.name == slot for axis in query.axes):
        raise ValueError(
            f"query has the axis {slot!r} of the cache's slots; rename its own axis of positions, as in "
            f"query.rename({{{slot!r}: 'query_position'}})."
        )
    strange = [axis for axis in key.axes if axis.name != slot and axis not in query.axes]
    if strange:
        raise ValueError(f"key has {_axes(key)}, which query with {_axes(query)} does not have in common.")
    if not set(positions.axes) <= set(query.axes) - {HeadDim}:
        raise ValueError(
            f"positions have {_axes(positions)}, and query {_axes(query)}; name each query's own."
        )


def _axes(x: NamedArray) -> str:
    return ", ".join(f"{axis.name}={axis.size}" for axis in x.axes) or "no axes"
