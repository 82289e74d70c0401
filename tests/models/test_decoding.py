"""Decoding with a cache against the model's forward pass over the whole sequence."""

import dataclasses
import functools
import itertools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from models.deepseek_v3 import DeepseekV3Config
from models.gemma3 import Gemma3Config
from models.generation.decoding import continued_tokens, first_tokens, one_more_token
from models.generation.sampling import Sampling
from models.gpt_oss import GptOssConfig
from models.hf_io.formats import config_from_hf
from models.llama4 import Llama4Config
from models.parts.attention import Attention
from models.parts.decoder import Decoder, Layer
from models.parts.sections import (
    FULL,
    SLIDING,
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    LinearAttentionConfig,
    RotaryConfig,
    TemperatureConfig,
)
from models.parts.tokens import has_positions
from models.qwen3 import Qwen3Config, Qwen3Layer
from models.qwen3_moe import Qwen3MoeConfig
from models.qwen3_next import Qwen3NextConfig
from stacked_remat import memory, streaming
from stacked_remat.lora import LoraConfig, apply_lora, lora_filter
from stacked_remat.ops import YarnRotary

from ..blocks import assert_close
from .random_weights import random_weights
from .test_published_configs import PUBLISHED, sizes

Vocab, Batch, Pos = Axis("vocab", 19), Axis("batch", 2), Axis("position", 9)
SIZES = dict(hidden_dim=16, num_layers=3, num_heads=4, num_kv_heads=2)
EXPERTS = ExpertsConfig(3, 2, 6)
SMALL_LATENT = LatentConfig(
    query_rank=5, key_value_rank=4, plain_dim=4, rotary_dim=2, value_dim=3
)


class OtherHeads(Qwen3MoeConfig):
    """The dense layers have other heads."""

    def init_layer(self, kind, *, key):
        config = self
        if not kind.sparse:
            attention = dataclasses.replace(self.attention, head_dim=4)
            config = dataclasses.replace(
                self, num_heads=2, num_kv_heads=2, attention=attention
            )
        return Qwen3Layer.init(config, kind, key=key)


MODELS = {
    "dense": Qwen3Config(**SIZES, attention=AttentionConfig(bias=True)),
    "moe": Qwen3MoeConfig(**SIZES, experts=EXPERTS),
    "tied, window": Qwen3Config(
        **SIZES,
        tie_word_embeddings=True,
        attention=AttentionConfig(bias=True, window=3),
    ),
    "mixed": OtherHeads(
        **SIZES | dict(num_layers=3, num_kv_heads=1),
        attention=AttentionConfig(
            head_dim=6, window=2, layer_types=(FULL, FULL, SLIDING)
        ),
        experts=dataclasses.replace(EXPERTS, dense_layers=(0,)),
    ),
    "sinks": GptOssConfig(
        **SIZES | dict(num_layers=2),
        tie_word_embeddings=True,
        attention=AttentionConfig(bias=True, window=3, layer_types=(SLIDING, FULL)),
        experts=EXPERTS,
    ),
    "states and keys": Qwen3NextConfig(
        **SIZES | dict(num_layers=4),
        attention=AttentionConfig(head_dim=8),
        linear=LinearAttentionConfig(2, 4, 6, 5, conv_size=3),
        experts=dataclasses.replace(EXPERTS, dense_layers=(0,)),
        shared_dim=6,
    ),
    "two rotary tables, four norms": Gemma3Config(
        **SIZES,
        attention=AttentionConfig(
            head_dim=6, window=3, layer_types=(SLIDING, SLIDING, FULL)
        ),
    ),
    "latent": DeepseekV3Config(
        **SIZES | dict(num_kv_heads=4),
        latent=SMALL_LATENT,
        attention=AttentionConfig(window=3, layer_types=(SLIDING, FULL, FULL)),
        rotary=RotaryConfig(100.0, YarnRotary(4.0, 8, mscale=1.0, mscale_all_dim=1.0)),
        experts=ExpertsConfig(4, 2, 6, dense_layers=(0,)),
        num_groups=2,
    ),
    "chunks, temperature, weighed inputs": Llama4Config(
        **SIZES,
        attention=AttentionConfig(window=3, layer_types=(SLIDING, FULL)),
        temperature=TemperatureConfig(2, 0.5),
        experts=ExpertsConfig(4, 2, 6, norm_topk_prob=False, dense_layers=(0,)),
    ),
}
GREEDY = Sampling(temperature=0.0)


