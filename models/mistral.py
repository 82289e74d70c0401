"""Mistral (Jiang et al. 2023): a Llama with a window in all layers or in none."""

from dataclasses import dataclass

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


FIELDS = hf.with_defaults(hf.DENSE_SIZES, num_key_value_heads=8) | {
    # MistralAttention has no biases.
    "attention_bias": hf.Only(False),
    "rope_theta": hf.Rotary(longest=131_072),
    "sliding_window": hf.Windows(4_096),
}

register_format(
    HfFormat(
        "mistral",
        MistralConfig,
        FIELDS,
        probe={"attention": AttentionConfig(window=3)},
        checksum=-1.2135,
    )
)
