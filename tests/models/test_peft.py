"""Kinds of adapters that PEFT has, of models with experts."""

import copy
import warnings

import pytest

from models.hf_io.adapters import save_adapters
from stacked_remat.lora import merge_lora

from .architecture_cases import CASES
from .test_parity import (
    ATTENTION,
    EXPERTS,
    adapted_at_random,
    check_that_peft_reads,
    check_that_we_read,
    close,
    decoder_from,
    hf_logits,
    logits,
    new_model,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

# Expert width and model width differ, and no two ranks are alike, so that nothing fits
# by accident.
SMALL = dict(
    hidden_size=16,
    num_hidden_layers=3,
    intermediate_size=14,
    mlp_only_layers=[1],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    num_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=10,
    norm_topk_prob=True,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    reference = new_model("Qwen3Moe", SMALL)
    return reference, decoder_from(reference, tmp_path_factory.mktemp("small"))


PEFT_CONFIGS = {
    "rank-stabilised": {"target_modules": ["q_proj"], "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj", "o_proj"],
        "rank_pattern": {"layers.2.self_attn.q_proj": 5},
        "alpha_pattern": {"o_proj": 7},
    },
    "some layers": {"target_modules": ["v_proj"], "layers_to_transform": [2]},
    "down alone": {"target_modules": [], "target_parameters": ["experts.down_proj"]},
    "head, with its weight": {"target_modules": ["q_proj", "lm_head"]},
    "all": {
        "target_modules": ATTENTION,
        "target_parameters": [*EXPERTS, "mlp.gate.weight"],
    },
}


@pytest.mark.parametrize("fields", PEFT_CONFIGS.values(), ids=PEFT_CONFIGS)
def test_what_peft_writes_we_read(small, tmp_path, fields):
    reference, decoder = small
    check_that_we_read(reference, decoder, tmp_path, **fields)


@pytest.mark.parametrize("target", ["*.gate_proj", "layers.dense.*.mlp.*", "head"])
def test_what_we_write_peft_reads_and_we_read_back(small, tmp_path, target):
    reference, decoder = small
    check_that_peft_reads(reference, decoder, tmp_path, (target,))


def test_gate_and_up_that_alternate_are_adapted_alone(tmp_path):
    reference = new_model(*CASES["gpt-oss"])
    decoder = decoder_from(reference, tmp_path / "weights")
    only = dict(target_modules=[], target_parameters=["experts.gate_up_proj"])
    check_that_we_read(reference, decoder, tmp_path / "read", **only)
    check_that_peft_reads(reference, decoder, tmp_path / "written", ("*.up_proj",))


def test_what_we_write_is_merged_alike(small, tmp_path):
    reference, decoder = small
    model = adapted_at_random(decoder, ("layers.*", "head"))
    save_adapters(tmp_path, model)
    merged = peft.PeftModel.from_pretrained(
        copy.deepcopy(reference), tmp_path
    ).merge_and_unload()
    close(logits(merge_lora(model)), hf_logits(merged.eval()), 2e-5)
