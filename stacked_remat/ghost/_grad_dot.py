"""Gradients, and the dot product of every example's gradient with a direction, in one backward pass."""

from typing import Any, Literal

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from .._messages import axes_text
from .._scan.marks import is_named, raw_array
from .._sweep.derivative_errors import not_differentiable
from ._by_example import dot, one_at_a_time
from ._found import GradDots
from ._losses import (
    Loss,
    Objective,
    Reduction,
    check_examples,
    directions,
    reduced_loss,
    trained_mask,
    without_marks,
)
from ._probed import Scoring, in_one_pass, layer_path, layers_of, shown_paths, sizes
from ._stacks import leaves_with_paths


def val_direction(
    model: Any,
    per_example_loss: Loss,
    val_batch: Any,
    *,
    reduction: Reduction = "mean",
    tokens: Reduction | None = None,
    trainable: Any = eqx.is_inexact_array,
) -> Any:
    """The gradient of the reduced loss of a validation batch: a direction for `grad_dot`.

    Args:
        model: any module.
        per_example_loss: as in `grad_dot`, without aux and coupled losses.
        val_batch: what it takes.
        reduction: over the examples, "mean" or "sum".
        tokens: over the tokens of an example, where losses are of tokens.
        trainable: as in `grad_dot`.

    Returns:
        A tree like the model, None where nothing is trained.
    """
    objective = Objective(reduction, tokens)
    loss, params = reduced_loss(model, per_example_loss, val_batch, objective, trainable)
    return jax.grad(loss)(params)


