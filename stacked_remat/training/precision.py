"""Dtypes in which weights and optimizer state are stored; arithmetic on them is in
float32.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import DTypeLike

from .trainer_config import FloatName

T = TypeVar("T")


def cast_parameters(model: T, dtype: FloatName) -> T:
    """The model with its floating-point arrays in `dtype`; arrays of fewer bits are not
    widened, and those of modules whose class has `keeps_dtype = True` not cast.
    """
    size = jnp.dtype(dtype).itemsize
    return _cast(model, dtype, lambda bytes_: bytes_ >= size, keeps_dtype)


def keeps_dtype(node: Any) -> bool:
    """Whether parameters are of a module whose class has `keeps_dtype = True`."""
    return getattr(node, "keeps_dtype", False) is True


def _cast(
    tree: T,
    dtype: FloatName,
    wanted: Callable[[int], bool],
    is_kept: Callable[[Any], bool] | None = None,
) -> T:
    """The tree with its floating-point arrays of some sizes of numbers in `dtype`, but
    for those in nodes that are kept.
    """

    def cast(leaf: Any) -> Any:
        return (
            leaf.astype(dtype)
            if eqx.is_inexact_array(leaf) and wanted(leaf.dtype.itemsize)
            else leaf
        )

    return jax.tree.map(cast, tree, is_leaf=is_kept)


def in_float32(
    optimizer: optax.GradientTransformation, storage: FloatName = "float32"
) -> optax.GradientTransformation:
    """An optimizer that computes in float32 and stores arrays of their own parameter's
    shape in `storage`.

    Statistics of other shapes (Adafactor's rows and columns, counters, coefficients)
    are small and keep their dtypes. Updates are float32.
    """

    def widened(tree: T) -> T:
        # Numbers of 64 bits, under `jax_enable_x64`, are not narrowed.
        return _cast(tree, "float32", lambda bytes_: bytes_ < 4)

    def init(params: Any) -> Any:
        return _stored(optimizer.init(widened(params)), params, storage)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        steps, after = optimizer.update(
            widened(updates), widened(state), widened(params)
        )
        return steps, _stored(after, updates, storage)

    return optax.GradientTransformation(init, update)


def _stored(state: Any, parameters: Any, dtype: DTypeLike) -> Any:
    if jnp.dtype(dtype) == jnp.float32:
        return state
    # A scalar's path and shape would match counters of the optimizer too.
    shapes = {
        path: leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)
        if leaf.ndim
    }

    def store(path: tuple[Any, ...], leaf: Any) -> Any:
        # In an optimizer's state, what belongs to a parameter is in a tree like the
        # parameters'.
        own = next(
            (shapes[path[at:]] for at in range(len(path) + 1) if path[at:] in shapes),
            None,
        )
        return (
            leaf.astype(dtype)
            if eqx.is_inexact_array(leaf) and leaf.shape == own
            else leaf
        )

    return jax.tree_util.tree_map_with_path(store, state)
