"""Every file in models/configs is a valid config and says what it needs."""

import dataclasses
import json
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from models.decoder.config import DecoderConfig
from models.deepseek_v3 import DeepseekV3Config
from models.hf_io.formats import config_to_hf, written_out
from models.lm import next_token_loss
from models.run_config import LmRunConfig
from models.run_state import batch_shapes, run_optimizer, state_shapes
from stacked_remat.training import Partitioning, TrainStep, parse_config

FOLDER = Path(__file__).resolve().parents[2] / "models" / "configs"
CONFIGS = sorted(FOLDER.glob("**/*.yaml"))
PARAMETERS = {  # as published
    "qwen3_0_6b": 596_049_920,
    "qwen3_30b_a3b_65k_lora": 30_532_122_624,
    "qwen3_235b_a22b_65k_lora": 235_093_634_560,
    "gpt_oss_20b_65k_lora": 20_914_757_184,
    "llama_3_1_8b_65k_lora": 8_030_261_248,
    "qwen2_5_7b_65k_lora": 7_615_616_512,
    "qwen3_8b_65k_lora": 8_190_735_360,
    "gemma_3_1b_65k_lora": 999_885_952,
    "olmo_3_7b_65k_lora": 7_298_011_136,
    "mistral_7b_65k_lora": 7_248_023_552,
    "mixtral_8x7b_65k_lora": 46_702_792_704,
    "phi_4_65k_lora": 14_659_507_200,
    "deepseek_v3_65k_lora": 671_026_419_200,
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


def toy(config):
    """The config with smaller sizes and tokens that are bytes."""
    model = config.model
    sizes = dict(hidden_dim=32, num_layers=6, num_heads=8)
    if not isinstance(model, DeepseekV3Config):  # whose heads are as wide as its vectors say
        sizes |= dict(num_kv_heads=4, attention=dataclasses.replace(model.attention, head_dim=8))
    else:
        sizes |= dict(num_kv_heads=8, num_groups=1, groups_per_token=1)
    if model.mlp_dim is not None:
        sizes["mlp_dim"] = 64
    if model.sparse is not None:
        experts = dict(num_experts=4, experts_per_token=2, intermediate_dim=8, load_balance_weight=0.01)
        sizes["experts"] = dataclasses.replace(model.sparse, **experts)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(model, **sizes),
        data=dataclasses.replace(config.data, tokenizer="byte", seq_len=32),
        vocab_size=260,
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_model_of_its_kind_can_be_trained_from_random_and_from_published_weights(
    path, standard_promotion, tmp_path
):
    config = toy(parse_config(LmRunConfig, ["--config_path", str(path)]))
    alone = dataclasses.replace(config, initialize_from_hf=None).resolved()
    assert isinstance(config.model, DecoderConfig) and isinstance(alone.model, DecoderConfig)
    published = config_to_hf(config.model, 260, dtype="bfloat16") | {"output_router_logits": False}
    (tmp_path / "config.json").write_text(json.dumps(published))
    started = dataclasses.replace(config, initialize_from_hf=str(tmp_path))
    own = {"model": written_out(alone.model), "initialize_from_hf": str(tmp_path)}
    assert started.resolved() == dataclasses.replace(alone, **own)
    # The same where only what the folder doesn't decide is written.
    own = type(config.model)(tiles=config.model.tiles, compute_dtype=config.model.compute_dtype)
    taken = dataclasses.replace(started, model=own).resolved().model
    assert isinstance(taken, DecoderConfig)
    assert taken.sparse is None or taken.sparse.load_balance_weight in (0, None)  # the folder turns it off
    sparse = {} if taken.sparse is None else {"experts": alone.model.sparse}
    assert dataclasses.replace(taken, **sparse) == written_out(alone.model)

    partitioning = Partitioning.of(alone.trainer.mesh, jax.devices()[:1])
    step = TrainStep.of(
        alone.trainer,
        loss_function=next_token_loss,
        optimizer=run_optimizer(alone),
        partitioning=partitioning,
    )
    state, batch = state_shapes(alone, partitioning), batch_shapes(alone.data, partitioning)
    with partitioning.active():
        after, metrics = eqx.filter_eval_shape(step, batch, state)
    assert jax.tree.structure(after) == jax.tree.structure(state) and metrics["loss"].shape == ()
