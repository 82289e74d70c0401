"""Layers that predict further tokens: their loss by plain loops, and runs with them."""

import dataclasses
import json
import warnings
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis
from haliax.util import is_named_array
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file

from models.deepseek_v3 import DeepseekV3Config
from models.glm4_moe import Glm4MoeConfig
from models.hf_io.decoder_weights import read_decoder, write_decoder
from models.hf_io.safetensors_folder import SINGLE, WeightsError
from models.lm import next_token_loss
from models.loading import load_model
from models.parts.decoder import Decoder
from models.parts.sections import ExpertsConfig, LatentConfig, MtpConfig
from models.parts.tokens import Tokens
from models.qwen3_5 import Qwen3_5Config
from models.run_config import LmRunConfig, find_model
from stacked_remat import ScanCheckpointPolicy
from stacked_remat.training import ConfigError, TokenBatch, TrainState, TrainStep

from ..blocks import assert_close, assert_equal
from .random_weights import random_weights

Vocab, Bytes = Axis("vocab", 16), Axis("vocab", 257)
EXPERTS = ExpertsConfig(4, 2, 6, dense_layers=(0,), router_dtype="float32")
# The loss is that of tokens alone, in which a document is by itself.
WITHOUT_BALANCE = dataclasses.replace(EXPERTS, load_balance_weight=0.0)
DEEPSEEK = DeepseekV3Config(
    hidden_dim=12,
    num_layers=2,
    latent=LatentConfig(5, 4, 4, 2, 3),
    experts=WITHOUT_BALANCE,
    mtp=MtpConfig(2, 0.3),
)
GLM = Glm4MoeConfig(
    hidden_dim=12,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    experts=WITHOUT_BALANCE,
    qk_norm=True,
    tie_word_embeddings=True,
    mtp=MtpConfig(3, 0.2),
)
DOCUMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 3], [1, 1, 1, 1, 1, 1, 0, 0]], np.int32)


