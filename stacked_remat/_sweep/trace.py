"""A layer traced to a jaxpr, with the types of its carry settled and its effects
checked.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr
from jax.extend.core.primitives import convert_element_type_p
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array

from .._activity import forwarded_inputs
from .._compat import ordered_effects, without_constants
from .._static import PyTree
from .gradient import pick
from .kinds import Kind
from .slots import Arrays, Carry
from .store import at_least_one, read_layer, varying_as


class TracedLayer(NamedTuple):
    """A layer's jaxpr on leaves. The first `constants` of what it shares are what it
    closes over.
    """

    jaxpr: Jaxpr
    init: Carry
    shared: Arrays
    constants: int
    carry_tree: Any
    y_tree: Any

    def output(self, leaves: Any) -> PyTree:
        """The output with these arrays, and with what is no array in it."""
        types = (var.aval for var in self.jaxpr.outvars[len(self.init) :])
        arrays, rest = jax.tree.unflatten(self.y_tree, map(weak_as, leaves, types))
        return eqx.combine(arrays, rest.value)

    @property
    def output_tree(self) -> Any:
        """The structure of the arrays of an output, which any leaves have."""
        return jax.tree.structure(
            jax.tree.unflatten(self.y_tree, range(self.y_tree.num_leaves))[0]
        )


class UntracedLayer(NamedTuple):
    """A layer on trees, `body(shared, carry, x) -> (carry, y)`."""

    body: Callable[[Arrays, Any, Any], tuple[PyTree, PyTree]]
    shared: Arrays
    stacks: PyTree
    unsliced: Sequence[bool]


def trace_layers(
    layers: Sequence[UntracedLayer],
    init: PyTree,
    *,
    offloads: bool,
    replays: bool = True,
) -> list[TracedLayer]:
    """Trace a layer of each kind, all with one type of carry."""
    init = jax.tree.map(jnp.asarray, init)
    while True:
        traced, before = [], init
        for layer in layers:
            found = _trace(layer, init)
            check_effects(
                found.jaxpr, found.shared if replays else (), offloads=offloads
            )
            leaves = [
                *map(
                    _as_type,
                    jax.tree.leaves(init),
                    (var.aval for var in found.jaxpr.outvars),
                )
            ]
            init = jax.tree.unflatten(found.carry_tree, leaves)
            shared = [*found.shared, *layer.shared]
            traced.append(found._replace(init=jax.tree.leaves(init), shared=shared))
        if len(traced) == 1 or _same_types(before, init):
            return traced


def _trace(layer: UntracedLayer, init: PyTree) -> TracedLayer:
    stacks, tree = jax.tree.flatten(layer.stacks)
    entries = jax.eval_shape(
        lambda: read_layer([*map(at_least_one, stacks)], 0, layer.unsliced)
    )
    x = jax.tree.unflatten(tree, entries)
    while True:
        closed, (carry, y) = jax.make_jaxpr(layer.body, return_shape=True)(
            layer.shared, init, x
        )
        settled = _settled(layer, x, init, closed.out_avals, carry)
        if settled is init:
            jaxpr, own = without_constants(closed)
            return TracedLayer(
                jaxpr,
                [],
                own,
                len(own),
                jax.tree.structure(carry),
                jax.tree.structure(y),
            )
        init = settled


def _settled(
    layer: UntracedLayer,
    x: PyTree,
    init: PyTree,
    out_types: Sequence[PyTree],
    carry: PyTree,
) -> PyTree:
    """The first carry with types that a layer returns for it; `init` itself if it has
    those of `carry`.
    """
    leaves, tree = jax.tree.flatten(init)
    varying = [
        varying_as(leaf, type_) for leaf, type_ in zip(leaves, out_types, strict=False)
    ]
    if any(new is not old for new, old in zip(varying, leaves, strict=True)):
        # Within `jax.shard_map` they vary over the axes of the mesh that the layers'
        # results vary over.
        return jax.tree.unflatten(tree, varying)
    if _same_types(init, carry, weak=False):
        return init

    # lax.scan settles weakly typed carries, and has the error messages for the other
    # cases.
    def scanned(shared: Arrays, init: PyTree, x: PyTree) -> PyTree:
        return lax.scan(lambda carry, _: layer.body(shared, carry, x), init, length=2)

    carry, _ = jax.eval_shape(scanned, layer.shared, init, x)
    found = jax.tree.map(_of_dtype, init, carry)
    return init if _same_types(found, init) else found


def _of_dtype(leaf: Array, like: Any) -> Array:
    """The array in the dtype of another; one that has it stays weakly typed if it is,
    as in `lax.scan`.
    """
    return (
        leaf if leaf.dtype == like.dtype else lax.convert_element_type(leaf, like.dtype)
    )


def kinds_of(
    traced: Sequence[TracedLayer], unsliced: Sequence[Sequence[bool]]
) -> tuple[Kind, ...]:
    """The kinds that these are layers of."""
    pairs = enumerate(zip(traced, unsliced, strict=True))
    return tuple(
        Kind(k, layer.jaxpr, len(layer.init), tuple(whole))
        for k, (layer, whole) in pairs
    )


def without_passed_on(
    traced: Sequence[TracedLayer],
) -> tuple[list[TracedLayer], list[bool]]:
    """Layers that share the leaves of the carry that none of them changes; which leaves
    these are.
    """
    carries = len(traced[0].init)
    passed = [True] * carries
    for layer in traced:
        sources = forwarded_inputs(layer.jaxpr)[:carries]
        passed = [
            is_ and source == len(layer.shared) + place
            for place, (is_, source) in enumerate(zip(passed, sources, strict=True))
        ]
    if not any(passed):
        return list(traced), passed
    carried, found = [not is_ for is_ in passed], []
    for layer in traced:
        used = [*carried, *[True] * (len(layer.jaxpr.outvars) - carries)]
        jaxpr, _ = dce_jaxpr(layer.jaxpr, used, instantiate=True)
        first, last = len(layer.shared), len(layer.shared) + carries
        carry = jaxpr.invars[first:last]
        order = [
            *jaxpr.invars[:first],
            *pick(carry, passed),
            *pick(carry, carried),
            *jaxpr.invars[last:],
        ]
        own = {
            "init": pick(layer.init, carried),
            "shared": [*layer.shared, *pick(layer.init, passed)],
        }
        found.append(layer._replace(jaxpr=jaxpr.replace(invars=order), **own))
    return found, passed


def weak_as(leaf: Array, like: Any) -> Array:
    """The array, of a weak type where that of a layer is: the stacks that a sweep
    writes to have none.
    """
    if not like.weak_type:
        return leaf
    return convert_element_type_p.bind(
        leaf, new_dtype=like.dtype, weak_type=True, sharding=None
    )


def _as_type(leaf: Array, like: Any) -> Array:
    type_ = jax.typeof(leaf)
    same = (type_.dtype, type_.weak_type) == (like.dtype, like.weak_type)
    return varying_as(
        leaf if same else lax.convert_element_type(leaf, like.dtype), like
    )


def _same_types(init: PyTree, carry: PyTree, *, weak: bool = True) -> bool:
    """Whether two carries have one structure, and the same shapes, dtypes and, with
    `weak`, weak types.
    """

    def types(tree: PyTree) -> list[PyTree]:
        leaves = jax.tree.leaves(tree)
        return [
            (leaf.shape, leaf.dtype, weak and getattr(leaf, "weak_type", False))
            for leaf in leaves
        ]

    return jax.tree.structure(init) == jax.tree.structure(carry) and types(
        init
    ) == types(carry)


def has_refs(arrays: PyTree) -> bool:
    return any(isinstance(leaf, jax.Ref) for leaf in jax.tree.leaves(arrays))


def check_effects(jaxpr: Jaxpr, constants: Sequence[PyTree], *, offloads: bool) -> None:
    """Refuse effects of a layer with which JAX cannot compile the backward pass; says
    what to do instead.
    """
    if has_refs(constants):
        raise TypeError(
            "The layer reads or writes a jax.Ref, which a policy that cuts the layers"
            " (nested, max_carries, first_layers) cannot differentiate. Make it part of"
            " the carry or an output, or use remat=True or remat=False; with True the"
            " layer runs again in the backward pass, and so do its writes."
        )
    ordered = ordered_effects(jaxpr)
    if offloads and ordered:
        raise TypeError(
            f"The layer has ordered effects ({', '.join(ordered)}), which JAX cannot"
            " compile in a program that uses host memory. Drop ordered=True from the"
            " callback, or use a policy that does not offload."
        )
