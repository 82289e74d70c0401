"""The architecture of a folder, and what of a config a run decides."""

import dataclasses
import json
import re

import pytest
import yaml

from models.gpt_oss import GptOssConfig
from models.hf_io.formats import (
    config_to_hf,
    differing_fields,
    pretrained_config,
    read_hf_config,
    written_out,
)
from models.parts.sections import (
    FULL,
    SLIDING,
    AttentionConfig,
    ExpertsConfig,
    RotaryConfig,
)
from models.qwen3 import Qwen3Config
from models.qwen3_moe import Qwen3MoeConfig
from models.run_config import LmRunConfig
from stacked_remat.ops import YarnRotary
from stacked_remat.training import ConfigError, config_as_dict, parse_config

WINDOWED = AttentionConfig(head_dim=8, window=5, layer_types=(SLIDING, FULL))
SIZES = dict(
    hidden_dim=32,
    num_heads=8,
    num_kv_heads=4,
    attention=WINDOWED,
    rotary=RotaryConfig(100.0),
)
EXPERTS = ExpertsConfig(load_balance_weight=0.2)
CONFIGS = [
    Qwen3Config(**SIZES, mlp_dim=64),
    Qwen3MoeConfig(
        **SIZES | {"attention": AttentionConfig(head_dim=8, window=5)},
        mlp_dim=64,
        experts=dataclasses.replace(EXPERTS, dense_layers=(0,)),
    ),
    GptOssConfig(**SIZES, experts=EXPERTS),
]
OTHER = {
    "hidden_dim": 16,
    "num_layers": 5,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_dim": 48,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
    "attention.head_dim": 2,
    "attention.bias": True,
    "attention.window": 4,
    "attention.layer_types": (FULL, SLIDING),
    "rotary.theta": 50.0,
    "rotary.scaling": YarnRotary(2.0, 64),
    "rotary.max_position_embeddings": 64,
    "experts.num_experts": 4,
    "experts.experts_per_token": 1,
    "experts.intermediate_dim": 16,
    "experts.norm_topk_prob": False,
    "experts.dense_layers": (1,),
}
"""Another value for each field that a folder decides."""
OF_RUN = {
    "initializer_range": 0.5,
    "tiles": 2,
    "compute_dtype": "bfloat16",
    "attention.backend": "exact",
    "experts.load_balance_weight": 0.3,
    "experts.load_balance_loss": "pooled",
    "experts.z_loss_weight": 0.1,
    "experts.backend": "block",
    "experts.router_dtype": "float32",
}
"""The same for each that a run decides."""
FIXED = {  # in no folder of that architecture
    Qwen3MoeConfig: ("attention.layer_types",),
    GptOssConfig: ("mlp_dim", "experts.norm_topk_prob", "experts.dense_layers"),
}


def names(config, before=""):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name != "scaling" and dataclasses.is_dataclass(value):
            yield from names(value, f"{before}{field.name}.")
        else:
            yield before + field.name


def changed(config, name, value):
    first, _, rest = name.partition(".")
    return dataclasses.replace(
        config,
        **{first: changed(getattr(config, first), rest, value) if rest else value},
    )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_every_field_is_the_folders_or_the_runs(config, tmp_path):
    """A field that belongs to neither would refuse every config that sets it."""
    assert {*names(CONFIGS[1])} == {*OTHER, *OF_RUN}
    (tmp_path / "config.json").write_text(
        json.dumps(config_to_hf(config, 99, dtype="float32"))
    )
    for name in set(names(config)) - {*FIXED.get(type(config), ())}:
        wanted = changed(config, name, (OTHER | OF_RUN)[name])
        found = pretrained_config(wanted, read_hf_config(tmp_path)[0])
        differing = differing_fields("model", written_out(wanted), written_out(found))
        if name in OF_RUN:
            assert differing == []
            assert written_out(found) == written_out(wanted)
        elif name != "rotary.scaling":  # stretches the folder's context
            assert f"model.{name}" in [line.split(":")[0] for line in differing]


def lines(tree, before=""):
    """The dotted keys of a config and their values."""
    for key, value in tree.items():
        if isinstance(value, dict) and value and key != "scaling":
            yield from lines(value, f"{before}{key}.")
        else:
            yield before + key, value


def nested(dotted, value):
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return value


PLACES = ("file", "include", "command line")


def model_of(folder, keys, place="file"):
    """The model of a run that writes these keys, in one place or another, and begins
    with a folder.
    """
    tree = {"initialize_from_hf": str(folder), "model": {"type": "qwen3_moe"} | keys}
    main, included, arguments = folder / "run.yaml", folder / "included.yaml", []
    included.write_text(yaml.safe_dump(tree))
    if place == "command line":
        arguments = [
            text
            for key, value in lines(tree)
            for text in (f"--{key}", json.dumps(value))
        ]
        tree = {}
    text = (
        "<<: !include included.yaml\n"
        if place == "include"
        else yaml.safe_dump(tree | {"z_loss": 0.1})
    )
    main.write_text(text)
    return (
        parse_config(LmRunConfig, ["--config_path", str(main), *arguments])
        .resolved()
        .model
    )


