"""Every architecture against transformers' implementation, on random small models;
needs torch and PEFT.
"""

import copy
import dataclasses
import json
import warnings
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

import models.architectures as architectures
from models.generation.decoding import continued_tokens
from models.generation.sampling import Sampling
from models.hf_io.adapters import load_adapters, save_adapters
from models.hf_io.decoder_weights import write_decoder
from models.hf_io.formats import config_from_hf, format_of
from models.hf_io.safetensors_folder import SafetensorsFolder, WeightsError
from models.lm import next_token_loss
from models.loading import load_model
from models.parts.config import SparseDecoderConfig
from models.parts.decoder import Decoder
from models.run_config import find_model
from stacked_remat.lora import LoraConfig, apply_lora, lora_filter
from stacked_remat.training import TokenBatch

from .architecture_cases import CASES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    import safetensors.torch

    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

assert architectures  # registers them
Vocab, Batch, Pos = Axis("vocab", 53), Axis("batch", 2), Axis("position", 11)
TOKENS = np.random.default_rng(0).integers(0, Vocab.size, (Batch.size, Pos.size))
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"]
ATTENTION += ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")
ATTENTION += ["out_proj", "in_proj"]
ATTENTION += ["f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj"]
MLP = ["gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3"]

# Tests compile quickly (Makefile), which rounds more: in small models of many products,
# to errors of gradients several times as large.
AS_USERS_COMPILE = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
jit: Any = eqx.filter_jit


