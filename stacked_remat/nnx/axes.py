"""What becomes of the arguments and results of a scan, by `in_axes` and `out_axes`."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from .._static import PyTree


class Axes:
    """What becomes of arguments and of results, of which one each may be the carry."""

    def __init__(self, in_axes: Any, out_axes: Any, metadata: Mapping[str, Any]):
        self.has_one_result = not isinstance(out_axes, tuple)
        self.in_axes, self.metadata = in_axes, metadata
        self.out_axes = (out_axes,) if self.has_one_result else out_axes
        self.carry_in, self.carry_out = _carry_of(in_axes), _carry_of(out_axes)

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


def _carry_of(axes: Any) -> int | None:
    """Which argument or result is the carry."""
    entries = axes if isinstance(axes, tuple) else (axes,)
    return next((number for number, axis in enumerate(entries) if axis is nnx.Carry), None)


def replaced(values: tuple[PyTree, ...], index: int, value: PyTree) -> tuple[PyTree, ...]:
    """The tuple with another entry at `index`."""
    return (*values[:index], value, *values[index + 1 :])
