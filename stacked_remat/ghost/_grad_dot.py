"""Gradients, and the dot product of every example's gradient with a direction, in one
backward pass.
"""

import dataclasses
from typing import Any, Literal

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from .._activity import not_differentiable
from .._scan.marks import is_named
from ._by_example import checked_apart, losses_alone
from ._examples import check_axis
from ._losses import Loss, Objective, Reduction, Task, directions
from ._passes import Scoring, probed_leaves, scored
from ._totals import in_range, norm_of, of_documents, of_losses


class GradDots(eqx.Module):
    """Dot products of examples' gradients with a direction. Scores and norms are in
    float32.

    Attributes:
        loss: the reduced loss.
        scores: by the path of the array, `[layers, batch]` in a stack and `[batch]`
            elsewhere. In paths `*` stands for the layers of a stack. Only for the
            granularity "leaf", else empty.
        total: the sum of all of them, `[batch]`, or of documents.
        direction_norm: the norm of the direction.
        norms: like `scores`, the norms of the examples' gradients; None unless asked
            for.
        total_norm: `[batch]`, of everything that is scored; None unless asked for.
        by_token: the score of each token's loss, with the axes of the losses, for the
            granularity "token": by how much a step on that target alone would lower the
            validation loss. None for others. The total is their sum, or their mean with
            `tokens="mean"`.
        aux: what `per_example_loss` returned beside the losses.
    """

    loss: Any
    total: NamedArray
    direction_norm: Any
    scores: dict[str, NamedArray] = eqx.field(default_factory=dict)
    norms: dict[str, NamedArray] | None = None
    total_norm: NamedArray | None = None
    by_token: Any = None
    aux: Any = None

    @property
    def cosines(self) -> NamedArray:
        """The cosines between the examples' gradients and the direction, `[batch]`;
        zero for a zero gradient.

        Raises:
            ValueError: norms were not asked for.
        """
        if self.total_norm is None:
            raise ValueError(
                "Cosines need the norms of the gradients: give grad_dot norms=True."
            )
        product = self.total_norm * self.direction_norm
        return hax.where(
            product > 0, self.total / hax.where(product > 0, product, 1.0), 0.0
        )


def val_direction(
    model: Any,
    per_example_loss: Loss,
    val_batch: Any,
    *,
    reduction: Reduction = "mean",
    tokens: Reduction | None = None,
    trainable: Any = eqx.is_inexact_array,
) -> Any:
    """The gradient of the reduced loss of a validation batch: a direction for
    `grad_dot`.

    Args:
        model: any module.
        per_example_loss: as in `grad_dot`, without aux.
        val_batch: what it takes.
        reduction: over the examples, "mean" or "sum".
        tokens: over the tokens of an example, where losses are of tokens.
        trainable: as in `grad_dot`.

    Returns:
        A tree like the model, None where nothing is trained.

    Cost: a forward and a backward pass, and the memory of a gradient.
    """
    task = Task.of(
        model, per_example_loss, val_batch, Objective(reduction, tokens), trainable
    )
    return task.value_and_grad()[1]


def shapley_direction(
    model: Any,
    per_example_loss: Loss,
    val_batch: Any,
    *,
    direction: Any,
    gradients: Any,
    learning_rate: Any,
    reduction: Reduction = "mean",
    tokens: Reduction | None = None,
    trainable: Any = eqx.is_inexact_array,
) -> Any:
    """A direction whose scores are In-Run Data Shapley values to second order (Wang et
    al. 2024).

    For a step of gradient descent `w - learning_rate * gradients`, the Shapley value of
    an example for the reduction of the validation loss is to second order

        learning_rate * part_i * <grad_i, direction - learning_rate / 2 * H @ gradients>

    with the Hessian `H` of the validation loss, and `part_i` the example's factor in
    the reduced loss, 1 for "sum" and 1 / batch for "mean". Without the second term it
    is the first-order value.

    Args:
        model: any module, before the step.
        per_example_loss: as in `val_direction`.
        val_batch: what it takes.
        direction: the gradient of the validation loss.
        gradients: of the training batch's reduced loss.
        learning_rate: of the step.
        reduction: of the validation loss, as for `direction`.
        tokens: the same.
        trainable: as in `grad_dot`.

    Returns:
        A direction for `grad_dot`. Cost: one Hessian-vector product.
    """
    task = Task.of(
        model, per_example_loss, val_batch, Objective(reduction, tokens), trainable
    )
    along, norm = in_range(task, gradients)
    _, product = jax.jvp(
        lambda params: jax.grad(task.loss, has_aux=True)(params)[0],
        (task.params,),
        (along,),
    )
    return jax.tree.map(
        lambda own, curved: own - (learning_rate / 2 * norm * curved).astype(own.dtype),
        direction,
        product,
    )


