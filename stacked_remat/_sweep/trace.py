"""A layer traced to a jaxpr, with the types of its carry settled and its effects
checked.

A sweep needs a layer as data: to find what its derivative reads, to run it in loops of
its own, to compare programs. `_scan/layers.py` has flattened stacks and what layers
share to lists of arrays (`UntracedLayer`); here the layer becomes a jaxpr
`(shared, carry, x) -> (carry, y)` (`TracedLayer`), from which `kinds_of` makes the
kinds of a `SweepSpec`.

The type of a carry must be the same before and after a layer. As in `lax.scan`, a first
carry of a weak type (a Python number) takes the dtype that the layer returns; within
`jax.shard_map`, the first carry is made to vary over the axes that the layer's result
varies over. So a layer is traced again until its carry stays as it is.
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
from .slots import Arrays, Carry, inverted, types_of
from .store import at_least_one, read_layer, varying_as


class TracedLayer(NamedTuple):
    """A layer's jaxpr on leaves."""

    # `(shared, carry, x) -> (carry, y)`, without constants.
    jaxpr: Jaxpr
    # The leaves of the first carry, of the types of the layer's result.
    init: Carry
    # What all layers share: what the layer closes over, its shared arguments, and
    # leaves of the carry that no layer changes.
    shared: Arrays
    # How many of `shared` it closes over.
    constants: int
    # The structure of the carry.
    carry_tree: Any
    # That of a pair: the arrays of the output, and a `Static` with the rest of it.
    y_tree: Any

    def output(self, leaves: Any) -> PyTree:
        """The output with these arrays, and with what is no array in it."""
        types = types_of(self.jaxpr.outvars[len(self.init) :])
        arrays, rest = jax.tree.unflatten(self.y_tree, map(weak_as, leaves, types))
        return eqx.combine(arrays, rest.value)

    @property
    def output_tree(self) -> Any:
        """The structure of the arrays of an output, which any leaves have."""
        return jax.tree.structure(
            jax.tree.unflatten(self.y_tree, range(self.y_tree.num_leaves))[0]
        )


class UntracedLayer(NamedTuple):
    """A layer before its trace: carry and output are trees, the rest lists."""

    # `body(shared, carry, x) -> (carry, y)`.
    body: Callable[[Arrays, Any, Any], tuple[PyTree, PyTree]]
    # Leaves of what all layers share.
    shared: Arrays
    # The layers' own inputs, stacked over the layers of this kind; `x` is a tree like
    # it.
    stacks: PyTree
    # Which leaves of `stacks` a layer takes whole.
    unsliced: Sequence[bool]


def trace_layers(
    layers: Sequence[UntracedLayer],
    init: PyTree,
    *,
    offloads: bool,
    replays: bool = True,
) -> list[TracedLayer]:
    """Trace a layer of each kind, all with one type of carry.

    Args:
        layers: one of each kind.
        init: the first carry.
        offloads: whether the program uses host memory, which excludes ordered effects.
        replays: whether a sweep runs the layers again, which excludes references that
            they close over.
    """
    init = jax.tree.map(jnp.asarray, init)
    while True:
        traced, before = [], init
        for layer in layers:
            new = _trace(layer, init)
            closed_over = new.shared if replays else ()
            check_effects(new.jaxpr, closed_over, offloads=offloads)
            types = types_of(new.jaxpr.outvars)
            leaves = [*map(_as_type, jax.tree.leaves(init), types)]
            init = jax.tree.unflatten(new.carry_tree, leaves)
            shared = [*new.shared, *layer.shared]
            traced.append(new._replace(init=leaves, shared=shared))
        # Kinds take turns: one may change what another has been traced for.
        if len(traced) == 1 or _same_types(before, init):
            return traced


def _trace(layer: UntracedLayer, init: PyTree) -> TracedLayer:
    """Trace a layer; it has no `init` yet, and shares only what it closes over."""
    stacks, tree = jax.tree.flatten(layer.stacks)
    # By types alone, and of a stack without layers too.
    entries = jax.eval_shape(
        lambda: read_layer([*map(at_least_one, stacks)], 0, layer.unsliced)
    )
    x = jax.tree.unflatten(tree, entries)
    while True:
        trace = jax.make_jaxpr(layer.body, return_shape=True)
        closed, (carry, y) = trace(layer.shared, init, x)
        settled = _settled(layer, x, init, closed.out_avals, carry)
        if settled is init:
            break
        init = settled
    jaxpr, constants = without_constants(closed)
    trees = jax.tree.structure(carry), jax.tree.structure(y)
    return TracedLayer(jaxpr, [], constants, len(constants), *trees)


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
    varying = [*map(varying_as, leaves, out_types)]
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
    settled = jax.tree.map(_of_dtype, init, carry)
    return init if _same_types(settled, init) else settled


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
    kinds = []
    for layer, is_whole in zip(traced, unsliced, strict=True):
        kinds.append(Kind(len(kinds), layer.jaxpr, len(layer.init), tuple(is_whole)))
    return tuple(kinds)


def without_passed_on(
    traced: Sequence[TracedLayer],
) -> tuple[list[TracedLayer], list[bool]]:
    """Layers that share the leaves of the carry that none of them changes; which leaves
    these are.

    A leaf that every layer returns as it is has one value for all layers. Shared, it
    takes no slot, and is no loop carry that XLA might copy.
    """
    carries = len(traced[0].init)
    passed_on = [True] * carries
    for layer in traced:
        sources = forwarded_inputs(layer.jaxpr)
        for place in range(carries):
            passed_on[place] &= sources[place] == len(layer.shared) + place
    if not any(passed_on):
        return list(traced), passed_on
    is_changed = inverted(passed_on)
    new_layers = []
    for layer in traced:
        first, last = len(layer.shared), len(layer.shared) + carries
        is_output = [True] * (len(layer.jaxpr.outvars) - carries)
        jaxpr, _ = dce_jaxpr(layer.jaxpr, is_changed + is_output, instantiate=True)
        carry = jaxpr.invars[first:last]
        # These inputs move from the carry to the end of what is shared.
        inputs = [
            *jaxpr.invars[:first],
            *pick(carry, passed_on),
            *pick(carry, is_changed),
            *jaxpr.invars[last:],
        ]
        layer = layer._replace(
            jaxpr=jaxpr.replace(invars=inputs),
            init=pick(layer.init, is_changed),
            shared=[*layer.shared, *pick(layer.init, passed_on)],
        )
        new_layers.append(layer)
    return new_layers, passed_on


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
    """The array in the dtype of a type, and varying over a mesh like it; strongly typed
    unless both were weak.
    """
    type_ = jax.typeof(leaf)
    if (type_.dtype, type_.weak_type) != (like.dtype, like.weak_type):
        leaf = lax.convert_element_type(leaf, like.dtype)
    return varying_as(leaf, like)


def _same_types(init: PyTree, carry: PyTree, *, weak: bool = True) -> bool:
    """Whether two carries have one structure, and the same shapes, dtypes and, with
    `weak`, weak types.
    """

    def types(tree: PyTree) -> list[PyTree]:
        leaf_types = []
        for leaf in jax.tree.leaves(tree):
            is_weak = weak and getattr(leaf, "weak_type", False)
            leaf_types.append((leaf.shape, leaf.dtype, is_weak))
        return leaf_types

    if jax.tree.structure(init) != jax.tree.structure(carry):
        return False
    return types(init) == types(carry)


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
