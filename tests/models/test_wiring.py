"""A layer's wiring is changed in one place, and an export notices."""

from functools import partial

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

import models.architectures as architectures
from models.cohere2 import Cohere2Config
from models.gemma2 import Gemma2Config
from models.granite import GraniteLayer
from models.hf_io import formats
from models.hf_io.decoder_weights import write_decoder
from models.hf_io.safetensors_folder import WeightsError
from models.hf_io.wiring import check_wiring, checksum
from models.parts.decoder import Decoder
from models.qwen3 import Qwen3Config, Qwen3Layer

from .random_weights import random_weights

assert architectures  # registers them
Vocab, Batch, Pos = Axis("vocab", 19), Axis("batch", 2), Axis("position", 6)
CONFIG = Qwen3Config(hidden_dim=16, num_layers=3, num_heads=4, num_kv_heads=2)


def parallel(layer, x, tokens, cache=None):
    """Qwen3's layer with its MLP beside attention."""
    normalised = layer.input_norm(x)
    attended, cache = layer.attention(normalised, tokens, cache)
    mixed, statistics = layer.mlp(normalised, tokens)
    return x + attended + mixed, cache, statistics


def whole_and_by_token(model: Decoder, tokens):
    """The hidden states of whole sequences, and those of a prompt and its next
    tokens.
    """
    expected, _ = model.hidden_states(tokens)
    hidden, caches = model.prefill(tokens[Pos, :4], Pos.size)
    found = [hidden]
    for position in (4, 5):
        at = hax.full(Batch, position, dtype=jnp.int32)
        hidden, caches = model.decode(tokens[Pos, position], at, caches)
        found.append(hidden.broadcast_axis(Axis("position", 1)))
    return expected, hax.concatenate("position", found)


def test_a_parallel_block_trains_and_decodes_and_is_not_exported(monkeypatch, tmp_path):
    model = random_weights(Decoder.init, CONFIG, Vocab, spread=0.4)
    tokens = hax.named(np.arange(12).reshape(2, 6) % Vocab.size, (Batch, Pos))
    sequential, _ = eqx.filter_jit(partial(whole_and_by_token, model))(tokens)
    monkeypatch.setattr(Qwen3Layer, "forward", parallel)
    checksum.cache_clear()
    try:
        # Of another function, so that it is traced anew
        expected, found = eqx.filter_jit(lambda own: whole_and_by_token(own, tokens))(
            model
        )
        assert jnp.abs(expected.array - sequential.array).max() > 0.1
        found = found.rearrange(expected.axes)
        np.testing.assert_allclose(found.array, expected.array, atol=1e-5)
        with pytest.raises(WeightsError, match="does not describe it"):
            write_decoder(tmp_path / "model", model)
        assert not list(tmp_path.iterdir())
    finally:
        checksum.cache_clear()


@pytest.mark.parametrize("name", formats.registered())
def test_the_layers_of_an_architecture_are_those_that_were_compared(name):
    known = formats.registered()[name]
    found = checksum(known.config_class(**known.probe))
    assert found == pytest.approx(known.checksum, rel=1e-4, abs=1e-4)


def without_factor(layer, x, tokens, cache=None):
    """Granite's layer, whose factor is 1 by default, without it."""
    attended, cache = layer.attention(layer.input_norm(x), tokens, cache)
    x = x + attended
    mixed, statistics = layer.mlp(x, tokens, norm=layer.post_attention_norm)
    return x + mixed, cache, statistics


def parallel_with_a_window(layer, x, tokens, cache=None):
    """Qwen3's layer, of which those with a window alone are parallel."""
    run = sequential if layer.attention.window is None else parallel
    return run(layer, x, tokens, cache)


sequential = Qwen3Layer.forward


@pytest.mark.parametrize(
    "name, owner, attribute, other",
    [
        ("granite", GraniteLayer, "forward", without_factor),
        ("qwen3", Qwen3Layer, "forward", parallel_with_a_window),
        ("gemma2", Gemma2Config, "embedding_scale", None),
        ("cohere2", Cohere2Config, "logit_factor", 1.0),
    ],
)
def test_factors_and_all_kinds_of_layers_count(
    name, owner, attribute, other, monkeypatch
):
    known = formats.registered()[name]
    check_wiring(known)
    monkeypatch.setattr(owner, attribute, other)
    checksum.cache_clear()
    try:
        with pytest.raises(WeightsError, match="does not describe it"):
            check_wiring(known)
    finally:
        checksum.cache_clear()