def new_model(family: str, fields: dict):
    of_experts = (
        dict(experts_implementation="eager") if "num_experts_per_tok" in fields else {}
    )
    config = getattr(transformers, f"{family}Config")(
        vocab_size=Vocab.size,
        max_position_embeddings=64,
        pad_token_id=0,
        attn_implementation="eager",
        **of_experts,
        **fields,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    offset = 0.0 if family.startswith("Gemma") else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide enough that some experts reach the limit of a clamped SwiGLU.
            scale = 1.0 if family == "GptOss" and "gate_up" in name else 0.2
            parameter.copy_(
                torch.randn_like(parameter) * scale
                + (offset if "norm" in name else 0.0)
            )
        for name, buffer in model.named_buffers():
            if name.endswith(ROUTER_BIASES):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
        if model.get_input_embeddings().padding_idx is not None:
            model.get_input_embeddings().padding_idx = None  # its gradient counts here
    return model


def decoder_from(model, folder) -> Decoder:
    """Ours, read from what transformers' model saves."""
    model.save_pretrained(folder, max_shard_size="20KB")
    found = find_model(str(folder))
    assert found.Vocab == Vocab
    return load_model(found)


@eqx.filter_jit
def logits(decoder):
    hidden, _ = decoder.hidden_states(hax.named(jnp.asarray(TOKENS), (Batch, Pos)))
    return decoder.logits(hidden).array


def loaded(like, folder):
    """The model of transformers in a folder."""
    eager = dict(attn_implementation="eager")
    if hasattr(like.config, "num_experts_per_tok"):
        eager["experts_implementation"] = "eager"
    return type(like).from_pretrained(folder, **eager)


def hf_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def rounded_otherwise(model):
    """Copies of a model whose weights are changed by up to half of float32's epsilon.

    A random model of many narrow layers may change rounding errors into larger ones;
    how far these copies are from the model says how far a right result may be.
    """
    for seed in range(3):
        copied = copy.deepcopy(model)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in copied.parameters():
                noise = torch.rand_like(parameter) - 0.5
                parameter.mul_(1 + noise * torch.finfo(torch.float32).eps)
        yield copied


def close(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(
        found, expected, atol=tolerance * np.abs(expected).max(), rtol=0
    )


@pytest.fixture(params=CASES.values(), ids=CASES, scope="module")
def case(request, tmp_path_factory):
    reference, folder = new_model(*request.param), tmp_path_factory.mktemp("weights")
    return reference, decoder_from(reference, folder), folder


FAMILIES = {
    family: (name, (family, fields))
    for name, (family, fields) in reversed(CASES.items())
}
one_of_each_family = pytest.mark.parametrize(
    "case",
    [pytest.param(given, id=name) for name, given in FAMILIES.values()],
    indirect=True,
    scope="module",
)


# By default transformers rotates half of 42 coordinates, which are no pairs.
SERVED = {"Glm4Moe": {"head_dim": 128}}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_that_transformers_writes_is_known(family):
    make = getattr(transformers, f"{family}Config")
    with warnings.catch_warnings(action="error"):
        config_from_hf(make(**SERVED.get(family, {})).to_dict())


def close_to_logits_of(model, found, tolerance=1e-5):
    """Logits that differ from those of a model of transformers by no more than a
    tolerance, or than rounding may make of them.
    """
    expected = hf_logits(model)
    error = np.abs(found - expected).max()
    if error > tolerance * np.abs(expected).max():
        others = map(hf_logits, rounded_otherwise(model))
        assert error <= 2 * max(np.abs(other - expected).max() for other in others)


def test_logits(case):
    reference, decoder, _ = case
    assert np.abs(hf_logits(reference)).max() > 1
    close_to_logits_of(reference, logits(decoder))


def test_the_round_trip_is_exact(case, tmp_path):
    reference, decoder, folder = case
    write_decoder(tmp_path / "again", decoder, max_file_bytes=4_000)
    known = format_of(decoder.config)
    first = SafetensorsFolder.open(folder).renamed(known.read_name)
    second = SafetensorsFolder.open(tmp_path / "again")
    stored: Any = second.stored.values()
    assert len({tensor.path for tensor in stored}) > 1
    # Transformers cuts what it has joined into equal parts.
    if not known.joined:
        assert first.shapes == second.shapes
        for name in first.shapes:
            np.testing.assert_array_equal(first.read(name), second.read(name))
    again = loaded(reference, tmp_path / "again")
    tensors = again.state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, tensors[name])
    own, theirs = (one.config.to_dict() for one in (again, reference))
    names = "rope_parameters layer_types attention_bias head_dim rms_norm_eps".split()
    kept = [name for name in names if name in theirs]
    assert {name: _whole(own.get(name)) for name in kept} == {
        name: _whole(theirs[name]) for name in kept
    }
    close(hf_logits(again), hf_logits(reference), 1e-6)


def _whole(value):
    """A value of a config, with the defaults of YaRN that may be left out."""
    is_yarn = isinstance(value, dict) and value.get("rope_type") == "yarn"
    return {"beta_fast": 32.0, "beta_slow": 1.0} | value if is_yarn else value


def expected_gradients(model, folder):
    """The loss of a model of transformers, and its gradients as leaves of ours."""
    copied = copy.deepcopy(model)
    copied.config.output_router_logits = False  # the loss of tokens alone
    loss = copied(torch.tensor(TOKENS), labels=torch.tensor(TOKENS)).loss
    loss.backward()
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.copy_(parameter.grad)
        for name, buffer in copied.named_buffers():
            if name.endswith(ROUTER_BIASES):
                buffer.zero_()
    return loss.item(), jax.tree.leaves(decoder_from(copied, folder))


def test_loss_and_gradients(case, tmp_path):
    reference, decoder, _ = case
    named = hax.named(jnp.asarray(TOKENS), (Batch, Pos))
    weights = hax.ones((Batch, Pos)) * (hax.arange(Pos) < Pos.size - 1).astype(
        jnp.float32
    )
    batch = TokenBatch(named, hax.roll(named, -1, Pos), weights)
    expected_loss, expected = expected_gradients(reference, tmp_path / "gradients")
    whole = np.sqrt(sum(np.square(leaf).sum() for leaf in expected))
    allowed = [min(1e-5 * whole, 3e-5 * np.linalg.norm(leaf)) for leaf in expected]
    for compiler_options in ({}, AS_USERS_COMPILE):
        loss_of = jit(
            eqx.filter_value_and_grad(lambda m: next_token_loss(m, batch)[1]["loss"]),
            compiler_options=compiler_options,
        )
        loss, gradient = loss_of(decoder)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        pairs = zip(jax.tree.leaves(gradient), expected, strict=True)
        errors = np.array([np.linalg.norm(ours - theirs) for ours, theirs in pairs])
        if all(errors <= allowed):
            return
    for number, other in enumerate(rounded_otherwise(reference)):
        _, leaves = expected_gradients(other, tmp_path / f"rounded {number}")
        for place, leaf in enumerate(leaves):
            change = 2 * np.linalg.norm(leaf - expected[place])
            allowed[place] = max(allowed[place], change)
    assert all(errors <= allowed)


def test_the_training_loss_with_the_auxiliary_one(case):
    reference, decoder, _ = case
    config = decoder.config
    if (
        not isinstance(config, SparseDecoderConfig)
        or not reference.config.output_router_logits
    ):
        return
    real = np.ones_like(TOKENS)
    real[1, 7:] = 0
    masked = {
        "attention_mask": torch.tensor(real),
        "labels": torch.tensor(np.where(real == 1, TOKENS, -100)),
    }
    with torch.no_grad():
        expected = reference(torch.tensor(TOKENS), **masked, output_router_logits=True)
    experts = dataclasses.replace(config.experts, load_balance_loss="pooled")
    pooled = dataclasses.replace(
        decoder, config=dataclasses.replace(config, experts=experts)
    )
    named, documents = (
        hax.named(jnp.asarray(one, jnp.int32), (Batch, Pos)) for one in (TOKENS, real)
    )
    counted = np.concatenate([real[:, 1:], np.zeros_like(real[:, :1])], axis=1)
    weights = hax.named(jnp.asarray(counted, jnp.float32), (Batch, Pos))
    batch = TokenBatch(named, hax.roll(named, -1, Pos), weights, documents)
    loss, metrics = eqx.filter_jit(next_token_loss)(pooled, batch)
    np.testing.assert_allclose(
        metrics["load_balance"], expected.aux_loss.item(), rtol=1e-5
    )
    np.testing.assert_allclose(
        loss - metrics["loss"], 0.3 * expected.aux_loss.item(), rtol=1e-4
    )
    np.testing.assert_allclose(loss, expected.loss.item(), rtol=1e-5)


of_experts = pytest.mark.parametrize(
    "case",
    [
        pytest.param(given, id=name)
        for name, given in CASES.items()
        if "num_experts_per_tok" in given[1] and given[1].get("num_local_experts") != 0
    ],
    indirect=True,
    scope="module",
)


def saved(tensors, like, folder):
    """A folder with the config of another and these tensors."""
    folder.mkdir()
    (folder / "config.json").write_bytes((like / "config.json").read_bytes())
    whole = {name: tensor.clone() for name, tensor in tensors.items()}
    safetensors.torch.save_file(
        whole, folder / "model.safetensors", metadata={"format": "pt"}
    )
    return folder


@of_experts
def test_files_of_the_model_in_memory_are_read(case, tmp_path):
    """Their experts are fused, and Mixtral's have another name."""
    reference, decoder, folder = case
    tensors = reference.state_dict()
    if decoder.head is None:
        del tensors["lm_head.weight"]
    assert any(name.endswith("experts.gate_up_proj") for name in tensors)
    root = saved(tensors, folder, tmp_path / "in_memory")
    expected, found = (
        jax.tree.leaves(decoder),
        jax.tree.leaves(load_model(find_model(str(root)))),
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    close(hf_logits(loaded(reference, root)), hf_logits(reference), 1e-6)


@one_of_each_family
def test_a_head_of_its_own_is_kept_where_the_config_ties_it(case, tmp_path):
    reference, decoder, folder = case
    if type(reference).__name__ == "KimiLinearForCausalLM":
        pytest.skip("it is never tied")
    tensors = {
        name: tensor
        for name, tensor in reference.state_dict().items()
        if name != "lm_head.weight"
    }
    embedding = tensors["model.embed_tokens.weight"]
    root = saved(
        {**tensors, "lm_head.weight": embedding.flip(0)}, folder, tmp_path / "own_head"
    )
    document = json.loads((folder / "config.json").read_text())

    def ours(root, ties):
        (root / "config.json").write_text(
            json.dumps(document | {"tie_word_embeddings": ties})
        )
        return load_model(find_model(str(root)))

    with pytest.warns(UserWarning, match="a head of other values, which is used"):
        own = ours(root, True)
    close_to_logits_of(loaded(reference, root), logits(own))
    assert own.head is not None and np.abs(logits(own) - logits(decoder)).max() > 0.1
    # Of one that is missing the other is taken.
    moved = {
        name: tensor
        for name, tensor in tensors.items()
        if name != "model.embed_tokens.weight"
    }
    for one, values in (
        ("embedding", tensors),
        ("head", moved | {"lm_head.weight": embedding}),
    ):
        root = saved(values, folder, tmp_path / one)
        tied = ours(root, True)
        close_to_logits_of(loaded(reference, root), logits(tied))
        assert tied.head is None
    with pytest.raises(
        WeightsError, match="has no lm_head.weight, and its config does not tie"
    ):
        ours(tmp_path / "embedding", False)


@one_of_each_family
def test_greedy_text(case):
    reference, decoder, _ = case
    prompts = [TOKENS[0, :5], TOKENS[1, :3]]
    steps = continued_tokens(
        decoder,
        prompts,
        max_new_tokens=8,
        sampling=Sampling(temperature=0.0),
        key=jax.random.key(0),
    )
    ours = np.stack(list(steps), axis=1).tolist()
    for prompt, found in zip(prompts, ours, strict=True):
        tokens = torch.tensor([prompt.tolist()])
        options = dict(
            max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        whole = reference.generate(
            tokens, attention_mask=torch.ones_like(tokens), **options
        )
        assert found == whole[0, len(prompt) :].tolist()


def check_that_we_read(reference, decoder, folder, **targets):
    """What PEFT writes of random adapters of these targets changes our logits as it
    changes theirs.
    """
    config = peft.LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **targets)
    torch.manual_seed(1)
    model = peft.get_peft_model(copy.deepcopy(reference), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    expected = hf_logits(model)
    assert np.abs(expected - hf_logits(reference)).max() > 1e-2
    close_to_logits_of(model, logits(load_adapters(decoder, folder)), 2e-5)


def adapted_at_random(decoder, targets):
    """The decoder with random adapters of these targets, A and B."""
    shapes = apply_lora(decoder, LoraConfig(3, 2.0, targets), key=jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf, own: (
            jnp.asarray(rng.normal(size=leaf.shape) * 0.2, jnp.float32) if own else leaf
        ),
        shapes,
        lora_filter(shapes),
    )


def check_that_peft_reads(reference, decoder, folder, targets):
    """What we write of random adapters of these targets, which we read back too."""
    adapted = adapted_at_random(decoder, targets)
    save_adapters(folder, adapted)
    expected = logits(adapted)
    assert np.abs(expected - logits(decoder)).max() > 1e-2
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(reference), folder).eval()
    close_to_logits_of(theirs, expected, 2e-5)
    again = load_adapters(decoder, folder)
    assert jax.tree.structure(again) == jax.tree.structure(adapted)
    for left, right in zip(
        jax.tree.leaves(again), jax.tree.leaves(adapted), strict=True
    ):
        np.testing.assert_array_equal(left, right)


@one_of_each_family
def test_what_peft_writes_we_read(case, tmp_path):
    reference, decoder, _ = case
    of_experts = isinstance(decoder.config, SparseDecoderConfig)
    targets = dict(target_parameters=EXPERTS) if of_experts else {}
    modules = ATTENTION if of_experts else ATTENTION + MLP
    check_that_we_read(reference, decoder, tmp_path, target_modules=modules, **targets)


@one_of_each_family
def test_what_we_write_peft_reads_and_we_read_back(case, tmp_path):
    reference, decoder, _ = case
    check_that_peft_reads(reference, decoder, tmp_path, ("layers.*",))
