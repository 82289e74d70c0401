"""Whether an architecture's decoder still computes what its `model_type` stands for.

A layer's wiring is code, which no field of a `config.json` describes. So each format
records a checksum of its decoder, taken when the decoder agreed with transformers. An
export computes the checksum again, and is refused if it differs.
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

Pos = Axis(POSITION_AXIS, 5)
Vocab = Axis("vocab", 7)
_TOLERANCE = 3e-4  # devices round differently


@functools.cache
def checksum(config: DecoderConfig) -> float:
    """A weighted sum of the logits of a decoder with fixed numbers in its weights, and
    of those for further tokens.

    Cost: a forward pass over five tokens and its compilation, once for each config in a
    process.
    """
    make = functools.partial(Decoder.init, config, Vocab)
    shapes = eqx.filter_eval_shape(make, key=jax.random.key(0))
    # By the order of leaves, which is that of the fields of layers: names may change.
    leaves, structure = jax.tree.flatten(shapes)
    filled = [_fixed(leaf.shape, number) for number, leaf in enumerate(leaves)]
    model = jax.tree.unflatten(structure, filled)
    tokens = hax.arange(Pos)
    weights = NamedArray(_fixed((Pos.size, Vocab.size), -1), (Pos, Vocab))

    @eqx.filter_jit
    def weighted(model: Decoder) -> Array:
        # GPUs and TPUs round the factors of products otherwise.
        with jax.default_matmul_precision("float32"):
            hidden, further, _ = model.further_states(tokens)
            total = hax.sum(model.logits(hidden) * weights)
            if further is not None:
                total = total + hax.sum(model.logits(further) * weights)
        return total.array

    return float(weighted(model))


def check_wiring(known: HfFormat) -> None:
    """Raises WeightsError if the decoder of a format has another checksum than the
    format records.
    """
    if known.checksum is None:
        return
    found = checksum(known.config_class(**known.probe))
    if abs(found - known.checksum) > _TOLERANCE * max(1.0, abs(known.checksum)):
        raise WeightsError(
            f"The decoder of {known.config_class.__name__} can't be exported:"
            f" model_type {known.model_type!r} does not describe it (its checksum is"
            f" {found:.6g} in place of {known.checksum:.6g}). Register layers of your"
            " own under another model_type."
        )


def _fixed(shape: Any, number: int) -> Array:
    """Numbers between -0.3 and 0.3 that look random."""
    steps = np.arange(np.prod(shape, dtype=int)) * (0.7 + 0.01 * number) + number
    # Of squares, which follow no period: no two rows or layers are alike, so that a
    # layer that is left out, or moved, changes the sum.
    values = 0.3 * np.sin(steps**2)
    return jnp.asarray(values.reshape(shape), jnp.float32)
