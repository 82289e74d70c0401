"""Registers gpt-oss among Hugging Face's formats."""

from models.gpt_oss.config import GptOssConfig
from models.gpt_oss.hf_config import DEFAULTS, read, write
from models.gpt_oss.peft import peft_names
from models.hf_io.formats import HfFormat, register_format
from models.hf_io.stacked_weights import FusedTensor

TENSOR_NAMES = {
    "embedding": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.norm",
    "head": "lm_head",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attention": "self_attn",
}
"""Hugging Face's names of the parts of a decoder, where they differ from the attribute's name."""

_FUSED_TENSORS = {
    "gate_proj.weight": FusedTensor("gate_up_proj", transposed=True, part=0, parts=2),
    "gate_proj.bias": FusedTensor("gate_up_proj_bias", part=0, parts=2),
    "up_proj.weight": FusedTensor("gate_up_proj", transposed=True, part=1, parts=2),
    "up_proj.bias": FusedTensor("gate_up_proj_bias", part=1, parts=2),
    "down_proj.weight": FusedTensor("down_proj", transposed=True),
    "down_proj.bias": FusedTensor("down_proj_bias"),
}

register_format(
    HfFormat(
        "gpt_oss",
        GptOssConfig,
        read,
        write,
        TENSOR_NAMES,
        peft_names,
        fused_tensors=_FUSED_TENSORS,
        defaults=DEFAULTS,
        quant_methods=("mxfp4",),
    )
)
