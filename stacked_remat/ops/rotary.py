"""Rotary position embedding on named axes (Su et al. 2021, "RoFormer").

The frequencies are configured by a class of `_rotary_scaling.py`. Cosines and sines are computed once for all
layers.
"""

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from .._messages import axes_text
from ._rotary_scaling import DefaultRotary, RotaryScaling


class RotaryTable(eqx.Module):
    """Cosines and sines of the rotary angles of each pair of coordinates, in float32.

    `[..., Pos, HeadDim]` with half of the coordinates. Made once per forward pass and shared by all layers.
    """

    cos: NamedArray
    sin: NamedArray


def rotary_table(
    positions: NamedArray, HeadDim: Axis, *, theta: float, scaling: RotaryScaling | None = None
) -> RotaryTable:
    """Cosines and sines of the rotary angles, in the layout of Hugging Face's checkpoints.

    Coordinate i is paired with i + HeadDim/2, and the pair rotates by its frequency in radians per position:
    `theta**(-2i/HeadDim)`, rescaled by `scaling`.

    Args:
        positions: integer positions `[..., Pos]`; with a batch axis if sequences are packed differently.
        HeadDim: the axis of one head's coordinates; its size must be even.
        theta: base of the wavelengths.
        scaling: how frequencies are rescaled for longer contexts than those of training; None for not at all.

    Returns:
        Cosines and sines `[..., Pos, HeadDim]` of half the size of `HeadDim`, times the attention factor of
        `scaling`.

    Raises:
        ValueError: `HeadDim` is odd, positions are not integers or have that axis, or `theta` is at most one.

    Cost: a float32 number per position and coordinate. Angles are products in float32, as in Hugging
    Face's transformers: a cosine is off by up to 1e-3 at position 65,535 and 3e-2 at a million.
    """
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions must be integers; got {positions.dtype}.")
    if HeadDim.name in {axis.name for axis in positions.axes}:
        raise ValueError(f"positions already have the axis {HeadDim.name!r} of a head's coordinates.")
    scaling = DefaultRotary() if scaling is None else scaling
    frequencies = scaling.frequencies(HeadDim.size, theta)
    Half = HeadDim.resize(HeadDim.size // 2)
    wide = positions.astype(jnp.float32).broadcast_to((*positions.axes, Half))
    angles = wide * hax.named(frequencies.astype(np.float32), Half)
    factor = scaling.attention_factor_used
    return RotaryTable(hax.cos(angles) * factor, hax.sin(angles) * factor)


def apply_rotary(x: NamedArray, table: RotaryTable, HeadDim: Axis) -> NamedArray:
    """Rotate the coordinate pairs of `x`, `[..., Pos, ..., HeadDim]`, by the table's angles.

    Computes in float32 and returns the axes and dtype of `x`.

    Args:
        x: queries or keys.
        table: of the same positions.
        HeadDim: the axis of one head's coordinates.

    Raises:
        ValueError: `x` lacks an axis of the table, or has it with another size.
    """
    pairs = table.cos.resolve_axis(HeadDim.name)
    own = [axis for axis in table.cos.axes if axis != pairs]
    lacking = [axis for axis in (*own, pairs.resize(2 * pairs.size), HeadDim) if axis not in x.axes]
    if lacking:
        raise ValueError(
            f"x has {axes_text(x.axes)}; the rotary table has {axes_text(lacking)}. Make the table from the "
            "positions of x, with its HeadDim."
        )
    wide = x.astype(jnp.float32)
    first, second = wide[HeadDim, : pairs.size], wide[HeadDim, pairs.size :]
    rotated = [first * table.cos - second * table.sin, second * table.cos + first * table.sin]
    return hax.concatenate(HeadDim, rotated).rearrange(x.axes).astype(x.dtype)
