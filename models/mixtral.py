"""Mixtral (Jiang et al. 2024): a Mistral with experts in every layer."""

from dataclasses import dataclass

from models.decoder.config import SparseDecoderConfig
from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format


@dataclass(frozen=True)
class MixtralConfig(SparseDecoderConfig):
    """A Mixtral decoder."""

    all_sparse = True


FIELDS = {
    **hf.DECODER_FIELDS,
    "intermediate_size": hf.attribute("experts.intermediate_dim"),
    "num_key_value_heads": hf.kv_heads(8),
    "attention_bias": hf.only(False),
    "rotary": hf.rope(theta=1_000_000.0, longest=131_072),
    "rms_norm_eps": hf.attribute("rms_norm_eps", 1e-5),
    "windows": hf.windows(None),
    "num_local_experts": hf.attribute(
        "experts.num_experts", 8, aliases=("num_experts",)
    ),
    "num_experts_per_tok": hf.attribute("experts.experts_per_token", 2),
    "load_balance": hf.LOAD_BALANCE,
}
TENSORS = {
    "mlp": "block_sparse_moe",
    "router": "gate",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}

register_format(
    HfFormat(
        "mixtral", MixtralConfig, FIELDS, TENSORS, loaded={"block_sparse_moe": "mlp"}
    ),
)
