"""The decoder against Hugging Face's implementation, on random small models; needs torch and transformers."""

import warnings

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from models.lm import next_token_loss
from models.qwen3_moe import ExpertsConfig, Qwen3MoeConfig, Qwen3MoeDecoder
from models.qwen3_moe.experts import RouterStatistics, load_balance_loss
from stacked_remat.training import TokenBatch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

Vocab = Axis("vocab", 53)
Batch = Axis("batch", 2)
Pos = Axis("position", 11)

VARIANTS = {
    "grouped heads": Qwen3MoeConfig(hidden_dim=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6),
    "one key head, raw gates": Qwen3MoeConfig(
        hidden_dim=24,
        num_layers=2,
        num_heads=6,
        num_kv_heads=1,
        rope_theta=100.0,
        experts=ExpertsConfig(num_experts=5, experts_per_token=3, intermediate_dim=7, norm_topk_prob=False),
    ),
    "as many key heads, tied": Qwen3MoeConfig(
        hidden_dim=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        experts=ExpertsConfig(num_experts=3, experts_per_token=1, intermediate_dim=16, norm_topk_prob=False),
    ),
}


def hugging_face_model(config: Qwen3MoeConfig):
    hf_config = transformers.Qwen3MoeConfig(
        vocab_size=Vocab.size,
        hidden_size=config.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.HeadDim.size,
        num_experts=config.experts.num_experts,
        num_experts_per_tok=config.experts.experts_per_token,
        moe_intermediate_size=config.experts.intermediate_dim,
        norm_topk_prob=config.experts.norm_topk_prob,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        attn_implementation="eager",
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(hf_config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    return model


def ours_from(tensors: dict, config: Qwen3MoeConfig) -> Qwen3MoeDecoder:
    """A decoder whose arrays are the given tensors (weights or gradients), under Hugging Face's names."""

    def get(name):
        return jnp.asarray(tensors[name].detach().numpy())

    def stacked(name):
        return jnp.stack([get(f"model.layers.{layer}.{name}") for layer in range(config.num_layers)])

    gate_up = stacked("mlp.experts.gate_up_proj")
    gate, up = jnp.split(gate_up, 2, axis=-2)
    model = eqx.filter_eval_shape(Qwen3MoeDecoder.init, config, Vocab, key=jax.random.key(0))
    layers = model.layers.stacked
    places = [
        (model.embedding.weight, get("model.embed_tokens.weight")),
        (model.norm.weight, get("model.norm.weight")),
        (layers.attention.q_proj.weight, stacked("self_attn.q_proj.weight")),
        (layers.attention.k_proj.weight, stacked("self_attn.k_proj.weight")),
        (layers.attention.v_proj.weight, stacked("self_attn.v_proj.weight")),
        (layers.attention.o_proj.weight, stacked("self_attn.o_proj.weight")),
        (layers.attention.q_norm.weight, stacked("self_attn.q_norm.weight")),
        (layers.attention.k_norm.weight, stacked("self_attn.k_norm.weight")),
        (layers.input_norm.weight, stacked("input_layernorm.weight")),
        (layers.post_attention_norm.weight, stacked("post_attention_layernorm.weight")),
        (layers.experts.router.weight, stacked("mlp.gate.weight")),
        (layers.experts.experts.stacked.gate_proj.weight, gate),
        (layers.experts.experts.stacked.up_proj.weight, up),
        (layers.experts.experts.stacked.down_proj.weight, stacked("mlp.experts.down_proj")),
    ]
    if model.head is not None:
        places.append((model.head.weight, get("lm_head.weight")))
    replacements = {id(named.array): array.reshape(named.array.shape) for named, array in places}
    assert len(replacements) == len(jax.tree.leaves(model))
    return jax.tree.map(lambda leaf: replacements[id(leaf)], model)


@pytest.fixture(params=VARIANTS, scope="module")
def case(request):
    config = VARIANTS[request.param]
    reference = hugging_face_model(config)
    tokens = np.random.default_rng(0).integers(0, Vocab.size, (Batch.size, Pos.size))
    return config, reference, tokens


def test_logits(case):
    config, reference, tokens = case
    model = ours_from(dict(reference.state_dict()), config)
    hidden, _ = model.hidden_states(hax.named(jnp.asarray(tokens), (Batch, Pos)))
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(model.logits(hidden).array, expected, atol=1e-4)


def test_gradients(case):
    config, reference, tokens = case
    model = ours_from(dict(reference.state_dict()), config)
    named = hax.named(jnp.asarray(tokens), (Batch, Pos))
    has_target = (hax.arange(Pos) < Pos.size - 1).astype(jnp.float32)
    weights = hax.ones((Batch, Pos)) * has_target
    batch = TokenBatch(named, hax.roll(named, -1, Pos), weights)
    loss_of = eqx.filter_jit(eqx.filter_value_and_grad(lambda m: next_token_loss(m, batch)[1]["loss"]))
    loss, gradient = loss_of(model)
    reference.zero_grad()
    expected_loss = reference(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
    expected_loss.backward()
    expected = ours_from({name: p.grad for name, p in reference.named_parameters()}, config)
    np.testing.assert_allclose(loss, expected_loss.item(), rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert jnp.linalg.norm(ours - theirs) <= 1e-3 * jnp.linalg.norm(theirs)


def test_load_balance_loss_of_statistics_averaged_over_layers(case):
    config, reference, tokens = case
    model = ours_from(dict(reference.state_dict()), config)
    _, statistics = model.layer_states(hax.named(jnp.asarray(tokens), (Batch, Pos)))
    pooled = RouterStatistics(
        hax.mean(statistics.load, config.Layers), hax.mean(statistics.importance, config.Layers)
    )
    with torch.no_grad():
        logits = reference(torch.tensor(tokens), output_router_logits=True).router_logits
    expected = transformers.models.qwen3_moe.modeling_qwen3_moe.load_balancing_loss_func(
        logits, config.experts.num_experts, config.experts.experts_per_token
    )
    np.testing.assert_allclose(load_balance_loss(pooled, config.Experts).scalar(), expected.item(), rtol=1e-5)
