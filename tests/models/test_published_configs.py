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
from models.decoder.decoder import Decoder
from models.hf_io.formats import config_from_hf, config_to_hf, differing_fields
from models.hf_io.safetensors_folder import WeightsError

assert architectures  # registers them

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
    assert again.specs == config.specs and num_weights(again, vocab_size) == expected
    assert config_to_hf(again, vocab_size, dtype="bfloat16") == written


def test_layers_are_what_the_papers_say():
    gemma, _ = config_from_hf(PUBLISHED["Gemma 3 1B"][0])
    assert gemma.pattern[:6] == ("sliding_dense",) * 5 + ("dense",)
    assert (
        gemma.layer(0).rotary.theta == 10_000
        and gemma.layer(5).rotary.theta == 1_000_000
    )
    olmo, _ = config_from_hf(PUBLISHED["OLMo 3 7B"][0])
    assert (
        olmo.layer(0).rotary.scaling is None
        and olmo.layer(3).rotary.scaling is not None
    )


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
    ],
)
def test_what_changes_the_model_and_is_not_implemented_is_refused(
    name, fields, message
):
    with pytest.raises(ValueError, match=message):
        config_from_hf(PUBLISHED[name][0] | fields)


def test_a_decoder_that_an_architecture_lacks_is_not_written():
    config, vocab_size = config_from_hf(PUBLISHED["Llama 3.1 8B"][0])
    attention, (phi, _) = (
        type(config.attention)(window=8),
        config_from_hf(PUBLISHED["Phi-4"][0]),
    )
    assert differing_fields("model", config, phi) == [
        "model.type: llama in the config, phi3 in the folder"
    ]
    with pytest.raises(
        WeightsError, match="llama can't have this decoder; .* model.attention.window"
    ):
        config_to_hf(
            dataclasses.replace(config, attention=attention),
            vocab_size,
            dtype="float32",
        )
