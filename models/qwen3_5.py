"""The text decoders of Qwen3.5 (Qwen team 2026), dense and with experts: those of
Qwen3-Next with other tensors.
"""

from dataclasses import dataclass
from typing import Any

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.parts.sections import MtpConfig
from models.qwen3_next import (
    FURTHER_TENSORS,
    HEAD_DIM,
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


FURTHER_TOKENS = {
    "mtp_num_hidden_layers": hf.Field("mtp.depths", 0, written="mtp.trained_depths")
}
FIELDS = hf.DENSE_SIZES | hf.LINEAR_SIZES | HEAD_DIM | FURTHER_TOKENS
MOE_FIELDS = hf.SIZES | hf.LINEAR_SIZES | HEAD_DIM | FURTHER_TOKENS
MOE_FIELDS |= {
    "num_experts": hf.Field("experts.num_experts", 256),
    "num_experts_per_tok": hf.Field("experts.experts_per_token", 8),
    "moe_intermediate_size": hf.Field("experts.intermediate_dim", 512),
    "shared_expert_intermediate_size": hf.Field("shared_dim", 512),
}


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a dense `config.json`; defaults are those of transformers."""
    return _from_hf(given, FIELDS, kv_heads=4)


def to_hf(config: Qwen3_5Config) -> dict[str, Any]:
    """Writes a dense `config.json`."""
    return _to_hf(config, FIELDS)


def moe_from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json` of experts; defaults are those of transformers."""
    return _from_hf(given, MOE_FIELDS, kv_heads=2) | hf.read_load_balance(given)


def moe_to_hf(config: Qwen3_5MoeConfig) -> dict[str, Any]:
    """Writes a `config.json` of experts."""
    return _to_hf(config, MOE_FIELDS) | hf.write_load_balance(config)


def _from_hf(given: hf.ConfigFields, fields: hf.Fields, kv_heads: int) -> hf.Found:
    given.only("attn_output_gate", True)
    given.only("output_gate_type", "swish")
    # Of states, which are float32 here
    given.ignore("mamba_ssm_dtype", "mlp_only_layers")
    given.only("mtp_use_dedicated_embeddings", False)
    # Sections of the frequencies for time, height and width, which of a text are equal
    without = ("mrope_section", "mrope_interleaved")
    found = hf.read_decoder(given, fields, kv_heads=kv_heads)
    found |= hf.read_rotary(given, partial=0.25, without=without)
    return found | hf.read_hybrid_layers(given, found["num_layers"])


def _to_hf(config: GatedHybridConfig, fields: hf.Fields) -> dict[str, Any]:
    written = hf.write_decoder(config, fields) | hf.write_rotary(config.rotary)
    written |= hf.write_hybrid_layers(config)
    return written | {"partial_rotary_factor": config.partial_rotary_factor}


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
        from_hf,
        to_hf,
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
        moe_from_hf,
        moe_to_hf,
        MOE_FIELDS,
        TENSORS,
        not_read=("mtp.", "model.visual."),
        further=FURTHER_TENSORS,
        probe={"mtp": MtpConfig(1, 1.0)},
        checksum=1.84082,
    )
)
