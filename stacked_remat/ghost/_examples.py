"""A batch as its examples: the loss function is given one at a time, under
`jax.vmap`.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from .._scan.checks import describe
from .._scan.marks import Marked, is_named, raw_array
from ..ops.per_device import each_example, mesh_axes


def check_axis(function: str, axis: Any) -> None:
    """Refuse what is given to `function` as `Examples` and is no axis."""
    if isinstance(axis, Axis):
        return
    size = axis if isinstance(axis, int) else "NUMBER"
    raise TypeError(
        f"{function}: Examples is the axis of the examples; got {describe(axis)}."
        f' Write Examples=haliax.Axis("example", {size}).'
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """The leaves of a batch, and which dimension of each has the examples, None where
    it has none.

    Named arrays and those that are marked `stacked_remat.shared` are one leaf. The
    examples are divided over these axes of the mesh.
    """

    leaves: list[Any]
    tree: Any
    dimensions: list[int | None]
    Batch: Axis
    over: tuple[str, ...]

    @staticmethod
    def of(batch: Any, Batch: Axis) -> "Examples":
        """Named arrays with the axis, and plain ones with its size as first dimension,
        have examples.
        """
        is_leaf = lambda leaf: is_named(leaf) or isinstance(leaf, Marked)  # noqa: E731
        leaves, tree = jax.tree.flatten(batch, is_leaf=is_leaf)
        dimensions = [_dimension(leaf, Batch) for leaf in leaves]
        return Examples(leaves, tree, dimensions, Batch, mesh_axes(Batch))

    @property
    def _arrays(self) -> list[Any]:
        """With the examples in front; None for those without."""
        pairs = zip(self.leaves, self.dimensions, strict=True)
        return [
            None if at is None else jnp.moveaxis(raw_array(leaf), at, 0)
            for leaf, at in pairs
        ]

    def take(self, number: Any) -> Any:
        return self._alone(jax.tree.map(lambda array: array[number], self._arrays))

    def _alone(self, arrays: list[Any]) -> Any:
        """A batch of one example, of arrays without the dimension of examples."""
        found = []
        for leaf, array, at in zip(self.leaves, arrays, self.dimensions, strict=True):
            if at is None:
                found.append(leaf)
                continue
            array = jnp.expand_dims(array, at)
            if is_named(leaf):
                axes = tuple(
                    a.resize(1) if a.name == self.Batch.name else a for a in leaf.axes
                )
                array = NamedArray(array, axes)
            found.append(array)
        return jax.tree.unflatten(self.tree, found)

    def map(self, fn: Callable[[Any, Any], Any], each: Any = None) -> Any:
        """What a function of one example returns, of all examples together.

        It takes one example's part of `each`, arrays with the examples in front, and a
        batch of it alone. Results have the examples in front.
        """

        def one(each: Any, arrays: list[Any]) -> Any:
            return fn(each, self._alone(arrays))

        options = {"axis_size": self.Batch.size, "spmd_axis_name": self.over or None}
        with self.alone():
            return jax.vmap(one, **options)(each, self._arrays)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Within it a batch has one example, also where derivatives are computed."""
        return each_example(self.Batch, self.over)

    def joined(self, one: Any, array: Any) -> Any:
        """A result of `map` as the loss function returns it; `one` is its type for one
        example.
        """
        if not is_named(one):
            return array[:, 0] if one.shape[:1] == (1,) else array
        at = _dimension(one, self.Batch)
        if at is None:
            return NamedArray(array, (self.Batch, *one.axes))
        array = jnp.moveaxis(jnp.squeeze(array, at + 1), 0, at)
        return NamedArray(
            array,
            tuple(self.Batch if n == at else own for n, own in enumerate(one.axes)),
        )


def _dimension(leaf: Any, Batch: Axis) -> int | None:
    if is_named(leaf):
        return next(
            (at for at, axis in enumerate(leaf.axes) if axis.name == Batch.name), None
        )
    return (
        0
        if eqx.is_array(leaf) and leaf.ndim > 0 and leaf.shape[0] == Batch.size
        else None
    )
