"""The text decoder of Gemma 3 (Gemma team 2025): a window in five layers of six, four
norms a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from models.decoder.config import DecoderConfig, LayerSpec
from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format


@dataclass(frozen=True)
class Gemma3Config(DecoderConfig):
    """A Gemma 3 decoder.

    Attributes:
        query_pre_attn_scalar: scores are divided by its square root.
        local_theta: the base of the wavelengths in layers with a window.
    """

    block: ClassVar[LayerSpec] = LayerSpec(
        qk_norm="per_head", norms="both", activation="gelu_tanh"
    )
    norm_offset: ClassVar[float] = 1.0

    tie_word_embeddings: bool = True
    query_pre_attn_scalar: int = 256
    local_theta: float = 10_000.0

    @property
    def embedding_scale(self) -> float:
        """The square root of the width."""
        return self.hidden_dim**0.5

    def layer(self, number: int) -> LayerSpec:
        """What one layer is."""
        spec = replace(super().layer(number), scale=self.query_pre_attn_scalar**-0.5)
        if spec.window is None:
            return spec
        return replace(
            spec, rotary=replace(self.rotary, theta=self.local_theta, scaling=None)
        )


def _every(given: hf.ConfigFields) -> Callable[[int], bool]:
    return hf.full_every(given("sliding_window_pattern", 6))(given)


FIELDS = {
    **hf.DECODER_FIELDS,
    "num_key_value_heads": hf.kv_heads(4),
    "head_dim": hf.attribute("attention.head_dim", 256, written="head_dim"),
    "hidden_act": hf.only("gelu_pytorch_tanh"),
    "hidden_activation": hf.only("gelu_pytorch_tanh", written=True),
    "rotary": hf.rope(
        theta=1_000_000.0, longest=131_072, by_kind=True, local="local_theta"
    ),
    "tie_word_embeddings": hf.attribute("tie_word_embeddings", True),
    "windows": hf.windows(4_096, _every),
    "query_pre_attn_scalar": hf.attribute("query_pre_attn_scalar", 256),
}
TENSORS = {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}

register_format(HfFormat("gemma3_text", Gemma3Config, FIELDS, TENSORS))
