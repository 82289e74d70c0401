"""Tensors in 8-bit floats with a float32 scale for each block of 128 x 128.

A tensor `NAME` comes with `NAME_scale_inv`, by whose entries its blocks are multiplied.
"""

import numpy as np
from jaxtyping import Float, Shaped

SCALES = "_scale_inv"
DTYPE = "F8_E4M3"
BLOCK = 128


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a tensor."""
    return tuple(-(-size // BLOCK) for size in shape)


def dequantized(
    values: Shaped[np.ndarray, "out in"], scales: Float[np.ndarray, "blocks_out blocks_in"]
) -> Float[np.ndarray, "out in"]:
    """The tensor in float32."""
    rows, columns = values.shape
    wide = np.repeat(np.repeat(scales, BLOCK, axis=0)[:rows], BLOCK, axis=1)[:, :columns]
    return values.astype(np.float32) * wide
