"""The `config.json` of published models is read without a warning, and gives the
published size.
"""

import dataclasses
import json

import equinox as eqx
import jax
import pytest
from haliax import Axis

import models.architectures as architectures
from models.hf_io.formats import config_from_hf, config_to_hf, differing_fields
from models.hf_io.safetensors_folder import WeightsError
from models.parts.decoder import Decoder
from models.parts.sections import LINEAR, AttentionConfig, LinearAttentionConfig

from .published_hybrids import HYBRIDS, sizes

assert architectures  # registers them

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_type": "llama3",
}
LLAMA3 |= {"original_max_position_embeddings": 8192}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
LLAMA |= {
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": LLAMA3,
}
LLAMA |= {"max_position_embeddings": 131_072}
PUBLISHED = {
    "Llama 3.1 8B": (
        LLAMA | {"tie_word_embeddings": False} | sizes(4096, 14336, 32, 32, 8, 128_256),
        8_030_261_248,
    ),
    "Qwen2.5 7B": (
        {
            "model_type": "qwen2",
            "hidden_act": "silu",
            "max_position_embeddings": 131_072,
            "use_mrope": False,
        }
        | {
            "max_window_layers": 28,
            "sliding_window": 131_072,
            "use_sliding_window": False,
        }
        | {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False}
        | sizes(3584, 18944, 28, 28, 4, 152_064),
        7_615_616_512,
    ),
    "Mistral 7B v0.3": (
        {
            "model_type": "mistral",
            "hidden_act": "silu",
            "max_position_embeddings": 32_768,
        }
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "tie_word_embeddings": False,
        }
        | sizes(4096, 14336, 32, 32, 8, 32_768),
        7_248_023_552,
    ),
    "Mixtral 8x7B": (
        {
            "model_type": "mixtral",
            "hidden_act": "silu",
            "max_position_embeddings": 32_768,
        }
        | {
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "output_router_logits": False,
        }
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
        }
        | {"tie_word_embeddings": False}
        | sizes(4096, 14336, 32, 32, 8, 32_000),
        46_702_792_704,
    ),
    "Gemma 3 1B": (
        {
            "model_type": "gemma3_text",
            "attention_bias": False,
            "attn_logit_softcapping": None,
        }
        | {
            "cache_implementation": "hybrid",
            "final_logit_softcapping": None,
            "head_dim": 256,
        }
        | {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32_768}
        | {
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10_000,
        }
        | {
            "rope_scaling": None,
            "rope_theta": 1_000_000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        }
        | sizes(1152, 6912, 26, 4, 1, 262_144),
        999_885_952,
    ),
    "OLMo 3 7B": (
        {
            "model_type": "olmo3",
            "attention_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
        }
        | {
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
            "sliding_window": 4096,
        }
        | {
            "max_position_embeddings": 65_536,
            "rope_theta": 500_000,
            "tie_word_embeddings": False,
        }
        | {
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            }
        }
        | sizes(4096, 11008, 32, 32, 32, 100_278),
        7_298_011_136,
    ),
}
PHI = {
    "model_type": "phi3",
    "hidden_act": "silu",
    "attention_bias": False,
    "embd_pdrop": 0.0,
}
PHI |= {
    "resid_pdrop": 0.0,
    "pad_token_id": 32_000,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
}
PHI |= {"tie_word_embeddings": False}
PUBLISHED["Phi-4"] = (
    PHI
    | {"max_position_embeddings": 16_384, "original_max_position_embeddings": 16_384}
    | {"pad_token_id": 100_349, "rope_theta": 250_000, "sliding_window": None}
    | sizes(5120, 17_920, 40, 40, 10, 100_352),
    14_659_507_200,
)
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "attention_bias": False,
    "ep_size": 1,
}
DEEPSEEK |= {
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "v_head_dim": 128,
}
DEEPSEEK |= {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163_840,
}
DEEPSEEK |= {
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
}
DEEPSEEK |= {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
DEEPSEEK |= {
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
}
DEEPSEEK |= {"topk_method": "noaux_tc", "rms_norm_eps": 1e-6, "rope_theta": 10_000}
DEEPSEEK |= {"tie_word_embeddings": False, "num_nextn_predict_layers": 1}
DEEPSEEK["rope_scaling"] = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK["rope_scaling"] |= {
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
PUBLISHED["DeepSeek V3"] = (
    DEEPSEEK | sizes(7168, 18432, 61, 128, 128, 129_280),
    671_026_419_200,
)
KIMI = {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "n_group": 1,
}
KIMI |= {"topk_group": 1, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0}
KIMI |= {"aux_loss_alpha": 0.001, "seq_aux": True, "rope_theta": 50_000.0}
KIMI["rope_scaling"] = DEEPSEEK["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0}
PUBLISHED["Kimi K2"] = (
    DEEPSEEK | KIMI | sizes(7168, 18432, 61, 64, 64, 163_840),
    1_026_408_232_448,
)
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "attention_bias": True,
    "head_dim": 64,
}
GPT_OSS |= {
    "experts_per_token": 4,
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "swiglu_limit": 7.0,
}
GPT_OSS |= {
    "initial_context_length": 4096,
    "max_position_embeddings": 131_072,
    "rope_theta": 150_000,
}
GPT_OSS |= {
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
}
GPT_OSS |= {
    "output_router_logits": False,
    "router_aux_loss_coef": 0.9,
    "rms_norm_eps": 1e-5,
}
GPT_OSS |= {"tie_word_embeddings": False, "pad_token_id": 199_999}
GPT_OSS["quantization_config"] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.mlp.router"],
}
GPT_OSS["rope_scaling"] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
GPT_OSS["rope_scaling"] |= {"original_max_position_embeddings": 4096, "truncate": False}
PUBLISHED["gpt-oss 20b"] = (
    GPT_OSS | sizes(2880, 2880, 24, 64, 8, 201_088),
    20_914_757_184,
)
PUBLISHED["OLMo 3 7B"][0]["rope_scaling"] |= {"rope_type": "yarn", "factor": 8.0}
PUBLISHED["OLMo 3 7B"][0]["rope_scaling"] |= {"original_max_position_embeddings": 8192}

SMOLLM = {"model_type": "smollm3", "hidden_act": "silu", "rms_norm_eps": 1e-6}
SMOLLM |= {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 2}
SMOLLM |= {"max_position_embeddings": 65_536, "max_window_layers": 28}
SMOLLM |= {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9}
SMOLLM |= {"layer_types": ["full_attention"] * 36, "rope_theta": 5_000_000.0}
SMOLLM |= {"sliding_window": None, "use_sliding_window": False, "rope_scaling": None}
PUBLISHED["SmolLM3 3B"] = (
    SMOLLM | sizes(2048, 11_008, 36, 16, 4, 128_256),
    3_075_098_624,
)
GRANITE = {"model_type": "granite", "hidden_act": "silu", "rms_norm_eps": 1e-5}
GRANITE |= {"attention_bias": False, "mlp_bias": False, "logits_scaling": 16.0}
GRANITE |= {"embedding_multiplier": 12.0, "attention_multiplier": 0.0078125}
GRANITE |= {"residual_multiplier": 0.22, "rope_theta": 10_000_000.0}
GRANITE |= {"max_position_embeddings": 131_072, "rope_scaling": None}
PUBLISHED["Granite 3.1 8B"] = (
    GRANITE | {"tie_word_embeddings": True} | sizes(4096, 12_800, 40, 32, 8, 49_152),
    8_170_835_968,
)
COHERE = {"model_type": "cohere2", "hidden_act": "silu", "layer_norm_eps": 1e-5}
COHERE |= {"attention_bias": False, "cache_implementation": "hybrid", "head_dim": 128}
COHERE |= {"layer_switch": 4, "logit_scale": 0.25, "rope_theta": 50_000}
COHERE |= {"order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0}
COHERE |= {"position_embedding_type": "rope_gptj", "rope_scaling": None}
COHERE |= {"sliding_window": 4096, "sliding_window_pattern": 4}
COHERE |= {"max_position_embeddings": 8192, "use_embedding_sharing": True}
COHERE |= {"use_gated_activation": True, "use_parallel_block": True}
COHERE |= {"use_parallel_embedding": False, "use_qk_norm": False}
PUBLISHED["Command R7B"] = (
    COHERE | sizes(4096, 14_336, 32, 32, 8, 256_000),
    8_028_033_024,
)
GEMMA2 = {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "head_dim": 256}
GEMMA2 |= {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
GEMMA2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA2 |= {"cache_implementation": "hybrid", "max_position_embeddings": 8192}
GEMMA2 |= {"query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
PUBLISHED["Gemma 2 2B"] = (
    GEMMA2 | {"sliding_window": 4096} | sizes(2304, 9216, 26, 8, 4, 256_000),
    2_614_341_888,
)
GLM = {"model_type": "glm4_moe", "hidden_act": "silu", "attention_bias": True}
GLM |= {"head_dim": 128, "first_k_dense_replace": 1, "n_routed_experts": 128}
GLM |= {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
GLM |= {"num_experts_per_tok": 8, "moe_intermediate_size": 1408, "use_qk_norm": False}
GLM |= {"num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5}
GLM |= {"routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5, "rope_scaling": None}
GLM |= {"max_position_embeddings": 131_072, "rope_theta": 1_000_000}
PUBLISHED["GLM-4.5-Air"] = (
    GLM | {"tie_word_embeddings": False} | sizes(4096, 10_944, 46, 96, 8, 151_552),
    106_852_251_264,
)
LLAMA4 = {"model_type": "llama4_text", "hidden_act": "silu", "attention_bias": False}
LLAMA4 |= {"attention_chunk_size": 8192, "attn_scale": 0.1, "floor_scale": 8192}
LLAMA4 |= {"attn_temperature_tuning": 4, "cache_implementation": "hybrid"}
LLAMA4 |= {"for_llm_compressor": False, "head_dim": 128, "no_rope_layers": []}
LLAMA4 |= {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 16_384}
LLAMA4 |= {"max_position_embeddings": 10_485_760, "num_experts_per_tok": 1}
LLAMA4 |= {"num_local_experts": 16, "output_router_logits": False, "rope_theta": 5e5}
LLAMA4 |= {"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0}
LLAMA4 |= {"use_qk_norm": True, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
LLAMA4["rope_scaling"] = LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0}
PUBLISHED["Llama 4 Scout"] = (
    LLAMA4 | sizes(5120, 8192, 48, 40, 8, 202_048),
    107_769_861_120,
)
MINIMAX = {"model_type": "minimax_m2", "hidden_act": "silu", "head_dim": 128}
MINIMAX |= {"max_position_embeddings": 196_608, "rope_theta": 5_000_000}
MINIMAX |= {"rotary_dim": 64, "rms_norm_eps": 1e-6, "scoring_func": "sigmoid"}
MINIMAX |= {"num_experts_per_tok": 8, "num_local_experts": 256, "use_qk_norm": True}
MINIMAX |= {"qk_norm_type": "per_layer", "use_routing_bias": True, "use_mtp": True}
MINIMAX |= {"num_mtp_modules": 3, "mtp_transformer_layers": 1}
MINIMAX |= {"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0}
MINIMAX["quantization_config"] = {"quant_method": "fp8"}
PUBLISHED["MiniMax-M2"] = (
    MINIMAX | {"tie_word_embeddings": False} | sizes(3072, 1536, 62, 48, 8, 200_064),
    228_689_764_864,
)
GRANITE_4 = GRANITE | {"model_type": "granitemoehybrid", "init_method": "mup"}
GRANITE_4 |= {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4}
GRANITE_4 |= {"logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": True}
GRANITE_4 |= {"mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128}
GRANITE_4 |= {"mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48}
GRANITE_4 |= {"mamba_proj_bias": False, "normalization_function": "rmsnorm"}
GRANITE_4 |= {"num_experts_per_tok": 6, "num_local_experts": 64, "rope_theta": 10_000}
GRANITE_4 |= {"output_router_logits": False, "position_embedding_type": "nope"}
GRANITE_4 |= {"router_aux_loss_coef": 0.0001, "shared_intermediate_size": 1024}
GRANITE_4 |= {"tie_word_embeddings": True}
PUBLISHED["Granite 4 H Tiny"] = (
    GRANITE_4 | sizes(1536, 512, 40, 12, 4, 100_352),
    6_939_037_248,
)
PUBLISHED["Granite 4 H Micro"] = (
    GRANITE_4
    | {"mamba_n_heads": 64, "num_local_experts": 0, "num_experts_per_tok": 0}
    | {"shared_intermediate_size": 8192, "logits_scaling": 8}
    | sizes(2048, 8192, 40, 32, 8, 100_352),
    3_191_396_096,
)
PUBLISHED |= HYBRIDS


def num_weights(config, rows):
    shapes = eqx.filter_eval_shape(
        Decoder.init, config, Axis("vocab", rows), key=jax.random.key(0)
    )
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_read_and_written(name):
    document, expected = PUBLISHED[name]
    config, vocab_size = config_from_hf(document)
    assert num_weights(config, vocab_size) == expected
    written = json.loads(json.dumps(config_to_hf(config, vocab_size, dtype="bfloat16")))
    again, _ = config_from_hf(written)
    assert (
        again.layer_kinds == config.layer_kinds
        and num_weights(again, vocab_size) == expected
    )
    assert config_to_hf(again, vocab_size, dtype="bfloat16") == written


def rotary_of(config, number):
    """What a layer's rotary embedding is."""
    kind = config.kind_of(number)
    layer = eqx.filter_eval_shape(config.init_layer, kind, key=jax.random.key(0))
    return layer.rotary.config


def test_layers_are_what_the_papers_say():
    gemma, _ = config_from_hf(PUBLISHED["Gemma 3 1B"][0])
    assert gemma.pattern[:6] == ("sliding_dense",) * 5 + ("dense",)
    assert rotary_of(gemma, 0).theta == 10_000
    assert rotary_of(gemma, 5).theta == 1_000_000
    olmo, _ = config_from_hf(PUBLISHED["OLMo 3 7B"][0])
    assert rotary_of(olmo, 0).scaling is None
    assert rotary_of(olmo, 3).scaling is not None
    kimi, _ = config_from_hf(PUBLISHED["Kimi Linear 48B"][0])
    assert kimi.pattern[:4] == ("linear_dense", *["linear_sparse"] * 2, "sparse")
    assert kimi.layers_of("sparse") == [3, 7, 11, 15, 19, 23, 26]
    granite, _ = config_from_hf(PUBLISHED["Granite 4 H Tiny"][0])
    assert granite.layers_of("sparse") == [5, 15, 25, 35]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "Llama 3.1 8B",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5; only 1",
        ),
        (
            "DeepSeek V3",
            {"quantization_config": {"quant_method": "awq"}},
            "only 'fp8' is supported",
        ),
        ("Phi-4", {"rope_scaling": LONGROPE}, "rope_type 'longrope' is not supported"),
        (
            "Phi-4",
            {"rope_scaling": LLAMA3},
            "model.rotary.scaling is llama3: .* no scaling but longrope",
        ),
        (
            "Phi-4",
            {"layer_types": ["sliding_attention"] * 40},
            r"layer_types is .*; only \['full",
        ),
        (
            "Gemma 3 1B",
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries for 26 layers",
        ),
        (
            "Gemma 3 1B",
            {"layer_types": ["linear"] * 26},
            "`layer_types.0` in config.json must be .*'linear'",
        ),
        (
            "Gemma 3 1B",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 26},
            "Give both, or",
        ),
        (
            "Gemma 3 1B",
            {"rope_parameters": LLAMA3},
            "rope_parameters is .*; only full_attention, and",
        ),
        (
            "Gemma 3 1B",
            {"rope_parameters": {"full_attention": 5}},
            "rope_parameters is .*: this can't",
        ),
        (
            "DeepSeek V3",
            {"rope_scaling": DEEPSEEK["rope_scaling"] | {"mscale": 0}},
            "mscale_all_dim without",
        ),
        (
            "DeepSeek V3",
            {"topk_group": 9},
            "topk_group = 9 must be at most n_group = 8, and",
        ),
        (
            "DeepSeek V3",
            {"topk_group": 1, "num_experts_per_tok": 33},
            "num_experts_per_tok = 33 at most 1 g",
        ),
        (
            "Gemma 3 1B",
            {"sliding_window_pattern": 0},
            "sliding_window_pattern is 0: this can't be used",
        ),
        (
            "gpt-oss 20b",
            {"swiglu_limit": 5.0},
            "swiglu_limit is 5.0; only 7.0 is supported",
        ),
        (
            "OLMo 3 7B",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 5}}},
            "with the same theta",
        ),
        (
            "LFM2 1.2B",
            {"layer_types": ["linear_attention"] * 16},
            "layer_types has 'linear_attention'; only conv and full_attention",
        ),
        ("LFM2 1.2B", {"use_pos_enc": False}, "use_pos_enc is False; only True"),
        (
            "Kimi Linear 48B",
            {"tie_word_embeddings": True},
            "tie_word_embeddings is True; only False",
        ),
        (
            "Kimi Linear 48B",
            {"mla_use_nope": False},
            "mla_use_nope is False; only True",
        ),
        (
            "Kimi Linear 48B",
            {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2]}},
            r"full_attn_layers \[4\] and .*.kda_layers .* each layer of 1 to 27",
        ),
        (
            "Kimi Linear 48B",
            {"linear_attn_config": {"full_attn_layers": [28]}},
            "linear_attn_config.full_attn_layers names layer 28; there are 1 to 27",
        ),
        (
            "Kimi Linear 48B",
            {"linear_attn_config": {"num_heads": 0}, "layer_types": [LINEAR] * 27},
            "linear_attn_config.num_heads",
        ),
        ("Kimi Linear 48B", {"linear_attn_config": None}, "layer_types is missing"),
        (
            "Kimi Linear 48B",
            {"mlp_layer_types": ["dense"]},
            "mlp_layer_types has 1 entries for 27 layers",
        ),
        (
            "Granite 4 H Tiny",
            {"mamba_d_head": 32},
            "mamba_n_heads = 48 heads of mamba_d_head = 32 must be mamba_expand",
        ),
        (
            "Granite 4 H Tiny",
            {"mamba_n_groups": 7},
            "mamba_n_heads = 48 must be a multiple of mamba_n_groups = 7",
        ),
        (
            "Granite 4 H Tiny",
            {"time_step_limit": [0.0, 1.0]},
            "time_step_limit is .*; only",
        ),
    ],
)
def test_what_changes_the_model_and_is_not_implemented_is_refused(
    name, fields, message
):
    with pytest.raises(ValueError, match=message):
        config_from_hf(PUBLISHED[name][0] | fields)


@pytest.mark.parametrize(
    "name, fields, message",
    [
        (
            "Llama 3.1 8B",
            {"attention": AttentionConfig(window=8)},
            "llama can't have this decoder; .* model.attention.window",
        ),
        (
            "Kimi Linear 48B",
            {"linear": LinearAttentionConfig(32, 64, 128, 128)},
            "kimi_linear can't have this decoder; .* model.linear.num_value_heads",
        ),
    ],
)
def test_a_decoder_that_an_architecture_lacks_is_not_written(name, fields, message):
    config, vocab_size = config_from_hf(PUBLISHED[name][0])
    other = dataclasses.replace(config, **fields)
    with pytest.raises(WeightsError, match=message):
        config_to_hf(other, vocab_size, dtype="float32")


def test_decoders_of_two_architectures_differ_in_their_type():
    llama, _ = config_from_hf(PUBLISHED["Llama 3.1 8B"][0])
    phi, _ = config_from_hf(PUBLISHED["Phi-4"][0])
    assert differing_fields("model", llama, phi) == [
        "model.type: llama in the config, phi3 in the folder"
    ]
