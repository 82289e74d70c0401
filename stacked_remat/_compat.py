"""The one place that works around a version of JAX or Haliax; each entry says which, and why.

- Haliax up to 1.4.dev453 calls `jax.core.is_constant_dim`, removed in JAX 0.11 (deprecated since 0.10), from
  `hax.dot`, `hax.einsum` and `Linear`. Shapes hold plain integers unless `jax.export`'s symbolic dimensions
  are in use, so the attribute is restored with that meaning. Nothing happens where JAX still has it.
"""

import operator
import warnings
from typing import Any

import jax
import jax.core


def _is_constant_dim(dimension: Any) -> bool:
    try:
        operator.index(dimension)
    except Exception:  # a symbolic dimension refuses to be an index, with an error class of its own
        return False
    return True


def restore_is_constant_dim() -> None:
    """Give `jax.core` the `is_constant_dim` that Haliax reads, where this JAX no longer has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        present = hasattr(jax.core, "is_constant_dim")
    if not present:
        jax.core.is_constant_dim = _is_constant_dim  # pyright: ignore[reportAttributeAccessIssue]


restore_is_constant_dim()
