"""Names for the values that a checkpoint policy may keep or move to the host."""

from typing import TypeVar

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._scan.marks import is_array

T = TypeVar("T")


def checkpoint_name(tree: T, name: str) -> T:
    """Name the arrays of a tree, so that `save_block_internals=[name]` and the like can pick them.

    The identity in value and gradient. What is kept is the value that comes out of here, so use it, not the
    argument.

    Args:
        tree: named arrays, plain arrays and anything else; leaves that are not arrays pass through.
        name: the checkpoint name. Several values may share one.

    Returns:
        The tree, with the same structure, shapes and dtypes.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"A checkpoint name is a string; got {name!r}. The tree comes first: checkpoint_name(tree, name)."
        )
    return jax.tree.map(lambda leaf: _named(leaf, name) if is_array(leaf) else leaf, tree)


def _named(leaf: Array, name: str) -> Array:
    if jnp.iscomplexobj(leaf):  # JAX keeps named values as real numbers
        return lax.complex(_named(jnp.real(leaf), name), _named(jnp.imag(leaf), name))
    return jax.ad_checkpoint.checkpoint_name(leaf, name)
