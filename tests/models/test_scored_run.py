"""Training runs that score their sequences: results as without, and scores that are the dot products."""

import json

import equinox as eqx
import jax
import numpy as np
import pytest
import yaml

from models.lm import next_token_loss
from models.loading import read_run_config, restored_state
from models.run_config import LmRunConfig
from models.run_state import initial_state
from stacked_remat.ghost.log import read_scores
from stacked_remat.training import load_tokenizer, open_training_data, parse_config

from ..training.data.silent import Silent
from .test_train_lm import metrics_of
from .tiny_run import arguments_of, train

pytestmark = pytest.mark.usefixtures("standard_promotion")


def ghost(**options):
    entries = {"method": "grad_dot", "token_mean": "batch", "every": 1} | options
    return ("--ghost", json.dumps(entries))


def numbers_of(folder):
    """What a run reports of its first steps; later ones differ more where programs round differently."""
    lines = [line for line in metrics_of(folder) if "loss" in line][:9]
    return {name: [line[name] for line in lines] for name in ("loss", "grad_norm", "load_balance")}


def assert_same_numbers(found, expected):
    for name, values in numbers_of(expected).items():
        np.testing.assert_allclose(numbers_of(found)[name], values, rtol=2e-6, err_msg=name)


def totals_of(folder, step):
    """The score of each sequence of a step, in the order of the batch."""
    scores = read_scores(folder / "ghost", ["score"], steps=(step, step))["score"].to_numpy()
    return scores.reshape(-1, 4).sum(0)


def expected_totals(workplace, *options, held_out, of_example):
    """The scores of the first step, from the gradient of each sequence by itself."""
    config = parse_config(LmRunConfig, arguments_of(workplace, *options)).resolved()
    tokenizer = load_tokenizer(config.data.tokenizer)
    data = open_training_data(config.data, tokenizer, seed=config.trainer.seed, progress=Silent())
    state = initial_state(config)

    @eqx.filter_jit
    def gradient(trained, batch):
        return eqx.filter_grad(
            lambda trained: next_token_loss(eqx.combine(trained, state.frozen), batch)[1]["loss"]
        )(trained)

    def dot(one, other):
        return sum(
            float(jax.numpy.vdot(a, b)) for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True)
        )

    directions = [(gradient(state.trained, batch), weight) for batch, weight in held_out(data)]
    batch, found = data.training.next(), []
    data.training.close()
    weights = batch.weights.array
    for row in range(weights.shape[0]):
        only = jax.numpy.where(jax.numpy.arange(weights.shape[0])[:, None] == row, weights, 0.0)
        own = gradient(state.trained, eqx.tree_at(lambda b: b.weights.array, batch, only))
        share = 1.0 if of_example else float(only.sum() / weights.sum())
        found.append(share * sum(weight * dot(own, direction) for direction, weight in directions))
    return found


def test_biases_by_load_are_updated_as_without_scores(workplace):
    model = {"type": "deepseek_v3", "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
    model |= {"bias": "by_load", "initializer_range": 0.1}
    model["latent"] = {
        "query_rank": None,
        "key_value_rank": 4,
        "plain_dim": 4,
        "rotary_dim": 2,
        "value_dim": 4,
    }
    model["experts"] = {"num_experts": 3, "experts_per_token": 1, "intermediate_dim": 8}
    model["experts"] |= {"load_balance_weight": 0.0, "router_dtype": "float32"}
    text = (workplace / "config.yaml").read_text().partition("vocab_size")[2]
    entries = yaml.safe_load("vocab_size" + text) | {"model": model}
    (workplace / "config.yaml").write_text(yaml.safe_dump(entries))
    few, found = ("--trainer.num_steps", "3"), []
    for run, options in (("plain", ()), ("run", ghost())):
        assert train(workplace, *few, *options, run=run) == 0
        state = restored_state(workplace / run, read_run_config(workplace / run))
        found.append(state.trained.layers.stacked.mlp.bias.array)
    assert np.any(found[0])
    np.testing.assert_allclose(found[1], found[0], rtol=2e-6)
    assert read_scores(workplace / "run" / "ghost", ["score"]).num_rows


OTHER = "{{paths: ['{0}/text/1*.txt'], held_out: ['{0}/other.txt'], weight: 0.5}}"
SOURCES = {"validation": {"sources": {"text": 1.0, "other": 3.0}}, "token_mean": "example", "norms": True}
PARTS = ("--trainer.update.microbatches", "2")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        pytest.param(SOURCES, (*PARTS, "--lora.rank", "2"), id="adapters, two sources, per example"),
        pytest.param({}, ("--trainer.mesh.axes.data", "4"), id="four devices"),
    ],
)
def test_scores_are_the_dot_products_of_each_sequences_gradient(workplace, settings, options):
    (workplace / "other.txt").write_text("dcba" * 30)
    few = (*options, "--trainer.num_steps", "3", "--data.sources.other", OTHER.format(workplace))
    assert train(workplace, *few, run="plain") == 0
    assert train(workplace, *few, *ghost(**settings)) == 0
    assert_same_numbers(workplace / "run", workplace / "plain")

    def held_out(data):
        if "validation" not in settings:
            return [(data.held_out.batch(0), 1.0)]
        return [
            (data.held_out_by_source["text"].batch(0), 0.25),
            (data.held_out_by_source["other"].batch(0), 0.75),
        ]

    norms = read_scores(workplace / "run" / "ghost", ["norm"])["norm"]
    assert norms.null_count == (0 if settings.get("norms") else len(norms))
    of_example = settings.get("token_mean") == "example"
    expected = expected_totals(workplace, *few, *ghost(**settings), held_out=held_out, of_example=of_example)
    np.testing.assert_allclose(totals_of(workplace / "run", 1), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"method": "grad_prod"}, (), "ghost.method"),
        ({"every": 61}, (), "ghost.every = 61 is never reached with trainer.num_steps = 60"),
        ({"validation": {"batches": 99}}, (), "Lower ghost.validation.batches, data.batch"),
        ({"validation": {"sources": {"wiki": 1}}}, (), "names 'wiki', which data.sources lacks. Valid: text"),
        (
            {},
            ("--trainer.update.fused", "true"),
            "keeps no gradient of the whole model: leave out one of them",
        ),
        ({}, ("--remat", "auto", "--budget", "1GiB"), "name a policy, such as nested, or leave out ghost"),
    ],
)
def test_what_cannot_be_scored_is_one_message(workplace, capsys, settings, options, message):
    assert train(workplace, *ghost(**settings), *options) == 1
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].startswith("error: ") and message in shown
    assert not (workplace / "run").exists()


def test_the_choices_that_change_scores_have_no_default(workplace, capsys):
    for missing in ("method", "token_mean"):
        entries = {"method": "grad_dot", "token_mean": "batch"}
        del entries[missing]
        assert train(workplace, "--ghost", json.dumps(entries)) == 1
        assert f"`ghost` on the command line lacks the key `{missing}`" in capsys.readouterr().out
