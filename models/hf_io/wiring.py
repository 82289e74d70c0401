"""Whether an architecture's layers still compute what its `model_type` stands for.

A layer's wiring is code, which no field of a `config.json` describes. So each format
records what a small layer makes of fixed numbers, from when its decoder was compared
with transformers; an export compares.
"""

import functools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import Array

from models.hf_io.formats import HfFormat
from models.hf_io.safetensors_folder import WeightsError
from models.parts.config import DecoderConfig
from models.parts.tokens import Tokens
from stacked_remat.ops import rotary_table
from stacked_remat.training import POSITION_AXIS

_Pos = Axis(POSITION_AXIS, 5)
_TOLERANCE = 1e-3  # devices round differently


@functools.cache
def checksum(config: DecoderConfig) -> float:
    """A weighted sum of what the first layer of a decoder makes of fixed numbers.

    Cost: of the layer on five tokens, once for each config.
    """
    make = functools.partial(config.init_layer, config.kind_of(0))
    shapes = eqx.filter_eval_shape(make, key=jax.random.key(0))
    leaves, structure = jax.tree.flatten(shapes)
    filled = [_fixed(leaf.shape, number) for number, leaf in enumerate(leaves)]
    layer = jax.tree.unflatten(structure, filled)
    axes = (_Pos, config.Embed)
    sizes = [axis.size for axis in axes]
    x, weights = (NamedArray(_fixed(sizes, -number), axes) for number in (1, 2))
    rotary = layer.rotary and rotary_table(
        hax.arange(_Pos), layer.rotary.Dim, theta=100.0
    )

    @eqx.filter_jit
    def weighted(layer: Any, x: NamedArray) -> Array:
        with jax.default_matmul_precision("float32"):
            output, _ = layer(x, Tokens(rotary))
        return hax.sum(output * weights).array

    return float(weighted(layer, x))


def check_wiring(known: HfFormat) -> None:
    """Raises WeightsError for a format whose layers compute other values than those
    that were compared with transformers.
    """
    if known.checksum is None:
        return
    found = checksum(known.config_class())
    if abs(found - known.checksum) > _TOLERANCE * max(1.0, abs(known.checksum)):
        raise WeightsError(
            f"The layers of {known.config_class.__name__} compute other values than"
            f" those of model_type {known.model_type!r} do ({found:.6g} in place of"
            f" {known.checksum:.6g}), so that it does not describe them. Register a"
            " config of another type for layers of your own."
        )


def _fixed(shape: Any, number: int) -> Array:
    """Numbers between -0.3 and 0.3 that look random."""
    steps = np.arange(np.prod(shape, dtype=int)) * (0.7 + 0.01 * number) + number
    values = 0.3 * np.sin(steps**2)
    return jnp.asarray(values.reshape(shape), jnp.float32)
