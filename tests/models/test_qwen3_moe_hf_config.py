"""Configs of Qwen3 to and from Hugging Face's config.json."""

import json

import pytest

from models.hf_io.formats import config_from_hf, read_hf_config
from models.hf_io.safetensors_folder import WeightsError
from models.parts.sections import AttentionConfig, ExpertsConfig, RotaryConfig
from models.qwen3 import Qwen3Config
from stacked_remat.ops import YarnRotary

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
}


def test_absent_fields_have_the_defaults_of_transformers():
    config, vocab_size = config_from_hf(DENSE)
    assert vocab_size == 50
    assert config == Qwen3Config(
        hidden_dim=32,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        mlp_dim=20,
        attention=AttentionConfig(head_dim=128),
        rotary=RotaryConfig(theta=10_000.0),
    )
    config, _ = config_from_hf(MOE)
    assert config.sparse == ExpertsConfig(
        6, 2, 10, norm_topk_prob=False, load_balance_weight=0.001
    )


@pytest.mark.parametrize(
    ("document", "said", "expected"),
    [
        (DENSE, {}, 32),
        (DENSE, {"num_key_value_heads": None}, 64),
        (MOE, {}, 4),
        (MOE, {"num_key_value_heads": 2}, 2),
    ],
)
def test_absent_key_value_heads_have_the_default_of_transformers(
    document, said, expected
):
    rest = {
        name: value for name, value in document.items() if name != "num_key_value_heads"
    }
    config, _ = config_from_hf(
        rest | said | {"num_attention_heads": 64, "hidden_size": 128}
    )
    assert config.num_kv_heads == expected


LATER = ("full_attention", *["sliding_attention"] * 3)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (DENSE | {"sliding_window": 8}, (None, None)),
        (
            DENSE | {"sliding_window": 8, "use_sliding_window": True},
            (None, None),
        ),  # from layer 28 on
        (
            DENSE
            | {
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (8, LATER),
        ),
        (
            DENSE
            | {
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            (8, None),
        ),
        (MOE | {"sliding_window": 8, "use_sliding_window": True}, (8, None)),
        (
            MOE
            | {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] * 4,
            },
            (4096, None),
        ),
        (MOE | {"use_sliding_window": True, "sliding_window": None}, (None, None)),
    ],
)
def test_windows(document, expected):
    attention = config_from_hf(document)[0].attention
    assert (attention.window, attention.layer_types) == expected


YARN = {"rope_theta": 100.0, "rope_type": "yarn", "factor": 4.0}
ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    "fields",
    [
        {
            "rope_theta": 100.0,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True},
        },
        {"rope_parameters": YARN, "rope_theta": 5.0},
        {
            "rope_scaling": YARN,
            "rope_parameters": {"rope_type": "linear"},
            "rope_theta": 5.0,
        },
        {"rope_scaling": YARN | {ORIGINAL: 8}, ORIGINAL: 1024},
    ],
)
def test_all_spellings_of_rope_scaling_are_read(fields):
    rotary = config_from_hf(DENSE | fields | {"max_position_embeddings": 1024})[
        0
    ].rotary
    assert rotary == RotaryConfig(100.0, YarnRotary(4.0, 1024), 1024)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": None}, "num_experts is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; only 0 is supported"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quant_method is 'awq'; only None",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic"}},
            "rope_type 'dynamic' is not supported",
        ),
        ({"logit_softcap": 30.0}, "logit_softcap is 30.0; this is not supported"),
        (
            {"layer_types": [*LATER]},
            r"layer_types is \['full.*; only \['full_attention', 'full.* is sup",
        ),
        ({"hidden_size": "wide"}, "hidden_size must be int, got 'wide'"),
        ({"num_hidden_layers": "x"}, "num_hidden_layers must be int, got 'x'"),
        (
            {"tie_word_embeddings": "x"},
            "tie_word_embeddings must be bool, got 'x'",
        ),
        (
            {"num_attention_heads": 3},
            "num_attention_heads = 3 must be a multiple of num_key_value_heads",
        ),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"quantization_config": 5}, "quantization_config must be dict, got 5"),
        ({"rope_parameters": 5}, "rope_parameters must be dict, got 5"),
        (
            {"rope_parameters": {"full_attention": 5}},
            "rope_type 'default' has no full_attention",
        ),
        ({"model_type": []}, r"model_type must be str, got \[\]"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": "4"}},
            "factor must be a number",
        ),
        ({"mlp_only_layers": [4]}, "mlp_only_layers names layer 4; there are 0 to 3"),
    ],
)
def test_unsupported_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(MOE | fields)


def test_errors_name_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no config.json"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(
        WeightsError, match="config.json holds a list; a JSON object was expected"
    ):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    used = (
        "config.json can't be used: model_type is 'gpt2'; .*gpt_oss, .*qwen3,"
        ".* qwen3_moe.* are read"
    )
    with pytest.raises(WeightsError, match=used):
        read_hf_config(tmp_path)


def test_fields_that_published_configs_add_and_the_decoder_has_built_in_are_read():
    coder = {
        "qkv_bias": False,
        "use_qk_norm": True,
        "shared_expert_intermediate_size": 0,
    }
    coder |= {"unsloth_version": "2026.1", "something_new": None}
    assert config_from_hf(MOE | coder) == config_from_hf(MOE)
    assert config_from_hf(
        MOE | dict.fromkeys((*coder, "hidden_act"))
    ) == config_from_hf(MOE)


def test_unknown_fields_are_named_in_a_warning(tmp_path):
    odd = {"\x1b[2J": 1, "newer": 2}
    (tmp_path / "config.json").write_text(json.dumps(MOE | odd))
    unknown = (
        rf"{tmp_path}/config.json has '\\x1b\[2J', newer: unknown fields of a qwen3_moe"
    )
    with pytest.warns(UserWarning, match=unknown):
        assert read_hf_config(tmp_path) == config_from_hf(MOE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "config.json is not valid JSON: Expecting value.* truncated"),
        (
            b'{"model_type": "\xff"}',
            "config.json is not valid JSON: .* can't decode byte 0xff",
        ),
        (b"[" * 200_000, "config.json is not valid JSON: maximum recursion"),
        (
            b'{"hidden_size": ' + b"9" * 5000 + b"}",
            "config.json is not valid JSON: Exceeds the limit",
        ),
    ],
    ids=range(4),
)
def test_damaged_files_are_named(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        read_hf_config(tmp_path)