@pytest.fixture(scope="module")
def unusual(tmp_path_factory):
    """A folder that has the default of no field."""
    folder = tmp_path_factory.mktemp("unusual")
    config = Qwen3MoeConfig(
        hidden_dim=16,
        num_layers=5,
        num_heads=2,
        num_kv_heads=1,
        attention=AttentionConfig(head_dim=10, bias=True, window=5),
        mlp_dim=40,
        rotary=RotaryConfig(50.0, YarnRotary(2.0, 64), 64),
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        experts=ExpertsConfig(4, 1, 16, norm_topk_prob=False, dense_layers=(1,)),
    )
    (folder / "config.json").write_text(
        json.dumps(config_to_hf(config, 300, dtype="float32"))
    )
    return folder, config


def test_a_model_that_is_written_with_the_defaults_is_not_taken_for_the_folders(
    unusual,
):
    folder, config = unusual
    usual = dict(lines(config_as_dict(Qwen3MoeConfig())))
    of_folder = [
        key
        for key in names(config)
        if key not in OF_RUN and key != "attention.layer_types"
    ]
    assert len(of_folder) == 18
    for number, key in enumerate(of_folder):
        with pytest.raises(
            ConfigError,
            match=rf"(?s)not the one in .*{re.escape(key)}.*: .* in the config",
        ):
            model_of(folder, nested(key, usual[key]), PLACES[number % 3])
    # Others differ too, by their defaults.
    with pytest.raises(ConfigError) as caught:
        model_of(folder, nested("num_layers", usual["num_layers"]))
    said = str(caught.value)
    assert said.count(" in the config, ") == said.count("  model.num_layers: ") == 1
    assert f"model.hidden_dim: {usual['hidden_dim']} by default, " in said
    for key, value in OF_RUN.items():
        found = model_of(folder, nested(key, value))
        expected = changed(found, key, getattr(found, key, value))
        assert (
            found == expected
            and differing_fields("model", found, written_out(config)) == []
        )


def test_a_written_model_that_is_the_folders_is_taken(unusual):
    folder, config = unusual
    expected = model_of(folder, {})
    assert differing_fields("model", expected, written_out(config)) == []
    for place in PLACES:
        whole = yaml.safe_load(yaml.safe_dump(config_as_dict(expected)))
        assert model_of(folder, whole, place) == expected
    assert LmRunConfig(initialize_from_hf=str(folder)).resolved().model == expected


def test_a_model_written_in_python_is_not_taken_for_the_folders(unusual):
    """Arguments that are the defaults are written too, as in a file."""
    folder, config = unusual
    model_of_run = Qwen3MoeConfig(tiles=2, attention=AttentionConfig(backend="exact"))

    def resolved(model):
        return LmRunConfig(model=model, initialize_from_hf=str(folder)).resolved().model

    found = resolved(model_of_run)
    assert differing_fields("model", found, written_out(config)) == []
    assert (found.tiles, found.attention.backend) == (2, "exact")
    assert resolved(found) == found and resolved(config).num_layers == 5
    for model in (
        Qwen3MoeConfig(num_layers=4),
        Qwen3MoeConfig(128, 4),
        Qwen3MoeConfig(experts=ExpertsConfig(num_experts=8)),
        dataclasses.replace(model_of_run, tiles=4),
    ):
        with pytest.raises(ConfigError, match="not the one in .*"):
            resolved(model)


def test_a_type_that_is_written_is_the_folders(unusual):
    folder, _ = unusual
    begins = ["--initialize_from_hf", str(folder), "--model.hidden_dim", "64"]
    with pytest.raises(
        ConfigError, match=f"lacks .* of {folder}: leave .* too, `type: qwen3_moe`"
    ):
        parse_config(LmRunConfig, begins)
    with pytest.raises(
        ConfigError, match="model.type: llama in the config, qwen3_moe in the folder"
    ):
        model_of(folder, {"type": "llama", "tiles": 2})
    with pytest.raises(ConfigError, match="model.type: qwen3 in the config"):
        LmRunConfig(model=Qwen3Config(), initialize_from_hf=str(folder)).resolved()


def test_a_longer_context_changes_nothing_else_of_the_folder(unusual):
    folder, config = unusual
    scaling = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    }
    expected = dataclasses.replace(config.rotary, scaling=YarnRotary(8.0, 64))
    assert model_of(folder, {"rotary": {"scaling": scaling}}).rotary == expected
    longer = {"scaling": scaling, "max_position_embeddings": 512}
    found = model_of(folder, {"rotary": longer | {"theta": 50.0}}).rotary
    assert found == dataclasses.replace(expected, max_position_embeddings=512)
    with pytest.raises(
        ConfigError, match=r"rotary.theta: 1000000.0 in the config, 50.0 in the folder"
    ):
        model_of(folder, {"rotary": longer | {"theta": 1_000_000.0}})
