"""Parameters that are chosen by patterns of their paths: to be frozen, or to have a
learning rate of their own.

The path of a parameter is that of its module, as patterns of `LoraConfig.targets` have
it, and its name there: `layers.*.attention.q_proj.weight`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from .._paths import check_patterns, find_parameters, first_match, map_parameters
from .._static import is_array

KIND = "parameter that is trained"


def is_floating(leaf: Any) -> bool:
    """Whether a leaf is an array of floating-point numbers, or the shape of one."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def parameter_paths(model: Any) -> list[str]:
    """The paths of all arrays of a model, which the patterns of `freeze` and
    `optimizer.learning_rates` match.

    The layers of a stack have one array, and one path with `*` for their number; those
    of a `BlockSeq` have their numbers.
    """
    return list(find_parameters(model))


def trainable_except(
    model: Any, patterns: Sequence[str], trainable: Any = is_floating
) -> Any:
    """Which arrays of a model are trained: all but those that match a pattern.

    Args:
        model: any tree.
        patterns: of paths, as `parameter_paths` gives them; `*` matches any characters,
            `?` one, `[ab]` one of these.
        trainable: what is trained without patterns: a filter spec, as in `eqx.filter`;
            by default all floating-point arrays.

    Returns:
        A tree of bools like the model, for `TrainState.init` and `fused_update`: frozen
        parameters have neither gradients nor optimizer state.

    Raises:
        ValueError: a pattern matches nothing that would be trained; names the nearest
            paths.
    """
    trained, rest = eqx.partition(model, trainable)
    check_patterns("freeze", patterns, parameter_paths(trained), KIND)

    def mark(path: str, parameter: Any) -> Any:
        is_trained = first_match(path, patterns) is None
        return jax.tree.map(lambda _: is_trained, parameter)

    frozen = jax.tree.map(lambda _: False, rest)
    return eqx.combine(map_parameters(trained, mark), frozen)


def check_learning_rates(factors: Mapping[str, float], trained: Any) -> None:
    """Check that every pattern of `optimizer.learning_rates` is the first that matches
    some parameter.

    `trained` is a model with None for what is not trained, as in `TrainState`.

    Raises:
        ValueError: one matches none, and the nearest paths are named; or an earlier
            pattern matches all that it does.
    """
    key = "optimizer.learning_rates"
    paths = parameter_paths(trained)
    check_patterns(key, factors, paths, KIND)
    # A pattern that never comes first has no effect, and nobody would see that.
    first_matches = {first_match(path, factors) for path in paths}
    for pattern in factors:
        if pattern not in first_matches:
            raise ValueError(
                f"{key}: {pattern!r} has no effect, since earlier patterns match all"
                " that it matches. Write it before them."
            )


def scale_by_pattern(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Multiply the update of a parameter by the factor of the first pattern that
    matches its path.

    The path is found in each call, not at `init`: fused updates give the optimizer one
    layer, or what is outside of stacks, in a tree like the whole model.
    """

    def scaled(path: str, update: Any) -> Any:
        pattern = first_match(path, factors)
        return update if pattern is None else update * factors[pattern]

    return optax.stateless(lambda updates, _: map_parameters(updates, scaled))
