"""What a visitor of the layers is given in a reverse sweep and what it returns: trees, made of leaves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis
from jax import lax
from jax.tree_util import KeyPath

from .._activity import is_differentiable
from .._placement import platform
from .._static import PyTree
from .._sweep.gradient import Inputs, LeafVisit, Perturbed, scatter_leaves
from .._sweep.kinds import Kind
from .._sweep.slots import Arrays
from .._sweep.spec import SweepSpec
from .checks import describe
from .layer_axis import Join, Leaf, TreeLayout
from .layers import Loop
from .marks import is_named, raw_array

Part: TypeAlias = Literal["layer", "carry", "args", "kwargs"]


class LayerResult(NamedTuple):
    """What a visitor returns.

    Attributes:
        carry: the cotangent of the layer's input carry.
        layer: the layer with new arrays, which replace the old ones; `None` leaves it unchanged, and so does
            `None` in place of a leaf.
        args: the cotangents of the further arguments; those of shared ones are summed over the layers.
        kwargs: the cotangents of the keyword arguments.
        state: the visitor's state; `None` leaves it unchanged.
        layer_state: this layer's entry of the layers' state; `None` leaves it unchanged.
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
        layers: without a visitor, the gradients of the layers; with one, the layers with the arrays that it
            returned, or as they were.
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


@dataclass(frozen=True)
class LayerVisit:
    """One layer, as a visitor of the reverse sweep is given it.

    Trees of cotangents have the structure of their primals, with `None` for leaves without a gradient.

    Attributes:
        layer_index: its index on the axis, a traced integer: `blocks[layer_index]`, whatever the policy.
        layer: the layer.
        carry: its input.
        args: its further arguments: slices of those that are split, and the shared ones.
        kwargs: its keyword arguments.
        cotangent: of its output carry; with `scan_vjp` a pair, of carry and output.
        layer_state: its entry of the layers' state.
        kind: the name of its kind, of a `StackedPattern`; `None` where layers are of one kind.
    """

    layer_index: Any
    layer: PyTree
    carry: PyTree
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    cotangent: PyTree
    layer_state: PyTree
    kind: str | None
    _vjp: Callable[[tuple[str, ...]], tuple[PyTree, ...]]

    def vjp(self, *wrt: Part) -> tuple[PyTree, ...]:
        """The vector-Jacobian products of the layer with `cotangent`.

        Args:
            *wrt: with respect to what: any of "layer" (the block, or the first argument after the carry of
                a function), "carry", "args" (those after it; `()` for none) and "kwargs".

        Returns:
            As many trees, in that order. Only these are computed; where the policy saves internals by name,
            all are, and XLA removes the unused ones.

        Cost: one evaluation of the layer, unless all its internals were saved, and its transpose. Ask once
        for all that is needed: each call runs the layer again.
        """
        parts = ("layer", "carry", "args", "kwargs")
        if not wrt or not all(part in parts for part in wrt):
            raise ValueError(f"vjp is with respect to any of {', '.join(map(repr, parts))}; got {wrt!r}.")
        return self._vjp(wrt)


Visitor: TypeAlias = Callable[[LayerVisit, Any], LayerResult]


@dataclass(frozen=True, eq=False)
class KindTypes:
    """The layers of one kind: `constants` is the number of arrays that they close over, shared ones first."""

    own: Kind
    name: str | None
    layout: TreeLayout
    constants: int
    y_tree: Any

    def part(self, leaf: Leaf) -> str:
        """Which of "layer", "args" and "kwargs" a leaf of the arguments belongs to."""
        group, entry = leaf.path[:2]
        return "kwargs" if group.idx else "args" if entry.idx else "layer"

    def parts(self, kind: Literal["split", "shared"]) -> list[str]:
        """The part of each split or shared array."""
        return [self.part(leaf) for leaf in self.layout.of_kind(kind)]

    def shared(self, every: Sequence[PyTree]) -> list[PyTree]:
        """The shared arguments, of the arrays that layers of all kinds share."""
        return self.own.pick_shared(every)[self.constants :]

    def stacked(self, xs: Arrays, shared: Sequence[PyTree], *, cotangents: bool) -> PyTree:
        """The arguments of all layers, from the arrays of all kinds."""
        return self.layout.stacked(xs[self.own.xs], self.shared(shared), cotangents=cotangents)

    def inputs(self, perturbed: Perturbed, wrt: tuple[str, ...]) -> Inputs:
        """The leaves that belong to these parts and have a cotangent."""
        of_shared = [False] * len(perturbed.shared)
        for place, part in zip(self.own.shared[self.constants :], self.parts("shared"), strict=True):
            of_shared[place] = perturbed.shared[place] and part in wrt
        of_carry = (is_ and "carry" in wrt for is_ in perturbed.carry)
        own = zip(perturbed.xs[self.own.xs], self.parts("split"), strict=True)
        return tuple(of_shared), tuple(of_carry), tuple(is_ and part in wrt for is_, part in own)


