"""Qwen2 and Qwen2.5 (Qwen team 2024): a Llama whose queries, keys and values have
biases.
"""

from dataclasses import dataclass, field
from typing import Any

from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import ALTERNATING, HfFormat, register_format
from models.llama import LlamaLayer
from models.parts.config import DecoderConfig, LayerKind
from models.parts.sections import SLIDING, AttentionConfig


@dataclass(frozen=True)
class Qwen2Config(DecoderConfig):
    """A Qwen2 decoder; `attention.bias` does not give the output projection one."""

    attention: AttentionConfig = field(
        default_factory=lambda: AttentionConfig(bias=True)
    )

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> LlamaLayer:
        """Makes a layer of a Llama."""
        return LlamaLayer.init(
            self, kind, rotary=self.rotary, output_bias=False, key=key
        )


FIELDS = hf.without(hf.DENSE_SIZES, "attention_bias")


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    # Qwen2Attention has these biases whatever a file says.
    given.ignore("attention_bias")
    found = hf.read_decoder(given, FIELDS, kv_heads=32) | hf.read_rotary(given)
    found |= read_later_windows(given, found["num_layers"])
    return found | {"attention.bias": True}


def to_hf(config: Qwen2Config) -> dict[str, Any]:
    """Writes a `config.json`."""
    written = hf.write_decoder(config, FIELDS) | hf.write_rotary(config.rotary)
    return written | write_later_windows(config)


def read_later_windows(given: hf.ConfigFields, num_layers: int) -> hf.Found:
    """Windows in the layers from one on."""
    first = given("max_window_layers", 28)
    is_on = given("use_sliding_window", False)
    return hf.read_windows(
        given, num_layers, 4_096, lambda layer: layer >= first, is_on
    )


def write_later_windows(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `read_later_windows`."""
    types, window = hf.layer_types(config), config.attention.window
    return {
        "layer_types": types,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        # The number of the first layer with a window, or of layers if none has one
        "max_window_layers": (*types, SLIDING).index(SLIDING),
    }


register_format(
    HfFormat(
        "qwen2",
        Qwen2Config,
        from_hf,
        to_hf,
        FIELDS,
        probe={"attention": ALTERNATING},
        checksum=0.35639,
    )
)
