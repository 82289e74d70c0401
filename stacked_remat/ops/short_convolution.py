"""Causal convolutions of a few taps over positions, by channel, on named axes."""

import functools
from collections.abc import Sequence
from typing import Any

import haliax as hax
import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray
from jax import lax

from ._named import FLOATS, INTEGERS, check_named
from .per_device import per_device


def short_convolution(
    x: NamedArray,
    weight: NamedArray,
    Pos: AxisSelector,
    Tap: AxisSelector,
    *,
    documents: NamedArray | None = None,
    lengths: NamedArray | None = None,
    window: NamedArray | None = None,
) -> tuple[NamedArray, NamedArray]:
    """A causal depthwise convolution over positions, and what the next call needs of
    this one.

    Output t of a channel is the sum over taps j of `weight[j] * x[t - (Tap.size - 1) +
    j]`, without inputs of other documents and before the first.

    Args:
        x: `[..., Pos, channels...]` in any order.
        weight: `[channels..., Tap]` in any order; the last tap is of the position
            itself.
        Pos: the axis of positions, or its name.
        Tap: the axis of taps, or its name.
        documents: integers `[..., Pos]` with axes of `x` that `weight` lacks; a
            document begins where they change. The first continues `window`.
        lengths: integers with axes of `x` that `weight` lacks: positions from there on
            are padding, which the returned window is without.
        window: the inputs before the first position, as it is returned; None for zeros.

    Returns:
        The output, with the axes and the dtype of `x`, and the last `Tap.size - 1`
        inputs of the last document, with zeros before it, in its dtype: `x`, with an
        axis named as `Tap` in place of `Pos`.

    Raises:
        ValueError: an argument does not fit.

    Cost: one read of `x` and one write of the output; sums are in float32, in float64
    if an argument is.
    """
    check_named("weight", weight, FLOATS, ())
    check_named("x", x, FLOATS, ())
    Pos = Pos if isinstance(Pos, Axis) else x.resolve_axis(Pos)
    Tap = Tap if isinstance(Tap, Axis) else weight.resolve_axis(Tap)
    channels = _channels(weight, Tap)
    check_named("x", x, FLOATS, (*channels, Pos))
    batch = tuple(axis for axis in x.axes if axis not in (*channels, Pos))
    if documents is not None:
        check_named("documents", documents, INTEGERS, (Pos,), batch)
    if lengths is not None:
        check_named("lengths", lengths, INTEGERS, (), batch)
    kept = _with_window(x.axes, Pos, Tap)
    if window is None:
        window = hax.zeros(kept, x.dtype)
    check_named("window", window, FLOATS, kept, ())
    window = window.astype(x.dtype).rearrange(kept)
    return per_device(
        functools.partial(_convolve, names=(Pos.name, Tap.name)),
        *(x, weight, documents, lengths, window),
        over=(*batch, *channels),
        out=(x.axes, kept),
    )


def short_convolution_step(
    x: NamedArray, weight: NamedArray, Tap: AxisSelector, window: NamedArray
) -> tuple[NamedArray, NamedArray]:
    """One position of `short_convolution`, from the inputs before it.

    Arguments and results are as there, without `Pos`; `window` may have its axes in any
    order.

    Raises:
        ValueError: an argument does not fit.
    """
    check_named("weight", weight, FLOATS, ())
    Tap = Tap if isinstance(Tap, Axis) else weight.resolve_axis(Tap)
    check_named("x", x, FLOATS, _channels(weight, Tap))
    Kept = Tap.resize(Tap.size - 1)
    check_named("window", window, FLOATS, (*x.axes, Kept), ())
    wide = _wide_dtype(x, weight)
    inputs = hax.concatenate(Tap.name, [window, x.broadcast_axis(Tap.resize(1))])
    y = hax.dot(inputs.astype(wide), weight.astype(wide), axis=Tap)
    after = inputs[Tap.name, 1:].rearrange(window.axes)
    return y.rearrange(x.axes).astype(x.dtype), after


def _channels(weight: NamedArray, Tap: Axis) -> tuple[Axis, ...]:
    check_named("weight", weight, FLOATS, (Tap,))
    return tuple(axis for axis in weight.axes if axis != Tap)


