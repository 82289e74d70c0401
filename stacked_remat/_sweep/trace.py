"""A layer traced to a jaxpr, with the types of its carry settled and its effects
checked.

A sweep needs a layer as data: to find what its derivative reads, to run it in loops of
its own, to compare programs. `_scan/layers.py` has flattened stacks and what layers
share to lists of arrays; here the layer of each kind becomes a jaxpr
`(shared, carry, x) -> (carry, y)`, that of a `Kind`.

The type of a carry must be the same before and after a layer. As in `lax.scan`, a first
carry of a weak type (a Python number) takes the dtype that the layer returns; within
`jax.shard_map`, the first carry is made to vary over the axes that the layer's result
varies over. So a layer is traced again until its carry stays as it is.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params
from jax.extend.core.primitives import convert_element_type_p
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array

from .. import _xla_hints as xla_hints
from .._activity import forwarded_inputs
from .._compat import ordered_effects, without_constants
from .._static import PyTree
from .gradient import pick
from .kinds import Kind
from .slots import Arrays, Carry, OfKinds, inverted, types_of
from .store import entry_types, varying_as

T = TypeVar("T")


class TracedLayers(NamedTuple):
    """The layers of a loop as jaxprs, and what goes into them beside their own inputs.

    Lists have an entry for each kind.
    """

    # A layer of each kind.
    kinds: tuple[Kind, ...]
    # The leaves of the first carry, of the types of the layers' results.
    init: Carry
    # What the layers share: what a layer closes over, its shared arguments, and leaves
    # of the carry that no layer changes.
    shared: OfKinds
    # The structure of the carry.
    carry_tree: Any
    # That of an output: a pair of its arrays and a `Static` with the rest of it.
    y_trees: list[Any]

    def output(self, kind: Kind, leaves: Any) -> PyTree:
        """The output of a kind with these arrays, and with what is no array in it."""
        tree = self.y_trees[kind.number]
        leaves = map(weak_as, leaves, kind.output_types)
        arrays, rest = jax.tree.unflatten(tree, leaves)
        return eqx.combine(arrays, rest.value)


def trace_layers(
    bodies: Sequence[Callable[[Arrays, Any, Arrays], tuple[PyTree, PyTree]]],
    init: PyTree,
    stacks: OfKinds,
    shared: OfKinds,
    unsliced: Sequence[Sequence[bool]],
    *,
    offloads: bool,
    replays: bool,
) -> TracedLayers:
    """Trace a layer of each kind, all with one type of carry.

    Args:
        bodies: a layer of each kind, `body(shared, carry, x) -> (carry, y)`, where the
            carry and the output are trees.
        init: the first carry, a tree.
        stacks: the layers' own inputs, for each kind.
        shared: what all layers are given, for each kind.
        unsliced: for each kind, which of its stacks a layer takes whole.
        offloads: whether the program uses host memory, which excludes ordered effects.
        replays: whether a sweep runs the layers again, which excludes references that
            they close over.
    """
    init = jax.tree.map(jnp.asarray, init)
    while True:
        kinds = []
        all_shared = []
        y_trees = []
        before = init
        for body, of_kind, arguments, is_whole in zip(
            bodies, stacks, shared, unsliced, strict=True
        ):
            closed, y_tree, init = _trace(body, init, of_kind, arguments, is_whole)
            jaxpr, constants = without_constants(closed)
            check_effects(jaxpr, constants if replays else (), offloads=offloads)
            leaves, carry_tree = jax.tree.flatten(init)
            leaves = [*map(_as_type, leaves, types_of(jaxpr.outvars))]
            init = jax.tree.unflatten(carry_tree, leaves)
            kind = Kind(len(kinds), jaxpr, len(leaves), tuple(is_whole))
            kinds.append(kind)
            all_shared.append([*constants, *arguments])
            y_trees.append(y_tree)
        # Kinds take turns: one may change what another has been traced for.
        if len(kinds) == 1 or _same_types(before, init):
            return TracedLayers(tuple(kinds), leaves, all_shared, carry_tree, y_trees)


def _trace(
    body: Callable, init: PyTree, stacks: Arrays, shared: Arrays, unsliced: Any
) -> tuple[ClosedJaxpr, Any, PyTree]:
    """Trace a layer until its carry stays as it is: its jaxpr, the structure of its
    output, and the first carry.
    """
    x = entry_types(stacks, unsliced)
    while True:
        closed, (carry, y) = jax.make_jaxpr(body, return_shape=True)(shared, init, x)
        settled = _settled(body, (shared, init, x), closed.out_avals, carry)
        if settled is init:
            return closed, jax.tree.structure(y), init
        init = settled


def _settled(
    body: Callable, inputs: Any, out_types: Sequence[PyTree], carry: PyTree
) -> PyTree:
    """The first carry, the second of `inputs`, with types that a layer returns for it;
    itself if it has those of `carry`.
    """
    shared, init, x = inputs
    leaves, tree = jax.tree.flatten(init)
    varying = [*map(varying_as, leaves, out_types)]
    if not all(map(operator.is_, varying, leaves)):
        # Within `jax.shard_map` they vary over the axes of the mesh that the layers'
        # results vary over.
        return jax.tree.unflatten(tree, varying)
    if _same_types(init, carry, weak=False):
        return init

    # lax.scan settles weakly typed carries, and has the error messages for the other
    # cases.
    def scanned(shared: Arrays, init: PyTree, x: PyTree) -> PyTree:
        return lax.scan(lambda carry, _: body(shared, carry, x), init, length=2)

    carry, _ = jax.eval_shape(scanned, shared, init, x)
    settled = jax.tree.map(_of_dtype, init, carry)
    return init if _same_types(settled, init) else settled


def _of_dtype(leaf: Array, like: Any) -> Array:
    """The array in the dtype of another; one that has it stays weakly typed if it is,
    as in `lax.scan`.
    """
    return (
        leaf if leaf.dtype == like.dtype else lax.convert_element_type(leaf, like.dtype)
    )


def without_passed_on(traced: TracedLayers) -> tuple[TracedLayers, list[bool]]:
    """Layers that share the leaves of the carry that none of them changes; which leaves
    these are.

    A leaf that every layer returns as it is has one value for all layers. Shared, it
    takes no slot, and is no loop carry that XLA might copy.
    """
    passed_on = [True] * len(traced.init)
    for kind in traced.kinds:
        places = range(len(kind.jaxpr.invars))
        _, carry_places, _ = kind.split(places)
        carry_sources = forwarded_inputs(kind.jaxpr)[: kind.carries]
        stays = map(operator.eq, carry_sources, carry_places)
        passed_on = [*map(operator.and_, passed_on, stays)]
    if not any(passed_on):
        return traced, passed_on
    is_changed = inverted(passed_on)
    values = pick(traced.init, passed_on)
    kinds = []
    for kind in traced.kinds:
        is_kept = [*is_changed, *[True] * len(kind.output_types)]
        jaxpr, _ = dce_jaxpr(kind.jaxpr, is_kept, instantiate=True)
        shared, carry, x = kind.split(jaxpr.invars)
        # These inputs move from the carry to the end of what is shared.
        shared = [*shared, *pick(carry, passed_on)]
        carry = pick(carry, is_changed)
        jaxpr = jaxpr.replace(invars=[*shared, *carry, *x])
        kinds.append(replace(kind, jaxpr=jaxpr, carries=sum(is_changed)))
    traced = traced._replace(
        kinds=tuple(kinds),
        init=pick(traced.init, is_changed),
        shared=[[*of_kind, *values] for of_kind in traced.shared],
    )
    return traced, passed_on


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
    if jax.tree.structure(init) != jax.tree.structure(carry):
        return False
    leaves = jax.tree.leaves(init)
    new_leaves = jax.tree.leaves(carry)
    for old, new in zip(leaves, new_leaves, strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            return False
        # Of keys only the type says that they are not weak
        if weak and jax.typeof(old).weak_type != jax.typeof(new).weak_type:
            return False
    return True


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


def check_offloaded(kinds: Sequence[Kind], names: Sequence[str], inputs: T) -> T:
    """The inputs of a loop over these layers. With them a program is refused for GPUs
    and TPUs if a layer gives one of the offloaded names in a scan of its own.
    """
    if not names:
        return inputs
    in_loops: set[str] = set()
    for kind in kinds:
        in_loops |= _names_in_scans(kind.jaxpr, in_scan=False)
    refused = [name for name in names if name in in_loops]
    if not refused:
        return inputs
    problem = (
        f"The layer gives the name {refused[0]!r} inside a lax.scan of its own, and"
        " XLA for GPUs and TPUs can't offload it there. Save it on the device"
        f" (save_block_internals=[{refused[0]!r}]), give the name to the result of the"
        " inner scan, or offload the carries."
    )
    return xla_hints.refused_offload(problem, inputs)


def _names_in_scans(jaxpr: Jaxpr, *, in_scan: bool) -> set[str]:
    """The checkpoint names that are given in scans within a jaxpr."""
    found: set[str] = set()
    for equation in jaxpr.eqns:
        primitive = equation.primitive.name
        if primitive == "name" and in_scan:
            found.add(equation.params["name"])
        # A custom rule may replace the function, with its names.
        if primitive == "custom_vjp_call":
            continue
        for inner in jaxprs_in_params(equation.params):
            is_within = in_scan or primitive == "scan"
            found |= _names_in_scans(inner, in_scan=is_within)
    return found
