"""What a loss function returns, how it is reduced, and what is trained of the model."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from haliax import Axis, NamedArray

from .._messages import axes_text, shortened
from .._scan.marks import is_named, raw_array, take_marks_off
from ._traced import is_traced

Loss: TypeAlias = Callable[[Any, Any], Any]
"""(model, batch) to the losses of the examples; see `grad_dot`."""
Reduction: TypeAlias = Literal["mean", "sum"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """How to read what a loss function returns: reductions over examples, and over any
    further axes.
    """

    reduction: Reduction
    tokens: Reduction | None = None
    has_aux: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(
                'reduction is "mean" or "sum", over the examples; got'
                f" {self.reduction!r}."
            )
        if self.tokens not in ("mean", "sum", None):
            raise ValueError(
                'tokens is "mean" or "sum", over the tokens of an example; got'
                f" {self.tokens!r}."
            )

    def parts(self, returned: Any) -> tuple[Any, Any]:
        """The losses, and the rest or None."""
        aux = None
        if self.has_aux:
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise TypeError(
                    "With has_aux=True per_example_loss returns a pair; got"
                    f" {type(returned).__name__}."
                )
            returned, aux = returned
        if not is_named(returned) and not hasattr(returned, "ndim"):
            raise TypeError(
                "per_example_loss returns a NamedArray or a plain array with a loss"
                f" for each example; got {type(returned).__name__}. For more beside it"
                " give has_aux=True."
            )
        dtype = raw_array(returned).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"per_example_loss returned losses of dtype {dtype}, which have no"
                " gradients here. Return losses of floating point."
            )
        return returned, aux

    def examples(self, returned: Any) -> Axis:
        """The axis of the examples in what the loss function returns.

        Raises:
            ValueError: there is no example; the losses are no losses of examples, or of
                tokens and `tokens` is not given.
        """
        losses, _ = self.parts(returned)
        axes: Any = (
            losses.axes
            if is_named(losses)
            else tuple(Axis("batch", size) for size in losses.shape)
        )
        if not axes:
            raise ValueError(
                "per_example_loss returned a scalar. Return a loss for each example:"
                " [batch]."
            )
        if not axes[0].size:
            raise ValueError(
                "per_example_loss returned no losses: the batch has no examples. Give"
                " it at least one."
            )
        if len(axes) > 1 and self.tokens is None:
            found = (
                axes_text(axes)
                if is_named(losses)
                else ", ".join(map(str, losses.shape))
            )
            raise ValueError(
                f"per_example_loss returned losses with the axes ({found}), the first"
                " of the examples. Say how an example's tokens are reduced:"
                ' tokens="mean" or tokens="sum".'
            )
        if len(axes) == 1 and self.tokens is not None:
            raise ValueError(
                f"tokens={self.tokens!r} has no effect: per_example_loss has no axis of"
                " tokens."
            )
        return axes[0]

    def reduced(self, returned: Any) -> tuple[Any, Any]:
        """The scalar to differentiate, and the rest."""
        array = self.of_examples(returned)
        return (jnp.mean if self.reduction == "mean" else jnp.sum)(array), self.parts(
            returned
        )[1]

    def of_examples(self, returned: Any, *, is_loss: bool = False) -> Any:
        """The losses `[batch]` in float32 or wider, of what the function returned, or
        of the losses alone.
        """
        array = raw_array(returned if is_loss else self.parts(returned)[0])
        # A mean of thousands of tokens in bfloat16 would lose most of them.
        array = array.astype(np.promote_types(array.dtype, np.float32))
        if self.tokens is None:
            return array
        return (jnp.mean if self.tokens == "mean" else jnp.sum)(
            array, tuple(range(1, array.ndim))
        )

    def scale(self, examples: int) -> float:
        """What turns the gradient of an example's part of the reduced loss into that of
        its own loss.
        """
        return float(examples) if self.reduction == "mean" else 1.0


class Task(eqx.Module):
    """The loss of a model on a batch, as a function of the arrays that are trained."""

    params: Any
    static: Any
    of_model: Loss
    batch: Any
    objective: Objective

    @staticmethod
    def of(
        model: Any,
        per_example_loss: Loss,
        batch: Any,
        objective: Objective,
        trainable: Any = True,
    ) -> "Task":
        # NumPy's arrays have no tracers: as operands of a program they would be
        # constants of it, compiled in.
        params, static = eqx.partition(model, trained_mask(model, trainable))
        batch = jax.tree.map(
            lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, batch
        )
        return Task(params, static, without_marks(per_example_loss), batch, objective)

    @property
    def model(self) -> Any:
        return eqx.combine(self.params, self.static)

    def returned(self, params: Any) -> Any:
        return self.of_model(eqx.combine(params, self.static), self.batch)

    def loss(self, params: Any) -> tuple[Any, Any]:
        returned = self.returned(params)
        self.objective.examples(returned)
        return self.objective.reduced(returned)

    def value_and_grad(self) -> tuple[tuple[Any, Any], Any]:
        return jax.value_and_grad(self.loss, has_aux=True)(self.params)

    def of_example(self, model: Any, example: Any) -> Any:
        with errors_of_one_example():
            returned = self.of_model(model, example)
        check_size(self.objective.parts(returned)[0])
        return returned


def trained_mask(model: Any, trainable: Any) -> Any:
    """A tree like the model of whether each leaf is trained; a bool may stand for a
    part of the model.
    """
    # A tree of bools like a model that is a module can be called too.
    is_predicate = callable(trainable) and jax.tree_util.all_leaves([trainable])
    spec = jax.tree.map(trainable, model) if is_predicate else trainable

    def mask(wanted: Any, part: Any) -> Any:
        return jax.tree.map(
            lambda leaf: bool(wanted) and eqx.is_inexact_array(leaf), part
        )

    return jax.tree.map(mask, spec, model)


def leaves_with_paths(tree: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of a tree, a named array as one, with their paths as
    `jax.tree_util.keystr` writes them.
    """
    for path, leaf in jtu.tree_leaves_with_path(tree, is_leaf=is_named):
        if is_traced(raw_array(leaf)):
            yield jtu.keystr(path), leaf


