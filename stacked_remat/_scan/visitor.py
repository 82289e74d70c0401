"""What a visitor of the layers is given in a reverse sweep, and what it returns.

A user's visitor is a function `(visit, state) -> LayerResult`, which a reverse *sweep*
(the loop over layers of `_sweep/`) calls for each layer. The sweep works on lists of
arrays, visitors on trees. `SweepTypes`, which the forward sweep of `sweep_back.py`
makes, has the structures: `SweepTypes.visit` turns the sweep's `LayerVisit` with lists
into one with trees, and `cotangent_leaves` a cotangent that a user gives into the list
that the sweep takes.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis

from .._activity import is_differentiable
from .._barriers import barrier_on
from .._static import PyTree
from .._sweep.gradient import (
    LayerCotangents,
    LayerPullback,
    LayerVisit,
    Perturbed,
    scatter_leaves,
)
from .._sweep.kinds import Kind
from .._sweep.programs import description
from .._sweep.slots import Arrays
from .._sweep.spec import SweepSpec
from .checks import describe
from .layer_axis import Join, TreeLayout
from .marks import is_named, raw_array


class LayerResult(NamedTuple):
    """What a visitor returns.

    Attributes:
        carry: the cotangent of the layer's input carry.
        layer: the layer with new arrays, which replace the old ones; `None` leaves it
            unchanged, and so does `None` in place of a leaf.
        args: the cotangents of the further arguments; those of shared ones are summed
            over the layers.
        kwargs: the cotangents of the keyword arguments.
        state: the visitor's state; `None` leaves it unchanged.
        layer_state: this layer's entry of the layers' state; `None` leaves it
            unchanged.
    """

    carry: PyTree
    layer: PyTree = None
    args: PyTree = None
    kwargs: PyTree = None
    state: PyTree = None
    layer_state: PyTree = None


class SweepResult(NamedTuple):
    """What a reverse sweep returns.

    Attributes:
        carry: the cotangent of the initial carry.
        layers: the layers with the arrays that the visitor returned, or as they were.
        args: the cotangents of the further arguments, where the visitor returns them.
        kwargs: the cotangents of the keyword arguments.
        state: the visitor's last state.
        layer_state: the state of each layer.
    """

    carry: PyTree
    layers: PyTree
    args: PyTree = None
    kwargs: PyTree = None
    state: PyTree = None
    layer_state: PyTree = None


Visitor: TypeAlias = Callable[[LayerVisit, Any], LayerResult]


@dataclass(frozen=True, eq=False)
class KindTypes:
    """The layers of one kind."""

    # The same kind in the sweep, with the layer's jaxpr
    kind: Kind
    # How many of the arrays that the layers share come first and are no arguments: what
    # the user's function closes over
    constants: int
    # Of the kind, for `LayerVisit.kind`; None where layers are of one kind
    name: str | None
    # Puts the trees `((layer, *args), kwargs)` together
    layout: TreeLayout
    # The structure of a layer's output, of its arrays alone
    y_tree: Any

    # `shared` has the constants too, which are no part of the trees
    def layer(self, x: Arrays, shared: Arrays, *, cotangents: bool = False) -> PyTree:
        """One layer's tree, from its entries of the stacks."""
        return self.layout.layer(x, shared[self.constants :], cotangents=cotangents)

    def stacked(self, xs: Arrays, shared: Arrays, *, cotangents: bool) -> PyTree:
        """The tree of all layers, from the stacks."""
        return self.layout.stacked(xs, shared[self.constants :], cotangents=cotangents)


