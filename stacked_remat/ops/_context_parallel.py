"""Attention of positions that are divided over devices (context parallelism).

Every device gathers all keys and values: with grouped queries they are small, and they exist for one layer at
a time. Queries stay divided. Late positions see more keys than early ones, so the devices exchange strips
first: each gets an equal part of every device's positions, and has about as much to compute (Brandon et al.
2023, "Striped Attention").
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ._attention_rule import Documents, Key, Query, Sight


def attend_in_context(
    attend: Callable[[Query, Key, Key, Sight, int], Query],
    query: Query,
    key: Key,
    value: Key,
    documents: Documents | None,
    context: tuple[str, ...],
) -> Query:
    """Attention of one device's positions to those of all devices along `context`.

    Args:
        attend: of a backend; its last argument is in how many strips the queries are.
        query: this and the others up to `documents` are of this device's positions.
        context: the axes of the mesh over which positions are divided.
    """
    exchange, rows, strips = _exchange(query.shape[1], context)
    gather = functools.partial(lax.all_gather, axis_name=context, axis=1, tiled=True)
    key, value, documents = jax.tree.map(gather, (key, value, documents))
    return exchange(attend(exchange(query), key, value, Sight.of(documents, rows), strips))


def _exchange(
    length: int, context: tuple[str, ...]
) -> tuple[Callable[[Array], Array], Int[Array, " row"], int]:
    """Exchanges strips of arrays `[batch, position, ...]`; the positions that a device has then, and strips.

    Strip j of device i becomes strip i of device j; done twice, nothing has changed. Where strips would be
    uneven nothing is exchanged.
    """
    device, devices = lax.axis_index(context), lax.axis_size(context)
    if length % devices:
        return lambda x: x, device * length + jnp.arange(length, dtype=jnp.int32), 1
    exchange = functools.partial(lax.all_to_all, axis_name=context, split_axis=1, concat_axis=1, tiled=True)
    strip = length // devices
    starts = jnp.arange(devices, dtype=jnp.int32) * length + device * strip
    rows = starts[:, None] + jnp.arange(strip, dtype=jnp.int32)[None, :]
    return exchange, rows.reshape(-1), devices
