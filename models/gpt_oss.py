"""gpt-oss (OpenAI 2025): windows in every second layer, sinks, and experts with a
clamped SwiGLU in all.
"""

from dataclasses import dataclass
from typing import ClassVar

from models.decoder.config import LayerSpec, SparseDecoderConfig
from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.hf_io.stacked_weights import ExpertsTensor


@dataclass(frozen=True)
class GptOssConfig(SparseDecoderConfig):
    """A gpt-oss decoder: attention with sinks, and experts with biases and a clamped
    SwiGLU in every layer.

    In the published models every second layer, from the first on, has a window of 128
    positions, and attention has biases.
    """

    block: ClassVar[LayerSpec] = LayerSpec(sinks=True, mlp_bias=True, swiglu_limit=7.0)
    all_sparse = True


_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4_096,
    "truncate": False,
}

FIELDS = {
    **hf.DECODER_FIELDS,
    "intermediate_size": hf.attribute("experts.intermediate_dim"),
    "num_key_value_heads": hf.kv_heads(8),
    "head_dim": hf.attribute("attention.head_dim", 64, written="head_dim"),
    "attention_bias": hf.attribute("attention.bias", True),
    "rotary": hf.rope(theta=150_000.0, scaling=_YARN, longest=131_072),
    # Transformers ignores these: `rope_scaling` has its own length.
    "initial_context_length": hf.ignored(),
    "experts_per_token": hf.ignored(),
    "rms_norm_eps": hf.attribute("rms_norm_eps", 1e-5),
    "windows": hf.windows(128, hf.full_every(2)),
    "num_local_experts": hf.attribute(
        "experts.num_experts", 128, aliases=("num_experts",)
    ),
    "num_experts_per_tok": hf.attribute("experts.experts_per_token", 4),
    "load_balance": hf.LOAD_BALANCE,
    "swiglu_alpha": hf.only(1.702, written=True),
    "swiglu_limit": hf.only(7.0, written=True),
}
_GATE_UP = ExpertsTensor("gate_up_proj", transposed=True, interleaved=True)
_GATE_UP_BIAS = ExpertsTensor("gate_up_proj_bias", interleaved=True)
TENSORS = {
    "gate_proj.weight": _GATE_UP,
    "gate_proj.bias": _GATE_UP_BIAS,
    "up_proj.weight": _GATE_UP,
    "up_proj.bias": _GATE_UP_BIAS,
    "down_proj.weight": ExpertsTensor("down_proj", transposed=True),
    "down_proj.bias": ExpertsTensor("down_proj_bias"),
}

register_format(
    HfFormat("gpt_oss", GptOssConfig, FIELDS, TENSORS, quant_methods=("mxfp4",))
)