def grad_dot(
    model: Any,
    per_example_loss: Loss,
    batch: Any,
    *,
    direction: Any,
    reduction: Reduction = "mean",
    tokens: Reduction | None = None,
    granularity: Literal["leaf", "total", "token"] = "leaf",
    trainable: Any = eqx.is_inexact_array,
    norms: bool = False,
    example_ids: Any = None,
    Examples: Axis | None = None,
    has_aux: bool = False,
    check: bool = False,
) -> tuple[Any, GradDots]:
    """The gradients of a loss, and for every example the dot product of its own
    gradient with a direction.

    ```python
    # Once: no loss depends on other examples.
    ghost.check_examples(model, per_example_loss, batch)
    direction = ghost.val_direction(model, per_example_loss, val_batch)
    gradients, found = ghost.grad_dot(
        model, per_example_loss, batch, direction=direction
    )
    # [batch]: how much a step along -gradient of each example lowers the validation
    # loss, to first order; and the part of each array.
    found.total
    found.scores["head.weight"]
    ```

    `found.total[i]` equals `<grad(loss of example i), direction>`, and no gradient of a
    single example is made: the loss function is given one example at a time, under
    `jax.vmap`, and where a weight meets data, the backward pass applies the direction
    in place of the weight and multiplies with the cotangent of the result. Call it
    within `jax.jit`.

    Args:
        model: any module. The loss may change its arrays before.
        per_example_loss: from the model and the batch to a loss for each example,
            `NamedArray[batch]` or a plain array `[batch]`, or, with `tokens`, for each
            token, the examples' axis first. It takes batches of one example too, and
            the loss of an example may depend on no other: batch norm and contrastive
            losses have other losses then, which `check_examples` finds.
        batch: a tree. Named arrays with the axis of the examples, and plain arrays with
            its size as first dimension, hold examples; `stacked_remat.shared` marks a
            plain array of this size that all of them share, as statistics of the batch.
            The axis is that of the losses, or their first dimension.
        direction: a tree like the model with an array wherever gradients are to be
            scored, and None elsewhere: a gradient of a validation loss
            (`val_direction`), the same after an optimizer, or a task vector.
        reduction: of the examples' losses to the loss that is differentiated, "mean" or
            "sum". Scores are of an example's own loss either way.
        tokens: how the loss of an example is made of losses of tokens, "mean" or "sum";
            for losses with more than one axis.
        granularity: "leaf": a score for each array, and each layer of a stack. "total":
            only the total, by the derivative of the losses along the direction in
            forward mode, of any losses, also of those that depend on several examples.
            It has derivatives; other scores have none. "token": as "total", and the
            score of each token's loss, where losses are of tokens.
        trainable: which arrays are differentiated, a predicate of leaves or a tree of
            bools like the model, where a bool may stand for a part of it.
        norms: also the norms of each example's gradient. They and the scores are then
            found from these gradients, layer by layer, of one example after the other:
            of any model, on one device.
        example_ids: for "total" and "token", the document of each loss, an integer
            array of the shape of the losses: the number of a document on `Examples`,
            for sequences that are packed into rows, or for rows of any order. The total
            is then of these documents, `[Examples]`. The loss of a document is the sum
            of those with its number, or with `tokens="mean"` their mean; the loss that
            is differentiated does not change. Losses with a number outside of
            `Examples` are left out.
        Examples: the axis of the documents that `example_ids` counts.
        has_aux: `per_example_loss` returns a pair of the losses and anything else,
            which `GradDots.aux` gets with the axis of the examples, in front where it
            has none.
        check: raise an error at run time unless examples have the losses alone that
            they have in the batch, which takes one more forward pass.

    Returns:
        The gradients of the reduced loss, a tree like the model as
        `equinox.filter_grad` returns, and a `GradDots`. Scores are in float32, whatever
        the dtype of computation.

    Raises:
        TypeError: scores are differentiated that have no derivatives. The gradients
            have them.
        UnsupportedLeafError: names the path of an array that is used where no
            derivative along a direction is known (kernels, derivative rules).
        ValueError, TypeError: losses, direction or options that do not fit.

    Cost: one product more for each linear map that is scored: 1.25 times the step's
    products where layers are recomputed, and 1.02 times with adapters alone. For
    "total" and "token" two, and 1.5 times. With `norms` none, where layers are
    recomputed; what is outside of folds is computed twice. So are, without parallelism
    over examples, arrays of a stack that the loss uses elsewhere too, or changes before
    a fold other than by a cast. Memory: the direction, and what a layer needs of it;
    with `norms` one example's gradient of a layer.
    """
    objective = Objective(reduction, tokens, has_aux)
    # Norms need the gradient of each example, by which its scores are found too.
    is_total = granularity != "leaf" and not norms
    _check_options(granularity, norms, tokens, (example_ids, Examples))
    task = Task.of(model, per_example_loss, batch, objective, trainable)
    losses = eqx.filter_eval_shape(task.returned, task.params)
    along = directions(task.params, direction)
    scoring = Scoring(task, probed_leaves(model), along, objective.examples(losses))
    norm = norm_of(along)
    # The total needs no scores of arrays: one forward-mode derivative of the losses,
    # which also documents in one row may share.
    if is_total:
        (value, aux), gradients, along = of_losses(task, scoring.direction)
        total = NamedArray(objective.of_examples(along, is_loss=True), (scoring.Batch,))
        if example_ids is not None and Examples is not None:
            own = objective.parts(losses)[0]
            total = of_documents(
                along, own, example_ids, Examples, of_mean=tokens == "mean"
            )
        by_token = None
        if granularity == "token":
            own = objective.parts(losses)[0]
            by_token = NamedArray(along, own.axes) if is_named(own) else along
        return gradients, GradDots(value, total, norm, by_token=by_token, aux=aux)
    (value, aux), gradients, numbers = scored(scoring, norms=norms)
    # Scores leave the backward pass as cotangents, whose own derivative would be wrong
    # without an error.
    given = [
        leaf
        for leaf in jax.tree.leaves((task, scoring.direction))
        if eqx.is_inexact_array(leaf)
    ]
    numbers = {
        path: not_differentiable(_NO_DERIVATIVES, own, given)
        for path, own in numbers.items()
    }
    if check and scoring.Batch.size > 1:
        numbers = checked_apart(numbers, *losses_alone(task))
    own, total = _named(scoring, granularity, numbers, 0)
    found = GradDots(value, total, norm, own, aux=aux)
    if norms:
        own, total = jax.tree.map(jnp.sqrt, _named(scoring, granularity, numbers, 1))
        found = dataclasses.replace(found, norms=own, total_norm=total)
    return gradients, found


