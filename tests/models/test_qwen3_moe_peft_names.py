"""The names that PEFT gives to the adapters of the decoder's linears."""

import dataclasses

import pytest

from models.decoder.config import ExpertsConfig
from models.hf_io.adapters import peft_names
from models.qwen3 import Qwen3Config, Qwen3MoeConfig
from stacked_remat.lora import PeftParameter

CONFIG = Qwen3MoeConfig(num_layers=5, experts=ExpertsConfig(3, 2, 6, dense_layers=(0, 3)))


@pytest.mark.parametrize(
    ("path", "index", "name"),
    [
        ("layers.dense.*.attention.q_proj", (1,), "model.layers.3.self_attn.q_proj"),
        ("layers.dense.*.mlp.down_proj", (0,), PeftParameter("model.layers.0.mlp.down_proj", "weight")),
        ("layers.sparse.*.attention.o_proj", (1,), "model.layers.2.self_attn.o_proj"),
        ("layers.sparse.*.mlp.router", (0,), PeftParameter("model.layers.1.mlp.gate", "weight")),
        (
            "layers.sparse.*.mlp.experts.*.up_proj",
            (2, 2),
            PeftParameter("model.layers.4.mlp.experts", "gate_up_proj", 2, 3, rows=(6, 12, 1)),
        ),
        ("head", (), "lm_head"),
    ],
)
def test_layers_have_their_numbers_in_the_model(path, index, name):
    assert peft_names(CONFIG)(path, index) == name


def test_experts_may_have_separate_names():
    names = peft_names(CONFIG, "separate")
    assert names("layers.sparse.*.mlp.experts.*.up_proj", (1, 2)) == "model.layers.2.mlp.experts.2.up_proj"


def test_a_dense_decoder_has_names_too():
    names = peft_names(dataclasses.replace(Qwen3Config(), num_layers=2))
    assert names("layers.*.mlp.gate_proj", (1,)) == "model.layers.1.mlp.gate_proj"


@pytest.mark.parametrize(
    "path",
    ["embedding", "layers.dense.*.norm", "layers.dense.*.mlp.experts.up_proj", "layers.*.attention.q_proj"],
)
def test_paths_of_no_linear_map_are_refused(path):
    with pytest.raises(ValueError, match="is not a linear map of"):
        peft_names(CONFIG)(path, (0,))
