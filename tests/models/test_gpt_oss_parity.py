"""What gpt-oss alone has, against transformers' implementation: MXFP4, adapters of halves of a parameter."""

import json
import warnings

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.hf_io.decoder_weights import read_decoder
from models.hf_io.formats import read_hf_config
from models.hf_io.safetensors_folder import SINGLE

from .test_parity import (
    Vocab,
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


def test_mxfp4_is_read_as_transformers_dequantizes_it(tmp_path):
    """Blocks of 32 values: hidden and inner widths are multiples of it."""
    fields = SMALL | dict(hidden_size=64, intermediate_size=32, num_hidden_layers=2)
    reference, rng = new_model("GptOss", fields), np.random.default_rng(0)
    reference.save_pretrained(tmp_path)
    tensors, stored = load_file(tmp_path / SINGLE), {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        experts, narrow, wide = tensor.shape
        blocks = rng.integers(0, 256, (experts, wide, narrow // 32, 16), np.uint8)
        scales = rng.integers(120, 128, (experts, wide, narrow // 32), np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
        reference.get_parameter(name).data = values.to(torch.float32)
    save_file(stored, tmp_path / SINGLE, metadata={"format": "pt"})
    document = json.loads((tmp_path / "config.json").read_text())
    document["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(document))
    config, _ = read_hf_config(tmp_path)
    found = read_decoder(tmp_path, config, Vocab)
    expected = decoder_from(reference, tmp_path / "dequantized")
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    close(logits(found), hf_logits(reference))


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
