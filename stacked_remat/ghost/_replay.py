"""Which training examples decide the held-out loss: its gradient through the training
run itself.

The run is a fold of the training step over its steps, so what is kept of it is what a
checkpoint policy says.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.util import ensure_tuple
from jaxtyping import Array, Float

from .._messages import axes_text, check_loss_and_optimizer
from .._microbatches import in_microbatches
from .._policy import ScanCheckpointSpec
from .._scan.api import fold
from .._scan.checks import describe, layers_axis
from .._scan.marks import NUMBER, is_named, raw_array
from .._static import PyTree
from ._examples import check_axis
from ._losses import losses_of

Step: TypeAlias = Callable[..., PyTree]
"""(state, batch, weights `[Examples]`, and the values of `per_step` for this step by
name) to the state.
"""

ExampleLosses: TypeAlias = Callable[[Any, Any], Any]
"""(model, batch) to the loss of each example, `[Examples]`."""


class Replay(NamedTuple):
    """What `replay` finds.

    Attributes:
        loss: the held-out loss after the last step.
        state: the state after the last step.
        examples: the derivative of the loss with respect to the weight of each example
            in each step, `[Steps, Examples]`, at weights of one: to first order, by how
            much leaving the example out there would lower the loss. Of each token,
            where `Examples` are the axes of losses of tokens.
        per_step: the derivatives with respect to what `per_step` gave, in its
            structure.
    """

    loss: Float[Array, ""]
    state: PyTree
    examples: NamedArray
    per_step: dict[str, PyTree]


def replay(
    train_step: Step,
    state: PyTree,
    batches: PyTree,
    held_out_loss: Callable[[Any], Array],
    Steps: Axis | int,
    Examples: Axis | tuple[Axis, ...],
    *,
    per_step: dict[str, PyTree] | None = None,
    remat: ScanCheckpointSpec = "nested",
) -> Replay:
    """Train again, and differentiate the held-out loss through all steps: influence
    functions by replay.

    ```python
    step = ghost.weighted_step(losses, optimizer)
    first = model, optimizer.init(model)
    found = ghost.replay(step, first, batches, held_out, Steps, Examples)
    # Of examples that are in the same place of every batch.
    harm = hax.sum(found.examples, Steps)
    ```

    Exact for this run, with its order, keys and optimizer, where a gradient dot product
    describes one step (Bae et al. 2024, "Training Data Attribution via Approximate
    Unrolled Differentiation"; Ilyas and Engstrom 2025, "MAGIC").

    Args:
        train_step: takes the state, a batch, a weight for each example, and the values
            of `per_step` by name; returns the next state. The weights multiply the
            examples' losses in the loss of the step, and are ones. `weighted_step`
            makes one.
        state: before the first step: a tree with the model, the optimizer's state,
            keys.
        batches: those of all steps: named arrays with the axis `Steps`, plain arrays
            with it first.
        held_out_loss: from the last state to a scalar.
        Steps: the axis of the steps, or their number.
        Examples: the axis of the examples of a batch; or several axes, those of losses
            of tokens in their order, the examples first, for a weight of each token.
        per_step: further arguments of the step by name, arrays with an entry for each
            step, such as learning rates or weight decays, which are differentiated too.
        remat: which states are kept, as of any fold: with `"nested"` about `2 *
            sqrt(steps)`, with `ScanCheckpointPolicy(max_carries=k)` so many, and with
            `nested=k, save_carries="offload"` those at the starts of k segments in host
            memory. A model within the step has a policy of its own.

    Returns:
        The loss, the last state and the derivatives; see `Replay`.

    Raises:
        ValueError: sizes along `Steps` or `Examples` differ; or no derivative reaches
            the loss, as through an optimizer that takes the signs of gradients (Lion):
            the influence of every example would be zero.
        RuntimeError: a derivative is not finite; or the largest is zero or at the level
            of rounding, as through Adam with `b1=0, b2=0` or a clip that all gradients
            reach. Within `jax.jit` at run time.
        TypeError: `held_out_loss` returns no scalar, or `Examples` is no axis.

    Cost: about three times the FLOPs of the run with `remat=False`, four with `True`
    and five with `"nested"`; one to two times more where the model within the step has
    `"nested"` too. Memory: the states that `remat` keeps, and what the derivative of
    one step takes.

    The square root in Adam has no derivative at zero: where an array's gradients are
    zero from the first step on, as of tokens that do not occur, give the optimizer a
    small `eps_root`, such as 1e-30.
    """
    Steps = steps_axis(Steps)
    for axis in ensure_tuple(Examples):
        check_axis("ghost.replay", axis)
    _check_examples(batches, ensure_tuple(Examples))
    ones = hax.ones((Steps, *ensure_tuple(Examples)), jnp.float32)

    def trained(
        weights: NamedArray,
        given: dict[str, PyTree],
        further: Array,
        remat: ScanCheckpointSpec = remat,
    ) -> tuple[Array, PyTree]:
        run = run_of(train_step, Steps, remat)
        last = run(state, batches, weights, given)
        loss = _loss_after(held_out_loss, _moved_further(state, last, further))
        return loss, last

    no_further = jnp.zeros((), jnp.float32)
    # Before anything is computed: a run that takes hours should not end with zeros.
    if not _has_derivative(
        lambda weights: trained(weights, per_step or {}, no_further, remat=False)[0],
        ones,
    ):
        raise ValueError(_NO_DERIVATIVE)
    (loss, last), (of_examples, of_steps, of_run) = jax.value_and_grad(
        trained, (0, 1, 2), has_aux=True
    )(ones, per_step or {}, no_further)
    of_examples = eqx.error_if(
        of_examples, ~jnp.isfinite(of_examples.array), _NOT_FINITE
    )
    # The mean share of an example in what the run changes in the loss, to first order.
    # Optimizers that follow gradients give the largest derivative at least that size;
    # one of signs leaves what rounding does, or zeros.
    of_example = jnp.abs(of_run) / max(of_examples.size, 1)
    largest = jnp.max(jnp.abs(of_examples.array), initial=0)
    is_rounding = largest <= _ROUNDING * of_example
    of_examples = eqx.error_if(of_examples, is_rounding, _ONLY_ROUNDING)
    return Replay(loss, last, of_examples, of_steps)


def _loss_after(held_out_loss: Callable[[Any], Array], last: PyTree) -> Array:
    """The held-out loss of the last state."""
    try:
        loss = raw_array(held_out_loss(last))
    except (AttributeError, TypeError) as error:
        error.add_note(
            f"held_out_loss is given the whole last state, {describe(last)}. With"
            " weighted_step that is (model, optimizer state): take the first of them."
        )
        raise
    if jnp.shape(loss):
        raise TypeError(
            f"held_out_loss returns one number; it returned an array {jnp.shape(loss)}."
        )
    return loss


def run_of(
    train_step: Step, Steps: Axis, remat: ScanCheckpointSpec = False
) -> Callable[..., PyTree]:
    """The run of a step, as a function of the first state, the batches, the weights of
    their examples, and the values of `per_step`.

    Python numbers of the state, such as the rate and the flag of a `Dropout`, stay as
    they are: in the carry of a loop they would be arrays, by which Python can't decide.
    """

    def run(
        state: PyTree, batches: PyTree, weights: NamedArray, of_steps: dict[str, PyTree]
    ) -> PyTree:
        numbers, changing = eqx.partition(state, _is_python_number)

        def step(
            changing: PyTree, batch: PyTree, weights: NamedArray, of_step: dict
        ) -> PyTree:
            state = eqx.combine(changing, numbers)
            new = train_step(state, batch, weights, **of_step)
            new_numbers, changing = eqx.partition(new, _is_python_number)
            _check_numbers(numbers, new_numbers)
            return changing

        last = fold(step, Steps, remat=remat)(changing, batches, weights, of_steps)
        return eqx.combine(last, numbers)

    return run


def _is_python_number(leaf: Any) -> bool:
    return isinstance(leaf, NUMBER)


def _check_numbers(before: PyTree, after: PyTree) -> None:
    """Refuse a step that changes a Python number of the state."""
    new = dict(jax.tree_util.tree_leaves_with_path(after))
    for path, number in jax.tree_util.tree_leaves_with_path(before):
        if new.get(path) != number:
            where = jax.tree_util.keystr(path)
            raise TypeError(
                f"state{where} is the Python number {number}, and the"
                f" step changes it. Make it an array, jnp.asarray({number})."
            )


def steps_axis(Steps: Axis | int) -> Axis:
    """The axis of the steps, from it or their number."""
    if isinstance(Steps, Axis):
        return Steps
    return layers_axis(Steps, "replay").alias("steps")


def _check_examples(batches: PyTree, Examples: tuple[Axis, ...]) -> None:
    """Refuses batches of another number of examples than there are weights."""
    for leaf in jax.tree.leaves(batches, is_leaf=is_named):
        for axis in leaf.axes if is_named(leaf) else ():
            for of_weights in Examples:
                if axis.name == of_weights.name and axis != of_weights:
                    raise ValueError(
                        f"ghost.replay: the batches have `{axis.name}` of size"
                        f" {axis.size}, and Examples is of size {of_weights.size}. Give"
                        " the axis of the batches."
                    )


# Of the mean share of an example. With the network of `tests/ghost/test_replay.py` and
# a few steps of SGD, Adam, RMSProp or Adafactor the largest derivative was 0.25 to 43
# of it; with signs by arithmetic at most 6e-5, or 0.01 where an `eps` is about as large
# as the gradients.
_ROUNDING = 1e-3


def _moved_further(first: PyTree, last: PyTree, further: Array) -> PyTree:
    """The last state, moved on in the direction of the run by this part of it, 0.

    The derivative of the loss by that part is what the run changes in the loss, to
    first order; it costs no further pass.
    """

    def moved(old: Any, new: Any) -> Any:
        # A leaf that no step changes is the first one itself, such as frozen weights
        if new is old or not eqx.is_inexact_array(new):
            return new
        # `further` is 0, and so is what the change's own derivative would be times it.
        change = jax.lax.stop_gradient(new - old)
        return new + (further * change).astype(new.dtype)

    return jax.tree.map(moved, first, last)


def _has_derivative(function: Callable[[Any], Array], at: Any) -> bool:
    """Whether the derivative of a function is not zero by its operations alone, found
    by tracing it.

    Signs, rounding, comparisons and `stop_gradient` have a derivative of zero, which
    JAX does not compute.
    """
    reaches: list[bool] = []

    @jax.custom_jvp
    def noted(value: Array) -> Array:
        return value

    # JAX drops tangents that are zero by their operations, and gives the rule a symbol
    # in their place; the trace computes nothing.
    def rule(primals: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Array]:
        reaches.append(not isinstance(tangents[0], jax.custom_derivatives.SymbolicZero))
        return primals[0], jnp.zeros_like(primals[0])

    noted.defjvp(rule, symbolic_zeros=True)

    def differentiated(at: Any) -> Any:
        return jax.jvp(
            lambda at: noted(function(at)), (at,), (jax.tree.map(jnp.ones_like, at),)
        )

    jax.eval_shape(differentiated, at)
    return any(reaches)


def weighted_step(
    losses: ExampleLosses, optimizer: Any, *, microbatches: int = 1
) -> Callable[..., tuple[PyTree, PyTree]]:
    """A training step for `replay`: the mean of the examples' weighted losses, and an
    Optax optimizer.

    Args:
        losses: the loss of each example, `[Examples]`, named or plain.
        optimizer: an `optax.GradientTransformation`, with the state of the model's
            floating-point arrays. From `optax.inject_hyperparams` it takes
            hyperparameters by step: `per_step={"learning_rate": rates}`.
        microbatches: number of equal parts of the batch whose gradients are computed
            one after the other, so that the derivative of a step has the intermediates
            of one part at a time. Named arrays are divided along the axis of the
            examples, plain ones along the first.

    Returns:
        A function from `(model, optimizer state)`, a batch, weights `[Examples]` (a
        named array) and hyperparameters to such a pair.

    Raises:
        TypeError: `losses` and `optimizer` are not what they should be; or the state is
            no such pair, or the weights have no axis.
        ValueError: there is not a loss for each weight; the examples of a batch don't
            divide into `microbatches`; or `per_step` has what is no hyperparameter of
            the optimizer.

    Cost: microbatches compute each gradient once more in `replay`.
    """
    check_loss_and_optimizer("weighted_step", losses, optimizer)

    def gradient(model: PyTree, batch: PyTree, weights: NamedArray) -> PyTree:
        def loss(model: PyTree) -> Array:
            each = losses_of(losses, model, batch)
            _check_losses(each, weights)
            if is_named(each):
                return hax.mean(weights * each).scalar()
            return jnp.mean(weights.array * each)

        return eqx.filter_grad(loss)(model)

    def mean_gradient(model: PyTree, batch: PyTree, weights: NamedArray) -> PyTree:
        if microbatches == 1:
            return gradient(model, batch, weights)
        # A sum keeps nothing for its derivative, and a checkpointed gradient only the
        # model and its part of the batch.
        part_gradient = eqx.filter_checkpoint(gradient)

        def add(total: PyTree, part: PyTree, weights: NamedArray) -> PyTree:
            new = part_gradient(model, part, weights)
            return jax.tree.map(lambda sum_, one: sum_ + one / microbatches, total, new)

        zeros = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_inexact_array))
        Parts = Axis("microbatch", microbatches)
        parts = in_microbatches((batch, weights), weights.axes[0], Parts)
        return fold(add, Parts)(zeros, *parts)

    def step(
        state: tuple[PyTree, PyTree],
        batch: PyTree,
        weights: NamedArray,
        **hyperparameters: Array,
    ) -> tuple[PyTree, PyTree]:
        is_pair = isinstance(state, tuple) and len(state) == 2
        # A transformation of Optax is a pair too, and stands where its state should
        if not is_pair or any(hasattr(part, "update") for part in (state, state[1])):
            raise TypeError(
                "weighted_step takes the state (model, optimizer.init(model)); got"
                f" {describe(state)}."
            )
        if not is_named(weights):
            raise TypeError(
                "weighted_step takes weights of an axis of the examples; got"
                f" {describe(weights)}. Write hax.ones(Examples), or"
                " hax.named(weights, Examples)."
            )
        model, optimizer_state = state
        gradients = mean_gradient(model, batch, weights)
        if hyperparameters:
            optimizer_state = _with_hyperparameters(optimizer_state, hyperparameters)
        trained = eqx.filter(model, eqx.is_inexact_array)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, trained)
        return eqx.apply_updates(model, updates), optimizer_state

    return step


def _check_losses(losses: Any, weights: NamedArray) -> None:
    """Refuses losses that the weights would be broadcast with: an example would then
    have the weights of others.
    """
    if is_named(losses):
        fit = set(weights.axes) <= set(losses.axes)
    else:
        fit = jnp.shape(losses) == weights.array.shape
    if not fit:
        raise ValueError(
            f"weighted_step: the losses are {describe(losses)}, and the weights of the"
            f" examples have the axes ({axes_text(weights.axes)}). Return a loss for"
            " each example."
        )


def _with_hyperparameters(state: Any, new: dict[str, Array]) -> Any:
    known = getattr(state, "hyperparams", {})
    if unknown := sorted(new.keys() - known.keys()):
        raise ValueError(
            f"per_step has {unknown[0]!r}, which is no hyperparameter of the optimizer."
            f" It has: {', '.join(known) or 'none'}. Make it with"
            " optax.inject_hyperparams(optax.adam)(...)."
        )
    cast = {
        name: jnp.asarray(value, jnp.result_type(known[name]))
        for name, value in new.items()
    }
    return state._replace(hyperparams={**known, **cast})


_NO_DERIVATIVE = (
    "replay has no influence to find: the loss after the run has no derivative by the"
    " weights of examples. An optimizer that takes the signs of gradients, such as"
    " Lion, Signum and sign SGD, has none, nor has a loss behind"
    " jax.lax.stop_gradient, a train_step that does not use its weights, or a"
    " held_out_loss that does not use its state. Use grad_dot, or replay a run of"
    " another optimizer."
)
_ONLY_ROUNDING = (
    "replay has no influence to find: the largest derivative of the loss by the weight"
    " of an example is zero or rounding. The optimizer's updates do not depend on the"
    " size of gradients, as with Adam of b1=0 and b2=0, gradients divided by their own"
    " size, or a clip that all of them reach. Use grad_dot, or replay a run of another"
    " optimizer."
)
_NOT_FINITE = (
    "the derivative of the held-out loss through the run is not finite. With Adam, give"
    " the optimizer a small eps_root, such as 1e-30: its square root has no derivative"
    " at a gradient of zero. Else the run itself diverges: replay fewer steps, or lower"
    " its learning rate."
)
