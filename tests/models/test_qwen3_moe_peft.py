"""Adapters against Hugging Face's PEFT on a small random model; needs torch, transformers and peft."""

import json
import re
import warnings

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray

from models.decoder.config import AttentionConfig, ExpertsConfig
from models.decoder.decoder import Decoder
from models.hf_io.adapters import load_adapters, peft_names, save_adapters
from models.qwen3 import Qwen3MoeConfig
from stacked_remat.lora import LoraConfig, PeftParameter, apply_lora, lora_filter, merge_lora, save_peft

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

Vocab, Batch, Pos = Axis("vocab", 29), Axis("batch", 2), Axis("position", 7)
# Expert width and model width differ, and no two ranks are alike, so that nothing fits by accident.
CONFIG = Qwen3MoeConfig(
    hidden_dim=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=14,
    attention=AttentionConfig(head_dim=6),
    experts=ExpertsConfig(num_experts=3, experts_per_token=2, intermediate_dim=10, dense_layers=(1,)),
)
TOKENS = np.random.default_rng(0).integers(0, Vocab.size, (Batch.size, Pos.size))
LAYERS = {"dense": [1], "sparse": [0, 2]}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def hf_weights():
    torch.manual_seed(0)
    state = new_hf_model().state_dict()
    return {name: torch.randn_like(t) * 0.3 + (1.0 if t.ndim == 1 else 0.0) for name, t in state.items()}


def new_hf_model():
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=Vocab.size,
            hidden_size=16,
            num_hidden_layers=3,
            intermediate_size=14,
            mlp_only_layers=[1],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            num_experts=3,
            num_experts_per_tok=2,
            moe_intermediate_size=10,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rotary.theta},
            attn_implementation="eager",
            experts_implementation="eager",
        )
    ).eval()


@pytest.fixture
def hf_model(hf_weights):
    model = new_hf_model()
    model.load_state_dict(hf_weights)
    return model


@pytest.fixture(scope="module")
def ours(hf_weights):
    """The decoder with the same weights: linears by the names that are under test, the rest by hand."""
    weights = {name: tensor.numpy() for name, tensor in hf_weights.items()}
    names = peft_names(CONFIG)

    def fill(path, named):
        dotted = re.sub(r"\bstacked\b", "*", jax.tree_util.keystr(path, simple=True, separator="."))
        dotted = dotted.replace("layers.stacks.", "layers.")
        stack = [axis.size for axis in named.axes if axis.name in ("layers", "experts")]
        if dotted.endswith("router.weight"):
            stack = stack[:1]
        one_by_one = [matrix(dotted, index, weights, names) for index in np.ndindex(*stack)]
        array = np.stack(one_by_one).reshape([axis.size for axis in named.axes])
        return NamedArray(jnp.asarray(array), named.axes)

    shapes = eqx.filter_eval_shape(Decoder.init, CONFIG, Vocab, key=jax.random.key(0))
    return jax.tree_util.tree_map_with_path(fill, shapes, is_leaf=lambda node: isinstance(node, NamedArray))


