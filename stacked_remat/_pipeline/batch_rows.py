"""The arguments of a loss beside the model, divided into microbatches."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from .._scan.arguments import argument_namer, is_unsplit_key
from .._scan.marks import take_marks_off
from .._static import PyTree, is_array, is_named, raw_array, with_axes, with_leaves


@dataclasses.dataclass(frozen=True, eq=False)
class BatchRows:
    """The arguments, and which of their arrays are divided by rows."""

    # The arrays; those that are divided are `[row, microbatch, ...]`
    arrays: list[Any]
    # For each array whether it is divided
    is_divided: list[bool]
    # The arguments of one microbatch, without marks; arrays are replaced
    template: PyTree

    @staticmethod
    def of(loss: Callable, batch: tuple[PyTree, ...], microbatches: int) -> "BatchRows":
        """Divide a batch.

        Raises:
            ValueError: rows don't divide evenly, or a random key is for all.
        """
        name_of = argument_namer(loss, skip=1)
        entries, (tree, _) = take_marks_off((batch, {}))
        leaves = []
        arrays = []
        is_divided = []
        for path, leaf, rule in entries:
            array = raw_array(leaf)
            divides = is_array(array) and rule != "shared" and array.ndim > 0
            if rule == "default" and is_unsplit_key(name_of(path), leaf):
                raise ValueError(
                    f"{name_of(path)} is a single random key, from which every"
                    " microbatch would draw the same numbers. Give each its own,"
                    f" jax.random.split(key, {microbatches}), of which the loss is"
                    " given an array of one, or mark it stacked_remat.shared(...)."
                )
            if divides:
                rows = array.shape[0]
                if rows % microbatches:
                    raise ValueError(
                        f"{name_of(path)} has {rows} rows (shape {array.shape}), which"
                        f" don't divide into {microbatches} microbatches. Change"
                        " microbatches, or mark it stacked_remat.shared(...)."
                    )
                count = rows // microbatches
                array = jnp.reshape(array, (count, microbatches, *array.shape[1:]))
                if is_named(leaf):
                    first, *others = leaf.axes
                    leaf = with_axes(array, (first.resize(count), *others))
            leaves.append(leaf)
            if is_array(array):
                arrays.append(array)
                is_divided.append(divides)
        treedef = jtu.tree_structure(tree, is_leaf=is_named)
        return BatchRows(arrays, is_divided, jtu.tree_unflatten(treedef, leaves))

    def of_microbatch(self, arrays: Sequence[Any], number: Any) -> list[Any]:
        """The arrays of one microbatch, of all arrays."""
        found = []
        for array, divides in zip(arrays, self.is_divided, strict=True):
            found.append(
                lax.dynamic_index_in_dim(array, number, 1, keepdims=False)
                if divides
                else array
            )
        return found

    def arguments(self, arrays: Sequence[Any]) -> tuple[PyTree, ...]:
        """The arguments of the loss for one microbatch, with these arrays."""
        types, static = eqx.partition(self.template, is_array)
        return eqx.combine(with_leaves(types, arrays), static)
