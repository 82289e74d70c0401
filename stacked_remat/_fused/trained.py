"""Which arrays of a model a fused update trains, and the trees in which the optimizer
is given them.

`update.py` makes a `Trained` from the model and the user's filter spec, at each `init`
and each step. It says where the trained stacks are, and builds the trees for calls of
the optimizer. These are always shaped like the whole model, with None for what takes no
part, since Optax's masks and labels go by paths in the model:

- `only_layer`: one layer's arrays, without the layers' axis, in the stack's place. The
  optimizer is called with this for each layer.
- `rest`: all that is trained outside of stacks. The optimizer is called with this once.

One call for each layer gives the same updates as one call for all only if no update
depends on two layers' gradients. `coupling` proves that before anything is trained: it
traces the optimizer and follows which outputs can depend on which gradients.
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

from .._activity import active_carry, active_outputs, is_differentiable
from .._messages import shortened
from .._scan.checks import describe
from .._scan.marks import is_split, raw_array
from .._scan.returned import is_none
from .._stacked import Stacked, StackedKinds, layer_types
from .._static import PyTree, with_leaves
from .folds import leaves_or_none


def masked(tree: PyTree, mask: Iterable[bool]) -> PyTree:
    """A tree with None for the leaves that the mask leaves out.

    The mask has an entry for each leaf, None being one.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_none)
    pairs = zip(leaves, mask, strict=True)
    kept = [leaf if is_kept else None for leaf, is_kept in pairs]
    return jax.tree.unflatten(structure, kept)


def check_floating(trained: PyTree) -> None:
    """Refuse what is trained of a model where that is no floating-point array; shapes
    are taken too, of a model that is only sized.
    """
    for path, leaf in jtu.tree_leaves_with_path(trained):
        if not is_differentiable(getattr(leaf, "dtype", bool)):
            raise ValueError(
                f"model{jtu.keystr(path)} can't be trained: {leaf!r} is not a"
                " floating-point array. Leave it out of trainable."
            )


def check_split(trained_stack: PyTree, name: str, Layers: Axis, why: str) -> None:
    """Refuse what is trained of a stack, with this path in the model, where layers
    share an array; `why` says what can't be done then.
    """
    leaves = jtu.tree_leaves_with_path(trained_stack, is_leaf=is_named_array)
    for path, leaf in leaves:
        if raw_array(leaf) is not None and not is_split(leaf, Layers):
            raise ValueError(
                f"{name}{jtu.keystr(path)} ({describe(leaf)}) is shared by all layers,"
                f" so {why}. Give it the layers' axis, keep it outside of the stack, or"
                " leave it out of trainable."
            )


# The part of a model that is not in stacks, beside (node, kind, number) of layers.
_REST = (-1, "", 0)


