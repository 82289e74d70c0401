"""Rotary position embedding on named axes (Su et al. 2021, "RoFormer"), and scalings
for longer contexts.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import Float

from ._named import FLOATS, INTEGERS, check_named

Frequencies = Float[np.ndarray, " half"]


@dataclass(frozen=True)
class RotaryScaling(ABC):
    """How the frequencies of a rotary embedding are rescaled for longer contexts than
    those of training.

    Fields have the names of Hugging Face's `rope_scaling` (`rope_parameters` in its
    newer configs). Frequencies are computed in NumPy and float64, as constants of the
    program.
    """

    rope_type: ClassVar[str]  # in Hugging Face's configs

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_position_embeddings"):
            value = getattr(self, name, 1)
            if not isinstance(value, int | float) or not value >= 1:
                raise ValueError(
                    f"{self.rope_type}: {name} must be a number of at least 1, got"
                    f" {value!r}."
                )

    @abstractmethod
    def rescale(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """The rescaled frequencies, given `theta**(-2i/HeadDim)`."""

    @property
    def attention_factor_used(self) -> float:
        """Factor of cosines and sines; the scores of attention are multiplied by its
        square.
        """
        return 1.0

    def frequencies(self, head_dim: int, theta: float) -> Frequencies:
        """Radians per position for each of the `head_dim / 2` pairs.

        Raises:
            ValueError: `head_dim` is odd, or `theta` is at most one.
        """
        if head_dim < 2 or head_dim % 2:
            raise ValueError(
                "a rotary embedding needs an even number of coordinates; a head has"
                f" {head_dim}."
            )
        if not theta > 1:
            raise ValueError(
                f"theta, the base of the wavelengths, must be above 1; got {theta}."
            )
        return self.rescale(
            theta ** (np.arange(head_dim // 2) * (-2.0 / head_dim)), theta
        )


@dataclass(frozen=True)
class DefaultRotary(RotaryScaling):
    """The frequencies without rescaling (Su et al. 2021, "RoFormer")."""

    rope_type: ClassVar[str] = "default"

    def rescale(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """See `RotaryScaling`."""
        return frequencies


@dataclass(frozen=True)
class LinearRotary(RotaryScaling):
    """All frequencies divided by a factor: position interpolation (Chen et al.
    2023).
    """

    rope_type: ClassVar[str] = "linear"
    factor: float

    def rescale(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """See `RotaryScaling`."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Rotary(RotaryScaling):
    """Long wavelengths stretched, short ones unchanged, a ramp between ("The Llama 3
    Herd of Models", 2024).

    Wavelengths longer than the original context divided by `low_freq_factor` are
    stretched, those shorter than that divided by `high_freq_factor` are unchanged;
    there is no ramp where the two are equal.
    """

    rope_type: ClassVar[str] = "llama3"
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        low = self.low_freq_factor
        high = self.high_freq_factor
        if not 0 < low <= high:
            raise ValueError(
                f"llama3: low_freq_factor = {low} must be positive and at most"
                f" high_freq_factor = {high}."
            )

    def rescale(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """See `RotaryScaling`."""
        rotations = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        low = self.low_freq_factor
        high = self.high_freq_factor
        # Llama 4 has no ramp.
        kept = (rotations - low) / (high - low) if low < high else rotations > low
        return _blend(frequencies, self.factor, np.clip(kept, 0, 1))


@dataclass(frozen=True)
class YarnRotary(RotaryScaling):
    """YaRN (Peng et al. 2023): slow pairs interpolated, fast ones unchanged, and a ramp
    between.

    Attributes:
        attention_factor: of cosines and sines; None for `0.1 ln(factor) + 1`, the
            paper's.
        beta_fast: pairs with more rotations than this over the original context are
            unchanged.
        beta_slow: pairs with fewer rotations than this are interpolated.
        mscale: weight of `ln(factor)` in the attention factor's numerator; together
            with `mscale_all_dim`.
        mscale_all_dim: the same in its denominator.
        truncate: whether the ends of the ramp are rounded to whole pairs, outwards.
    """

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        slow = self.beta_slow
        fast = self.beta_fast
        if not 0 < slow <= fast:
            raise ValueError(
                f"yarn: beta_slow = {slow} must be positive and at most beta_fast ="
                f" {fast}."
            )
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(
                    f"yarn: {name} must be positive, got {value}; leave it out for the"
                    " default."
                )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(
                f"yarn: mscale = {self.mscale} and mscale_all_dim ="
                f" {self.mscale_all_dim} have an effect only together; give both or"
                " neither."
            )
        if self.attention_factor is not None and self.mscale is not None:
            raise ValueError(
                "yarn: attention_factor and mscale can't both be set; leave out one of"
                " them."
            )

    @property
    def attention_factor_used(self) -> float:
        """See `RotaryScaling`."""
        if self.attention_factor is not None:
            return self.attention_factor
        longer = 0.1 * math.log(self.factor)
        mscale, all_dim = (
            (1.0, 0.0)
            if self.mscale is None
            else (self.mscale, self.mscale_all_dim or 0.0)
        )
        return (longer * mscale + 1.0) / (longer * all_dim + 1.0)

    def rescale(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """See `RotaryScaling`."""
        pairs = len(frequencies)
        low = self._pair_with(self.beta_fast, pairs, theta)
        high = self._pair_with(self.beta_slow, pairs, theta)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        # Twice the pairs, as in the authors' code, which counts coordinates here
        low = max(low, 0)
        high = min(high, 2 * pairs - 1)
        if low == high:
            high += 0.001  # a step instead of a ramp, as in the authors' code
        ramp = (np.arange(pairs) - low) / (high - low)
        return _blend(frequencies, self.factor, 1 - np.clip(ramp, 0, 1))

    def _pair_with(self, rotations: float, pairs: int, theta: float) -> float:
        """The (fractional) pair with so many rotations over the original context."""
        length = self.original_max_position_embeddings
        # From `length / (2 pi theta**(pair / pairs)) = rotations`
        wavelengths = length / (rotations * 2 * math.pi)
        return pairs * math.log(wavelengths) / math.log(theta)


_SCALINGS: dict[str, type[RotaryScaling]] = {
    one.rope_type: one
    for one in (DefaultRotary, LinearRotary, Llama3Rotary, YarnRotary)
}


def rotary_from_hf(
    parameters: Mapping[str, Any] | None, *, max_position_embeddings: int
) -> RotaryScaling:
    """The scaling of a Hugging Face config.

    Args:
        parameters: `rope_scaling` of `config.json`, or `rope_parameters` of newer ones
            without its `rope_theta`; None for none. `rope_type` may have its older name
            `type`.
        max_position_embeddings: of the same config; the default of the original length.

    Raises:
        ValueError: a `rope_type` that is not supported, or an unknown or missing field;
            names it.
    """
    given = {
        name: value for name, value in (parameters or {}).items() if value is not None
    }
    rope_type = given.pop("rope_type", given.pop("type", "default"))
    if rope_type not in _SCALINGS:
        raise ValueError(
            f"rope_type {rope_type!r} is not supported. Those that are:"
            f" {', '.join(_SCALINGS)}."
        )
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            "partial_rotary_factor is not supported: all coordinates of a head are"
            " rotated."
        )
    fields = {field.name: field for field in dataclasses.fields(_SCALINGS[rope_type])}
    if "original_max_position_embeddings" in fields:
        given.setdefault("original_max_position_embeddings", max_position_embeddings)
    if rope_type == "yarn":
        given = _yarn_fields(given, max_position_embeddings)
    if unknown := sorted(given.keys() - fields):
        has = ", ".join(sorted(fields)) or "no fields"
        raise ValueError(
            f"rope_type {rope_type!r} has no {', '.join(unknown)}. It has: {has}."
        )
    required = {
        name for name, field in fields.items() if field.default is dataclasses.MISSING
    }
    if missing := sorted(required - given.keys()):
        raise ValueError(f"rope_type {rope_type!r} needs {', '.join(missing)}.")
    return _SCALINGS[rope_type](**given)


def rotary_to_hf(scaling: RotaryScaling | None) -> dict[str, Any] | None:
    """The `rope_scaling` of a Hugging Face config, without defaults; the inverse of
    `rotary_from_hf`.
    """
    if scaling is None:
        return None
    defaults = {field.name: field.default for field in dataclasses.fields(scaling)}
    given = {name: getattr(scaling, name) for name in defaults}
    found = {"rope_type": scaling.rope_type}
    for name, value in given.items():
        # A folder need not say what a reader takes for granted.
        if value != defaults[name]:
            found[name] = value
    return found


def _yarn_fields(
    fields: dict[str, Any], max_position_embeddings: int
) -> dict[str, Any]:
    """Drop the fields that transformers' YaRN ignores, and fill in the factor as it
    does.
    """
    # It replaces zeros by its defaults, and ignores one of the two scales alone.
    zeros = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    fields = {
        name: value for name, value in fields.items() if value or name not in zeros
    }
    if (
        "attention_factor" in fields
        or not {"mscale", "mscale_all_dim"} <= fields.keys()
    ):
        fields = {
            name: value
            for name, value in fields.items()
            if name not in ("mscale", "mscale_all_dim")
        }
    original = fields["original_max_position_embeddings"]
    return {"factor": max_position_embeddings / original, **fields}


def _blend(frequencies: Frequencies, factor: float, kept: Frequencies) -> Frequencies:
    """`frequencies` where `kept` is one, divided by `factor` where it is zero."""
    return frequencies * kept + frequencies / factor * (1 - kept)


class RotaryTable(eqx.Module):
    """Cosines and sines of the rotary angles of each pair of coordinates, in float32.

    `[..., Pos, HeadDim]` with half of the coordinates, times the attention factor of
    the scaling. Made once per forward pass and shared by all layers.
    """

    cos: NamedArray
    sin: NamedArray


def rotary_table(
    positions: NamedArray,
    HeadDim: Axis,
    *,
    theta: float,
    scaling: RotaryScaling | None = None,
) -> RotaryTable:
    """Cosines and sines of the rotary angles, in the layout of Hugging Face's
    checkpoints.

    Coordinates i and i + HeadDim/2 rotate by `theta**(-2i/HeadDim)`, rescaled, in
    radians per position.

    Args:
        positions: integer positions `[..., Pos]`; with a batch axis if sequences are
            packed differently.
        HeadDim: the axis of one head's coordinates; its size must be even.
        theta: base of the wavelengths.
        scaling: how frequencies are rescaled for longer contexts than those of
            training; None for not at all.

    Raises:
        ValueError: `HeadDim` is odd, positions are not integers or have that axis, or
            `theta` is at most one.

    Cost: a float32 number per position and coordinate. Angles are products in float32,
    as in Hugging Face's transformers: a cosine is off by up to 1e-3 at position 65,535
    and 3e-2 at a million.
    """
    check_named("positions", positions, INTEGERS, ())
    if HeadDim.name in {axis.name for axis in positions.axes}:
        raise ValueError(
            f"positions already have the axis {HeadDim.name!r} of a head's coordinates."
        )
    scaling = DefaultRotary() if scaling is None else scaling
    frequencies = scaling.frequencies(HeadDim.size, theta)
    Half = HeadDim.resize(HeadDim.size // 2)
    # Frequencies are computed in float64 and rounded once; angles are not.
    wide = positions.astype(jnp.float32).broadcast_to((*positions.axes, Half))
    angles = wide * hax.named(frequencies.astype(np.float32), Half)
    factor = scaling.attention_factor_used
    return RotaryTable(hax.cos(angles) * factor, hax.sin(angles) * factor)


def apply_rotary(x: NamedArray, table: RotaryTable, HeadDim: Axis) -> NamedArray:
    """Rotate the coordinate pairs of `x`, `[..., Pos, ..., HeadDim]`, by the table's
    angles.

    Computes in float32 and returns the axes and dtype of `x`.

    Raises:
        ValueError: `x` lacks an axis of the table, or has it with another size.
    """
    pairs = table.cos.resolve_axis(HeadDim.name)
    own = [axis for axis in table.cos.axes if axis != pairs]
    check_named("x", x, FLOATS, (*own, pairs.resize(2 * pairs.size), HeadDim))
    # A rotation in bfloat16 would change the length of heads.
    wide = x.astype(jnp.float32)
    # Hugging Face's order: coordinate i is paired with i + half, not with i + 1.
    first = wide[HeadDim, : pairs.size]
    second = wide[HeadDim, pairs.size :]
    rotated = [
        first * table.cos - second * table.sin,
        second * table.cos + first * table.sin,
    ]
    return hax.concatenate(HeadDim, rotated).rearrange(x.axes).astype(x.dtype)
