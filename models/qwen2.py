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


class LaterWindows(hf.Entry):
    """Windows in the layers from one on."""

    def read(self, given: hf.ConfigFields, name: str, found: hf.Found) -> hf.Found:
        """The window, and the layers that have it."""
        first = given("max_window_layers", 28)
        is_on = given("use_sliding_window", False)
        layers = range(found["num_layers"])
        windowed = [layer >= first for layer in layers]
        return hf.read_windows(given, name, 4_096, len(layers), windowed, is_on)

    def write(self, config: DecoderConfig, name: str) -> dict[str, Any]:
        """The fields that say the same."""
        types = hf.layer_types(config)
        window = config.attention.window
        return {
            "layer_types": types,
            name: window,
            "use_sliding_window": window is not None,
            # The number of the first layer with a window, or of layers if none has one
            "max_window_layers": (*types, SLIDING).index(SLIDING),
        }


FIELDS = hf.with_defaults(hf.DENSE_SIZES, num_key_value_heads=32) | {
    # Qwen2Attention has these biases whatever a file says.
    "attention_bias": hf.Ignored({"attention.bias": True}),
    "rope_theta": hf.Rotary(),
    "sliding_window": LaterWindows(),
}

register_format(
    HfFormat(
        "qwen2",
        Qwen2Config,
        FIELDS,
        probe={"attention": ALTERNATING},
        checksum=0.35639,
    )
)