def _with_block(stacks: StackedKinds, kind: str, block: PyTree) -> PyTree:
    """Stacks with another block (whose arrays may be of one layer) for one kind."""

    def block_of(name: str, stack: Stacked) -> PyTree:
        return block if name == kind else stack.stacked

    return stacks._with_blocks(stacks._per_kind(block_of))


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedLayers:
    """The layers of one kind in one stack; some of their arrays are trained."""

    # Index of their stack in `Trained.nodes`.
    node: int
    # Name of the kind in a `StackedPattern`; "" in a `Stacked`.
    kind: str
    # The layers, with what is not trained.
    stack: Stacked
    # For each leaf of a layer, None being a leaf: whether it is trained.
    mask: list[bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """A model and what of it is trained. Its *nodes* are its leaves, where a whole
    `Stacked` or `StackedPattern` is one leaf.
    """

    model: PyTree
    # The model with None for arrays that are not trained.
    trained: PyTree
    # The tree structure whose leaves are the nodes.
    structure: Any
    # By index of node, the path of each stack with trained arrays, as `model.blocks`.
    names: dict[int, str]

    @staticmethod
    def of(model: PyTree, trainable: Any) -> "Trained":
        paths_and_nodes, structure = jtu.tree_flatten_with_path(
            model, is_leaf=lambda node: isinstance(node, StackedKinds)
        )
        trained = eqx.filter(model, trainable)
        names = {}
        for i, trained_node in enumerate(structure.flatten_up_to(trained)):
            path, node = paths_and_nodes[i]
            # A stack without trained arrays is like any other part of the model.
            if isinstance(node, StackedKinds) and jax.tree.leaves(trained_node):
                names[i] = f"model{jtu.keystr(path)}"
        result = Trained(model, trained, structure, names)
        result._check()
        return result

    def _check(self) -> None:
        if not self.names:
            raise ValueError(
                "The model has no Stacked with trained arrays, so there is nothing to"
                " fuse. Let its layers be a Stacked, check trainable, or use"
                " jax.value_and_grad and optimizer.update."
            )
        check_floating(self.trained)
        # An array without the layers' axis would be updated at each layer, and each
        # update would change the layers that the sweep has still to replay.
        nodes = self.nodes(self.trained)
        for i, name in self.names.items():
            why = "a fused update cannot update it with one of them"
            check_split(nodes[i], name, nodes[i].Layers, why)

    def nodes(self, tree: PyTree) -> list[PyTree]:
        """The nodes of a tree like the model."""
        return self.structure.flatten_up_to(tree)

    def with_nodes(self, tree: PyTree, nodes: dict[int, PyTree]) -> PyTree:
        """A tree like the model, with others in the place of these nodes."""
        all_nodes = self.nodes(tree)
        for i, node in nodes.items():
            all_nodes[i] = node
        return self.structure.unflatten(all_nodes)

    @functools.cached_property
    def layers(self) -> list[TrainedLayers]:
        """The trained layers: by stack, and within a stack by kind."""
        stacks = self.nodes(self.model)
        trained = self.nodes(self.trained)
        layers = []
        for i in self.names:
            for kind, trained_stack in trained[i]._stacks.items():
                mask = [leaf is not None for leaf in leaves_or_none(trained_stack)]
                if any(mask):
                    stack = stacks[i]._stacks[kind]
                    layers.append(TrainedLayers(i, kind, stack, mask))
        return layers

    @property
    def rest(self) -> PyTree:
        """What is trained outside of stacks, with None for their arrays."""
        nodes = self.nodes(self.trained)
        for i in self.names:
            nodes[i] = eqx.filter(nodes[i], False)
        return self.structure.unflatten(nodes)

    def only_layer(self, layers: TrainedLayers, layer: PyTree) -> PyTree:
        """The model with one layer's trained arrays in its stack's place, and None for
        all other arrays.
        """
        nodes = self.nodes(eqx.filter(self.model, False))
        stacks = nodes[layers.node]
        block = masked(layer, layers.mask)
        nodes[layers.node] = _with_block(stacks, layers.kind, block)
        return self.structure.unflatten(nodes)

    def check_optimizer(self, optimizer: Any, dtype: DTypeLike | None) -> None:
        """Refuse an optimizer that needs the gradients of several parts of the model at
        once.
        """
        try:
            # One layer alone would hide what mixes the gradients of a stack, such as a
            # global norm; two of each stack show it.
            reason = coupling(optimizer, *self._with_layers(2), dtype)
        except Exception:
            # The two are a tuple in an array's place, which an optimizer that treats
            # arrays by the module that holds them may not take.
            reason = coupling(optimizer, *self._with_layers(1), dtype)
        if reason is not None:
            raise ValueError(reason)

    def _with_layers(self, count: int) -> tuple[PyTree, list[Any]]:
        """What is trained, with the types of `count` layers of each kind; and the part
        that each leaf belongs to: a layer (node, kind, number), or all the rest.

        Two layers are a tuple of two types in the place of each array.
        """
        nodes = self.nodes(self.rest)
        # By node, since the arrays of stacks are among those of the rest in the tree.
        owners = []
        for node in nodes:
            count_of_rest = len(jax.tree.leaves(node))
            owners.append([_REST] * count_of_rest)
        for layers in self.layers:
            node = layers.node
            kind = layers.kind
            block = masked(layer_types(layers.stack), layers.mask)
            if count > 1:
                block = jax.tree.map(lambda leaf: (leaf,) * count, block)
            nodes[node] = _with_block(nodes[node], kind, block)
            of_one_array = [(node, kind, number) for number in range(count)]
            owners[node] += of_one_array * sum(layers.mask)
        return self.structure.unflatten(nodes), sum(owners, [])


def state_of_layers(leaves: Iterable[PyTree], of_one: Any, Layers: Axis) -> PyTree:
    """The optimizer's states of all layers, as one tree.

    Args:
        leaves: the arrays of the state, with the layers in front.
        of_one: the state of one layer, which gives the structure.
        Layers: put in front of the axes of named arrays. Only where the array has the
            shape that its names say: Adafactor's statistics keep the names of the
            weight and drop a dimension.
    """

    def with_axis(leaf: Any) -> Any:
        # Optax's masks put objects without a shape in place of arrays.
        if not is_named_array(leaf) or not hasattr(leaf.array, "shape"):
            return leaf
        sizes = tuple(axis.size for axis in leaf.axes)
        if leaf.array.shape[1:] != sizes:
            return leaf
        return NamedArray(leaf.array, (Layers, *leaf.axes))

    state = with_leaves(of_one, leaves)
    return jax.tree.map(with_axis, state, is_leaf=is_named_array)


def coupling(
    optimizer: Any, params: PyTree, owners: Sequence[Any], dtype: DTypeLike | None
) -> str | None:
    """Whether the update of one part of the model depends on the gradient of another:
    an error message that names both, or None.

    The optimizer's update of all parts at once is traced, and for each part the data
    that depend on its gradient and weights are followed through the jaxpr, and through
    the state to later steps. Nothing is computed. The answer is conservative: a
    dependence by zero, which no value shows, counts.

    Args:
        optimizer: of Optax.
        params: types of the weights.
        owners: for each leaf of `params` the part that it belongs to.
        dtype: what gradients are cast to; None for that of the weights.

    Raises:
        ValueError: a type in the optimizer's state changes in an update.
    """

    def gradient(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype)

    gradients = jax.tree.map(gradient, params)
    state = jax.eval_shape(optimizer.init, params)

    def step(gradients: PyTree, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = optimizer.update(gradients, state, params)
        return state, updates

    trace = jax.make_jaxpr(step, return_shape=True)
    closed, (state_after, updates) = trace(gradients, params, state)
    _check_types(state, state_after)
    if len(jax.tree.leaves(updates)) != len(owners):
        return None  # Optax has an error of its own for that, once it is called.
    # Unlike for derivatives, integers and booleans count: apply_if_finite couples
    # layers by a flag.
    active_in = functools.partial(active_outputs, counts=lambda _: True)
    constants = [False] * len(closed.consts)
    inactive = [False] * len(jax.tree.leaves(state))
    leaves = jtu.tree_leaves_with_path(params)
    paths = [jtu.keystr(path) for path, _ in leaves]
    for part in sorted(set(owners)):
        # Its weights count as its gradients do: of other layers the optimizer, which is
        # called for one layer at a time, gets neither.
        in_part = [owner == part for owner in owners]
        inputs = [*constants, *in_part, *in_part]
        # The state is the carry of a loop over training steps.
        training_step = closed.jaxpr, inputs, ()
        in_state = active_carry([training_step], inactive, active_in)
        outputs = active_in(closed.jaxpr, [*inputs, *in_state])
        in_updates = outputs[len(inactive) :]
        for path, is_active, is_own in zip(paths, in_updates, in_part, strict=True):
            if is_active and not is_own:
                return _coupled(path, paths[in_part.index(True)], paths)
    return None


def _coupled(updated: str, read: str, paths: Sequence[str]) -> str:
    return (
        f"The optimizer's update of {updated} depends on the gradient of"
        f" {read}, and a fused update has no two layers' gradients at once. Of"
        " the transformations of optax, clip_by_global_norm and"
        " apply_if_finite do this. For clipping give fused_update"
        " max_grad_norm=...; leave the others out. Its arrays are"
        f" {shortened(paths, most=8)}."
    )


def _check_types(before: PyTree, after: PyTree) -> None:
    old_leaves = jtu.tree_leaves_with_path(before)
    new_leaves = jtu.tree_leaves_with_path(after)
    if len(old_leaves) != len(new_leaves):
        raise ValueError(
            f"The optimizer's state has {len(old_leaves)} arrays before an update and"
            f" {len(new_leaves)} after it, and a loop over layers keeps its structure."
            " Use an optimizer whose init makes all arrays that its update returns."
        )
    # A structure that changes otherwise shows as another path.
    pairs = zip(old_leaves, new_leaves, strict=True)
    for (path, old), (new_path, new) in pairs:
        old_type = old.shape, old.dtype
        new_type = new.shape, new.dtype
        if path != new_path or old_type != new_type:
            raise ValueError(
                f"The optimizer's state at {jtu.keystr(path)} is"
                f" {old.dtype}{list(old.shape)} before an update and"
                f" {new.dtype}{list(new.shape)} after it, and a loop over layers keeps"
                " its types. Give the gradients the dtype of the state"
                " (gradient_dtype), or the optimizer a dtype for it."
            )
