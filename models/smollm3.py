"""SmolLM3 (Bakouch et al. 2025): a Llama whose every fourth layer rotates nothing."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.llama import LlamaLayer
from models.parts.config import DecoderConfig, LayerKind, check_layer_numbers


@dataclass(frozen=True)
class SmolLM3Kind(LayerKind):
    """A kind of layer.

    Attributes:
        rotates: whether the layer has a rotary embedding.
    """

    rotates: bool = True


@dataclass(frozen=True)
class SmolLM3Config(DecoderConfig):
    """A SmolLM3 decoder.

    Attributes:
        unrotated_layers: numbers of the layers without a rotary embedding.
    """

    tie_word_embeddings: bool = True
    unrotated_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        unrotated = self.unrotated_layers
        check_layer_numbers("model.unrotated_layers", unrotated, self.num_layers)

    def kind_of(self, number: int) -> SmolLM3Kind:
        """The kind of a layer."""
        rotates = number not in self.unrotated_layers
        return SmolLM3Kind(super().kind_of(number).window, rotates=rotates)

    def init_layer(self, kind: SmolLM3Kind, *, key: PRNGKeyArray) -> LlamaLayer:
        """Makes a layer of a Llama."""
        rotary = self.rotary if kind.rotates else None
        return LlamaLayer.init(self, kind, rotary=rotary, key=key)


class UnrotatedLayers(hf.Entry):
    """The layers without a rotary embedding; where there are windows, these alone have
    one.
    """

    def read(self, given: hf.ConfigFields, name: str, found: hf.Found) -> hf.Found:
        """The layers, and their window."""
        layers = range(found["num_layers"])
        rotates = hf.read_rotated(given, layers)
        unrotated = [layer for layer in layers if not rotates[layer]]
        # Published models have none.
        windowed = [not is_on for is_on in rotates]
        is_on = given("use_sliding_window", False)
        windows = hf.read_windows(
            given, "sliding_window", None, len(layers), windowed, is_on
        )
        return windows | {"unrotated_layers": unrotated}

    def write(self, config: SmolLM3Config, name: str) -> dict[str, Any]:
        """A number for each layer, and windows."""
        unrotated = config.unrotated_layers
        window = config.attention.window
        layers = range(config.num_layers)
        return {
            name: [int(layer not in unrotated) for layer in layers],
            "layer_types": hf.layer_types(config),
            "sliding_window": window,
            "use_sliding_window": window is not None,
        }


FIELDS = hf.with_defaults(
    hf.DENSE_SIZES, tie_word_embeddings=True, num_key_value_heads=4
) | {
    "rope_theta": hf.Rotary(theta=2_000_000.0),
    "no_rope_layers": UnrotatedLayers(),
    # Transformers has no use for it: which layers have windows goes by rotation.
    "max_window_layers": hf.Ignored(),
    "pad_token_id": hf.NoPadding(),
}

register_format(
    HfFormat(
        "smollm3",
        SmolLM3Config,
        FIELDS,
        probe={"unrotated_layers": (1,)},
        checksum=0.5363,
    )
)
