"""Weights of decoders to and from safetensors files in Hugging Face's format."""

import dataclasses
import json
import os
import warnings
import weakref
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from haliax.util import is_named_array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from models.hf_io.decoder_weights import read_decoder, write_decoder
from models.hf_io.formats import pretrained_config, read_hf_config
from models.hf_io.safetensors_folder import (
    INDEX,
    SINGLE,
    SafetensorsFolder,
    WeightsError,
)
from models.lm import next_token_loss
from models.parts.decoder import Decoder
from models.parts.sections import AttentionConfig, ExpertsConfig
from models.qwen3_moe import Qwen3MoeConfig
from models.run_config import find_model
from models.run_state import Placement
from stacked_remat import ScanCheckpointPolicy, StackedPattern, streaming
from stacked_remat.lora import LoraConfig, apply_lora, lora_filter
from stacked_remat.training import TokenBatch

from ..blocks import assert_close, assert_equal, quick_jit
from ..lora.stacks import filled

Vocab = Axis("vocab", 10)
CONFIG = Qwen3MoeConfig(
    hidden_dim=8,
    num_layers=3,
    num_heads=4,
    mlp_dim=6,
    attention=AttentionConfig(bias=True),
    experts=ExpertsConfig(4, 2, 6, dense_layers=(1,)),
)


@pytest.fixture(scope="module")
def decoder():
    return filled(
        eqx.filter_eval_shape(Decoder.init, CONFIG, Vocab, key=jax.random.key(0)), 0
    )


@pytest.fixture
def folder(decoder, tmp_path):
    write_decoder(tmp_path / "weights", decoder, max_file_bytes=2000)
    return tmp_path / "weights"


def test_weights_round_trip(decoder, folder):
    found = find_model(str(folder))
    again = Placement.of(None, remat="nested").load_model(found, "float32")
    assert_equal(again, decoder)
    assert again.layers.remat == ScanCheckpointPolicy(nested=True)


def test_tensors_have_the_numbers_of_layers_in_the_model(decoder, folder):
    tensors = SafetensorsFolder.open(folder)
    dense, sparse = (
        decoder.layers.stacks[kind].stacked for kind in ("dense", "sparse")
    )
    experts = sparse.mlp.experts.stacked
    expert = tensors.read("model.layers.2.mlp.experts.3.up_proj.weight")
    np.testing.assert_array_equal(expert, experts.up_proj.weight.array[1, 3])
    query = tensors.read("model.layers.1.self_attn.q_proj.weight")
    np.testing.assert_array_equal(
        query, dense.attention.q_proj.weight.array.reshape(8, 8)
    )
    assert tensors.shapes["model.layers.1.self_attn.k_proj.bias"] == (4,)


def test_arrays_are_made_with_their_dtype_and_sharding(decoder, folder):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("expert", "data"))
    axes = {"experts": "expert", "embed": "data", "layers": None}

    def divided(named):
        sharding = NamedSharding(
            mesh, PartitionSpec(*(axes.get(axis.name) for axis in named.axes))
        )
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=sharding),
            named,
        )

    like = jax.tree.map(divided, decoder, is_leaf=is_named_array)
    with jax.set_mesh(mesh):
        spread = read_decoder(folder, like)
    narrow = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), decoder)
    assert_equal(spread, narrow)
    layers: Any = spread.layers
    up = layers.stacks["sparse"].stacked.mlp.experts.stacked.up_proj.weight
    assert up.array.sharding.spec == PartitionSpec(None, "expert", None, "data")
    assert up.array.addressable_shards[0].data.shape == (2, 2, 6, 4)
    write_decoder(folder.parent / "spread", spread)
    assert_equal(read_decoder(folder.parent / "spread", spread), spread)


def test_tensors_do_not_accumulate_on_the_host(decoder, folder, monkeypatch):
    alive = 0
    original = SafetensorsFolder.read

    def gone():
        nonlocal alive
        alive -= 1

    def read(self, name, at=()):
        nonlocal alive
        assert alive <= 1  # JAX lets go of an array with its next call
        tensor = original(self, name, at)
        alive += 1
        weakref.finalize(tensor, gone)
        return tensor

    monkeypatch.setattr(SafetensorsFolder, "read", read)
    read_decoder(folder, decoder)


def test_all_differences_are_named_and_nothing_is_read(decoder, folder, monkeypatch):
    path = next(folder.glob("*-00001-*"))
    tensors, index = load_file(path), json.loads((folder / INDEX).read_text())
    del (
        tensors["model.embed_tokens.weight"],
        index["weight_map"]["model.embed_tokens.weight"],
    )
    save_file({**tensors, "model.layers.9.strange": np.zeros((2, 3), np.float32)}, path)
    del index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.layers.9.strange"] = path.name
    (folder / INDEX).write_text(json.dumps(index))
    monkeypatch.setattr(SafetensorsFolder, "read", None)
    narrow = dataclasses.replace(CONFIG, mlp_dim=5)
    like = eqx.filter_eval_shape(
        Decoder.init, narrow, Axis("vocab", 10), key=jax.random.key(0)
    )
    with pytest.raises(WeightsError) as caught:
        read_decoder(folder, like)
    lines = str(caught.value).splitlines()
    assert "5 differ" in lines[0]
    assert "  missing: model.embed_tokens.weight [10, 8]" in lines
    assert "  unknown: model.layers.9.strange [2, 3]" in lines
    (down,) = (line for line in lines if "down_proj" in line)
    assert down == (
        "  mismatched: model.layers.1.mlp.down_proj.weight is [8, 6], expected [8, 5]"
    )