def grad_dot(
    model: Any,
    per_example_loss: Loss,
    batch: Any,
    *,
    direction: Any,
    reduction: Reduction = "mean",
    tokens: Reduction | None = None,
    granularity: Literal["leaf", "block", "total"] = "leaf",
    trainable: Any = eqx.is_inexact_array,
    norms: bool = False,
    per_token: str | None = None,
    example_ids: Any = None,
    Examples: Axis | None = None,
    coupled: bool = False,
    has_aux: bool = False,
    check: bool | float = False,
) -> tuple[Any, GradDots]:
    """The gradients of a loss, and for every example the dot product of its own gradient with a direction.

    ```python
    direction = ghost.val_direction(model, per_example_loss, val_batch)
    gradients, found = ghost.grad_dot(model, per_example_loss, batch, direction=direction)
    found.total                      # [batch]: how much a step along -gradient of each example lowers the
    found.scores["head.weight"]      # validation loss, to first order; and of each array
    ```

    `found.total[i]` equals `<grad(loss of example i), direction>`, and for scores by array ("leaf") no
    gradient of a single example is made: where a weight meets data, the backward pass applies the direction
    in place of the weight and multiplies with the cotangent of the result. Call it within `jax.jit`.

    Args:
        model: any module. Its stacks (`Stacked`, `StackedPattern`, `BlockSeq`) are called with `fold`,
            `scan`, `fold_via` or `scan_via`, on the whole batch, or their layers one by one; under `jax.vmap`
            over the examples or `jax.grad` only with `remat=True` or False, and not under `jax.lax.map`. The
            loss may change arrays before, layer by layer.
        per_example_loss: from the model and the batch to a loss for each example, `NamedArray[batch]` or a
            plain array `[batch]`, or, with `tokens`, for each token, the examples' axis first. The loss of
            an example may depend on no other example, from the scored weights on: batch norm and contrastive
            losses are refused.
        batch: a tree. Named arrays with the axis of the examples, and plain arrays with its size as first
            dimension, hold examples; `stacked_remat.shared` marks a plain array of this size that all of them
            share. The axis is that of the losses, or their first dimension. The loss function is also traced
            with more examples, so it takes sizes from the batch.
        direction: a tree like the model with an array wherever gradients are to be scored, and None
            elsewhere: a gradient of a validation loss (`val_direction`), the same after an optimizer, or a
            task vector.
        reduction: of the examples' losses to the loss that is differentiated, "mean" or "sum". Scores are of
            an example's own loss either way.
        tokens: how the loss of an example is made of losses of tokens, "mean" or "sum"; for losses with more
            than one axis.
        granularity: "leaf": a score for each array, and each layer of a stack. "block": one for each layer,
            and each array outside of stacks. "total": only the total. The last two compute the gradient of
            one example after the other: exact for any model that takes a batch of one, with the arithmetic of
            a plain step, a second gradient in memory, and no parallelism over examples. An error at run time
            says where an example has another loss alone than in the batch, which takes one more forward pass
            over the batch: a loss that uses the size of the batch, places in it or noise of one key for all
            examples has. Give each example a key of its own.
        trainable: which arrays are differentiated, a predicate of leaves or a tree of bools like the model,
            where a bool may stand for a part of it.
        norms: also the norms of each example's gradient, one example after the other as for "block".
        per_token: the name of an axis of positions, for scores `[batch, position]`: what of the gradient
            of the example's loss passes through the rows of each position. The loss function is traced with
            more positions too.
        example_ids: which example each token is of, where rows are not examples: the number of an example on
            `Examples`, `NamedArray[batch, position]` for sequences that are packed into rows and do not see
            each other, or `[rows]`, named or plain, for a batch of tokens in any order, such as sorted by
            expert. Scores then have `Examples` in the place of these axes. The loss of an example is the sum
            of the losses of its tokens or rows, or with `tokens="mean"` and positions the mean of its
            tokens'; the loss that is differentiated does not change. With positions there are losses of
            tokens, in the order of the tokens, and with "mean" of all. Tokens with a number outside of
            `Examples` are left out. A loss belongs to the example through whose tokens it is computed.
        Examples: the axis of the examples that `example_ids` counts.
        coupled: `per_example_loss` returns `(losses, scalar)`; the scalar, such as the auxiliary losses of
            routers, is added to the reduced loss. Its gradient is in `gradients`, and what of it passes
            through an example's rows is in that example's scores, multiplied by the number of examples for
            "mean". Without it, leave such losses out.
        has_aux: `per_example_loss` returns a pair of all this and anything else, which `GradDots.aux` gets.
        check: raise an error at run time unless the scores of each array, layer by layer, add up to the dot
            product of its gradient with the direction. The difference may be this part (True: 1e-3) of the
            sum of their absolute values and a hundredth of the product of the two norms, for rounding.

    Returns:
        The gradients of the reduced loss, a tree like the model as `equinox.filter_grad` returns, and a
        `GradDots`. Scores are in float32, whatever the dtype of computation.

    Raises:
        TypeError: scores by array are differentiated, of which only those with another `granularity` or with
            `norms` have derivatives. The gradients have them.
        UnsupportedLeafError: names the path of an array that is used where no derivative along a direction
            is known (kernels, some derivative rules, derivatives of stacks), or where rows of examples can't
            be told apart; or the operation in which the losses of examples come to depend on each other.
        ValueError, TypeError: losses, direction or options that do not fit.

    Cost: for "leaf" one product more for each linear map that is scored: 1.25 times the step's products where
    layers are recomputed, and 1.02 times with adapters alone. Memory: the direction, and what a layer needs
    of it.
    """
    objective = Objective(reduction, tokens, coupled, has_aux)
    by_example = norms or granularity != "leaf"
    _check_options(granularity, check, (example_ids, Examples))
    if by_example:
        _check_leaf_only(per_token=per_token, example_ids=example_ids, coupled=coupled, has_aux=has_aux)
    params, static = eqx.partition(model, trained_mask(model, trainable))
    batch = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)
    per_example_loss = without_marks(per_example_loss)
    losses = eqx.filter_eval_shape(per_example_loss, model, batch)
    Batch = objective.examples(losses)
    if by_example:
        check_examples(model, per_example_loss, batch, Batch)
    Position = _positions(batch, Batch, per_token, example_ids)
    if example_ids is not None and Position is not None:
        objective.check_tokens(losses, Position)
    losses_of = "example" if example_ids is None else "row" if Position is None else "token"
    adds_up = coupled and check is not False
    scoring = Scoring(model, directions(params, direction), Batch, Position, losses_of, adds_up)
    find = one_at_a_time if by_example else _in_one_pass
    (value, aux), gradients, scores, squares = find(
        scoring, params, static, per_example_loss, batch, objective
    )
    scores = _checked(scoring, gradients, scores, objective.scale(Batch.size), check)
    covered, uncovered = sizes(params, scoring.direction, model)
    every, of_squares = scoring.named(scores), scoring.named(squares or {})
    arrays = [raw_array(leaf).astype(jnp.float32) for leaf in scoring.direction.values()]
    found = GradDots(
        loss=value,
        scores=_grouped(scoring, granularity, every),
        total=_total(every, scoring.axes),
        direction_norm=jnp.sqrt(sum((jnp.sum(jnp.square(array)) for array in arrays), jnp.zeros(()))),
        norms=jax.tree.map(jnp.sqrt, _grouped(scoring, granularity, of_squares)) if norms else None,
        total_norm=hax.sqrt(_total(of_squares, scoring.axes)) if norms else None,
        aux=aux,
        covered=covered,
        uncovered=uncovered,
    )
    if example_ids is not None and Examples is not None:
        ids = example_ids if is_named(example_ids) else NamedArray(jnp.asarray(example_ids), scoring.axes)
        found = found.per_document(ids, Examples, of_mean=tokens == "mean" and Position is not None)
    return gradients, found


def _in_one_pass(
    scoring: Scoring, params: Any, static: Any, loss: Loss, batch: Any, objective: Objective
) -> Any:
    """As `in_one_pass`, with an error for derivatives of the scores, which would be wrong."""
    value, gradients, scores, squares = in_one_pass(scoring, params, static, loss, batch, objective)
    given = jax.tree.leaves((params, static, batch, scoring.direction))
    arrays = [leaf for leaf in given if eqx.is_inexact_array(leaf)]
    scores = {path: not_differentiable(score, _NO_DERIVATIVES, arrays) for path, score in scores.items()}
    return value, gradients, scores, squares


