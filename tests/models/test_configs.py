"""Every file in models/configs is a valid config and says what it needs."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import jax
import jax.numpy as jnp
import pytest

from models.hf_io.formats import config_to_hf, differing_fields
from models.loading import tokenizer_remark
from models.qwen3 import Qwen3Config
from models.run_config import LmRunConfig
from models.run_state import state_shapes
from stacked_remat.training import ConfigError, DataConfig, parse_config

from ..training.data import word_tokenizer
from .test_published_configs import PUBLISHED

FOLDER = Path(__file__).resolve().parents[2] / "models" / "configs"
CONFIGS = sorted(FOLDER.glob("**/*.yaml"))
PARAMETERS = {  # as published
    "qwen3_0_6b": 596_049_920,
    "qwen3_30b_a3b_65k_lora": 30_532_122_624,
    "qwen3_235b_a22b_65k_lora": 235_093_634_560,
    "qwen3_8b_65k_lora": 8_190_735_360,
}
AS_PUBLISHED = {
    "gpt_oss_20b_65k_lora": "gpt-oss 20b",
    "llama_3_1_8b_65k_lora": "Llama 3.1 8B",
    "qwen2_5_7b_65k_lora": "Qwen2.5 7B",
    "gemma_3_1b_65k_lora": "Gemma 3 1B",
    "olmo_3_7b_65k_lora": "OLMo 3 7B",
    "mistral_7b_65k_lora": "Mistral 7B v0.3",
    "mixtral_8x7b_65k_lora": "Mixtral 8x7B",
    "phi_4_65k_lora": "Phi-4",
    "deepseek_v3_65k_lora": "DeepSeek V3",
    "smollm3_3b_65k_lora": "SmolLM3 3B",
    "granite_3_1_8b_65k_lora": "Granite 3.1 8B",
    "command_r7b_65k_lora": "Command R7B",
    "gemma_2_2b_65k_lora": "Gemma 2 2B",
    "glm_4_5_air_65k_lora": "GLM-4.5-Air",
    "minimax_m2_65k_lora": "MiniMax-M2",
    "lfm2_1_2b_65k_lora": "LFM2 1.2B",
    "lfm2_8b_a1b_65k_lora": "LFM2 8B-A1B",
    "kimi_linear_48b_65k_lora": "Kimi Linear 48B",
    "qwen3_next_80b_a3b_65k_lora": "Qwen3-Next 80B-A3B",
    "granite_4_h_tiny_65k_lora": "Granite 4 H Tiny",
}


def shapes_of(path):
    """The shapes of the state that training begins with; nothing is read but the config
    file.
    """
    config = parse_config(LmRunConfig, ["--config_path", str(path)]).resolved(
        check_folder=False
    )
    return config, state_shapes(config)


def size(tree):
    shapes = [
        leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    return sum(
        shape.size for shape in shapes if jnp.issubdtype(shape.dtype, jnp.inexact)
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_is_a_config_of_the_command_whose_model_can_be_made(
    path, standard_promotion
):
    config, state = shapes_of(path)
    adapters = size(state.trained) if config.lora is not None else 0
    parameters = size(state.model) - adapters
    assert parameters > 0
    if path.stem in PARAMETERS:
        assert parameters == PARAMETERS[path.stem]


def test_a_budget_is_in_bytes_or_in_text():
    budgets = ["--remat", "auto", "--budget", "77309411328", "--host_budget", "1TiB"]
    config = parse_config(LmRunConfig, budgets)
    assert (config.budget, config.host_budget) == (72 * 2**30, "1TiB")
    with pytest.raises(ConfigError, match="`--budget` on the command line has no val"):
        parse_config(LmRunConfig, ["--remat", "auto", "--budget"])


def test_the_published_sizes_are_of_configs_that_exist():
    assert {*PARAMETERS} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_begins_with_what_it_is_and_what_it_needs(path):
    comment = re.match(r"(#.*\n)+", path.read_text(encoding="utf-8"))
    assert comment is not None and re.search(r"\d GiB", comment[0])


@pytest.mark.parametrize(("stem", "name"), AS_PUBLISHED.items())
def test_it_has_the_architecture_of_the_folder_that_it_begins_with(
    stem, name, tmp_path, monkeypatch
):
    """Which fields that a run decides may change; where it says nothing, all others are
    the folder's.
    """
    monkeypatch.setattr(
        "models.run_config.load_tokenizer",
        lambda *_, rows: SimpleNamespace(vocab_size=9),
    )
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name][0]))
    config = parse_config(LmRunConfig, ["--config_path", str(FOLDER / f"{stem}.yaml")])
    config = dataclasses.replace(config, initialize_from_hf=str(tmp_path))
    own = type(config.model)(tiles=config.model.tiles, compute_dtype="bfloat16")
    silent = dataclasses.replace(config, model=own, vocab_size=None)
    resolved, taken = config.resolved().model, silent.resolved().model
    assert (
        differing_fields("model", taken, resolved) == []
        and taken.tiles == resolved.tiles
    )
    assert (taken.compute_dtype, silent.resolved().vocab_size) == (
        "bfloat16",
        config.vocab_size,
    )


@pytest.fixture
def folder(tmp_path):
    """A tiny model with a tokenizer of its own."""
    model = Qwen3Config(hidden_dim=8, num_layers=1, num_heads=2, num_kv_heads=1)
    (tmp_path / "config.json").write_text(
        json.dumps(config_to_hf(model, 400, dtype="float32"))
    )
    return word_tokenizer.save(tmp_path)


def test_the_tokenizer_is_that_of_the_model_that_a_run_begins_with(folder, tmp_path):
    def resolved(begin, **data):
        return LmRunConfig(initialize_from_hf=begin, data=DataConfig(**data)).resolved()

    own = resolved(str(folder))
    assert own.tokenizer_name == str(folder) == tokenizer_remark(own)
    kept = resolved(str(folder), tokenizer="byte")
    assert kept.tokenizer_name == "byte" and kept.vocab_size == 400
    assert tokenizer_remark(kept).startswith(
        f"byte, as data.tokenizer says, and not that of {folder}"
    )
    new = resolved(None)
    assert (new.tokenizer_name, new.vocab_size, tokenizer_remark(new)) == (
        "byte",
        257,
        "byte",
    )
    # As for a plan
    silent = LmRunConfig(initialize_from_hf=str(folder)).resolved(check_folder=False)
    assert silent.vocab_size == 400 and silent.tokenizer_name == str(folder)

    adapters = tmp_path / "adapters"
    adapters.mkdir()
    settings = {"base_model_name_or_path": str(folder)}
    (adapters / "adapter_config.json").write_text(json.dumps(settings))
    assert resolved(str(adapters)).tokenizer_name == str(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).rename(adapters / file)
    assert resolved(str(adapters)).tokenizer_name == str(adapters)
    bare = resolved(str(folder))
    assert (
        tokenizer_remark(bare)
        == f"byte, since {folder} has no tokenizer; data.tokenizer names another"
    )
    for name in ("tokenizer.model", "tekken.json", "vocab.json"):
        (folder / name).write_text("{}")
        with pytest.raises(
            ConfigError,
            match=rf"has no tokenizer.json, but {name}, which is not read. Convert",
        ):
            resolved(str(folder))
        assert resolved(str(folder), tokenizer=str(adapters)).tokenizer_name == str(
            adapters
        )
        (folder / name).unlink()


def test_the_tokenizer_of_a_model_on_the_hub_is_named_as_there(folder, monkeypatch):
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: str(folder)
    )
    begun = LmRunConfig(initialize_from_hf="owner/model@v1").resolved()
    assert begun.tokenizer_name == "owner/model@v1" and begun.vocab_size == 400