@dataclass(frozen=True, eq=False)
class SweepTypes:
    """Static description of a reverse sweep; `outputs` are the types of what the forward sweep returned."""

    loop: Loop
    spec: SweepSpec
    perturbed: Perturbed
    kinds: tuple[KindTypes, ...]
    axis: Axis
    join: Join
    carry_tree: Any
    carry_static: Any
    outputs: PyTree

    @property
    def has_output(self) -> bool:
        """Whether a layer returns an output beside its carry."""
        return self.loop.call.verb == "scan"

    def of_layers(self) -> list[bool]:
        """Which of the split arrays are the layers' own, and not an argument's."""
        return [part == "layer" for kind in self.kinds for part in kind.parts("split")]

    def carry_cotangent(self, leaves: Arrays) -> PyTree:
        """The cotangent of a carry, from its leaves that have one."""
        return jtu.tree_unflatten(self.carry_tree, scatter_leaves(leaves, self.perturbed.carry))

    def visit(self, leaves: LeafVisit, layer_state: PyTree) -> LayerVisit:
        """A visit, with trees in the place of lists of arrays."""
        kind = self.kinds[leaves.kind.number]
        (layer, *args), kwargs = kind.layout.layer(leaves.x, kind.shared(leaves.shared))
        carry_ct, y_ct = leaves.cotangents
        cotangent = self.carry_cotangent(carry_ct)
        if self.has_output:
            y_ct = scatter_leaves(y_ct, self.perturbed.ys[kind.own.ys])
            cotangent = cotangent, jtu.tree_unflatten(kind.y_tree, y_ct)

        def vjp(wrt: tuple[str, ...]) -> tuple[PyTree, ...]:
            inputs = kind.inputs(self.perturbed, wrt)
            found = leaves.vjp(inputs)
            if platform() == "tpu" or (self.spec.remat.boundaries_on_host and platform() == "cuda"):
                # Without the barrier XLA keeps a layer's internals until the visitor has used the cotangents.
                found = lax.optimization_barrier(found)
            of_shared, of_carry, of_x = (scatter_leaves(*each) for each in zip(found, inputs, strict=True))
            (layer, *args), kwargs = kind.layout.layer(of_x, kind.shared(of_shared), cotangents=True)
            carry = jtu.tree_unflatten(self.carry_tree, of_carry)
            trees = {"layer": layer, "carry": carry, "args": tuple(args), "kwargs": kwargs}
            return tuple(trees[part] for part in wrt)

        carry = eqx.combine(jtu.tree_unflatten(self.carry_tree, leaves.carry), self.carry_static)
        return LayerVisit(
            leaves.layer_index, layer, carry, tuple(args), kwargs, cotangent, layer_state, kind.name, vjp
        )


def cotangent_leaves(
    cotangent: PyTree, like: PyTree, mask: tuple[bool, ...], what: str, source: str
) -> Arrays:
    """The leaves of a cotangent that are in the mask, zeros for missing ones; checked as below."""
    types, structure = jtu.tree_flatten(like, is_leaf=is_named)
    leaves = structure.flatten_up_to(checked_cotangent(cotangent, like, what, source))
    return [
        jnp.zeros(type_.shape, type_.dtype) if leaf is None else leaf
        for leaf, type_, is_perturbed in zip(leaves, map(raw_array, types), mask, strict=True)
        if is_perturbed
    ]


def checked_cotangent(cotangent: PyTree, like: PyTree, what: str, source: str) -> PyTree:
    """A cotangent of `like` with raw arrays as leaves, and None for missing ones."""

    def check(path: KeyPath, type_: Any, leaf: Any) -> Any:
        where, given, expected = f"{what}{jtu.keystr(path)}", raw_array(leaf), raw_array(type_)
        if given is None or not is_differentiable(expected.dtype):
            return None
        if not eqx.is_array_like(given):
            fix = "Give an array, or None for zeros."
            if isinstance(leaf, tuple):
                fix = 'Unpack it: visit.vjp returns a tuple, (carry_ct,) = visit.vjp("carry").'
            raise TypeError(f"The cotangent of {where} {source} is {describe(leaf)}. {fix}")
        given = jnp.asarray(given)
        same_axes = getattr(leaf, "axes", None) == getattr(type_, "axes", None)
        found, wanted = (
            (describe(given), describe(expected)) if same_axes else (describe(leaf), describe(type_))
        )
        if found != wanted:
            raise ValueError(
                f"The cotangent of {where} {source} is {found}, and {where} is {wanted}. Give it the same "
                "axes in the same order, and the same shape and dtype."
            )
        return given

    paths_and_types, structure = jtu.tree_flatten_with_path(like, is_leaf=is_named)
    try:
        leaves = [None] * len(paths_and_types) if cotangent is None else structure.flatten_up_to(cotangent)
    except ValueError as error:
        raise ValueError(
            f"The cotangent of {what} {source} has another structure than {what}: {error}"
        ) from None
    checked = [check(*entry, leaf) for entry, leaf in zip(paths_and_types, leaves, strict=True)]
    return jtu.tree_unflatten(structure, checked)