def directions(params: Any, direction: Any) -> dict[str, Any]:
    """The arrays of a direction by their paths, named as the model's are.

    Raises:
        ValueError: names the path of an array that the model does not train, that has
            another shape, or that is complex.
    """
    wanted = dict(leaves_with_paths(params))
    given: dict[str, Any] = {}
    for path, leaf in leaves_with_paths(direction):
        if path not in wanted:
            raise ValueError(
                f"direction{path} has an array, and the model trains none there. Leave"
                " it out, or train it (trainable)."
            )
        like = wanted[path]
        own = leaf.rearrange(like.axes) if is_named(leaf) and is_named(like) else leaf
        if raw_array(own).shape != raw_array(like).shape:
            raise ValueError(
                f"direction{path} has the shape {raw_array(own).shape}, and the model's"
                f" array {raw_array(like).shape}. Give a tree like the model's"
                " gradients."
            )
        # JAX's gradient of a complex array is the conjugate of the usual one, so that a
        # product of two is no derivative.
        if jnp.iscomplexobj(raw_array(like)):
            raise ValueError(
                f"direction{path} is of complex numbers, whose gradients have no dot"
                " product here. Train their real and imaginary parts, or leave it out."
            )
        given[path] = (
            NamedArray(raw_array(own), like.axes) if is_named(like) else raw_array(own)
        )
    if not given:
        raise ValueError("direction has no array: there is nothing to score.")
    return given


def without_marks(per_example_loss: Loss) -> Loss:
    """The loss of a batch in which arrays may be marked `stacked_remat.shared`."""

    def loss(model: Any, batch: Any) -> Any:
        entries, unmarked = take_marks_off(batch)
        if any(rule == "per_layer" for _, _, rule in entries):
            raise TypeError(
                "A batch has no per_layer marks: mark what all examples share with"
                " shared(...)."
            )
        return losses_of(per_example_loss, model, unmarked)

    return loss


def losses_of(per_example_loss: Loss, model: Any, batch: Any) -> Any:
    """What the loss function returns; its errors tell where plain arrays of the batch
    have other numbers of examples.
    """
    try:
        return per_example_loss(model, batch)
    except (TypeError, ValueError) as error:
        rows = {}
        for path, leaf in jtu.tree_leaves_with_path(batch, is_leaf=is_named):
            if not is_named(leaf) and jnp.ndim(leaf):
                rows[jtu.keystr(path)] = jnp.shape(leaf)[0]
        if len({*rows.values()}) > 1:
            found = [f"{path} has {size}" for path, size in rows.items()]
            error.add_note(
                "First dimensions of the batch differ:"
                f" {shortened(found, most=5)}. They are those of the examples: give"
                " each array one entry for every example."
            )
        raise


_ADVICE = (
    "It is given one example at a time, a batch of 1. Take axes and sizes from the"
    " arrays of the batch, and mark an array that all examples share with"
    " stacked_remat.shared(array): a plain one whose first dimension is the number of"
    " examples, such as a jax.random.PRNGKey of 2, is taken for one of examples."
)


@contextlib.contextmanager
def errors_of_one_example() -> Iterator[None]:
    """Errors of a loss function that is traced with one example, with what to do."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            "per_example_loss takes this batch, and fails for one of its examples: "
            f"{str(error).splitlines()[0].rstrip('.')}. {_ADVICE}"
        ) from error


def check_size(losses: Any) -> None:
    """Refuse what has other than one loss for one example, though as many as examples
    in the batch itself.
    """
    shape = raw_array(losses).shape
    if shape[0] != 1:
        raise ValueError(
            f"per_example_loss returned losses of the shape {shape} for one example:"
            " their first axis has to be that of the examples. Return [batch, time]"
            " where time comes first. Pairs, such as chosen and rejected texts, are"
            f" two arrays of the batch, or one with the axes [batch, 2, ...]. {_ADVICE}"
        )
