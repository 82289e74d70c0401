"""What a loss function returns, how it is reduced, and what is trained of the model."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from .._messages import axes_text
from .._scan.marks import is_named, raw_array
from ._stacks import leaves_with_paths

Loss: TypeAlias = Callable[[Any, Any], Any]
"""(model, batch) to the losses of the examples; see `grad_dot`."""
Reduction: TypeAlias = Literal["mean", "sum"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """How to read what a loss function returns.

    Attributes:
        reduction: over the examples.
        tokens: over the further axes of the losses, None where there are none.
        coupled: whether a scalar comes with the losses that is added to the reduced loss.
        has_aux: whether anything else is returned in the last place.
    """

    reduction: Reduction
    tokens: Reduction | None = None
    coupled: bool = False
    has_aux: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f'reduction is "mean" or "sum", over the examples; got {self.reduction!r}.')
        if self.tokens not in ("mean", "sum", None):
            raise ValueError(
                f'tokens is "mean" or "sum", over the tokens of an example; got {self.tokens!r}.'
            )

    def parts(self, returned: Any) -> tuple[Any, Any, Any]:
        """The losses, the coupled loss or None, and the rest or None."""
        aux, coupled = None, None
        if self.has_aux:
            returned, aux = _pair(returned, "has_aux")
        if self.coupled:
            returned, coupled = _pair(returned, "coupled")
        if not is_named(returned) and not hasattr(returned, "ndim"):
            raise TypeError(
                "per_example_loss returns a NamedArray or a plain array with a loss for each example; got "
                f"{type(returned).__name__}. For more beside it give has_aux=True or coupled=True."
            )
        return returned, coupled, aux

    def examples(self, returned: Any) -> Axis:
        """The axis of the examples in what the loss function returns.

        Raises:
            ValueError: the losses are no losses of examples, or of tokens and `tokens` is not given.
        """
        losses, _, _ = self.parts(returned)
        axes: Any = losses.axes if is_named(losses) else tuple(Axis("batch", size) for size in losses.shape)
        if not axes:
            raise ValueError("per_example_loss returned a scalar. Return a loss for each example: [batch].")
        if len(axes) > 1 and self.tokens is None:
            found = axes_text(axes) if is_named(losses) else ", ".join(map(str, losses.shape))
            raise ValueError(
                f"per_example_loss returned losses with the axes ({found}), the first of the examples. Say "
                'how an example\'s tokens are reduced: tokens="mean" or tokens="sum".'
            )
        if len(axes) == 1 and self.tokens is not None:
            raise ValueError(f"tokens={self.tokens!r} has no effect: per_example_loss has no axis of tokens.")
        return axes[0]

    def reduced(self, returned: Any) -> tuple[Any, Any]:
        """The scalar to differentiate, and the rest."""
        losses, coupled, aux = self.parts(returned)
        array = raw_array(losses).astype(jnp.float32)
        if self.tokens is not None:
            array = (jnp.mean if self.tokens == "mean" else jnp.sum)(array, tuple(range(1, array.ndim)))
        value = jnp.mean(array) if self.reduction == "mean" else jnp.sum(array)
        return (value if coupled is None else value + raw_array(coupled)), aux

    def scale(self, examples: int) -> float:
        """What turns the gradient of an example's part of the reduced loss into that of its own loss."""
        return float(examples) if self.reduction == "mean" else 1.0


def _pair(returned: Any, option: str) -> Any:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(f"With {option}=True per_example_loss returns a pair; got {type(returned).__name__}.")
    return returned


def trained_mask(model: Any, trainable: Any) -> Any:
    """A tree like the model of whether each leaf is trained."""
    spec = jax.tree.map(trainable, model) if callable(trainable) else trainable
    return jax.tree.map(lambda wanted, leaf: bool(wanted) and eqx.is_inexact_array(leaf), spec, model)


def directions(params: Any, direction: Any) -> dict[str, Any]:
    """The arrays of a direction by their paths, with the axes in the order of the model's.

    Raises:
        ValueError: names the path of an array that the model does not train, or that has another shape.
    """
    wanted = dict(leaves_with_paths(params))
    given: dict[str, Any] = {}
    for path, leaf in leaves_with_paths(direction):
        if path not in wanted:
            raise ValueError(
                f"direction{path} has an array, and the model trains none there. Leave it out, or train it "
                "(trainable)."
            )
        like = wanted[path]
        own = leaf.rearrange(like.axes) if is_named(leaf) and is_named(like) else leaf
        if raw_array(own).shape != raw_array(like).shape:
            raise ValueError(
                f"direction{path} has the shape {raw_array(own).shape}, and the model's array "
                f"{raw_array(like).shape}. Give a tree like the model's gradients."
            )
        given[path] = own
    if not given:
        raise ValueError("direction has no array: there is nothing to score.")
    return given


def map_examples(batch: Any, Batch: Axis, fn: Callable[[Any, int], Any], size: int) -> Any:
    """A batch with another number of examples.

    Args:
        batch: any tree. Named arrays with the axis `Batch`, and plain arrays with its size as first
            dimension, have examples.
        Batch: the axis of examples.
        fn: from the raw array and its dimension of examples to the new raw array.
        size: the number of examples after it.
    """

    def new(leaf: Any) -> Any:
        if is_named(leaf):
            at = next((at for at, axis in enumerate(leaf.axes) if axis.name == Batch.name), None)
            if at is None:
                return leaf
            axes = tuple(axis.resize(size) if axis.name == Batch.name else axis for axis in leaf.axes)
            return NamedArray(fn(leaf.array, at), axes)
        if eqx.is_array(leaf) and leaf.ndim and leaf.shape[0] == Batch.size:
            return fn(leaf, 0)
        return leaf

    return jax.tree.map(new, batch, is_leaf=is_named)
