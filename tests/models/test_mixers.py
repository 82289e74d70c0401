"""Mixers of hybrid decoders in tiles, packed rows and decoding, and their dtypes."""

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

from models.granitemoehybrid import GraniteMoeHybridConfig
from models.kimi_linear import KimiLinearConfig
from models.lfm2 import Lfm2Config
from models.lm import next_token_loss
from models.parts.decoder import Decoder
from models.parts.linear import cast_floating
from models.parts.mamba2 import MambaConfig
from models.parts.sections import (
    FULL,
    LINEAR,
    ExpertsConfig,
    LatentConfig,
    LinearAttentionConfig,
    RotaryConfig,
)
from stacked_remat.training import SgdConfig, TokenBatch, build_optimizer

from ..blocks import assert_close
from .random_weights import random_weights

Vocab, Batch, Pos = Axis("vocab", 19), Axis("batch", 2), Axis("position", 7)
SIZES = dict(hidden_dim=16, num_layers=2, num_heads=4, layer_types=(LINEAR, FULL))
EXPERTS = ExpertsConfig(4, 2, 6, dense_layers=(0,))
CONFIGS = {
    "convolution": Lfm2Config(**SIZES, num_kv_heads=2, conv_bias=True),
    "decays of channels": KimiLinearConfig(
        **SIZES,
        num_kv_heads=4,
        latent=LatentConfig(None, 4, plain_dim=4, rotary_dim=2, value_dim=3),
        linear=LinearAttentionConfig(3, 6, 5, 4, conv_size=3),
        experts=EXPERTS,
    ),
    "mamba": GraniteMoeHybridConfig(
        **SIZES,
        num_kv_heads=2,
        mamba=MambaConfig(4, num_groups=2, head_dim=5, state_dim=6),
        experts=EXPERTS,
        shared_dim=6,
    ),
}
each_config = pytest.mark.parametrize("name", CONFIGS)


jit: Any = eqx.filter_jit


@functools.cache
def make(name, **fields) -> Decoder:
    config = dataclasses.replace(CONFIGS[name], **fields)
    return random_weights(Decoder.init, config, Vocab, spread=0.4)


@functools.cache
def tokens_of_batch():
    return hax.random.randint(jax.random.key(1), (Batch, Pos), 0, Vocab.size)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.deep] * (name == "mamba"))
        for name in CONFIGS
    ],
)
def test_tiles_give_the_same_loss_and_gradients(name):
    """With documents that begin in tiles and at their edges, and a ragged last tile."""
    tokens = tokens_of_batch()
    documents = np.array([[1, 1, 2, 2, 3, 0, 0], [1, 1, 1, 2, 2, 2, 2]])
    weights = hax.ones((Batch, Pos))
    packed = hax.named(jnp.asarray(documents), (Batch, Pos))
    batch = TokenBatch(tokens, hax.roll(tokens, -1, Pos), weights, packed, packed)

    @eqx.filter_jit
    def run(models):
        value_and_grad = eqx.filter_value_and_grad(next_token_loss, has_aux=True)
        return [value_and_grad(model, batch) for model in models]

    expected, found = run([make(name), make(name, tiles=3)])
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected[1]))
    assert_close(found, expected, rtol=1e-4, atol=2e-6 * largest)


@each_config
def test_prompts_of_two_lengths_are_continued_as_whole_sequences(name):
    model, tokens = make(name), tokens_of_batch()

    @eqx.filter_jit
    def whole_and_by_token(model):
        expected, _ = model.hidden_states(tokens)
        lengths = hax.named(jnp.array([5, 2]), Batch)
        _, caches = model.prefill(tokens[Pos, :5], Pos.size, lengths)
        found = []
        for step in range(2):
            at = lengths + step
            given = tokens[{Batch: hax.arange(Batch), Pos: at}]
            hidden, caches = model.decode(given, at, caches)
            wanted = expected[{Batch: hax.arange(Batch), Pos: at}]
            found.append((hidden.rearrange(wanted.axes), wanted))
        return found

    for hidden, wanted in whole_and_by_token(model):
        np.testing.assert_allclose(hidden.array, wanted.array, atol=2e-5)


@pytest.mark.usefixtures("standard_promotion")
def test_what_decays_is_in_float32_and_gets_no_weight_decay():
    model = make("mamba")
    (layer,) = [stack for name, stack in model.stacks.items() if "linear" in name]
    mamba = layer.stacked.mamba
    low = cast_floating(mamba, jnp.bfloat16)
    assert low.v_proj.weight.dtype == low.v_conv.weight.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(low.step)} == {jnp.dtype("float32")}
    optimizer = build_optimizer(SgdConfig(weight_decay=0.5, warmup=0), num_steps=10)
    trained = eqx.filter(mamba, eqx.is_inexact_array)
    nothing = jax.tree.map(jnp.zeros_like, trained)
    updates: Any
    updates, _ = jit(optimizer.update)(nothing, optimizer.init(trained), trained)
    for kept in (updates.step.a_log, updates.step.d, updates.norm.weight):
        assert not jnp.any(kept.array)
    assert jnp.all(updates.dt_proj.weight.array != 0)
    half = dataclasses.replace(model.config, compute_dtype="bfloat16")
    hidden, _ = jit(Decoder.hidden_states)(
        dataclasses.replace(model, config=half), tokens_of_batch()
    )
    assert hidden.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("convolution", {"conv_size": 0}, "model.conv_size"),
        ("decays of channels", {"rotary": RotaryConfig(9.0)}, "rotates nothing"),
        ("mamba", {"mlp_dim": 7}, "model.shared_dim is the width of MLPs"),
    ],
)
def test_what_an_architecture_lacks_is_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIGS[name], **fields)


def test_heads_of_mamba_are_in_groups_of_one_size():
    with pytest.raises(ValueError, match="num_heads = 4 must be a multiple"):
        MambaConfig(num_heads=4, num_groups=3)
