"""The `config.json` of Qwen3 and Qwen3 MoE in Hugging Face's format, read and written."""

from typing import Any

from models.hf_io.config_fields import ConfigFields, agreed
from models.hf_io.safetensors_folder import WeightsError
from models.qwen3_moe.config import Qwen3Config, Qwen3MoeConfig
from models.transformer.config import AttentionConfig, DecoderConfig, ExpertsConfig
from stacked_remat._messages import shown

_BUILT_IN = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}


def read_dense(fields: ConfigFields, shared: dict[str, Any]) -> Qwen3Config:
    """The config of a `qwen3`; see `HfFormat.read_config`."""
    return Qwen3Config(**shared, **_heads(fields, "qwen3", shared))


def read_sparse(fields: ConfigFields, shared: dict[str, Any]) -> Qwen3MoeConfig:
    """The config of a `qwen3_moe`; see `HfFormat.read_config`."""
    heads, experts = _heads(fields, "qwen3_moe", shared), _experts(fields, shared["num_layers"])
    return Qwen3MoeConfig(**shared, **heads, experts=experts)


def write_dense(config: Qwen3Config) -> dict[str, Any]:
    """The fields of a `qwen3`; see `HfFormat.write_config`."""
    windowed = _windowed(config)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **_window_fields(config, windowed),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
        "max_window_layers": windowed.index(True) if any(windowed) else config.num_layers,
    }


def write_sparse(config: Qwen3MoeConfig) -> dict[str, Any]:
    """The fields of a `qwen3_moe`; see `HfFormat.write_config`."""
    windowed, experts = _windowed(config), config.experts
    if any(windowed) and not all(windowed):
        raise WeightsError(
            "model.attention.windowed_layers: Hugging Face's Qwen3 MoE has a window in all layers or in "
            "none, so this decoder can't be written in its format."
        )
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        **_window_fields(config, windowed),
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.intermediate_dim,
        "norm_topk_prob": experts.norm_topk_prob,
        "router_aux_loss_coef": experts.load_balance_weight_used,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts.dense_layers),
    }


def _windowed(config: DecoderConfig) -> list[bool]:
    return [config.kind_of(layer).window is not None for layer in range(config.num_layers)]


def _window_fields(config: DecoderConfig, windowed: list[bool]) -> dict[str, Any]:
    window = config.attention.window if any(windowed) else None
    return {"use_sliding_window": window is not None, "sliding_window": window}


def _heads(fields: ConfigFields, model_type: str, shared: dict[str, Any]) -> dict[str, Any]:
    fields.check_built_in(_BUILT_IN)
    return {
        "num_kv_heads": _num_kv_heads(fields, model_type, shared["num_heads"]),
        "attention": _attention(fields, model_type, shared["num_layers"]),
    }


def _num_kv_heads(fields: ConfigFields, model_type: str, num_heads: int) -> int:
    """The default of transformers' `Qwen3Config` and `Qwen3MoeConfig` where the field is absent."""
    name = "num_key_value_heads"
    if name not in fields:
        return 32 if model_type == "qwen3" else 4
    return fields.size(name, num_heads if model_type == "qwen3" else ...)


def _attention(fields: ConfigFields, model_type: str, num_layers: int) -> AttentionConfig:
    window = fields.size("sliding_window", None if "sliding_window" in fields else 4096)
    if not fields.boolean("use_sliding_window", False):
        window = None
    # Of dense models; the others have windows in all layers or in none.
    first = fields.size("max_window_layers", 28, at_least=0)
    full = first if model_type == "qwen3" else 0
    windowed = fields.windowed_layers(
        ["sliding_attention" if window and i >= full else "full_attention" for i in range(num_layers)]
    )
    if windowed and window is None:
        raise ValueError(
            "layer_types has sliding_attention, but use_sliding_window and sliding_window don't."
        )
    if model_type == "qwen3_moe" and window is not None and len(windowed) < num_layers:
        raise ValueError(
            "layer_types has full_attention beside use_sliding_window; a qwen3_moe has a window in all "
            "layers or in none."
        )
    return AttentionConfig(
        head_dim=fields.size("head_dim", 128 if model_type == "qwen3" else None),
        bias=fields.boolean("attention_bias", False),
        window=window if windowed else None,
        windowed_layers=windowed if 0 < len(windowed) < num_layers else None,
    )


def _experts(fields: ConfigFields, num_layers: int) -> ExpertsConfig:
    step = fields.size("decoder_sparse_step", 1)  # the distance of sparse layers
    dense = set(fields.sequence("mlp_only_layers", int, []))
    if strange := sorted(layer for layer in dense if not 0 <= layer < num_layers):
        raise ValueError(f"mlp_only_layers names layer {shown(strange[0])}; there are 0 to {num_layers - 1}.")
    named, newer = (fields.size(name, None) for name in ("num_experts", "num_local_experts"))
    num_experts = agreed("num_experts", named, "num_local_experts", newer)
    if num_experts is None:
        raise ValueError("num_experts or num_local_experts is missing.")
    return ExpertsConfig(
        num_experts=num_experts,
        experts_per_token=fields.size("num_experts_per_tok"),
        intermediate_dim=fields.size("moe_intermediate_size"),
        norm_topk_prob=fields.boolean("norm_topk_prob", False),
        load_balance_weight=fields.load_balance_weight(),
        dense_layers=tuple(i for i in range(num_layers) if i in dense or (i + 1) % step),
    )
