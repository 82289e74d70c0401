"""A layer traced to a jaxpr, with the types of its carry settled."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr

from .effects import check_effects
from .kinds import Kind
from .slots import Arrays, Carry
from .store import at_least_one, read_layer


class TracedLayer(NamedTuple):
    """A layer in leaves.

    Attributes:
        jaxpr: `(shared, carry, x) -> (carry, y)`.
        init: the first carry, with the types that every carry has.
        shared: the constants of `jaxpr`, which the layer closes over; then the arrays passed to all layers.
        carry_tree: structure of the carry.
        y_tree: structure of the output.
    """

    jaxpr: Jaxpr
    init: Carry
    shared: Arrays
    carry_tree: Any
    y_tree: Any

    @property
    def constants(self) -> int:
        """How many of the shared arrays are constants."""
        return len(self.jaxpr.constvars)


def trace_layers(
    bodies: Sequence[Callable[[Arrays, Any, Any], tuple[Any, Any]]],
    shared: Sequence[Arrays],
    init: Any,
    xs: Sequence[Any],
    *,
    unsliced: Sequence[Sequence[bool]],
    offloads: bool,
) -> list[TracedLayer]:
    """Trace a layer of each kind, all with one type of carry. Arguments and errors as of `trace_layer`."""
    init = jax.tree.map(jnp.asarray, init)
    while True:
        traced, before = [], init
        for body, *own, mask in zip(bodies, shared, xs, unsliced, strict=True):
            found = trace_layer(body, own[0], init, own[1], unsliced=mask, offloads=offloads)
            init = jax.tree.unflatten(found.carry_tree, found.init)
            traced.append(found)
        if len(traced) == 1 or _same_types(before, init):
            return traced


def kinds_of(traced: Sequence[TracedLayer]) -> tuple[tuple[Kind, ...], Arrays]:
    """The kinds that these are layers of, and what each of them shares, one after the other."""
    shared, kinds, x, y = [], [], 0, 0
    for number, layer in enumerate(traced):
        places = tuple(range(len(shared), len(shared) + len(layer.shared)))
        shared += layer.shared
        jaxpr, carries = layer.jaxpr, len(layer.init)
        own = layer.constants + len(jaxpr.invars) - len(layer.shared) - carries
        parts = slice(x, x + own), slice(y, y + len(jaxpr.outvars) - carries)
        kinds.append(Kind(number, jaxpr, places, *parts))
        x, y = parts[0].stop, parts[1].stop
    return tuple(kinds), shared


def trace_layer(
    body: Callable[[Arrays, Any, Any], tuple[Any, Any]],
    shared: Arrays,
    init: Any,
    xs: Any,
    *,
    unsliced: Sequence[bool],
    offloads: bool,
) -> TracedLayer:
    """Trace `body(shared, carry, x) -> (carry, y)`.

    Args:
        body: one layer, on trees of arrays; it may close over traced values.
        shared: arrays that all layers are given.
        init: the first carry.
        xs: the layers' own inputs, stacked.
        unsliced: for which leaves of `xs` a layer takes the whole stack.
        offloads: whether values are moved to the host.

    Raises:
        TypeError: effects that cannot be replayed or compiled; a carry that changes its structure, shape or
            type.
    """
    init = jax.tree.map(jnp.asarray, init)
    stacks, tree = jax.tree.flatten(xs)
    entries = jax.eval_shape(lambda stacks: read_layer([*map(at_least_one, stacks)], 0, unsliced), stacks)
    x = jax.tree.unflatten(tree, entries)

    def trace(init: Any) -> tuple[Any, tuple[Any, Any]]:
        return jax.make_jaxpr(body, return_shape=True)(shared, init, x)

    closed, (carry, y) = trace(init)
    if not _same_types(init, carry):
        # lax.scan settles weakly typed carries, and has the error messages for the other cases.
        def scanned(shared: Arrays, init: Any, x: Any) -> Any:
            return lax.scan(lambda carry, _: body(shared, carry, x), init, length=2)

        carry, _ = jax.eval_shape(scanned, shared, init, x)
        init = jax.tree.map(lambda leaf, like: lax.convert_element_type(leaf, like.dtype), init, carry)
        closed, (carry, y) = trace(init)
    constants = list(closed.consts)
    check_effects(closed.jaxpr, constants, offloads=offloads)
    return TracedLayer(
        closed.jaxpr,
        jax.tree.leaves(init),
        [*constants, *shared],
        jax.tree.structure(carry),
        jax.tree.structure(y),
    )


def _same_types(init: Any, carry: Any) -> bool:
    def types(tree: Any) -> list[Any]:
        return [(leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in jax.tree.leaves(tree)]

    return jax.tree.structure(init) == jax.tree.structure(carry) and types(init) == types(carry)
