"""Linear attention with decays on named axes: the gated delta rule, of whole sequences
and of one position.

A sequence is cut into chunks, within which it is matrix products
(`_delta_chunks.py`), and chunks are taken in groups. The loop over groups has the
policy `"nested"`: for the backward pass it keeps about as many states as the square
root of the number of groups, and what a group computes exists for one group at a time.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import haliax as hax
import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray
from jax import lax
from jaxtyping import Array

from .. import scan
from .._messages import axes_text
from ._delta_chunks import delta_chunks
from ._named import FLOATS, INTEGERS, check_named
from ._padding import pad_axis
from ._positions import document_begins
from .per_device import align_varying_axes, mesh_axes, per_device

_CHUNK = 64
"""Positions in a chunk, a power of two. With more of them, products within a chunk are
larger, and fewer steps follow each other.
"""

_GROUP = 512
"""Chunks in a group, those of each head counted: their intermediates exist at once."""


class _Axes(NamedTuple):
    """The axes of a call, each once."""

    # The positions; none in a call for one position
    along: tuple[Axis, ...]
    Key: Axis
    Value: Axis
    # Of query, key and value
    batch: tuple[Axis, ...]
    # Of value alone: value heads that share a key head
    group: tuple[Axis, ...]

    @property
    def heads(self) -> tuple[Axis, ...]:
        return (*self.batch, *self.group)

    @property
    def state(self) -> tuple[Axis, ...]:
        return (*self.heads, self.Key, self.Value)


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
        lengths: integers, with axes of `key` that are no heads: positions from there on
            are padding, and do not change the state.
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
    and the intermediates of 1,024 positions. Where axes of more than one entry come
    before `Pos`, arrays are copied.

    On several devices: each computes the heads and batch entries that Haliax's axis
    mapping gives it.
    """
    axes = _axes_of(key, value, Key, Value, Pos)
    _check(axes, query, key, log_decay, beta)
    if documents is not None:
        check_named("documents", documents, INTEGERS, axes.along, axes.batch)
    if lengths is not None:
        check_named("lengths", lengths, INTEGERS, (), axes.batch)
    wide = _wide_dtype(query, key, value, log_decay, beta, state)
    if state is None:
        state = hax.zeros(axes.state, wide)
    check_named("state", state, FLOATS, axes.state, ())
    state = state.astype(wide).rearrange(axes.state)
    if value.size == 0 or axes.Key.size == 0:
        return hax.zeros_like(value), state
    names = axes.Key.name, axes.Value.name, axes.along[0].name
    return per_device(
        functools.partial(_attend, names=names, context=mesh_axes(axes.along[0])),
        *(query, key, value, log_decay, beta, documents, lengths, state),
        over=(*axes.heads, *axes.along),
        out=(value.axes, axes.state),
    )


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
    wide = _wide_dtype(query, key, value, log_decay, beta, state)
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
    Pos: AxisSelector | None = None,
) -> _Axes:
    """The axes of a call; without `Pos`, of one for one position."""
    check_named("key", key, FLOATS, ())
    check_named("value", value, FLOATS, ())
    Key = _resolved(Key, key)
    Value = _resolved(Value, value)
    along = () if Pos is None else (_resolved(Pos, key),)
    check_named("key", key, FLOATS, (*along, Key))
    batch = tuple(axis for axis in key.axes if axis not in (*along, Key))
    shared = (*batch, *along, Value)
    check_named("value", value, FLOATS, shared)
    group = tuple(axis for axis in value.axes if axis not in shared)
    in_both = {Key.name} & {axis.name for axis in value.axes}
    in_both |= {Value.name} & {axis.name for axis in key.axes}
    if in_both:
        raise ValueError(
            f"`key` has {axes_text(key.axes)}, and `value` {axes_text(value.axes)}: the"
            f" axis {in_both.pop()!r} of channels must be in one of them. Rename it in"
            " the other."
        )
    return _Axes(along, Key, Value, batch, group)


def _resolved(axis: AxisSelector, x: NamedArray) -> Axis:
    return axis if isinstance(axis, Axis) else x.resolve_axis(axis)


def _check(
    axes: _Axes,
    query: NamedArray,
    key: NamedArray,
    log_decay: NamedArray,
    beta: NamedArray | None,
) -> None:
    check_named("query", query, FLOATS, key.axes, ())
    check_named("log_decay", log_decay, FLOATS, axes.along, (*axes.heads, axes.Key))
    if beta is not None:
        check_named("beta", beta, FLOATS, axes.along, axes.heads)


def _wide_dtype(*arrays: NamedArray | None) -> Any:
    """The dtype of states and sums."""
    is_double = any(x is not None and x.dtype == jnp.float64 for x in arrays)
    return jnp.float64 if is_double else jnp.float32


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
    axes = _axes_of(key, value, *names)
    (Pos,) = axes.along
    begins = is_padding = None
    if documents is not None:
        begins = document_begins(documents, Pos, 1, context)
    if lengths is not None:
        first = lax.axis_index(context) * Pos.size if context else 0
        position = hax.arange(Pos, start=first).broadcast_axis(lengths.axes)
        is_padding = position >= lengths.astype(position.dtype)
    division = _Division.of(Pos, heads=math.prod(axis.size for axis in axes.heads))
    parts = []
    for x in (query, key, value, log_decay, beta, begins, is_padding):
        parts.append(None if x is None else division.cut(x))
    group = functools.partial(_attend_group, axes=axes, division=division)
    loop = scan(group, division.Groups, remat="nested")
    last = None
    if context:
        state, last = _states_by_device(loop, state, parts, axes, context)
    after, outputs = loop(state, *parts)
    return division.joined(outputs, value.axes), after if last is None else last


