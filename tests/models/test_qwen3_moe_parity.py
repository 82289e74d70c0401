"""The decoder against Hugging Face's implementation, on random small models; needs torch and transformers."""

import copy
import dataclasses
import os
import warnings

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from models.hf_io.decoder_weights import read_decoder, write_decoder
from models.hf_io.formats import read_hf_config
from models.hf_io.safetensors_folder import SafetensorsFolder
from models.lm import next_token_loss
from models.qwen3_moe import Qwen3MoeConfig
from models.transformer.decoder import Decoder
from stacked_remat.training import TokenBatch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

Vocab = Axis("vocab", 53)
Batch = Axis("batch", 2)
Pos = Axis("position", 11)

LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}

DENSE = dict(
    hidden_size=32,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
)
MOE = DENSE | dict(moe_intermediate_size=10, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
MOE |= dict(router_aux_loss_coef=0.3, output_router_logits=True)

VARIANTS: dict[str, tuple[str, dict]] = {
    "moe": ("Qwen3Moe", MOE),
    "moe, one key head, raw gates, default head": (
        "Qwen3Moe",
        MOE
        | dict(hidden_size=24, num_attention_heads=6, num_key_value_heads=1, head_dim=4)
        | dict(num_experts=5, num_experts_per_tok=3, norm_topk_prob=False, rope_theta=100.0),
    ),
    "moe, tied, biases, dense first layer": (
        "Qwen3Moe",
        MOE | dict(tie_word_embeddings=True, attention_bias=True, mlp_only_layers=[0], rms_norm_eps=1e-3),
    ),
    "moe, every second layer dense, windows, yarn": (
        "Qwen3Moe",
        MOE
        | dict(num_hidden_layers=4, decoder_sparse_step=2, use_sliding_window=True, sliding_window=4)
        | dict(rope_parameters=YARN | dict(rope_theta=100.0)),
    ),
    "dense": ("Qwen3", DENSE),
    "dense, tied, biases, windows in the later layers, yarn": (
        "Qwen3",
        DENSE
        | dict(tie_word_embeddings=True, attention_bias=True, use_sliding_window=True, sliding_window=3)
        | dict(max_window_layers=1, rope_parameters=YARN | dict(rope_theta=100.0)),
    ),
    "dense, windows here and there": (
        "Qwen3",
        DENSE
        | dict(use_sliding_window=True, sliding_window=3)
        | dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
}


def drawn(seed: int) -> tuple[str, dict]:
    """A family and fields of a small config, each drawn at random from what its decoder serves."""
    rng = np.random.default_rng(seed)

    def one_of(*values):
        return values[rng.integers(len(values))]

    kv_heads, layers = one_of(1, 2, 3), one_of(2, 3)
    fields = dict(
        hidden_size=one_of(16, 24, 36),
        intermediate_size=one_of(12, 20),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * one_of(1, 2, 3),
        num_key_value_heads=kv_heads,
        head_dim=one_of(4, 6, 10),
        attention_bias=one_of(False, True),
        tie_word_embeddings=one_of(False, True),
        rms_norm_eps=one_of(1e-6, 1e-3),
    )
    theta = dict(rope_theta=one_of(100.0, 10_000.0, 1e6))
    fields |= one_of(theta, dict(rope_parameters=YARN | theta), dict(rope_parameters=LINEAR | theta))
    if one_of(False, True):
        fields |= dict(use_sliding_window=True, sliding_window=one_of(2, 5))
    if one_of("Qwen3", "Qwen3Moe") == "Qwen3":
        kinds = [one_of("full_attention", "sliding_attention") for _ in range(layers)]
        return "Qwen3", fields | (dict(layer_types=kinds) if "sliding_window" in fields else {})
    experts, normalised = one_of(3, 4, 5), one_of(False, True)
    fields |= dict(
        moe_intermediate_size=one_of(6, 10),
        num_experts=experts,
        # A single gate that is normalised is 1, and its router has no gradient to compare.
        num_experts_per_tok=int(rng.integers(1 + normalised, experts + 1)),
        norm_topk_prob=normalised,
        decoder_sparse_step=one_of(1, 2),
        mlp_only_layers=one_of([], [0]),
        router_aux_loss_coef=0.3,
        output_router_logits=True,
    )
    return "Qwen3Moe", fields


SEED = int(os.environ.get("PARITY_SEED", "0"))  # another number tries another config
VARIANTS[f"drawn from {SEED}"] = drawn(SEED)


def hugging_face_model(family: str, fields: dict):
    hf_config = getattr(transformers, f"{family}Config")(
        vocab_size=Vocab.size,
        max_position_embeddings=32,
        attn_implementation="eager",
        **(dict(experts_implementation="eager") if family == "Qwen3Moe" else {}),
        **fields,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(hf_config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    return model


def decoder_from(model, folder) -> Decoder:
    """Ours, read from what Hugging Face's model saves."""
    model.save_pretrained(folder, max_shard_size="20KB")
    config, vocab_size = read_hf_config(folder)
    assert vocab_size == Vocab.size
    return read_decoder(folder, config, Vocab)


def with_gradients(model):
    """Hugging Face's model with the gradients of its parameters in their places."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    return model


@pytest.fixture(params=VARIANTS, scope="module")
def case(request, tmp_path_factory):
    reference = hugging_face_model(*VARIANTS[request.param])
    folder = tmp_path_factory.mktemp("weights")
    tokens = np.random.default_rng(0).integers(0, Vocab.size, (Batch.size, Pos.size))
    return reference, decoder_from(reference, folder), folder, tokens


def test_logits(case):
    reference, decoder, _, tokens = case
    hidden, _ = eqx.filter_jit(decoder.hidden_states)(hax.named(jnp.asarray(tokens), (Batch, Pos)))
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(decoder.logits(hidden).array, expected, atol=1e-4)


def test_the_round_trip_is_exact(case, tmp_path):
    reference, decoder, folder, _ = case
    write_decoder(tmp_path / "again", decoder, max_file_bytes=4_000)
    first, second = SafetensorsFolder.open(folder), SafetensorsFolder.open(tmp_path / "again")
    assert first.shapes == second.shapes and len({tensor.path for tensor in second.stored.values()}) > 1
    for name in first.shapes:
        np.testing.assert_array_equal(first.read(name), second.read(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = type(reference).from_pretrained(tmp_path / "again", attn_implementation="eager")
    tensors = loaded.state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, tensors[name])
    kept = (
        "rope_parameters",
        "sliding_window",
        "layer_types",
        "mlp_only_layers",
        "attention_bias",
        "head_dim",
    )
    for name in kept:
        assert getattr(loaded.config, name, None) == getattr(reference.config, name, None) or (
            name == "mlp_only_layers" and reference.config.decoder_sparse_step == 2
        )


def test_gradients(case, tmp_path):
    reference, decoder, _, tokens = case
    named = hax.named(jnp.asarray(tokens), (Batch, Pos))
    has_target = (hax.arange(Pos) < Pos.size - 1).astype(jnp.float32)
    weights = hax.ones((Batch, Pos)) * has_target
    batch = TokenBatch(named, hax.roll(named, -1, Pos), weights)
    loss_of = eqx.filter_jit(eqx.filter_value_and_grad(lambda m: next_token_loss(m, batch)[1]["loss"]))
    loss, gradient = loss_of(decoder)
    copied = copy.deepcopy(reference)
    copied.config.output_router_logits = False  # the loss of tokens alone
    expected_loss = copied(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
    expected_loss.backward()
    np.testing.assert_allclose(loss, expected_loss.item(), rtol=1e-5)
    expected = decoder_from(with_gradients(copied), tmp_path / "gradients")
    leaves = zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True)
    for ours, theirs in leaves:
        assert jnp.linalg.norm(theirs) > 0
        assert jnp.linalg.norm(ours - theirs) <= 1e-3 * jnp.linalg.norm(theirs)


def test_the_training_loss_with_the_auxiliary_one(case):
    reference, decoder, _, tokens = case
    config = decoder.config
    if not isinstance(config, Qwen3MoeConfig):
        return
    real = np.ones_like(tokens)
    real[1, 7:] = 0
    masked = {
        "attention_mask": torch.tensor(real),
        "labels": torch.tensor(np.where(real == 1, tokens, -100)),
    }
    with torch.no_grad():
        expected = reference(torch.tensor(tokens), **masked, output_router_logits=True)
    experts = dataclasses.replace(config.experts, load_balance_loss="pooled")
    pooled = dataclasses.replace(decoder, config=dataclasses.replace(config, experts=experts))
    named, documents = (hax.named(jnp.asarray(one, jnp.int32), (Batch, Pos)) for one in (tokens, real))
    counted = np.concatenate([real[:, 1:], np.zeros_like(real[:, :1])], axis=1)
    weights = hax.named(jnp.asarray(counted, jnp.float32), (Batch, Pos))
    batch = TokenBatch(named, hax.roll(named, -1, Pos), weights, documents)
    loss, metrics = eqx.filter_jit(next_token_loss)(pooled, batch)
    np.testing.assert_allclose(metrics["load_balance"], expected.aux_loss.item(), rtol=1e-5)
    np.testing.assert_allclose(loss - metrics["loss"], 0.3 * expected.aux_loss.item(), rtol=1e-4)
    np.testing.assert_allclose(loss, expected.loss.item(), rtol=1e-5)
