"""Frequencies of rotary embeddings: the default, and rescalings for longer contexts.

Fields have the names of Hugging Face's `rope_scaling` (`rope_parameters` in its newer configs). Frequencies
are computed in NumPy and float64, as constants of the program.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

Frequencies = Float[np.ndarray, " half"]


@dataclass(frozen=True)
class RotaryScaling(ABC):
    """How the frequencies of a rotary embedding are rescaled.

    Attributes:
        rope_type: its name in Hugging Face's configs.
    """

    rope_type: ClassVar[str]

    @abstractmethod
    def rescale(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """The rescaled frequencies, given `theta**(-2i/HeadDim)`."""

    @property
    def attention_factor_used(self) -> float:
        """Factor of cosines and sines; the scores of attention are multiplied by its square."""
        return 1.0

    def frequencies(self, head_dim: int, theta: float) -> Frequencies:
        """Radians per position for each of the `head_dim / 2` pairs.

        Raises:
            ValueError: `head_dim` is odd, or `theta` is at most one.
        """
        if head_dim < 2 or head_dim % 2:
            raise ValueError(
                f"a rotary embedding needs an even number of coordinates; a head has {head_dim}."
            )
        if not theta > 1:
            raise ValueError(f"theta, the base of the wavelengths, must be above 1; got {theta}.")
        return self.rescale(theta ** (np.arange(head_dim // 2) * (-2.0 / head_dim)), theta)


@dataclass(frozen=True)
class DefaultRotary(RotaryScaling):
    """The frequencies without rescaling (Su et al. 2021, "RoFormer")."""

    rope_type: ClassVar[str] = "default"

    def rescale(self, frequencies: Frequencies, theta: float) -> Frequencies:
        return frequencies


@dataclass(frozen=True)
class LinearRotary(RotaryScaling):
    """All frequencies divided by a factor: position interpolation (Chen et al. 2023).

    Attributes:
        factor: how many times longer the context becomes.
    """

    rope_type: ClassVar[str] = "linear"
    factor: float

    def __post_init__(self) -> None:
        _require_at_least_one("linear", factor=self.factor)

    def rescale(self, frequencies: Frequencies, theta: float) -> Frequencies:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Rotary(RotaryScaling):
    """Long wavelengths stretched, short ones unchanged, a ramp between ("The Llama 3 Herd of Models", 2024).

    Attributes:
        factor: how many times longer the context becomes.
        original_max_position_embeddings: the context length of training.
        low_freq_factor: wavelengths longer than the original context divided by this are stretched.
        high_freq_factor: wavelengths shorter than the original context divided by this are unchanged.
    """

    rope_type: ClassVar[str] = "llama3"
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float

    def __post_init__(self) -> None:
        length = self.original_max_position_embeddings
        _require_at_least_one("llama3", factor=self.factor, original_max_position_embeddings=length)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"llama3: low_freq_factor = {self.low_freq_factor} must be positive and below "
                f"high_freq_factor = {self.high_freq_factor}."
            )

    def rescale(self, frequencies: Frequencies, theta: float) -> Frequencies:
        rotations = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _blend(frequencies, self.factor, np.clip(kept, 0, 1))


@dataclass(frozen=True)
class YarnRotary(RotaryScaling):
    """YaRN (Peng et al. 2023): slow pairs interpolated, fast ones unchanged, and a ramp between.

    Attributes:
        factor: how many times longer the context becomes.
        original_max_position_embeddings: the context length of training.
        attention_factor: of cosines and sines; None for `0.1 ln(factor) + 1`, the paper's.
        beta_fast: pairs with more rotations than this over the original context are unchanged.
        beta_slow: pairs with fewer rotations than this are interpolated.
        mscale: weight of `ln(factor)` in the attention factor's numerator; together with `mscale_all_dim`.
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
        length = self.original_max_position_embeddings
        _require_at_least_one("yarn", factor=self.factor, original_max_position_embeddings=length)
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"yarn: beta_slow = {self.beta_slow} must be positive and at most "
                f"beta_fast = {self.beta_fast}."
            )
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"yarn: {name} must be positive, got {value}; leave it out for the default.")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(
                f"yarn: mscale = {self.mscale} and mscale_all_dim = {self.mscale_all_dim} have an effect "
                "only together; give both or neither."
            )
        if self.attention_factor is not None and self.mscale is not None:
            raise ValueError(
                "yarn: attention_factor and mscale can't both be set: attention_factor overrides it."
            )

    @property
    def attention_factor_used(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    def rescale(self, frequencies: Frequencies, theta: float) -> Frequencies:
        head_dim = 2 * len(frequencies)
        low, high = (
            self._pair_with_rotations(times, head_dim, theta) for times in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # a step instead of a ramp, as in the authors' code
        return _blend(
            frequencies, self.factor, 1 - np.clip((np.arange(len(frequencies)) - low) / (high - low), 0, 1)
        )

    def _pair_with_rotations(self, times: float, head_dim: int, theta: float) -> float:
        """The (fractional) pair with that many rotations over the original context."""
        length = self.original_max_position_embeddings
        return head_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))