def test_tensors_that_transformers_does_not_use_are_left_out(decoder, tmp_path):
    tied = dataclasses.replace(
        decoder, head=None, config=dataclasses.replace(CONFIG, tie_word_embeddings=True)
    )
    write_decoder(tmp_path / "weights", tied)
    path = tmp_path / "weights" / SINGLE
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].copy()
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(9, np.float32)}
    save_file(tensors | {"lm_head.weight": head}, path)
    with warnings.catch_warnings(action="error"):
        assert find_model(str(tmp_path / "weights")).config.tie_word_embeddings
    assert_equal(read_decoder(tmp_path / "weights", tied), tied)
    for other in (head + 1, head[:9]):
        save_file(tensors | {"lm_head.weight": other}, path)
        with pytest.raises(
            WeightsError,
            match="has lm_head.weight, which differs from model.embed_tokens",
        ):
            read_decoder(tmp_path / "weights", tied)
        with pytest.warns(UserWarning, match="a head of other values, which is used"):
            assert not find_model(str(tmp_path / "weights")).config.tie_word_embeddings


def test_quantized_tensors_are_named_and_not_cast(decoder, tmp_path, monkeypatch):
    write_decoder(tmp_path / "weights", decoder)
    path = tmp_path / "weights" / SINGLE
    tensors = load_file(path)
    save_file({**tensors, "model.norm.weight": np.ones(8, np.int8)}, path)
    monkeypatch.setattr(SafetensorsFolder, "read", None)
    with pytest.raises(
        WeightsError,
        match="not a float: model.norm.weight is I8, expected one of F64, F32",
    ):
        read_decoder(tmp_path / "weights", decoder)


def test_the_auxiliary_loss_has_the_weight_of_the_folder_unless_the_config_has_one(
    folder,
):
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"router_aux_loss_coef": 0.25})
    )
    said = dataclasses.replace(
        CONFIG.experts, load_balance_weight=0.5, load_balance_loss="pooled"
    )
    for experts, weight in ((CONFIG.experts, 0.25), (said, 0.5)):
        found = pretrained_config(
            dataclasses.replace(CONFIG, experts=experts), read_hf_config(folder)[0]
        )
        assert isinstance(found, Qwen3MoeConfig)
        assert found.experts == dataclasses.replace(experts, load_balance_weight=weight)


@pytest.mark.parametrize("tiles", [1, 2])
def test_weights_that_stay_in_files(decoder, folder, tiles):
    """Of layers with experts and without, an embedding and a head."""
    config = dataclasses.replace(CONFIG, tiles=tiles)
    like = eqx.filter_eval_shape(Decoder.init, config, Vocab, key=jax.random.key(0))
    in_files = read_decoder(folder, like, in_files=True)
    small = sum(
        leaf.size
        for leaf in jax.tree.leaves(eqx.filter(in_files, eqx.is_inexact_array))
    )
    assert small < sum(leaf.size for leaf in jax.tree.leaves(like)) / 8
    axes = Axis("batch", 1), Axis("position", 5)
    tokens = hax.named(jnp.asarray([[1, 9, 0, 3, 3]]), axes)
    batch = TokenBatch(tokens, tokens, hax.ones(axes))

    def loss_and_gradient(model):
        model = apply_lora(model, LoraConfig(rank=2), key=jax.random.key(0))
        trained, frozen = eqx.partition(model, lora_filter(model))

        def loss(trained):
            return next_token_loss(eqx.combine(trained, frozen), batch)[0]

        value, gradient = quick_jit(jax.value_and_grad(loss))(trained)
        return value, jax.tree.leaves(gradient)

    decoder = dataclasses.replace(decoder, config=config)
    assert_close(loss_and_gradient(in_files), loss_and_gradient(decoder), rtol=1e-4)
    hidden = hax.ones((*axes, config.Embed))
    for head in (decoder.head, None):  # None: the embedding, as if they were tied
        expected = dataclasses.replace(decoder, head=head).logits(hidden)
        own = None if head is None else in_files.head
        found = dataclasses.replace(in_files, head=own).logits(hidden)
        assert_close(found, expected)
    layers: list[Any] = [streaming.in_memory(in_files).layers, decoder.layers]
    read, expected = (own.stacks["dense"].stacked.mlp for own in layers)
    assert_equal(read.up_proj.weight, expected.up_proj.weight)
    # Never whole in memory, with tiles of positions too
    assert isinstance(in_files.layers, StackedPattern)
    dense = in_files.layers.stacks["dense"].stacked.mlp
    assert isinstance(dense.down_proj, streaming.LinearInFiles)


def test_a_file_that_changes_while_it_is_read_is_refused(decoder, folder):
    in_files = read_decoder(folder, decoder, in_files=True)
    file = next(folder.glob("*.safetensors"))
    os.utime(file, ns=(0, 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{file.name} has changed"):
        jax.block_until_ready(streaming.in_memory(in_files.embedding))
