"""Qwen2 and Qwen2.5 (Qwen team 2024): a Llama whose queries, keys and values have
biases.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from models.decoder.config import SLIDING, AttentionConfig, DecoderConfig, LayerSpec
from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format


@dataclass(frozen=True)
class Qwen2Config(DecoderConfig):
    """A Qwen2 decoder; `attention.bias` does not give the output projection one."""

    attention: AttentionConfig = field(
        default_factory=lambda: AttentionConfig(bias=True)
    )

    def layer(self, number: int) -> LayerSpec:
        """What one layer is."""
        return replace(super().layer(number), output_bias=False)


def _later_layers(given: hf.ConfigFields) -> Callable[[int], bool]:
    first = given("max_window_layers", 28)
    return lambda layer: layer >= first


def _first_with_a_window(config: DecoderConfig) -> dict[str, Any]:
    types = hf.layer_types(config)
    return {"max_window_layers": (*types, SLIDING).index(SLIDING)}


def _read_bias(given: hf.ConfigFields, found: hf.Found) -> None:
    given("attention_bias")
    found["attention.bias"] = True


WINDOWS = {
    "windows": hf.windows(4_096, _later_layers, "use_sliding_window"),
    "max_window_layers": hf.computed(lambda given, found: None, _first_with_a_window),
}
FIELDS = {
    **hf.DECODER_FIELDS,
    "num_key_value_heads": hf.kv_heads(32),
    "attention_bias": hf.computed(_read_bias),
    **WINDOWS,
}

register_format(HfFormat("qwen2", Qwen2Config, FIELDS))
