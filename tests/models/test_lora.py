"""The `lora` section of a config adapts and trains a decoder."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from models.hf_io.adapters import load_adapters, peft_names
from models.hf_io.safetensors_folder import WeightsError
from models.lm import next_token_loss
from models.parts.decoder import Decoder
from models.parts.sections import ExpertsConfig
from models.qwen3_moe import Qwen3MoeConfig
from models.run_state import with_adapters
from stacked_remat.lora import (
    LoraConfig,
    LoraLinear,
    lora_linears,
    merge_lora,
    save_peft,
)
from stacked_remat.training import ConfigError, TokenBatch

Vocab, Batch, Pos = Axis("vocab", 17), Axis("batch", 2), Axis("position", 6)
CONFIG = Qwen3MoeConfig(
    hidden_dim=16,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    experts=ExpertsConfig(3, 2, 8),
)
LORA = LoraConfig(2, 3.0)
WITH_HEAD = LoraConfig(2, 3.0, ("*_proj", "head"))


def adapted_model(remat=True, config=CONFIG, lora: LoraConfig | None = LORA):
    """The model with random weights and adapters, B among them, and what of it is
    trained.
    """

    def make():
        key = jax.random.key(0)
        return with_adapters(
            Decoder.init(config, Vocab, remat=remat, key=key), lora, key=key
        )[0]

    shapes = eqx.filter_eval_shape(make)
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), leaf.dtype), shapes
    )


def batch():
    tokens = (
        np.random.default_rng(1).integers(0, Vocab.size, (2, 2, 6)).astype(np.int32)
    )
    inputs, targets = (hax.named(jnp.asarray(part), (Batch, Pos)) for part in tokens)
    return TokenBatch(inputs, targets, hax.ones((Batch, Pos), dtype=jnp.float32))


def loss_and_gradients(model, merged=False):
    marks = with_marks(model)
    trained, frozen = eqx.partition(model, marks)

    def loss(trained):
        whole = eqx.combine(trained, frozen)
        return next_token_loss(merge_lora(whole) if merged else whole, batch())[0]

    return jax.jit(jax.value_and_grad(loss))(trained)


def with_marks(model):
    """True for adapters, found by their names rather than by the library."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            {"a", "b"} & {getattr(entry, "name", None) for entry in path} != set()
        ),
        model,
    )


@pytest.fixture(scope="module")
def chain_rule():
    return loss_and_gradients(adapted_model(lora=WITH_HEAD), merged=True)


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param(False, marks=pytest.mark.deep),
        pytest.param("nested", marks=pytest.mark.deep),
        pytest.param("offload", marks=pytest.mark.remat3),
    ],
    ids=str,
)
def test_attention_experts_and_head_are_trained_as_their_merged_weights_would_be(
    remat, chain_rule
):
    loss, gradients = loss_and_gradients(adapted_model(remat, lora=WITH_HEAD))
    np.testing.assert_allclose(loss, chain_rule[0], rtol=1e-5)
    leaves, expected = jax.tree.leaves(gradients), jax.tree.leaves(chain_rule[1])
    assert len(leaves) == len(expected) == 2 * 8
    for left, right in zip(leaves, expected, strict=True):
        assert np.any(right)
        np.testing.assert_allclose(left, right, atol=2e-5 * np.abs(right).max())


def test_the_defaults_adapt_attention_and_experts_but_neither_router_nor_head():
    kinds = {
        path.rpartition(".")[2]: isinstance(one, LoraLinear)
        for path, one in lora_linears(eqx.filter_eval_shape(adapted_model)).items()
    }
    assert kinds.pop("router") is kinds.pop("head") is False
    assert len(kinds) == 7 and all(kinds.values())


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ("*.q_prj",),
            r"'\*.q_prj' matches no linear. Nearest of 9: layers.\*.attention.q_proj",
        ),
        (("*_proj", "hea"), r"'hea' matches no linear. Nearest of 9: head"),
    ],
)
def test_invalid_targets_are_config_errors(targets, message):
    with pytest.raises(ConfigError, match=message):
        eqx.filter_eval_shape(lambda: adapted_model(lora=LoraConfig(targets=targets)))


def test_a_head_that_is_the_embedding_has_no_adapter(tmp_path):
    tied = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    with pytest.raises(
        ConfigError, match="'head' is of the head, which this model ties"
    ):
        adapted_model(config=tied, lora=WITH_HEAD)
    adapted_model(config=tied, lora=LoraConfig(targets=("*",)))
    pytest.importorskip("safetensors")
    untied = adapted_model(lora=WITH_HEAD)
    save_peft(tmp_path, untied, peft_names(CONFIG))
    with pytest.raises(WeightsError, match="adapt lm_head, which this model ties"):
        load_adapters(adapted_model(config=tied, lora=None), tmp_path)


def test_logits_and_decoding_have_the_adapter_of_the_head():
    model = adapted_model(lora=WITH_HEAD)
    merged, tokens = merge_lora(model), batch().tokens

    def last_logits(model):
        hidden, caches = model.prefill(tokens, Pos.size + 1)
        positions = hax.full(Batch, Pos.size, dtype=jnp.int32)
        hidden, _ = model.decode(tokens[Pos.name, 0], positions, caches)
        return model.logits(hidden)

    found, expected = jax.jit(last_logits)(model), jax.jit(last_logits)(merged)
    np.testing.assert_allclose(found.array, expected.array, atol=2e-4)
    bare = dataclasses.replace(model, head=model.head.wrapped)
    assert np.abs(jax.jit(last_logits)(bare).array - found.array).max() > 0.1


@pytest.mark.parametrize("experts", ["fused", "separate"])
def test_adapters_round_trip_through_files(experts, tmp_path):
    pytest.importorskip("safetensors")
    model = adapted_model(lora=WITH_HEAD)
    save_peft(tmp_path, model, peft_names(model.config, experts))
    base = jax.tree.map(
        lambda node: node.wrapped if isinstance(node, LoraLinear) else node,
        model,
        is_leaf=lambda node: isinstance(node, LoraLinear),
    )
    again = load_adapters(base, tmp_path)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for left, right in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(left, right)
