"""Which arrays of a model a fused update trains, and the trees in which an optimizer is given them."""

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from haliax import Axis, NamedArray
from haliax.util import is_named_array
from jax.tree_util import KeyPath
from jaxtyping import DTypeLike

from .._activity import active_variables
from .._messages import axes_text, shortened
from .._scan.checks import describe
from .._scan.marks import is_split, raw_array
from .._stacked import Stacked, layer_types
from .._stacked_pattern import StackedPattern
from .._static import PyTree
from .folds import FollowedStack, leaves_or_none


def _is_stack(node: PyTree) -> bool:
    return isinstance(node, Stacked)


def _is_folded(node: PyTree) -> bool:
    return isinstance(node, Stacked | StackedPattern)


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


@dataclasses.dataclass(frozen=True)
class FoldedLayers:
    """What a loss folds: the numbers of a pattern's stacks that are trained, by kind; None for one stack."""

    name: str
    path: KeyPath
    stacks: dict[str | None, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """What of a model is trained, and how the optimizer sees it.

    The nodes are the model's leaves, each stack being one, and `trained` the same with None in the place of
    arrays that are not. Those `followed` are stacks with trained arrays, which the loss folds.
    """

    model: PyTree
    nodes: list[PyTree]
    trained: list[PyTree]
    followed: list[int]
    names: list[str]
    folded: list[FoldedLayers]

    @staticmethod
    def of(model: PyTree, trainable: Any) -> "Trained":
        trained = eqx.filter(model, trainable)
        paths_and_nodes, structure = jtu.tree_flatten_with_path(model, is_leaf=_is_stack)
        nodes = structure.flatten_up_to(trained)
        followed = [i for i, node in enumerate(nodes) if _is_stack(node) and jax.tree.leaves(node)]
        paths = [paths_and_nodes[i][0] for i in followed]
        found = Trained(
            model,
            [node for _, node in paths_and_nodes],
            nodes,
            followed,
            [f"model{jtu.keystr(path)}" for path in paths],
            _folded(model, paths),
        )
        found._check()
        return found

    def _check(self) -> None:
        if not self.followed:
            raise ValueError(
                "The model has no Stacked with trained arrays, so there is nothing to fuse. Let its layers "
                "be a Stacked, check trainable, or use jax.value_and_grad and optimizer.update."
            )
        for path, leaf in jtu.tree_leaves_with_path(self._tree(self.trained)):
            if not eqx.is_inexact_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
                raise ValueError(
                    f"model{jtu.keystr(path)} can't be trained: {leaf!r} is not a floating-point array. "
                    "Leave it out of trainable."
                )
        for name, i in zip(self.names, self.followed, strict=True):
            Layers = self.nodes[i].Layers
            for path, leaf in jtu.tree_leaves_with_path(self.trained[i], is_leaf=is_named_array):
                if raw_array(leaf) is not None and not is_split(leaf, Layers):
                    shape = axes_text(leaf.axes) if is_named_array(leaf) else describe(leaf)
                    raise ValueError(
                        f"{name}{jtu.keystr(path)} ({shape}) is shared by all layers, so a "
                        "fused update cannot update it with one of them. Give it the layers' axis, keep it "
                        "outside of the stack, or leave it out of trainable."
                    )

    @property
    def stacks(self) -> list[Stacked]:
        return [self.nodes[i] for i in self.followed]

    def _tree(self, nodes: list[PyTree]) -> PyTree:
        return jax.tree.unflatten(jax.tree.structure(self.model, is_leaf=_is_stack), nodes)

    def in_loss(self, rest: PyTree, weights: Sequence[PyTree]) -> PyTree:
        """The model with other trained arrays, and a `FollowedStack` in the place of what is folded."""
        stacks = [
            replaced(stack, self.layer_mask(number), jax.tree.leaves(new))
            for number, (stack, new) in enumerate(zip(self.stacks, weights, strict=True))
        ]
        names = {folded.path: folded.name for folded in self.folded}

        def follow(path: KeyPath, node: PyTree) -> PyTree:
            return FollowedStack(node, names[path]) if path in names else node

        model = self.updated(stacks, jax.tree.leaves(rest))
        return jtu.tree_map_with_path(follow, model, is_leaf=_is_folded)

    @property
    def weights(self) -> list[PyTree]:
        return [self.trained[i] for i in self.followed]

    def layer_mask(self, number: int) -> list[bool]:
        """For each leaf of a layer, None among them, whether it is trained."""
        return [leaf is not None for leaf in leaves_or_none(self.trained[self.followed[number]])]

    def _nothing(self) -> list[PyTree]:
        return [eqx.filter(node, False) if _is_stack(node) else None for node in self.nodes]

    def layer_types(self, number: int) -> PyTree:
        """The types of one layer of a stack, with None in the place of each leaf that is not trained."""
        return masked(layer_types(self.nodes[self.followed[number]]), self.layer_mask(number))

    def only_layer(self, number: int, layer: PyTree) -> PyTree:
        """The model with this layer in the place of a stack, and None in the place of all other arrays."""
        nodes = self._nothing()
        i = self.followed[number]
        nodes[i] = _with_layer(nodes[i], layer)
        return self._tree(nodes)

    def only_rest(self) -> PyTree:
        """The model with None in the place of all that is not trained, or in a stack that is."""
        nodes = self._nothing()
        return self._tree(
            [
                old if i in self.followed else new
                for i, (old, new) in enumerate(zip(nodes, self.trained, strict=True))
            ]
        )

    def updated(self, stacks: Iterable[PyTree], rest: list[PyTree]) -> PyTree:
        """The model with other stacks, and with other arrays in the place of those of `only_rest`."""
        nodes = list(self.nodes)
        for i, stack in zip(self.followed, stacks, strict=True):
            nodes[i] = stack
        return eqx.combine(jax.tree.unflatten(jax.tree.structure(self.only_rest()), rest), self._tree(nodes))

    def check_optimizer(self, optimizer: Any, dtype: DTypeLike | None) -> None:
        """Refuse an optimizer that needs the gradients of several parts of the model at once.

        `dtype` is that of the gradients, None for that of the arrays.
        """
        found = coupling(optimizer, *self._with_layers(1), dtype)
        if found is None:
            # A second layer finds what reads all arrays, such as a norm; an optimizer that knows arrays
            # by the nodes that hold them may not take it.
            with contextlib.suppress(Exception):
                found = coupling(optimizer, *self._with_layers(2), dtype)
        if found is not None:
            raise ValueError(found)

    def _with_layers(self, count: int) -> tuple[PyTree, list[tuple[int, int]]]:
        """The model with the types of one layer in each stack, and the part that each type belongs to.

        With a `count` of layers a tuple, of a type for each of them, is in the place of a type.
        """
        nodes, owners = list(self.trained), []
        for i, node in enumerate(self.nodes):
            if i not in self.followed:
                owners += [(-1, 0)] * len(jax.tree.leaves(nodes[i]))
                continue
            number = self.followed.index(i)
            layer = self.layer_types(number)
            owners += [(number, k) for k in range(count)] * len(jax.tree.leaves(layer))
            layers = layer if count == 1 else jax.tree.map(lambda leaf: (leaf,) * count, layer)
            nodes[i] = _with_layer(node, layers)
        return self._tree(nodes), owners


def _folded(model: PyTree, paths: list[KeyPath]) -> list[FoldedLayers]:
    found = []
    for path, node in jtu.tree_leaves_with_path(model, is_leaf=_is_folded):
        stacks = {
            other[-1].key if isinstance(node, StackedPattern) else None: number
            for number, other in enumerate(paths)
            if other[: len(path)] == path
        }
        if stacks:
            found.append(FoldedLayers(f"model{jtu.keystr(path)}", path, stacks))
    return found


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


def _with_layer(stack: PyTree, layer: PyTree) -> PyTree:
    return eqx.tree_at(lambda stack: stack.stacked, stack, layer, is_leaf=_is_none)


def coupling(
    optimizer: Any, params: PyTree, owners: Sequence[tuple[int, int]], dtype: DTypeLike | None
) -> str | None:
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
