"""What a loss function returns, how it is reduced, and what is trained of the model."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis, NamedArray

from .._messages import axes_text
from .._scan.marks import Marked, is_named, raw_array, take_marks_off
from ._stacks import leaves_with_paths
from ._traced import resized, trace
from ._values import UnsupportedLeafError

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
        _, coupled, aux = self.parts(returned)
        array = self.of_examples(returned)
        value = jnp.mean(array) if self.reduction == "mean" else jnp.sum(array)
        return (value if coupled is None else value + raw_array(coupled)), aux

    def of_examples(self, returned: Any) -> Any:
        """The losses `[batch]` in float32."""
        losses, _, _ = self.parts(returned)
        array = raw_array(losses).astype(jnp.float32)
        if self.tokens is None:
            return array
        return (jnp.mean if self.tokens == "mean" else jnp.sum)(array, tuple(range(1, array.ndim)))

    def check_tokens(self, returned: Any, Position: Axis) -> None:
        """Whether there are losses of the tokens that `example_ids` counts along an axis.

        Raises:
            ValueError: there are none, or for means not as many.
        """
        sizes = raw_array(self.parts(returned)[0]).shape[1:]
        if len(sizes) != 1 or (self.tokens == "mean" and sizes[0] != Position.size):
            raise ValueError(
                f"example_ids has ids of {Position.size} tokens along {Position.name!r}, and an "
                f"example of per_example_loss has losses of the shape {sizes}. Return a loss for each token: "
                'zero for one without a target, and give that the id -1; or tokens="sum".'
            )

    def scale(self, examples: int) -> float:
        """What turns the gradient of an example's part of the reduced loss into that of its own loss."""
        return float(examples) if self.reduction == "mean" else 1.0


def _pair(returned: Any, option: str) -> Any:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(f"With {option}=True per_example_loss returns a pair; got {type(returned).__name__}.")
    return returned


def reduced_loss(
    model: Any, per_example_loss: Loss, batch: Any, objective: Objective, trainable: Any
) -> tuple[Callable[[Any], Any], Any]:
    """The reduced loss of a batch as a function of the trained arrays, and these arrays."""
    params, static = eqx.partition(model, trained_mask(model, trainable))
    per_example_loss = without_marks(per_example_loss)

    def loss(params: Any) -> Any:
        returned = per_example_loss(eqx.combine(params, static), batch)
        objective.examples(returned)
        return objective.reduced(returned)[0]

    return loss, params


def trained_mask(model: Any, trainable: Any) -> Any:
    """A tree like the model of whether each leaf is trained; a bool may stand for a part of the model."""
    # A tree of bools like a model that is a module can be called too.
    is_predicate = callable(trainable) and jax.tree_util.all_leaves([trainable])
    spec = jax.tree.map(trainable, model) if is_predicate else trainable

    def mask(wanted: Any, part: Any) -> Any:
        return jax.tree.map(lambda leaf: bool(wanted) and eqx.is_inexact_array(leaf), part)

    return jax.tree.map(mask, spec, model)


def directions(params: Any, direction: Any) -> dict[str, Any]:
    """The arrays of a direction by their paths, with the axes in the order of the model's.

    Raises:
        ValueError: names the path of an array that the model does not train, that has another shape, or that
            is complex.
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
        if jnp.iscomplexobj(raw_array(like)):
            raise ValueError(
                f"direction{path} is of complex numbers, whose gradients have no dot product here. Train "
                "their real and imaginary parts, or leave it out."
            )
        given[path] = own
    if not given:
        raise ValueError("direction has no array: there is nothing to score.")
    return given


def without_marks(per_example_loss: Loss) -> Loss:
    """The loss of a batch in which arrays may be marked `stacked_remat.shared`."""

    def loss(model: Any, batch: Any) -> Any:
        entries, unmarked = take_marks_off(batch)
        if any(rule == "per_layer" for _, _, rule in entries):
            raise TypeError("A batch has no per_layer marks: mark what all examples share with shared(...).")
        return per_example_loss(model, unmarked)

    return loss


def map_examples(batch: Any, Batch: Axis, fn: Callable[[Any, int], Any], size: int) -> Any:
    """A batch with another number of examples.

    Args:
        batch: any tree. Named arrays with the axis `Batch`, and plain arrays with its size as first
            dimension, have examples, unless they are marked `stacked_remat.shared`.
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
        return fn(leaf, 0) if _may_have_examples(leaf, Batch) else leaf

    return jax.tree.map(new, batch, is_leaf=_is_named_or_marked)


