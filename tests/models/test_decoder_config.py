"""Configs of decoders: axes, checks and defaults."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import equinox as eqx
import jax
import numpy as np
import pytest
import yaml
from haliax import Axis

from models.gemma2 import Gemma2Config
from models.gemma3 import Gemma3Config
from models.glm4_moe import Glm4MoeConfig
from models.gpt_oss import GptOssConfig
from models.granite import GraniteConfig
from models.hf_io.formats import (
    config_from_hf,
    config_to_hf,
    differing_fields,
    written_out,
)
from models.minimax_m2 import MiniMaxM2Config
from models.olmo3 import Olmo3Config
from models.parts.config import DecoderConfig, LayerKind
from models.parts.decoder import Decoder
from models.parts.remat_presets import check_remat_names
from models.parts.sections import FULL, SLIDING, AttentionConfig, ExpertsConfig
from models.qwen3 import Qwen3Config, Qwen3Layer
from models.qwen3_moe import Qwen3MoeConfig
from models.smollm3 import SmolLM3Config
from stacked_remat import ScanCheckpointPolicy
from stacked_remat.ops import YarnRotary
from stacked_remat.ops._attention_backends import BACKENDS
from stacked_remat.ops.grouped_experts import EXPERT_BACKENDS
from stacked_remat.training import ConfigError, config_as_dict
from stacked_remat.training.config_file import decode_config


def test_types_of_layers_repeat():
    config = Qwen3Config(
        num_layers=5, attention=AttentionConfig(window=3, layer_types=(SLIDING, FULL))
    )
    assert [spec.window for spec in config.layer_kinds] == [3, None, 3, None, 3]
    with pytest.raises(
        ValueError,
        match="layer_types has 5 entries for model.num_layers = 4. Give at most",
    ):
        Qwen3Config(
            num_layers=4,
            attention=AttentionConfig(
                window=3, layer_types=(SLIDING, FULL) * 2 + (FULL,)
            ),
        )


def copies(config: DecoderConfig) -> Iterator[DecoderConfig]:
    """The config after all that keeps its layers."""
    yield config
    yield dataclasses.replace(config, compute_dtype="bfloat16")
    yield dataclasses.replace(dataclasses.replace(config, tiles=2), rms_norm_eps=1e-3)
    yield written_out(config)
    yield written_out(dataclasses.replace(written_out(config), tiles=2))
    entries = yaml.safe_load(yaml.safe_dump(config_as_dict(config)))
    yield decode_config(
        type(config),
        {name: entries[name] for name in entries if name != "type"},
        "there",
    )
    again, _ = config_from_hf(config_to_hf(config, 9, dtype="float32"))
    yield again
    yield config_from_hf(
        config_to_hf(dataclasses.replace(again, tiles=2), 9, dtype="float32")
    )[0]


@pytest.mark.parametrize(
    "config_class", [Gemma3Config, Olmo3Config, GptOssConfig, Qwen3Config]
)
def test_types_of_layers_stay_what_was_written(config_class):
    """All lists of up to six, written whole or repeated, and some of twelve."""
    rng = np.random.default_rng(0)
    cases = [
        (types, len(types) * repeats + cut)
        for size in range(2, 7)
        for types in itertools.product((SLIDING, FULL), repeat=size)
        for repeats, cut in ((1, 0), (2, 0), (2, size // 2))
    ]
    cases += [(tuple(rng.choice([SLIDING, FULL], 12)), 12) for _ in range(100)]
    for types, num_layers in cases[:: 2 if config_class is Gemma3Config else 9]:
        window = 3 if SLIDING in types else None
        attention = AttentionConfig(window=window, layer_types=tuple(map(str, types)))
        config = config_class(num_layers=num_layers, attention=attention)
        expected = [
            window if types[layer % len(types)] == SLIDING else None
            for layer in range(num_layers)
        ]
        for copy in copies(config):
            assert [spec.window for spec in copy.layer_kinds] == expected


def test_equal_layers_are_equal_configs_once_they_are_written_out():
    of_three, of_all = (
        Qwen3Config(
            num_layers=7, attention=AttentionConfig(window=3, layer_types=types)
        )
        for types in ((SLIDING, FULL, FULL), (SLIDING, FULL, FULL) * 2 + (SLIDING,))
    )
    assert written_out(of_three) == written_out(of_all) and differing_fields(
        "model", of_three, of_all
    )


def test_layers_may_be_of_several_kinds():
    config = Qwen3MoeConfig(
        num_layers=7,
        attention=AttentionConfig(window=16, layer_types=(FULL,) * 3 + (SLIDING,) * 4),
        experts=ExpertsConfig(dense_layers=(0, 6)),
    )
    assert config.pattern == (
        "dense",
        *["sparse"] * 2,
        *["sliding_sparse"] * 3,
        "sliding_dense",
    )
    assert not config.kind_of(6).sparse and config.kind_of(6).window == 16
    assert config.layers_of("sliding_sparse") == [3, 4, 5]
    assert [*config.kinds] == [*dict.fromkeys(config.pattern)]


def test_kinds_that_differ_in_more_than_their_name_have_stacks_of_their_own(
    monkeypatch,
):
    windows, widths = (16, 8, 16, 16, None), (32, 32, 32, 8, 8)

    @dataclasses.dataclass(frozen=True)
    class OfWidth(LayerKind):
        width: int = 0

    def init_layer(config, kind, *, key):
        attention = dataclasses.replace(config.attention, head_dim=kind.width)
        narrow = dataclasses.replace(config, attention=attention)
        return Qwen3Layer.init(narrow, kind, key=key)

    monkeypatch.setattr(
        Qwen3Config,
        "kind_of",
        lambda _, number: OfWidth(window=windows[number], width=widths[number]),
    )
    monkeypatch.setattr(Qwen3Config, "init_layer", init_layer)
    config, Vocab = Qwen3Config(num_layers=5), Axis("vocab", 9)
    assert config.pattern == (
        "sliding_dense",
        "sliding_dense_2",
        "sliding_dense",
        "sliding_dense_3",
        "dense",
    )
    stacks = eqx.filter_eval_shape(
        Decoder.init, config, Vocab, key=jax.random.key(0)
    ).stacks
    attention = {name: stack.stacked.attention for name, stack in stacks.items()}
    found = {
        name: (one.window, one.q_norm.weight.size) for name, one in attention.items()
    }
    expected = {
        "sliding_dense": (16, 64),
        "sliding_dense_2": (8, 32),
        "sliding_dense_3": (16, 8),
    }
    assert found == expected | {"dense": (None, 8)}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            AttentionConfig,
            {"window": 0},
            "model.attention.window must be at least 1, got 0",
        ),
        (
            AttentionConfig,
            {"layer_types": (SLIDING,)},
            "model.attention.window is of layers of the type",
        ),
        (
            AttentionConfig,
            {"window": 3, "layer_types": (FULL,)},
            "Give both, or neither",
        ),
        (
            Qwen3MoeConfig,
            {"num_kv_heads": 3},
            "num_heads = 4 must be a multiple of model.num_kv_heads = 3",
        ),
        (
            Qwen3MoeConfig,
            {"hidden_dim": 30},
            "hidden_dim = 30 is not divisible .*model.attention.head_dim",
        ),
        (
            Qwen3MoeConfig,
            {"hidden_dim": 12},
            "hidden_dim / model.num_heads = 3 must be even",
        ),
        (
            Qwen3MoeConfig,
            {"attention": AttentionConfig(head_dim=5)},
            "attention.head_dim = 5 must be even",
        ),
        (
            Qwen3MoeConfig,
            {"experts": ExpertsConfig(dense_layers=(2, 1))},
            "must be .* in increasing order",
        ),
        (
            Qwen3MoeConfig,
            {"mlp_dim": 8},
            "model.mlp_dim has no effect where all layers have experts",
        ),
        (
            Qwen3MoeConfig,
            {"compute_dtype": "float16"},
            "one of float32, bfloat16, got 'float16'",
        ),
        (
            ExpertsConfig,
            {"num_experts": 2, "experts_per_token": 3},
            "experts_per_token = 3 is more than",
        ),
        (
            ExpertsConfig,
            {"experts_per_token": 0},
            "model.experts.experts_per_token must be at least 1",
        ),
        (
            ExpertsConfig,
            {"load_balance_weight": -0.1},
            "load_balance_weight must be at least 0",
        ),
        (ExpertsConfig, {"z_loss_weight": -0.1}, "z_loss_weight must be at least 0"),
    ],
)
def test_impossible_values_are_refused(config, changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_scaling_is_read_and_written_under_names_of_hugging_face():
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    entries = {"type": "qwen3", "rotary": {"theta": 100.0, "scaling": scaling}}
    config = decode_config(DecoderConfig, entries, "there")
    assert isinstance(config, Qwen3Config) and config.rotary.scaling == YarnRotary(
        4.0, 1024
    )
    written = config_as_dict(config)
    assert (
        written["rotary"]["scaling"] == scaling
        and decode_config(DecoderConfig, written, "there") == config
    )


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "yarn", "factor": 4.0},
            "scaling needs original_max_position_embeddings",
        ),
        (3, "model.rotary.scaling needs rope_type and its fields; got 3"),
        (
            {"rope_type": "dynamic"},
            (
                r"'dynamic' is not supported. Those that are: default, linear, llama3,"
                r" yarn"
            ),
        ),
    ],
)
def test_unsupported_scaling_is_refused(scaling, message):
    entries = {"type": "qwen3", "rotary": {"scaling": scaling}}
    with pytest.raises(ConfigError, match=message):
        decode_config(DecoderConfig, entries, "there")


def test_the_kernels_are_those_of_the_library():
    kernels = get_args(get_type_hints(AttentionConfig)["backend"])
    assert set(kernels) == {"auto", *BACKENDS}
    backends = get_args(get_type_hints(ExpertsConfig)["backend"])
    assert set(backends) == {"auto", *EXPERT_BACKENDS}
    strange: Any = "flash"
    with pytest.raises(
        ValueError, match="model.attention.backend must be one of auto, cudnn"
    ):
        AttentionConfig(backend=strange)
    gone: Any = "triton"
    with pytest.raises(
        ValueError,
        match="experts.backend must be one of auto, megablox, tokamax, block",
    ):
        ExpertsConfig(backend=gone)


@pytest.mark.parametrize("field", ["save_block_internals", "offload_block_internals"])
def test_policies_for_what_no_layer_has_are_refused(field):
    policy = ScanCheckpointPolicy(**{field: ("attention_output", "atention_lse")})
    with pytest.raises(
        ValueError,
        match=rf"remat.{field} has 'atention_lse'.* Valid: query, key, value",
    ):
        check_remat_names(Qwen3Config().remat_names, policy)
    routed = ScanCheckpointPolicy(**{field: ("router_gates",)})
    check_remat_names(Qwen3MoeConfig().remat_names, routed)
    dense = Qwen3MoeConfig(experts=ExpertsConfig(dense_layers=(0, 1, 2, 3)))
    with pytest.raises(ValueError, match="has 'router_gates'"):
        check_remat_names(dense.remat_names, routed)
    with pytest.raises(
        ValueError, match=r"Valid: none \(with model.tiles nothing has a name\)"
    ):
        check_remat_names(Qwen3MoeConfig(tiles=2).remat_names, routed)
    check_remat_names(
        Qwen3Config().remat_names, ScanCheckpointPolicy(save_block_internals=True)
    )


def test_places_are_no_names_and_names_with_spaces_are_no_places():
    names = Qwen3Config().remat_names
    check_remat_names(names, ScanCheckpointPolicy(save_block_internals=["dot 1/2"]))
    wrong = ScanCheckpointPolicy(save_block_internals=["attention output"])
    with pytest.raises(ValueError, match="has 'attention output'"):
        check_remat_names(names, wrong)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: GraniteConfig(logits_scaling=0.0), "logits_scaling must be above 0"),
        (lambda: Gemma2Config(query_pre_attn_scalar=0), "query_pre_attn_scalar must"),
        (lambda: Gemma2Config(score_softcap=-1.0), "score_softcap must be above 0"),
        (lambda: Gemma2Config(output_softcap=0.0), "output_softcap must be above 0"),
        (lambda: Gemma3Config(query_pre_attn_scalar=-1), "query_pre_attn_scalar must"),
        (
            lambda: Glm4MoeConfig(partial_rotary_factor=0.0),
            "partial_rotary_factor = 0.0 of the head width 32 is 0 coordinates",
        ),
        (
            lambda: MiniMaxM2Config(partial_rotary_factor=2.0),
            "is 64 coordinates. An even number from 2 to 32",
        ),
        (
            lambda: SmolLM3Config(unrotated_layers=(1, 0)),
            r"unrotated_layers = \[1, 0\] must be from 0 to 3, in increasing order",
        ),
        (
            lambda: SmolLM3Config(unrotated_layers=(7,)),
            r"unrotated_layers = \[7\] must be from 0 to 3, in increasing order",
        ),
    ],
)
def test_fields_of_one_family_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()
