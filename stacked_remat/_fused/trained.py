"""Which arrays of a model a fused update trains, and the trees in which an optimizer is
given them.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from haliax import Axis, NamedArray
from haliax.util import is_named_array
from jaxtyping import DTypeLike

from .._activity import active_carry, active_outputs
from .._messages import shortened
from .._scan.checks import describe
from .._scan.marks import is_split, raw_array
from .._stacked import Stacked, StackedKinds, layer_types
from .._static import PyTree
from .folds import leaves_or_none


def masked(tree: PyTree, mask: Iterable[bool]) -> PyTree:
    """A tree with None in the place of the leaves, None being one, that the mask leaves
    out.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda node: node is None)
    kept = [leaf if is_ else None for leaf, is_ in zip(leaves, mask, strict=True)]
    return jax.tree.unflatten(structure, kept)


def _with_block(node: StackedKinds, kind: str, block: PyTree) -> PyTree:
    """Stacks with another block of a kind."""
    return node._with_blocks(
        node._per_kind(lambda name, stack: block if name == kind else stack.stacked)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedLayers:
    """Layers of one kind; `mask` says which leaves of a layer are trained, None being a
    leaf.
    """

    node: int
    kind: str
    stack: Stacked
    mask: list[bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """A model, and `trained`, the same with None in the place of arrays that are not
    trained.

    Nodes are the model's leaves, stacks being leaves; `names` has those that are stacks
    with trained arrays.
    """

    model: PyTree
    trained: PyTree
    structure: Any
    names: dict[int, str]

    @staticmethod
    def of(model: PyTree, trainable: Any) -> "Trained":
        paths_and_nodes, structure = jtu.tree_flatten_with_path(
            model, is_leaf=lambda node: isinstance(node, StackedKinds)
        )
        trained = eqx.filter(model, trainable)
        own = structure.flatten_up_to(trained)
        names = {
            i: f"model{jtu.keystr(path)}"
            for i, (path, node) in enumerate(paths_and_nodes)
            if isinstance(node, StackedKinds) and jax.tree.leaves(own[i])
        }
        found = Trained(model, trained, structure, names)
        found._check()
        return found

    def _check(self) -> None:
        if not self.names:
            raise ValueError(
                "The model has no Stacked with trained arrays, so there is nothing to"
                " fuse. Let its layers be a Stacked, check trainable, or use"
                " jax.value_and_grad and optimizer.update."
            )
        for path, leaf in jtu.tree_leaves_with_path(self.trained):
            if not eqx.is_inexact_array(leaf) and not isinstance(
                leaf, jax.ShapeDtypeStruct
            ):
                raise ValueError(
                    f"model{jtu.keystr(path)} can't be trained: {leaf!r} is not a"
                    " floating-point array. Leave it out of trainable."
                )
        nodes = self.nodes(self.trained)
        for i, name in self.names.items():
            for path, leaf in jtu.tree_leaves_with_path(
                nodes[i], is_leaf=is_named_array
            ):
                if raw_array(leaf) is not None and not is_split(leaf, nodes[i].Layers):
                    raise ValueError(
                        f"{name}{jtu.keystr(path)} ({describe(leaf)}) is shared by all"
                        " layers, so a fused update cannot update it with one of them."
                        " Give it the layers' axis, keep it outside of the stack, or"
                        " leave it out of trainable."
                    )

    def nodes(self, tree: PyTree) -> list[PyTree]:
        """The nodes of a tree like the model."""
        return self.structure.flatten_up_to(tree)

    def with_nodes(self, tree: PyTree, nodes: dict[int, PyTree]) -> PyTree:
        """A tree like the model, with others in the place of these nodes."""
        return self.structure.unflatten(
            [nodes.get(i, node) for i, node in enumerate(self.nodes(tree))]
        )

    @functools.cached_property
    def layers(self) -> list[TrainedLayers]:
        stacks, trained, found = self.nodes(self.model), self.nodes(self.trained), []
        for i in self.names:
            for kind, own in trained[i]._stacks.items():
                mask = [leaf is not None for leaf in leaves_or_none(own)]
                if any(mask):
                    found.append(TrainedLayers(i, kind, stacks[i]._stacks[kind], mask))
        return found

    @property
    def rest(self) -> PyTree:
        """What is trained of the model, with None in the place of the arrays of
        stacks.
        """
        nodes = self.nodes(self.trained)
        return self.with_nodes(
            self.trained, {i: eqx.filter(nodes[i], False) for i in self.names}
        )

    def only_layer(self, own: TrainedLayers, layer: PyTree) -> PyTree:
        """The model with a layer's trained arrays in its stack's place, and None in the
        place of others.
        """
        none = eqx.filter(self.model, False)
        node = _with_block(
            self.nodes(none)[own.node], own.kind, masked(layer, own.mask)
        )
        return self.with_nodes(none, {own.node: node})

    def check_optimizer(self, optimizer: Any, dtype: DTypeLike | None) -> None:
        """Refuse an optimizer that needs the gradients of several parts of the model at
        once.
        """
        try:  # two layers find what reads all arrays, such as a norm
            found = coupling(optimizer, *self._with_layers(2), dtype)
        # An optimizer that knows arrays by the nodes that hold them may not take two.
        except Exception:
            found = coupling(optimizer, *self._with_layers(1), dtype)
        if found is not None:
            raise ValueError(found)

    def _with_layers(self, count: int) -> tuple[PyTree, list[Any]]:
        """What is trained, with the types of one layer in each stack, and the part that
        each belongs to.

        With a `count` of layers a tuple, of a type for each of them, is in the place of
        a type.
        """
        nodes = self.nodes(self.rest)
        owners = [[(-1, "", 0)] * len(jax.tree.leaves(node)) for node in nodes]
        for own in self.layers:
            layer = masked(layer_types(own.stack), own.mask)
            owners[own.node] += [(own.node, own.kind, k) for k in range(count)] * sum(
                own.mask
            )
            if count > 1:
                layer = jax.tree.map(lambda leaf: (leaf,) * count, layer)
            nodes[own.node] = _with_block(nodes[own.node], own.kind, layer)
        return self.structure.unflatten(nodes), sum(owners, [])


def state_of_layers(leaves: Iterable[PyTree], of_one: Any, Layers: Axis) -> PyTree:
    """The states of all layers as a tree like that of one, from its arrays, which have
    the layers in front.

    The axis is put in front of the named arrays that have the shapes that their names
    say; Adafactor's statistics, for one, have not.
    """

    def with_axis(leaf: Any) -> Any:
        if not is_named_array(leaf) or not hasattr(leaf.array, "shape"):
            # what an optimizer has in the place of an array that it leaves out has no
            # shape
            return leaf
        is_whole = leaf.array.shape[1:] == tuple(axis.size for axis in leaf.axes)
        return NamedArray(leaf.array, (Layers, *leaf.axes)) if is_whole else leaf

    state = jax.tree.unflatten(jax.tree.structure(of_one), leaves)
    return jax.tree.map(with_axis, state, is_leaf=is_named_array)


def coupling(
    optimizer: Any, params: PyTree, owners: Sequence[Any], dtype: DTypeLike | None
) -> str | None:
    """How an optimizer updates one part by the gradient of another; refuses a state
    whose types change.

    Traces its update of all parts at once and follows the data, through the state to
    later steps too. Nothing is computed. `params` are types, and `owners` the part that
    each of them belongs to.
    """
    gradients = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype), params
    )
    state = jax.eval_shape(optimizer.init, params)

    def step(given: Sequence[PyTree], state: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = optimizer.update(given[0], state, given[1])
        return state, updates

    closed, (after, updates) = jax.make_jaxpr(step, return_shape=True)(
        (gradients, params), state
    )
    _check_types(state, after)
    if len(jax.tree.leaves(updates)) != len(owners):
        return None  # optax has the error message for it
    jaxpr, counts = closed.jaxpr, lambda _: True
    constants, states = (
        [False] * len(closed.consts),
        [False] * len(jax.tree.leaves(state)),
    )
    paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(params)]
    for owner in sorted(set(owners)):
        own = [other == owner for other in owners]
        active_in = functools.partial(active_outputs, counts=counts)
        later = active_carry([(jaxpr, [*constants, *own, *own], ())], states, active_in)
        found = active_outputs(jaxpr, [*constants, *own, *own, *later], counts)[
            len(states) :
        ]
        coupled = [i for i, is_ in enumerate(found) if is_ and not own[i]]
        if coupled:
            updated, read = paths[coupled[0]], paths[own.index(True)]
            return (
                f"The optimizer's update of {updated} depends on the gradient of"
                f" {read}, and a fused update has no two layers' gradients at once. Of"
                " the transformations of optax, clip_by_global_norm and"
                " apply_if_finite do this. For clipping give fused_update"
                " max_grad_norm=...; leave the others out. Its arrays are"
                f" {shortened(paths, most=8)}."
            )
    return None


def _check_types(before: PyTree, after: PyTree) -> None:
    pairs = zip(
        jtu.tree_leaves_with_path(before),
        jtu.tree_leaves_with_path(after),
        strict=False,
    )
    for (path, old), (new_path, new) in pairs:
        if path != new_path or (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"The optimizer's state at {jtu.keystr(path)} is"
                f" {old.dtype}{list(old.shape)} before an update and"
                f" {new.dtype}{list(new.shape)} after it, and a loop over layers keeps"
                " its types. Give the gradients the dtype of the state"
                " (gradient_dtype), or the optimizer a dtype for it."
            )
