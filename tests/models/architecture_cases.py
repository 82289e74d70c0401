"""Small configs of every architecture, as transformers writes them, for the tests that
compare with it.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}

_SHALLOW = dict(
    hidden_size=32,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
_DENSE = _SHALLOW | dict(head_dim=6)
_BALANCE = dict(router_aux_loss_coef=0.3, output_router_logits=True)
_QWEN3_MOE = _DENSE | dict(
    moe_intermediate_size=10, num_experts=4, num_experts_per_tok=2
)
_QWEN3_MOE |= dict(norm_topk_prob=True) | _BALANCE
_GPT_OSS = _DENSE | dict(
    sliding_window=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    rope_parameters=YARN | dict(factor=8.0, truncate=False, rope_theta=100.0),
)
_MIXTRAL = _DENSE | dict(num_local_experts=4, num_experts_per_tok=2) | _BALANCE
_DEEPSEEK = _SHALLOW | dict(
    num_key_value_heads=4,
    moe_intermediate_size=10,
    n_routed_experts=6,
    num_experts_per_tok=3,
    n_group=3,
    topk_group=2,
    first_k_dense_replace=1,
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    num_nextn_predict_layers=0,
)

_MULTIPLIERS = dict(
    embedding_multiplier=3.0,
    attention_multiplier=0.3,
    residual_multiplier=0.4,
    logits_scaling=0.2,
)
_SOFTCAPS = dict(attn_logit_softcapping=2.0, final_logit_softcapping=5.0)
_GLM = _DENSE | dict(
    head_dim=8,
    moe_intermediate_size=10,
    n_routed_experts=6,
    num_experts_per_tok=3,
)
_LLAMA4 = _DENSE | dict(
    intermediate_size_mlp=14,
    num_local_experts=4,
    num_experts_per_tok=1,
    no_rope_layers=[1, 0, 1],
    attention_chunk_size=4,
    floor_scale=2,
    attn_scale=0.5,
)
_LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
)
_HYBRID = _DENSE | _LINEAR | dict(head_dim=8, num_hidden_layers=4)
_QWEN3_NEXT = _HYBRID | dict(
    moe_intermediate_size=10,
    shared_expert_intermediate_size=12,
    num_experts=4,
    num_experts_per_tok=2,
)
_QWEN3_NEXT |= _BALANCE
_QWEN3_5_MOE = {
    name: value for name, value in _QWEN3_NEXT.items() if name != "intermediate_size"
}
_MINIMAX = _DENSE | dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2)
_LFM = _SHALLOW | dict(
    intermediate_size=20,
    block_multiple_of=4,
    layer_types=["conv", "full_attention", "conv"],
)
_KIMI = {name: _DEEPSEEK[name] for name in _DEEPSEEK if name.startswith(("qk", "v_"))}
_KIMI |= _SHALLOW | dict(
    num_key_value_heads=4,
    moe_intermediate_size=10,
    num_experts=6,
    num_experts_per_tok=3,
    kv_lora_rank=8,
    linear_num_heads=3,
    linear_head_dim=6,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)
_GRANITE_4 = (
    _SHALLOW
    | _MULTIPLIERS
    | _BALANCE
    | dict(
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=12,
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=6,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )
)
_LFM_MOE = _LFM | dict(
    moe_intermediate_size=10,
    num_dense_layers=1,
    num_experts=4,
    num_experts_per_tok=2,
)
del _LFM_MOE["block_multiple_of"]

CASES: dict[str, tuple[str, dict]] = {
    "Llama 3.1": (
        "Llama",
        _DENSE
        | dict(rope_parameters=LLAMA3 | dict(rope_theta=100.0), rms_norm_eps=1e-5),
    ),
    "Qwen2.5": ("Qwen2", _SHALLOW),
    "Qwen2, tied, windows in the later layers": (
        "Qwen2",
        _SHALLOW
        | dict(
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=3,
            max_window_layers=1,
        ),
    ),
    "Mistral": ("Mistral", _DENSE | dict(sliding_window=None)),
    "Mistral, window": ("Mistral", _DENSE | dict(sliding_window=3)),
    "Mixtral": ("Mixtral", _MIXTRAL),
    "Gemma 3": ("Gemma3Text", _DENSE | dict(num_hidden_layers=7, sliding_window=4)),
    "Gemma 3, untied, biases, scaled": (
        "Gemma3Text",
        _DENSE
        | dict(
            sliding_window=3,
            query_pre_attn_scalar=10,
            tie_word_embeddings=False,
            attention_bias=True,
        )
        | dict(layer_types=["full_attention", "sliding_attention", "full_attention"])
        | dict(
            rope_parameters={
                "full_attention": LINEAR | dict(rope_theta=1000.0),
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            }
        ),
    ),
    "OLMo 3": ("Olmo3", _SHALLOW | dict(num_hidden_layers=5, sliding_window=4)),
    "OLMo 3, yarn": (
        "Olmo3",
        _SHALLOW
        | dict(
            sliding_window=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
        | dict(
            rope_parameters={
                "full_attention": YARN | dict(rope_theta=100.0),
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        ),
    ),
    "Phi-3": ("Phi3", _SHALLOW),
    "Phi-3, tied, window, all heads": (
        "Phi3",
        _DENSE
        | dict(
            tie_word_embeddings=True,
            sliding_window=3,
            num_key_value_heads=4,
            rope_theta=100.0,
        ),
    ),
    "DeepSeek V3": ("DeepseekV3", _DEEPSEEK),
    "DeepSeek V3, no query ranks or groups, biases, halves, raw gates, odd widths": (
        "DeepseekV3",
        _DEEPSEEK
        | dict(
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            attention_bias=True,
            rope_interleave=False,
        )
        | dict(norm_topk_prob=False, first_k_dense_replace=0, tie_word_embeddings=True)
        | dict(hidden_size=30, qk_nope_head_dim=5),
    ),
    "DeepSeek V3, yarn": (
        "DeepseekV3",
        _DEEPSEEK
        | dict(n_shared_experts=2, first_k_dense_replace=2)
        | dict(
            rope_parameters=YARN
            | dict(rope_theta=100.0, mscale=1.0, mscale_all_dim=1.0)
        ),
    ),
    "Qwen3": ("Qwen3", _DENSE),
    "Qwen3, tied, biases, windows in the later layers, yarn": (
        "Qwen3",
        _DENSE
        | dict(
            tie_word_embeddings=True,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=3,
        )
        | dict(max_window_layers=1, rope_parameters=YARN | dict(rope_theta=100.0)),
    ),
    "Qwen3 MoE": ("Qwen3Moe", _QWEN3_MOE),
    "Qwen3 MoE, tied, biases, dense first layer": (
        "Qwen3Moe",
        _QWEN3_MOE
        | dict(tie_word_embeddings=True, attention_bias=True, mlp_only_layers=[0]),
    ),
    "Qwen3 MoE, every second layer dense, windows, yarn": (
        "Qwen3Moe",
        _QWEN3_MOE
        | dict(
            num_hidden_layers=4,
            decoder_sparse_step=2,
            use_sliding_window=True,
            sliding_window=4,
        )
        | dict(rope_parameters=YARN | dict(rope_theta=100.0)),
    ),
    "gpt-oss": ("GptOss", _GPT_OSS),
    "SmolLM3": ("SmolLM3", _SHALLOW | dict(num_hidden_layers=5, sliding_window=None)),
    "SmolLM3, untied, biases, windows without rotary": (
        "SmolLM3",
        _SHALLOW
        | dict(
            tie_word_embeddings=False,
            attention_bias=True,
            no_rope_layers=[0, 1, 0],
            use_sliding_window=True,
            sliding_window=3,
        ),
    ),
    "Granite": ("Granite", _SHALLOW | _MULTIPLIERS),
    "Granite, tied, biases, yarn": (
        "Granite",
        _SHALLOW
        | _MULTIPLIERS
        | dict(tie_word_embeddings=True, attention_bias=True)
        | dict(rope_parameters=YARN | dict(rope_theta=100.0)),
    ),
    "Cohere 2": (
        "Cohere2",
        _SHALLOW | dict(num_hidden_layers=5, sliding_window=3, logit_scale=2.0),
    ),
    "Cohere 2, untied, biases, full attention first": (
        "Cohere2",
        _SHALLOW
        | dict(tie_word_embeddings=False, attention_bias=True, sliding_window=4)
        | dict(logit_scale=2.0)
        | dict(layer_types=["full_attention", "sliding_attention", "full_attention"])
        | dict(rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    ),
    "Gemma 2": ("Gemma2", _DENSE | _SOFTCAPS | dict(sliding_window=3)),
    "Gemma 2, untied, biases, no bound of scores": (
        "Gemma2",
        _DENSE
        | _SOFTCAPS
        | dict(attn_logit_softcapping=None, query_pre_attn_scalar=10)
        | dict(tie_word_embeddings=False, attention_bias=True, sliding_window=3),
    ),
    "GLM-4.5": ("Glm4Moe", _GLM),
    "GLM-4.5, norms, biases, groups, no dense layer": (
        "Glm4Moe",
        _GLM
        | dict(use_qk_norm=True, attention_bias=True, n_group=3, topk_group=2)
        | dict(first_k_dense_replace=0, routed_scaling_factor=2.5)
        | dict(norm_topk_prob=False),
    ),
    "Llama 4": ("Llama4Text", _LLAMA4 | dict(moe_layers=[1, 2])),
    "Llama 4, two experts in every layer, biases, tied, no norms or temperature": (
        "Llama4Text",
        _LLAMA4
        | dict(num_experts_per_tok=2, attention_bias=True, tie_word_embeddings=True)
        | dict(use_qk_norm=False, attn_temperature_tuning=False, head_dim=8)
        | dict(no_rope_layers=None, no_rope_layer_interval=2),
    ),
    "MiniMax-M2": ("MiniMaxM2", _MINIMAX),
    "MiniMax-M2, half of a head, tied": (
        "MiniMaxM2",
        _MINIMAX
        | dict(tie_word_embeddings=True)
        | dict(
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            }
        ),
    ),
    "Qwen3-Next": ("Qwen3Next", _QWEN3_NEXT),
    "Qwen3-Next, tied, biases, raw gates, dense first layer, yarn": (
        "Qwen3Next",
        _QWEN3_NEXT
        | dict(tie_word_embeddings=True, attention_bias=True, mlp_only_layers=[0])
        | dict(norm_topk_prob=False, linear_conv_kernel_dim=3)
        | dict(layer_types=["full_attention"] + ["linear_attention"] * 2)
        | dict(num_hidden_layers=3, partial_rotary_factor=0.5)
        | dict(rope_parameters=YARN | dict(rope_theta=100.0)),
    ),
    "Qwen3.5": ("Qwen3_5Text", _HYBRID),
    "Qwen3.5, tied, biases, linear attention alone at the end": (
        "Qwen3_5Text",
        _HYBRID
        | dict(tie_word_embeddings=True, attention_bias=True, num_hidden_layers=3)
        | dict(layer_types=["full_attention"] + ["linear_attention"] * 2)
        | dict(linear_num_key_heads=3, linear_num_value_heads=3)
        | dict(rope_parameters={"rope_theta": 100.0}),
    ),
    "OLMo Hybrid": ("OlmoHybrid", _SHALLOW | _LINEAR | dict(num_hidden_layers=5)),
    "OLMo Hybrid, tied, biases, not rotated, betas up to 1": (
        "OlmoHybrid",
        _SHALLOW
        | _LINEAR
        | dict(tie_word_embeddings=True, attention_bias=True)
        | dict(layer_types=["full_attention"] + ["linear_attention"] * 2)
        | dict(linear_allow_neg_eigval=False, linear_conv_kernel_dim=3)
        | dict(rope_parameters={"rope_type": "default", "rope_theta": None}),
    ),
    "Qwen3.5 MoE": ("Qwen3_5MoeText", _QWEN3_5_MOE),
    "LFM2": ("Lfm2", _LFM),
    "LFM2, untied, biases, wider convolutions and heads, attention first": (
        "Lfm2",
        _LFM
        | dict(tie_word_embeddings=False, conv_bias=True, conv_L_cache=4, head_dim=6)
        | dict(layer_types=["full_attention", "conv", "conv"], norm_eps=1e-3)
        | dict(block_ffn_dim_multiplier=1.5)
        | dict(rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    ),
    "LFM2 MoE": ("Lfm2Moe", _LFM_MOE),
    "LFM2 MoE, untied, no bias of experts, raw gates": (
        "Lfm2Moe",
        _LFM_MOE
        | dict(tie_word_embeddings=False, use_expert_bias=False, norm_topk_prob=False)
        | dict(num_dense_layers=0, routed_scaling_factor=2.5, conv_bias=True),
    ),
    "Kimi Linear": ("KimiLinear", _KIMI),
    "Kimi Linear, query ranks, biases, groups, raw gates, no dense layer": (
        "KimiLinear",
        _KIMI
        | dict(q_lora_rank=12, attention_bias=True, n_group=3, topk_group=2)
        | dict(norm_topk_prob=False, linear_conv_kernel_dim=3, n_shared_experts=2)
        | dict(mlp_layer_types=["sparse"] * 3, rms_norm_eps=1e-3),
    ),
    "Granite 4": ("GraniteMoeHybrid", _GRANITE_4),
    "Granite 4, no experts, tied, biases, rotary, one group": (
        "GraniteMoeHybrid",
        _GRANITE_4
        | dict(num_local_experts=0, output_router_logits=False, mamba_n_groups=1)
        | dict(tie_word_embeddings=True, attention_bias=True, mamba_proj_bias=True)
        | dict(position_embedding_type="rope", mamba_conv_bias=False, mamba_expand=1)
        | dict(rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    ),
}


def _latents_and_groups(rng: np.random.Generator, heads: int, layers: int) -> dict:
    """Fields of DeepSeek V3's attention and experts."""

    def one_of(*values):
        return values[rng.integers(len(values))]

    groups, members = one_of(1, 2, 3), one_of(2, 3)
    chosen_groups = int(rng.integers(1, groups + 1))
    return dict(
        num_key_value_heads=heads,
        first_k_dense_replace=int(rng.integers(layers)),
        n_routed_experts=groups * members,
        n_group=groups,
        topk_group=chosen_groups,
        num_experts_per_tok=int(rng.integers(2, chosen_groups * members + 1)),
        moe_intermediate_size=one_of(6, 10),
        q_lora_rank=one_of(None, 5, 12),
        kv_lora_rank=one_of(4, 7),
        v_head_dim=one_of(3, 4),
        qk_nope_head_dim=one_of(2, 5),
        qk_rope_head_dim=one_of(2, 4),
        n_shared_experts=one_of(1, 2),
        rope_interleave=one_of(False, True),
        norm_topk_prob=one_of(False, True),
    )


