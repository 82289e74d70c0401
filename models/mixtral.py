"""Mixtral (Jiang et al. 2024): a Mistral with experts in every layer."""

from dataclasses import dataclass

from models.decoder.config import SparseDecoderConfig
from models.hf_io.config_fields import (
    DECODER_FIELDS,
    LOAD_BALANCE,
    attribute,
    only,
    rope,
    window_of_all,
)
from models.hf_io.formats import DECODER_TENSORS, HfFormat, register_format


@dataclass(frozen=True)
class MixtralConfig(SparseDecoderConfig):
    """A Mixtral decoder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_all_sparse()


FIELDS = {
    **DECODER_FIELDS,
    "intermediate_size": attribute("experts.intermediate_dim"),
    "num_key_value_heads": attribute("num_kv_heads", 8),
    "attention_bias": only(False),
    "rotary": rope(theta=1_000_000.0, longest=131_072),
    "rms_norm_eps": attribute("rms_norm_eps", 1e-5),
    "windows": window_of_all(None),
    "num_local_experts": attribute("experts.num_experts", 8, aliases=("num_experts",)),
    "num_experts_per_tok": attribute("experts.experts_per_token", 2),
    "load_balance": LOAD_BALANCE,
}
TENSORS = {
    **DECODER_TENSORS,
    "mlp": "block_sparse_moe",
    "router": "gate",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}

register_format(
    HfFormat(
        "mixtral",
        "MixtralForCausalLM",
        MixtralConfig,
        FIELDS,
        TENSORS,
        loaded={"block_sparse_moe": "mlp"},
    )
)