@dataclass(frozen=True, eq=False)
class SweepTypes:
    """Static description of a reverse sweep; equal for two that do the same.

    It is the static part of a `SweepBack`, so it decides whether `jax.jit` takes two of
    them for the same type. A forward sweep makes a new one each time it is traced, with
    new functions and jaxprs in it, which are compared by what they compute.
    """

    # The stack without its arrays
    template: PyTree
    # Whether a layer returns an output beside its carry (`scan_vjp`)
    has_output: bool
    # The sweep on lists of arrays
    spec: SweepSpec
    # Which leaves are differentiated, so have cotangents
    perturbed: Perturbed
    # The layers of each kind
    kinds: tuple[KindTypes, ...]
    # The layers' axis
    axis: Axis
    # Makes one tree of those of each kind
    join: Join
    # The structure of a carry's arrays
    carry_tree: Any
    # What is no array in a carry
    carry_static: Any
    # The types of what the forward sweep returned: the last carry, and the stacked
    # outputs
    outputs: PyTree

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SweepTypes) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @functools.cached_property
    def _key(self) -> Hashable:
        trees = [
            *map(jtu.tree_flatten, (self.template, self.carry_static, self.outputs))
        ]
        # The description of a layer's jaxpr leaves out the rules of `jax.custom_vjp`s;
        # the jaxpr of its pullback has what they compute.
        pullbacks = []
        for kind_types in self.kinds:
            pullbacks.append(LayerPullback(kind_types.kind, self.perturbed).jaxpr)
        static = (
            self.has_output,
            self.spec,
            self.perturbed,
            self.kinds,
            self.axis,
            self.join,
            self.carry_tree,
        )
        return description((static, pullbacks, trees))

    def carry_cotangent(self, leaves: Arrays) -> PyTree:
        """The cotangent of a carry, from its leaves that have one."""
        scattered = scatter_leaves(leaves, self.perturbed.carry)
        return jtu.tree_unflatten(self.carry_tree, scattered)

    def visit(
        self, of_kind: KindTypes, leaves: LayerVisit, layer_state: PyTree
    ) -> LayerVisit:
        """A visit of a layer of this kind, with trees in the place of lists of
        arrays.
        """
        (layer, *args), kwargs = of_kind.layer(leaves.layer, [*leaves.args])
        carry_ct, y_ct = leaves.cotangent
        cotangent = self.carry_cotangent(carry_ct)
        if self.has_output:
            y_ct = scatter_leaves(y_ct, self.perturbed.ys[of_kind.kind.number])
            cotangent = cotangent, jtu.tree_unflatten(of_kind.y_tree, y_ct)
        carry = jtu.tree_unflatten(self.carry_tree, leaves.carry)
        # The index of the layer is the sweep's, and the same for trees
        return replace(
            leaves,
            layer=layer,
            carry=eqx.combine(carry, self.carry_static),
            args=tuple(args),
            kwargs=kwargs,
            vjp=functools.partial(self._vjp, of_kind, leaves.vjp),
            cotangent=cotangent,
            layer_state=layer_state,
            kind=of_kind.name,
        )

    def _vjp(
        self, of_kind: KindTypes, leaves_vjp: Callable[[], LayerCotangents]
    ) -> LayerCotangents:
        """The `vjp` of a visit with trees, by that with lists of arrays."""
        leaves = leaves_vjp()
        shared_mask, carry_mask, x_mask = self.perturbed.of_layer(of_kind.kind)
        of_shared = scatter_leaves(leaves.args, shared_mask)
        of_carry = scatter_leaves(leaves.carry, carry_mask)
        of_x = scatter_leaves(leaves.layer, x_mask)
        (layer, *args), kwargs = of_kind.layer(of_x, of_shared, cotangents=True)
        carry = jtu.tree_unflatten(self.carry_tree, of_carry)
        on_host = self.spec.remat.boundaries_on_host
        platforms = ("cuda", "tpu") if on_host else ("tpu",)

        def apart(part: Any) -> Any:
            # Without the barrier XLA keeps a layer's internals until the visitor has
            # used its gradients; one barrier for all would keep what the visitor does
            # not use.
            return barrier_on(platforms, (part, carry))[0]

        return LayerCotangents(carry, apart(layer), apart(tuple(args)), apart(kwargs))


def cotangent_leaves(
    cotangent: PyTree, like: PyTree, mask: tuple[bool, ...], what: str, source: str
) -> Arrays:
    """The leaves of a cotangent that are in the mask, zeros for missing ones; checked
    as below.
    """
    # Named arrays are leaves in the types; the checked cotangent has raw arrays there
    types, structure = jtu.tree_flatten(like, is_leaf=is_named)
    checked = checked_cotangent(cotangent, like, what, source)
    leaves = []
    for leaf, named_type, is_perturbed in zip(
        structure.flatten_up_to(checked), types, mask, strict=True
    ):
        # A sweep takes no cotangents of leaves that depend on nothing differentiated
        if is_perturbed:
            type_ = raw_array(named_type)
            zeros = leaf is None
            leaves.append(jnp.zeros(type_.shape, type_.dtype) if zeros else leaf)
    return leaves


def checked_cotangent(
    cotangent: PyTree, like: PyTree, what: str, source: str
) -> PyTree:
    """A cotangent of `like` with raw arrays as leaves, and None for missing ones.

    `what` says in errors what it is the cotangent of, and `source` where it is from.
    """
    paths_and_types, structure = jtu.tree_flatten_with_path(like, is_leaf=is_named)
    try:
        leaves = (
            [None] * len(paths_and_types)
            if cotangent is None
            else structure.flatten_up_to(cotangent)
        )
    except ValueError as error:
        raise ValueError(
            f"The cotangent of {what} {source} has another structure than {what}:"
            f" {error}"
        ) from None
    checked = []
    for (path, type_), leaf in zip(paths_and_types, leaves, strict=True):
        where = f"{what}{jtu.keystr(path)}"
        checked.append(_checked_leaf(where, type_, leaf, source))
    return jtu.tree_unflatten(structure, checked)


def _checked_leaf(where: str, type_: Any, leaf: Any, source: str) -> Any:
    array = raw_array(leaf)
    expected = raw_array(type_)
    # Integers and keys have no cotangent; JAX gives zeros of dtype float0 as theirs.
    if array is None or not is_differentiable(expected.dtype):
        return None
    if not eqx.is_array_like(array):
        problem = f"The cotangent of {where} {source} is {describe(leaf)}"
        raise TypeError(f"{problem}. Give an array, or None for zeros.")
    array = jnp.asarray(array)
    same_axes = getattr(leaf, "axes", None) == getattr(type_, "axes", None)
    # With the same axes the error is about the arrays: their shapes or dtypes
    pair = (array, expected) if same_axes else (leaf, type_)
    actual, wanted = map(describe, pair)
    if actual != wanted:
        raise ValueError(
            f"The cotangent of {where} {source} is {actual}, and {where} is"
            f" {wanted}. Give it the same axes in the same order, and the same"
            " shape and dtype."
        )
    return array
