"""Random numbers from NumPy: JAX would compile its own for every shape."""

from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *axes: hax.Axis | int, dtype: Any = jnp.float32) -> Any:
    """A named array of the given axes, or a plain one of the given sizes."""
    sizes = [axis.size if isinstance(axis, hax.Axis) else axis for axis in axes]
    numbers = np.random.default_rng(seed).normal(size=sizes)
    # `jnp.asarray` would compile a program for every shape (JAX 0.10 and later).
    array = jax.device_put(numbers.astype(dtype))
    return hax.named(array, axes) if axes and isinstance(axes[0], hax.Axis) else array
