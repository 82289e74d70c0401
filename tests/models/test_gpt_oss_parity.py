"""What gpt-oss alone has, against transformers' implementation: MXFP4, adapters of halves of a parameter."""

import warnings

import pytest

from .test_parity import (
    check_that_peft_reads,
    check_that_we_read,
    decoder_from,
    new_model,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "truncate": False}
SMALL = dict(
    hidden_size=32,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    sliding_window=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    rope_parameters=YARN | dict(rope_theta=100.0),
)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    reference = new_model("GptOss", SMALL)
    return reference, decoder_from(reference, tmp_path_factory.mktemp("small"))


def test_adapters_of_gate_and_up_alone_are_read(small, tmp_path):
    reference, decoder = small
    only = dict(target_modules=[], target_parameters=["experts.gate_up_proj"])
    check_that_we_read(reference, decoder, tmp_path, **only)


def test_the_adapters_of_up_alone_are_read_by_peft_and_read_back(small, tmp_path):
    reference, decoder = small
    check_that_peft_reads(reference, decoder, tmp_path, ("*.up_proj",))
