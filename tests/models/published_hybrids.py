"""The `config.json` of published decoders with gated delta nets, and their sizes."""

_COMMON = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}
_COMMON |= {
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": True,
}


def sizes(hidden, inner, layers, heads, kv_heads, vocab):
    return _COMMON | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


HYBRIDS: dict[str, tuple[dict, int]] = {}
NEXT = {"model_type": "qwen3_next", "hidden_act": "silu", "attention_bias": False}
NEXT |= {"decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256}
NEXT |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128}
NEXT |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
NEXT |= {"linear_value_head_dim": 128, "max_position_embeddings": 262_144}
NEXT |= {"mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True}
NEXT |= {"num_experts": 512, "num_experts_per_tok": 10, "partial_rotary_factor": 0.25}
NEXT |= {"output_router_logits": False, "router_aux_loss_coef": 0.001}
NEXT |= {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10_000_000}
NEXT |= {"shared_expert_intermediate_size": 512, "use_sliding_window": False}
HYBRIDS["Qwen3-Next 80B-A3B"] = (
    NEXT | {"tie_word_embeddings": False} | sizes(2048, 5120, 48, 16, 2, 151_936),
    79_674_391_296,
)
# The text decoder of a model that reads images too
QWEN3_5 = {"model_type": "qwen3_5_text", "hidden_act": "silu", "attention_bias": False}
QWEN3_5 |= {"attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256}
QWEN3_5 |= {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16}
QWEN3_5 |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128}
QWEN3_5 |= {"linear_num_key_heads": 16, "linear_num_value_heads": 48}
QWEN3_5 |= {"linear_value_head_dim": 128, "mamba_ssm_dtype": "float32"}
QWEN3_5 |= {"max_position_embeddings": 262_144, "mtp_num_hidden_layers": 1}
QWEN3_5 |= {"mtp_use_dedicated_embeddings": False, "rms_norm_eps": 1e-6}
QWEN3_5["rope_parameters"] = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10_000_000,
    "rope_type": "default",
}
AROUND = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
AROUND |= {"image_token_id": 248_056, "vision_config": {"depth": 27}}
HYBRIDS["Qwen3.5 27B"] = (
    AROUND | {"text_config": QWEN3_5 | sizes(5120, 17_408, 64, 24, 4, 248_320)},
    26_895_998_464,
)
MOE = {name: QWEN3_5[name] for name in QWEN3_5 if name != "layer_types"}
MOE |= {"model_type": "qwen3_5_moe_text", "linear_num_value_heads": 32}
MOE |= {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
MOE |= {"shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001}
MOE |= {name: size for name, size in sizes(2048, 0, 40, 16, 2, 248_320).items() if size}
HYBRIDS["Qwen3.5 35B-A3B"] = (
    AROUND | {"model_type": "qwen3_5_moe", "text_config": MOE},
    34_660_610_688,
)
OLMO_HYBRID = {"model_type": "olmo_hybrid", "hidden_act": "silu"}
OLMO_HYBRID |= {"attention_bias": False, "rms_norm_eps": 1e-6}
OLMO_HYBRID |= {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8}
OLMO_HYBRID |= {"linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4}
OLMO_HYBRID |= {"linear_key_head_dim": 96, "linear_value_head_dim": 192}
OLMO_HYBRID |= {"linear_num_key_heads": 30, "linear_num_value_heads": 30}
OLMO_HYBRID |= {"max_position_embeddings": 65_536, "tie_word_embeddings": False}
OLMO_HYBRID |= {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
HYBRIDS["OLMo Hybrid 7B"] = (
    OLMO_HYBRID | sizes(3840, 11_008, 32, 30, 30, 100_352),
    7_430_870_688,
)

# Sizes are under other names: those of the base, and those of the blocks.
LFM = {"model_type": "lfm2", "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048}
LFM |= {"block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12_288}
LFM |= {"block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0}
LFM |= {"block_multiple_of": 256, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0}
LFM |= {"block_use_swiglu": True, "block_use_xavier_init": True, "norm_eps": 1e-5}
LFM |= {"conv_dim_out": 2048, "conv_use_xavier_init": True, "use_pos_enc": True}
LFM |= {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_heads": 32, "pad_token_id": 0}
LFM |= {"max_position_embeddings": 128_000, "rope_theta": 1_000_000.0}
LFM_MOE = {name: LFM[name] for name in ("conv_L_cache", "conv_bias", "norm_eps")}
LFM_MOE |= {"model_type": "lfm2_moe", "max_position_embeddings": 128_000}
LFM_MOE |= {"moe_intermediate_size": 1792, "norm_topk_prob": True, "num_experts": 32}
LFM_MOE |= {"num_dense_layers": 2, "num_experts_per_tok": 4, "pad_token_id": 0}
LFM_MOE |= {"rope_theta": 1_000_000.0, "routed_scaling_factor": 1.0}
LFM_MOE |= {"use_expert_bias": True}
_ATTENDING = (2, 6, 10, 14, 18, 21)
LFM_MOE["layer_types"] = [
    "full_attention" if number in _ATTENDING else "conv" for number in range(24)
]
HYBRIDS["LFM2 8B-A1B"] = (
    LFM_MOE | sizes(2048, 7168, 24, 32, 8, 65_536),
    8_339_930_560,
)
HYBRIDS["LFM2 1.2B"] = (
    LFM | sizes(2048, 12_288, 16, 32, 8, 65_536),
    1_170_340_608,
)
KIMI_LINEAR = {"model_type": "kimi_linear", "hidden_act": "silu", "head_dim": 72}
KIMI_LINEAR |= {"first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None}
KIMI_LINEAR |= {"mla_use_nope": True, "model_max_length": 1_048_576}
KIMI_LINEAR |= {"moe_intermediate_size": 1024, "moe_layer_freq": 1}
KIMI_LINEAR |= {"moe_renormalize": True, "moe_router_activation_func": "sigmoid"}
KIMI_LINEAR |= {"num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8}
KIMI_LINEAR |= {"num_nextn_predict_layers": 0, "num_shared_experts": 1}
KIMI_LINEAR |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
KIMI_LINEAR |= {"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10_000.0}
KIMI_LINEAR |= {"routed_scaling_factor": 2.446, "tie_word_embeddings": False}
KIMI_LINEAR |= {"topk_group": 1, "use_grouped_topk": True, "pad_token_id": 163_839}
KIMI_LINEAR["linear_attn_config"] = {
    "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    "kda_layers": [n for n in range(1, 27) if n % 4],
    "head_dim": 128,
    "num_heads": 32,
    "short_conv_kernel_size": 4,
}
HYBRIDS["Kimi Linear 48B"] = (
    KIMI_LINEAR | sizes(2304, 9216, 27, 32, 32, 163_840),
    49_122_681_728,
)
