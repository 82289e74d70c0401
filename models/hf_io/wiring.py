"""Whether an architecture's decoder still computes what its `model_type` stands for.

A layer's wiring is code, which no field of a `config.json` describes. So each format
records what a small decoder with layers of each kind makes of fixed numbers, from when
it was compared with transformers; an export compares.
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
from models.parts.decoder import Decoder
from stacked_remat.training import POSITION_AXIS

Pos, Vocab = Axis(POSITION_AXIS, 5), Axis("vocab", 7)
_TOLERANCE = 3e-4  # devices round differently


@functools.cache
def checksum(config: DecoderConfig) -> float:
    """A weighted sum of the logits of a decoder with fixed numbers in its weights.

    Cost: of the decoder on five tokens, once for each config.
    """
    make = functools.partial(Decoder.init, config, Vocab)
    shapes = eqx.filter_eval_shape(make, key=jax.random.key(0))
    leaves, structure = jax.tree.flatten(shapes)
    filled = [_fixed(leaf.shape, number) for number, leaf in enumerate(leaves)]
    model = jax.tree.unflatten(structure, filled)
    tokens = hax.arange(Pos)
    weights = NamedArray(_fixed((Pos.size, Vocab.size), -1), (Pos, Vocab))

    @eqx.filter_jit
    def weighted(model: Decoder) -> Array:
        with jax.default_matmul_precision("float32"):
            hidden, _ = model.hidden_states(tokens)
            logits = model.logits(hidden)
        return hax.sum(logits * weights).array

    return float(weighted(model))


def check_wiring(known: HfFormat) -> None:
    """Raises WeightsError for a format whose decoder computes other values than the one
    that was compared with transformers.
    """
    if known.checksum is None:
        return
    found = checksum(known.config_class(**known.probe))
    if abs(found - known.checksum) > _TOLERANCE * max(1.0, abs(known.checksum)):
        raise WeightsError(
            f"The decoder of {known.config_class.__name__} computes other values than"
            f" that of model_type {known.model_type!r} does ({found:.6g} in place of"
            f" {known.checksum:.6g}), so that it does not describe it. Register a"
            " config of another type for layers of your own."
        )


def _fixed(shape: Any, number: int) -> Array:
    """Numbers between -0.3 and 0.3 that look random."""
    steps = np.arange(np.prod(shape, dtype=int)) * (0.7 + 0.01 * number) + number
    values = 0.3 * np.sin(steps**2)
    return jnp.asarray(values.reshape(shape), jnp.float32)
