"""OLMo 3 (Ai2 2025): norms of what layers add to the residual stream, and over all
heads.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from models.decoder.config import DecoderConfig, LayerSpec
from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format


@dataclass(frozen=True)
class Olmo3Config(DecoderConfig):
    """An OLMo 3 decoder; the scaling of rotary frequencies is of layers without a
    window alone.
    """

    block: ClassVar[LayerSpec] = LayerSpec(qk_norm="all_heads", norms="after")

    def layer(self, number: int) -> LayerSpec:
        """What one layer is."""
        spec = super().layer(number)
        return (
            spec
            if spec.window is None
            else replace(spec, rotary=replace(self.rotary, scaling=None))
        )


FIELDS = {
    **hf.DECODER_FIELDS,
    "rotary": hf.rope(theta=500_000.0, longest=2_048, by_kind=True),
    "rms_norm_eps": hf.attribute("rms_norm_eps", 1e-5),
    "windows": hf.windows(4_096, hf.full_every(4)),
}
TENSORS = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}

register_format(HfFormat("olmo3", Olmo3Config, FIELDS, TENSORS))
