"""What a visitor of the layers is given in a reverse sweep and what it returns: trees,
made of leaves.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis
from jax.tree_util import KeyPath

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
    """The layers of one kind; the first of what they share are `constants`, and no
    arguments.
    """

    own: Kind
    constants: int
    name: str | None
    layout: TreeLayout
    y_tree: Any

    def layer(self, x: Arrays, shared: Arrays, *, cotangents: bool = False) -> PyTree:
        return self.layout.layer(x, shared[self.constants :], cotangents=cotangents)

    def stacked(self, xs: Arrays, shared: Arrays, *, cotangents: bool) -> PyTree:
        return self.layout.stacked(xs, shared[self.constants :], cotangents=cotangents)


@dataclass(frozen=True, eq=False)
class SweepTypes:
    """Static description of a reverse sweep; equal for two that do the same.

    `template` is the stack without arrays, and `outputs` are the types of what the
    forward sweep returned.
    """

    template: PyTree
    has_output: bool  # whether a layer returns an output beside its carry
    spec: SweepSpec
    perturbed: Perturbed
    kinds: tuple[KindTypes, ...]
    axis: Axis
    join: Join
    carry_tree: Any
    carry_static: Any
    outputs: PyTree

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SweepTypes) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @functools.cached_property
    def _key(self) -> Hashable:
        trees = map(jtu.tree_flatten, (self.template, self.carry_static, self.outputs))
        pullbacks = [
            LayerPullback(kind.own, self.perturbed).jaxpr for kind in self.kinds
        ]
        static = (
            self.has_output,
            self.spec,
            self.perturbed,
            self.kinds,
            self.axis,
            self.join,
            self.carry_tree,
        )
        return description((static, pullbacks, [*trees]))

    def carry_cotangent(self, leaves: Arrays) -> PyTree:
        """The cotangent of a carry, from its leaves that have one."""
        return jtu.tree_unflatten(
            self.carry_tree, scatter_leaves(leaves, self.perturbed.carry)
        )

    def visit(
        self, kind: KindTypes, leaves: LayerVisit, layer_state: PyTree
    ) -> LayerVisit:
        """A visit of a layer of this kind, with trees in the place of lists of
        arrays.
        """
        (layer, *args), kwargs = kind.layer(leaves.layer, [*leaves.args])
        carry_ct, y_ct = leaves.cotangent
        cotangent = self.carry_cotangent(carry_ct)
        if self.has_output:
            y_ct = scatter_leaves(y_ct, self.perturbed.ys[kind.own.number])
            cotangent = cotangent, jtu.tree_unflatten(kind.y_tree, y_ct)

        def vjp() -> LayerCotangents:
            found, masks = leaves.vjp(), self.perturbed.of_layer(kind.own)
            of_shared, of_carry, of_x = map(
                scatter_leaves, (found.args, found.carry, found.layer), masks
            )
            (layer, *args), kwargs = kind.layer(of_x, of_shared, cotangents=True)
            carry = jtu.tree_unflatten(self.carry_tree, of_carry)
            on_host = self.spec.remat.boundaries_on_host
            platforms = ("cuda", "tpu") if on_host else ("tpu",)

            def apart(part: Any) -> Any:
                # Without the barrier XLA keeps a layer's internals until the visitor
                # has used its gradients; one barrier for all would keep what the
                # visitor does not use.
                return barrier_on(platforms, (part, carry))[0]

            return LayerCotangents(
                carry, apart(layer), apart(tuple(args)), apart(kwargs)
            )

        carry = eqx.combine(
            jtu.tree_unflatten(self.carry_tree, leaves.carry), self.carry_static
        )
        trees = {
            "layer": layer,
            "carry": carry,
            "args": tuple(args),
            "kwargs": kwargs,
            "vjp": vjp,
        }
        return replace(
            leaves,
            **trees,
            cotangent=cotangent,
            layer_state=layer_state,
            kind=kind.name,
        )


def cotangent_leaves(
    cotangent: PyTree, like: PyTree, mask: tuple[bool, ...], what: str, source: str
) -> Arrays:
    """The leaves of a cotangent that are in the mask, zeros for missing ones; checked
    as below.
    """
    types, structure = jtu.tree_flatten(like, is_leaf=is_named)
    leaves = structure.flatten_up_to(checked_cotangent(cotangent, like, what, source))
    return [
        jnp.zeros(type_.shape, type_.dtype) if leaf is None else leaf
        for leaf, type_, is_perturbed in zip(
            leaves, map(raw_array, types), mask, strict=True
        )
        if is_perturbed
    ]


def checked_cotangent(
    cotangent: PyTree, like: PyTree, what: str, source: str
) -> PyTree:
    """A cotangent of `like` with raw arrays as leaves, and None for missing ones."""

    def check(path: KeyPath, type_: Any, leaf: Any) -> Any:
        where, given, expected = (
            f"{what}{jtu.keystr(path)}",
            raw_array(leaf),
            raw_array(type_),
        )
        if given is None or not is_differentiable(expected.dtype):
            return None
        if not eqx.is_array_like(given):
            problem = f"The cotangent of {where} {source} is {describe(leaf)}"
            raise TypeError(f"{problem}. Give an array, or None for zeros.")
        given = jnp.asarray(given)
        same_axes = getattr(leaf, "axes", None) == getattr(type_, "axes", None)
        found, wanted = map(describe, (given, expected) if same_axes else (leaf, type_))
        if found != wanted:
            raise ValueError(
                f"The cotangent of {where} {source} is {found}, and {where} is"
                f" {wanted}. Give it the same axes in the same order, and the same"
                " shape and dtype."
            )
        return given

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
    checked = [
        check(*entry, leaf) for entry, leaf in zip(paths_and_types, leaves, strict=True)
    ]
    return jtu.tree_unflatten(structure, checked)
