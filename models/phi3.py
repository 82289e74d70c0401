"""Phi-3 and Phi-4 (Abdin et al. 2024): a Llama whose files have queries, keys and
values in one tensor.
"""

from dataclasses import dataclass

from models.decoder.config import DecoderConfig
from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format


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


FIELDS = {
    **hf.DECODER_FIELDS,
    "attention_bias": hf.only(False),
    "embd_pdrop": hf.only(0),
    "resid_pdrop": hf.only(0),
    "rotary": hf.rope(longest=4_096),
    "rms_norm_eps": hf.attribute("rms_norm_eps", 1e-5),
    "windows": hf.windows(None),
    # Transformers' default is beyond the embedding of a smaller vocabulary.
    "pad_token_id": hf.ignored(written=None),
}
TENSORS = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}

register_format(HfFormat("phi3", Phi3Config, FIELDS, TENSORS))
