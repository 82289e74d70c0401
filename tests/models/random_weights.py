"""Models with random weights that are not compiled."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


def random_weights(init, *args, spread=0.02, **kwargs):
    """What `init(*args, key=...)` makes, with numbers from NumPy; norms are ones.

    To compile the random numbers of a decoder takes longer than most of what tests do
    with it.
    """
    rng = np.random.default_rng(0)

    def value(path, leaf):
        norm = "norm" in jax.tree_util.keystr(path)
        return jnp.asarray(
            np.ones(leaf.shape) if norm else spread * rng.normal(size=leaf.shape),
            leaf.dtype,
        )

    shapes = eqx.filter_eval_shape(init, *args, key=jax.random.key(0), **kwargs)
    return jax.tree_util.tree_map_with_path(value, shapes)
