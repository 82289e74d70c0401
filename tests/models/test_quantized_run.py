"""Adapters on frozen weights of 8 and 4 bits: their gradients, and a run that is
resumed, read and exported.
"""

import json

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis

from models.export_hf import main as export
from models.lm import next_token_loss
from models.loading import load_model
from models.parts.decoder import Decoder
from models.run_config import LmRunConfig, find_model
from models.run_state import Placement, trained_parts
from stacked_remat.lora import (
    LoraConfig,
    dequantize_linears,
    has_quantized,
    lora_filter,
)
from stacked_remat.training import PrecisionConfig, TokenBatch, TrainerConfig

from ..blocks import assert_close, assert_equal
from .random_weights import random_weights
from .test_mixers import CONFIGS
from .tiny_run import make_workplace, printed, train

Vocab, Batch, Pos = Axis("vocab", 19), Axis("batch", 2), Axis("position", 7)
LORA = LoraConfig(2, 2.0, ("*_proj",))


@pytest.mark.parametrize("form", [pytest.param("int8", marks=pytest.mark.deep), "nf4"])
def test_loss_and_gradients_are_those_of_the_rounded_weights(form):
    """Of latent and linear attention, experts, and an MLP that all tokens go to."""
    model = random_weights(
        Decoder.init, CONFIGS["decays of channels"], Vocab, remat="nested", spread=0.4
    )
    precision = PrecisionConfig(frozen=form)
    run = LmRunConfig(
        model=model.config,
        vocab_size=Vocab.size,
        lora=LORA,
        trainer=TrainerConfig(precision=precision),
    )
    quantized, trainable = trained_parts(run, model, key=jax.random.key(0))
    quantized = jax.tree.map(
        lambda leaf, trained: leaf + 0.1 if trained else leaf, quantized, trainable
    )
    assert has_quantized(quantized.stacks["linear_dense"].stacked)
    assert has_quantized(quantized.stacks["sparse"].stacked.mlp.experts)
    assert not has_quantized(quantized.stacks["sparse"].stacked.mlp.router)
    assert not has_quantized((quantized.embedding, quantized.head))
    tokens = hax.random.randint(jax.random.key(1), (Batch, Pos), 0, Vocab.size)
    weights = hax.ones((Batch, Pos))
    batch = TokenBatch(tokens, hax.roll(tokens, -1, Pos), weights)

    def derived(model):
        trained, frozen = eqx.partition(model, lora_filter(model))

        def loss(trained):
            return next_token_loss(eqx.combine(trained, frozen), batch)[0]

        return jax.value_and_grad(loss)(trained)

    @eqx.filter_jit
    def both(models):
        return [derived(model) for model in models]

    rounded = dequantize_linears(quantized, "float32")
    (loss, gradient), (expected_loss, expected) = both([quantized, rounded])
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    found, wanted = jax.tree.leaves(gradient), jax.tree.leaves(expected)
    largest = max(float(np.abs(leaf).max()) for leaf in wanted)
    assert_close(found, wanted, rtol=1e-4, atol=2e-6 * largest)
    assert len(wanted) > 10 and all(np.any(leaf) for leaf in wanted)


RUN = (
    "--lora.rank",
    "2",
    "--optimizer.warmup",
    "1",
    "--optimizer.schedule.type",
    "constant",
    "--trainer.precision.frozen",
    "nf4",
    "--trainer.num_steps",
)
ACCEPT = ("--trainer.checkpoint.accept_changes", "true")


def test_a_run_is_resumed_read_and_exported(tmp_path):
    workplace = make_workplace(tmp_path)
    assert train(workplace, *RUN, "4", run="whole") == 0
    assert train(workplace, *RUN, "2") == 0
    assert train(workplace, *RUN, "4", *ACCEPT) == 0
    found, whole = (
        Placement.of(known.run).read_model(known, "float32")
        for known in (find_model(str(workplace / run)) for run in ("run", "whole"))
    )
    assert has_quantized(found)
    assert_equal(found, whole)
    merged = load_model(find_model(str(workplace / "run")))
    assert not has_quantized(merged)
    tokens = hax.random.randint(jax.random.key(1), (Batch, Pos), 0, 250)
    logits = [
        eqx.filter_jit(lambda model: model.logits(model.hidden_states(tokens)[0]))(one)
        for one in (found, merged)
    ]
    np.testing.assert_allclose(logits[0].array, logits[1].array, atol=1e-4)
    folder = workplace / "exported"
    status, _ = printed(export, "--run_dir", workplace / "run", "--out", folder)
    assert status == 0
    exported = load_model(find_model(str(folder)))
    assert_close(jax.tree.leaves(exported), jax.tree.leaves(merged), atol=1e-6)
    other = ("--trainer.precision.frozen", "int8")
    assert train(workplace, *RUN, "5", *ACCEPT, *other) == 1


@pytest.mark.deep
def test_a_run_on_two_devices_has_the_losses_of_one(tmp_path):
    workplace = make_workplace(tmp_path)
    divided = "{axes: {data: 2}, param_mapping: {embed: data}}"
    assert train(workplace, *RUN, "4", run="whole") == 0
    assert train(workplace, *RUN, "4", "--trainer.mesh", divided, run="divided") == 0
    losses = [
        json.loads((workplace / run / "result.json").read_text())["held_out_after"]
        for run in ("whole", "divided")
    ]
    np.testing.assert_allclose(*(loss["held_out"] for loss in losses), rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "is of weights under adapters. Train some"),
        ({"streaming": True}, "does not go with trainer.streaming"),
    ],
)
def test_what_does_not_go_with_it_is_refused(fields, message):
    trainer = TrainerConfig(precision=PrecisionConfig(frozen="int8"), **fields)
    lora = LORA if fields else None
    with pytest.raises(ValueError, match=message):
        LmRunConfig(lora=lora, trainer=trainer)
