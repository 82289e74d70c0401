"""A static value among the leaves of a pytree."""

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """Carries a hashable value through transformations, as part of the structure of a tree."""

    value: Any
