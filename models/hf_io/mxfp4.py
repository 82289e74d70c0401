"""Tensors in MXFP4: 4-bit floats, two in a byte, of which 32 in a row share a power of two.

The format is that of the Open Compute Project's "Microscaling Formats (MX) Specification", 2023. A tensor
`NAME`, `[..., narrow, wide]`, is two in a file, transposed: `NAME_blocks`, `[..., wide, narrow / 32, 16]`,
whose bytes have the earlier value in their lower half, and `NAME_scales`, `[..., wide, narrow / 32]`.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, UInt8

BLOCKS, SCALES = "_blocks", "_scales"

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
# The two values of every byte, as one number, because indexing takes a fourth of the time then.
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1).view(np.uint64)[:, 0]
_BYTES = 16  # of a block
_BIAS = 127  # of the exponents that are the scales


def dequantized(
    blocks: UInt8[np.ndarray, "... wide block byte"], scales: UInt8[np.ndarray, "... wide block"]
) -> Float[np.ndarray, "... narrow wide"]:
    """The tensor in float32, exact for scales up to 252; a view whose memory is `[..., wide, narrow]`."""
    values = _PAIRS[blocks].view(np.float32)
    values *= np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)[..., None]
    return np.swapaxes(values.reshape(*scales.shape[:-1], -1), -1, -2)


def dequantized_shapes(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that are in MXFP4 among those of a file, by `NAME`."""
    found = {}
    for blocks, shape in shapes.items():
        name = blocks.removesuffix(BLOCKS)
        pair = (blocks, name + SCALES)
        if name == blocks or shapes.get(pair[1]) != shape[:-1] or len(shape) < 3 or shape[-1] != _BYTES:
            continue
        if all(dtypes[one] == "U8" for one in pair):
            *leading, wide, count, size = shape
            found[name] = (*leading, count * size * 2, wide)
    return found
