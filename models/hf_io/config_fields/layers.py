"""The fields that say in what layers differ."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from models.hf_io.config_fields.entries import Entry
from models.hf_io.config_fields.given import ConfigFields, Found
from models.parts.config import DecoderConfig, SparseDecoderConfig
from models.parts.hybrid import HybridDecoderConfig
from models.parts.sections import FULL, LINEAR, SLIDING
from stacked_remat._messages import shown


@dataclass(frozen=True)
class Windows(Entry):
    """The layers with a window: `sliding_window` and `layer_types`.

    Attributes:
        default: the window where the field is absent.
        period: every so many layers, the last of them has no window by default; None
            where layers are alike, and transformers ignores `layer_types`, so that
            others are refused.
        period_name: a field of older files, with the period; empty for none.
        switch: a field that turns windows on; empty for none.
    """

    default: int | None
    period: int | None = None
    period_name: str = ""
    switch: str = ""

    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """The window, and which layers have it."""
        # From 1 on, so that the last of each period is divided by it
        num_layers = found["num_layers"]
        period = self.period
        windowed = None
        if self.period_name:
            period = given(self.period_name, period)
        if period is not None:
            windowed = [number % period != 0 for number in range(1, num_layers + 1)]
        is_on = given(self.switch, False) if self.switch else True
        return read_windows(given, name, self.default, num_layers, windowed, is_on)

    def write(self, config: DecoderConfig, name: str) -> dict[str, Any]:
        """The window, also where it is null, and the layers, where they may differ."""
        window = config.attention.window
        switch = {self.switch: window is not None} if self.switch else {}
        if self.period is None:
            return {name: window} | switch
        # Some models of transformers need a number
        return {"layer_types": layer_types(config), name: window or 4096} | switch


def read_windows(
    given: ConfigFields,
    name: str,
    default: int | None,
    num_layers: int,
    windowed: Sequence[bool] | None,
    is_on: bool = True,
) -> Found:
    """The layers with a window: the field of this name, whose default is this, and
    `layer_types`.

    Args:
        windowed: which layers have it by default; None if all have, and others are
            refused.
        is_on: whether any has one by default.
    """
    window = given(name, default, null=None)
    expected = [True] * num_layers if windowed is None else windowed
    if window is None or not is_on:
        # Files may have a window beside `use_sliding_window: false`, which counts.
        window = None
        expected = [False] * num_layers
    usual = [SLIDING if is_windowed else FULL for is_windowed in expected]
    if windowed is None:
        given.only("layer_types", usual)
    # Absent in files of older versions, which had other fields for it
    kinds = given("layer_types", usual)
    check_length("layer_types", kinds, num_layers)
    window = window if SLIDING in kinds else None
    all_alike = {*kinds} == {FULL if window is None else SLIDING}
    return {
        "attention.window": window,
        "attention.layer_types": None if all_alike else kinds,
    }


def layer_types(config: DecoderConfig) -> list[str]:
    """What each layer sees."""
    return [FULL if kind.window is None else SLIDING for kind in config.layer_kinds]


def check_names(name: str, kinds: Sequence[Any], known: Collection[str]) -> None:
    """Raises ValueError for a kind of layer, in the field `name`, that is not known."""
    for kind in kinds:
        if kind not in known:
            supported = " and ".join(known)
            raise ValueError(
                f"{name} has {shown(kind)}; only {supported} are supported."
            )


def check_length(name: str, kinds: Sequence[str], num_layers: int) -> None:
    """Raises ValueError for a field `name` without an entry for each layer."""
    if len(kinds) != num_layers:  # a shorter list would be repeated
        raise ValueError(f"{name} has {len(kinds)} entries for {num_layers} layers.")


@dataclass(frozen=True)
class HybridLayers(Entry):
    """The mixer of each layer of a hybrid decoder: `layer_types`.

    Attributes:
        linear, full: what the file calls the two.
        period: every so many layers, the last of them has attention by default.
        period_name: a field with the period; empty for none.
    """

    linear: str = LINEAR
    full: str = FULL
    period: int = 4
    period_name: str = "full_attention_interval"

    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """The mixers."""
        period = self.period
        numbers = range(1, found["num_layers"] + 1)
        if self.period_name:
            period = given.at_least(1, self.period_name, period)
        usual = [self.linear if number % period else self.full for number in numbers]
        return self.read_kinds(given(name, usual), found)

    def read_kinds(self, kinds: Sequence[str], found: Found) -> Found:
        """The mixers that have these names."""
        check_length("layer_types", kinds, found["num_layers"])
        known = {self.linear: LINEAR, self.full: FULL}
        check_names("layer_types", kinds, known)
        return {"layer_types": [known[kind] for kind in kinds]}

    def write(self, config: HybridDecoderConfig, name: str) -> dict[str, Any]:
        """The names."""
        names = {LINEAR: self.linear, FULL: self.full}
        return {name: [names[kind] for kind in config.types_of_layers]}


@dataclass(frozen=True)
class DensePrefix(Entry):
    """How many of the first layers have an MLP; `default` where it is not said."""

    default: int

    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """The layers."""
        first = given.at_least(0, name, self.default)
        return {"experts.dense_layers": [*range(min(first, found["num_layers"]))]}

    def write(self, config: SparseDecoderConfig, name: str) -> dict[str, Any]:
        """Their number."""
        return {name: len(config.experts.dense_layers)}


def read_rotated(given: ConfigFields, layers: Sequence[int]) -> list[int]:
    """1 for each layer with a rotary embedding, and 0 for others, `no_rope_layers`
    despite its name; by default every so many have none.
    """
    interval = given("no_rope_layer_interval", 4)
    usual = [int((layer + 1) % interval != 0) for layer in layers]
    rotates = given("no_rope_layers", []) or usual
    if len(rotates) < len(layers):
        raise ValueError(
            f"no_rope_layers has {len(rotates)} entries for {len(layers)} layers. Give"
            " one for each layer."
        )
    return rotates[: len(layers)]
