"""Training runs that score their sequences: results as without. `test_scoring.py`
compares scores.
"""

import json

import jax
import numpy as np
import pytest

from models.run_config import LmRunConfig, read_run_config
from models.run_scoring import check_backends
from models.run_state import restored_state
from stacked_remat.ghost.log import read_scores
from stacked_remat.training import ConfigError, GhostConfig, parse_config

from .test_train_lm import metrics_of
from .tiny_run import arguments_of, is_place_of, train

pytestmark = pytest.mark.usefixtures("standard_promotion")


def ghost(**options):
    entries = {"method": "grad_dot", "token_mean": "batch", "every": 1} | options
    return ("--ghost", json.dumps(entries))


def numbers_of(folder):
    """What a run reports of its first steps; later ones differ more where programs
    round differently.
    """
    lines = [line for line in metrics_of(folder) if "loss" in line][:9]
    return {
        name: [line[name] for line in lines]
        for name in ("loss", "grad_norm", "load_balance")
    }


OTHER = "{{paths: ['{0}/text/1*.txt'], held_out: ['{0}/other.txt'], weight: 0.5}}"
SOURCES = {
    "validation": {"sources": {"text": 1.0, "other": 3.0}},
    "token_mean": "example",
    "norms": True,
}
PARTS = ("--trainer.update.microbatches", "2")
BY_LOAD = {
    **{
        "type": "deepseek_v3",
        "hidden_dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 2,
    },
    "latent": {"key_value_rank": 4, "plain_dim": 4, "rotary_dim": 2, "value_dim": 4},
    "bias": "by_load",
    "experts": {
        "num_experts": 3,
        "load_balance_weight": 0.0,
        "router_dtype": "float32",
    },
}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        pytest.param(
            SOURCES,
            (*PARTS, "--lora.rank", "2"),
            id="adapters, two sources, per example",
        ),
        pytest.param(
            {},
            ("--trainer.mesh.axes.data", "4", "--model", json.dumps(BY_LOAD)),
            id="four devices, biases",
        ),
    ],
)
def test_a_scored_run_reports_and_learns_what_one_without_scores_does(
    workplace, settings, options
):
    (workplace / "other.txt").write_text("dcba" * 30)
    few = (
        *options,
        "--trainer.num_steps",
        "3",
        "--data.sources.other",
        OTHER.format(workplace),
    )
    states = []
    for run, scored in (("plain", ()), ("run", ghost(**settings))):
        assert train(workplace, *few, *scored, run=run) == 0
        states.append(
            restored_state(workplace / run, read_run_config(workplace / run)).trained
        )
    for name, values in numbers_of(workplace / "plain").items():
        np.testing.assert_allclose(
            numbers_of(workplace / "run")[name], values, rtol=2e-6, err_msg=name
        )
    for found, expected in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    rows = read_scores(workplace / "run" / "ghost", ["step", "norm", "text", "place"])
    for row in rows.select(["text", "place"]).to_pylist():
        assert is_place_of(row["place"], row["text"])
    assert set(rows["step"].to_pylist()) == {1, 2, 3}
    assert rows["norm"].null_count == (0 if settings.get("norms") else len(rows))


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"method": "grad_prod"}, (), "ghost.method"),
        ({"norms": True, "by_token": True}, (), "Leave out one of them"),
        (
            {"every": 61},
            (),
            "ghost.every = 61 is never reached with trainer.num_steps = 60",
        ),
        (
            {"validation": {"batches": 99}},
            (),
            "Lower ghost.validation.batches, data.batch",
        ),
        (
            {"validation": {"sources": {"wiki": 1}}},
            (),
            "names 'wiki', which data.sources lacks. Valid: text",
        ),
        (
            {},
            ("--trainer.update.fused", "true"),
            "keeps no gradient of the whole model: leave out one of them",
        ),
        (
            {},
            ("--remat", "auto", "--budget", "1GiB"),
            "name a policy, such as nested, or leave out ghost",
        ),
    ],
)
def test_what_cannot_be_scored_is_one_message(
    workplace, capsys, settings, options, message
):
    assert train(workplace, *ghost(**settings), *options) == 1
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].startswith("error: ") and message in shown
    assert not (workplace / "run").exists()


def test_kernels_without_forward_mode_are_refused_for_scores_of_tokens():
    by_token = LmRunConfig(ghost=GhostConfig(by_token=True))
    jax_alone = {"attention": "blockwise (cudnn: no GPU)", "experts": "block"}
    check_backends(by_token, jax_alone)
    for taken, fix in (
        ({"attention, window 8": "blockwise | cudnn (why)"}, "attention.backend: bl"),
        (jax_alone | {"experts": "megablox"}, "model.experts.backend: block, or leave"),
    ):
        check_backends(LmRunConfig(ghost=GhostConfig()), taken)
        with pytest.raises(ConfigError, match=f"forward mode.*has none. Set.*{fix}"):
            check_backends(by_token, taken)


def test_a_section_needs_no_key(workplace):
    config = parse_config(LmRunConfig, arguments_of(workplace, "--ghost", "{}"))
    assert config.ghost == GhostConfig("grad_dot", "batch", every=10)
