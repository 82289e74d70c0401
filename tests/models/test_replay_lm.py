"""The end of a run is replayed, and its sequences are scored by the derivative of the
held-out loss.
"""

import json

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from models.lm import losses_by_token, next_token_loss
from models.replay_lm import (
    Replay,
    _checked,
    _checked_smoothness,
    _in_microbatches,
    main,
)
from models.run_config import LmRunConfig
from models.run_state import initial_state
from stacked_remat.ghost.log import read_scores
from stacked_remat.training import ConfigError, Partitioning, TokenBatch, parse_config

from .tiny_run import is_place_of, train

pytestmark = pytest.mark.usefixtures("standard_promotion")

RATE = 1e-4
PLAIN = {
    "type": "sgd",
    "learning_rate": RATE,
    "warmup": 0,
    "weight_decay": 0,
    "momentum": 0,
}
SGD = (
    "--optimizer",
    json.dumps(PLAIN | {"max_grad_norm": None, "schedule": {"type": "constant"}}),
)
SCORED = (
    "--ghost",
    json.dumps(
        {
            "method": "grad_dot",
            "token_mean": "batch",
            "every": 1,
            "validation": {"sources": {"other": 1.0}},
        }
    ),
)
OTHER = "{{paths: ['{0}/text/1*.txt'], held_out: ['{0}/other.txt'], weight: 0.5}}"
CHECKPOINTS = (
    "--trainer.checkpoint.every_steps",
    "1",
    "--trainer.checkpoint.keep_last",
    "3",
)


def scores_of(folder, step):
    table = read_scores(folder, ["example", "score", "text"], steps=(step, step))
    found = {}
    for example, score, text in zip(
        *(table[name].to_pylist() for name in table.column_names), strict=True
    ):
        found[example, text] = found.get((example, text), 0.0) + score
    return found


TINY = """
model:
  {type: qwen3, hidden_dim: 8, num_layers: 1, num_heads: 2, num_kv_heads: 1, mlp_dim: 8}
vocab_size: 260
remat: false
data: {seq_len: 6, batch_size: 4}
trainer: {num_steps: 9, mesh: {axes: {data: 1}}}
"""


def tiny_config(folder, *options):
    (folder / "config.yaml").write_text(TINY)
    arguments = ["--config_path", str(folder / "config.yaml"), *options]
    return parse_config(LmRunConfig, arguments).resolved(check_folder=False)


def tiny_batch(seed):
    generator = np.random.default_rng(seed)
    tokens, weights = generator.integers(0, 9, (4, 6)), generator.random((4, 6)) < 0.6
    return TokenBatch.of(
        tokens.astype(np.int32),
        np.roll(tokens, -1, 1).astype(np.int32),
        weights.astype("f"),
    )


def test_a_replay_is_the_derivative_of_a_loop_of_steps(tmp_path):
    config = _checked(tiny_config(tmp_path, *SGD, "--optimizer.learning_rate", "0.5"))
    Steps = Axis("steps", 2)
    state, batches, text = (
        initial_state(config),
        [tiny_batch(1), tiny_batch(2)],
        tiny_batch(3),
    )
    stacked = hax.tree_util.tree_map(lambda *each: hax.stack(Steps, each), *batches)
    one_device = Partitioning.one_device()
    replay = Replay(config, Steps, one_device)
    loss, found = replay.scores(state, stacked, [text], jnp.ones(1))
    by_token = Replay(config, Steps, one_device, by_token=True)
    _, of_tokens = by_token.scores(state, stacked, [text], jnp.ones(1))

    @eqx.filter_jit
    def expected(model):
        def held_out(factors):  # [step, sequence, position]
            last = model
            for batch, own in zip(batches, factors, strict=True):

                def weighted(model, batch=batch, own=own):
                    (parts, _), _ = losses_by_token(model, batch)
                    return jnp.sum(parts.array * own)

                step = eqx.filter_grad(weighted)(last)
                last = eqx.apply_updates(
                    last, jax.tree.map(lambda slope: -0.5 * slope, step)
                )
            return next_token_loss(last, text)[1]["loss"]

        return jax.value_and_grad(held_out)(jnp.ones((2, 4, 6)))

    wanted_loss, wanted = expected(state.model)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    np.testing.assert_allclose(found, wanted.sum(-1), rtol=2e-3, atol=1e-5)
    np.testing.assert_allclose(of_tokens, wanted, rtol=2e-3, atol=1e-5)
    assert np.abs(wanted).max() > 0.01


