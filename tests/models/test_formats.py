"""The registry of Hugging Face's formats."""

import dataclasses
from dataclasses import dataclass

import equinox as eqx
import jax
import numpy as np
import pytest
from haliax import Axis
from safetensors import safe_open

import models.hf_io.config_fields as hf
import models.hf_io.formats as formats
from models.hf_io.adapters import load_adapters, save_adapters
from models.hf_io.decoder_weights import read_decoder, write_decoder
from models.hf_io.formats import HfFormat, read_hf_config
from models.hf_io.safetensors_folder import SINGLE, WeightsError
from models.llama import LlamaLayer
from models.loading import load_model
from models.parts.config import DecoderConfig
from models.parts.decoder import Decoder
from models.parts.sections import FULL, SLIDING, AttentionConfig
from models.run_config import find_model
from stacked_remat.lora import LoraConfig, apply_lora

from ..blocks import assert_equal
from ..lora.stacks import filled

Vocab = Axis("vocab", 7)


@dataclass(frozen=True)
class OtherConfig(DecoderConfig):
    """A second architecture, which differs from a Llama in names alone."""

    def init_layer(self, kind, *, key):
        return LlamaLayer.init(self, kind, rotary=self.rotary, key=key)


FIELDS = hf.DENSE_SIZES | {"rope_theta": hf.Rotary()}


@pytest.fixture
def other(monkeypatch):
    """Registers the second architecture."""
    names = {
        "embedding": "net.tokens",
        "layers": "net.h",
        "norm": "net.ln",
        "head": "out",
        "mlp": "ffn",
    }
    monkeypatch.setattr(formats, "_FORMATS", dict(formats._FORMATS))
    monkeypatch.setattr(DecoderConfig, "_choices", dict(DecoderConfig._choices))
    formats.register_format(HfFormat("other", OtherConfig, FIELDS, {**names}))
    attention = AttentionConfig(head_dim=4)
    return OtherConfig(
        hidden_dim=8,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        mlp_dim=6,
        attention=attention,
    )


def decoder_of(config):
    return filled(
        eqx.filter_eval_shape(Decoder.init, config, Vocab, key=jax.random.key(0)), 0
    )


def test_a_second_architecture_brings_a_config_and_its_names(other, tmp_path):
    decoder = decoder_of(other)
    write_decoder(tmp_path / "model", decoder)
    with safe_open(tmp_path / "model" / SINGLE, framework="np") as tensors:
        names = set(tensors.keys())
    assert {
        "net.tokens.weight",
        "net.h.1.ffn.up_proj.weight",
        "net.ln.weight",
        "out.weight",
    } <= names
    assert read_hf_config(tmp_path / "model") == (other, Vocab.size)
    assert_equal(read_decoder(tmp_path / "model", decoder), decoder)
    adapted = apply_lora(decoder, LoraConfig(rank=2), key=jax.random.key(1))
    save_adapters(tmp_path / "adapters", adapted)
    loaded = load_adapters(decoder, tmp_path / "adapters")
    assert jax.tree.structure(loaded) == jax.tree.structure(adapted)


def test_linear_maps_with_one_name_are_in_one_tensor(other, tmp_path):
    """Also where the layers are of two kinds, which are two stacks."""
    names = {
        "attention.q_proj": "qkv",
        "attention.k_proj": "qkv",
        "attention.v_proj": "qkv",
        "mlp.gate_proj": "wi",
        "mlp.up_proj": "wi",
    }

    fields = FIELDS | {"sliding_window": hf.Windows(None, period=2)}
    formats.register_format(HfFormat("other", OtherConfig, fields, names))
    attention = AttentionConfig(
        head_dim=4, window=3, layer_types=(FULL, SLIDING), bias=True
    )
    config = dataclasses.replace(
        other, num_heads=4, num_kv_heads=2, attention=attention
    )
    decoder = decoder_of(config)
    write_decoder(tmp_path / "model", decoder)
    sliding = decoder.layers.stacks["sliding_dense"].stacked
    parts = [
        getattr(sliding.attention, name) for name in ("q_proj", "k_proj", "v_proj")
    ]
    with safe_open(tmp_path / "model" / SINGLE, framework="np") as tensors:
        stored, bias = (
            tensors.get_tensor(f"model.layers.1.self_attn.qkv.{kind}")
            for kind in ("weight", "bias")
        )
        assert tensors.get_slice("model.layers.0.mlp.wi.weight").get_shape() == [12, 8]
        assert not any("q_proj" in name or "up_proj" in name for name in tensors.keys())
    np.testing.assert_array_equal(
        stored, np.vstack([part.weight.array.reshape(-1, 8) for part in parts])
    )
    np.testing.assert_array_equal(
        bias, np.concatenate([part.bias.array.reshape(-1) for part in parts])
    )
    assert_equal(load_model(find_model(str(tmp_path / "model"))), decoder)


def test_an_architecture_that_is_not_registered_is_named(tmp_path):
    with pytest.raises(
        WeightsError, match="No Hugging Face format is registered for OtherConfig"
    ):
        write_decoder(tmp_path / "model", decoder_of(OtherConfig(num_layers=1)))
    assert not list(tmp_path.iterdir())