def _delta_net_fields(
    family: str, mixers: list[str], of_experts: dict, one_of: Callable[..., Any]
) -> dict:
    """Fields of decoders with gated delta nets."""
    key_heads = one_of(1, 2, 3)
    fields = dict(
        layer_types=mixers,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * one_of(1, 2, 3),
        linear_key_head_dim=one_of(4, 7),
        linear_value_head_dim=one_of(3, 8),
        linear_conv_kernel_dim=one_of(2, 4),
    )
    if family != "OlmoHybrid":
        fields |= dict(head_dim=one_of(8, 16))
    if family in ("Qwen3Next", "Qwen3_5MoeText"):
        fields |= of_experts | dict(moe_intermediate_size=one_of(6, 10))
        fields |= dict(shared_expert_intermediate_size=one_of(5, 8))
    if family == "Qwen3Next":
        fields |= dict(norm_topk_prob=one_of(False, True))
        fields |= dict(mlp_only_layers=one_of([], [0]))
    return fields


_NOT_IN_KIMI = (
    "n_routed_experts first_k_dense_replace num_nextn_predict_layers head_dim"
)
_NOT_IN_KIMI += " rope_theta rope_parameters rope_interleave tie_word_embeddings"


def _kimi_fields(drawn: dict, mixers: Sequence[str], one_of: Callable) -> dict:
    """The fields of Kimi Linear, from those of a DeepSeek V3 with as many layers."""
    fields = {name: drawn[name] for name in drawn if name not in _NOT_IN_KIMI.split()}
    fields |= dict(num_local_experts=drawn["n_routed_experts"])
    fields |= dict(linear_num_heads=one_of(1, 3), linear_head_dim=one_of(4, 7))
    fields |= dict(linear_conv_kernel_dim=one_of(2, 4))
    first = drawn["first_k_dense_replace"]
    kinds = ["dense"] * first + ["sparse"] * (len(mixers) - first)
    return fields | dict(mlp_layer_types=kinds, layer_types=mixers)


