"""What becomes of the arguments and results of a scan: `in_axes` and `out_axes`, checked."""

from collections.abc import Mapping
from typing import Any

import jax.tree_util as jtu
from flax import nnx

from .._static import PyTree


class Axes:
    """What becomes of arguments and of results, as a tuple of these, checked."""

    def __init__(self, in_axes: Any, out_axes: Any, metadata: Mapping[str, Any]):
        self.has_one_result = not isinstance(out_axes, tuple)
        self.in_axes, self.metadata = in_axes, metadata
        self.carry_in, self.carry_out = _carry_of("in_axes", in_axes), _carry_of("out_axes", out_axes)
        self.out_axes = (out_axes,) if self.has_one_result else out_axes
        if (self.carry_in is None) != (self.carry_out is None):
            raise ValueError(
                "If one of in_axes or out_axes has Carry, the other must also have Carry. Got "
                f"in_axes={in_axes!r} and out_axes={out_axes!r}."
            )
        for path, axis in jtu.tree_leaves_with_path(out_axes, is_leaf=_is_axis):
            parts = axis.items() if isinstance(axis, nnx.StateAxes) else [("", axis)]
            if any(part is None or (where and part is nnx.Carry) for where, part in parts):
                raise ValueError(
                    f"Cannot broadcast output state. Got {axis} at out_axes{jtu.keystr(path)}: every layer "
                    "has an output of its own. Give it an axis."
                )

    @property
    def name(self) -> str:
        """Of the layers' axis."""
        return str(self.metadata.get(nnx.PARTITION_NAME) or "layers")

    def take_carry(self, result: PyTree) -> tuple[Any, tuple[PyTree, ...]]:
        """The carry, and what `f` returns, as a tuple, without it."""
        results = (result,) if self.has_one_result else result
        if not isinstance(results, tuple) or len(results) != len(self.out_axes):
            found = f"{len(result)} results" if isinstance(result, tuple) else type(result).__name__
            raise ValueError(
                f"out_axes has {len(self.out_axes)} entries, {self.out_axes!r}, and the function returned "
                f"{found}. Return a tuple with one for each."
            )
        if self.carry_out is None:
            return None, results
        return results[self.carry_out], replaced(results, self.carry_out, None)

    def put_carry(self, carry: PyTree, results: tuple[PyTree, ...]) -> PyTree:
        """What `nnx.scan` returns: the inverse of `take_carry`."""
        results = results if self.carry_out is None else replaced(results, self.carry_out, carry)
        return results[0] if self.has_one_result else results


def _carry_of(what: str, axes: Any) -> int | None:
    """Which argument or result is the carry."""
    if isinstance(axes, list):
        raise TypeError(f"{what} is an axis, nnx.Carry, None or a tuple of them; got {axes!r}.")
    if axes is nnx.Carry:
        return 0
    paths = [path for path, axis in jtu.tree_leaves_with_path(axes, is_leaf=_is_axis) if axis is nnx.Carry]
    at = " and ".join(f"{what}{jtu.keystr(path)}" for path in paths)
    if len(paths) > 1:
        raise ValueError(f"Found multiple Carry definitions, {at}. Carry a tuple of them as one argument.")
    if paths and (len(paths[0]) != 1 or not isinstance(axes, tuple)):
        raise ValueError(
            f"Carry must be a whole argument or result, it cannot be nested: {at}. Pass the carry as an "
            "argument of its own."
        )
    return paths[0][0].idx if paths else None


def _is_axis(axis: Any) -> bool:
    return axis is None or isinstance(axis, nnx.StateAxes)


def replaced(values: tuple[PyTree, ...], index: int, value: PyTree) -> tuple[PyTree, ...]:
    """The tuple with another entry at `index`."""
    return (*values[:index], value, *values[index + 1 :])