def test_steps_that_are_not_smooth_are_refused():
    assert "0.93: scores predict training" in _checked_smoothness(0.93, 0.5)
    assert "0.51: scores predict in part" in _checked_smoothness(0.51, 0.5)
    assert _checked_smoothness(-0.2, -1)
    with pytest.raises(ConfigError, match="metasmoothness 0.49 of .* is below 0.5"):
        _checked_smoothness(0.49, 0.5)
    with pytest.raises(ConfigError, match="The replay has no scores: .* not finite"):
        _checked_smoothness(float("nan"), -1)


def test_microbatches_are_those_of_the_run_or_a_divisor_of_the_batch(tmp_path):
    config = tiny_config(tmp_path, "--trainer.update.microbatches", "2")
    for count, expected in ((None, 2), (4, 4), (1, 1)):
        found = _in_microbatches(config, count)
        assert found.trainer.update.microbatches == expected
    with pytest.raises(
        ConfigError, match="--microbatches 3 does not divide data.batch"
    ):
        _in_microbatches(config, 3)


def test_what_has_no_derivatives_is_refused_by_the_config(tmp_path):
    assert _checked(tiny_config(tmp_path)).model.attention.backend == "exact"
    for options, message in (
        (
            ("--optimizer.type", "lion"),
            "optimizer.type: lion can't be replayed: its updates are signs",
        ),
        (
            ("--trainer.update", "{fused: true}"),
            "trainer.update.fused can't be replayed: its steps have no",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            _checked(tiny_config(tmp_path, *options))


@pytest.mark.deep
def test_scores_of_a_small_step_are_the_dot_products_times_the_rate(workplace, capsys):
    (workplace / "other.txt").write_text("abdc" * 40)
    other = ("--data.sources.other", OTHER.format(workplace))
    parts = ("--trainer.update.microbatches", "2", *other)
    assert (
        train(
            workplace, *SGD, *SCORED, *CHECKPOINTS, *parts, "--trainer.num_steps", "4"
        )
        == 0
    )
    run = workplace / "run"
    assert main(["--run_dir", str(run), "--from_step", "2"]) == 0
    shown = capsys.readouterr().out
    assert "metasmoothness 0.9" in shown or "metasmoothness 1.0" in shown
    assert "replayed steps 3 to 4" in shown
    rows = read_scores(run / "replay", ["text", "place"]).to_pylist()
    assert all(is_place_of(row["place"], row["text"]) for row in rows)
    for step in (3, 4):
        replayed, dotted = (
            scores_of(run / "replay", step),
            scores_of(run / "ghost", step),
        )
        assert replayed.keys() == dotted.keys()
        for example, score in replayed.items():
            np.testing.assert_allclose(score, RATE * dotted[example], rtol=0.02)
    assert not scores_of(run / "replay", 2)
    # Another one, from the checkpoint before the latest, does not lose these.
    more = ("--batches", "2", "--microbatches", "4")
    assert main(["--run_dir", str(run), *more]) == 1
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "has the scores of another replay. Name another folder with" in shown
    assert scores_of(run / "replay", 3)
    later = run / "later"
    assert main(["--run_dir", str(run), *more, "--log_dir", str(later)]) == 0
    assert scores_of(later, 4) and not scores_of(later, 3)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert (
        f"held-out loss {last['held_out/other_loss']:.4f} after them"
        in capsys.readouterr().out
    )
    for given, message in (
        (("--batches", "0"), "--batches must be at least 1, got 0."),
        (("--run_dir", str(run / "none")), "does not exist: --run_dir names a run"),
    ):
        assert main(["--run_dir", str(run), *given]) == 1
        assert message in capsys.readouterr().out.replace("\n", " ")
    assert main(["--run_dir", str(run), "--from_step", "1"]) == 1
    assert (
        "has checkpoints of the steps 2, 3, 4; a replay goes from"
        in capsys.readouterr().out.replace("\n", " ")
    )


@pytest.mark.deep
def test_a_run_without_derivatives_is_refused(workplace, capsys):
    fused = ("--trainer.update.fused", "true", *SGD)
    assert train(workplace, *fused, *CHECKPOINTS, "--trainer.num_steps", "2") == 0
    assert main(["--run_dir", str(workplace / "run")]) == 1
    assert (
        "A run with trainer.update.fused can't be replayed" in capsys.readouterr().out
    )


@pytest.mark.deep
def test_a_skipped_step_is_refused(workplace, capsys):
    skipping = (
        "--trainer.update.on_nonfinite",
        "skip",
        *SGD,
        "--optimizer.learning_rate",
        "1e37",
    )
    assert train(workplace, *skipping, *CHECKPOINTS, "--trainer.num_steps", "3") == 0
    capsys.readouterr()
    assert main(["--run_dir", str(workplace / "run"), "--from_step", "1"]) == 1
    assert "The replay has no scores: " in capsys.readouterr().out
    assert not list((workplace / "run" / "replay").glob("*"))
