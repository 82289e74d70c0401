"""Phi-3 and Phi-4 (Abdin et al. 2024): a Llama whose files have queries, keys and
values in one tensor.
"""

from dataclasses import dataclass

from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.llama import LlamaLayer
from models.parts.config import DecoderConfig, LayerKind
from models.parts.sections import AttentionConfig


@dataclass(frozen=True)
class Phi3Config(DecoderConfig):
    """A Phi-3 decoder, with a window in all layers or in none, and without a scaling of
    rotary frequencies.

    The scaling of its long models, `longrope`, is not supported: which of its two sets
    of frequencies is used depends on the length of the text.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary.scaling is not None:
            raise ValueError(
                f"model.rotary.scaling is {self.rotary.scaling.rope_type}: Phi-3 has no"
                " scaling but longrope, which is not supported. Leave it out, or use a"
                " model without one, such as Phi-3-mini-4k-instruct or phi-4."
            )

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> LlamaLayer:
        """Makes a layer of a Llama."""
        return LlamaLayer.init(self, kind, rotary=self.rotary, key=key)


FIELDS = hf.with_defaults(hf.DENSE_SIZES, rms_norm_eps=1e-5) | {
    "attention_bias": hf.Only(False),
    # Dropouts, which layers here do not have
    "embd_pdrop": hf.Only(0),
    "resid_pdrop": hf.Only(0),
    "rope_theta": hf.Rotary(longest=4_096),
    "sliding_window": hf.Windows(None),
    "pad_token_id": hf.NoPadding(),
}
# Phi3Attention and Phi3MLP have their first projections in one tensor, in this order.
TENSORS = {
    "attention.q_proj": "qkv_proj",
    "attention.k_proj": "qkv_proj",
    "attention.v_proj": "qkv_proj",
    "mlp.gate_proj": "gate_up_proj",
    "mlp.up_proj": "gate_up_proj",
}

register_format(
    HfFormat(
        "phi3",
        Phi3Config,
        FIELDS,
        TENSORS,
        probe={"attention": AttentionConfig(window=3)},
        checksum=-1.2135,
    )
)
