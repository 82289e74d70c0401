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

from .published_configs import DEEPSEEK, LLAMA3, LONGROPE, PUBLISHED

assert architectures  # registers them


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
