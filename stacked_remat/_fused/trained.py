"""Which arrays of a model a fused update trains, and the trees in which an optimizer is given them."""

import contextlib
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

from .._activity import active_variables
from .._messages import axes_text, shortened
from .._scan.checks import describe
from .._scan.marks import is_split, raw_array
from .._stacked import StackedKinds, layer_types
from .._static import PyTree
from .folds import FollowedStack, leaves_or_none


def _is_folded(node: PyTree) -> bool:
    return isinstance(node, StackedKinds)


def _is_none(node: PyTree) -> bool:
    return node is None


def masked(tree: PyTree, mask: Iterable[bool]) -> PyTree:
    """A tree with None in the place of the leaves, None being one, that the mask leaves out."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_none)
    kept = [leaf if is_ else None for leaf, is_ in zip(leaves, mask, strict=True)]
    return jax.tree.unflatten(structure, kept)


def replaced(tree: PyTree, mask: Iterable[bool], new: Iterable[PyTree]) -> PyTree:
    """A tree with other leaves where the mask says so."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_none)
    given = iter(new)
    return jax.tree.unflatten(
        structure, [next(given) if is_ else leaf for leaf, is_ in zip(leaves, mask, strict=True)]
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Folded:
    """Layers that a loss folds, and the same with None in the place of what is not trained.

    By the name of each kind that is trained, one for a `Stacked`, `masks` say which leaves of a layer are,
    None being one.
    """

    name: str
    layers: StackedKinds
    trained: StackedKinds

    @functools.cached_property
    def masks(self) -> dict[str, list[bool]]:
        leaves = {kind: leaves_or_none(stack) for kind, stack in self.trained._stacks.items()}
        masks = {kind: [leaf is not None for leaf in own] for kind, own in leaves.items()}
        return {kind: mask for kind, mask in masks.items() if any(mask)}

    def layer_types(self, kind: str) -> PyTree:
        return masked(layer_types(self.layers._stacks[kind]), self.masks[kind])

    def with_layers(self, layers: dict[str, PyTree]) -> PyTree:
        """These with a layer in the place of the stacks of some kinds, and None in that of other arrays."""
        none, new = eqx.filter(self.layers, False), [*layers.values()]
        return eqx.tree_at(
            lambda it: [it._stacks[kind].stacked for kind in layers], none, new, is_leaf=_is_none
        )

    def check(self) -> None:
        for kind, stack in self.trained._stacks.items():
            for path, leaf in jtu.tree_leaves_with_path(stack, is_leaf=is_named_array):
                if raw_array(leaf) is not None and not is_split(leaf, stack.Layers):
                    name = self.name + (f".stacks[{kind!r}]" if kind else "") + jtu.keystr(path)
                    shape = axes_text(leaf.axes) if is_named_array(leaf) else describe(leaf)
                    raise ValueError(
                        f"{name} ({shape}) is shared by all layers, so a fused update cannot update it with "
                        "one of them. Give it the layers' axis, keep it outside of the stack, or leave it "
                        "out of trainable."
                    )


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """What of a model is trained, and how the optimizer sees it.

    The nodes are the model's leaves, what is folded being one, and `trained` the same with None in the place
    of arrays that are not. `folds` are those with trained arrays, by their numbers among the nodes.
    """

    structure: Any
    nodes: list[PyTree]
    trained: list[PyTree]
    folds: dict[int, Folded]

    @staticmethod
    def of(model: PyTree, trainable: Any) -> "Trained":
        paths_and_nodes, structure = jtu.tree_flatten_with_path(model, is_leaf=_is_folded)
        nodes = structure.flatten_up_to(eqx.filter(model, trainable))
        folds = {
            i: Folded(f"model{jtu.keystr(path)}", node, own)
            for i, ((path, node), own) in enumerate(zip(paths_and_nodes, nodes, strict=True))
            if _is_folded(node) and jax.tree.leaves(own)
        }
        found = Trained(structure, [node for _, node in paths_and_nodes], nodes, folds)
        found._check()
        return found

    def _check(self) -> None:
        if not self.folds:
            raise ValueError(
                "The model has no Stacked with trained arrays, so there is nothing to fuse. Let its layers "
                "be a Stacked, check trainable, or use jax.value_and_grad and optimizer.update."
            )
        for path, leaf in jtu.tree_leaves_with_path(self.structure.unflatten(self.trained)):
            if not eqx.is_inexact_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
                raise ValueError(
                    f"model{jtu.keystr(path)} can't be trained: {leaf!r} is not a floating-point array. "
                    "Leave it out of trainable."
                )
        for folded in self.folds.values():
            folded.check()

    @property
    def kinds(self) -> list[tuple[int, str]]:
        """The kinds of layers that are trained, each with the number of what is folded."""
        return [(i, kind) for i, folded in self.folds.items() for kind in folded.masks]

    def in_loss(self, rest: PyTree, weights: Sequence[PyTree]) -> PyTree:
        """The model with other trained arrays, and a `FollowedStack` in the place of what is folded."""
        pairs = zip(self.folds.values(), weights, strict=True)
        stacks = [FollowedStack(eqx.combine(new, folded.layers), folded.name) for folded, new in pairs]
        return self.updated(stacks, rest)

    @property
    def weights(self) -> list[PyTree]:
        return [folded.trained for folded in self.folds.values()]

    def only_layer(self, number: int, kind: str, layer: PyTree) -> PyTree:
        """The model with this layer in the place of a stack, and None in the place of all other arrays."""
        nodes = [eqx.filter(node, False) for node in self.nodes]
        nodes[number] = self.folds[number].with_layers({kind: layer})
        return self.structure.unflatten(nodes)

    def only_rest(self) -> PyTree:
        """The model with None in the place of all that is not trained, or in a stack that is."""
        pairs = enumerate(self.trained)
        return self.structure.unflatten([eqx.filter(own, i not in self.folds) for i, own in pairs])

    def updated(self, folded: Iterable[PyTree], rest: PyTree) -> PyTree:
        """The model with others in the place of what is folded, and with the arrays of `rest`."""
        given = iter(folded)
        parts = enumerate(zip(self.structure.flatten_up_to(rest), self.nodes, strict=True))
        return self.structure.unflatten(
            [next(given) if i in self.folds else eqx.combine(new, node) for i, (new, node) in parts]
        )

    def check_optimizer(self, optimizer: Any, dtype: DTypeLike | None) -> None:
        """Refuse an optimizer that needs the gradients of several parts of the model at once."""
        found = coupling(optimizer, *self._with_layers(1), dtype)
        if found is None:
            # A second layer finds what reads all arrays, such as a norm; an optimizer that knows arrays
            # by the nodes that hold them may not take it.
            with contextlib.suppress(Exception):
                found = coupling(optimizer, *self._with_layers(2), dtype)
        if found is not None:
            raise ValueError(found)

    def _with_layers(self, count: int) -> tuple[PyTree, list[Any]]:
        """The model with the types of one layer in each stack, and the part that each type belongs to.

        With a `count` of layers a tuple, of a type for each of them, is in the place of a type.
        """
        nodes, owners = list(self.trained), []
        for i, node in enumerate(nodes):
            if i not in self.folds:
                owners += [(-1, "", 0)] * len(jax.tree.leaves(node))
                continue
            layers = {kind: self.folds[i].layer_types(kind) for kind in self.folds[i].masks}
            for kind, layer in layers.items():
                owners += [(i, kind, k) for k in range(count)] * len(jax.tree.leaves(layer))
            if count > 1:
                layers = jax.tree.map(lambda leaf: (leaf,) * count, layers)
            nodes[i] = self.folds[i].with_layers(layers)
        return self.structure.unflatten(nodes), owners


def state_of_layers(leaves: Iterable[PyTree], of_one: Any, Layers: Axis) -> PyTree:
    """The states of all layers as a tree like that of one, from its arrays, which have the layers in front.

    The axis is put in front of the named arrays that have the shapes that their names say; Adafactor's
    statistics, for one, have not.
    """

    def with_axis(leaf: Any) -> Any:
        if not is_named_array(leaf) or not hasattr(leaf.array, "shape"):
            return leaf  # what an optimizer has in the place of an array that it leaves out has no shape
        is_whole = leaf.array.shape[1:] == tuple(axis.size for axis in leaf.axes)
        return NamedArray(leaf.array, (Layers, *leaf.axes)) if is_whole else leaf

    state = jax.tree.unflatten(jax.tree.structure(of_one), leaves)
    return jax.tree.map(with_axis, state, is_leaf=is_named_array)


def coupling(optimizer: Any, params: PyTree, owners: Sequence[Any], dtype: DTypeLike | None) -> str | None:
    """How an optimizer updates one part by the gradient of another; refuses a state whose types change.

    Traces its update of all parts at once and follows the data, through the state to later steps too. Nothing
    is computed. `params` are types, and `owners` the part that each of them belongs to.
    """
    gradients = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype), params)
    state = jax.eval_shape(optimizer.init, params)
    trace = jax.make_jaxpr(optimizer.update, return_shape=True)
    closed, (updates, after) = trace(gradients, state, params)
    _check_types(state, after)
    jaxpr = closed.jaxpr
    count, states = len(owners), len(jax.tree.leaves(state))
    invars, outvars = list(jaxpr.invars), list(jaxpr.outvars)
    state_in, state_out = invars[count : count + states], outvars[-states:] if states else []
    paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(params)]
    if len(jax.tree.leaves(updates)) != count:
        return None  # optax has the error message for it
    for owner in sorted(set(owners)):
        own = [i for i in range(count) if owners[i] == owner]
        reached = {invars[i] for i in own} | {invars[count + states + i] for i in own}
        while True:
            found = active_variables(jaxpr, reached, counts=lambda _: True)
            later = {before for before, after in zip(state_in, state_out, strict=True) if after in found}
            if later <= reached:
                break
            reached |= later
        coupled = [i for i in range(count) if owners[i] != owner and outvars[i] in found]
        if coupled:
            updated, read = paths[coupled[0]], paths[own[0]]
            return (
                f"The optimizer's update of {updated} depends on the gradient of {read}, and a fused update "
                "has no two layers' gradients at once. Of the transformations of optax, clip_by_global_norm "
                "and apply_if_finite do this. For clipping give fused_update max_grad_norm=...; leave the "
                "others out. Its arrays are "
                f"{shortened(paths, most=8)}."
            )
    return None


def _check_types(before: PyTree, after: PyTree) -> None:
    pairs = zip(jtu.tree_leaves_with_path(before), jtu.tree_leaves_with_path(after), strict=False)
    for (path, old), (new_path, new) in pairs:
        if path != new_path or (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"The optimizer's state at {jtu.keystr(path)} is {old.dtype}{list(old.shape)} before an "
                f"update and {new.dtype}{list(new.shape)} after it, and a loop over layers keeps its types. "
                "Give the gradients the dtype of the state (gradient_dtype), or the optimizer a dtype for it."
            )