# Unoptimised code, which compiles sooner.
jit: Any = eqx.filter_jit
quickly = functools.partial(
    jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


@functools.cache
def make(name="mixed") -> Decoder:
    """A decoder with weights so large that what it reads matters, and sinks and biases
    that are not zero.
    """
    return random_weights(Decoder.init, MODELS[name], Vocab, spread=0.4)


@quickly
def logits_of(model, tokens):
    return model.logits(model.hidden_states(tokens)[0])


TOKENS = np.random.default_rng(1).integers(0, Vocab.size, (Batch.size, Pos.size))


def tokens_of(length=Pos.size):
    return hax.named(jnp.asarray(TOKENS[:, :length], jnp.int32), (Batch, "position"))


def tokens_at(positions):
    """The token of each row at its position, and the positions."""
    tokens = jnp.asarray(TOKENS[np.arange(Batch.size), positions], jnp.int32)
    return hax.named(tokens, Batch), hax.named(jnp.int32(positions), Batch)


def full_logits(name):
    return logits_of(make(name), tokens_of())


def allowed_error(name):
    """1e-5, or where rounding makes more of it, twice what the logits change by where
    weights change by up to half of float32's epsilon.
    """
    model = make(name)
    expected = full_logits(name).array
    changes = []
    for seed in range(6):
        generator = np.random.default_rng(seed)

        def rounded(leaf, generator=generator):
            if not eqx.is_inexact_array(leaf):
                return leaf
            noise = generator.random(leaf.shape, np.float32) - np.float32(0.5)
            return leaf * (1 + noise * np.finfo(np.float32).eps)

        other = logits_of(jax.tree.map(rounded, model), tokens_of()).array
        changes.append(np.abs(other - expected).max())
    return max(1e-5, 2 * max(changes))


@quickly
def prefill(model, tokens, slots, lengths=None):
    hidden, cache = model.prefill(tokens, slots, lengths)
    return model.logits(hidden), cache


@quickly
def decode(model, tokens, positions, cache):
    hidden, cache = model.decode(tokens, positions, cache)
    return model.logits(hidden), cache


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("sinks", marks=pytest.mark.deep),
        *list(MODELS)[-2:],
        "mixed",
        "states and keys",
    ],
)
def test_prefill_and_decode_give_the_logits_of_the_whole_sequence(name):
    """With prompts of two lengths, one longer than the window, and beyond it."""
    expected, model = np.asarray(full_logits(name).array), make(name)
    assert np.max(np.abs(expected)) > 1
    error = allowed_error(name)
    assert error < 1e-4
    lengths = np.array([5, 2])
    named_lengths = hax.named(jnp.asarray(lengths), Batch)
    logits, cache = prefill(model, tokens_of(5), Pos.size, named_lengths)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert model.cache_bytes(Batch.size, Pos.size) == size
    found = np.asarray(logits.array)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(
            found[row, :length], expected[row, :length], atol=error
        )
    for step in range(Pos.size - 2):
        # The row that is done reads its last token again.
        at = np.minimum(lengths + step, Pos.size - 1)
        logits, cache = decode(model, *tokens_at(at), cache)
        found, wanted = np.asarray(logits.array), expected[np.arange(Batch.size), at]
        # A state would take up the last token twice.
        is_next = lengths + step < Pos.size
        rows = is_next if name == "states and keys" else slice(None)
        np.testing.assert_allclose(found[rows], wanted[rows], atol=error)