def _states_by_device(
    loop: Callable,
    state: NamedArray,
    parts: Sequence[NamedArray | None],
    axes: _Axes,
    context: tuple[str, ...],
) -> tuple[NamedArray, NamedArray]:
    """The state before this device's positions, and that after those of all devices.

    A device's positions map a state S to `A S + B`. With the identity beside a state of
    zeros, and values in the columns of the latter alone, the loop over them gives B and
    A. All devices gather those of all, which are small, and pass the state through.
    """
    Columns = axes.Value.resize(axes.Value.size + axes.Key.size)
    extended = jnp.eye(axes.Key.size, Columns.size, axes.Value.size, state.dtype)
    start = NamedArray(extended, (axes.Key, Columns)).broadcast_axis(axes.heads)
    _, *without_query = parts
    maps, _ = loop(
        start.rearrange((*axes.heads, axes.Key, Columns)), None, *without_query
    )
    gathered = lax.all_gather(maps.array, context)

    def through(state: Array, device_maps: Array) -> tuple[Array, Array]:
        added, factor = jnp.split(device_maps, [axes.Value.size], -1)
        return factor @ state + added, state

    last, states = lax.scan(through, state.array, gathered)
    own = lax.dynamic_index_in_dim(states, lax.axis_index(context), keepdims=False)
    return NamedArray(own, axes.state), NamedArray(last, axes.state)


class _Division(NamedTuple):
    """How positions are divided into groups of chunks."""

    Pos: Axis
    Groups: Axis
    # The positions of a group, named as `Pos`
    Own: Axis
    # Positions in a chunk
    chunk: int

    @staticmethod
    def of(Pos: Axis, heads: int) -> "_Division":
        chunk = min(_CHUNK, 1 << (Pos.size - 1).bit_length())
        chunks = -(-Pos.size // chunk)
        groups = -(-chunks // max(1, _GROUP // heads))
        own = -(-chunks // groups) * chunk
        # No axis of a caller has such a name
        Groups = Axis("groups of chunks", groups)
        return _Division(Pos, Groups, Pos.resize(own), chunk)

    def cut(self, x: NamedArray) -> NamedArray:
        """With groups; zeros may follow, which do not change the state."""
        position = x.axes.index(self.Pos)
        size = self.Groups.size * self.Own.size
        array = pad_axis(x.array, position, size)
        shape = (*array.shape[:position], self.Groups.size, self.Own.size)
        array = array.reshape(*shape, *array.shape[position + 1 :])
        return NamedArray(array, self._with_groups(x.axes))

    def joined(self, x: NamedArray, axes: Sequence[Axis]) -> NamedArray:
        """Without groups, with the axes in this order."""
        x = x.rearrange(self._with_groups(axes))
        x = x.flatten_axes((self.Groups, self.Own), self.Pos.name)
        return x[self.Pos.name, : self.Pos.size]

    def _with_groups(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        position = list(axes).index(self.Pos)
        own = self.Groups, self.Own
        return (*axes[:position], *own, *axes[position + 1 :])


def _attend_group(
    state: NamedArray,
    query: NamedArray | None,
    key: NamedArray,
    value: NamedArray,
    log_decay: NamedArray,
    beta: NamedArray | None,
    begins: NamedArray | None,
    is_padding: NamedArray | None,
    *,
    axes: _Axes,
    division: _Division,
) -> tuple[NamedArray, NamedArray | None]:
    """The state after a group of chunks, and the outputs of its positions, where there
    are queries.
    """
    wide = state.dtype
    _, Key, Value, batch, group = axes

    def chunks(x: NamedArray, *last: Axis, of_values: bool = False) -> Array:
        """`[chunk, head, group, token, last]`; the axes are 1 where the array has
        none.
        """
        of_group = group if of_values else ()
        order = (division.Own, *batch, *of_group, *last)
        array = x.broadcast_to(order).rearrange(order).array
        sizes = [
            math.prod(axis.size for axis in some) for some in (batch, of_group, last)
        ]
        array = array.reshape(-1, division.chunk, *sizes)
        return jnp.moveaxis(array, 1, 3)

    query_chunks = beta_chunks = None
    if query is not None:
        query_chunks = chunks(query, Key).astype(wide)
    key_chunks = chunks(key, Key).astype(wide)
    value_chunks = chunks(value, Value, of_values=True).astype(wide)
    channels = [axis for axis in log_decay.axes if axis == Key]
    decay_chunks = chunks(log_decay, *channels, of_values=True).astype(wide)
    if beta is not None:
        beta_chunks = chunks(beta, of_values=True).astype(wide)
    if begins is not None:
        # A decay of zero forgets all that was before, exactly
        decay_chunks = jnp.where(chunks(begins), -jnp.inf, decay_chunks)
    if is_padding is not None:
        decay_chunks = jnp.where(chunks(is_padding), 0.0, decay_chunks)
        key_chunks = jnp.where(chunks(is_padding), 0.0, key_chunks)

    by_head = key_chunks.shape[1], value_chunks.shape[2], Key.size, -1
    after, outputs = delta_chunks(
        state.array.reshape(by_head),
        *(query_chunks, key_chunks, value_chunks, decay_chunks, beta_chunks),
    )
    state = NamedArray(after.reshape(state.array.shape), state.axes)
    if outputs is None:
        return state, None
    order = (division.Own, *axes.heads, Value)
    outputs = jnp.moveaxis(outputs, 3, 1).reshape([axis.size for axis in order])
    outputs = NamedArray(outputs.astype(value.dtype), order)
    return state, outputs.rearrange(value.axes)
