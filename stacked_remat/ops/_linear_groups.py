"""Linear attention of consecutive positions: a loop over groups of chunks.

What a group computes exists for one group at a time. The loop has the policy
`"nested"`, so for the backward pass it keeps about as many states as the square root of
the number of groups.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.util import is_named_array
from jaxtyping import Array, Shaped

from .. import scan
from ._delta_chunks import delta_chunks
from ._padding import pad_axis

_CHUNK = 64
"""Positions in a chunk, a power of two. With more of them, products within a chunk are
larger, and fewer steps follow each other.
"""

_GROUP = 512
"""Chunks in a group, those of each head counted: their intermediates exist at once."""


class HeadAxes(NamedTuple):
    """The axes of queries, keys and values but that of positions, each once."""

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


class Inputs(NamedTuple):
    """Arrays with an axis of positions."""

    # None where no outputs are wanted
    query: NamedArray | None
    key: NamedArray
    value: NamedArray
    log_decay: NamedArray
    # None where nothing is erased
    beta: NamedArray | None
    # Whether a position is the first of a document; None if none is
    begins: NamedArray | None
    # Whether it does not change the state; None if each does
    is_padding: NamedArray | None


def attend_in_groups(
    state: NamedArray, inputs: Inputs, Pos: Axis, axes: HeadAxes
) -> tuple[NamedArray, NamedArray | None]:
    """The state after all positions, and their outputs.

    The state is `axes.state`, and may have columns after those of values, in which
    nothing is written.
    """
    division = _Division.of(Pos, _size(axes.heads))
    groups = jax.tree.map(division.cut, inputs, is_leaf=is_named_array)
    attend = functools.partial(_attend_group, axes=axes, division=division)
    loop = scan(attend, division.Groups, remat="nested")
    state, outputs = loop(state, groups)
    if outputs is None:
        return state, None
    return state, division.joined(outputs, inputs.value.axes)


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
        # A sequence that is shorter than a chunk is one
        power_of_two = 1 << (Pos.size - 1).bit_length()
        chunk = min(_CHUNK, power_of_two)
        chunks = math.ceil(Pos.size / chunk)
        groups = math.ceil(chunks / max(1, _GROUP // heads))
        chunks_of_each = math.ceil(chunks / groups)
        own = chunks_of_each * chunk
        # No axis of a caller has such a name
        Groups = Axis("groups of chunks", groups)
        return _Division(Pos, Groups, Pos.resize(own), chunk)

    def cut(self, x: NamedArray) -> NamedArray:
        """With an axis of groups; zeros may follow, which do not change the state."""
        size = self.Groups.size * self.Own.size
        place = x.axes.index(self.Pos)
        array = pad_axis(x.array, place, size)
        axes = self._with_groups(x.axes)
        shape = [axis.size for axis in axes]
        return NamedArray(array.reshape(shape), axes)

    def joined(self, x: NamedArray, axes: Sequence[Axis]) -> NamedArray:
        """Without the axis of groups, with the axes in this order."""
        x = x.rearrange(self._with_groups(axes))
        x = x.flatten_axes((self.Groups, self.Own), self.Pos.name)
        return x[self.Pos.name, : self.Pos.size]

    def _with_groups(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        divided = []
        for axis in axes:
            divided += [self.Groups, self.Own] if axis == self.Pos else [axis]
        return tuple(divided)


def _attend_group(
    state: NamedArray, inputs: Inputs, *, axes: HeadAxes, division: _Division
) -> tuple[NamedArray, NamedArray | None]:
    """The state after a group of chunks, and the outputs of its positions."""
    wide = state.dtype
    key_chunks = functools.partial(_chunks, axes=axes, division=division)
    value_chunks = functools.partial(key_chunks, of_values=True)

    query = beta = None
    if inputs.query is not None:
        query = key_chunks(inputs.query, axes.Key).astype(wide)
    key = key_chunks(inputs.key, axes.Key).astype(wide)
    value = value_chunks(inputs.value, axes.Value).astype(wide)
    by_channel = [axis for axis in inputs.log_decay.axes if axis == axes.Key]
    log_decay = value_chunks(inputs.log_decay, *by_channel).astype(wide)
    if inputs.beta is not None:
        beta = value_chunks(inputs.beta).astype(wide)
    if inputs.begins is not None:
        # A decay of zero forgets all that was before, exactly
        log_decay = jnp.where(key_chunks(inputs.begins), -jnp.inf, log_decay)
    if inputs.is_padding is not None:
        is_padding = key_chunks(inputs.is_padding)
        log_decay = jnp.where(is_padding, 0.0, log_decay)
        key = jnp.where(is_padding, 0.0, key)

    of_heads = key.shape[1], value.shape[2], axes.Key.size, -1
    before = state.array.reshape(of_heads)
    after, outputs = delta_chunks(before, query, key, value, log_decay, beta)
    state = NamedArray(after.reshape(state.array.shape), state.axes)
    if outputs is None:
        return state, None
    order = (division.Own, *axes.heads, axes.Value)
    shape = [axis.size for axis in order]
    # Tokens after their chunk: the positions of the group
    by_position = jnp.moveaxis(outputs, 3, 1).reshape(shape)
    named = NamedArray(by_position.astype(inputs.value.dtype), order)
    return state, named.rearrange(inputs.value.axes)


def _chunks(
    x: NamedArray,
    *last: Axis,
    axes: HeadAxes,
    division: _Division,
    of_values: bool = False,
) -> Shaped[Array, "chunk head group token last"]:
    """A group's part of an array, in chunks; of keys with one head in a group."""
    group = axes.group if of_values else ()
    order = (division.Own, *axes.batch, *group, *last)
    whole = x.broadcast_to(order).rearrange(order)
    sizes = _size(axes.batch), _size(group), _size(last)
    by_chunk = whole.array.reshape(-1, division.chunk, *sizes)
    return jnp.moveaxis(by_chunk, 1, 3)


def _size(axes: Iterable[Axis]) -> int:
    return math.prod(axis.size for axis in axes)
