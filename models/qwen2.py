"""Qwen2 and Qwen2.5 (Qwen team 2024): a Llama whose queries, keys and values have biases."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from models.decoder.config import AttentionConfig, DecoderConfig, LayerSpec
from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format


@dataclass(frozen=True)
class Qwen2Config(DecoderConfig):
    """A Qwen2 decoder; `attention.bias` does not give the output projection one."""

    attention: AttentionConfig = field(default_factory=lambda: AttentionConfig(bias=True))

    def layer(self, number: int) -> LayerSpec:
        """What one layer is."""
        return replace(super().layer(number), output_bias=False)


def later_layers(
    given: hf.ConfigFields, window: int | None, num_layers: int
) -> tuple[int | None, Sequence[bool]]:
    """The layers from `max_window_layers` on have the window, if `use_sliding_window`."""
    window = window if given("use_sliding_window", False) else None
    first = given("max_window_layers", 28)
    return window, [window is not None and layer >= first for layer in range(num_layers)]


def window_fields(config: DecoderConfig) -> dict[str, Any]:
    """The fields of which `later_layers` reads some."""
    windowed = [spec.window is not None for spec in config.specs]
    return hf.layer_types(config) | {
        "use_sliding_window": any(windowed),
        "sliding_window": config.attention.window if any(windowed) else None,
        "max_window_layers": windowed.index(True) if any(windowed) else config.num_layers,
    }


def _read_bias(given: hf.ConfigFields, found: hf.Found) -> None:
    given("attention_bias")
    found["attention.bias"] = True


FIELDS = {
    **hf.DECODER_FIELDS,
    "num_key_value_heads": hf.attribute("num_kv_heads", 32),
    "attention_bias": hf.computed(_read_bias),
    "windows": hf.windows(4_096, later_layers, window_fields),
}

register_format(HfFormat("qwen2", Qwen2Config, FIELDS))
