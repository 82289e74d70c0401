"""Hybrid decoders: layers with attention among layers with a mixer that keeps a
state.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from models.parts.config import DecoderConfig, LayerKind
from models.parts.sections import FULL, LINEAR


@dataclass(frozen=True)
class HybridDecoderConfig(DecoderConfig):
    """A decoder whose layers have attention or a linear mixer.

    Of an architecture with experts this is the first base, and `SparseDecoderConfig`
    the second.

    Attributes:
        linear_names: the names for remat policies in a linear mixer.
        linear_heads: the axis over which its heads, or its channels, are independent.
        layer_types: of each layer `linear_attention`, or `full_attention`; a shorter
            list repeats.
    """

    linear_names: ClassVar[tuple[str, ...]]
    linear_heads: ClassVar[str] = "key_heads"

    layer_types: tuple[Literal["linear_attention", "full_attention"], ...] = (
        LINEAR,
        LINEAR,
        LINEAR,
        FULL,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if {*self.layer_types} - {LINEAR, FULL} or not self.layer_types:
            raise ValueError(
                f"model.layer_types = {[*self.layer_types]} must have {LINEAR!r} or"
                f" {FULL!r} for each layer; a shorter list repeats."
            )
        if self.attention.window is not None or self.attention.layer_types is not None:
            raise ValueError(
                "Leave out model.attention.window and model.attention.layer_types:"
                " attention of a hybrid decoder sees all positions."
            )
        # The default repeats, and may be longer than a shallow decoder.
        types = self.layer_types
        default = HybridDecoderConfig.layer_types
        if len(types) > self.num_layers and types != default:
            raise ValueError(
                f"model.layer_types has {len(types)} entries for model.num_layers ="
                f" {self.num_layers}. Give at most one for each layer."
            )

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        """`layer_types` with an entry for each layer."""
        types = self.layer_types
        return tuple(types[number % len(types)] for number in range(self.num_layers))

    def kind_of(self, number: int) -> LayerKind:
        """The kind of a layer."""
        # Whether a layer has experts is the base's to say.
        kind = super().kind_of(number)
        return replace(kind, linear=self.types_of_layers[number] == LINEAR)

    def mixer_names(self, kind: LayerKind) -> tuple[str, ...]:
        """The names inside the mixer of a layer of this kind."""
        return self.linear_names if kind.linear else super().mixer_names(kind)

    @property
    def head_axes(self) -> tuple[str, ...]:
        """The axes of heads in the layers that there are."""
        axes = dict.fromkeys(
            self.linear_heads if kind == LINEAR else self.KVHeads.name
            for kind in self.types_of_layers
        )
        return tuple(axes)
