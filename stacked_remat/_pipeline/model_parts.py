"""The model of a pipeline: the stack whose layers are over the stages, and the rest.

Each stage has as many rows of the stack's arrays, one for each layer it may have. Where
the number of layers is no multiple of that of stages, rows follow those of the last
layer, so that the last stages have fewer layers, or none; nothing reads them. A stack
whose named arrays have these rows already is taken as it is: JAX takes and returns no
array of a jitted program that is divided unevenly, so a training loop keeps them so.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._fused.folds import leaves_or_none
from .._fused.trained import check_floating, check_split
from .._memory_spaces import has_host_arrays
from .._messages import shortened
from .._scan.checks import describe
from .._scan.layer_axis import axis_resized
from .._scan.marks import changed, is_split
from .._scan.returned import is_none
from .._stacked import Stacked, StackedKinds
from .._static import PyTree, is_array, is_named, raw_array, with_axes
from .._sweep.gradient import pick, scatter_leaves
from .._sweep.slots import inverted


@dataclasses.dataclass(frozen=True, eq=False)
class ModelParts:
    """A model as its stack and the leaves of the rest."""

    stack: Stacked
    # Its path, as `model.blocks`
    name: str
    # Of the model with the stack as one leaf, which is at `place`
    structure: Any
    place: int
    # All leaves of the rest; arrays are replaced
    leaves: list[Any]
    # For each array of the rest whether it is trained
    is_rest_trained: list[bool]
    # What is trained of the stack, which has None for other arrays
    trained_stack: PyTree
    # What is trained of the rest, in the same way
    trained_leaves: list[Any]

    @staticmethod
    def of(
        model: PyTree, find: Callable[[Any], Any] | None, trainable: Any
    ) -> "ModelParts":
        stack, name = _stack_of(model, find)
        _check_layers(stack, name)
        leaves, structure = jax.tree.flatten(model, is_leaf=lambda node: node is stack)
        place = next(i for i, leaf in enumerate(leaves) if leaf is stack)
        try:
            trained = eqx.filter(model, trainable)
        except ValueError as error:
            raise ValueError(
                "trainable is a function of leaves, or a tree of them and of booleans"
                f" with the structure of the model or of its top; got"
                f" {describe(trainable)}."
            ) from error
        trained_leaves = structure.flatten_up_to(trained)
        trained_stack = trained_leaves[place]
        trained_leaves[place] = leaves[place] = None
        is_rest_trained = []
        for leaf, kept in zip(leaves, trained_leaves, strict=True):
            if is_array(leaf):
                is_rest_trained.append(kept is not None)
        check_floating(trained)
        why = "all stages would have a gradient of it"
        check_split(trained_stack, name, stack.Layers, why)
        return ModelParts(
            stack,
            name,
            structure,
            place,
            leaves,
            is_rest_trained,
            trained_stack,
            trained_leaves,
        )

    def stack_types(self) -> Stacked:
        """The stack of all layers, with types for arrays."""
        count = self.stack.Layers.size

        def stack() -> Stacked:
            arrays = []
            for array, is_by_layer in zip(self.arrays, self.are_by_layer, strict=True):
                arrays.append(array[:count] if is_by_layer else array)
            return self.stack_of_rows(count, arrays)

        return eqx.filter_eval_shape(stack)

    def stack_of_rows(self, rows: int, arrays: Sequence[Any]) -> Stacked:
        """A stack of so many layers, with these arrays in place of the `arrays`."""
        remaining = iter(arrays)

        def with_array(leaf: Any) -> Any:
            if not is_array(raw_array(leaf)):
                return leaf
            array = next(remaining)
            if is_split(leaf, self.stack.Layers):
                return axis_resized(leaf, self.stack.Layers, rows, array)
            return with_axes(array, leaf.axes if is_named(leaf) else None)

        stacked = jtu.tree_map(with_array, self.stack.stacked, is_leaf=is_named)
        Layers = self.stack.Layers.resize(rows)
        return changed(self.stack, stacked=stacked, Layers=Layers)

    @property
    def arrays(self) -> list[Any]:
        """The arrays of the stack."""
        return [*map(raw_array, self._named_arrays)]

    @property
    def are_by_layer(self) -> list[bool]:
        """For each array of the stack whether layers have rows of it."""
        return [is_split(leaf, self.stack.Layers) for leaf in self._named_arrays]

    @property
    def _named_arrays(self) -> list[Any]:
        leaves = jtu.tree_leaves(self.stack, is_leaf=is_named)
        return [leaf for leaf in leaves if is_array(raw_array(leaf))]

    @property
    def rest(self) -> tuple[list[Any], list[Any]]:
        """The arrays of the rest: those that are trained, and the others."""
        arrays = [*filter(is_array, self.leaves)]
        is_trained = self.is_rest_trained
        return pick(arrays, is_trained), pick(arrays, inverted(is_trained))

    @property
    def is_layer_trained(self) -> list[bool]:
        """For each leaf of the stack, None being one."""
        return [leaf is not None for leaf in leaves_or_none(self.trained_stack)]

    def model(self, stack: PyTree, rest: Sequence[Any]) -> PyTree:
        """The model with another stack, and these arrays in the rest."""
        # In the order of `rest`, which is that of the leaves
        arrays = iter(rest)
        leaves = [next(arrays) if is_array(leaf) else leaf for leaf in self.leaves]
        leaves[self.place] = stack
        return self.structure.unflatten(leaves)

    def gradients(self, of_layers: Sequence[Any], of_rest: Sequence[Any]) -> PyTree:
        """The gradients as a tree like the model, with None for what has none; those of
        layers with as many rows as the layers' arrays.
        """
        trained = pick(leaves_or_none(self.stack), self.is_layer_trained)
        # The rows of layers that are not there have zeros
        of_layers = [
            gradient[: array.shape[0]]
            for gradient, array in zip(of_layers, trained, strict=True)
        ]
        structure = jax.tree.structure(self.trained_stack, is_leaf=is_none)
        stack = structure.unflatten(scatter_leaves(of_layers, self.is_layer_trained))
        gradients = iter(of_rest)
        leaves = []
        for leaf, kept in zip(self.leaves, self.trained_leaves, strict=True):
            has_one = is_array(leaf) and kept is not None
            leaves.append(next(gradients) if has_one else None)
        leaves[self.place] = stack
        return self.structure.unflatten(leaves)


def rows_of_stage(layers: int, stages: int) -> int:
    """How many layers a stage may have; the last ones may have fewer."""
    return -(-layers // stages)


def with_rows(array: Any, rows: int) -> Any:
    """An array of layers with zeros after the last, for so many rows in all."""
    added = rows - array.shape[0]
    return jnp.pad(array, [(0, added), *[(0, 0)] * (array.ndim - 1)])


def _stack_of(model: PyTree, find: Callable[[Any], Any] | None) -> tuple[Stacked, str]:
    """The stack that is divided, and its path."""
    nodes, _ = jtu.tree_flatten_with_path(
        model, is_leaf=lambda node: isinstance(node, StackedKinds)
    )
    stacks = {}
    for path, node in nodes:
        if isinstance(node, StackedKinds):
            stacks[f"model{jtu.keystr(path)}"] = node
    if find is not None:
        wanted = find(model)
        names = shortened([*stacks], ", ") or "none"
        stacks = {name: node for name, node in stacks.items() if node is wanted}
        if not stacks:
            raise ValueError(
                f"stack finds {describe(wanted)}, which is no Stacked of the model; it"
                f" has: {names}."
            )
    if len(stacks) != 1:
        found = shortened([*stacks], ", ") or "none"
        raise ValueError(
            f"pipeline divides one stack of the model; found {found}. Let its layers be"
            " a Stacked, and say which, stack=lambda model: model.blocks."
        )
    ((name, stack),) = stacks.items()
    if not isinstance(stack, Stacked):
        raise TypeError(
            f"{name} is a {type(stack).__name__}; pipeline divides a Stacked, whose"
            " layers are all of one kind."
        )
    return stack, name


def _check_layers(stack: Stacked, name: str) -> None:
    if not stack.Layers.size:
        raise ValueError(f"{name} has no layers; a pipeline divides them over stages.")
    if has_host_arrays(stack):
        raise ValueError(
            f"{name} is in host memory; a pipeline takes layers on devices:"
            " stacked_remat.streaming.to_device(model)."
        )