_NO_DERIVATIVES = (
    "the scores of grad_dot have no derivatives by array or layer; differentiate those"
    ' of granularity="total", or use jax.lax.stop_gradient on these'
)


def _check_options(
    granularity: str,
    norms: bool,
    tokens: Reduction | None,
    of_examples: tuple[Any, Any],
) -> None:
    if granularity not in ("leaf", "total", "token"):
        raise ValueError(
            f'granularity is "leaf", "total" or "token"; got {granularity!r}.'
        )
    if granularity == "token" and (norms or tokens is None):
        raise ValueError(
            'granularity="token" scores losses of tokens, without norms: say by'
            ' tokens="sum" or "mean" how an example has them, and leave out norms.'
        )
    if [one is None for one in of_examples] in ([True, False], [False, True]):
        raise ValueError(
            "example_ids and Examples, the axis of what they count, are given together."
        )
    if of_examples[1] is not None:
        check_axis("ghost.grad_dot", of_examples[1])
    if of_examples[0] is not None and (granularity == "leaf" or norms):
        raise ValueError(
            'example_ids gives totals of documents: granularity="total", without norms.'
        )


def _named(
    scoring: Scoring, granularity: str, numbers: dict[str, Any], at: int
) -> tuple[Any, NamedArray]:
    """Numbers of arrays, none if only the total is asked for, and their sum."""
    scale = scoring.task.objective.scale(scoring.Batch.size) ** (at + 1)
    every = {}
    total = hax.zeros(scoring.Batch, dtype=jnp.float32)
    for path, own in numbers.items():
        leaf = scoring.leaves[path]
        every[leaf.shown] = found = hax.named(
            own[..., at] * scale, (*leaf.layers, scoring.Batch)
        )
        total = total + hax.sum(found, leaf.layers)
    return every if granularity == "leaf" else {}, total
