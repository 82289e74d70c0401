"""The text decoders of Qwen3.5 (Qwen team 2026), dense and with experts: those of
Qwen3-Next with other tensors.
"""

from dataclasses import dataclass

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.parts.sections import MtpConfig
from models.qwen3_next import (
    FURTHER_TENSORS,
    MIXERS,
    SHARED_TENSORS,
    GatedHybridConfig,
    Qwen3NextConfig,
)


@dataclass(frozen=True)
class Qwen3_5Config(GatedHybridConfig):
    """A dense Qwen3.5 decoder, of layers of Qwen3-Next."""


@dataclass(frozen=True)
class Qwen3_5MoeConfig(Qwen3NextConfig):
    """A Qwen3.5 decoder with experts in every layer, of layers of Qwen3-Next."""

    all_sparse = True


OWN = MIXERS | {
    "mtp_num_hidden_layers": hf.Field("mtp.depths", 0, written="mtp.trained_depths"),
    "mtp_use_dedicated_embeddings": hf.Only(False),
    "attn_output_gate": hf.Only(True),
    "output_gate_type": hf.Only("swish"),
    # Sections of the frequencies for time, height and width, which of a text are equal
    "rope_theta": hf.Rotary(
        partial=0.25, without=("mrope_section", "mrope_interleaved")
    ),
    # The first is of states, which are float32 here.
    **hf.ignored("mamba_ssm_dtype", "mlp_only_layers"),
}
FIELDS = hf.with_defaults(hf.DENSE_SIZES, head_dim=256, num_key_value_heads=4) | OWN
MOE_FIELDS = hf.with_defaults(hf.SIZES, head_dim=256, num_key_value_heads=2) | OWN
MOE_FIELDS |= {
    "num_experts": hf.Field("experts.num_experts", 256),
    "num_experts_per_tok": hf.Field("experts.experts_per_token", 8),
    "moe_intermediate_size": hf.Field("experts.intermediate_dim", 512),
    "shared_expert_intermediate_size": hf.Field("shared_dim", 512),
    "router_aux_loss_coef": hf.LoadBalance(),
}

TENSORS = SHARED_TENSORS | {
    "linear_attention.q_proj": "in_proj_qkv",
    "linear_attention.k_proj": "in_proj_qkv",
    "linear_attention.v_proj": "in_proj_qkv",
    "linear_attention.gate_proj": "in_proj_z",
    "linear_attention.b_proj": "in_proj_b",
    "linear_attention.a_proj": "in_proj_a",
}

register_format(
    HfFormat(
        "qwen3_5_text",
        Qwen3_5Config,
        FIELDS,
        TENSORS,
        not_read=("mtp.", "model.visual."),
        further=FURTHER_TENSORS,
        probe={"mtp": MtpConfig(1, 1.0)},
        checksum=7.40966,
    )
)
register_format(
    HfFormat(
        "qwen3_5_moe_text",
        Qwen3_5MoeConfig,
        MOE_FIELDS,
        TENSORS,
        not_read=("mtp.", "model.visual."),
        further=FURTHER_TENSORS,
        probe={"mtp": MtpConfig(1, 1.0)},
        checksum=1.84082,
    )
)