def packed_batch():
    """Random tokens in these documents; some targets have no weight, among them those
    after the end of a document.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, Vocab.size, DOCUMENTS.shape).astype(np.int32)
    weights = (rng.random(DOCUMENTS.shape) < 0.8).astype(np.float32)
    positions = np.zeros_like(DOCUMENTS)
    for row, at, _ in documents():
        positions[row, at] = np.arange(at.stop - at.start)
        weights[row, at.stop - 1] = 0.0
    weights[DOCUMENTS == 0] = 0.0
    targets = np.roll(tokens, -1, axis=1)
    return TokenBatch.of(tokens, targets, weights, DOCUMENTS, positions)


def documents():
    """The row, the slice and the number of each document."""
    for row, numbers in enumerate(DOCUMENTS):
        for number in sorted({*numbers.tolist()} - {0}):
            (at,) = np.nonzero(numbers == number)
            yield row, slice(at[0], at[-1] + 1), number


def normalised(x, norm):
    mean_square = jnp.mean(x**2, axis=-1, keepdims=True)
    return x / jnp.sqrt(mean_square + norm.eps) * norm.weight.array[None]


def cross_entropies(model, hidden, targets):
    logits = model.logits(hax.named(hidden, ("position", model.config.Embed)))
    return -jax.nn.log_softmax(logits.array)[jnp.arange(len(targets)), targets]


def looped_loss(model, batch):
    """The loss of each document by itself, each depth with the positions alone that
    have the tokens that it reads.

    Also the sums of the cross entropies and of the weights, `[depth]`.
    """
    depths = model.config.mtp.depths
    sums, counts = [0.0] * (1 + depths), [0.0] * (1 + depths)
    for row, at, _ in documents():
        tokens, weights = (one.array[row, at] for one in (batch.tokens, batch.weights))
        length = len(tokens)
        OfDocument = Axis("position", length)
        hidden = model.hidden_states(hax.named(tokens, OfDocument))[0].array
        embedded = model.embedding.weight.array[tokens]
        for depth in range(1 + depths):
            if depth >= length:
                break
            if depth > 0:
                own = jax.tree.map(
                    lambda leaf, index=depth - 1: leaf["depths", index],
                    model.mtp.stacked,
                    is_leaf=is_named_array,
                )
                joined = jnp.concatenate(
                    [
                        normalised(embedded[depth:], own.embedding_norm),
                        normalised(hidden[: length - depth], own.hidden_norm),
                    ],
                    axis=-1,
                )
                x = joined @ own.eh_proj.weight.array.T
                Rest = Axis("position", length - depth)
                table = own.layer.rotary.table(hax.arange(Rest))
                x, _, _ = own.layer.forward(
                    hax.named(x, (Rest, model.config.Embed)), Tokens(table)
                )
                hidden = normalised(x.array, own.norm)
            # Position i predicts token i + depth + 1; the last has none in its
            # document.
            targets, counted = tokens[depth + 1 :], weights[depth:-1]
            losses = cross_entropies(model, hidden[:-1], targets)
            sums[depth] += jnp.sum(losses * counted)
            counts[depth] += jnp.sum(counted)
    further = model.config.mtp.weight / depths * sum(sums[1:])
    return (sums[0] + further) / counts[0], (jnp.stack(sums), jnp.stack(counts))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(DEEPSEEK, id="latents"),
        pytest.param(GLM, id="tied", marks=pytest.mark.deep),
    ],
)
def test_the_loss_and_its_gradients_are_those_of_plain_loops(config):
    model = random_weights(Decoder.init, config, Vocab, spread=0.3)
    batch = packed_batch()

    def derived(loss) -> Any:
        return eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))

    (loss, metrics), gradient = derived(next_token_loss)(model, batch)
    expected, expected_gradient = derived(looped_loss)(model, batch)
    expected_loss, (sums, counts) = expected
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], sums[0] / counts[0], rtol=1e-5)
    for depth in range(1, 1 + config.mtp.depths):
        mean = sums[depth] / counts[depth]
        np.testing.assert_allclose(metrics[f"mtp_loss_{depth}"], mean, rtol=1e-5)
    assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    assert np.all(np.any(gradient.mtp.stacked.eh_proj.weight.array, axis=(1, 2)))


@pytest.mark.deep
def test_microbatches_and_divided_positions_have_the_loss_of_a_batch():
    model = random_weights(Decoder.init, DEEPSEEK, Vocab, spread=0.3)
    batch = packed_batch()
    loss = LmRunConfig(model=DEEPSEEK, vocab_size=Vocab.size).loss
    optimizer = optax.sgd(-1.0)
    state = TrainState.init(model, optimizer)

    def after(parts):
        step: Any = TrainStep(loss, optimizer, microbatches=parts)
        return eqx.filter_jit(step)(batch, state)[0].trained

    expected = after(1)
    assert_close(after(2), expected, rtol=1e-4)
    expected_loss, _ = eqx.filter_jit(next_token_loss)(model, batch)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(kind,) * 2)
        mapping = {"batch": "data", "position": "context"}
        with jax.set_mesh(mesh), hax.axis_mapping(mapping):
            spread = hax.shard(batch, mapping)
            # Of another function, so that it is traced anew
            anew: Any = eqx.filter_jit(
                lambda model, batch: next_token_loss(model, batch)
            )
            found, _ = anew(model, spread)
        np.testing.assert_allclose(found, expected_loss, rtol=1e-5)


def test_biases_of_their_routers_follow_the_load():
    config = dataclasses.replace(DEEPSEEK, bias="by_load", experts=EXPERTS)
    model = random_weights(Decoder.init, config, Vocab, spread=0.3)
    batch = packed_batch()

    @eqx.filter_jit
    def both(model):
        known = {"documents": batch.documents, "positions": batch.positions}
        auxiliary = model.further_states(batch.tokens, **known)[2]
        gradient = eqx.filter_grad(lambda one: next_token_loss(one, batch)[0])(model)
        return auxiliary, gradient.mtp.stacked.layer.mlp.bias.value.array

    auxiliary, gradient = both(model)
    load = auxiliary.statistics.load.array
    # One layer with experts, and two depths
    assert (
        load.shape == (3, 4) and len(auxiliary.metrics["load_balance_per_layer"]) == 3
    )
    above = np.sign(load - load.mean(axis=1, keepdims=True))
    np.testing.assert_array_equal(gradient, above[1:])


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def trained_with(folder, depths=None, weight=0.0):
    """The architecture of a run that begins with a folder."""
    written = {"weight": weight} | ({} if depths is None else {"depths": depths})
    config = LmRunConfig(
        model=DeepseekV3Config(mtp=MtpConfig(**written)), initialize_from_hf=str(folder)
    )
    return config.resolved().model


@pytest.fixture
def folder(tmp_path):
    write_decoder(tmp_path / "model", random_weights(Decoder.init, DEEPSEEK, Bytes))
    return tmp_path / "model"


def test_a_run_with_a_weight_has_the_layers_of_its_folder(folder):
    assert find_model(str(folder)).config.further_tokens == MtpConfig(2, 0.0)
    assert load_model(find_model(str(folder))).mtp is None
    assert trained_with(folder).further_tokens == MtpConfig(0, 0.0)
    config = trained_with(folder, weight=0.3)
    assert config.further_tokens == DEEPSEEK.mtp
    model = random_weights(Decoder.init, DEEPSEEK, Bytes)
    assert_equal(read_decoder(folder, model), model)
    without = dataclasses.replace(DEEPSEEK, mtp=MtpConfig(2, 0.0))
    model = random_weights(Decoder.init, without, Bytes)
    write_decoder(folder.parent / "without", model)
    tensors = load_file(folder.parent / "without" / SINGLE)
    assert not [name for name in tensors if name.startswith("model.layers.2.")]
    document = json.loads((folder.parent / "without" / "config.json").read_text())
    assert document["num_nextn_predict_layers"] == 0
    with pytest.raises(ConfigError, match="has no layers that predict further tokens"):
        trained_with(folder.parent / "without", weight=0.3)
    with pytest.raises(ConfigError, match="model.mtp"):
        trained_with(folder, depths=1, weight=0.3)
    # As transformers writes it, whose files have no such layers
    change(folder.parent / "without", num_nextn_predict_layers=1)
    found = trained_with(folder.parent / "without", weight=0.3)
    assert found.further_tokens == MtpConfig(1, 0.3)
    shapes = random_weights(Decoder.init, found, Bytes)
    with pytest.raises(WeightsError, match="missing: model.layers.2.eh_proj.weight"):
        read_decoder(folder.parent / "without", shapes)


def test_copies_of_embedding_and_head_are_written_and_compared(folder):
    tensors = load_file(folder / SINGLE)
    names = "embed_tokens.weight", "shared_head.head.weight"
    originals = "model.embed_tokens.weight", "lm_head.weight"
    for number in (2, 3):
        for name, original in zip(names, originals, strict=True):
            copy = tensors[f"model.layers.{number}.{name}"]
            np.testing.assert_array_equal(copy, tensors[original])
    model = random_weights(Decoder.init, DEEPSEEK, Bytes)
    del tensors["model.layers.2.embed_tokens.weight"]
    save_file(tensors, folder / SINGLE)
    with warnings.catch_warnings(action="error"):
        assert_equal(read_decoder(folder, model), model)
    tensors["model.layers.3.shared_head.head.weight"] += 1
    save_file(tensors, folder / SINGLE)
    with pytest.warns(UserWarning, match="layers.3.shared_head.head.weight has other"):
        assert_equal(read_decoder(folder, model), model)


@pytest.mark.parametrize(
    ("mtp", "message"),
    [
        ((1, 0.0), "model.mtp.depths = 1 has no effect where model.mtp.weight is 0"),
        ((0, 0.3), "model.mtp.weight = 0.3 has no effect where model.mtp.depths is 0"),
        ((-1, 0.3), "model.mtp.depths must be at least 0, got -1"),
        ((1, -0.3), "model.mtp.weight must be at least 0, got -0.3"),
    ],
)
def test_numbers_without_effect_are_refused(mtp, message):
    with pytest.raises(ValueError, match=message):
        LmRunConfig(model=dataclasses.replace(DEEPSEEK, mtp=MtpConfig(*mtp)))


def test_more_layers_than_files_have_are_refused():
    with pytest.raises(ValueError, match="model.mtp.depths = 2 must be at most 1, as"):
        Qwen3_5Config(mtp=MtpConfig(2, 0.3))


def test_places_of_operations_are_those_of_the_other_layers():
    remat = ScanCheckpointPolicy(save_block_internals=["residual", "dot_general 1/9"])
    model = eqx.filter_eval_shape(
        lambda key: Decoder.init(DEEPSEEK, Vocab, remat=remat, key=key),
        jax.random.key(0),
    )
    assert model.layers.remat == remat
    names = ScanCheckpointPolicy(save_block_internals=["residual"])
    assert model.mtp.remat == names