_SCALINGS: dict[str, type[RotaryScaling]] = {
    one.rope_type: one for one in (DefaultRotary, LinearRotary, Llama3Rotary, YarnRotary)
}


def rotary_from_hf(parameters: Mapping[str, Any] | None, *, max_position_embeddings: int) -> RotaryScaling:
    """The scaling of a Hugging Face config.

    Args:
        parameters: `rope_scaling` of `config.json`, or `rope_parameters` of newer ones without its
            `rope_theta`; None for none. `rope_type` may have its older name `type`.
        max_position_embeddings: of the same config; the default of the original length.

    Raises:
        ValueError: a `rope_type` that is not supported, or an unknown or missing field; names it.
    """
    fields = {name: value for name, value in (parameters or {}).items() if value is not None}
    legacy = fields.pop("type", "default")
    rope_type = fields.pop("rope_type", legacy)
    if rope_type not in _SCALINGS:
        raise ValueError(f"rope_type {rope_type!r} is not supported. Those that are: {', '.join(_SCALINGS)}.")
    if fields.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported: all coordinates of a head are rotated.")
    chosen = _SCALINGS[rope_type]
    known = {field.name for field in dataclasses.fields(chosen)}
    if "original_max_position_embeddings" in known:
        fields.setdefault("original_max_position_embeddings", max_position_embeddings)
    if rope_type == "yarn":
        fields = _yarn_fields(fields, max_position_embeddings)
    if unknown := sorted(fields.keys() - known):
        has = ", ".join(sorted(known)) or "no fields"
        raise ValueError(f"rope_type {rope_type!r} has no {', '.join(unknown)}. It has: {has}.")
    required = {field.name for field in dataclasses.fields(chosen) if field.default is dataclasses.MISSING}
    if missing := sorted(required - fields.keys()):
        raise ValueError(f"rope_type {rope_type!r} needs {', '.join(missing)}.")
    return chosen(**fields)


def rotary_to_hf(scaling: RotaryScaling | None) -> dict[str, Any] | None:
    """The `rope_scaling` of a Hugging Face config, without defaults; the inverse of `rotary_from_hf`."""
    if scaling is None:
        return None
    fields = {
        field.name: (getattr(scaling, field.name), field.default) for field in dataclasses.fields(scaling)
    }
    given = {name: value for name, (value, default) in fields.items() if value != default}
    return {"rope_type": scaling.rope_type, **given}


def _yarn_fields(fields: dict[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """Drop the fields that transformers' YaRN ignores, and fill in the factor as it does."""
    # It replaces zeros by its defaults, and ignores one of the two scales alone.
    zeros = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    fields = {name: value for name, value in fields.items() if value or name not in zeros}
    if "attention_factor" in fields or not {"mscale", "mscale_all_dim"} <= fields.keys():
        fields = {name: value for name, value in fields.items() if name not in ("mscale", "mscale_all_dim")}
    original = fields["original_max_position_embeddings"]
    return {"factor": max_position_embeddings / original, **fields}


def _blend(frequencies: Frequencies, factor: float, kept: Frequencies) -> Frequencies:
    """`frequencies` where `kept` is one, divided by `factor` where it is zero."""
    return frequencies * kept + frequencies / factor * (1 - kept)


def _require_at_least_one(what: str, **values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not value >= 1:
            raise ValueError(f"{what}: {name} must be a number of at least 1, got {value!r}.")
