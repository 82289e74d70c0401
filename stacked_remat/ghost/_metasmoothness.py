"""Whether the derivative of a training run predicts the run without an example.

A derivative describes a small change of the weights of examples, and leaving some out
is not a small one. Where the trained parameters change by about as much, and in the
same directions, when a change of the weights is made a second time, the run is smooth
enough for the derivative to hold that far.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Float, PRNGKeyArray

from .._scan.checks import text
from .._static import PyTree, is_array
from ._examples import check_axis
from ._replay import Step, run_of, steps_axis


def metasmoothness(
    train_step: Step,
    state: PyTree,
    batches: PyTree,
    parameters: Callable[[Any], PyTree],
    Steps: Axis | int,
    Examples: Axis,
    *,
    key: PRNGKeyArray,
    size: float = 0.1,
    example_ids: NamedArray | None = None,
    per_step: dict[str, PyTree] | None = None,
) -> Float[Array, ""]:
    """Train three times, and tell by the trained parameters whether `replay` will
    predict: near 1 if so, near 0 or below if not.

    The three runs weight the examples by `1`, `1 + size * v` and `1 + 2 * size * v`,
    for `v` from the normal distribution. The result is the share of the movement, from
    the first run to the last, of parameters that move in the same direction in both
    halves, minus that of the others (Engstrom et al. 2025, "Optimizing ML Training with
    Metagradient Descent", Definition 2):

    ```python
    first, second = middle - start, end - middle
    moved = abs(end - start)
    sum(sign(first) * sign(second) * moved) / sum(moved)
    ```

    Args:
        train_step: as `replay` takes it.
        state: before the first step.
        batches: those of all steps.
        parameters: from the last state to the arrays that are compared: those that the
            held-out loss reads, such as the model.
        Steps: the axis of the steps, or their number.
        Examples: the axis of the examples of a batch.
        key: draws `v`.
        size: standard deviation of a step from run to run. With 0.1 the weights of n
            examples move about as far as by leaving out n / 100 of them.
        example_ids: the number of each example, `[Steps, Examples]`: an example that is
            in several steps is one, and has one entry of `v`. All differ if not given.
        per_step: as `replay` takes it.

    Returns:
        A number from -1 to 1; 1 where nothing moves.

    Raises:
        ValueError: `example_ids` has other axes; sizes along `Steps` differ.
        TypeError: `key` is no random key.

    Cost: three runs, without gradients of them. Memory: that of a run.
    """
    Steps = steps_axis(Steps)
    if not is_array(key):
        raise TypeError(
            f"metasmoothness: key is a random key; got {text(key)}. Write"
            " key=jax.random.key(0)."
        )
    check_axis("ghost.metasmoothness", Examples)
    run = run_of(train_step, Steps)
    if example_ids is None:
        ids = jnp.arange(Steps.size * Examples.size).reshape(Steps.size, -1)
    elif {*example_ids.axes} == {Steps, Examples}:
        ids = example_ids.rearrange((Steps, Examples)).array
    else:
        raise ValueError(
            f"example_ids has the axes {example_ids.axes}; it needs {Steps} and"
            f" {Examples}, the number of each example of each step."
        )

    def drawn(number: Array) -> Array:
        return jax.random.normal(jax.random.fold_in(key, number))

    direction = jax.vmap(jax.vmap(drawn))(ids)

    def trained(distance: Array) -> list[Array]:
        weights = hax.named(1.0 + distance * direction, (Steps, Examples))
        last = run(state, batches, weights, per_step or {})
        arrays = eqx.filter(parameters(last), eqx.is_inexact_array)
        return jax.tree.leaves(arrays)

    # One after the other, so that memory is that of one run
    return _agreement(jax.lax.map(trained, size * jnp.arange(3.0)))


def _agreement(runs: list[Array]) -> Float[Array, ""]:
    """The agreement of the two steps between three runs, `[run, ...]`, as
    `metasmoothness` defines it.
    """
    agreeing = jnp.zeros(())
    moved = jnp.zeros(())
    for array in runs:
        start, middle, end = array.astype(jnp.float32)
        distance = jnp.abs(end - start)
        signs = jnp.sign(middle - start) * jnp.sign(end - middle)
        agreeing += jnp.sum(signs * distance)
        moved += jnp.sum(distance)
    # Of a run that is not finite the result is not, either
    return jnp.where(moved == 0, 1.0, agreeing / jnp.where(moved == 0, 1.0, moved))
