"""Hybrid decoders: layers with attention among layers with linear attention."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from safetensors.numpy import save_file

from models.hf_io.adapters import load_adapters, save_adapters
from models.hf_io.decoder_weights import read_decoder, write_decoder
from models.hf_io.formats import why_not_exported, written_out
from models.hf_io.safetensors_folder import SINGLE, SafetensorsFolder
from models.lfm2 import Lfm2Config
from models.lm import next_token_loss
from models.loading import load_model
from models.olmo_hybrid import OlmoHybridConfig
from models.parts.decoder import Decoder
from models.parts.linear import cast_floating
from models.parts.sections import (
    FULL,
    LINEAR,
    AttentionConfig,
    ExpertsConfig,
    LinearAttentionConfig,
)
from models.qwen3_next import Qwen3NextConfig
from models.run_config import LmRunConfig, find_model
from models.run_state import initial_state, state_shapes
from stacked_remat.lora import LoraConfig, apply_lora, lora_filter
from stacked_remat.training import (
    PrecisionConfig,
    SgdConfig,
    TokenBatch,
    TrainerConfig,
    build_optimizer,
    cast_parameters,
)

from ..blocks import assert_close, assert_equal
from ..jaxprs import equations_of
from .random_weights import random_weights

Vocab, Batch, Pos = Axis("vocab", 19), Axis("batch", 2), Axis("position", 7)
LINEAR_SIZES = LinearAttentionConfig(2, 4, 6, 5, conv_size=3)
QWEN = Qwen3NextConfig(
    hidden_dim=16,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    attention=AttentionConfig(head_dim=8),
    linear=LINEAR_SIZES,
    experts=ExpertsConfig(3, 2, 6, dense_layers=(0,)),
    shared_dim=6,
)
OLMO = OlmoHybridConfig(
    hidden_dim=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    mlp_dim=24,
    linear=LINEAR_SIZES,
    layer_types=(LINEAR, LINEAR, FULL),
)
DOCUMENTS = hax.named(
    jnp.array([[1, 1, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 2]]), (Batch, Pos)
)


@functools.cache
def make(config=QWEN) -> Decoder:
    return random_weights(Decoder.init, config, Vocab, spread=0.4)


@functools.cache
def tokens_of_batch():
    return hax.random.randint(jax.random.key(1), (Batch, Pos), 0, Vocab.size)


def test_kinds_have_names_and_stacks_of_their_own():
    assert QWEN.pattern == ("linear_dense", "linear_sparse", "linear_sparse", "sparse")
    model = make()
    assert {name: stack.Layers.size for name, stack in model.stacks.items()} == {
        "linear_dense": 1,
        "linear_sparse": 2,
        "sparse": 1,
    }
    assert model.rotary[0] is None and model.rotary[-1] is not None
    whole: Any = written_out(QWEN)
    assert whole.layer_types == (LINEAR, LINEAR, LINEAR, FULL)
    longer: Any = written_out(dataclasses.replace(QWEN, num_layers=5))
    assert longer.layer_types == (*whole.layer_types, LINEAR)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ()}, r"model.layer_types = \[\] must have"),
        ({"layer_types": (FULL,) * 5}, "5 entries for model.num_layers = 4"),
        ({"layer_types": ("linear",)}, r"model.layer_types = \['linear'\] must have"),
        ({"partial_rotary_factor": 0.1}, "model.partial_rotary_factor = 0.1 .* is 0"),
        ({"shared_dim": 0}, "model.shared_dim"),
        ({"attention": AttentionConfig(window=2)}, "Leave out model.attention.window"),
    ],
)
def test_what_no_hybrid_has_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(QWEN, **fields)


def test_what_files_can_not_say_is_known_before_an_export():
    config = Lfm2Config(hidden_dim=16, num_layers=2, num_heads=4, layer_types=(FULL,))
    assert why_not_exported(config, 19) is None
    biased = dataclasses.replace(config, attention=AttentionConfig(bias=True))
    reason = why_not_exported(biased, 19)
    assert reason is not None and "no such model.attention.bias" in reason


def test_value_heads_share_heads_of_keys_evenly():
    with pytest.raises(ValueError, match="num_value_heads = 3 must be a multiple"):
        LinearAttentionConfig(num_key_heads=2, num_value_heads=3)


def test_a_packed_sequence_gives_what_its_documents_give():
    model, tokens = make(), tokens_of_batch()
    documents = hax.named(jnp.array([1, 1, 1, 2, 2, 3, 3]), Pos)
    positions = hax.named(jnp.array([0, 1, 2, 0, 1, 0, 1]), Pos)
    states = eqx.filter_jit(model.layer_states)
    packed, _ = states(tokens, documents=documents, positions=positions)
    for first, stop in ((0, 3), (3, 5), (5, 7)):
        alone, _ = states(tokens[Pos, first:stop])
        np.testing.assert_allclose(packed.array[:, first:stop], alone.array, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(QWEN, id="experts", marks=pytest.mark.deep),
        pytest.param(OLMO, id="dense"),
    ],
)
def test_tiles_give_the_same_loss_and_gradients(config):
    """With adapters, documents that begin in tiles, and a ragged last tile."""
    tokens = tokens_of_batch()
    batch = TokenBatch(
        tokens, hax.roll(tokens, -1, Pos), hax.ones((Batch, Pos)), DOCUMENTS, DOCUMENTS
    )

    def adapted(tiles):
        model = make(dataclasses.replace(config, tiles=tiles))
        lora = LoraConfig(targets=("*_proj",), rank=2)
        model = apply_lora(model, lora, key=jax.random.key(2))
        return jax.tree.map(
            lambda leaf: leaf + 0.01 if eqx.is_inexact_array(leaf) else leaf, model
        )

    @eqx.filter_jit
    def run(models):
        value_and_grad = eqx.filter_value_and_grad(next_token_loss, has_aux=True)
        return [value_and_grad(model, batch) for model in models]

    expected, found = run([adapted(tiles) for tiles in (1, 3)])
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected[1]))
    assert_close(found, expected, rtol=1e-4, atol=2e-6 * largest)


def dtypes_of(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


@pytest.mark.usefixtures("standard_promotion")
def test_decays_in_files_are_float32_where_weights_are_bfloat16(tmp_path):
    """In a run that begins with them, as where it resumes, and to generate text."""
    model, folder = make(), str(tmp_path / "model")
    write_decoder(folder, model)
    read = load_model(find_model(folder, dtype="bfloat16"))
    assert dtypes_of(read) == dtypes_of(cast_parameters(model, "bfloat16"))
    for name in ("linear_dense", "linear_sparse"):
        decays = (
            one.stacks[name].stacked.linear_attention.decay for one in (read, model)
        )
        assert_equal(*decays)
    run = LmRunConfig(
        model=QWEN,
        vocab_size=Vocab.size,
        initialize_from_hf=folder,
        trainer=TrainerConfig(precision=PrecisionConfig(parameters="bfloat16")),
    )
    assert dtypes_of(initial_state(run)) == dtypes_of(state_shapes(run))


@pytest.mark.usefixtures("standard_promotion")
def test_decays_are_in_float32_and_get_no_weight_decay():
    model = make()
    layer = model.stacks["linear_sparse"].stacked.linear_attention
    low = cast_floating(layer, jnp.bfloat16)
    assert low.q_proj.weight.dtype == low.q_conv.weight.dtype == jnp.bfloat16
    assert low.decay.a_log.dtype == low.decay.dt_bias.dtype == jnp.float32
    stored = cast_parameters(layer, "bfloat16")
    assert stored.q_conv.weight.dtype == jnp.bfloat16
    assert stored.decay.a_log.dtype == jnp.float32
    optimizer = build_optimizer(SgdConfig(weight_decay=0.5, warmup=0), num_steps=10)
    trained = eqx.filter(layer, eqx.is_inexact_array)
    nothing = jax.tree.map(jnp.zeros_like, trained)
    jit: Any = eqx.filter_jit
    of_layer, _ = jit(optimizer.update)(nothing, optimizer.init(trained), trained)
    for kept in (of_layer.decay.a_log, of_layer.decay.dt_bias, of_layer.norm.weight):
        assert not jnp.any(kept.array)
    for decayed in (of_layer.q_conv.weight, of_layer.a_proj.weight):
        assert jnp.all(decayed.array != 0)


@pytest.mark.parametrize("config", [QWEN, OLMO], ids=["experts", "dense"])
def test_the_names_of_policies_are_those_in_layers(config):
    tokens = tokens_of_batch()
    batch = TokenBatch(tokens, tokens, hax.ones((Batch, Pos)))
    gradient = eqx.filter_grad(lambda model: next_token_loss(model, batch)[0])
    found = set()
    for equation in equations_of(gradient, make(config)):
        if equation.primitive.name == "name":
            found.add(equation.params["name"])
    assert found == {*config.remat_names}


def test_presets_keep_the_projections_of_linear_attention():
    saved: Any = QWEN.remat_presets["projections_saved"].save_block_internals
    assert "gate" in saved
    assert "gate" not in OLMO.attention_names


def weights_of(folder):
    """The tensors of a folder, by name."""
    tensors = SafetensorsFolder.open(folder)
    return {name: tensors.read(name) for name in tensors.shapes}


def test_tensors_of_several_maps_have_them_head_by_head(tmp_path):
    model = make()
    write_decoder(tmp_path / "model", model)
    tensors = weights_of(tmp_path / "model")
    layer = model.stacks["linear_dense"].stacked.linear_attention
    values = 2 * 5  # of the value heads of a key head
    joint = tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    by_head = joint.reshape(2, 2 * 6 + 2 * values, 16)
    parts = np.split(by_head, [6, 12, 12 + values], axis=1)
    maps = (layer.q_proj, layer.k_proj, layer.v_proj, layer.gate_proj)
    for part, linear in zip(parts, maps, strict=True):
        np.testing.assert_array_equal(part, linear.weight.array[0].reshape(part.shape))
    attention = model.stacks["sparse"].stacked.attention
    joint = tensors["model.layers.3.self_attn.q_proj.weight"]
    gates = joint.reshape(4, 2 * 8, 16)[:, 8:]
    expected = attention.gate_proj.weight.array[0].reshape(gates.shape)
    np.testing.assert_array_equal(gates, expected)
    assert_equal(read_decoder(tmp_path / "model", model), model)


def test_adapters_of_maps_in_one_tensor_are_read_back(tmp_path):
    targets = ("*.linear_attention.*_proj", "*.attention.*_proj")
    shapes = apply_lora(make(), LoraConfig(2, 2.0, targets), key=jax.random.key(0))
    rng = np.random.default_rng(0)
    adapted = jax.tree.map(
        lambda leaf, own: (
            jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) if own else leaf
        ),
        shapes,
        lora_filter(shapes),
    )
    save_adapters(tmp_path, adapted)
    assert_equal(load_adapters(make(), tmp_path), adapted)


def test_convolutions_that_are_one_tensor_in_memory_may_be_cut_anywhere(tmp_path):
    model = make(OLMO)
    write_decoder(tmp_path / "model", model)
    tensors, parts = weights_of(tmp_path / "model"), ("q", "k", "v")
    for layer in (0, 1):
        names = [
            f"model.layers.{layer}.linear_attn.{part}_conv1d.weight" for part in parts
        ]
        assert [tensors[name].shape for name in names] == [
            (12, 1, 3),
            (12, 1, 3),
            (20, 1, 3),
        ]
        # As transformers writes them, into equal parts
        whole = np.concatenate([tensors[name] for name in names])
        tensors |= dict(zip(names, np.array_split(whole, 3), strict=True))
    save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()},
        tmp_path / "model" / SINGLE,
    )
    assert_equal(read_decoder(tmp_path / "model", model), model)