def test_caches_have_latents_and_windows():
    gemma_27b = PUBLISHED["Gemma 3 1B"][0] | sizes(5376, 21504, 62, 32, 16, 262_208)
    gemma_27b |= {"head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024}
    deepseek, gemma = (
        dataclasses.replace(config_from_hf(document)[0], compute_dtype="bfloat16")
        for document in (PUBLISHED["DeepSeek V3"][0], gemma_27b)
    )
    deepseek, gemma = (
        eqx.filter_eval_shape(Decoder.init, config, Vocab, key=jax.random.key(0))
        for config in (deepseek, gemma)
    )
    assert deepseek.cache_bytes(1, 1000) == 1000 * 61 * (512 + 64) * 2 == 1000 * 70_272
    of_layer = 2 * 16 * 128 * 2
    assert gemma.cache_bytes(1, 131_072) == (10 * 131_072 + 52 * 1024) * of_layer
    for model in (deepseek, gemma):
        tokens = hax.zeros((Batch, Axis("position", 2048)), jnp.int32)
        _, caches = eqx.filter_eval_shape(
            lambda m, tokens: m.prefill(tokens, 131_072), model, tokens
        )
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))
        assert size == model.cache_bytes(Batch.size, 131_072)


def test_the_cache_of_linear_attention_does_not_grow():
    config = dataclasses.replace(MODELS["states and keys"], compute_dtype="bfloat16")
    model = eqx.filter_eval_shape(Decoder.init, config, Vocab, key=jax.random.key(0))
    # Three layers of four have a state in float32 and two inputs of each channel.
    state, window = 4 * (4 * 6 * 5), 2 * 2 * (2 * 6 + 2 * 6 + 4 * 5)
    keys_and_values = 2 * 2 * 2 * 8
    for slots in (10, 1000):
        expected = 3 * (state + window) + slots * keys_and_values
        assert model.cache_bytes(1, slots) == expected
    caches = eqx.filter_eval_shape(model.empty_caches, Batch, 9)
    state, *windows = caches["linear_sparse"]
    assert state.dtype == jnp.float32
    assert {window.dtype for window in windows} == {jnp.dtype(jnp.bfloat16)}


def test_a_layer_with_adapters_decodes_from_latents():
    def init(*, key):
        model = Decoder.init(MODELS["latent"], Vocab, key=key)
        return apply_lora(model, LoraConfig(2, 2.0, ("layers.*",)), key=key)

    model = random_weights(init, spread=0.3)
    assert any(jax.tree.leaves(lora_filter(model)))
    expected = np.asarray(logits_of(model, tokens_of()).array)
    _, cache = prefill(model, tokens_of(5), Pos.size)
    logits, _ = decode(model, *tokens_at([5, 5]), cache)
    np.testing.assert_allclose(logits.array, expected[:, 5], atol=1e-5)


class StateLayer(Layer):
    """A layer that keeps a state: a decaying sum of what it was given."""

    decay: hax.NamedArray
    Embed: Axis = eqx.field(static=True)

    def forward(self, x, tokens, cache=None):
        if not has_positions(x):
            state = found = self.decay * cache.read() + x
            return x + found, cache.write(state), None
        lengths = Pos.size if tokens.lengths is None else tokens.lengths
        positions = hax.arange(x.resolve_axis("position"))

        def step(state, given):
            position, own = given
            new = self.decay * state + own
            # Padding leaves the state as it is.
            return hax.where(position < lengths, new, state), new

        start = hax.zeros([axis for axis in x.axes if axis.name != "position"])
        state, found = hax.scan(step, positions.axes[0])(start, (positions, x))
        found = found.rearrange(x.axes)
        return x + found, cache and cache.write(state), None

    def empty_cache(self, Batch, slots, dtype):
        return hax.zeros((Batch, self.Embed), dtype)

    @property
    def rotary(self):
        return None


class WithStates(Qwen3Config):
    """Layers with a state, and layers with a window."""

    def init_layer(self, kind, *, key):
        if kind.window is None:
            return StateLayer(hax.full(self.Embed, 0.5), self.Embed)
        return super().init_layer(kind, key=key)


