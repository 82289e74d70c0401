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


FIELDS = hf.DENSE_SIZES | {"tie_word_embeddings": hf.Field("tie_word_embeddings", True)}


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    # Transformers has no use for it: which layers have windows goes by rotation.
    given.ignore("max_window_layers")
    found = hf.read_decoder(given, FIELDS, kv_heads=4)
    found |= hf.read_rotary(given, theta=2_000_000.0)
    layers = range(found["num_layers"])
    rotates = hf.read_rotated(given, layers)
    unrotated = [layer for layer in layers if not rotates[layer]]
    # Published models use none; where they do, only unrotated layers have one.
    is_on = given("use_sliding_window", False)
    found |= hf.read_windows(
        given, len(layers), None, lambda layer: layer in unrotated, is_on
    )
    return found | {"unrotated_layers": unrotated}


def to_hf(config: SmolLM3Config) -> dict[str, Any]:
    """Writes a `config.json`."""
    written = hf.write_decoder(config, FIELDS) | hf.write_rotary(config.rotary)
    window = config.attention.window
    rotates = [
        int(layer not in config.unrotated_layers) for layer in range(config.num_layers)
    ]
    return written | {
        "no_rope_layers": rotates,
        "layer_types": hf.layer_types(config),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        # Transformers' default is beyond the embedding of a smaller vocabulary.
        "pad_token_id": None,
    }


register_format(
    HfFormat(
        "smollm3",
        SmolLM3Config,
        from_hf,
        to_hf,
        FIELDS,
        probe={"unrotated_layers": (1,)},
        checksum=0.5363,
    )
)
