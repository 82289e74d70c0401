"""What a visitor of the layers is given in a reverse sweep, and what it returns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from .._static import PyTree

Part: TypeAlias = Literal["layer", "carry", "args", "kwargs"]


class LayerResult(NamedTuple):
    """What a visitor returns.

    Attributes:
        carry: the cotangent of the layer's input carry.
        layer: the layer with new arrays, which replace the old ones; `None` leaves it unchanged, and so does
            `None` in place of a leaf.
        args: the cotangents of the further arguments; those of shared ones are summed over the layers.
        kwargs: the cotangents of the keyword arguments.
        state: the visitor's state; `None` leaves it unchanged.
        layer_state: this layer's entry of the layers' state; `None` leaves it unchanged.
    """

    carry: PyTree
    layer: PyTree = None
    args: PyTree = None
    kwargs: PyTree = None
    state: PyTree = None
    layer_state: PyTree = None


class SweepResult(NamedTuple):
    """What a reverse sweep returns.

    Attributes:
        carry: the cotangent of the initial carry.
        layers: without a visitor, the gradients of the layers; with one, the layers with the arrays that it
            returned, or as they were.
        args: the cotangents of the further arguments, where the visitor returns them.
        kwargs: the cotangents of the keyword arguments.
        state: the visitor's last state.
        layer_state: the state of each layer.
    """

    carry: PyTree
    layers: PyTree
    args: PyTree = None
    kwargs: PyTree = None
    state: PyTree = None
    layer_state: PyTree = None


@dataclass(frozen=True)
class LayerVisit:
    """One layer, as a visitor of the reverse sweep is given it.

    Trees of cotangents have the structure of their primals, with `None` for leaves without a gradient.

    Attributes:
        layer_index: its index on the axis, a traced integer: `blocks[layer_index]`, whatever the policy.
        layer: the layer.
        carry: its input.
        args: its further arguments: slices of those that are split, and the shared ones.
        kwargs: its keyword arguments.
        cotangent: of its output carry; with `scan_vjp` a pair, of carry and output.
        layer_state: its entry of the layers' state.
        kind: the name of its kind, of a `StackedPattern`; `None` where layers are of one kind.
    """

    layer_index: Any
    layer: PyTree
    carry: PyTree
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    cotangent: PyTree
    layer_state: PyTree
    kind: str | None
    _vjp: Callable[[tuple[str, ...]], tuple[PyTree, ...]]

    def vjp(self, *wrt: Part) -> tuple[PyTree, ...]:
        """The vector-Jacobian products of the layer with `cotangent`.

        Args:
            *wrt: with respect to what: any of "layer", "carry", "args" and "kwargs".

        Returns:
            As many trees, in that order. Only these are computed; where the policy saves internals by name,
            all are, and XLA removes the unused ones.

        Cost: one evaluation of the layer, unless all its internals were saved, and its transpose. Ask once
        for all that is needed: each call runs the layer again.
        """
        parts = ("layer", "carry", "args", "kwargs")
        if not wrt or not all(part in parts for part in wrt):
            raise ValueError(f"vjp is with respect to any of {', '.join(map(repr, parts))}; got {wrt!r}.")
        return self._vjp(wrt)


Visitor: TypeAlias = Callable[[LayerVisit, Any], LayerResult]
