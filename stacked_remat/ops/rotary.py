"""Rotary position embedding on named axes (Su et al. 2021, "RoFormer").

How fast each pair of coordinates turns is all there is to configure: `_rotary_scaling.py` has a small class
for each way. Cosines and sines are made once for all layers, and applying them is the same for all.
"""

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import Array, Float, Int

from ._rotary_scaling import DefaultRotary, RotaryScaling


class RotaryTable(eqx.Module):
    """Cosines and sines of the rotary angles, `[..., Pos, HeadDim]` in float32.

    Made once per forward pass and shared by all layers, since no layer's angles differ from another's.
    """

    cos: NamedArray
    sin: NamedArray


def rotary_table(
    positions: NamedArray, HeadDim: Axis, *, theta: float, scaling: RotaryScaling | None = None
) -> RotaryTable:
    """The angles by which each pair of coordinates turns, in the layout of Hugging Face's checkpoints.

    Coordinate i is paired with i + HeadDim/2, and the pair turns by its frequency in radians a position:
    `theta**(-2i/HeadDim)`, or what `scaling` makes of it.

    Args:
        positions: integer positions `[..., Pos]`; with a batch axis where documents are packed differently.
        HeadDim: the axis of one head's coordinates; its size must be even.
        theta: base of the wavelengths.
        scaling: how frequencies are changed for contexts longer than those trained on; None for not at all.

    Returns:
        Cosines and sines `[..., Pos, HeadDim]`, times the attention factor of `scaling`.

    Raises:
        ValueError: an odd `HeadDim`, positions that are not integers or have that axis, or `theta` of at most
            one.

    Cost: two float32 numbers a position and coordinate. Angles are products in float32, as in Hugging Face's
    transformers: a cosine is off by up to 1e-3 at position 65,535 and 3e-2 at a million.
    """
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions are integers; these are {positions.dtype}.")
    if HeadDim.name in {axis.name for axis in positions.axes}:
        raise ValueError(f"positions already have the axis {HeadDim.name!r} of a head's coordinates.")
    scaling = DefaultRotary() if scaling is None else scaling
    frequencies = scaling.frequencies(HeadDim.size, theta)
    cos, sin = _cos_and_sin(positions.array, frequencies.astype(np.float32), scaling.attention_factor_used)
    axes = (*positions.axes, HeadDim)
    return RotaryTable(hax.named(cos, axes), hax.named(sin, axes))


def apply_rotary(x: NamedArray, table: RotaryTable, HeadDim: Axis) -> NamedArray:
    """Turns the coordinate pairs of `x`, `[..., Pos, ..., HeadDim]`, by the table's angles.

    Computes in float32 and returns the axes and dtype of `x`.

    Args:
        x: queries or keys.
        table: of the same positions.
        HeadDim: the axis of one head's coordinates.

    Raises:
        ValueError: `x` lacks an axis of the table, or has it in another size.
    """
    lacking = [axis for axis in (*table.cos.axes, HeadDim) if axis not in x.axes]
    if lacking:
        shown = ", ".join(f"{axis.name}={axis.size}" for axis in x.axes)
        raise ValueError(
            f"x has {shown}; the rotary table asks for {lacking[0].name}={lacking[0].size}. Make the table "
            f"of the positions of x, with its HeadDim."
        )
    half = HeadDim.size // 2
    wide = x.astype(jnp.float32)
    first, second = wide[HeadDim, :half], wide[HeadDim, half:]
    turned = hax.concatenate(HeadDim, [-second, first])
    return (wide * table.cos + turned * table.sin).rearrange(x.axes).astype(x.dtype)


def _cos_and_sin(
    positions: Int[Array, "*position"], frequencies: Float[np.ndarray, " half"], factor: float
) -> tuple[Float[Array, "*position head_dim"], Float[Array, "*position head_dim"]]:
    angles = positions.astype(jnp.float32)[..., None] * jnp.expand_dims(frequencies, range(positions.ndim))
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor
