"""gpt-oss: its `config.json`, its fused tensors, MXFP4, and the names of its
adapters.
"""

import dataclasses
import re

import equinox as eqx
import jax
import numpy as np
import pytest
from haliax import Axis
from safetensors.numpy import load_file, save_file

from models.gpt_oss import GptOssConfig
from models.hf_io.decoder_weights import read_decoder, write_decoder
from models.hf_io.formats import config_from_hf, config_to_hf, read_hf_config
from models.hf_io.safetensors_folder import SINGLE, SafetensorsFolder, WeightsError
from models.parts.decoder import Decoder
from models.parts.sections import FULL, SLIDING, AttentionConfig, ExpertsConfig
from stacked_remat import StackedPattern
from stacked_remat.ops import YarnRotary

from ..blocks import assert_equal
from ..lora.stacks import filled
from .published_configs import PUBLISHED as PUBLISHED_CONFIGS

PUBLISHED, _ = PUBLISHED_CONFIGS["gpt-oss 20b"]

Vocab = Axis("vocab", 10)
CONFIG = GptOssConfig(
    hidden_dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    attention=AttentionConfig(
        head_dim=6, bias=True, window=3, layer_types=(SLIDING, FULL)
    ),
    experts=ExpertsConfig(3, 2, 64, load_balance_weight=0.001),
)


def test_the_published_config_is_read_and_written_without_its_quantization():
    config, vocab_size = config_from_hf(PUBLISHED)
    assert config.rotary.theta == 150_000 and config.rotary.scaling == YarnRotary(
        32.0, 4096, truncate=False
    )
    windows = [config.kind_of(layer).window for layer in range(4)]
    assert windows == [128, None, 128, None] and config.sparse.load_balance_weight == 0
    trained, _ = config_from_hf(PUBLISHED | {"output_router_logits": True})
    assert trained.sparse.load_balance_weight == 0.9
    written = config_to_hf(config, vocab_size, dtype="bfloat16")
    assert "quantization_config" not in written and config_from_hf(written) == (
        config,
        vocab_size,
    )
    left_out = (
        "rope_scaling",
        "rope_theta",
        "layer_types",
        "sliding_window",
        "rms_norm_eps",
        "head_dim",
    )
    no_window = dataclasses.replace(
        config, attention=AttentionConfig(head_dim=64, bias=True)
    )
    written = config_to_hf(no_window, vocab_size, dtype="bfloat16")
    assert written["sliding_window"] and config_from_hf(written)[0] == no_window
    usual = {name: value for name, value in PUBLISHED.items() if name not in left_out}
    assert config_from_hf(usual)[0] == config


@pytest.mark.parametrize(
    "change", [{"dense_layers": (0,)}, {"norm_topk_prob": False}, {"mlp_dim": 8}]
)
def test_what_a_gpt_oss_has_not_is_refused(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))}.* have no effect"):
        if "mlp_dim" in change:
            dataclasses.replace(CONFIG, **change)
        dataclasses.replace(
            CONFIG, experts=dataclasses.replace(CONFIG.experts, **change)
        )


@pytest.fixture(scope="module")
def decoder():
    return filled(
        eqx.filter_eval_shape(Decoder.init, CONFIG, Vocab, key=jax.random.key(0)), 0
    )


@pytest.fixture
def folder(decoder, tmp_path):
    write_decoder(tmp_path / "weights", decoder)
    return tmp_path / "weights"


def test_experts_are_fused_with_gate_and_up_in_turns(decoder, folder):
    tensors = load_file(folder / SINGLE)
    assert len(tensors) == 3 + 2 * (2 + 8 + 1 + 2 + 4)
    sizes = [
        sum(one.size for one in some)
        for some in (tensors.values(), jax.tree.leaves(decoder))
    ]
    assert sizes[0] == sizes[1]
    experts = decoder.layers[1].mlp.experts.get_layer(2)
    mlp = "model.layers.1.mlp.experts"
    whole, bias = (
        tensors[f"{mlp}.{name}"][2] for name in ("gate_up_proj", "gate_up_proj_bias")
    )
    assert whole.shape == (32, 128)
    for part, linear in enumerate((experts.gate_proj, experts.up_proj)):
        np.testing.assert_array_equal(whole[:, part::2].T, linear.weight.array)
        np.testing.assert_array_equal(bias[part::2], linear.bias.array)
    np.testing.assert_array_equal(
        tensors[f"{mlp}.down_proj"][2].T, experts.down_proj.weight.array
    )
    np.testing.assert_array_equal(
        tensors[f"{mlp}.down_proj_bias"][2], experts.down_proj.bias.array
    )
    sinks = decoder.layers[1].attention.sinks
    np.testing.assert_array_equal(
        tensors["model.layers.1.self_attn.sinks"], sinks.array.reshape(-1)
    )
    assert read_hf_config(folder) == (CONFIG, Vocab.size)
    assert_equal(read_decoder(folder, decoder), decoder)


_NIBBLES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def by_hand(blocks, scales):
    """`[expert, out, block, byte]` to `[expert, in, out]`, a value at a time."""
    experts, wide, count, size = blocks.shape
    out = np.zeros((experts, count * size * 2, wide))
    for e, w, block, byte in np.ndindex(blocks.shape):
        for half, nibble in enumerate(
            (blocks[e, w, block, byte] & 15, blocks[e, w, block, byte] >> 4)
        ):
            factor = 2.0 ** (int(scales[e, w, block]) - 127)
            out[e, 2 * (block * size + byte) + half, w] = _NIBBLES[nibble] * factor
    return out


def test_tensors_in_mxfp4_are_read(decoder, folder):
    tensors, rng, expected = load_file(folder / SINGLE), np.random.default_rng(0), {}
    for name in [
        name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))
    ]:
        experts, narrow, wide = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, wide, narrow // 32, 16), np.uint8)
        scales = rng.integers(100, 150, blocks.shape[:3], np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = by_hand(blocks, scales)
    save_file(tensors, folder / SINGLE)
    opened = SafetensorsFolder.open(folder)
    for name, values in expected.items():
        np.testing.assert_array_equal(opened.read(name), values)
        np.testing.assert_array_equal(opened.read(name, (1,)), values[1])
    again = read_decoder(folder, decoder)
    assert isinstance(again.layers, StackedPattern)
    gate = again.layers.stacks[
        "sliding_sparse"
    ].stacked.mlp.experts.stacked.gate_proj.weight.array
    whole = expected["model.layers.0.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(gate[0], np.swapaxes(whole[..., ::2], -1, -2))
    damaged = {
        f"{name}_blocks": np.zeros(16, np.uint8),
        f"{name}_scales": np.zeros((), np.uint8),
    }
    save_file(tensors | damaged, folder / SINGLE)
    with pytest.raises(WeightsError, match=re.escape(f"missing: {name}")):
        read_decoder(folder, decoder)
    scales = f"{name}_scales"
    save_file({**tensors, scales: tensors[scales][:, :-1]}, folder / SINGLE)
    with pytest.raises(WeightsError, match=re.escape(f"missing: {name}")):
        read_decoder(folder, decoder)
