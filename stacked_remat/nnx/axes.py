"""What becomes of the arguments and results of a scan: `in_axes` and `out_axes`, checked."""

from collections.abc import Mapping
from typing import Any

import jax.tree_util as jtu
from flax import nnx


class Axes:
    """What becomes of arguments and results, checked."""

    def __init__(self, in_axes: Any, out_axes: Any, metadata: Mapping[str, Any]):
        self.in_axes, self.out_axes, self.metadata = in_axes, out_axes, metadata
        self.carry_in = _carry_index("in_axes", in_axes)
        self.carry_out = _carry_index("out_axes", out_axes)
        if (self.carry_in is None) != (self.carry_out is None):
            raise ValueError(
                "If one of in_axes or out_axes has Carry, the other must also have Carry. Got "
                f"in_axes={in_axes!r} and out_axes={out_axes!r}."
            )
        for path, axis in jtu.tree_leaves_with_path(out_axes, is_leaf=_is_axis):
            for where, part in axis.items() if isinstance(axis, nnx.StateAxes) else [(None, axis)]:
                if part is None or (where is not None and part is nnx.Carry):
                    said = f"StateAxes({{{where}: {part}}})" if where is not None else "None"
                    raise ValueError(
                        f"Cannot broadcast output state. Got {said} at out_axes{jtu.keystr(path)}: every "
                        "layer has an output of its own. Give it an axis."
                    )

    @property
    def name(self) -> str:
        """Of the layers' axis."""
        return str(self.metadata.get(nnx.PARTITION_NAME) or "layers")

    def take_carry(self, result: Any) -> tuple[Any, Any]:
        """The carry and the rest of what `f` returns."""
        if self.out_axes is nnx.Carry:
            return result, None
        if isinstance(self.out_axes, tuple) and (
            not isinstance(result, tuple) or len(result) != len(self.out_axes)
        ):
            raise ValueError(
                f"out_axes has {len(self.out_axes)} entries, {self.out_axes!r}, and the function returned "
                f"{f'{len(result)} results' if isinstance(result, tuple) else type(result).__name__}. "
                "Return a tuple with one for each."
            )
        if self.carry_out is None:
            return None, result
        return result[self.carry_out], replaced(result, self.carry_out, None)

    def put_carry(self, carry: Any, rest: Any) -> Any:
        """What `nnx.scan` returns: the inverse of `take_carry`."""
        if self.out_axes is nnx.Carry:
            return carry
        return rest if self.carry_out is None else replaced(rest, self.carry_out, carry)


def _carry_index(what: str, axes: Any) -> int | None:
    if isinstance(axes, list):
        raise TypeError(f"{what} is an axis, nnx.Carry, None or a tuple of them; got {axes!r}.")
    if axes is nnx.Carry:
        return 0
    paths = [path for path, axis in jtu.tree_leaves_with_path(axes, is_leaf=_is_axis) if axis is nnx.Carry]
    if len(paths) > 1:
        at = " and ".join(f"{what}{jtu.keystr(path)}" for path in paths)
        raise ValueError(f"Found multiple Carry definitions, {at}. Carry a tuple of them as one argument.")
    if paths and (len(paths[0]) != 1 or not isinstance(axes, tuple)):
        raise ValueError(
            f"Carry must be a whole argument or result, it cannot be nested: {what}{jtu.keystr(paths[0])}. "
            "Pass the carry as an argument of its own."
        )
    return paths[0][0].idx if paths else None


def _is_axis(axis: Any) -> bool:
    return axis is None or isinstance(axis, nnx.StateAxes)


def replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """The tuple with another entry at `index`."""
    return (*values[:index], value, *values[index + 1 :])
