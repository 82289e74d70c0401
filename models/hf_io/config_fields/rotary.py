"""The fields of rotary embeddings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from models.hf_io.config_fields.entries import Entry
from models.hf_io.config_fields.given import ConfigFields, Found
from models.parts.config import DecoderConfig, PartialRotaryConfig
from models.parts.sections import FULL, SLIDING
from stacked_remat._messages import printable, shown
from stacked_remat.ops import DefaultRotary, RotaryScaling, rotary_from_hf, rotary_to_hf


@dataclass(frozen=True)
class Rotary(Entry):
    """The rotary embedding: `rope_theta`, and `rope_scaling` or `rope_parameters`.

    As in transformers, `rope_scaling` is taken whole where there are both, and a theta
    in it before that beside it.

    Attributes:
        theta, scaling, longest: the defaults of transformers.
        partial: that of `partial_rotary_factor`, which is an attribute; None where it
            has to be 1.
        width: a field with the number of rotated coordinates, which gives that default.
        without: fields of the section that change nothing here.
    """

    theta: float = 10_000.0
    scaling: Mapping[str, Any] = field(default_factory=dict)
    longest: int = 32_768
    partial: float | None = None
    width: str = ""
    without: Sequence[str] = ()

    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """Base, scaling, the longest context, and the part that is rotated."""
        length = given("max_position_embeddings", self.longest)
        original = given("original_max_position_embeddings")
        changed = given("rope_scaling", {})
        parameters = given("rope_parameters", {})
        # Whole: in transformers the two are not merged field by field.
        section = dict(changed or parameters or self.scaling)
        for unused in self.without:
            section.pop(unused, None)
        attributes = Found()
        if self.partial is not None:
            usual = self.partial
            width = given(self.width, kind=int) if self.width else None
            if width is not None:
                usual = width / found["attention.head_dim"]
            beside = given("partial_rotary_factor", usual)
            factor = section.pop("partial_rotary_factor", beside)
            attributes["partial_rotary_factor"] = float(factor)
        used = _scaling(section, length, original)
        base = given(name, self.theta)
        return attributes | {
            "rotary.theta": section.get(name, base),
            "rotary.scaling": used,
            "rotary.max_position_embeddings": length,
        }

    def write(self, config: DecoderConfig, name: str) -> dict[str, Any]:
        """The fields; that there is no scaling too, where transformers has one by
        default.
        """
        written = _rotary_fields(config, has_default=bool(self.scaling))
        if isinstance(config, PartialRotaryConfig):
            factor = config.partial_rotary_factor
            # Where files have none, and it is 1, none is written.
            if factor != 1 or self.partial != 1:
                written["partial_rotary_factor"] = factor
        return written


@dataclass(frozen=True)
class RotaryByKind(Entry):
    """As `Rotary`, where `rope_parameters` has a section for layers with a window and
    one for those without; only the latter may have a scaling.

    Attributes:
        theta, longest: the defaults of transformers.
        local_theta: the attribute that is the theta of layers with a window; empty
            where it is that of the others.
    """

    theta: float
    longest: int
    local_theta: str = ""

    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """Bases, scaling, and the longest context."""
        length = given("max_position_embeddings", self.longest)
        given.ignore("original_max_position_embeddings")
        changed = given("rope_scaling", {})
        sections = given("rope_parameters", {})
        whole = {**(sections.get(FULL) or {}), **changed}
        # Windows are shorter than the original context: nothing is stretched there.
        of_windows = sections.get(SLIDING) or {}
        scaling = _scaling(whole, length)
        is_alike = not _scaling(of_windows, length) and not sections.keys() - {
            FULL,
            SLIDING,
        }
        base = given(name, self.theta)
        attributes = {
            "rotary.theta": whole.get(name, base),
            "rotary.scaling": scaling,
            "rotary.max_position_embeddings": length,
        }
        other = of_windows.get(name, base)
        # Beside the sections before transformers 5, and in one since
        if self.local_theta:
            local_base = given("rope_local_base_freq", 10_000.0)
            attributes[self.local_theta] = of_windows.get(name, local_base)
        elif other != attributes["rotary.theta"]:
            is_alike = False
        if not is_alike:
            same = "" if self.local_theta else " and with the same theta"
            raise ValueError(
                f"rope_parameters is {shown(sections)}; only full_attention, and"
                f" sliding_attention without a scaling{same}, are supported."
            )
        return attributes

    def write(self, config: DecoderConfig, name: str) -> dict[str, Any]:
        """The fields, and the two sections."""
        whole = rotary_to_hf(config.rotary.scaling or DefaultRotary()) or {}
        written = _rotary_fields(config)
        local = config.rotary.theta
        if self.local_theta:
            local = getattr(config, self.local_theta)
            written["rope_local_base_freq"] = local
        written["rope_parameters"] = {
            FULL: whole | {name: config.rotary.theta},
            SLIDING: {"rope_type": "default", name: local},
        }
        return written


def _rotary_fields(
    config: DecoderConfig, *, has_default: bool = False
) -> dict[str, Any]:
    """Those of the rotary embedding of all layers.

    `has_default` if transformers has a scaling by default: none has to be written too.
    """
    rotary = config.rotary
    used = rotary.scaling or (DefaultRotary() if has_default else None)
    return {
        "rope_theta": rotary.theta,
        "max_position_embeddings": rotary.max_position_embeddings,
        "rope_scaling": rotary_to_hf(used),
    }


def _scaling(
    section: Mapping[str, Any], longest: int, original: int | None = None
) -> RotaryScaling | None:
    """The scaling of `rope_parameters` or `rope_scaling`; `original` is a length beside
    them.
    """
    kind = section.get("rope_type", section.get("type", "default"))
    fields = {
        name: value
        for name, value in section.items()
        if name not in ("rope_theta", "finetuned")
    }
    # Phi-3 has it beside the section; these two kinds do not use it.
    if original is not None and kind not in ("default", "linear"):
        fields["original_max_position_embeddings"] = original
    try:
        scaling = rotary_from_hf(fields, max_position_embeddings=longest)
    except ValueError as error:
        raise ValueError(
            f"rope_scaling is {shown(fields)}: {printable(str(error))}"
        ) from error
    return None if isinstance(scaling, DefaultRotary) else scaling