_NO_DERIVATIVES = (
    'the scores of grad_dot have no derivatives with granularity="leaf"; differentiate those of '
    'granularity="total", or use jax.lax.stop_gradient on these'
)


def _check_options(granularity: str, check: bool | float, of_examples: tuple[Any, Any]) -> None:
    if granularity not in ("leaf", "block", "total"):
        raise ValueError(f'granularity is "leaf", "block" or "total"; got {granularity!r}.')
    if check is not False and not check > 0:
        raise ValueError(f"check is True, False or a part above 0; got {check!r}.")
    if [one is None for one in of_examples] in ([True, False], [False, True]):
        raise ValueError("example_ids and Examples, the axis of what they count, are given together.")


def _check_leaf_only(**options: Any) -> None:
    refused = [name for name, given in options.items() if given is not None and given is not False]
    if refused:
        raise ValueError(
            f'{refused[0]} needs granularity="leaf" and norms=False: otherwise the gradient of one example '
            "is computed after the other."
        )


def _positions(batch: Any, Batch: Axis, per_token: str | None, example_ids: Any) -> Axis | None:
    """The axis of positions, where scores are found for each."""
    name, axes = per_token, None
    if example_ids is not None:
        if per_token is not None:
            raise ValueError("per_token gives scores of tokens, and example_ids of examples: leave one out.")
        sizes = () if is_named(example_ids) else jnp.shape(example_ids)
        axes = example_ids.axes if is_named(example_ids) else [Batch.resize(size) for size in sizes]
        names = [axis.name for axis in axes if axis.name != Batch.name]
        dtype = jnp.result_type(raw_array(example_ids))
        if not jnp.issubdtype(dtype, jnp.integer) or len(axes) != len(names) + 1 or len(names) > 1:
            raise ValueError(
                f"example_ids are integers with the axis {Batch.name!r} of the losses, and for packed "
                f"sequences one of positions, which needs a named array; got {dtype} with {axes_text(axes)}."
            )
        name = names[0] if names else None
    Position = None if name is None else _axis_of(batch, name)
    wanted = (Batch,) if Position is None else (Batch, Position)
    if axes is not None and {*axes} != {*wanted}:
        raise ValueError(
            f"example_ids has {axes_text(axes)}, and the losses and the batch have {axes_text(wanted)}. Give "
            "the number of an example for each, out of range where it is of none."
        )
    return Position


def _axis_of(batch: Any, name: str) -> Axis:
    for leaf in jax.tree.leaves(batch, is_leaf=is_named):
        found = [axis for axis in leaf.axes if axis.name == name] if is_named(leaf) else []
        if found:
            return found[0]
    raise ValueError(f"No named array of the batch has the axis {name!r}, of which scores are asked for.")


def _total(scores: dict[str, NamedArray], axes: tuple[Axis, ...]) -> NamedArray:
    total = hax.zeros(axes, dtype=jnp.float32)
    for score in scores.values():
        total = total + hax.sum(score, axis=[axis for axis in score.axes if axis not in axes])
    return total


def _grouped(scoring: Scoring, granularity: str, scores: dict[str, NamedArray]) -> dict[str, NamedArray]:
    if granularity == "leaf":
        return scores
    shown, found = shown_paths(scoring.model), {}
    for path in scoring.direction if granularity == "block" and scores else ():
        group, score = layer_path(scoring.model, path) or shown[path], scores[shown[path]]
        found[group] = found[group] + score if group in found else score
    return found


def _checked(
    scoring: Scoring, gradients: Any, scores: dict[str, Any], scale: float, check: bool | float
) -> dict[str, Any]:
    """The scores, with an error at run time unless they add up.

    Args:
        scoring: see there.
        gradients: of the reduced loss.
        scores: of the examples' own losses.
        scale: of these, by their parts in the reduced loss.
        check: see `grad_dot`.
    """
    if check is False:
        return scores
    tolerance = 1e-3 if check is True else check
    by_path, shown, checked = dict(leaves_with_paths(gradients)), shown_paths(scoring.model), {}
    for path, along in scoring.direction.items():
        gradient, Layers = by_path[path], layers_of(scoring.model, path)
        whole = dot(gradient, along, Layers)
        units = tuple(range(whole.ndim, scores[path].ndim))
        found, most = (jnp.sum(some, units) / scale for some in (scores[path], jnp.abs(scores[path])))
        most += 0.01 * jnp.sqrt(dot(gradient, gradient, Layers) * dot(along, along, Layers))
        wrong = jnp.any(jnp.abs(found - whole) > tolerance * most)
        checked[path] = eqx.error_if(
            scores[path],
            wrong,
            f"The scores of {shown[path]} do not add up to the dot product of its "
            "gradient with the direction. With bfloat16 give check a larger part, such as 0.05; otherwise "
            'an operation is not what its derivative says: use granularity="block".',
        )
    return checked
