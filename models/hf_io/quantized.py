"""Tensors in 4 and in 8 bits, which are two tensors in a file, to float32.

In MXFP4, of the Open Compute Project's "Microscaling Formats (MX) Specification", 2023,
32 values in a row share a power of two. A tensor `NAME`, `[..., narrow, wide]`, is
transposed in a file: `NAME_blocks`, `[..., wide, narrow / 32, 16]`, whose bytes have
the earlier value in their lower half, and `NAME_scales`, `[..., wide, narrow / 32]`. In
FP8, `NAME_scale_inv` has a float32 factor for each block of 128 x 128.
"""

import numpy as np
from jaxtyping import Float, Shaped, UInt8

BLOCKS = "_blocks"
SCALES = "_scales"
FP8 = "F8_E4M3"
FP8_SCALES = "_scale_inv"
FP8_BLOCK = 128

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
# The two values of every byte, as one number, because indexing takes a fourth of the
# time then.
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1).view(
    np.uint64
)[:, 0]
_BYTES = 16  # of a block
_BIAS = 127  # of the exponents that are the scales


def from_mxfp4(
    blocks: UInt8[np.ndarray, "... wide block byte"],
    scales: UInt8[np.ndarray, "... wide block"],
) -> Float[np.ndarray, "... narrow wide"]:
    """The tensor in float32, exact for scales up to 252; a view whose memory is `[...,
    wide, narrow]`.
    """
    values = _PAIRS[blocks].view(np.float32)
    values *= np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)[..., None]
    return np.swapaxes(values.reshape(*scales.shape[:-1], -1), -1, -2)


def join_pairs(shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> None:
    """Replaces the two tensors of each that is quantized, among those of a folder, by
    one in bfloat16.
    """
    for one, shape in [*shapes.items()]:
        name = one.removesuffix(BLOCKS)
        if dtypes.get(one) == FP8 and shapes.get(one + FP8_SCALES) == tuple(
            -(-n // FP8_BLOCK) for n in shape
        ):
            dtypes[one] = "BF16"
            del shapes[one + FP8_SCALES], dtypes[one + FP8_SCALES]
        elif (
            name != one
            and shapes.get(name + SCALES) == shape[:-1]
            and shape[-1] == _BYTES
        ):
            if len(shape) > 2 and dtypes[one] == dtypes[name + SCALES] == "U8":
                *leading, wide, count, size = shape
                shapes[name] = (*leading, count * size * 2, wide)
                dtypes[name] = "BF16"
                for part in (one, name + SCALES):
                    del shapes[part], dtypes[part]


def from_fp8(
    values: Shaped[np.ndarray, "out in"],
    scales: Float[np.ndarray, "blocks_out blocks_in"],
) -> Float[np.ndarray, "out in"]:
    """The tensor in float32."""
    rows, columns = values.shape
    wide = np.repeat(np.repeat(scales, FP8_BLOCK, axis=0)[:rows], FP8_BLOCK, axis=1)[
        :, :columns
    ]
    return values.astype(np.float32) * wide
