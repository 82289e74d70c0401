"""Attention of positions that are divided over devices (context parallelism).

Every device gathers all keys and values: with grouped queries they are small, and they exist for one layer at
a time. Queries stay divided. Late positions see more keys than early ones, so the devices exchange strips of
their queries first: each gets an equal part of every device's queries, and has about as much to compute.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
) -> Query:
    """Attention of one device's positions to those of all devices along `context`.

    Args:
        attend: of a backend; takes the other arguments up to `context`, and the positions of the queries.
        query: this and the others up to `sinks` as in `_attention_blockwise.py`, of this device's positions.
        context: the axes of the mesh over which positions are divided; without any this is `attend`.
    """
    if not context:
        return attend(query, key, value, documents, blocks, sinks, None)
    gather = functools.partial(lax.all_gather, axis_name=context, axis=1, tiled=True)
    key, value, documents = jax.tree.map(gather, (key, value, documents))
    length = query.shape[1]
    devices = key.shape[1] // length
    if length % devices:  # strips would be uneven
        rows = lax.axis_index(context) * length + jnp.arange(length, dtype=jnp.int32)
        return attend(query, key, value, documents, blocks, sinks, rows)
    exchange = functools.partial(
        lax.all_to_all, axis_name=context, split_axis=1, concat_axis=1, tiled=True
    )  # strip j of device i becomes strip i of device j; done twice, nothing has changed
    rows = _rows_after_exchange(lax.axis_index(context), length, devices)
    return exchange(attend(exchange(query), key, value, documents, blocks, sinks, rows))


def _rows_after_exchange(device: Any, length: int, devices: int) -> Rows:
    strip = length // devices
    starts = jnp.arange(devices, dtype=jnp.int32) * length + device * strip
    return (starts[:, None] + jnp.arange(strip, dtype=jnp.int32)[None, :]).reshape(-1)
