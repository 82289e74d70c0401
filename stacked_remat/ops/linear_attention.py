"""Linear attention with decays on named axes: the gated delta rule, of whole sequences
and of one position.

A sequence is cut into chunks, within which it is matrix products (`_delta_chunks.py`).
A loop goes over groups of chunks (`_linear_groups.py`).
"""

import functools

import haliax as hax
import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray
from jax import lax
from jaxtyping import Array

from .._messages import axes_text
from ._linear_groups import HeadAxes, Inputs, attend_in_groups
from ._named import FLOATS, INTEGERS, check_named, resolved_axis, wide_dtype
from ._positions import document_runs
from .per_device import align_varying_axes, mesh_axes, per_device


def linear_attention(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    log_decay: NamedArray,
    beta: NamedArray | None,
    Pos: AxisSelector,
    Key: AxisSelector,
    Value: AxisSelector,
    *,
    documents: NamedArray | None = None,
    lengths: NamedArray | None = None,
    state: NamedArray | None = None,
) -> tuple[NamedArray, NamedArray]:
    """Linear attention with decays and the delta rule (Yang et al. 2024, "Gated Delta
    Networks", arXiv:2412.06464).

    For each head it equals

    ```python
    for t in range(Pos.size):
        state = exp(log_decay[t])[..., None] * state  # [Key, Value]
        update = beta[t] * (value[t] - key[t] @ state)  # value[t] without beta
        state = state + outer(key[t], update)
        output[t] = query[t] @ state
    ```

    Args:
        query: `[..., Pos, Key]`, with the axes of `key` in any order; scaled and
            normalized by the caller.
        key: `[..., Pos, Key]` in any order.
        value: `[..., Pos, Value]` in any order, with the other axes of `key` too. Value
            heads along axes that `key` lacks share a key head.
        log_decay: at most 0, `[..., Pos]` by head, or `[..., Pos, Key]` by channel of
            the keys (Kimi Team 2025, "Kimi Linear", arXiv:2510.26692); its other axes
            are some of those of `value`.
        beta: the strength of the delta rule, `[..., Pos]` with axes of `value`; None to
            erase nothing (Mamba-2, arXiv:2405.21060; lightning attention).
        Pos: the axis of positions, or its name.
        Key: the axis of channels of queries and keys, or its name.
        Value: the axis of channels of values, or its name.
        documents: integers `[..., Pos]` with axes of `key`; the state begins anew where
            they change. The first document continues `state`.
        lengths: integers with batch axes of `key`, such as `[Batch]`: positions from
            there on are padding, and do not change the state.
        state: that before the first position, `[..., Key, Value]` with the other axes
            of `value`; None for zeros.

    Returns:
        The output, with the axes and the dtype of `value`, and the state after the last
        position. States, sums of decays and products are in float32; in float64 if an
        argument is.

    Raises:
        ValueError: an argument does not fit.

    Cost: `_delta_chunks.py` counts the FLOPs; none grow with the square of `Pos`. For
    the gradient the products are computed once more, those of states twice. Memory
    beside arguments, results and their gradients: about `2 * sqrt(Pos / 1024)` states,
    and the intermediates of 1,024 positions. Arrays are copied where axes of more
    than one entry come before `Pos`, or where groups of chunks do not divide it.

    On several devices: each computes the heads, the batch entries and the positions
    that Haliax's axis mapping gives it. Where positions are divided, a device goes
    through its own twice, first without queries, and gathers `Key * (Key + Value)`
    numbers of each head from all devices.
    """
    check_named("key", key, FLOATS, ())
    Pos = resolved_axis(Pos, "key", key)
    axes = _axes_of(key, value, Key, Value, Pos)
    _check(axes, query, key, log_decay, beta, Pos)
    if documents is not None:
        check_named("documents", documents, INTEGERS, (Pos,), axes.batch)
    if lengths is not None:
        check_named("lengths", lengths, INTEGERS, (), axes.batch)
    wide = wide_dtype(query, key, value, log_decay, beta, state)
    if state is None:
        state = hax.zeros(axes.state, wide)
    check_named("state", state, FLOATS, axes.state, ())
    state = state.astype(wide).rearrange(axes.state)
    if value.size == 0 or axes.Key.size == 0:
        return hax.zeros_like(value), state
    names = axes.Key.name, axes.Value.name, Pos.name
    attend = functools.partial(_attend, names=names, context=mesh_axes(Pos))
    arrays = query, key, value, log_decay, beta, documents, lengths, state
    over = (*axes.heads, Pos)
    return per_device(attend, *arrays, over=over, out=(value.axes, axes.state))


