"""Causal convolutions of a few taps over positions, by channel, on named axes."""

import functools
from collections.abc import Sequence

import haliax as hax
import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray
from jax import lax

from .._messages import axes_text
from ._backends import UnsupportedCallError
from ._named import FLOATS, INTEGERS, check_named, resolved_axis, wide_dtype
from ._positions import document_runs, with_positions_before
from .per_device import align_varying_axes, mesh_axes, per_device


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
    Pos = resolved_axis(Pos, "x", x)
    Tap = resolved_axis(Tap, "weight", weight)
    channels = _channels(x, weight, Tap)
    if any(axis.name == Pos.name for axis in weight.axes):
        raise ValueError(
            f"`weight` has {axes_text(weight.axes)}: {Pos.name!r} is the axis of"
            " positions, all of which have the same weights."
        )
    check_named("x", x, FLOATS, (*channels, Pos))
    batch = tuple(axis for axis in x.axes if axis not in (*channels, Pos))
    if documents is not None:
        check_named("documents", documents, INTEGERS, (Pos,), batch)
    if lengths is not None:
        check_named("lengths", lengths, INTEGERS, (), batch)
        if documents is not None:
            documents = documents.broadcast_axis(lengths.axes)
    kept = _with_window(x.axes, Pos, Tap)
    if window is None:
        window = hax.zeros(kept, x.dtype)
    check_named("window", window, FLOATS, kept, ())
    window = window.astype(x.dtype).rearrange(kept)
    if Pos.size == 0:
        return x, window
    names = Pos.name, Tap.name
    convolve = functools.partial(_convolve, names=names, context=mesh_axes(Pos))
    arrays = x, weight, documents, lengths, window
    return per_device(
        convolve, *arrays, over=(*batch, *channels, Pos), out=(x.axes, kept)
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
    check_named("x", x, FLOATS, ())
    Tap = resolved_axis(Tap, "weight", weight)
    check_named("x", x, FLOATS, _channels(x, weight, Tap))
    Kept = Tap.resize(Tap.size - 1)
    check_named("window", window, FLOATS, (*x.axes, Kept), ())
    wide = wide_dtype(x, weight)
    newest = x.broadcast_axis(Tap.resize(1))
    inputs = hax.concatenate(Tap.name, [window, newest])
    y = hax.dot(inputs.astype(wide), weight.astype(wide), axis=Tap)
    # The next position has no use for the oldest.
    after = inputs[Tap.name, 1:]
    after = after.rearrange(window.axes)
    return y.rearrange(x.axes).astype(x.dtype), after


def _channels(x: NamedArray, weight: NamedArray, Tap: Axis) -> tuple[Axis, ...]:
    check_named("weight", weight, FLOATS, (Tap,))
    if Tap.size == 0:
        raise ValueError(f"`weight` has {axes_text(weight.axes)}: there are no taps.")
    if any(axis.name == Tap.name for axis in x.axes):
        raise ValueError(
            f"`x` has {axes_text(x.axes)}: {Tap.name!r} is the axis of taps. Rename it"
            " in `weight`."
        )
    return tuple(axis for axis in weight.axes if axis != Tap)


def _with_window(axes: Sequence[Axis], Pos: Axis, Tap: Axis) -> tuple[Axis, ...]:
    Kept = Tap.resize(Tap.size - 1)
    return tuple(Kept if axis == Pos else axis for axis in axes)


def _convolve(
    x: NamedArray,
    weight: NamedArray,
    documents: NamedArray | None,
    lengths: NamedArray | None,
    window: NamedArray,
    *,
    names: tuple[str, str],
    context: tuple[str, ...],
) -> tuple[NamedArray, NamedArray]:
    """The output of one device's positions, and the window after all positions.

    The axes `context` of the mesh divide positions, if there are any.
    """
    arguments = x, weight, documents, lengths, window
    x, weight, documents, lengths, window = align_varying_axes(
        "short_convolution", arguments
    )
    Pos = x.resolve_axis(names[0])
    Tap = weight.resolve_axis(names[1])
    before = Tap.size - 1
    if context and Pos.size < before:
        raise UnsupportedCallError(
            f"Each device has {Pos.size} positions of `{Pos.name}`, and {Tap.size} taps"
            f" reach back {before}. Divide positions over fewer devices."
        )
    window = window.rename({Tap.name: Pos.name})
    inputs = with_positions_before(x, window, Pos, context)
    runs = None
    if documents is not None and before:
        runs = document_runs(documents, Pos, before, context)
    wide = wide_dtype(x, weight)
    y = hax.zeros(x.axes, wide)
    for tap in range(Tap.size):
        # The inputs that this tap is of, for all positions
        taken = slice(tap, tap + Pos.size)
        earlier = inputs[Pos.name, taken].astype(wide)
        factor = weight[Tap.name, tap].astype(wide)
        term = earlier * factor
        if runs is not None:
            # Inputs of another document are not the position's own.
            is_own = runs[Pos.name, taken] == runs[Pos.name, before:]
            term = hax.where(is_own, term, 0.0)
        y = y + term
    after = _window_after(inputs, runs, lengths, Pos, Tap, context)
    kept = _with_window(x.axes, Pos, Tap)
    return y.rearrange(x.axes).astype(x.dtype), after.rearrange(kept)


def _window_after(
    inputs: NamedArray,
    runs: NamedArray | None,
    lengths: NamedArray | None,
    Pos: Axis,
    Tap: Axis,
    context: tuple[str, ...],
) -> NamedArray:
    """The inputs before the end of each sequence that are of its last document.

    `inputs` and `runs` begin before the positions, by the size of the window.
    """
    Kept = Tap.resize(Tap.size - 1)
    devices = lax.axis_size(context) if context else 1
    ends = hax.named(jnp.int32(devices * Pos.size), ())
    if lengths is not None:
        ends = lengths.astype(jnp.int32)
    ends_here = None
    if context:
        device = lax.axis_index(context)
        ends = ends - device * Pos.size
        # A sequence of padding alone ends on the first device
        begins_before = (ends > 0) | (device == 0)
        ends_here = begins_before & (ends <= Pos.size)
        ends = hax.clip(ends, 0, Pos.size)
    # The window begins where the inputs do, if the sequence ends before its first
    # position; else so many entries later
    number = hax.arange(Kept, dtype=jnp.int32)
    entries = number.broadcast_axis(ends.axes) + ends
    window = _entries(inputs, Pos, entries)
    if runs is not None:
        last = entries[Kept.name, -1].broadcast_axis(Kept)
        run = _entries(runs, Pos, entries)
        last_run = _entries(runs, Pos, last)
        window = hax.where(run == last_run, window, 0.0)
    if ends_here is not None:
        window = hax.where(ends_here, window, 0.0)
        # Of the one device where the sequence ends, for all
        from_it = lax.psum(window.array, context)
        window = NamedArray(from_it, window.axes)
    return window


def _entries(x: NamedArray, Pos: Axis, entries: NamedArray) -> NamedArray:
    """Entries along the axis of positions; others along axes that both arrays have."""
    (Rows,) = (axis for axis in entries.axes if axis not in x.axes)
    order = tuple(Rows if axis.name == Pos.name else axis for axis in x.axes)
    shared = [axis for axis in order if axis in entries.axes]
    sizes = [axis.size if axis in shared else 1 for axis in order]
    index = entries.rearrange(shared)
    index = index.array.reshape(sizes)
    place = order.index(Rows)
    taken = jnp.take_along_axis(x.array, index, place)
    return NamedArray(taken, order)
