"""Every file in models/configs is a valid config and says what it needs."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from models.run_config import LmRunConfig
from models.run_state import state_shapes
from stacked_remat.training import parse_config

FOLDER = Path(__file__).resolve().parents[2] / "models" / "configs"
CONFIGS = sorted(FOLDER.glob("**/*.yaml"))
PARAMETERS = {  # as published
    "qwen3_0_6b": 596_049_920,
    "qwen3_30b_a3b_65k_lora": 30_532_122_624,
    "qwen3_235b_a22b_65k_lora": 235_093_634_560,
    "gpt_oss_20b_65k_lora": 20_914_757_184,
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
    assert parameters == PARAMETERS.get(path.stem, parameters) > 0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_begins_with_what_it_is_and_what_it_needs(path):
    comment = re.match(r"(#.*\n)+", path.read_text(encoding="utf-8"))
    assert comment is not None and re.search(r"\d GiB", comment[0])
