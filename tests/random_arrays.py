"""Random numbers from NumPy: JAX would compile its own for every shape."""

from typing import Any

import haliax as hax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *axes: hax.Axis | int, dtype: Any = jnp.float32) -> Any:
    """A named array of the given axes, or a plain one of the given sizes."""
    sizes = [axis.size if isinstance(axis, hax.Axis) else axis for axis in axes]
    array = jnp.asarray(np.random.default_rng(seed).normal(size=sizes), dtype)
    return hax.named(array, axes) if axes and isinstance(axes[0], hax.Axis) else array
