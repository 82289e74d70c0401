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
        linear, full: what files call the two; the first name is written.
        period: where no field says it, every so many layers, the last of them has
            attention; 0 if none has, None if a field must say it.
        period_name: a field with the period; empty for none.
        older_name: a name of `layer_types` in older files; empty for none.
    """

    linear: Sequence[str] = (LINEAR,)
    full: Sequence[str] = (FULL,)
    period: int | None = 4
    period_name: str = ""
    older_name: str = ""

    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """The mixers."""
        usual = self._usual(given, found)
        if self.older_name:
            usual = given(self.older_name, usual, kind=list)
        kinds = given(name, usual, kind=list)
        if kinds is None:
            raise ValueError(f"{name} is missing.")
        check_length(name, kinds, found["num_layers"])
        known = dict.fromkeys(self.linear, LINEAR) | dict.fromkeys(self.full, FULL)
        check_names(name, kinds, known)
        return {"layer_types": [known[kind] for kind in kinds]}

    def write(self, config: HybridDecoderConfig, name: str) -> dict[str, Any]:
        """The names."""
        return {name: self._names(config.types_of_layers)}

    def _usual(self, given: ConfigFields, found: Found) -> list[str] | None:
        """The names where the field is absent; None if there is no default."""
        period = self.period
        if period is not None and self.period_name:
            period = given.at_least(1, self.period_name, period)
        if "layer_types" in found:  # of an entry before this one
            return self._names(found["layer_types"])
        if period is None:
            return None
        numbers = range(1, found["num_layers"] + 1)
        full = numbers[period - 1 :: period] if period else ()
        types = [FULL if number in full else LINEAR for number in numbers]
        return self._names(types)

    def _names(self, types: Sequence[str]) -> list[str]:
        return [self.full[0] if kind == FULL else self.linear[0] for kind in types]


@dataclass(frozen=True)
class LayerNumbers(Entry):
    """The numbers of the layers with attention, in files that need not have the field
    of `HybridLayers`, which comes after this entry.

    Attributes:
        first: the number of the first layer.
        others_name: a field with the numbers of the others; empty for none.
    """

    first: int = 0
    others_name: str = ""

    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """The mixers; nothing where the field is absent."""
        layers = range(self.first, self.first + found["num_layers"])
        full = read_numbers(given, name, layers)
        if full is None:
            return {}
        if self.others_name:
            others = read_numbers(given, self.others_name, layers) or []
            if sorted([*full, *others]) != [*layers]:
                raise ValueError(
                    f"{name} {shown(full)} and {self.others_name} {shown(others)} must"
                    f" have each layer of {layers.start} to {layers.stop - 1} once."
                )
        kinds = [FULL if number in full else LINEAR for number in layers]
        return {"layer_types": kinds}

    def write(self, config: HybridDecoderConfig, name: str) -> dict[str, Any]:
        """The numbers."""
        types = [*enumerate(config.types_of_layers, self.first)]
        written = {name: [number for number, kind in types if kind == FULL]}
        if self.others_name:
            others = [number for number, kind in types if kind == LINEAR]
            written[self.others_name] = others
        return written


def read_numbers(given: ConfigFields, name: str, layers: range) -> list[int] | None:
    """The field `name`, which has numbers of some of the layers; None where it is
    absent.

    Raises ValueError for a number that no layer has.
    """
    numbers = given(name, kind=list)
    for number in numbers or []:
        if number not in layers:
            raise ValueError(
                f"{name} names layer {shown(number)}; there are {layers.start} to"
                f" {layers.stop - 1}."
            )
    return numbers


@dataclass(frozen=True)
class DensePrefix(Entry):
    """How many of the first layers have an MLP, and the others experts.

    Attributes:
        default: where it is not said.
        types_name: a field that says of each layer `dense` or `sparse`, where the
            number can't; empty for none.
    """

    default: int
    types_name: str = ""

    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """The layers."""
        num_layers = found["num_layers"]
        first = given.at_least(0, name, self.default)
        dense = [*range(min(first, num_layers))]
        if self.types_name and (types := given(self.types_name, [])):
            check_length(self.types_name, types, num_layers)
            check_names(self.types_name, types, ("dense", "sparse"))
            dense = [layer for layer in range(num_layers) if types[layer] == "dense"]
        return {"experts.dense_layers": dense}

    def write(self, config: SparseDecoderConfig, name: str) -> dict[str, Any]:
        """Their number, and the kinds of layers that it can't say."""
        dense = config.experts.dense_layers
        written: dict[str, Any] = {name: len(dense)}
        if self.types_name and [*dense] != [*range(len(dense))]:
            kinds = config.layer_kinds
            types = ["sparse" if kind.sparse else "dense" for kind in kinds]
            written[self.types_name] = types
        return written


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
