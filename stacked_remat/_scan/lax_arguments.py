"""The arguments of `jax.lax.scan`, as it takes them and refuses them.

`lax_scan` of `api.py` stands in for `jax.lax.scan`, so it takes what that takes: a
length as 4.0, an `unroll` of 0. And it refuses what that refuses and `scan` does not:
leaves of `xs` without a leading axis, a carry or an output that is no array.
"""

import operator
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from .._schedule import whole_number
from .._static import PyTree
from .checks import text
from .marks import is_array, is_named


def check_steps(xs: PyTree, length: Any) -> None:
    """Refuse leaves of `xs` without a leading axis, and a length that nothing tells."""
    leaves = jtu.tree_leaves_with_path(xs, is_leaf=is_named)
    # `scan` would pass a leaf without a leading axis to every step
    for path, leaf in leaves:
        where = f"lax_scan: xs{jtu.keystr(path)} is {text(leaf)}"
        if is_named(leaf):
            raise ValueError(f"{where}, whose axes have names. Use scan with its axis.")
        if not is_array(leaf) or not leaf.shape:
            raise ValueError(
                f"{where}, and has no leading axis to scan over. Close over it to give"
                " it to every step, or stack a value for each: jnp.stack(values)."
            )
    if length is None and not leaves:
        raise ValueError(
            "lax_scan: xs has no array to split. Pass length=, how many steps to run."
        )


def number_of_steps(length: Any) -> int:
    """A length as an int; JAX takes whatever `int` does, as 4.0."""
    try:
        number: Any = int(length)
    except (TypeError, ValueError, OverflowError):  # the last of infinity
        number = length  # for the error
    return whole_number("length", number, "the number of steps", least=0)


def unroll_of_jax(unroll: Any) -> int | bool:
    """How many steps an iteration runs; 0 is all of them."""
    if isinstance(unroll, bool | np.bool_):
        return bool(unroll)
    try:
        number = operator.index(unroll)
    except TypeError:
        number = unroll  # for the error
    meaning = "a bool or a number of steps, 0 for all of them,"
    return whole_number("unroll", number, meaning, least=0) or True


def check_arrays(tree: PyTree, what: str) -> None:
    """Refuse leaves that are neither arrays nor numbers: `scan` passes these on,
    `jax.lax.scan` does not.
    """
    for path, leaf in jtu.tree_leaves_with_path(tree):
        if not eqx.is_array_like(leaf):
            raise TypeError(
                f"lax_scan: {what}{jtu.keystr(path)} is {text(leaf)}, which is no"
                " array. Close over it, or use scan, which passes it on."
            )
