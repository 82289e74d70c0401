"""Gradients, and the dot product of every example's gradient with a direction, in one backward pass."""

from typing import Any, Literal

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from .._scan.marks import raw_array
from ._by_example import dot, one_at_a_time
from ._found import GradDots
from ._losses import Loss, Objective, Reduction, directions, trained_mask
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
    params, static = eqx.partition(model, trained_mask(model, trainable))

    def loss(params: Any) -> Any:
        returned = per_example_loss(eqx.combine(params, static), val_batch)
        objective.examples(returned)
        return objective.reduced(returned)[0]

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

    `found.total[i]` equals `<grad(loss of example i), direction>`, and no gradient of a single example is
    made: where a weight meets data, the backward pass applies the direction in place of the weight and
    multiplies with the cotangent of the result. Call it within `jax.jit`.

    Args:
        model: any module. Its stacks (`Stacked`, `BlockSeq`) are called with `fold`, `scan`, `fold_via` or
            `scan_via`, on the whole batch: not under `jax.vmap` or `jax.lax.map` over the examples.
        per_example_loss: from the model and the batch to a loss for each example, `NamedArray[batch]` or a
            plain array `[batch]`, or, with `tokens`, for each token, the examples' axis first. The loss of
            an example may depend on no other example.
        batch: a tree. Named arrays with the axis of the examples, and plain arrays with its size as first
            dimension, hold examples. The axis is that of the losses, or their first dimension.
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
            a plain step, a second gradient in memory, and no parallelism over examples.
        trainable: which arrays are differentiated, a predicate of leaves or a tree of bools like the model.
        norms: also the norms of each example's gradient, one example after the other as for "block".
        per_token: the name of an axis of positions, for scores `[batch, position]`: what of the gradient
            passes through the rows of each position. Of packed sequences that do not see each other,
            `GradDots.per_document` adds them up to the scores of documents.
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
        UnsupportedLeafError: names the path of an array that is used where no derivative along a direction
            is known (kernels and custom derivatives), or where rows of examples can't be told apart.
        ValueError, TypeError: losses, direction or options that do not fit.

    Cost: for "leaf" one product more for each linear map that is scored: 1.25 times the step's products where
    layers are recomputed, and 1.02 times with adapters alone. Memory: the direction, and what a layer needs
    of it.
    """
    objective = Objective(reduction, tokens, coupled, has_aux)
    by_example = norms or granularity != "leaf"
    _check_options(granularity, by_example, per_token, coupled, has_aux)
    if check is not False and not check > 0:
        raise ValueError(f"check is True, False or a part above 0; got {check!r}.")
    params, static = eqx.partition(model, trained_mask(model, trainable))
    batch = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)
    Batch = objective.examples(eqx.filter_eval_shape(per_example_loss, model, batch))
    Position = None if per_token is None else _axis_of(batch, per_token)
    scoring = Scoring(model, directions(params, direction), Batch, Position)
    find = one_at_a_time if by_example else in_one_pass
    (value, aux), gradients, scores, squares = find(
        scoring, params, static, per_example_loss, batch, objective
    )
    if check is not False:
        scores = _checked(
            scoring, gradients, scores, objective.scale(Batch.size), 1e-3 if check is True else check
        )
    covered, uncovered = sizes(params, scoring.direction, model)
    every, of_squares = scoring.named(scores), scoring.named(squares or {})
    shown = shown_paths(model)
    groups = {shown[path]: layer_path(model, path) or shown[path] for path in scoring.direction}
    if granularity != "leaf":
        named = _grouped(every, groups) if granularity == "block" else {}
        of_norms = _grouped(of_squares, groups) if granularity == "block" else {}
    else:
        named, of_norms = every, of_squares
    arrays = [raw_array(leaf).astype(jnp.float32) for leaf in scoring.direction.values()]
    found = GradDots(
        loss=value,
        scores=named,
        total=_total(every, scoring.axes),
        direction_norm=jnp.sqrt(sum((jnp.sum(jnp.square(array)) for array in arrays), jnp.zeros(()))),
        norms={path: hax.sqrt(square) for path, square in of_norms.items()} if norms else None,
        total_norm=hax.sqrt(_total(of_squares, scoring.axes)) if norms else None,
        aux=aux,
        covered=covered,
        uncovered=uncovered,
    )
    return gradients, found


def _check_options(
    granularity: str, by_example: bool, per_token: str | None, coupled: bool, has_aux: bool
) -> None:
    if granularity not in ("leaf", "block", "total"):
        raise ValueError(f'granularity is "leaf", "block" or "total"; got {granularity!r}.')
    options = {"per_token": per_token is not None, "coupled": coupled, "has_aux": has_aux}
    refused = [name for name, given in options.items() if given]
    if by_example and refused:
        raise ValueError(
            f'{refused[0]} needs granularity="leaf" and norms=False: otherwise the gradient of one example '
            "is computed after the other."
        )


def _axis_of(batch: Any, name: str) -> Axis:
    for leaf in jax.tree.leaves(batch, is_leaf=lambda node: isinstance(node, NamedArray)):
        if isinstance(leaf, NamedArray):
            for axis in leaf.axes:
                if axis.name == name:
                    return axis
    raise ValueError(f"per_token={name!r}: no named array of the batch has this axis.")


def _total(scores: dict[str, NamedArray], axes: tuple[Axis, ...]) -> NamedArray:
    total = hax.zeros(axes, dtype=jnp.float32)
    for score in scores.values():
        total = total + hax.sum(score, axis=[axis for axis in score.axes if axis not in axes])
    return total


def _grouped(scores: dict[str, NamedArray], groups: dict[str, str]) -> dict[str, NamedArray]:
    found: dict[str, NamedArray] = {}
    for path, score in scores.items():
        group = groups[path]
        found[group] = found[group] + score if group in found else score
    return found


def _checked(
    scoring: Scoring, gradients: Any, scores: dict[str, Any], scale: float, tolerance: float
) -> dict[str, Any]:
    """The scores, with an error at run time unless they add up.

    Args:
        scoring: see there.
        gradients: of the reduced loss.
        scores: of the examples' own losses.
        scale: of these, by their parts in the reduced loss.
        tolerance: see `check` of `grad_dot`.
    """
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
