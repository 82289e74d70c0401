"""Rotary position embedding on named axes."""

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray


class RotaryTable(eqx.Module):
    """Cosines and sines of the rotary angles, `[..., Pos, HeadDim]` in float32.

    Made once per forward pass and shared by all layers, since no layer's angles differ from another's.
    """

    cos: NamedArray
    sin: NamedArray


def rotary_table(positions: NamedArray, HeadDim: Axis, *, theta: float) -> RotaryTable:
    """The angles of "RoFormer" (Su et al. 2021), in the layout of Hugging Face's checkpoints.

    Coordinate i is paired with i + HeadDim/2, and the pair turns by `position * theta**(-2i/HeadDim)`.

    Args:
        positions: integer positions `[..., Pos]`.
        HeadDim: the axis of one head's coordinates; its size must be even.
        theta: base of the wavelengths.
    """
    Half = HeadDim.resize(HeadDim.size // 2)
    frequencies = theta ** (hax.arange(Half, dtype=jnp.float32) * (-2.0 / HeadDim.size))
    angles = positions.astype(jnp.float32).broadcast_axis(Half) * frequencies
    angles = hax.concatenate(HeadDim, [angles, angles])
    return RotaryTable(hax.cos(angles), hax.sin(angles))


def apply_rotary(x: NamedArray, table: RotaryTable, HeadDim: Axis) -> NamedArray:
    """Turns the coordinate pairs of `x`, `[..., Pos, ..., HeadDim]`, by the table's angles.

    Computes in float32 and returns the dtype of `x`.
    """
    half = HeadDim.size // 2
    wide = x.astype(jnp.float32)
    first, second = wide[HeadDim, :half], wide[HeadDim, half:]
    turned = hax.concatenate(HeadDim, [-second, first])
    return (wide * table.cos + turned * table.sin).rearrange(x.axes).astype(x.dtype)
