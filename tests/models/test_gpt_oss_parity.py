"""What gpt-oss alone has, against transformers' implementation: MXFP4, adapters of halves of a parameter."""

import copy
import json
import warnings

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from safetensors.numpy import load_file, save_file

from models.hf_io.adapters import load_adapters, save_adapters
from models.hf_io.decoder_weights import read_decoder
from models.hf_io.formats import read_hf_config
from models.hf_io.safetensors_folder import SINGLE
from stacked_remat.lora import LoraConfig, apply_lora, lora_filter

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

Vocab, Batch, Pos = Axis("vocab", 53), Axis("batch", 2), Axis("position", 11)
TOKENS = np.random.default_rng(0).integers(0, Vocab.size, (Batch.size, Pos.size))

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


def new_model(fields):
    config = transformers.GptOssConfig(
        vocab_size=Vocab.size,
        max_position_embeddings=64,
        attn_implementation="eager",
        experts_implementation="eager",
        **fields,
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide enough that some experts reach the limit of their SwiGLU.
            scale = 1.0 if "gate_up" in name else 0.2
            parameter.copy_(torch.randn_like(parameter) * scale + (1.0 if "norm" in name else 0.0))
    return model


def decoder_from(model, folder):
    """Ours, read from what Hugging Face's model saves."""
    model.save_pretrained(folder, max_shard_size="20KB")
    config, vocab_size = read_hf_config(folder)
    assert vocab_size == Vocab.size
    return read_decoder(folder, config, Vocab)


def logits(decoder):
    def run(decoder):
        hidden, _ = decoder.hidden_states(hax.named(jnp.asarray(TOKENS), (Batch, Pos)))
        return decoder.logits(hidden).array

    return np.asarray(eqx.filter_jit(run)(decoder))


def hf_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_mxfp4_is_read_as_transformers_dequantizes_it(tmp_path):
    """Blocks of 32 values: hidden and inner widths are multiples of it."""
    fields = SMALL | dict(hidden_size=64, intermediate_size=32, num_hidden_layers=2)
    reference, rng = new_model(fields), np.random.default_rng(0)
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


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
PEFT_CONFIGS = {
    "gate and up alone": dict(target_modules=[], target_parameters=EXPERTS[:1]),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    reference = new_model(SMALL)
    return reference, decoder_from(reference, tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("fields", PEFT_CONFIGS.values(), ids=PEFT_CONFIGS)
def test_what_peft_writes_we_read(small, tmp_path, fields):
    reference, decoder = small
    config = peft.LoraConfig(r=3, lora_alpha=5, lora_dropout=0.0, init_lora_weights=False, **fields)
    torch.manual_seed(1)
    model = peft.get_peft_model(copy.deepcopy(reference), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path)
    expected = hf_logits(model)
    assert np.abs(expected - hf_logits(reference)).max() > 1e-2
    close(logits(load_adapters(decoder, tmp_path)), expected)


def test_the_adapters_of_up_alone_are_read_by_peft_and_read_back(small, tmp_path):
    reference, decoder = small
    shapes = apply_lora(decoder, LoraConfig(3, 2.0, ("*.up_proj",)), key=jax.random.key(0))
    rng = np.random.default_rng(1)
    adapted = jax.tree.map(
        lambda leaf, own: jnp.asarray(rng.normal(size=leaf.shape) * 0.2, jnp.float32) if own else leaf,
        shapes,
        lora_filter(shapes),
    )
    save_adapters(tmp_path, adapted)
    expected = logits(adapted)
    assert np.abs(expected - logits(decoder)).max() > 1e-2
    close(hf_logits(peft.PeftModel.from_pretrained(copy.deepcopy(reference), tmp_path).eval()), expected)
    again = load_adapters(decoder, tmp_path)
    assert jax.tree.structure(again) == jax.tree.structure(adapted)
    for left, right in zip(jax.tree.leaves(again), jax.tree.leaves(adapted), strict=True):
        np.testing.assert_array_equal(left, right)