def matrix(dotted, index, weights, names):
    module = dotted.removesuffix(".weight")
    norms = {
        "input_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    }
    _, kind, _, own = f"{module}.....".split(".", 3)
    own = own.rstrip(".")
    if module in ("embedding", "norm"):
        return weights[{"embedding": "model.embed_tokens", "norm": "model.norm"}[module] + ".weight"]
    if own in norms:
        return weights[f"model.layers.{LAYERS[kind][index[0]]}.{norms[own]}.weight"]
    name = names(module, index)
    if isinstance(name, str):
        return weights[f"{name}.weight"]
    whole = weights[name.target]
    if name.size == 1:
        return whole
    return np.split(whole[name.index], name.parts)[name.part]


def logits(model):
    tokens = hax.named(jnp.asarray(TOKENS, jnp.int32), (Batch, Pos))

    @eqx.filter_jit
    def run(model):
        hidden, _ = model.hidden_states(tokens)
        return model.logits(hidden).rearrange((Batch, Pos, Vocab)).array

    return np.asarray(run(model))


def hf_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def trained(model, *targets, rank=3):
    """The model with random adapters, A and B."""
    config = LoraConfig(rank, 2.0, targets)
    shapes = eqx.filter_eval_shape(lambda: apply_lora(model, config, key=jax.random.key(0)))
    rng, base = np.random.default_rng(1), iter(jax.tree.leaves(model))
    return jax.tree.map(
        lambda leaf, own: jnp.asarray(rng.normal(size=leaf.shape) * 0.3, jnp.float32) if own else next(base),
        shapes,
        lora_filter(shapes),
    )


def peft_model(hf_model, **fields):
    config = peft.LoraConfig(lora_dropout=0.0, init_lora_weights=False, **fields)
    torch.manual_seed(1)
    model = peft.get_peft_model(hf_model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=2e-5 * np.abs(expected).max())


def test_the_base_models_are_equal(ours, hf_model):
    close(logits(ours), hf_logits(hf_model))


PEFT_CONFIGS = {
    "attention": {"r": 3, "lora_alpha": 5, "target_modules": ATTENTION},
    "rank-stabilised": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj"], "use_rslora": True},
    "patterns": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "o_proj"],
        "rank_pattern": {"layers.2.self_attn.q_proj": 5},
        "alpha_pattern": {"o_proj": 7},
    },
    "some layers": {"r": 2, "target_modules": ["v_proj"], "layers_to_transform": [2]},
    "experts": {"r": 3, "lora_alpha": 5, "target_modules": ["o_proj"], "target_parameters": EXPERTS},
    "down alone": {"r": 3, "target_modules": [], "target_parameters": ["experts.down_proj"]},
    "gate and up alone": {"r": 3, "target_modules": [], "target_parameters": ["experts.gate_up_proj"]},
    "router": {"r": 2, "target_modules": [], "target_parameters": ["mlp.gate.weight"]},
    "head, with its weight": {"r": 3, "target_modules": ["q_proj", "lm_head"]},
    "all": {"r": 2, "target_modules": ATTENTION, "target_parameters": [*EXPERTS, "mlp.gate.weight"]},
}


@pytest.mark.parametrize("fields", PEFT_CONFIGS.values(), ids=PEFT_CONFIGS)
def test_what_peft_writes_we_read(ours, hf_model, tmp_path, fields):
    model = peft_model(hf_model, **fields)
    model.save_pretrained(tmp_path)
    loaded = load_adapters(ours, tmp_path)
    close(logits(loaded), hf_logits(model))


TARGETS = {
    "attention": ("*attention*",),
    "experts": ("*mlp.experts*",),
    "gate alone": ("*.gate_proj",),
    "down alone": ("*.down_proj",),
    "dense MLP": ("layers.dense.*.mlp.*",),
    "all": ("layers.*",),
}


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_what_we_write_peft_reads_and_we_read_back(ours, hf_model, tmp_path, targets):
    model = trained(ours, *targets)
    save_adapters(tmp_path, model)
    expected = logits(model)
    assert np.abs(expected - logits(ours)).max() > 1e-2
    close(hf_logits(peft.PeftModel.from_pretrained(hf_model, tmp_path).eval()), expected)
    again = load_adapters(ours, tmp_path)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for left, right in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(left, right)


def test_what_we_write_is_merged_alike(ours, hf_model, tmp_path):
    model = trained(ours, "layers.*")
    save_adapters(tmp_path, model)
    merged = peft.PeftModel.from_pretrained(hf_model, tmp_path).merge_and_unload()
    close(logits(merge_lora(model)), hf_logits(merged.eval()))


def test_experts_one_by_one_are_read(ours, tmp_path):
    model = trained(ours, "*attention*", "*mlp.experts*")
    save_peft(tmp_path, model, peft_names(CONFIG, "separate"))
    again = load_adapters(ours, tmp_path)
    for left, right in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(left, right)


def test_targets_are_short_and_ranks_are_patterns_where_they_differ(ours, tmp_path):
    save_adapters(tmp_path, trained(ours, "*.q_proj", "*mlp.experts*"))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj"]
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    assert (config["r"], config["lora_alpha"]) == (3, 2)
    assert config["rank_pattern"] == {r"experts\.gate_up_proj": 6}
    assert config["alpha_pattern"] == {r"experts\.gate_up_proj": 4}
    assert isinstance(peft_names(CONFIG)("layers.sparse.*.mlp.router", (0,)), PeftParameter)
    with pytest.raises(ValueError, match="embedding is not a linear map"):
        peft_names(CONFIG)("embedding", ())