def _may_have_examples(leaf: Any, Batch: Axis) -> bool:
    return eqx.is_array(leaf) and leaf.ndim > 0 and leaf.shape[0] == Batch.size


def _is_named_or_marked(leaf: Any) -> bool:
    return is_named(leaf) or isinstance(leaf, Marked)


_ADVICE = (
    "Take axes and sizes from the arrays of the batch, and mark an array that all examples share with "
    "stacked_remat.shared(array): a plain one whose first dimension is the number of examples, such as a "
    "jax.random.PRNGKey of 2, is taken for one of examples."
)


@contextlib.contextmanager
def tracing_more(size: int, positions: int = 0) -> Iterator[None]:
    """Errors of a loss function that is traced with more examples and positions, with what to do."""
    try:
        yield
    except UnsupportedLeafError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        more = f" of {positions} positions" if positions else ""
        tables = " Of a table of positions take as many as there are: table[: tokens.shape[1]]."
        raise ValueError(
            f"per_example_loss takes this batch, and fails where it is traced with {size} examples{more}, "
            f"which shows what holds examples: {str(error).splitlines()[0].rstrip('.')}. {_ADVICE}"
            f"{tables if positions else ''}"
        ) from error


def check_size(losses: Sequence[int], examples: int) -> None:
    """Whether there is a loss for each example, from the shape of the losses.

    Raises:
        ValueError: the losses are of something else, which has the same size in the batch itself.
    """
    if examples in losses[1:] and losses[0] != examples:
        raise ValueError(
            f"per_example_loss returned losses of the shape {tuple(losses)} for {examples} examples, as "
            "where time comes first: return them transposed, with the axis of the examples first."
        )
    if losses[0] != examples:
        raise ValueError(
            f"per_example_loss returned {losses[0]} losses for {examples} examples: their first axis has to "
            "be that of the examples. Pairs, such as chosen and rejected texts, are two arrays of the batch, "
            f"or one with the axes [batch, 2, ...]. {_ADVICE}"
        )


def check_examples(model: Any, per_example_loss: Loss, batch: Any, Batch: Axis) -> None:
    """Whether the batch can be cut into its examples: the arrays that hold them follow their number.

    Raises:
        ValueError: names the path of a plain array that does not.
    """
    if Batch.size == 1:
        return
    more = Batch.size + 1

    def grow(array: Any, at: int) -> Any:
        return resized(array, at, more)

    paths_and_leaves, structure = jtu.tree_flatten_with_path(batch, is_leaf=_is_named_or_marked)
    larger = structure.flatten_up_to(map_examples(batch, Batch, grow, more))

    def losses(leaves: list[Any]) -> tuple[tuple[int, ...], Any, list[Any]]:
        closed, inputs, _ = trace(per_example_loss, model, jax.tree.unflatten(structure, leaves))
        return closed.out_avals[0].shape, closed.jaxpr, inputs

    with tracing_more(more):
        shape, _, _ = losses(larger)
    check_size(shape, more)
    for at, (path, leaf) in enumerate(paths_and_leaves):
        if not _may_have_examples(leaf, Batch):
            continue
        try:
            (size, *_), jaxpr, inputs = losses([*larger[:at], leaf, *larger[at + 1 :]])
        except (TypeError, ValueError, RuntimeError):
            continue
        own = next(var for var, array in zip(jaxpr.invars, inputs, strict=True) if array is leaf)
        if size == more and any(own is atom for equation in jaxpr.eqns for atom in equation.invars):
            raise ValueError(
                f"batch{jtu.keystr(path)} has {Batch.size} rows, and losses of {more} examples can be "
                f"computed with them too, so they do not seem to be of examples. {_ADVICE}"
            )
