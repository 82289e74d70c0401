"""Attention of positions that are divided over devices (context parallelism).

Every device gathers all keys and values: with grouped queries they are small, and they exist for one layer at
a time. Or they stay divided too, and the devices pass them on in a ring. Queries stay divided. Late positions
see more keys than early ones, so the devices exchange strips first: each gets an equal part of every device's
positions, and has about as much to compute (Brandon et al. 2023, "Striped Attention").
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._attention_blockwise import Blocks, Documents, Key, Query, Rows, Sinks


def attend_in_context(
    attend: Callable[..., Query],
    query: Query,
    key: Key,
    value: Key,
    documents: Documents | None,
    blocks: Blocks,
    sinks: Sinks | None,
    context: tuple[str, ...],
    ring: bool = False,
) -> Query:
    """Attention of one device's positions to those of all devices along `context`.

    Args:
        attend: of a backend; takes the other arguments up to `context`, and the positions of the queries.
        query: this and the others up to `sinks` as in `_attention_blockwise.py`, of this device's positions.
        context: the axes of the mesh over which positions are divided; without any this is `attend`.
        ring: whether keys and values are passed on rather than gathered.
    """
    if not context:
        return attend(query, key, value, documents, blocks, sinks, None)
    exchange, rows = _exchange(query.shape[1], context)
    if ring:
        key, value, documents = jax.tree.map(exchange, (key, value, documents))
        # In the mesh's order, which newer JAX asks for: keys come with their positions, so any order will do.
        names = jax.sharding.get_abstract_mesh().axis_names
        blocks = dataclasses.replace(blocks, ring=tuple(name for name in names if name in context))
    else:
        gather = functools.partial(lax.all_gather, axis_name=context, axis=1, tiled=True)
        key, value, documents = jax.tree.map(gather, (key, value, documents))
    return exchange(attend(exchange(query), key, value, documents, blocks, sinks, rows))


def _exchange(length: int, context: tuple[str, ...]) -> tuple[Callable[[Array], Array], Rows]:
    """Exchanges strips of arrays `[batch, position, ...]`, and the positions that a device has then.

    Strip j of device i becomes strip i of device j; done twice, nothing has changed. Where strips would be
    uneven nothing is exchanged.
    """
    device, devices = lax.axis_index(context), lax.axis_size(context)
    if length % devices:
        return lambda x: x, device * length + jnp.arange(length, dtype=jnp.int32)
    exchange = functools.partial(lax.all_to_all, axis_name=context, split_axis=1, concat_axis=1, tiled=True)
    return exchange, _rows_after_exchange(device, length, devices)


def _rows_after_exchange(device: Any, length: int, devices: int) -> Rows:
    strip = length // devices
    starts = jnp.arange(devices, dtype=jnp.int32) * length + device * strip
    return (starts[:, None] + jnp.arange(strip, dtype=jnp.int32)[None, :]).reshape(-1)
