"""What a visitor of the layers is given in a reverse sweep, and what it returns.

A user's visitor is a function `(visit, state) -> LayerResult`, which a reverse *sweep*
(the loop over layers of `_sweep/`) calls for each layer. The sweep works on lists of
arrays, visitors on trees. `SweepTypes`, which the forward sweep of `sweep_back.py`
makes, has the structures: `SweepTypes.visit` makes a `LayerVisit` of the sweep's
`LeafVisit`. What the visitor returned is checked in `returned.py`.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax.tree_util as jtu
from haliax import Axis
from jax.extend.core import get_opaque_trace_state

from .. import _xla_hints as xla_hints
from .._static import PyTree
from .._sweep.gradient import (
    LayerInputs,
    LayerPullback,
    LeafVisit,
    Perturbed,
    pick,
    scatter_leaves,
)
from .._sweep.kinds import Kind
from .._sweep.programs import description
from .._sweep.slots import Arrays
from .._sweep.spec import SweepSpec
from .._sweep.store import Index, cotangent_as
from .layer_axis import Join, TreeLayout


class LayerCotangents(NamedTuple):
    """What `LayerVisit.vjp` returns: trees like those of the visit, None for leaves
    without a gradient.
    """

    carry: PyTree  # of the layer's input
    layer: PyTree  # of its weights
    # Of its further arguments; of those that layers share, this layer's part.
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]  # of its keyword arguments


@dataclass(frozen=True, eq=False)
class LayerVisit:
    """One layer, as a visitor of the reverse sweep is given it.

    Attributes:
        layer_index: its index on the axis, whatever the policy: `blocks[layer_index]`.
            An int32, or an int where the loop is unrolled. For a value for each layer
            return it as `layer_state`, which works for a stack without layers too.
        layer: the layer.
        carry: its input.
        args: its further arguments: slices of those that are split, and the shared
            ones.
        kwargs: its keyword arguments.
        cotangent: of its output carry; with `scan_vjp` a pair, of carry and output.
        layer_state: its entry of the layers' state.
        kind: the name of its kind, of a `StackedPattern`; `None` where layers are of
            one kind.
    """

    layer_index: Index
    layer: PyTree
    carry: PyTree
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    cotangent: PyTree
    layer_state: PyTree
    kind: str | None
    _compute: Callable[[], LayerCotangents] = field(repr=False)
    # What `vjp` has returned, each with the trace in which it was called
    _known: list[tuple[Any, LayerCotangents]] = field(default_factory=list, repr=False)

    def vjp(self) -> LayerCotangents:
        """The vector-Jacobian products with `cotangent`.

        Returns:
            A named tuple of `carry`, `layer`, `args` and `kwargs`, trees like these
            with `None` for leaves without a gradient.

        Cost: one evaluation of the layer, unless all its internals were saved, and its
        transpose; XLA removes what is not used. A second call returns the same arrays;
        in another trace, as in each branch of a `jax.lax.cond`, they are computed anew.
        """
        trace = get_opaque_trace_state()
        for known_trace, cotangents in self._known:
            if known_trace == trace:
                return cotangents
        cotangents = self._compute()
        self._known.append((trace, cotangents))
        return cotangents


class LayerResult(NamedTuple):
    """What a visitor returns.

    Attributes:
        carry: the cotangent of the layer's input carry.
        layer: the layer with new arrays, which replace the old ones; `None` leaves it
            unchanged, and so does `None` in place of a leaf.
        args: the cotangents of the further arguments, as of `visit.vjp()`; those of
            shared ones are summed over the layers. What is `None` here for all layers
            is not computed, and `None` in the `SweepResult` too.
        kwargs: the cotangents of the keyword arguments, likewise.
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
    # For each kind, what puts the trees `((layer, *args), kwargs)` together
    layouts: tuple[TreeLayout, ...]
    # For each kind the structure of a layer's output, of its arrays alone
    y_trees: tuple[Any, ...]
    # The layers' axis
    axis: Axis
    # Makes one tree of those of each kind
    join: Join
    # The structure of a carry's arrays
    carry_tree: Any
    # What is no array in a carry
    carry_static: Any
    # The types of the first carry's arrays, as the caller gave them
    init_types: tuple[Any, ...]
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
        for kind in self.spec.kinds:
            pullbacks.append(LayerPullback(kind, self.perturbed).jaxpr)
        static = (
            self.has_output,
            self.spec,
            self.perturbed,
            self.layouts,
            self.y_trees,
            self.axis,
            self.join,
            self.carry_tree,
            self.init_types,
        )
        return description((static, pullbacks, trees))

    def arguments(self, kind: Kind, shared: Arrays) -> Arrays:
        """Of what layers of a kind share, the arguments: what they close over is in
        front.
        """
        count = len(self.layouts[kind.number].with_role("shared"))
        return shared[len(shared) - count :]

    def carry_cotangent(self, leaves: Arrays) -> PyTree:
        """The cotangent of a carry, from its leaves that have one."""
        scattered = scatter_leaves(leaves, self.perturbed.carry)
        return jtu.tree_unflatten(self.carry_tree, scattered)

    def init_cotangent(self, leaves: Arrays) -> PyTree:
        """The cotangent of the first carry, from those of the leaves that have one."""
        types = pick(self.init_types, self.perturbed.carry)
        return self.carry_cotangent([*map(cotangent_as, leaves, types)])

    def cotangents(self, kind: Kind, leaves: LayerInputs) -> LayerCotangents:
        """The cotangents of a layer's inputs, from those of its perturbed leaves."""
        masks = self.perturbed.of_layer(kind)
        of_shared, _, of_x = map(scatter_leaves, leaves, masks)
        (layer, *args), kwargs = self.layouts[kind.number].layer(
            of_x, self.arguments(kind, of_shared), cotangents=True
        )
        carry = self.carry_cotangent(leaves[1])
        return LayerCotangents(carry, layer, tuple(args), kwargs)

    def visit(self, visit: LeafVisit, layer_state: PyTree) -> LayerVisit:
        """The same visit of a layer, with trees in the place of lists of arrays."""
        kind = visit.pullback.kind
        shared, carry, _ = visit.inputs
        (layer, *args), kwargs = self.layouts[kind.number].layer(
            visit.x, self.arguments(kind, shared)
        )
        carry = jtu.tree_unflatten(self.carry_tree, carry)
        carry_ct, y_ct = visit.cotangents
        cotangent = self.carry_cotangent(carry_ct)
        if self.has_output:
            y_ct = scatter_leaves(y_ct, self.perturbed.ys[kind.number])
            cotangent = cotangent, jtu.tree_unflatten(self.y_trees[kind.number], y_ct)
        pattern = self.spec.pattern
        return LayerVisit(
            visit.index,
            layer,
            eqx.combine(carry, self.carry_static),
            tuple(args),
            kwargs,
            cotangent,
            layer_state,
            pattern and pattern.names[kind.number],
            functools.partial(self._vjp, visit),
        )

    def _vjp(self, visit: LeafVisit) -> LayerCotangents:
        cotangents = self.cotangents(visit.pullback.kind, visit.vjp())
        parts = []
        for part in cotangents[1:]:
            parts.append(
                xla_hints.gradient_for_visitor(
                    part,
                    cotangents.carry,
                    carry_from_host=self.spec.remat.boundaries_off_device,
                )
            )
        return LayerCotangents(cotangents.carry, *parts)
