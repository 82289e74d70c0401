"""The `config.json` of gpt-oss in Hugging Face's format, read and written."""

from typing import Any

from models.gpt_oss.config import GptOssConfig
from models.hf_io.config_fields import ConfigFields, agreed
from models.transformer.config import AttentionConfig, ExpertsConfig
from stacked_remat.ops import DefaultRotary, rotary_to_hf

DEFAULTS = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4_096,
        "truncate": False,
    },
}
"""Those of transformers' `GptOssConfig`."""
_WINDOW = 128  # also theirs

_BUILT_IN = {"swiglu_alpha": 1.702, "swiglu_limit": GptOssConfig.swiglu_limit}


def read(fields: ConfigFields, shared: dict[str, Any]) -> GptOssConfig:
    """The config of a `gpt_oss`; see `HfFormat.read_config`."""
    fields.check_built_in(_BUILT_IN)
    fields("initial_context_length", None)  # transformers ignores it: `rope_scaling` has its own
    own = {name: value for name, value in shared.items() if name != "mlp_dim"}
    return GptOssConfig(
        **own,
        num_kv_heads=fields.size("num_key_value_heads", 8),
        attention=_attention(fields, shared["num_layers"]),
        experts=_experts(fields, intermediate_dim=shared["mlp_dim"]),
    )


def write(config: GptOssConfig) -> dict[str, Any]:
    """The fields of a `gpt_oss`; see `HfFormat.write_config`."""
    experts = config.experts
    windows = [config.kind_of(layer).window for layer in range(config.num_layers)]
    return {
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": experts.intermediate_dim,
        # Without it, transformers takes the scaling of the published models.
        "rope_scaling": rotary_to_hf(config.rotary.scaling or DefaultRotary()),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        # A number even if no layer has the window: transformers makes its mask.
        "sliding_window": config.attention.window or _WINDOW,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "router_aux_loss_coef": experts.load_balance_weight_used,
        **_BUILT_IN,
    }


def _attention(fields: ConfigFields, num_layers: int) -> AttentionConfig:
    window = fields.size("sliding_window", None if "sliding_window" in fields else _WINDOW)
    usual = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    windowed = fields.windowed_layers(usual)
    if windowed and window is None:
        raise ValueError("layer_types has sliding_attention, but sliding_window is null.")
    return AttentionConfig(
        head_dim=fields.size("head_dim", 64),
        bias=fields.boolean("attention_bias", True),
        window=window if windowed else None,
        windowed_layers=windowed if 0 < len(windowed) < num_layers else None,
    )


def _experts(fields: ConfigFields, intermediate_dim: int) -> ExpertsConfig:
    named, older = (fields.size(name, None) for name in ("num_local_experts", "num_experts"))
    num_experts = agreed("num_local_experts", named, "num_experts", older)
    chosen, other = (fields.size(name, None) for name in ("num_experts_per_tok", "experts_per_token"))
    experts_per_token = agreed("num_experts_per_tok", chosen, "experts_per_token", other)
    return ExpertsConfig(
        num_experts=128 if num_experts is None else num_experts,
        experts_per_token=4 if experts_per_token is None else experts_per_token,
        intermediate_dim=intermediate_dim,
        load_balance_weight=fields.load_balance_weight(),
    )
