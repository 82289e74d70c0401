"""Every file in models/configs is a valid config and says what it needs."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from models.hf_io.formats import differing_fields
from models.run_config import LmRunConfig
from models.run_state import state_shapes
from stacked_remat.training import parse_config

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
}


def shapes_of(path):
    """The shapes of the state that training begins with; nothing is read but the config file."""
    config = parse_config(LmRunConfig, ["--config_path", str(path)]).resolved(check_folder=False)
    return config, state_shapes(config)


def size(tree):
    shapes = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.ShapeDtypeStruct)]
    return sum(shape.size for shape in shapes if jnp.issubdtype(shape.dtype, jnp.inexact))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_is_a_config_of_the_command_whose_model_can_be_made(path, standard_promotion):
    config, state = shapes_of(path)
    adapters = size(state.trained) if config.lora is not None else 0
    parameters = size(state.model) - adapters
    assert parameters > 0
    if path.stem in PARAMETERS:
        assert parameters == PARAMETERS[path.stem]


def test_the_published_sizes_are_of_configs_that_exist():
    assert {*PARAMETERS} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_begins_with_what_it_is_and_what_it_needs(path):
    comment = re.match(r"(#.*\n)+", path.read_text(encoding="utf-8"))
    assert comment is not None and re.search(r"\d GiB", comment[0])


@pytest.mark.parametrize(("stem", "name"), AS_PUBLISHED.items())
def test_it_has_the_architecture_of_the_folder_that_it_begins_with(stem, name, tmp_path, monkeypatch):
    """Which fields that a run decides may change; where it says nothing, all others are the folder's."""
    monkeypatch.setattr("models.run_config.load_tokenizer", lambda *_, rows: SimpleNamespace(vocab_size=9))
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name][0]))
    config = parse_config(LmRunConfig, ["--config_path", str(FOLDER / f"{stem}.yaml")])
    config = dataclasses.replace(config, initialize_from_hf=str(tmp_path))
    own = type(config.model)(tiles=config.model.tiles, compute_dtype="bfloat16")
    silent = dataclasses.replace(config, model=own, vocab_size=None)
    resolved, taken = config.resolved().model, silent.resolved().model
    assert differing_fields("model", taken, resolved) == [] and taken.tiles == resolved.tiles
    assert (taken.compute_dtype, silent.resolved().vocab_size) == ("bfloat16", config.vocab_size)