def linear_attention_step(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    log_decay: NamedArray,
    beta: NamedArray | None,
    Key: AxisSelector,
    Value: AxisSelector,
    state: NamedArray,
) -> tuple[NamedArray, NamedArray]:
    """One position of `linear_attention`, from the state before it.

    Arguments and results are as there, without `Pos`.

    Raises:
        ValueError: an argument does not fit.

    Cost: `6 * heads * Key * Value` FLOPs; it reads and writes the state once.
    """
    axes = _axes_of(key, value, Key, Value)
    _check(axes, query, key, log_decay, beta)
    check_named("state", state, FLOATS, axes.state, ())
    wide = wide_dtype(query, key, value, log_decay, beta, state)
    key = key.astype(wide)
    state = state.astype(wide) * hax.exp(log_decay.astype(wide))
    update = value.astype(wide)
    if beta is not None:
        update = update - hax.dot(state, key, axis=axes.Key)
        update = update * beta.astype(wide)
    state = state + hax.dot(key, update, axis=())
    output = hax.dot(state, query.astype(wide), axis=axes.Key)
    output = output.rearrange(value.axes).astype(value.dtype)
    return output, state.rearrange(axes.state)


def _axes_of(
    key: NamedArray,
    value: NamedArray,
    Key: AxisSelector,
    Value: AxisSelector,
    *positions: Axis,
) -> HeadAxes:
    """The axes of a call, which has an axis of positions or none."""
    check_named("key", key, FLOATS, ())
    check_named("value", value, FLOATS, ())
    Key = resolved_axis(Key, "key", key)
    Value = resolved_axis(Value, "value", value)
    check_named("key", key, FLOATS, (*positions, Key))
    batch = tuple(axis for axis in key.axes if axis not in (*positions, Key))
    shared = (*batch, *positions, Value)
    check_named("value", value, FLOATS, shared)
    group = tuple(axis for axis in value.axes if axis not in shared)
    for channels, other in ((Key, value), (Value, key)):
        if channels.name in {axis.name for axis in other.axes}:
            raise ValueError(
                f"`key` has {axes_text(key.axes)}, and `value` {axes_text(value.axes)}:"
                f" the axis {channels.name!r} of channels must be in one of them."
                " Rename it in the other."
            )
    return HeadAxes(Key, Value, batch, group)


def _check(
    axes: HeadAxes,
    query: NamedArray,
    key: NamedArray,
    log_decay: NamedArray,
    beta: NamedArray | None,
    *positions: Axis,
) -> None:
    check_named("query", query, FLOATS, key.axes, ())
    check_named("log_decay", log_decay, FLOATS, positions, (*axes.heads, axes.Key))
    if beta is not None:
        check_named("beta", beta, FLOATS, positions, axes.heads)


def _attend(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    log_decay: NamedArray,
    beta: NamedArray | None,
    documents: NamedArray | None,
    lengths: NamedArray | None,
    state: NamedArray,
    *,
    names: tuple[str, str, str],
    context: tuple[str, ...],
) -> tuple[NamedArray, NamedArray]:
    """The output of one device's positions, and the state after all positions.

    The axes `context` of the mesh divide positions, if there are any.
    """
    arguments = query, key, value, log_decay, beta, documents, lengths, state
    query, key, value, log_decay, beta, documents, lengths, state = align_varying_axes(
        "linear_attention", arguments
    )
    Pos = key.resolve_axis(names[2])
    axes = _axes_of(key, value, names[0], names[1], Pos)
    begins = is_padding = None
    if documents is not None:
        runs = document_runs(documents, Pos, 1, context)
        begins = runs[Pos.name, 1:] > runs[Pos.name, :-1]
    if lengths is not None:
        position = hax.arange(Pos, dtype=jnp.int32)
        if context:
            position = position + lax.axis_index(context) * Pos.size
        position = position.broadcast_axis(lengths.axes)
        is_padding = position >= lengths.astype(jnp.int32)
    inputs = Inputs(query, key, value, log_decay, beta, begins, is_padding)
    last = None
    if context:
        state, last = _states_by_device(state, inputs, Pos, axes, context)
    after, output = attend_in_groups(state, inputs, Pos, axes)
    assert output is not None  # there are queries
    return output, after if last is None else last


def _states_by_device(
    state: NamedArray,
    inputs: Inputs,
    Pos: Axis,
    axes: HeadAxes,
    context: tuple[str, ...],
) -> tuple[NamedArray, NamedArray]:
    """The state before this device's positions, and that after those of all devices.

    A device's positions map a state S to `A S + B`. A loop over them finds both: it
    starts with zeros, which become B, and beside them the identity, which becomes A.
    All devices gather the maps of all, and apply one after the other.
    """
    width = axes.Value.size
    Columns = axes.Value.resize(width + axes.Key.size)
    zeros_and_identity = jnp.eye(axes.Key.size, Columns.size, width, state.dtype)
    start = NamedArray(zeros_and_identity, (axes.Key, Columns))
    start = start.broadcast_to((*axes.heads, axes.Key, Columns))
    without_query = inputs._replace(query=None)
    maps, _ = attend_in_groups(start, without_query, Pos, axes)

    def apply_map(state: Array, device_map: Array) -> tuple[Array, Array]:
        added = device_map[..., :width]
        factor = device_map[..., width:]
        return factor @ state + added, state

    gathered = lax.all_gather(maps.array, context)
    last, before = lax.scan(apply_map, state.array, gathered)
    device = lax.axis_index(context)
    own = lax.dynamic_index_in_dim(before, device, keepdims=False)
    return NamedArray(own, axes.state), NamedArray(last, axes.state)
