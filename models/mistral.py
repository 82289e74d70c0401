"""Mistral (Jiang et al. 2023): a Llama with a window in all layers or in none."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.llama import LlamaLayer
from models.parts.config import DecoderConfig, LayerKind
from models.parts.sections import AttentionConfig


@dataclass(frozen=True)
class MistralConfig(DecoderConfig):
    """A Mistral decoder."""

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> LlamaLayer:
        """Makes a layer of a Llama."""
        return LlamaLayer.init(self, kind, rotary=self.rotary, key=key)


# MistralAttention has no biases, and no field for them.
FIELDS = hf.without(hf.DENSE_SIZES, "attention_bias")


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    given.only("attention_bias", False)
    found = hf.read_decoder(given, FIELDS, kv_heads=8)
    found |= hf.read_rotary(given, longest=131_072)
    return found | hf.read_windows(given, found["num_layers"], 4_096)


def to_hf(config: MistralConfig) -> dict[str, Any]:
    """Writes a `config.json`."""
    written = hf.write_decoder(config, FIELDS) | hf.write_rotary(config.rotary)
    # Also where it is null: the default of transformers is a window.
    return written | {"sliding_window": config.attention.window}


register_format(
    HfFormat(
        "mistral",
        MistralConfig,
        from_hf,
        to_hf,
        FIELDS,
        probe={"attention": AttentionConfig(window=3)},
        checksum=-1.2135,
    )
)