def test_a_layer_may_keep_a_state_which_takes_up_no_padding():
    attention = AttentionConfig(window=3, layer_types=(SLIDING, FULL))
    config = WithStates(**SIZES, attention=attention)
    model = random_weights(Decoder.init, config, Vocab, spread=0.4)
    expected = np.asarray(logits_of(model, tokens_of()).array)
    lengths = np.array([5, 2])
    named_lengths = hax.named(jnp.asarray(lengths), Batch)
    _, cache = prefill(model, tokens_of(5), Pos.size, named_lengths)
    for step in range(2):
        at = lengths + step
        logits, cache = decode(model, *tokens_at(at), cache)
        wanted = expected[np.arange(Batch.size), at]
        np.testing.assert_allclose(logits.array, wanted, atol=1e-5)


def prompts_of(*lengths):
    rows = itertools.cycle(np.int32(TOKENS))
    return [row[:length] for row, length in zip(rows, lengths, strict=False)]


def continued(name, prompts, new, sampling=GREEDY, seed=5):
    key = jax.random.key(seed)
    steps = continued_tokens(
        make(name), prompts, max_new_tokens=new, sampling=sampling, key=key
    )
    return np.stack(list(steps), axis=1)


def greedy_loop(name, prompt, new):
    """The likeliest token of the forward pass over all that came before, again and
    again.
    """
    tokens = list(prompt)
    for _ in range(new):
        padded = np.zeros(Pos.size + 4, np.int32)  # of one length, which compiles once
        padded[: len(tokens)] = tokens
        logits = logits_of(make(name), hax.named(jnp.asarray(padded), "position"))
        tokens.append(int(np.argmax(np.asarray(logits.array)[len(tokens) - 1])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["tied, window", "states and keys"])
def test_a_batch_gives_what_each_prompt_gives_alone_and_an_argmax_loop(name):
    prompts = prompts_of(1, 6, 3)
    together = continued(name, prompts, 6)
    for row, prompt in zip(together, prompts, strict=True):
        assert row.tolist() == greedy_loop(name, prompt, 6)
    np.testing.assert_array_equal(together[:1], continued(name, prompts[:1], 6))
    assert len(np.unique(together)) > 3


def test_sampling_is_reproducible_and_rows_draw_independently():
    sampling, prompts = (
        Sampling(temperature=1.5, top_k=9, top_p=0.95),
        prompts_of(3, 3)[:1] * 2,
    )
    first = continued("dense", prompts, 8, sampling)
    np.testing.assert_array_equal(first, continued("dense", prompts, 8, sampling))
    assert np.any(first[0] != first[1])
    assert np.any(first != continued("dense", prompts, 8, sampling, seed=6))


def test_tokens_are_drawn_from_the_distribution_of_the_model():
    """The second token, given the first, over many rows of one prompt."""
    prompts = prompts_of(2)[:1] * 1000
    drawn = continued("dense", prompts, 2, Sampling(temperature=0.9))
    first = np.bincount(drawn[:, 0]).argmax()
    second = drawn[drawn[:, 0] == first, 1]
    sequence = hax.named(jnp.array([*prompts[0], first]), "position")
    logits = np.asarray(logits_of(make("dense"), sequence).array)
    expected = jax.nn.softmax(logits[-1] / np.float32(0.9))
    found = np.bincount(second, minlength=Vocab.size) / len(second)
    assert len(second) > 150 and np.count_nonzero(found) > 8
    assert np.all(
        np.abs(found - expected)
        <= 5 * np.sqrt(expected * (1 - expected) / len(second)) + 1e-3
    )


def test_a_step_compiles_once_for_all_steps(monkeypatch):
    traced = []
    monkeypatch.setattr(
        Attention,
        "attend_to_kept",
        lambda *args, real=Attention.attend_to_kept: traced.append(1) or real(*args),
    )
    # Four prompts: no other test has traced a step for as many.
    continued("dense", prompts_of(4, 2, 1, 3), 7)
    found = len(traced)
    assert found > 0
    continued("dense", prompts_of(3, 4, 2, 4), 7)
    assert len(traced) == found


def started(slots):
    keys = jax.random.split(jax.random.key(0), Batch.size)
    lengths = hax.named(jnp.array([2, 3]), Batch)
    model = make("dense")
    return (model, keys), first_tokens(
        model, tokens_of(3), lengths, keys, GREEDY, slots
    )


def test_the_cache_is_updated_in_place():
    """What is donated becomes the result, and the step takes far less memory than
    another cache would.
    """
    model_and_keys, state = started(slots=2048)
    cache = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
    found = (
        one_more_token.lower(model_and_keys, state, GREEDY)
        .compile()
        .compiled.memory_analysis()
    )
    assert found.alias_size_in_bytes >= cache
    # Keys and values of one of three layers
    assert found.temp_size_in_bytes < 0.75 * cache
    one_more_token(model_and_keys, state, GREEDY)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.cache))