def _with_own_fields(family: str, fields: dict, rng: np.random.Generator) -> dict:
    """The fields with those that some architectures alone have."""

    def one_of(*values):
        return values[rng.integers(len(values))]

    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    # Of hybrids, with a layer of either kind
    mixers = ["linear_attention", "full_attention"]
    mixers += [one_of(*mixers) for _ in range(layers - 2)]
    experts = one_of(3, 4, 5)
    # A single gate that is normalised is 1, and its router has no gradient to compare.
    chosen = dict(num_experts_per_tok=int(rng.integers(2, experts + 1)))
    if family in ("Mixtral", "GptOss"):
        fields |= chosen | dict(num_local_experts=experts) | _BALANCE
    elif family == "Qwen3Moe":
        fields |= chosen | dict(num_experts=experts) | _BALANCE
        fields |= dict(moe_intermediate_size=one_of(6, 10))
        numbers = rng.integers(layers, size=one_of(0, 1, layers // 2))
        dense = sorted({*numbers.tolist()})
        fields |= dict(norm_topk_prob=one_of(False, True), mlp_only_layers=dense)
        fields |= dict(decoder_sparse_step=one_of(1, 1, 2))
    elif family == "SmolLM3":
        fields |= dict(no_rope_layers=[one_of(0, 1) for _ in range(layers)])
    elif family == "Granite":
        fields |= {name: one_of(0.5, 2.0) for name in _MULTIPLIERS}
    elif family == "Cohere2":
        fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
        fields |= dict(logit_scale=one_of(1.0, 3.0))
    elif family == "Gemma2":
        fields |= {name: one_of(None, 2.0, 9.0) for name in _SOFTCAPS}
    elif family == "MiniMaxM2":
        fields = _MINIMAX | fields | dict(head_dim=one_of(4, 8))
        fields |= dict(num_local_experts=experts) | chosen
    elif family == "Glm4Moe":
        fields = _GLM | fields | dict(head_dim=one_of(4, 8))
        fields |= dict(n_routed_experts=experts, use_qk_norm=one_of(False, True))
        fields |= chosen | dict(first_k_dense_replace=int(rng.integers(layers)))
        fields |= dict(norm_topk_prob=one_of(False, True))
    elif family in ("Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText", "OlmoHybrid"):
        chosen |= dict(num_experts=experts) | _BALANCE
        fields |= _delta_net_fields(family, mixers, chosen, one_of)
        if family == "Qwen3_5MoeText":
            fields.pop("intermediate_size")
    elif family == "KimiLinear":
        drawn = _DEEPSEEK | fields | _latents_and_groups(rng, heads, layers)
        fields = _kimi_fields(drawn, mixers, one_of)
    elif family in ("Lfm2", "Lfm2Moe"):
        fields["norm_eps"] = fields.pop("rms_norm_eps")
        fields |= dict(conv_bias=one_of(False, True), conv_L_cache=one_of(2, 3))
        if family == "Lfm2":
            fields |= dict(block_multiple_of=one_of(4, 6))
        else:
            fields |= chosen | dict(num_experts=experts, moe_intermediate_size=6)
            fields |= dict(num_dense_layers=int(rng.integers(layers)))
            fields |= dict(use_expert_bias=one_of(False, True))
        kinds = {"linear_attention": "conv", "full_attention": "full_attention"}
        fields |= dict(layer_types=[kinds[mixer] for mixer in mixers])
    elif family == "GraniteMoeHybrid":
        fields |= {name: one_of(0.5, 2.0) for name in _MULTIPLIERS}
        fields |= chosen | dict(num_local_experts=experts) | _BALANCE
        fields |= dict(shared_intermediate_size=one_of(6, 10), mamba_expand=2)
        groups = one_of(1, 2)
        fields |= dict(mamba_n_groups=groups, mamba_n_heads=2 * groups)
        fields |= dict(mamba_d_state=one_of(3, 8))
        fields |= dict(mamba_conv_bias=one_of(False, True), mamba_d_conv=one_of(2, 4))
        fields |= dict(mamba_proj_bias=one_of(False, True))
        fields |= dict(position_embedding_type=one_of("rope", None))
        fields |= dict(layer_types=mixers)
    return fields


def drawn(seed: int, layer_counts: Sequence[int] = (2, 3)) -> tuple[str, dict]:
    """An architecture and fields of a small config, each drawn at random from what its
    decoder serves.
    """
    rng = np.random.default_rng(seed)

    def one_of(*values):
        return values[rng.integers(len(values))]

    family = one_of(*dict.fromkeys(name for name, _ in CASES.values()))
    kv_heads, layers = one_of(1, 2, 3), one_of(*layer_counts)
    heads = kv_heads * one_of(1, 2, 3)
    theta = dict(rope_theta=one_of(100.0, 10_000.0, 1e6))
    fields = dict(
        hidden_size=heads * one_of(4, 6),
        intermediate_size=one_of(12, 20),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=one_of(False, True),
        rms_norm_eps=one_of(1e-6, 1e-3),
    )
    if family not in ("Qwen2", "Olmo3", "OlmoHybrid", "DeepseekV3"):
        fields["head_dim"] = one_of(4, 6, 10)
    if family not in (
        "Qwen2",
        "Mistral",
        "Mixtral",
        "Phi3",
        "MiniMaxM2",
        "Lfm2",
        "Lfm2Moe",
    ):
        fields["attention_bias"] = one_of(False, True)
    scaled = dict(rope_parameters=one_of(YARN, LINEAR, LLAMA3) | theta)
    if family in ("Gemma3Text", "Olmo3"):
        fields["rope_parameters"] = {
            "full_attention": scaled["rope_parameters"],
            "sliding_attention": theta,
        }
        fields["rope_parameters"]["sliding_attention"] = {
            "rope_type": "default",
            **theta,
        }
    else:
        fields |= theta if family == "Phi3" else one_of(theta, scaled)
    first_kinds = [
        one_of("full_attention", "sliding_attention")
        for _ in range(one_of(layers, 2, 3, 4))
    ]
    kinds = [first_kinds[number % len(first_kinds)] for number in range(layers)]
    if family in ("Gemma3Text", "Olmo3", "GptOss", "Gemma2", "Cohere2"):
        fields |= dict(sliding_window=one_of(2, 5), layer_types=kinds)
    elif family in ("Mistral", "Mixtral", "Phi3"):
        fields |= dict(sliding_window=one_of(None, 2, 5))
    elif family in ("Qwen2", "Qwen3", "Qwen3Moe") and one_of(False, True):
        fields |= dict(use_sliding_window=True, sliding_window=one_of(2, 5))
        if family != "Qwen3Moe":
            fields |= one_of(
                dict(layer_types=kinds),
                dict(max_window_layers=int(rng.integers(layers + 1))),
            )
    return family, _with_own_fields(family, fields, rng)


SEED = int(os.environ.get("PARITY_SEED", "0"))  # another number tries other configs
CASES |= {f"drawn from {SEED + number}": drawn(SEED + number) for number in range(4)}
DEEP = int(os.environ.get("PARITY_CONFIGS", "2"))  # how many configs of more layers
CASES |= {
    f"deep config {SEED + number}": drawn(SEED + number, range(5, 13))
    for number in range(DEEP)
}
