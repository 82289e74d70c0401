"""Phi-3 and Phi-4 (Abdin et al. 2024): a Llama whose files have queries, keys and
values in one tensor.
"""

from dataclasses import dataclass
from typing import Any

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


FIELDS = hf.without(hf.DENSE_SIZES, "attention_bias") | {
    "rms_norm_eps": hf.Field("rms_norm_eps", 1e-5)
}


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    given.only("attention_bias", False)
    given.only("embd_pdrop", 0)
    given.only("resid_pdrop", 0)
    given.ignore("pad_token_id")
    found = hf.read_decoder(given, FIELDS) | hf.read_rotary(given, longest=4_096)
    return found | hf.read_windows(given, found["num_layers"], None)


def to_hf(config: Phi3Config) -> dict[str, Any]:
    """Writes a `config.json`."""
    written = hf.write_decoder(config, FIELDS) | hf.write_rotary(config.rotary)
    # Transformers' default is beyond the embedding of a smaller vocabulary.
    return written | {"sliding_window": config.attention.window, "pad_token_id": None}


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
        from_hf,
        to_hf,
        FIELDS,
        TENSORS,
        probe={"attention": AttentionConfig(window=3)},
        checksum=-1.2135,
    )
)