def test_a_step_copies_the_experts_of_no_layer():
    config = dataclasses.replace(MODELS["moe"], experts=ExpertsConfig(64, 2, 64))
    model = eqx.filter_eval_shape(Decoder.init, config, Vocab, key=jax.random.key(0))
    # So many that blocks of rows are walked in a loop, to which slices would go whole
    Rows = Axis("batch", 8)
    tokens = hax.zeros((Rows, Axis("position", 2)), jnp.int32)
    _, cache = eqx.filter_eval_shape(
        lambda model, tokens: model.prefill(tokens, 4), model, tokens
    )
    new = hax.zeros(Rows, jnp.int32)
    experts = 4 * sum(
        leaf.size for leaf in jax.tree.leaves(model.layers.stacked.mlp.experts)
    )
    found = memory.report(Decoder.decode, model, new, new, cache)
    assert found.temporaries < experts / 3 / 2  # half of those of one of three layers


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_layers_on_the_host_give_the_same_tokens(rows):
    """The two choices of one row are fewer than the three experts, those of two rows
    are not.
    """
    resident = make("moe")
    streamed = streaming.to_host(resident)
    on_host = [streaming.is_on_host(leaf) for leaf in jax.tree.leaves(streamed.layers)]
    assert on_host == [leaf.ndim > 2 for leaf in jax.tree.leaves(streamed.layers)]
    tokens, at = (
        tokens_of()["batch", :rows],
        hax.full(Batch.resize(rows), 4, dtype=jnp.int32),
    )
    found, expected = (
        decode(
            model,
            tokens["position", 4],
            at,
            prefill(model, tokens["position", :4], Pos.size)[1],
        )
        for model in (streamed, resident)
    )
    assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "choices", "read"),
    [(1, 2, 2), (1, 3, 3), (1, 5, 5), (3, 3, 9), (3, 8, 24), (8, 8, 32)],
)
def test_only_experts_that_tokens_may_choose_come_from_the_host(rows, choices, read):
    config = dataclasses.replace(MODELS["moe"], experts=ExpertsConfig(32, choices, 6))
    resident = eqx.filter_eval_shape(Decoder.init, config, Vocab, key=jax.random.key(0))
    model = streaming.to_host(resident)
    tokens = hax.zeros((Batch.resize(rows), Pos), jnp.int32)
    _, cache = eqx.filter_eval_shape(
        lambda model, tokens: model.prefill(tokens, 9), resident, tokens
    )
    new = tokens["position", 0]
    found = memory.count_flops(
        jax.make_jaxpr(Decoder.decode)(model, new, new, cache)
    ).bytes_from_host
    of_stack = model.layers.stacked
    experts, whole = (
        4
        * sum(leaf.size for leaf in jax.tree.leaves(tree) if streaming.is_on_host(leaf))
        for tree in (of_stack.mlp.experts, of_stack)
    )
    # The first layer is read before the loop, and the last one twice.
    ahead = (whole if read == 32 else whole - experts) // config.num_layers
    assert found == whole - experts + experts * read // 32 + ahead