def _with_window(axes: Sequence[Axis], Pos: Axis, Tap: Axis) -> tuple[Axis, ...]:
    Kept = Tap.resize(Tap.size - 1)
    return tuple(Kept if axis == Pos else axis for axis in axes)


def _wide_dtype(*arrays: NamedArray) -> Any:
    is_double = any(x.dtype == jnp.float64 for x in arrays)
    return jnp.float64 if is_double else jnp.float32


def _convolve(
    x: NamedArray,
    weight: NamedArray,
    documents: NamedArray | None,
    lengths: NamedArray | None,
    window: NamedArray,
    *,
    names: tuple[str, str],
) -> tuple[NamedArray, NamedArray]:
    """The output of one device's part, and the window after it."""
    Pos = x.resolve_axis(names[0])
    Tap = weight.resolve_axis(names[1])
    before = Tap.size - 1
    Longer = Pos.resize(before + Pos.size)
    inputs = hax.concatenate(Longer, [window.rename({Tap.name: Pos.name}), x])
    reach = None if documents is None else _reach(documents, Pos, before)
    wide = _wide_dtype(x, weight)
    y = hax.zeros((), wide)
    for tap in range(Tap.size):
        back = before - tap
        shifted = inputs[Pos.name, tap : tap + Pos.size].astype(wide)
        if reach is not None:
            shifted = hax.where(reach >= back, shifted, 0.0)
        y = y + weight[Tap.name, tap].astype(wide) * shifted
    kept = _with_window(x.axes, Pos, Tap)
    after = _last_inputs(inputs, reach, lengths, Pos, Tap)
    return y.rearrange(x.axes).astype(x.dtype), after.rearrange(kept)


def _reach(documents: NamedArray, Pos: Axis, before: int) -> NamedArray:
    """How many positions before each are of its document, or `before` if that is less.

    To the first document belong those before the first position.
    """
    documents = documents.rearrange((..., Pos))
    changes = documents.array[..., 1:] != documents.array[..., :-1]
    begins = jnp.pad(changes, [(0, 0)] * (changes.ndim - 1) + [(1, 0)])
    position = jnp.arange(Pos.size, dtype=jnp.int32)
    position = position.reshape([1] * (changes.ndim - 1) + [-1])
    starts = lax.cummax(jnp.where(begins, position, -before), begins.ndim - 1)
    return NamedArray(jnp.minimum(position - starts, before), documents.axes)


def _last_inputs(
    inputs: NamedArray,
    reach: NamedArray | None,
    lengths: NamedArray | None,
    Pos: Axis,
    Tap: Axis,
) -> NamedArray:
    """The inputs before the end of each sequence that are of its last document."""
    Kept = Tap.resize(Tap.size - 1)
    if lengths is None:
        last = inputs[Pos.name, Pos.size :].rename({Pos.name: Tap.name})
        last_reach = None if reach is None else reach[Pos.name, Pos.size - 1]
    else:
        lengths = lengths.astype(jnp.int32)
        # The input of position i is entry `Kept.size + i`
        rows = hax.arange(Kept, dtype=jnp.int32).broadcast_axis(lengths.axes) + lengths
        last = _rows(inputs, inputs.resolve_axis(Pos.name), rows, Kept)
        last_reach = None
        if reach is not None:
            last_row = hax.maximum(lengths - 1, 0).broadcast_axis(Kept)
            last_reach = _rows(reach, Pos, last_row, Kept)
            # A sequence of padding alone keeps the window that it was given
            last_reach = hax.where(lengths > 0, last_reach, Kept.size)
    if last_reach is None:
        return last
    back = Kept.size - 1 - hax.arange(Kept, dtype=jnp.int32)
    is_own = last_reach.broadcast_axis(Kept) >= back
    return hax.where(is_own, last, 0.0)


def _rows(x: NamedArray, axis: Axis, rows: NamedArray, Rows: Axis) -> NamedArray:
    """The entries `rows` along an axis, which are others along other axes that both
    have.
    """
    order = [Rows if own == axis else own for own in x.axes]
    own = [one for one in order if one in rows.axes]
    shape = [one.size if one in own else 1 for one in order]
    index = rows.rearrange(own).array.reshape(shape)
    taken = jnp.take_along_axis(x.array, index, x.axes.index(axis))
    return NamedArray(taken, tuple(order))
